"""Prompts: one chunk of many tokens from a new sequence on, beside the time that its bytes take on the link.

A prompt decides by the model's own routers, also where decodes replay recorded routing: with random weights nearly all
experts of a layer are executed by some token, which is the most that can cross the link.
"""

import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from edgemoe.bench.gpu.clocks import DEVICE, Arm, executor_of, label
from edgemoe.bench.gpu.limits import RESIDENT, resident_arm
from edgemoe.bench.gpu.rows import config_of
from edgemoe.bench.gpu.subject import Subject
from edgemoe.errors import UserError
from edgemoe.gpu_offload.executor import Executor
from edgemoe.progress import Advance

ROUNDS = 4
LONGEST = 512  # tokens that go through a layer together


@dataclass(frozen=True)
class Prompted:
    """One arm's prompt. Seconds, and bytes of the link."""

    name: str
    share: str
    slots: int
    executor: str
    config: str
    """As a row's: all that decides what is computed."""
    tokens: int
    rounds: tuple[float, ...]
    """From the call to the logits behind the last token, each after a reset."""
    union_bytes: float
    """Of the experts that some token executes and no slot held: each must cross the link once."""
    copied_bytes: float
    """These, and what was predicted and executed by none."""
    link_s: float
    """`union_bytes` over the link's rate in large copies."""
    compute_s: float | None
    """The same prompt on the same executor with everything resident; None where that could not be run."""

    @property
    def label(self) -> str:
        return label(self.name, self.executor)

    @property
    def first_token_s(self) -> float:
        return median(self.rounds)

    @property
    def over_limit(self) -> float | None:
        """Times the longer of link and computing."""
        if self.compute_s is None:
            return None
        return self.first_token_s / max(self.link_s, self.compute_s)

    def as_json(self) -> dict[str, Any]:
        found = {"label": self.label, "first_token_s": self.first_token_s, "over_limit": self.over_limit}
        return {**asdict(self), **found}


def prompted(
    subject: Subject, arms: Sequence[Arm], tokens: int, link: float, advance: Advance, until: float | None = None
) -> list[Prompted]:
    """Prompts of `tokens` tokens on each arm, everything resident first; link: bytes per second. An arm that cannot run
    is left out, and so are those that would begin after `until` (monotonic seconds)."""
    ids = _ids(subject, tokens)
    found: list[Prompted] = []
    resident = subject.weights.shape.n_experts
    for arm in sorted(arms, key=lambda arm: arm.slots != resident):
        if until is not None and time.monotonic() > until:
            break
        floor = next((one.first_token_s for one in found if one.slots == resident), None)
        with suppress(UserError, torch.cuda.OutOfMemoryError):
            found.append(_one(subject, arm, ids, link, floor))
        _free(subject)
        advance(1)
    return found


def arms_prompted(arms: Sequence[Arm], subject: Subject) -> list[Arm]:
    """Those of the device-resident executor, or of the first that there is; everything resident once."""
    executor = DEVICE if any(arm.executor == DEVICE for arm in arms) else arms[0].executor if arms else ""
    resident = resident_arm(subject)
    return [arm for arm in arms if arm.executor == executor and (arm.slots < resident.slots or arm.name == RESIDENT)]


def _ids(subject: Subject, tokens: int) -> np.ndarray:
    """Of the model's texts; where its weights are random, any."""
    if subject.recording is None:
        return np.resize(np.concatenate(subject.windows), tokens)
    return np.random.default_rng(0).integers(0, subject.weights.shape.n_vocab, tokens)


def _one(subject: Subject, arm: Arm, ids: np.ndarray, link: float, floor: float | None) -> Prompted:
    executor = executor_of(subject, arm, n_ctx=len(ids), chunk=len(ids))
    name = f"{executor.name}, chunk {len(ids)}"
    try:
        measured = [_round(executor, ids) for _ in range(ROUNDS + 1)][1:]  # the first compiles
    finally:
        executor.close()
    seconds, demand, prefetch = zip(*measured, strict=True)
    size = subject.weights.arena.expert_bytes
    union = median(demand) * size
    compute = median(seconds) if arm.slots == subject.weights.shape.n_experts else floor
    return Prompted(
        name=arm.name,
        share=arm.share,
        slots=arm.slots,
        executor=arm.executor,
        config=config_of(subject, arm, name),
        tokens=len(ids),
        rounds=seconds,
        union_bytes=union,
        copied_bytes=union + median(prefetch) * size,
        link_s=union / link,
        compute_s=compute,
    )


def _round(executor: Executor, ids: np.ndarray) -> tuple[float, int, int]:
    """Seconds, demand and prefetch copies of a prompt after a reset."""
    executor.reset()
    before = executor.counters
    demand, prefetch = before.demand, before.prefetch
    start = time.perf_counter()
    executor.step(ids, 0)
    seconds = time.perf_counter() - start
    after = executor.counters
    return seconds, after.demand - demand, after.prefetch - prefetch


def _free(subject: Subject) -> None:
    gc.collect()  # graphs and their launches refer to each other
    if subject.device == "cuda":
        torch.cuda.empty_cache()
