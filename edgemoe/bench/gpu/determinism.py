"""Whether timing changes outputs (PSR paper, Table 1): the same greedy text under every way to move bytes.

On the logical cache all runs of one executor must agree, token for token and resident for resident; routing on the
physical cache, the paper's foil, may not, and is run to show that the ways to move bytes do differ in what they do.
Runs on the model's own routing, which its own text feeds: one decision that differs changes all that follows.
"""

import gc
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from edgemoe.bench.gpu.clocks import CHUNK, CPU, DEVICE, HOST, PHYSICAL, TIMED, Arm, context, stepped
from edgemoe.bench.gpu.rows import config_of
from edgemoe.bench.gpu.subject import Subject
from edgemoe.errors import UserError
from edgemoe.generation.options import Options
from edgemoe.gpu_offload.executor import Executor
from edgemoe.policy import preset
from edgemoe.progress import Advance, no_progress

LOGICAL = "logical"
_SEGMENT = 8  # tokens between two looks at the residents
_SLOW = 0.2  # of the link's rate


@dataclass(frozen=True)
class Run:
    """One way to move bytes."""

    executor: str
    cache: str
    how: str
    config: str
    """Twelve hex digits of all that decides what it computes, how bytes are moved among it; none where it failed."""
    tokens: tuple[int, ...]
    residents: str
    """Digest of who had a slot, after every few tokens."""
    reference: bool
    """The first of its executor and cache, which the others are held against."""
    same: bool
    """Tokens and residents are the reference's."""
    same_tokens: int
    """How many tokens from the first on are the reference's."""
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": hashlib.sha256(str(self.tokens).encode()).hexdigest()[:12]}


def ways(subject: Subject, link: float) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(executor, cache, how, the executor's arguments) of every run, the reference of each pair first. link: measured,
    bytes per second."""
    if subject.device == "cpu":
        yield CPU, LOGICAL, "as it is", {}
        yield CPU, LOGICAL, "again", {}
    else:
        yield DEVICE, LOGICAL, "8 copy blocks", {"copy_blocks": 8}
        yield DEVICE, LOGICAL, "again", {"copy_blocks": 8}
        for blocks in (4, 16, 32, 64):
            yield DEVICE, LOGICAL, f"{blocks} copy blocks", {"copy_blocks": blocks}
        yield DEVICE, LOGICAL, "4 copy blocks, delayed", {"copy_blocks": 4, "delay": 2000}
        yield DEVICE, LOGICAL, "16 copy blocks, delayed", {"copy_blocks": 16, "delay": 500}
    slowed = {"link_gbps": _SLOW * link / 1e9}
    held = {"delay_s": 2 * subject.weights.arena.expert_bytes / link, "seed": 1}
    for cache in (LOGICAL, PHYSICAL):
        physical = TIMED.get(cache, {})
        for count in (2, 1, 4):
            yield HOST, cache, f"{count} in flight", {"in_flight": count, **physical}
        yield HOST, cache, f"link slowed to {_SLOW:.0%}", {**slowed, **physical}
        yield HOST, cache, "copies held back", {**held, **physical}
        yield HOST, cache, "again", physical


def determinism(
    subject: Subject,
    slots: int,
    link: float,
    count: int,
    advance: Advance = no_progress,
    until: float | None = None,
) -> list[Run]:
    """Decode `count` greedy tokens behind one prompt in every way, by the policy of the paper's Table 1: Cache-Prior
    λ = 0.2 with the A priority and every predicted expert prefetched. None begins after `until` (monotonic
    seconds)."""
    policy = preset("psr", window=min(8, slots), budget="unbounded").completed(subject.estimated)
    prompt = subject.prompts[0]
    count = min(count, context(subject) - len(prompt))
    found: list[Run] = []
    for executor, cache, how, options in ways(subject, link):
        if until is not None and time.monotonic() > until:
            break
        arm = Arm("determinism", policy, slots, executor, options=options)
        reference = next((run for run in found if (run.executor, run.cache) == (executor, cache)), None)
        try:
            config, tokens, residents = _text(subject, arm, prompt, count)
            problem = ""
        except (UserError, torch.cuda.OutOfMemoryError, ImportError) as error:
            config, tokens, residents, problem = "", (), "", str(error).splitlines()[0]
        first = reference is None or bool(reference.problem)
        against = () if reference is None else reference.tokens
        found.append(
            Run(
                executor, cache, how, config, tokens, residents, first,
                same=first or (reference is not None and (tokens, residents) == (against, reference.residents)),
                same_tokens=len(tokens) if first else _common(tokens, against),
                problem=problem,
            )
        )  # fmt: skip
        advance(1)
    return found


def verdict(runs: Sequence[Run]) -> dict[str, bool | None]:
    """`logical`: all runs on it agree with their executor's first. `physical`: all runs on it agree too (which is not
    expected). None where nothing was run."""
    found: dict[str, bool | None] = {}
    for cache in (LOGICAL, PHYSICAL):
        ran = [run for run in runs if run.cache == cache and not run.problem]
        found[cache] = all(run.same for run in ran) if len(ran) > 1 else None
    return found


def _text(subject: Subject, arm: Arm, prompt: np.ndarray, count: int) -> tuple[str, tuple[int, ...], str]:
    """The run's config hash, its tokens, and the digest of its residents."""
    executor = _executor(subject, arm)
    try:
        residents = hashlib.sha256()
        executor.step(prompt[:-1], 0)
        tokens: list[int] = []
        token, position = int(prompt[-1]), len(prompt) - 1
        greedy = Options(temperature=0.0)
        while len(tokens) < count:
            part = min(_SEGMENT, count - len(tokens))
            chosen = list(executor.extend(token, position, part, greedy, frozenset()))
            tokens += chosen
            token, position = chosen[-1], position + len(chosen)
            residents.update(np.packbits(executor.slot_of() >= 0).tobytes())
        return config_of(subject, arm, executor.name), tuple(tokens), residents.hexdigest()[:12]
    finally:
        executor.close()
        del executor
        gc.collect()


def _executor(subject: Subject, arm: Arm) -> Executor:
    if arm.executor != DEVICE:
        return stepped(subject, arm, None)
    from edgemoe.gpu_offload.device import DeviceExecutor
    from edgemoe.gpu_offload.program import Tuning

    cache, n_ctx = subject.cache(arm.policy, arm.slots), context(subject)
    return DeviceExecutor(subject.weights, cache, n_ctx=n_ctx, chunk=CHUNK, tuning=Tuning(**arm.options))


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    count = 0
    for ours, theirs in zip(tokens, others, strict=False):
        if ours != theirs:
            break
        count += 1
    return count
