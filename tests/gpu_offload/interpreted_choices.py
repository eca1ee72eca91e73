"""Options that vary, on the device's executor in Triton's interpreter: run as a program, since Triton asks for the
interpreter once, when it is imported.

The interpreter has no graphs. What stands for one here launches when it is called, and says when it is made and freed.
Prints one JSON object: the texts by options, first and when asked again, and what happened to graphs and samplers.
"""

import json
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from edgemoe.generation.options import Options
from edgemoe.gpu_offload import device
from edgemoe.gpu_offload.device import DeviceExecutor
from edgemoe.gpu_offload.kernels.sampling import DeviceSampler
from edgemoe.gpu_offload.program import Cut, Tuning
from edgemoe.gpu_offload.shape import read_shape
from edgemoe.gpu_offload.weights import load_weights
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset

CUT = Cut(rows=64, columns=32, warps=4)
TUNING = Tuning(CUT, CUT, CUT, CUT, CUT, CUT, splits=2, positions=8)
ASKED = (0, 1, 2, 3, 0, 4, 0, 1)  # which options, in turn
happened: list[str] = []
samplers: "weakref.WeakSet[DeviceSampler]" = weakref.WeakSet()


class Graph:
    """Launches again what it was made of."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch

    def __call__(self) -> None:
        self._launch()


class Pretending(DeviceExecutor):
    """Takes the interpreter's launches for graphs."""

    def _captured(self, launch: Callable[[], None]) -> Callable[[], None]:
        graph = Graph(launch)
        happened.append("made")
        weakref.finalize(graph, happened.append, "freed")
        return graph


def kept(*arguments: Any, **more: Any) -> DeviceSampler:
    sampler = DeviceSampler(*arguments, **more)
    samplers.add(sampler)
    return sampler


def opened(folder: str) -> Pretending:
    shape = {"n_layers": 1, "n_experts": 4, "top_k": 2, "d_model": 32, "d_expert": 16, "n_vocab": 300, "n_heads": 2}
    [path] = write_synthetic(Path(folder) / "m.gguf", **shape)
    model = read_model(path)
    weights = load_weights(model, read_shape(model), dtype=torch.float32)
    cache = LogicalCache(
        preset("exact-lru"), n_layers=1, n_experts=4, top_k=2, capacity=3, delta=np.ones(1, np.float32)
    )
    return Pretending(weights, cache, n_ctx=8, chunk=2, tuning=TUNING, concurrent=False)


def main() -> None:
    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *_: happened.append("waited")  # type: ignore[assignment]
    device.DeviceSampler = kept  # type: ignore[assignment,misc]
    with tempfile.TemporaryDirectory() as folder:
        executor = opened(folder)
    executor._concurrent = True
    executor.prepare()
    begin, asked = executor.snapshot(), []
    for which in ASKED:
        executor.restore(begin)
        happened.append(f"asked {which}")
        options = Options(temperature=0.5 * which, seed=5 + which, top_k=100, top_p=1.0, min_p=0.0)
        asked.append(list(executor.extend(3, 0, 2, options, frozenset())))
    found = {"texts": asked, "samplers": len(samplers), "happened": list(happened)}
    executor.step(np.array([3]), 0)  # the token's own graph is there
    assert happened == found["happened"]
    executor.close()
    sys.stdout.write(json.dumps({**found, "closed": [happened.count("made"), happened.count("freed"), len(samplers)]}))


if __name__ == "__main__":
    main()
