"""Compile the kernels for GPUs that need not be there, and write what their machine code does: JSON, by kernel."""

import json
import sys

import triton
from machine_code import Code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from edgemoe.gpu_offload.kernels import copying, deciding, experts, sampling, steps

FLOATS = {"reals", "scales", "scores", "given", "pregate", "priors", "weights", "logits", "x", "norm", "hidden"}
LONGS = {"control", "bests", "sequence", "ends", "stop", "turns", "tally"}
REALS = {"lam", "log_keep", "log_gate", "factor", "temperature", "log_min_p", "eps"}
NUMBERS = {"layer", "following", "n_tokens", "share", "capacity"}
PSR = {
    "E": 64, "EP": 64, "WIDTH": 8, "BUDGET": 1, "PREFETCHES": True, "ROUTING": 1, "EVICTION": 3, "PREFETCH": 1,
    "GATED": True, "RUNNING": True, "ELIDED": True, "WEIGHTS": 0, "K": 8, "J": 1, "W": 8, "ROUNDS": 8,
}  # fmt: skip

DECIDE = {"SELECTS": True, "FREEZES": True, "K_NEXT": 8, "C": 32, "CHUNKS": 192, "EARLY": False}
EXECUTED = {
    "E": 64, "C": 32, "WIDTH": 8, "D": 512, "F": 256, "ROWS": 2, "BLOCK": 256, "WORDS": 3 * 512 * 256 // 2,
    "CHUNK": 1 << 14, "TILE": 2048, "CHUNKS": 12, "DELAY": 0, "DRAIN": 0,
}  # fmt: skip
ADA, HOPPER = 89, 90


def kind(name):
    if name in REALS:
        return "fp32"
    if name in NUMBERS:
        return "i32"
    return "*fp32" if name in FLOATS else "*i64" if name in LONGS else "*i32"


def ptx(function, constants, capability=ADA, types=None, **options):
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else kind(name) for name in names} | (types or {})
    values = {(names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(function, signature, values), target=target, options=options).asm["ptx"]


def compiled(function, constants, **options):
    code = ptx(function, constants, **options)
    return {
        word: code.count(word) for word in ("fma.", "mad.f", ".ftz", "redux.sync", "bar.sync", ".local", "mul.rn.f32")
    }


def executed(function, capability):
    """The code of a kernel that reads or writes slots."""
    constants = {name: value for name, value in EXECUTED.items() if name in function.arg_names}
    constants |= {"EARLY": capability >= HOPPER} if "EARLY" in function.arg_names else {}
    types = {"slots": "*bf16"} if "D" in constants else {}
    names = [name for name in function.arg_names if name not in constants]
    return Code(ptx(function, constants, capability, types), names)


def meets(one):
    return one.kind in ("bar", "barrier")


def order(code, firsts, stop, lasts):
    """Whether each of the last comes after some of the first, and none of them without what lies between."""
    return set(lasts) <= code.reached(firsts, lambda one: False) and not set(lasts) & code.reached(firsts, stop)


def moves(code, slots):
    """How chunks are stored and their arrival is told."""
    stores, told = code.accesses(slots, "st"), code.accesses("done", "atom", "red")
    told = [at for at in told if "acquire" not in code.instructions[at].words]
    return {"told": [code.instructions[at].name for at in told], "stored": order(code, stores, meets, told)}


def waits(code):
    """How an expert's bytes are waited for and read."""
    looks = [at for at in code.accesses("done", "ld", "atom") if "release" not in code.instructions[at].words]
    loads = code.accesses("slots", "ld")
    return {
        "looks": [code.instructions[at].name for at in looks],
        "loads": sorted({code.instructions[at].name for at in loads}),
        "met": order(code, looks, meets, loads),
        **moves(code, "raw"),
    }


def follows(code):
    """How they are read by a kernel that begins behind it."""
    loads = code.accesses("slots", "ld")
    return {
        "loads": sorted({code.instructions[at].name for at in loads}),
        "met": order(code, [0], lambda one: one.name == "griddepcontrol.wait", loads),
    }


COUNTED = {
    "decide": compiled(deciding.decide, PSR | DECIDE, **steps.OPTIONS),
    "chunk": compiled(steps.chunk, PSR | {"HAS_PRIOR": True}, **steps.OPTIONS),
    "choose": compiled(
        sampling.choose,
        {"N": 1000, "NP": 1024, "M": 40, "KP": 64, "ENDS": 2, "GREEDY": False},
        num_warps=4,
        enable_fp_fusion=False,
    ),
}
ORDERED = {
    "waits": [waits(executed(experts.gate_and_up, capability)) for capability in (ADA, HOPPER)],
    "serves": [moves(executed(copying.serve, capability), "slots") for capability in (ADA, HOPPER)],
    "follows": [follows(executed(experts.down, HOPPER))],
}
sys.stdout.write(json.dumps({"counted": COUNTED, "ordered": ORDERED}))
