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
    """For Ada, and the first launch of each kernel that knows EARLY for Hopper too. The kernels' names, sorted."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled: set[str] = set()
    for module, name, signature, constants, options in launches:
        kernel = getattr(importlib.import_module(module), name)
        hopper = "EARLY" in constants and f"{module}.{name}" not in compiled
        for capability in (ADA, HOPPER) if hopper else (ADA,):
            values = {**constants, "EARLY": capability == HOPPER} if "EARLY" in constants else constants
            places = {(list(signature).index(key),): value for key, value in values.items()}
            target = GPUTarget("cuda", capability, 32)
            triton.compile(ASTSource(kernel, signature, places), target=target, options=options)
        compiled.add(f"{module}.{name}")
    return sorted(name.removeprefix("edgemoe.gpu_offload.kernels.") for name in compiled)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compile_all(json.loads(Path(sys.argv[1]).read_text()))))
