"""The policy as a value: which experts run, what is prefetched, what is evicted.

Every baseline of both papers is one of these configurations, never a code path of its own.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from edgemoe.errors import UserError

Routing = Literal["exact", "cache-prior", "speculative", "tau"]
Eviction = Literal["lru", "lfu", "static", "score"]
Prefetch = Literal["none", "pre-gate", "token-prior"]
Gate = Literal["none", "predicted"]
Scale = Literal["fixed", "running"]
UNBOUNDED: Literal["unbounded"] = "unbounded"


@dataclass(frozen=True, slots=True)
class Policy:
    """One configuration of Algorithm 1 (PSR paper §4.1). PSR itself is `cache-prior` routing with pre-gate prefetch.

    A combination that means nothing (a bonus under exact routing, a budget without prefetch) is a `UserError`, so that
    two configurations with different hashes never make the same decisions by accident of an ignored field.
    """

    routing: Routing = "exact"
    """exact: the router's top-K. cache-prior: the bonus λΔ̄ on resident experts (Equation 1). speculative: the first K
    of the pre-gate ranking (§4.2). tau: a resident expert whose probability is within a share τ of the best remaining
    one's replaces it (bandwidth-wall paper §7.1); for scores that are logits."""
    lam: float = 0.0
    """Bonus strength λ, in units of the bonus scale Δ̄."""
    top_j: int = 0
    """The router's own J best get the bonus as if they were resident (Appendix B)."""
    scale: Scale = "fixed"
    """Δ̄: estimated on held-out text, or the running mean over this request, the current token included (§6.1). A
    predicted gate, which decides before the current scores are known, sees the mean of the tokens before."""
    tau: float = 0.0
    """Relative tolerance of tau routing."""
    elide: float = 0.0
    """ε of gate elision (bandwidth-wall paper §7.1): a selected expert is not executed when its gate, renormalised
    over itself and the best selected expert, is below ε. For top-2 models this is the paper's test; for larger K it
    elides fewer experts than a renormalisation over all K would."""
    prefetch: Prefetch = "none"
    """pre-gate: candidates are the next layer's router applied one layer early. token-prior: candidates are the
    experts of highest A priority for the token (§6.6)."""
    window: int = 0
    """w: how many candidates are visited."""
    budget: int | Literal["unbounded"] = 0
    """n: how many of them are inserted at most; "unbounded" becomes w."""
    gate: Gate = "none"
    """predicted: a candidate must be in TopK(g + λΔ̄·1[R]), R as it was before this step's insertions."""
    eviction: Eviction = "lru"
    """Which priority an eviction minimises; score is the A priority of §4.1."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("routing", Routing),
            ("eviction", Eviction),
            ("prefetch", Prefetch),
            ("gate", Gate),
            ("scale", Scale),
        ):
            if getattr(self, name) not in get_args(choices):
                raise UserError(f"{name} {getattr(self, name)!r} is not one of {', '.join(get_args(choices))}")
        if self.budget == UNBOUNDED:
            object.__setattr__(self, "budget", self.window)
        for name in ("top_j", "window", "budget"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UserError(f"{name} {value!r} is not a count: give 0 or more")
        # The bounds also refuse NaN, and what would overflow a float32 score.
        if not 0 <= self.lam <= 1e6:
            raise UserError(f"lambda {self.lam} is out of range: give 0 to 1e6")
        self._check_routing()
        self._check_prefetch()

    def _check_routing(self) -> None:
        if self.lam and not self.uses_bonus:
            raise UserError(f"lambda {self.lam:g} has no meaning for {self.routing} routing without a predicted gate")
        if self.scale == "running" and not self.uses_bonus:
            raise UserError("a running bonus scale has no meaning without a bonus")
        if self.top_j and self.routing != "cache-prior":
            raise UserError(f"top-J protection has no meaning for {self.routing} routing: it belongs to cache-prior")
        if (self.routing == "tau") != (self.tau != 0) or not 0 <= self.tau < 1:
            raise UserError(f"tau {self.tau:g} with {self.routing} routing: tau routing needs 0 < tau < 1, others none")
        if not 0 <= self.elide < 0.5:
            raise UserError(f"elide {self.elide:g} is not a gate threshold: give 0 (never) to below 0.5")

    def _check_prefetch(self) -> None:
        if self.prefetch == "none":
            if self.window or self.budget or self.gate != "none":
                raise UserError("window, budget and gate have no meaning without prefetch")
            if self.routing == "speculative":
                raise UserError("speculative routing executes the pre-gate's experts: it needs prefetch pre-gate")
            return
        if self.window < 1:
            raise UserError("prefetch needs a window of at least 1 candidate")
        if self.insertions > self.window:
            raise UserError(f"budget {self.budget} exceeds the window of {self.window}: at most {self.window}")
        if self.prefetch == "token-prior" and (self.gate != "none" or self.routing == "speculative"):
            raise UserError("a predicted gate and speculative routing need the pre-gate, not prefetch by token prior")

    @property
    def uses_bonus(self) -> bool:
        """Whether λΔ̄ enters a decision, so that a bonus scale is needed."""
        return self.routing == "cache-prior" or self.gate == "predicted"

    @property
    def needs_pregate(self) -> bool:
        return self.prefetch == "pre-gate"

    @property
    def needs_scores(self) -> bool:
        """Whether the router's own choice is not enough: other experts may run, or a running Δ̄ follows the scores."""
        return self.routing != "exact" or self.elide > 0 or (self.uses_bonus and self.scale == "running")

    @property
    def needs_scale(self) -> bool:
        """Whether Δ̄ must be given: a fixed one that enters a decision."""
        return self.uses_bonus and self.scale == "fixed"

    def completed(self, calibrated: bool, prior: bool | None = None) -> "Policy":
        """The policy as it runs: a fixed bonus scale that nothing provides becomes a running one.

        calibrated: whether there is a scale; prior: whether there is a token prior, by default the same. Raises
        `UserError` for prefetch by a token prior that is not there: what it would bring says nothing of the token.
        """
        if self.prefetch == "token-prior" and not (calibrated if prior is None else prior):
            raise UserError(
                "prefetch token-prior needs the token prior of a calibration: give --calibration, from edgemoe"
                " calibrate, or another prefetch"
            )
        return replace(self, scale="running") if self.needs_scale and not calibrated else self

    @property
    def uses_prior(self) -> bool:
        """Whether the A priority, and with it the token prior, enters a decision."""
        return self.eviction == "score" or self.prefetch == "token-prior"

    @property
    def insertions(self) -> int:
        """n as a number."""
        return int(self.budget)

    def check(self, n_experts: int, top_k: int, capacity: int) -> None:
        """Refuse a model and capacity that Algorithm 1 is not defined for: k ≤ C, w ≤ C, J ≤ k, C ≤ E."""
        if capacity > n_experts:
            raise UserError(
                f"{capacity} slots per layer, but the model has {n_experts} experts: give at most that many"
            )
        if top_k > capacity:
            raise UserError(
                f"a cache of {capacity} per layer cannot hold the {top_k} experts of one token: give at least {top_k}"
            )
        if self.window > capacity:
            raise UserError(
                f"a window of {self.window} candidates needs as many slots, there are {capacity}: lower one"
            )
        if self.top_j > top_k:
            raise UserError(f"top-J protection of {self.top_j} experts exceeds the model's top-{top_k}")

    @property
    def hash(self) -> str:
        """Twelve hex digits that name this configuration, the same on every machine and in every process."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        """`routing cache-prior, λ 0.2, eviction score, …`: what differs from plain exact LRU."""
        default = Policy()
        parts = [
            f"{f.name} {getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return ", ".join(parts) or "exact routing, lru"


PRESETS: dict[str, Policy] = {
    "exact-lru": Policy(),
    "exact-score": Policy(eviction="score"),
    "exact-prefetch": Policy(eviction="score", prefetch="pre-gate", window=8, budget=1),
    "cache-prior": Policy(routing="cache-prior", lam=0.2),
    "psr": Policy(routing="cache-prior", lam=0.2, eviction="score", prefetch="pre-gate", window=8, budget=1),
    "psr-gated": Policy(
        routing="cache-prior", lam=0.2, eviction="score", prefetch="pre-gate", window=8, budget=1, gate="predicted"
    ),
    "speculative": Policy(routing="speculative", eviction="score", prefetch="pre-gate", window=8, budget=UNBOUNDED),
}
"""The configurations of the papers' tables by name, at their operating points."""


