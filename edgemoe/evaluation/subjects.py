"""The engines that divergence is measured on: llama.cpp, the RAM→VRAM engine, and the Hugging Face harness."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.calibration import Calibration, load_calibration
from edgemoe.errors import UserError
from edgemoe.evaluation.subject import Skip, Subject, TokenByToken
from edgemoe.evaluation.token_metrics import WindowMetrics
from edgemoe.generation.engine import Engine
from edgemoe.llamacpp.session import default_threads
from edgemoe.model import Model
from edgemoe.policy import Policy
from edgemoe.progress import Advance, no_progress
from edgemoe.units import Residency

ENGINES = ("llama.cpp", "torch", "offload")


@dataclass(frozen=True)
class Runs:
    """How windows are run. None: the engine's default, which is in the header of every result.

    threads: CPU threads. dtype: of the weights, for torch and offload. For torch only: device; chunk, positions per
    pass (default: whole windows); batch, windows per pass.
    """

    length: int
    threads: int | None = None
    dtype: str | None = None
    device: str | None = None
    chunk: int | None = None
    batch: int | None = None


def default_engine(path: Path) -> str:
    """llama.cpp for a file, torch for a folder."""
    return "torch" if path.is_dir() else "llama.cpp"


def subject(name: str, model: Model, residency: Residency, calibration: Path | None, runs: Runs) -> Subject:
    """The engine `name` on `model`.

    Raises `UserError`, one line, for an unknown engine, a model that it cannot steer, options that it does not have,
    another model's calibration, or a package that it needs.
    """
    if name not in ENGINES:
        raise UserError(f"--engine {name}: expected one of {', '.join(ENGINES)}")
    _check_options(name, runs)
    if name == "torch" and model.format == "GGUF":
        raise UserError(f"{model.path}: torch runs Hugging Face folders: give one, or --engine llama.cpp")
    if name == "llama.cpp" and model.format != "GGUF":
        raise UserError(f"{model.path}: llama.cpp runs GGUF files: give one, or --engine torch")
    known = None if calibration is None else calibration_of(model, calibration)
    try:
        if name == "llama.cpp":
            return LlamaCpp(model, residency, known, runs)
        return Offload(model, residency, known, runs) if name == "offload" else Harness(model, residency, known, runs)
    except ModuleNotFoundError as error:
        extra = "gpu" if name == "offload" else "eval"
        raise UserError(f"--engine {name} needs {error.name}: pip install edgemoe[{extra}]") from None


def calibration_of(model: Model, path: Path) -> Calibration:
    """The calibration of a model; `UserError` if it is another's. A folder has no GGUF header that a calibration could
    name: engines compare their shapes."""
    return load_calibration(path, model if model.format == "GGUF" else None)


def check_model(model: Model, length: int) -> None:
    """Raise `UserError` for a model without experts to choose, and for windows that are longer than its context."""
    if not model.geometry.is_moe:
        raise UserError(f"{model.path}: a dense model, without experts to choose: nothing can be steered")
    if model.geometry.n_ctx and length > model.geometry.n_ctx:
        raise UserError(
            f"--ctx {length:,}: longer than the context of {model.geometry.n_ctx:,} tokens that "
            f"{model.path.name} was made for"
        )


def _check_options(name: str, runs: Runs) -> None:
    known = {"llama.cpp": ("threads",), "offload": ("threads", "dtype")}
    allowed = known.get(name, ("threads", "dtype", "device", "chunk", "batch"))
    for option in ("dtype", "device", "chunk", "batch"):
        if getattr(runs, option) is not None and option not in allowed:
            raise UserError(f"--{option}: the {name} engine has no such choice: leave it out")


class LlamaCpp(TokenByToken):
    """Stock llama.cpp through the streaming tier: one token per decode, C experts of every layer in RAM."""

    def __init__(self, model: Model, residency: Residency, known: Calibration | None, runs: Runs) -> None:
        from edgemoe.streaming.engine import StreamingEngine

        def opened(policy: Policy, known: Calibration | None) -> AbstractContextManager[Engine]:
            return StreamingEngine(
                model.path,
                policy=policy,
                residency=residency,
                calibration=known,
                n_ctx=runs.length,
                n_threads=self._threads,
                chunk=1,
                record=True,
            )

        super().__init__(opened, known)
        self._runs, self._threads = runs, runs.threads or default_threads()

    def completed(self, policy: Policy) -> Policy:
        if policy.elide:
            raise UserError("--elide: llama.cpp always executes the model's k experts: use --engine torch or offload")
        return policy.completed(self._known is not None)

    def configuration(self, policy: Policy) -> dict[str, Any]:
        return {
            "engine": "llama.cpp",
            "llama_cpp": version("llama-cpp-python"),
            "kv_type": "f16",
            "chunk": 1,
            "batch": 1,
            "threads": self._threads,
            **_common(self.slots, policy, self._known, self._runs),
        }


class Offload(TokenByToken):
    """The RAM→VRAM engine on the CPU, one token per decode."""

    def __init__(self, model: Model, residency: Residency, known: Calibration | None, runs: Runs) -> None:
        import torch

        from edgemoe.gpu_offload.engine import OffloadEngine

        def opened(policy: Policy, known: Calibration | None) -> AbstractContextManager[Engine]:
            return OffloadEngine(
                model.path,
                policy=policy,
                residency=residency,
                calibration=known,
                n_ctx=runs.length,
                n_threads=self._threads,
                chunk=1,
                dtype=self._dtype,
                record=True,
            )

        super().__init__(opened, known)
        self._runs, self._threads = runs, runs.threads or torch.get_num_threads()
        self._dtype, self._version = runs.dtype or "bfloat16", torch.__version__

    def completed(self, policy: Policy) -> Policy:
        return policy.completed(self._known is not None)

    def configuration(self, policy: Policy) -> dict[str, Any]:
        return {
            "engine": "offload",
            "torch": self._version,
            "device": "cpu",
            "dtype": self._dtype,
            "chunk": 1,
            "batch": 1,
            "threads": self._threads,
            **_common(self.slots, policy, self._known, self._runs),
        }


class Harness:
    """A Hugging Face model under transformers: whole windows, or chunks, in passes whose decisions are those of
    decoding given the same scores."""

    def __init__(self, model: Model, residency: Residency, known: Calibration | None, runs: Runs) -> None:
        import torch
        import transformers

        from edgemoe.gpu_offload.harness.families import find_routers
        from edgemoe.gpu_offload.harness.loading import load

        if residency.total_bytes is not None:
            raise UserError(
                f"--residency {residency.text}: the torch engine takes a share (50%) or slots per layer (32)"
            )
        if runs.threads:
            torch.set_num_threads(runs.threads)
        transformers.utils.logging.disable_progress_bar()  # progress is the command's to show
        self._model, _ = load(model.path, dtype=runs.dtype or "bfloat16", device=runs.device or "cpu")
        self._known, self._runs = known, runs
        self.slots = residency.slots(find_routers(self._model)[0].n_experts)

    def use(self, calibration: Calibration) -> None:
        self._known = calibration

    def completed(self, policy: Policy) -> Policy:
        return policy.completed(self._known is not None)

    def check(self, policies: Sequence[Policy]) -> None:
        from edgemoe.gpu_offload.harness.steer import steer

        for policy in policies:
            steer(self._model, policy, self.slots, self._known)

    def configuration(self, policy: Policy) -> dict[str, Any]:
        from edgemoe.gpu_offload.harness.identity import numerics

        return {
            **numerics(self._model),
            "chunk": self._runs.chunk or self._runs.length,
            "batch": self._runs.batch or 1,
            **_common(self.slots, policy, self._known, self._runs),
        }

    def work(self, windows: Sequence[np.ndarray], policies: Sequence[Policy], skip: Skip) -> int:
        left = [at for at in range(len(windows)) if not all(skip(at, which) for which in range(len(policies)))]
        return (1 + len(policies)) * sum(len(windows[at]) for at in left)

    def divergences(
        self, windows: Sequence[np.ndarray], policies: Sequence[Policy], skip: Skip, advance: Advance = no_progress
    ) -> Iterator[tuple[int, int, WindowMetrics]]:
        from edgemoe.gpu_offload.harness.divergence import Setting, divergences

        found = divergences(
            self._model,
            [Setting(policy, self.slots) for policy in policies],
            windows,
            self._known,
            batch=self._runs.batch or 1,
            chunk=self._runs.chunk,
            skip=[at for at in range(len(windows)) if all(skip(at, which) for which in range(len(policies)))],
            advance=advance,
        )
        for at, parts in found:
            for which, part in enumerate(parts):
                # The last position of a window predicts what it does not hold: other engines do not run it.
                counts = part.counts[: len(part.kl)]
                yield (
                    at,
                    which,
                    WindowMetrics(part.nll_exact, part.nll_steered, part.kl, part.agree, counts, part.copies),
                )

    def sample(
        self, count: int, length: int, prefix: int, seed: int, advance: Advance = no_progress
    ) -> list[np.ndarray]:
        from edgemoe.gpu_offload.harness.selfgen import sample_windows

        batch = self._runs.batch or 1
        return sample_windows(self._model, count, length, prefix=[prefix], seed=seed, batch=batch, advance=advance)


def _common(slots: int, policy: Policy, known: Calibration | None, runs: Runs) -> dict[str, Any]:
    return {
        "window": runs.length,
        "slots": slots,
        "policy": asdict(policy),
        "calibration": "" if known is None else known.digest,
    }
