"""The engines that benchmarks run on: llama.cpp, the RAM→VRAM engine, and the Hugging Face harness."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edgemoe.calibration import Calibration, load_calibration
from edgemoe.errors import UserError
from edgemoe.evaluation.answers import Answers, EngineAnswers
from edgemoe.evaluation.subjects import ENGINES
from edgemoe.model import Model
from edgemoe.policy import Policy
from edgemoe.units import Residency

DEFAULT_CTX = 2048
_OPTIONS = {
    "llama.cpp": ("threads", "chunk"),
    "offload": ("threads", "chunk", "dtype"),
    "torch": ("threads", "dtype", "device", "batch"),
}


@dataclass(frozen=True)
class Setup:
    """How requests are answered. None: the engine's default, which is in the header of every result.

    n_ctx: the most tokens of a request, at most 2,048 by default. chunk: tokens of a prompt that an engine reads at
    once; continuations and texts are always one token per decode there. batch: requests per pass, for torch only,
    which takes whole prompts, and continuations with them, in one pass.
    """

    n_ctx: int | None = None
    threads: int | None = None
    chunk: int | None = None
    dtype: str | None = None
    device: str | None = None
    batch: int | None = None


@contextmanager
def answering(
    name: str,
    model: Model,
    policy: Policy,
    residency: Residency,
    calibration: Path | None = None,
    setup: Setup | None = None,
) -> Iterator[tuple[Answers, dict[str, Any]]]:
    """The engine `name` on `model` under `policy`, and all that decides its answers, for the header of a result.

    Raises `UserError`, one line, for an unknown engine, a model that it cannot steer, options that it does not have,
    another model's calibration, or a package that it needs.
    """
    setup = setup or Setup()
    _check(name, model, policy, setup)
    # A folder has no GGUF header that a calibration could name; engines compare their shapes.
    known = load_calibration(calibration, model if model.format == "GGUF" else None) if calibration else None
    opened = {"llama.cpp": _llamacpp, "offload": _offload, "torch": _torch}[name]
    n_ctx = setup.n_ctx or min(DEFAULT_CTX, model.geometry.n_ctx or DEFAULT_CTX)
    try:
        with opened(model, policy.completed(known is not None), residency, known, n_ctx, setup) as (answers, config):
            common = {"engine": name, "n_ctx": n_ctx, "calibration": "" if known is None else known.digest}
            yield answers, {**config, **common}
    except ModuleNotFoundError as error:
        extra = "gpu" if name == "offload" else "eval"
        raise UserError(f"--engine {name} needs {error.name}: pip install edgemoe[{extra}]") from None


_Opened = Iterator[tuple[Answers, dict[str, Any]]]


def _check(name: str, model: Model, policy: Policy, setup: Setup) -> None:
    if name not in ENGINES:
        raise UserError(f"--engine {name}: expected one of {', '.join(ENGINES)}")
    if not model.geometry.is_moe:
        raise UserError(f"{model.path}: a dense model, without experts to choose: nothing can be steered")
    if name == "torch" and model.format == "GGUF":
        raise UserError(f"{model.path}: torch runs Hugging Face folders: give one, or --engine llama.cpp")
    if name == "llama.cpp" and model.format != "GGUF":
        raise UserError(f"{model.path}: llama.cpp runs GGUF files: give one, or --engine torch")
    for option in ("chunk", "dtype", "device", "batch"):
        if getattr(setup, option) is not None and option not in _OPTIONS[name]:
            raise UserError(f"--{option}: the {name} engine has no such choice: leave it out")
    if name == "llama.cpp" and policy.elide:
        raise UserError("--elide: llama.cpp always executes the model's k experts: use --engine torch or offload")
    limit = model.geometry.n_ctx
    if setup.n_ctx and limit and setup.n_ctx > limit:
        raise UserError(
            f"--ctx {setup.n_ctx:,}: longer than the context of {limit:,} tokens that {model.path.name} was made for"
        )


@contextmanager
def _llamacpp(
    model: Model, policy: Policy, residency: Residency, known: Calibration | None, n_ctx: int, setup: Setup
) -> _Opened:
    from edgemoe.llamacpp.session import default_threads
    from edgemoe.streaming.engine import DEFAULT_CHUNK, StreamingEngine

    threads, chunk = setup.threads or default_threads(), setup.chunk or DEFAULT_CHUNK
    with StreamingEngine(
        model.path,
        policy=policy,
        residency=residency,
        calibration=known,
        n_ctx=n_ctx,
        n_threads=threads,
        chunk=chunk,
    ) as engine:
        yield (
            EngineAnswers(engine),
            {
                "llama_cpp": version("llama-cpp-python"),
                "kv_type": "f16",
                "chunk": engine.chunk,
                "batch": 1,
                "threads": threads,
                "slots": engine.capacity,
                "policy": asdict(engine.policy),
            },
        )


@contextmanager
def _offload(
    model: Model, policy: Policy, residency: Residency, known: Calibration | None, n_ctx: int, setup: Setup
) -> _Opened:
    import torch

    from edgemoe.gpu_offload.engine import DEFAULT_CHUNK, OffloadEngine

    with OffloadEngine(
        model.path,
        policy=policy,
        residency=residency,
        calibration=known,
        n_ctx=n_ctx,
        n_threads=setup.threads,
        chunk=setup.chunk or DEFAULT_CHUNK,
        dtype=setup.dtype or "bfloat16",
    ) as engine:
        yield (
            EngineAnswers(engine),
            {
                "torch": torch.__version__,
                "device": "cpu",
                "dtype": engine.dtype,
                "chunk": engine.chunk,
                "batch": 1,
                "threads": engine.n_threads,
                "slots": engine.capacity,
                "policy": asdict(engine.policy),
            },
        )


@contextmanager
def _torch(
    model: Model, policy: Policy, residency: Residency, known: Calibration | None, n_ctx: int, setup: Setup
) -> _Opened:
    import torch
    import transformers

    from edgemoe.evaluation.harness_answers import harness_answers
    from edgemoe.gpu_offload.harness.families import find_routers
    from edgemoe.gpu_offload.harness.identity import numerics
    from edgemoe.gpu_offload.harness.loading import load
    from edgemoe.gpu_offload.vocabulary import open_vocabulary

    if residency.total_bytes is not None:
        raise UserError(f"--residency {residency.text}: the torch engine takes a share (50%) or slots per layer (32)")
    if setup.threads:
        torch.set_num_threads(setup.threads)
    transformers.utils.logging.disable_progress_bar()  # progress is the command's to show
    loaded, _ = load(model.path, dtype=setup.dtype or "bfloat16", device=setup.device or "cpu")
    slots, batch = residency.slots(find_routers(loaded)[0].n_experts), setup.batch or 1
    words: Any = open_vocabulary(model)
    with harness_answers(loaded, words, policy, slots, known, n_ctx, batch) as answers:
        whole = {"chunk": n_ctx}  # prompts are read in one pass, however long
        yield answers, {**numerics(loaded), **whole, "batch": batch, "slots": slots, "policy": asdict(policy)}
