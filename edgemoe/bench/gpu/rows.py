"""What was measured, as figures: every row beside its physical limits, and rows beside each other."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from edgemoe.bench.gpu.clocks import Arm, label
from edgemoe.bench.gpu.geometry import active_bytes
from edgemoe.bench.gpu.limits import Rates, compute_of
from edgemoe.bench.gpu.measure import Timed
from edgemoe.bench.gpu.subject import Subject
from edgemoe.bench.gpu.timeline import timeline
from edgemoe.policy import Policy, preset
from edgemoe.stats import Ratio, log_ratio

QUANTILES = 101


@dataclass(frozen=True)
class Row:
    """One policy with C slots on one executor. Times in seconds per token, copies per token over all layers."""

    name: str
    share: str
    slots: int
    executor: str
    policy: dict[str, Any]
    policy_hash: str
    config: str
    rounds: tuple[float, ...]
    """The mean of each round."""
    tokens: int
    mean: float | None
    p50: float | None
    p99: float | None
    quantiles: tuple[float, ...]
    """Of all tokens of all rounds, from the fastest to the slowest in 100 steps."""
    demand: float | None
    prefetch: float | None
    in_time: float | None
    late: float | None
    unused: float | None
    copied_bytes: float | None
    decided_demand: float | None
    """As Algorithm 1 decides: a copy that was promoted, or dropped, is what it was decided to be."""
    decided_prefetch: float | None
    replaced: float | None
    agrees: bool | None
    link_s: float | None
    """The copied bytes over the link's rate."""
    memory_s: float | None
    timeline_s: float | None
    above_floor: float | None
    """Beyond the same executor's time with everything resident."""
    per_copy: float | None
    """That, per copy."""
    reset_s: float | None
    """Per window: bringing the warm set back, which no token's time contains."""
    kl: float | None
    problem: str

    @property
    def label(self) -> str:
        return label(self.name, self.executor)

    @property
    def over_timeline(self) -> float | None:
        return self.mean / self.timeline_s if self.mean and self.timeline_s else None

    @property
    def copies(self) -> float | None:
        return None if self.demand is None or self.prefetch is None else self.demand + self.prefetch

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "label": self.label, "copies": self.copies, "over_timeline": self.over_timeline}


def config_of(subject: Subject, arm: Arm, executor: str) -> str:
    """Twelve hex digits of all that decides what an arm computes; executor: its own name, with what else decides."""
    decides = {
        "subject": subject.fingerprint,
        "policy": arm.policy.hash,
        "slots": arm.slots,
        "executor": executor,
        "torch": torch.__version__,
        "dtype": str(subject.weights.dtype),
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]


def rows_of(
    subject: Subject,
    arms: Sequence[Timed],
    rates: Rates,
    kl: dict[tuple[str, int], float] | None = None,
) -> list[Row]:
    """A row per arm. kl: by policy hash and slots.

    Arms with a slot for every expert give the floors, of each executor its own; the timeline's computing is that of the
    executor without a host in its loop, where it was run.
    """
    position = float(np.mean([len(tokens) - 1 for tokens in subject.windows])) / 2
    n_experts = subject.weights.shape.n_experts
    floors = {
        timed.arm.executor: float(np.mean(np.concatenate(timed.seconds)))
        for timed in arms
        if timed.arm.slots == n_experts and timed.seconds
    }
    return [_row(subject, timed, rates, floors, position, kl or {}) for timed in arms]


