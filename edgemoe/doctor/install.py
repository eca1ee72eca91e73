"""Is edgemoe installed so that it works: Python, packages, llama.cpp, and tracing itself."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from edgemoe.doctor.check import Check, first_line
from edgemoe.errors import UserError

SELFTEST = (sys.executable, "-m", "edgemoe.doctor.selftest")
SELFTEST_LIMIT_S = 300  # the first run compiles the callback
OLDEST_PYTHON = (3, 10)
# Instruction sets worth telling: a build without them is several times slower.
_FAST = ("AVX512", "AVX2", "SVE", "NEON")


def requirements() -> dict[str, str]:
    """What this edgemoe needs, by package, as its metadata says: `{"numpy": "numpy>=1.26", …}`, extras left out.

    Raises `PackageNotFoundError` where edgemoe runs without being installed.
    """
    found = {}
    for line in metadata.requires("edgemoe") or []:
        requirement, _, marker = line.partition(";")
        if "extra" not in marker:
            text = requirement.strip().replace(" ", "")
            found[text[: min((text.find(c) for c in "=<>!~[" if c in text), default=len(text))]] = text
    return found


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Check("Python", "fix", f"{version}, expected 3.10 or newer", "make the environment with a newer python3")
    return Check("Python", "ok", f"{version} in {sys.prefix}")


def check_packages() -> Check:
    """Every required package is there, in a version that fits."""
    try:
        wanted = requirements()
    except metadata.PackageNotFoundError:
        return Check("packages", "fix", "edgemoe itself is not installed", "pip install -e .")
    wrong = {name: text for name, text in wanted.items() if not _satisfied(name, text)}
    if wrong:
        found = ", ".join(f"{text} (found {version_of(name) or 'none'})" for name, text in wrong.items())
        return Check(
            "packages", "fix", f"expected {found}", "pip install " + " ".join(f"'{t}'" for t in wrong.values())
        )
    return Check("packages", "ok", f"edgemoe {version_of('edgemoe')} and the {len(wanted)} packages it needs")


def _satisfied(name: str, requirement: str) -> bool:
    version = version_of(name)
    if version is None:
        return False
    try:
        from packaging.requirements import Requirement
    except ImportError:  # comes with matplotlib, whose own absence is reported
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def llama_requirement() -> str:
    """`llama-cpp-python==…`, as this edgemoe was verified with."""
    try:
        return requirements()["llama-cpp-python"]
    except (metadata.PackageNotFoundError, KeyError):
        return "llama-cpp-python"


def _reinstall() -> str:
    """The command, without AMX where the processor has it: GCC 12 compiles llama.cpp's AMX kernels wrongly."""
    flags = "CFLAGS=-mno-amx-int8 CXXFLAGS=-mno-amx-int8 " if _has_amx() else ""
    return f"{flags}pip install --force-reinstall --no-cache-dir {llama_requirement()}"


def _has_amx() -> bool:
    try:
        return " amx_int8 " in Path("/proc/cpuinfo").read_text(encoding="utf-8").replace("\n", " ")
    except OSError:
        return False


def check_llama_version() -> Check:
    requirement, version = llama_requirement(), version_of("llama-cpp-python")
    verified = requirement.partition("==")[2]
    if version is None:
        return Check("llama-cpp-python", "fix", "not installed", f"pip install {requirement}")
    if verified and version != verified:
        found = f"{version}, but tracing is verified with {verified}"
        return Check("llama-cpp-python", "fix", found, f"pip install {requirement}")
    return Check("llama-cpp-python", "ok", f"{version}, the version that tracing is verified with")


def check_library() -> Check:
    """libllama loads and answers."""
    from edgemoe.llamacpp.libraries import library_file, llama

    try:
        features = llama().llama_print_system_info().decode(errors="replace")
        place = library_file("llama")
    except UserError as error:
        return Check("llama.cpp", "fix", str(error), _reinstall())
    except Exception as error:  # a half-installed wheel fails in ways of its own
        return Check("llama.cpp", "fix", f"fails to load ({type(error).__name__}: {first_line(error)})", _reinstall())
    used = {part.split("=")[0].split(":")[-1].strip() for part in features.split("|") if part.strip().endswith("= 1")}
    fast = next((name for name in _FAST if name in used), "no vector instructions")
    return Check("llama.cpp", "ok", f"{place.name} loads, compiled for {fast}")


def check_tracing() -> Check:
    """Trace tiny models in a process of its own (`edgemoe.doctor.selftest`): a crash there is an answer too."""
    try:
        result = subprocess.run(SELFTEST, capture_output=True, text=True, timeout=SELFTEST_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Check("self-test", "fix", f"a tiny model was not traced within {SELFTEST_LIMIT_S} s", _reinstall())
    if result.returncode == 0:
        return Check("self-test", "ok", "struct layout as expected; tiny models traced, experts match their scores")
    if result.returncode < 0:
        return Check("self-test", "fix", f"tracing a tiny model crashes (signal {-result.returncode})", _reinstall())
    said = (result.stdout or result.stderr).strip().splitlines() or ["no reason given"]
    return Check("self-test", "fix", said[-1], _reinstall())
