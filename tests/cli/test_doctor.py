"""`edgemoe doctor`: on this install, and on installs broken in the ways that people break them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edgemoe.doctor import diagnose, install, selftest
from edgemoe.doctor.abilities import KNOWN_MODELS, OVERHEAD, abilities, largest_model
from edgemoe.doctor.check import Check
from edgemoe.doctor.hardware import check_disk, check_gpus, check_offload, check_ram
from edgemoe.errors import UserError
from edgemoe.llamacpp.libraries import llama
from edgemoe.machine.gpus import Gpu
from edgemoe.machine.memory import Ram
from edgemoe.tracing.tracefile import Trace, load_trace

GB = 10**9
OK = Check("packages", "ok", "")


def doctor(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "edgemoe.cli", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **environment})


def test_this_install_is_sound(tmp_path: Path) -> None:
    result = doctor("--dir", tmp_path)
    assert result.returncode == 0 and result.stderr == "", result.stdout
    lines = result.stdout.splitlines()
    checks = [line.split()[:2] for line in lines[: lines.index("")] if not line.startswith(" ")]
    assert {status for status, _ in checks} <= {"ok", "warn"}
    named = {name for _, name in checks}
    assert {"Python", "packages", "llama-cpp-python", "llama.cpp", "self-test", "RAM", "disk", "O_DIRECT"} <= named
    assert any(line.startswith("yes   trace") for line in lines)
    assert any(line.startswith("yes   models in RAM") for line in lines)
    assert "\x1b" not in result.stdout


def test_json_is_one_object(tmp_path: Path) -> None:
    result = doctor("--json", "--dir", tmp_path)
    report = json.loads(result.stdout)
    assert result.returncode == 0 and result.stderr == "" and result.stdout.count("\n") == 1
    assert report["healthy"] is True
    assert all(set(check) == {"name", "status", "found", "fix"} for check in report["checks"])
    assert all(set(ability) == {"name", "able", "detail"} for ability in report["abilities"])


def test_without_llama_cpp_it_still_answers_and_exits_1(tmp_path: Path) -> None:
    result = doctor("--json", "--dir", tmp_path, LLAMA_CPP_LIB_PATH=str(tmp_path))
    report = json.loads(result.stdout)
    assert result.returncode == 1 and not report["healthy"] and result.stderr == ""
    broken = {check["name"]: check for check in report["checks"] if check["status"] == "fix"}
    assert set(broken) == {"llama.cpp", "self-test"} and str(tmp_path) in broken["llama.cpp"]["found"]
    assert "pip install --force-reinstall" in broken["llama.cpp"]["fix"]
    able = {ability["name"]: ability["able"] for ability in report["abilities"]}
    assert able["stats, simulate"] and not able["trace"] and not able["info"] and not able["demo"]


def test_a_directory_that_is_none_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = doctor("--dir", tmp_path / "none")
    assert (result.returncode, result.stdout) == (2, "") and "no such directory" in result.stderr
    assert result.stderr.count("\n") == 1


def test_versions_that_do_not_fit_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "version_of", lambda name: {"numpy": "1.20.0", "numba": None}.get(name, "99.0"))
    check = install.check_packages()
    assert check.status == "fix" and "numpy>=1.26 (found 1.20.0)" in check.found and "numba" in check.found
    assert "'numpy>=1.26'" in check.fix and "'rich>" not in check.fix
    llama = install.check_llama_version()
    assert llama.status == "fix" and llama.fix == f"pip install {install.llama_requirement()}"


def test_requirements_are_those_of_the_package() -> None:
    wanted = install.requirements()
    assert wanted["numpy"] == "numpy>=1.26" and wanted["llama-cpp-python"].startswith("llama-cpp-python==")
    assert "torch" not in wanted and "pytest" not in wanted


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashes (signal 11)"),
        ("print('experts are not the top-k'); raise SystemExit(1)", "experts are not the top-k"),
        ("raise ImportError('no numba')", "ImportError: no numba"),
    ],
)
def test_a_self_test_that_fails_says_how(monkeypatch: pytest.MonkeyPatch, code: str, found: str) -> None:
    monkeypatch.setattr(install, "SELFTEST", (sys.executable, "-c", code))
    check = install.check_tracing()
    assert check.status == "fix" and found in check.found and "llama-cpp-python" in check.fix


def test_a_crash_on_a_processor_with_amx_is_answered_without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "SELFTEST", (sys.executable, "-c", "import os; os.kill(os.getpid(), 4)"))
    monkeypatch.setattr(install, "_has_amx", lambda: True)
    check = install.check_tracing()
    assert "crashes (signal 4)" in check.found and check.fix.startswith("CFLAGS=-mno-amx-int8 CXXFLAGS=-mno-amx-int8 ")
    monkeypatch.setattr(install, "_has_amx", lambda: False)
    assert install.check_tracing().fix.startswith("pip install")


def test_the_self_test_notices_a_wrong_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    selftest.selftest()

    def one_swapped(path: Path) -> Trace:
        trace = load_trace(path)
        trace.experts[-1, -1, [0, 1]] = trace.experts[-1, -1, [1, 0]]
        return trace

    monkeypatch.setattr(selftest, "load_trace", one_swapped)
    with pytest.raises(UserError, match="in 1 of 288 rows"):
        selftest.selftest()


def test_the_self_test_notices_a_wrong_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        selftest, "load_trace", lambda path: replace(load_trace(path), layers=load_trace(path).layers + 1)
    )
    with pytest.raises(UserError, match="has layers"):
        selftest.selftest()


def test_a_gpu_that_nothing_uses_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama(), "llama_supports_gpu_offload", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = Gpu("RTX 4090", 24 * GB, 23 * GB)
    offload = check_offload([gpu], OK)
    assert offload.status == "warn" and "GGML_CUDA=on" in offload.fix
    assert check_offload([], OK).status == "ok"
    found = check_gpus([gpu])
    assert found[0].found == "RTX 4090, 23.0 GB of 24.0 GB VRAM free"
    assert found[1].name == "torch" and found[1].status == "warn" and "does not see the GPU" in found[1].found


def test_little_memory_and_little_disk_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_ram(Ram(8 * GB, GB, limited=True)).status == "warn"
    assert "container" in check_ram(Ram(8 * GB, 4 * GB, limited=True)).found
    assert check_ram(Ram(8 * GB, 4 * GB, limited=False)).status == "ok"
    usage = type("Usage", (), {"total": 100 * GB, "used": 99 * GB, "free": GB})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert check_disk(tmp_path).status == "warn"


def test_what_fits_follows_from_the_bytes() -> None:
    assert largest_model(OVERHEAD + 17 * GB, 8.5) == pytest.approx(16.0)
    assert largest_model(GB, 8.5) == 0
    assert list(KNOWN_MODELS.values()) == sorted(KNOWN_MODELS.values())
    gpu = Gpu("H200", 140 * GB, 130 * GB)
    found = {a.name: a for a in abilities(OK, OK, OK, Ram(64 * GB, 30 * GB, False), [gpu])}
    assert "47 B parameters in 4 bits" in found["models in RAM"].detail
    assert found["models in RAM"].detail.endswith("Mixtral-8x7B fits")
    assert found["models in VRAM (H200)"].able
    assert not {a.name: a for a in abilities(OK, OK, OK, Ram(GB, GB, False), [])}["models in RAM"].able


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    assert diagnose(tmp_path).healthy
    assert list(tmp_path.iterdir()) == []
