"""The engine over the device's executor, in Triton's interpreter: run as a program, since Triton asks for the
interpreter once, when it is imported.

Prints one JSON object: what the same prompts give in blocks on the device, and token by token on the CPU.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

from edgemoe.generation import Writer
from edgemoe.generation.summary import Meter
from edgemoe.gpu_offload import engine as engine_module
from edgemoe.gpu_offload.device import DeviceExecutor
from edgemoe.gpu_offload.engine import OffloadEngine
from edgemoe.gpu_offload.executor import Executor
from edgemoe.gpu_offload.program import Tuning
from edgemoe.gpu_offload.target import Target, find_target
from edgemoe.gpu_offload.weights import Weights
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset
from edgemoe.units import Residency

PROMPT, GREEDY = "abcde", {"temperature": 0.0, "ignore_eos": True}


class Interpreted(Target):
    """The device's executor on the CPU: one launch after the other, and no graphs."""

    def open(self, weights: Weights, cache: LogicalCache, *, n_ctx: int, chunk: int) -> Executor:
        return DeviceExecutor(weights, cache, n_ctx=n_ctx, chunk=chunk, tuning=Tuning(splits=2), concurrent=False)


def chosen(device: str, *_: object) -> Target:
    return Interpreted(torch.device("cpu"), "device", "interpreter") if device == "cuda" else find_target(device)


def make(path: Path, device: str) -> OffloadEngine:
    return OffloadEngine(
        path,
        device=device,
        policy=preset("psr-gated", window=3),
        residency=Residency.parse("4"),
        n_ctx=24,
        chunk=8,
        n_threads=1,
        dtype="float32",
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
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
