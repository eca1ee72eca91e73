"""Dependencies point inward (design: cli → everything; tracing, gpu_offload, streaming → policy, model, llamacpp).

Read from the sources, not by importing: an import inside a function counts like any other.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "edgemoe": ROOT / "edgemoe",
    "edgemoe.tracing": ROOT / "tracing",
    "edgemoe.gpu_offload": ROOT / "gpu_offload",
}

# Modules of edgemoe itself that anything may use: they know nothing of experts.
COMMON = {"edgemoe", "edgemoe.__version__", "edgemoe.errors", "edgemoe.files", "edgemoe.progress", "edgemoe.units"}

# area → the areas that it may import
INWARD = {
    "edgemoe.policy": set(),
    # A model file is read with libggml's own header parser, which lives with the other ggml structs.
    "edgemoe.model": {"edgemoe.llamacpp"},
    # An engine is what generation asks for.
    "edgemoe.llamacpp": {"edgemoe.policy", "edgemoe.generation"},
    # Probing what an expert on the CPU gets means running ggml's products.
    "edgemoe.machine": {"edgemoe.llamacpp"},
    # The wall asks traces what a cache catches, and runs llama.cpp to check itself.
    "edgemoe.wall": {
        "edgemoe.policy",
        "edgemoe.model",
        "edgemoe.llamacpp",
        "edgemoe.machine",
        "edgemoe.tracing",
    },
    "edgemoe.training": {"edgemoe.model", "edgemoe.policy", "edgemoe.data"},
    "edgemoe.data": set(),
    # The file only: estimating it takes a trace, and lives with the tracer.
    "edgemoe.calibration": {"edgemoe.model", "edgemoe.llamacpp"},
    "edgemoe.tracing": {"edgemoe.policy", "edgemoe.model", "edgemoe.llamacpp", "edgemoe.calibration"},
    # Both tiers read calibrations, and the placement plans that the wall writes.
    "edgemoe.streaming": {
        "edgemoe.policy",
        "edgemoe.model",
        "edgemoe.llamacpp",
        "edgemoe.machine",
        "edgemoe.calibration",
        "edgemoe.generation",
        "edgemoe.wall",
    },
    "edgemoe.gpu_offload": {
        "edgemoe.policy",
        "edgemoe.calibration",
        "edgemoe.model",
        "edgemoe.llamacpp",
        "edgemoe.machine",
        "edgemoe.tracing",
        "edgemoe.wall",
        "edgemoe.generation",
    },
    "edgemoe.stats": set(),
    # Quality is measured on every tier; the files and tests of significance know none of them.
    "edgemoe.evaluation": {
        "edgemoe.policy",
        "edgemoe.calibration",
        "edgemoe.model",
        "edgemoe.llamacpp",
        "edgemoe.tracing",
        "edgemoe.generation",
        "edgemoe.streaming",
        "edgemoe.gpu_offload",
        "edgemoe.stats",
        "edgemoe.data",
    },
}
STANDARD = set(sys.stdlib_module_names)


def sources():
    """(module name, path) of every source file of the package."""
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *parts]).removesuffix(".__init__"), path


def imported(path, tree=None):
    """Modules that a file names in imports, absolute; `from a import b` counts as a.b as well as a."""
    for node in ast.walk(tree or ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def area_of(module):
    return ".".join(module.split(".")[:2])


FILES = list(sources())


def test_the_sources_were_found():
    assert {"edgemoe.policy.algorithm1", "edgemoe.tracing.tracefile"} <= {module for module, _ in FILES}


@pytest.mark.parametrize(("module", "path"), [(m, p) for m, p in FILES if area_of(m) == "edgemoe.policy"])
def test_policy_imports_numpy_and_numba_only(module, path):
    for name in imported(path):
        root = name.split(".")[0]
        allowed = root in STANDARD or root in {"numpy", "numba"}
        inside = ("edgemoe.policy", "edgemoe.errors", "edgemoe.files")
        assert allowed or name.startswith(inside), f"{module} imports {name}"


@pytest.mark.parametrize(("module", "path"), FILES)
def test_dependencies_point_inward(module, path):
    area = area_of(module)
    if area not in INWARD:
        return
    for name in imported(path):
        target = area_of(name)
        if name.split(".")[0] != "edgemoe" or target == area or target in COMMON:
            continue
        assert target in INWARD[area], f"{module} ({area}) must not import {name}"


@pytest.mark.parametrize(("module", "path"), [(m, p) for m, p in FILES if area_of(m) == "edgemoe.cli"])
def test_commands_import_nothing_heavy_at_the_top(module, path):
    light = STANDARD | {"typer"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for name in imported(path, ast.Module(body=top, type_ignores=[])):
        inside = name.startswith(("edgemoe.cli", "edgemoe.errors", "edgemoe.__version__")) or name == "edgemoe"
        assert name.split(".")[0] in light or inside, f"{module} imports {name} at the top: do it inside the command"
