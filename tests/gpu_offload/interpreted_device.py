"""The device's executor in Triton's interpreter, beside the CPU's: run as a program, since Triton asks for the
interpreter once, when it is imported.

Prints one JSON object: for each case, what differed.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from launches import record

from edgemoe.generation.options import Options
from edgemoe.gpu_offload import program, records
from edgemoe.gpu_offload.cpu import CpuExecutor
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.device import DeviceExecutor
from edgemoe.gpu_offload.kernels import copying
from edgemoe.gpu_offload.program import Cut, Tuning
from edgemoe.gpu_offload.shape import read_shape
from edgemoe.gpu_offload.weights import Weights, load_weights
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset

CAPACITY, N_CTX, LAST = 4, 32, 0x7FFFFF
copying.PATIENCE = tl.constexpr(100)  # nothing waits for long where one launch follows the other
# Cut small, so that an expert is several chunks.
program.TILE_WORDS = records.TILE_WORDS = 256
records.CHUNK_BYTES = 2048


SMALL = Cut(rows=8, columns=16, warps=4)
TUNING = Tuning(SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, splits=2, positions=4)


def cache(weights: Weights, name: str) -> LogicalCache:
    shape = weights.shape
    return LogicalCache(
        preset(name, **({"window": 3} if preset(name).window else {})),
        n_layers=shape.n_layers,
        n_experts=shape.n_experts,
        top_k=shape.top_k,
        capacity=CAPACITY,
        delta=np.ones(shape.n_layers, np.float32),
    )


def compare(weights: Weights, name: str, drain: int) -> dict[str, object]:
    """A prompt, three tokens, another prompt, a step back and text; `drain`: chunks that arrive after each decision."""
    host = CpuExecutor(weights, Decisions(cache(weights, name), 8, None), n_ctx=N_CTX)
    device = DeviceExecutor(
        weights, cache(weights, name), n_ctx=N_CTX, chunk=8,
        tuning=TUNING, concurrent=False,
    )  # fmt: skip
    device._program.drain = drain
    tokens = np.random.default_rng(0).integers(0, weights.shape.n_vocab, 12)
    worst, wrong = 0.0, []

    def both(first: int, last: int) -> None:
        nonlocal worst
        part = tokens[first:last]
        a, b = (one.step(part, first, all_rows=True) for one in (host, device))
        worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
        mine, its = host.record(len(part)), device.record(len(part))
        for name in ("executed", "counts"):
            if not np.array_equal(mine[name], its[name]):
                wrong.append(f"{name} at {first}")
        if not np.array_equal(host.slot_of() >= 0, device.slot_of() >= 0):
            wrong.append(f"residents at {first}")
        device.verify()

    both(0, 5)
    for at in range(5, 8):
        both(at, at + 1)
    kept = host.snapshot(), device.snapshot()
    both(8, 11)
    host.restore(kept[0])
    device.restore(kept[1])
    both(8, 9)
    greedy = Options(temperature=0.0)
    texts = [list(one.extend(int(tokens[9]), 9, 3, greedy, frozenset())) for one in (host, device)]
    if texts[0] != texts[1]:
        wrong.append(f"text {texts}")
    for one in (host, device):
        one.reset()
    both(0, 1)
    totals = [(c.loads, c.misses, c.prefetch + c.demand - c.unused) for c in (host.counters, device.counters)]
    if drain > 1 and totals[0] != totals[1]:
        wrong.append(f"totals {totals}")
    c = device.counters
    if c.in_time + c.late + c.unused != c.prefetch:
        wrong.append(f"prefetches {c}")
    return {"worst": worst, "wrong": wrong, "late": device.counters.late}


def numbered(weights: Weights, number: int) -> dict[str, list[object]]:
    """What the tokens after the one with this number leave behind, some of whose copies are late."""
    device = DeviceExecutor(
        weights, cache(weights, "psr-gated"), n_ctx=N_CTX, chunk=8,
        tuning=TUNING, concurrent=False,
    )  # fmt: skip
    device._program.drain = 1
    queue = device.records.queue
    queue[copying.NUMBER.value] = number
    kept: dict[str, list[object]] = {"numbers": [], "tokens": []}
    for at, token in enumerate((7, 70, 17)):
        if at == 2:
            device.reset()  # the records start anew, numbers do not
        logits = device.step(np.array([token]), at % 2)
        kept["numbers"].append(int(queue[copying.NUMBER.value]))
        told = {name: values.tolist() for name, values in device.record(1).items()}
        kept["tokens"].append([logits.tolist(), told, device.slot_of().tolist(), device.records.counts()])
        device.verify()
    return kept


def wrapped(weights: Weights) -> dict[str, object]:
    """Tokens whose numbers begin anew at 2²³, and the same ones with others."""
    after, before = numbered(weights, 0), numbered(weights, LAST - 1)
    same = [a == b for a, b in zip(after["tokens"], before["tokens"], strict=True)]
    return {"numbers": [after["numbers"], before["numbers"]], "same": same}


def main() -> None:
    record(Path(sys.argv[1]))
    torch.set_num_threads(1)
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        [path] = write_synthetic(
            Path(folder) / "m.gguf",
            **{"n_layers": 2, "n_experts": 8, "top_k": 2, "d_model": 32, "d_expert": 16, "n_vocab": 300, "n_heads": 2},
        )
        model = read_model(path)
        weights = load_weights(model, read_shape(model), dtype=torch.float32)
    for name, drain in (("exact-lru", 1 << 20), ("psr", 1 << 20), ("psr-gated", 1)):
        cases[f"{name}/{drain}"] = compare(weights, name, drain)
    sys.stdout.write(json.dumps({"cases": cases, "wrapped": wrapped(weights)}))


if __name__ == "__main__":
    main()
