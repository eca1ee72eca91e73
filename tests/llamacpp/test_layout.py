"""The self-test of the struct layout passes on this build, and would fail on another."""

import ctypes
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from edgemoe.errors import UserError
from edgemoe.llamacpp import layout


def test_this_build_is_laid_out_as_expected() -> None:
    assert layout.layout_mismatches() == []
    layout.verify_layout()


@pytest.mark.parametrize("moved", ["buffer", "ne", "nb", "op", "src", "view_src", "data", "name"])
def test_a_moved_field_is_noticed(moved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: list[Any] = []
    for field in layout.Tensor._fields_:
        if field[0] == moved:
            fields.append(("inserted", ctypes.c_uint64))
        fields.append(field)

    class Moved(ctypes.Structure):
        _fields_: ClassVar = fields

    monkeypatch.setattr(layout, "Tensor", Moved)
    assert layout.layout_mismatches()
    layout.verify_layout.cache_clear()
    with pytest.raises(UserError, match="lays tensors out differently"):
        layout.verify_layout()
    layout.verify_layout.cache_clear()


def test_one_ggml_per_process() -> None:
    """The wheel holds copies, not links: whichever is loaded first, llama.cpp must find it and not load another."""
    script = """
from edgemoe.llamacpp.libraries import ggml_base, llama
ggml_base(); llama(); ggml_base()
print(len({line.split()[-1] for line in open("/proc/self/maps") if "ggml-base" in line}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
