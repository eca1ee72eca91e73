"""What `edgemoe.evaluation.divergence` asks of an engine, and how one that decodes token by token answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from edgemoe.calibration import Calibration
from edgemoe.errors import UserError
from edgemoe.evaluation.llamacpp_divergence import forced
from edgemoe.evaluation.token_metrics import WindowMetrics, compare_rows, copies_of
from edgemoe.generation.engine import Engine
from edgemoe.policy import Policy
from edgemoe.progress import Advance, no_progress

_HELD_BYTES = 512 * 1024**2  # logits of exact routing that are kept for the policies that follow
_HELD_WINDOWS = 4  # and no more windows than these, so that an interrupted run loses little

Skip = Callable[[int, int], bool]
"""Whether window i under policy j is finished."""


class Subject(Protocol):
    """One model on one engine, at one residency: what policies are tried on."""

    slots: int
    """C: slots per layer."""

    def use(self, calibration: Calibration) -> None:
        """From now on with this warm set, bonus scale and token prior."""

    def completed(self, policy: Policy) -> Policy:
        """As this engine runs it: without a calibration, a fixed bonus scale becomes a running one."""

    def check(self, policies: Sequence[Policy]) -> None:
        """Raise `UserError` for a policy that this model cannot run. To be called first."""

    def configuration(self, policy: Policy) -> dict[str, Any]:
        """All that decides the numbers, for the header of a result."""

    def work(self, windows: Sequence[np.ndarray], policies: Sequence[Policy], skip: Skip) -> int:
        """Tokens that `divergences` will tell `advance` of."""

    def divergences(
        self, windows: Sequence[np.ndarray], policies: Sequence[Policy], skip: Skip, advance: Advance = no_progress
    ) -> Iterator[tuple[int, int, WindowMetrics]]:
        """(window, policy, its metrics) for all that are not finished, in any order, and perhaps for some that are."""

    def sample(
        self, count: int, length: int, prefix: int, seed: int, advance: Advance = no_progress
    ) -> list[np.ndarray]:
        """`count` windows [length] that start with `prefix` and go on as exact routing would, at temperature 1.

        advance: told of sampled tokens."""


def is_exact(policy: Policy) -> bool:
    """Whether every token executes its router's own choice."""
    return policy.routing == "exact" and not policy.elide


class TokenByToken:
    """A `Subject` whose engines decode one token after the other, as generation does.

    opened: an engine under a policy and a calibration, with its decisions recorded. One engine is open at a time, so
    that a run needs the memory of one; logits of exact routing are computed once for a few windows, for all policies.
    """

    slots = 0
    """Known from `check` on."""

    def __init__(
        self, opened: Callable[[Policy, Calibration | None], AbstractContextManager[Engine]], known: Calibration | None
    ) -> None:
        self._engine, self._known, self._n_vocab = opened, known, 1

    def _opened(self, policy: Policy) -> AbstractContextManager[Engine]:
        return self._engine(policy, self._known)

    def use(self, calibration: Calibration) -> None:
        self._known = calibration

    def check(self, policies: Sequence[Policy]) -> None:
        for policy in policies:
            with self._opened(policy) as engine:
                self.slots, self._n_vocab = engine.capacity, engine.n_vocab  # type: ignore[attr-defined]

    def work(self, windows: Sequence[np.ndarray], policies: Sequence[Policy], skip: Skip) -> int:
        reference, total = _reference(policies), 0
        for at, window in enumerate(windows):
            open_policies = [policy for which, policy in enumerate(policies) if not skip(at, which)]
            if open_policies:
                total += (1 + sum(policy != reference for policy in open_policies)) * (len(window) - 1)
        return total

    def divergences(
        self, windows: Sequence[np.ndarray], policies: Sequence[Policy], skip: Skip, advance: Advance = no_progress
    ) -> Iterator[tuple[int, int, WindowMetrics]]:
        reference = _reference(policies)
        left = [at for at in range(len(windows)) if not all(skip(at, which) for which in range(len(policies)))]
        for group in self._groups(left, windows):
            exact: dict[int, np.ndarray] = {}
            with self._opened(reference) as engine:
                for at in group:
                    exact[at], counts = forced(engine, windows[at], advance)
                    for which, policy in enumerate(policies):
                        if policy == reference and not skip(at, which):
                            yield at, which, _compared(engine, windows[at], exact[at], exact[at], counts)
            for which, policy in enumerate(policies):
                open_windows = [at for at in group if policy != reference and not skip(at, which)]
                if not open_windows:
                    continue
                with self._opened(policy) as engine:
                    for at in open_windows:
                        steered = forced(engine, windows[at], advance)
                        yield at, which, _compared(engine, windows[at], exact[at], *steered)

    def _groups(self, left: Sequence[int], windows: Sequence[np.ndarray]) -> Iterable[list[int]]:
        size = max((len(window) for window in windows), default=1) * self._n_vocab * 4
        step = min(max(_HELD_BYTES // size, 1), _HELD_WINDOWS)
        return (list(left[at : at + step]) for at in range(0, len(left), step))

    def sample(
        self, count: int, length: int, prefix: int, seed: int, advance: Advance = no_progress
    ) -> list[np.ndarray]:
        found = []
        with self._opened(Policy()) as engine:
            for row in range(count):
                records = getattr(engine, "records", [])
                engine.reset()
                tokens, draws = [prefix], np.random.default_rng([seed, row]).random(length)
                for at in range(1, length):
                    tokens.append(_drawn(engine.decode(tokens[-1]), draws[at]))
                    records.clear()
                    advance(1)
                found.append(np.array(tokens, np.int64))
        return found


def _compared(
    engine: Engine, window: np.ndarray, exact: np.ndarray, steered: np.ndarray, counts: np.ndarray
) -> WindowMetrics:
    """What `engine` has just been forced through, against exact routing."""
    return replace(compare_rows(window, exact, steered, counts), copies=copies_of(getattr(engine, "records", ())))


def _reference(policies: Sequence[Policy]) -> Policy:
    """The policy that stands for exact routing: one of those asked for, where one is exact.

    Exact policies differ in what they copy and in no logit, so one run gives the reference and its own result.
    """
    return next((policy for policy in policies if is_exact(policy)), Policy())


def _drawn(logits: np.ndarray, draw: float) -> int:
    """A token at temperature 1, by the same numbers as `edgemoe.gpu_offload.harness.selfgen`."""
    if not np.isfinite(logits).all():
        raise UserError("the model gives logits that are not numbers: is the file damaged?")
    shifted = logits.astype(np.float64)
    sums = np.exp(shifted - shifted.max()).cumsum()
    return min(int(np.searchsorted(sums, draw * sums[-1], side="right")), len(sums) - 1)