OPERATING_POINT: dict[str, Any] = {"lam": 0.2, "tau": 0.5, "window": 8, "budget": 1}
"""What a field becomes where an override gives it a meaning that its preset did not have."""


def relevant(**chosen: Any) -> dict[str, bool]:
    """Which of the dependent fields mean something beside these values of routing, prefetch and gate."""
    gate = chosen["prefetch"] == "pre-gate"
    bonus = chosen["routing"] == "cache-prior" or (gate and chosen["gate"] == "predicted")
    return {
        "gate": gate,
        "lam": bonus,
        "scale": bonus,
        "top_j": chosen["routing"] == "cache-prior",
        "tau": chosen["routing"] == "tau",
        "window": chosen["prefetch"] != "none",
        "budget": chosen["prefetch"] != "none",
    }


def preset(name: str, **overrides: Any) -> Policy:
    """A preset with some fields replaced: `preset("psr", lam=0.3)`, `preset("psr", routing="exact")`.

    A field of the preset that an override leaves without meaning returns to its default, and one that gains a meaning
    takes its operating point; a new window keeps an unbounded budget unbounded. A name that ends in `.json` is a policy
    file of `edgemoe tune`. Raises `UserError` for an unknown name and for an override without meaning.
    """
    base = _named(name)
    chosen = asdict(base)
    if chosen["window"] and chosen["budget"] == chosen["window"]:
        chosen["budget"] = UNBOUNDED
    chosen |= overrides
    default = asdict(Policy())
    for field, matters in relevant(**chosen).items():
        if field in overrides:
            continue
        if not matters:
            chosen[field] = default[field]
        elif field in OPERATING_POINT and not relevant(**asdict(base))[field]:
            chosen[field] = OPERATING_POINT[field]
    return Policy(**chosen)


def _named(name: str) -> Policy:
    from edgemoe.policy.policy_file import is_policy_file, load_policy_file

    if is_policy_file(name):
        return load_policy_file(name).policy
    if name not in PRESETS:
        raise UserError(f"no policy preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def presets(names: Sequence[str], **overrides: Any) -> dict[str, Policy]:
    """Several presets, each with the overrides that mean something to it; one that means nothing to any is refused."""
    policies: dict[str, Policy] = {}
    used: set[str] = set()
    for name in names:
        base = asdict(_named(name))
        matters = relevant(**{**base, **overrides})
        mine = {field: value for field, value in overrides.items() if matters.get(field, True)}
        used |= mine.keys()
        policies[name] = preset(name, **mine)
    idle = [field for field in overrides if field not in used]
    if idle:
        what = {"lam": "lambda", "top_j": "top-J protection"}.get(idle[0], idle[0])
        raise UserError(f"{what} means nothing to {', '.join(names) or 'eviction rules'}: leave it out")
    return policies
