"""Free generation: each policy decodes its own greedy continuation of a prompt (PSR paper, Table 6).

The prompt goes through in chunks, which is timed by itself; what follows is one token after the other, as many as there
is room for, without a host between them where the executor needs none.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from edgemoe.bench.gpu.clocks import Arm, label
from edgemoe.bench.gpu.pool import Pool
from edgemoe.bench.gpu.rows import config_of
from edgemoe.bench.gpu.subject import Subject
from edgemoe.errors import UserError
from edgemoe.generation.options import Options
from edgemoe.progress import Advance


@dataclass(frozen=True)
class Generated:
    """One arm on all prompts. Seconds."""

    name: str
    slots: int
    executor: str
    config: str
    """Twelve hex digits of all that decides what it computes."""
    first_token_s: float
    """The prompt, and the logits behind it; mean over prompts."""
    token_s: float
    """Each further token, as a mean over all; the host's clock."""
    tokens: int
    copies: float
    """Per token, demand and prefetch."""

    @property
    def label(self) -> str:
        return label(self.name, self.executor)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "label": self.label}


def generate(
    subject: Subject, pool: Pool, arms: Sequence[Arm], count: int, advance: Advance, until: float | None = None
) -> list[Generated]:
    """`count` tokens behind each of the subject's prompts. An arm that cannot run is left out, and so are those that
    would begin after `until` (monotonic seconds)."""
    found = []
    for arm in arms:
        if until is not None and time.monotonic() > until:
            break
        try:
            found.append(_one(subject, pool, arm, count))
        except (UserError, torch.cuda.OutOfMemoryError):
            pool.forget(arm)
        advance(1)
    return found


def _one(subject: Subject, pool: Pool, arm: Arm, count: int) -> Generated:
    executor = pool.get(arm).executor
    greedy = Options(temperature=0.0)
    first = rest = 0.0
    tokens = copies = 0
    # Once more than there are prompts: the first time compiles what prompts need.
    for number, prompt in enumerate((subject.prompts[0], *subject.prompts)):
        prompt = prompt[: max(subject.longest // 2, 2)]
        room = min(count, subject.longest - len(prompt))
        executor.reset()
        start = time.perf_counter()
        executor.step(prompt[:-1], 0)
        middle = time.perf_counter()
        before = executor.counters
        moved = before.demand + before.prefetch
        made = list(executor.extend(int(prompt[-1]), len(prompt) - 1, room, greedy, frozenset()))
        end = time.perf_counter()
        after = executor.counters
        if number:
            first, rest, tokens = first + middle - start, rest + end - middle, tokens + len(made)
            copies += after.demand + after.prefetch - moved
    n_prompts = len(subject.prompts)
    # By the model's own routers, also where rows replay recorded routing.
    config = config_of(subject, arm, f"{executor.name}, free")
    return Generated(
        arm.name, arm.slots, arm.executor, config,
        first / n_prompts, rest / max(tokens, 1), tokens, copies / max(tokens, 1),
    )  # fmt: skip
