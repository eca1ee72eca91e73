"""The kernels of executed experts in Triton's interpreter, beside torch: run as a program, since Triton asks for the
interpreter once, when it is imported. Prints one JSON object: the relative error of each case."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from edgemoe.gpu_offload import host_driven_experts
from edgemoe.gpu_offload.arithmetic import mixing_weights, run_expert
from edgemoe.gpu_offload.cpu import product
from edgemoe.gpu_offload.host_driven_experts import run_executed


def error(dtype: torch.dtype, renormalised: bool) -> float:
    """Of a mixture whose sizes are no multiples of the kernels' blocks, with an elided gate."""
    d, f, n_experts, capacity = 40, 24, 11, 5
    torch.manual_seed(0)
    slots = torch.randn(capacity, 3 * f * d).mul(d**-0.5).to(dtype)
    x, h, scores = torch.randn(d), torch.randn(1, d), torch.randn(n_experts)
    executed, places = torch.tensor([9, 2, 4, -1]), torch.tensor([3, 0, 4, 3])

    class Views:
        def __init__(self, place: int) -> None:
            gate, up, down = slots[place].view(3, -1)
            self.gate, self.up, self.down = gate.view(f, d), up.view(f, d), down.view(d, f)

    outputs = torch.stack([run_expert(h, Views(place), product) for place in places[:3].tolist()], 1)
    expected = x + (outputs * mixing_weights(scores[None], executed[None, :3], renormalised)).sum(1)[0]
    run_executed(
        x, h[0], slots, torch.stack([executed, places]), scores, torch.zeros(4, f), renormalised=renormalised
    )  # fmt: skip
    return float((x - expected).abs().max() / expected.abs().max())


def main() -> None:
    torch.set_num_threads(1)
    host_driven_experts.BLOCK = 16
    cases = [(dtype, renormalised) for dtype in (torch.float32, torch.bfloat16) for renormalised in (False, True)]
    sys.stdout.write(
        json.dumps({f"{dtype} {renormalised}": error(dtype, renormalised) for dtype, renormalised in cases})
    )


if __name__ == "__main__":
    main()
