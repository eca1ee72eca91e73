"""Spins on the device that give up, in Triton's interpreter: run as a program, since Triton asks for the interpreter
once, when it is imported.

Two engines take the same tokens. In one, spins give up before a call that succeeds. Prints one JSON object: for each
case, what was said, and what differed afterwards from the engine that nothing happened to.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from interpreted_engine import chosen, make

from edgemoe.errors import UserError
from edgemoe.generation.options import Options
from edgemoe.gpu_offload import engine as engine_module
from edgemoe.gpu_offload.engine import OffloadEngine
from edgemoe.gpu_offload.kernels import copying
from edgemoe.model.synthetic import write_synthetic

KINDS = ("CANCELLED_COPY", "EXPERT", "DECISION", "TURN")
PROMPT, COUNT = [3, 1, 4], 2
Upset = Callable[[OffloadEngine], None]


def mark(engine: OffloadEngine, bit: int) -> None:
    """What a spin says that gives up. No token takes it back: the host has not looked yet."""
    engine.executor.records.queue[copying.ERROR.value] |= bit


def lose(engine: OffloadEngine) -> None:
    """The last chunk of every expert that is there is on its way, and never arrives."""
    records = engine.executor.records
    current = 2 * torch.arange(len(records.current)) + records.current
    records.claims[current] = records.chunks
    records.done[current] = records.chunks - 1
    records.slots.bytes[..., -16:] = 0


def overwrite(engine: OffloadEngine) -> None:
    """A copy that was cancelled lands on the one that did not wait for it any longer: all records say it is whole."""
    mark(engine, copying.CANCELLED_COPY.value)
    engine.executor.records.slots.bytes[..., -16:] = 0


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


CALLS: dict[str, Callable[[OffloadEngine], Any]] = {
    "step": lambda engine: engine.decode(5),
    "text": lambda engine: np.array(engine.extend(9, COUNT, Options(temperature=0.0, ignore_eos=True))),
}


def compare(disturbed: OffloadEngine, other: OffloadEngine, upsets: dict[str, Upset], *calls: str) -> dict[str, Any]:
    """Each of the calls, upset in each way: it fails. Then the last call, in peace."""
    said, wrong = {}, []
    for kind, upset in upsets.items():
        for name in calls:
            upset(disturbed)
            said[f"{kind} in a {name}"] = refused(lambda name=name: CALLS[name](disturbed))
            if disturbed.position != other.position:
                wrong.append(f"position after {kind} in a {name}")
    found, expected = (CALLS[name](engine) for engine in (disturbed, other))
    if found.tobytes() != expected.tobytes():
        wrong.append(f"{name}: {found[:4]}, not {expected[:4]}")
    residents = [engine.executor.slot_of() >= 0 for engine in (disturbed, other)]
    if not np.array_equal(*residents):
        wrong.append(f"residents after a {name}")
    return {"said": said, "wrong": wrong}


def main() -> None:
    torch.set_num_threads(1)
    engine_module.find_target, copying.PATIENCE = chosen, tl.constexpr(20)
    shape = {"n_layers": 2, "n_experts": 8, "top_k": 2, "d_model": 32, "d_expert": 16, "n_vocab": 300, "n_heads": 1}
    marks = {kind: partial(mark, bit=getattr(copying, kind).value) for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        [path] = write_synthetic(Path(folder) / "m.gguf", **shape)
        with make(path, "cuda") as disturbed, make(path, "cuda") as other:
            for engine in (disturbed, other):
                engine.prefill(PROMPT)
            found = [
                compare(disturbed, other, {"lost": lose}, "step"),
                compare(disturbed, other, {"lost": lose}, "text"),
                compare(disturbed, other, {"overwritten": overwrite}, "step"),
                compare(disturbed, other, {"overwritten": overwrite}, "text"),
                compare(disturbed, other, marks, "text", "step"),
            ]
    said = {name: words for part in found for name, words in part["said"].items()}
    sys.stdout.write(json.dumps({"said": said, "wrong": [wrong for part in found for wrong in part["wrong"]]}))


if __name__ == "__main__":
    main()
