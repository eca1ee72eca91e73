"""Compile the kernels for a GPU that need not be there, and write what their machine code does: JSON, by kernel."""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from edgemoe.gpu_offload.kernels import deciding, sampling, steps

FLOATS = {"reals", "scales", "scores", "given", "pregate", "priors", "weights", "logits"}
LONGS = {"control", "bests", "sequence", "ends", "stop", "turns", "tally"}
REALS = {"lam", "log_keep", "log_gate", "factor", "temperature", "log_min_p"}
NUMBERS = {"layer", "following", "n_tokens", "share", "capacity"}
PSR = {
    "E": 64, "EP": 64, "WIDTH": 8, "BUDGET": 1, "PREFETCHES": True, "ROUTING": 1, "EVICTION": 3, "PREFETCH": 1,
    "GATED": True, "RUNNING": True, "ELIDED": True, "WEIGHTS": 0, "K": 8, "J": 1, "W": 8, "ROUNDS": 8,
}  # fmt: skip


DECIDE = {"SELECTS": True, "FREEZES": True, "K_NEXT": 8, "C": 32, "CHUNKS": 192, "EARLY": False}


def kind(name):
    if name in REALS:
        return "fp32"
    if name in NUMBERS:
        return "i32"
    return "*fp32" if name in FLOATS else "*i64" if name in LONGS else "*i32"


def compiled(function, constants, **options):
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", 89, 32)  # Ada
    ptx = triton.compile(ASTSource(function, signature, values), target=target, options=options).asm["ptx"]
    return {
        word: ptx.count(word) for word in ("fma.", "mad.f", ".ftz", "redux.sync", "bar.sync", ".local", "mul.rn.f32")
    }


sys.stdout.write(
    json.dumps(
        {
            "decide": compiled(deciding.decide, PSR | DECIDE, **steps.OPTIONS),
            "chunk": compiled(steps.chunk, PSR | {"HAS_PRIOR": True}, **steps.OPTIONS),
            "choose": compiled(
                sampling.choose,
                {"N": 1000, "NP": 1024, "M": 40, "KP": 64, "ENDS": 2, "GREEDY": False},
                num_warps=4,
                enable_fp_fusion=False,
            ),
        }
    )
)
