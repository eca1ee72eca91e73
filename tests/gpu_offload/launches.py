"""What a program launches in Triton's interpreter, compiled for GPUs that need not be there.

The interpreter takes what the compiler refuses: a variable that changes its type within a loop, or is of two types
after a branch. `record` notes each kernel's launches by the types of its arguments; run as a program, with the file
that they were written to, this compiles them and prints which kernels there were.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

ADA, HOPPER = 89, 90
_POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "int64": "*i64", "int32": "*i32", "int16": "*i16", "uint8": "*u8"}
STORED = {  # what has the type that the model is stored in
    "attention.attend": {"keys", "values"},
    "chunk_attention.attend": {"q", "keys", "values", "y"},
    "chunk_attention.place": {"q", "keys", "values"},
    "dense.added_product": {"matrix"},
    "dense.load_token": {"embedding"},
    "dense.normed_product": {"matrix"},
    "experts.down": {"slots"},
    "experts.gate_and_up": {"slots"},
    "grouped.down": {"hidden", "experts"},
    "grouped.gate_and_up": {"h", "experts", "hidden"},
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


def record(path: Path) -> None:
    """From here on, note every launch; written to `path` when the program ends."""
    import atexit

    from triton.runtime.interpreter import GridExecutor

    seen: dict[str, None] = {}
    plain = GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        given = {**dict(zip(names, args, strict=False)), **{k: v for k, v in kwargs.items() if k in names}}
        constants = {name: getattr(given[name], "value", given[name]) for name in self.constexprs}
        signature = {name: "constexpr" if name in constants else _type(given[name]) for name in names}
        options = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
        seen[json.dumps([self.fn.__module__, self.fn.__name__, signature, constants, options])] = None
        plain(self, *args, **kwargs)

    GridExecutor.__call__ = noted
    atexit.register(lambda: path.write_text(json.dumps([json.loads(one) for one in seen])))


def _type(value: Any) -> str:
    if hasattr(value, "dtype"):
        return _POINTERS[str(value.dtype).removeprefix("torch.")]
    return "fp32" if isinstance(value, float) else "i32"


def compile_all(launches: list[Any]) -> list[str]:
    """For Ada; for Hopper too, where a kernel knows EARLY; and each kernel's first launch with weights in bfloat16. The
    kernels' names, sorted."""
    compiled = set()
    for module, name, signature, constants, options in launches:
        short = f"{module.removeprefix('edgemoe.gpu_offload.kernels.')}.{name}"
        _compile(module, name, signature, {**constants, **({"EARLY": False} if "EARLY" in constants else {})}, options)
        if "EARLY" in constants:
            _compile(module, name, signature, {**constants, "EARLY": True}, options, HOPPER)
        if short not in compiled and short in STORED:
            stored = {key: "*bf16" if key in STORED[short] else kind for key, kind in signature.items()}
            assert stored != signature, f"{short} has none of {STORED[short]}"
            _compile(module, name, stored, constants, options)
        compiled.add(short)
    return sorted(compiled)


def _compile(
    module: str, name: str, signature: dict[str, str], constants: dict[str, Any], options: Any, capability: int = ADA
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {(list(signature).index(key),): value for key, value in constants.items()}
    source = ASTSource(getattr(importlib.import_module(module), name), signature, places)
    triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compile_all(json.loads(Path(sys.argv[1]).read_text()))))
