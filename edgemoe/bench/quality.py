"""What steering costs and saves on the demo model: reads, time, KL and perplexity at each policy and residency.

The shipped texts are cut in two: the first part calibrates (warm set, bonus scale, token prior), the last is what the
policies are forced through, one token per decode, against the exact engine's logits.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgemoe.bench.limits import Watch
from edgemoe.data import DOMAINS
from edgemoe.demo import demo_file, demo_model
from edgemoe.evaluation.llamacpp_divergence import Divergence, divergence, window_logits
from edgemoe.llamacpp.resident import ResidentEngine
from edgemoe.policy import Policy, preset
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.tracing.calibrate import calibrate
from edgemoe.tracing.capture import Settings
from edgemoe.tracing.texts import Source
from edgemoe.units import Residency

if TYPE_CHECKING:
    from edgemoe.calibration import Calibration

POLICIES: dict[str, Policy] = {
    "exact-lru": preset("exact-lru"),
    "cache-prior, LRU": preset("cache-prior"),
    "cache-prior, score": preset("cache-prior", eviction="score"),
    "psr": preset("psr"),
    "psr-gated": preset("psr-gated"),
}
RESIDENCIES = ("25%", "50%")
_CALIBRATION_BYTES = 40_000  # of each text; the windows come after


@dataclass(frozen=True)
class Extent:
    """How much: windows of each text, tokens of each, and tokens of each text to calibrate with."""

    windows: int = 2
    tokens: int = 128
    calibration: int = 4096


QUICK = Extent(1, 24, 128)


@dataclass(frozen=True)
class Point:
    """One policy at one residency. `token_s`: the median token of the first window of each text, nothing recorded."""

    policy: str
    residency: str
    slots: int
    divergence: Divergence
    reads: float  # from disk, per token
    read_bytes: float
    token_s: float
    config: str

    def as_json(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("policy", "residency", "slots", "reads", "read_bytes")}
        return {**figures, "token_s": self.token_s, "config": self.config, **self.divergence.as_json()}


def measure_quality(extent: Extent, threads: int, watch: Watch) -> list[Point]:
    """Every policy at every residency. Nothing but the demo model and its texts is needed."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-bench-") as folder:
        known = _calibrated(Path(folder), extent, watch)
    n_ctx = extent.tokens
    with ResidentEngine(demo_model(), n_ctx=n_ctx, n_ubatch=1, n_threads=threads, repack=False) as engine:
        windows = _windows(engine, extent)
        count = sum(len(window) - 1 for window in windows)
        timed = windows[:: extent.windows]
        with watch("exact routing", count, "tokens") as advance:
            exact = [window_logits(engine, window, advance) for window in windows]
    n_points = len(POLICIES) * len(RESIDENCIES)
    total = n_points * (count + sum(len(window) - 1 for window in timed))
    points = []
    with watch("policies on the demo model", total, "tokens") as advance:
        for residency in RESIDENCIES:
            for name, policy in POLICIES.items():
                settings: dict[str, Any] = {
                    "policy": policy,
                    "residency": Residency.parse(residency),
                    "n_ctx": n_ctx,
                    "n_threads": threads,
                    "calibration": known,
                    "chunk": 1,
                }
                with StreamingEngine(demo_model(), record=True, **settings) as engine:
                    found = divergence(engine, windows, exact, advance)
                with StreamingEngine(demo_model(), **settings) as engine:
                    points.append(_point(name, residency, engine, found, timed, advance))
    return points


def _point(
    name: str, residency: str, engine: StreamingEngine, found: Divergence, timed: Sequence[np.ndarray], advance: Any
) -> Point:
    before, seconds = engine.stats(), []
    for window in timed:
        engine.reset()
        for token in window[:-1].tolist():
            start = time.perf_counter()
            engine.decode(int(token))
            seconds.append(time.perf_counter() - start)
        advance(len(window) - 1)
    did = engine.stats() - before
    return Point(
        policy=name,
        residency=residency,
        slots=engine.capacity,
        divergence=found,
        reads=(did.demand_reads + did.prefetch_reads) / did.tokens,
        read_bytes=did.read_bytes / did.tokens,
        token_s=float(np.median(seconds)),
        config=engine.config_hash,
    )


def _calibrated(folder: Path, extent: Extent, watch: Watch) -> "Calibration":
    sources = []
    for domain in DOMAINS:
        text = folder / f"{domain}.txt"
        text.write_bytes(demo_file(f"{domain}.txt").read_bytes()[:_CALIBRATION_BYTES])
        sources.append(Source(domain, text))
    settings = Settings(max_tokens=extent.calibration)
    return calibrate(demo_model(), sources, folder / "demo.npz", settings, watch=watch)


def _windows(engine: ResidentEngine, extent: Extent) -> list[np.ndarray]:
    """Windows of each text in turn, from behind what calibrated."""
    windows = []
    for domain in DOMAINS:
        tokens = engine.tokenize(demo_file(f"{domain}.txt").read_bytes()[_CALIBRATION_BYTES:])
        windows += [tokens[i * extent.tokens : (i + 1) * extent.tokens] for i in range(extent.windows)]
    return windows