def _row(
    subject: Subject,
    timed: Timed,
    rates: Rates,
    floors: dict[str, float],
    position: float,
    kl: dict[tuple[str, int], float],
) -> Row:
    arm, weights = timed.arm, subject.weights
    size = weights.arena.expert_bytes
    every = np.concatenate(timed.seconds) if timed.seconds else np.zeros(0)
    there = len(every) > 0

    def of(value: float) -> float | None:
        return float(value) if there else None

    decided_tokens = max(sum(one.tokens for one in timed.decided), 1)
    copies = timed.per_token("demand") + timed.per_token("prefetch")
    least = None
    least_computing = min(floors.values(), default=None)
    if least_computing is not None and timed.decided:
        compute = compute_of(weights, least_computing, position)
        least = float(np.mean(np.concatenate([timeline(one, size / rates.link, compute) for one in timed.decided])))
    floor = floors.get(arm.executor)
    above = float(every.mean()) - floor if there and floor is not None else None
    policy = arm.policy
    return Row(
        name=arm.name,
        share=arm.share,
        slots=arm.slots,
        executor=arm.executor,
        policy=asdict(policy),
        policy_hash=policy.hash,
        config=config_of(subject, timed.arm, timed.name),
        rounds=tuple(timed.means),
        tokens=timed.tokens,
        mean=of(every.mean() if there else 0.0),
        p50=of(np.median(every) if there else 0.0),
        p99=of(np.quantile(every, 0.99) if there else 0.0),
        quantiles=tuple(np.quantile(every, np.linspace(0, 1, QUANTILES)).tolist()) if there else (),
        **{name: of(timed.per_token(name)) for name in ("demand", "prefetch", "in_time", "late", "unused")},
        copied_bytes=of(copies * size),
        decided_demand=sum(one.demand for one in timed.decided) / decided_tokens if timed.decided else None,
        decided_prefetch=sum(one.prefetch for one in timed.decided) / decided_tokens if timed.decided else None,
        replaced=sum(one.replaced for one in timed.decided) / decided_tokens if timed.decided else None,
        agrees=timed.agrees,
        link_s=of(copies * size / rates.link),
        memory_s=active_bytes(weights, position) / rates.memory,
        timeline_s=least,
        above_floor=above,
        per_copy=above / copies if above is not None and copies > 0.01 else None,
        reset_s=of(sum(found["reset_s"] for found in timed.counts) / max(len(timed.counts) * len(subject.windows), 1)),
        kl=kl.get((policy.hash, arm.slots)),
        problem=timed.problem,
    )


@dataclass(frozen=True)
class Beside:
    """How many times as long `slower` takes as `faster` (labels of rows), over rounds, and what the PSR paper has."""

    slower: str
    faster: str
    share: str
    slots: int
    ratio: Ratio
    paper: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# §6.2: 24.7 / 12.0 and 10.7 ms, 2.31 (2.19–2.44) at 50%; 42.5 / 19.2 ms at 25%; §6.3: 25% and 30% lower latency.
PAPER = {"exact-lru": "2.2–2.3 (λ 0.3 at 50%, 0.25 at 25%)", "cache-prior": "1.33 at 50%, 1.43 at 25% (λ 0.3 and 0.25)"}


def is_preset(row: Row, name: str, *, any_lambda: bool = False) -> bool:
    """Whether a row's policy is a preset, wherever its bonus scale comes from, and at its own λ or at any."""
    free = {"scale": "", **({"lam": 0.0} if any_lambda else {})}
    return {**row.policy, **free} == {**asdict(preset(name)), **free}


def beside(rows: Sequence[Row]) -> list[Beside]:
    """Every other row against those of psr and psr-gated with the same slots and executor, at the same λ where it has
    one.

    Paired t-tests on log latency over rounds (PSR §6.1); where there are fewer than 2 rounds, nothing.
    """
    found = []
    for fast in rows:
        psr = is_preset(fast, "psr", any_lambda=True)
        if not psr and not is_preset(fast, "psr-gated", any_lambda=True):
            continue
        for slow in rows:
            same = (slow.slots, slow.executor) == (fast.slots, fast.executor)
            same = same and (slow.policy["lam"] == fast.policy["lam"] or not Policy(**slow.policy).uses_bonus)
            paired = min(len(slow.rounds), len(fast.rounds)) >= 2 and len(slow.rounds) == len(fast.rounds)
            if slow is fast or not same or not paired:
                continue
            known = next((said for name, said in PAPER.items() if is_preset(slow, name, any_lambda=True)), "")
            paper = known if psr else ""
            ratio = log_ratio(slow.rounds, fast.rounds)
            found.append(Beside(slow.label, fast.label, fast.share, fast.slots, ratio, paper))
    return found


def executors_beside(rows: Sequence[Row]) -> list[Beside]:
    """Every other executor over the device-resident one, where both ran a policy with the same slots."""
    device = {(row.policy_hash, row.slots): row for row in rows if row.executor == "device"}
    found = []
    for row in rows:
        other = device.get((row.policy_hash, row.slots))
        if other is None or other is row or not 2 <= len(row.rounds) == len(other.rounds):
            continue
        ratio = log_ratio(row.rounds, other.rounds)
        found.append(Beside(row.label, other.label, row.share, row.slots, ratio))
    return found
