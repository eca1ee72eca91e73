"""The teacher-forced device executor in Triton's interpreter: run as a program, since Triton asks for the interpreter
once, when it is imported. Prints one JSON object: whether each window's decisions are the host's."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from gpu_subjects import tiny_subject

from edgemoe.bench.gpu.clocks import Shared
from edgemoe.bench.gpu.enqueued import ForcedDevice
from edgemoe.bench.gpu.replay import decide
from edgemoe.gpu_offload import program, records
from edgemoe.gpu_offload.program import Cut, Tuning
from edgemoe.policy import preset

program.TILE_WORDS = records.TILE_WORDS = 256
records.CHUNK_BYTES = 2048


def main() -> None:
    torch.set_num_threads(1)
    subject = tiny_subject()
    shared, policy = Shared(subject), preset("psr", window=3)
    small = Cut(rows=8, columns=16, warps=4)
    executor = ForcedDevice(
        subject.weights, subject.cache(policy, 4), n_ctx=32, chunk=8, recorded=shared.buffer, concurrent=False,
        tuning=Tuning(small, small, small, small, small, small, splits=2, positions=4),
    )  # fmt: skip
    found = []
    for number, tokens in enumerate(subject.windows):
        shared.show(number)
        executor.reset()
        before = executor.counters.demand + executor.counters.prefetch
        seconds = executor.forced(tokens[:4], 0)
        host = decide(subject.cache(policy, 4), subject.recording.windows[number].first(4), tokens[:4])
        moved = executor.counters.demand + executor.counters.prefetch - before
        found.append(
            {
                "residents": bool(np.array_equal(executor.slot_of() >= 0, host.resident)),
                "executed": bool(np.array_equal(executor.record(1)["executed"][:, 0], host.executed[:, -1])),
                "copies": [moved, host.demand + host.prefetch],
                "timed": bool((seconds > 0).all()) and len(seconds) == 4,
            }
        )
        executor.verify()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
