"""The engine over the device's executor, in Triton's interpreter: run as a program, since Triton asks for the
interpreter once, when it is imported.

Prints one JSON object: what the same prompts give in blocks on the device, and token by token on the CPU.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from edgemoe.generation import Writer
from edgemoe.generation.summary import Meter
from edgemoe.gpu_offload import engine as engine_module
from edgemoe.gpu_offload.device import DeviceExecutor
from edgemoe.gpu_offload.engine import OffloadEngine
from edgemoe.gpu_offload.executor import Executor
from edgemoe.gpu_offload.program import Cut, Tuning
from edgemoe.gpu_offload.target import Target, find_target
from edgemoe.gpu_offload.weights import Weights
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset
from edgemoe.units import Residency

# The interpreter takes its time per block, not per element.
CUTS = {field.name: Cut(rows=64, columns=32, warps=4) for field in fields(Tuning) if isinstance(field.default, Cut)}
TUNING = Tuning(**CUTS, splits=2, positions=8)
PROMPT, GREEDY = "abcde", {"temperature": 0.0, "ignore_eos": True}


class Interpreted(Target):
    """The device's executor on the CPU: one launch after the other, and no graphs."""

    def open(self, weights: Weights, cache: LogicalCache, *, n_ctx: int, chunk: int) -> Executor:
        return DeviceExecutor(weights, cache, n_ctx=n_ctx, chunk=chunk, tuning=TUNING, concurrent=False)


def chosen(device: str, *_: object) -> Target:
    return Interpreted(torch.device("cpu"), "device", "interpreter") if device == "cuda" else find_target(device)


class Watching:
    """Keeps what an observer is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []

    def reset(self) -> None:
        self.told.clear()

    def decoded(self, tokens: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        told = {name: np.round(values, 4).tolist() for name, values in rows.items()}
        self.told.append({"tokens": tokens.tolist(), **told})


def make(path: Path, device: str, observer: Watching | None = None) -> OffloadEngine:
    return OffloadEngine(
        path,
        device=device,
        policy=preset("psr-gated", window=3),
        residency=Residency.parse("4"),
        n_ctx=24,
        chunk=8,
        n_threads=1,
        dtype="float32",
        observer=observer,
        verify_slots=True,
    )


def texts(engine: OffloadEngine) -> dict[str, object]:
    """Greedy and drawn; what the summary says; a stop string within a block, and what goes on from there."""
    writer, meter = Writer(engine), Meter(engine)
    meter.begin()
    steps = []
    for step in writer.stream(PROMPT, n=6, **GREEDY):
        meter.step(step)
        steps.append(step)
    summary = meter.summary(seed=0, prompt_tokens=5, reused_tokens=0).as_json()
    drawn = writer.write(PROMPT, n=4, seed=3, ignore_eos=True)
    words = [step.text for step in steps]
    # The last character that the text ends with for the first time: not one that stopped it earlier.
    stop = next(word for word in words[2:] if word and word not in "".join(words[:2]))
    stopped = list(writer.stream(PROMPT, n=6, stop=(stop,), **GREEDY))
    return {
        "block": engine.block,
        "greedy": [step.token for step in steps],
        "drawn": drawn,
        "stopped": [step.token for step in stopped],
        "held": [engine.position, len(writer.context.tokens)],
        "next": engine.decode(stopped[-1].token).tolist()[:8],
        "shares": sorted(summary["seconds_per_token"]),
        "unknown": [summary["decode_phase"][name] for name in ("compute_s", "demand_wait_s", "policy_s")],
        "counted": [summary["decode_phase"][name] for name in ("tokens", "loads")],
    }


def main() -> None:
    torch.set_num_threads(1)
    engine_module.find_target, engine_module.BLOCK = chosen, 4
    shape = {"n_layers": 2, "n_experts": 8, "top_k": 2, "d_model": 32, "d_expert": 16, "n_vocab": 300, "n_heads": 2}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        [path] = write_synthetic(Path(folder) / "m.gguf", **shape)
        for device in ("cuda", "cpu"):
            with make(path, device) as engine:
                found[device] = texts(engine)
            watching = Watching()
            with make(path, device, watching) as engine:
                assert engine.block == 1, "who is told of every token gets them one by one"
                Writer(engine).write("abc", n=3, **GREEDY)
            found[device]["told"] = watching.told
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
