"""How fast loads are replayed through eviction rules: `python tests/bench/bench_eviction.py`.

The physics: a load is two bytes, read once, so memory is no limit (50 M loads/s are 0.1 GB/s). What a load costs is a
chain of dependent reads in a table of E experts, which lives in the first-level cache (about 5 cycles each), and a
branch on hit or miss that no predictor can know: at a miss rate of 0.4, some 15 cycles on every fifth load. LRU adds
the unlinking and linking of a list, about 10 reads and writes. At 3 GHz that makes 10 to 15 ns, 65 to 100 M loads/s.
Belady scans the C slots for the farthest next use, but only on a miss; its first pass, backwards over the trace, fills
8 bytes per load, which do leave the cache.

The trace has the shape of 32,000 tokens of Qwen3-30B-A3B: 48 layers, 128 experts, top-8, 12.3 M loads. It is synthetic,
with a share of experts taken over from the previous token that gives its lag-1 reuse (0.44); `--trace FILE` replays a
real one instead. One warm-up run compiles; then each rule runs `--repeat` times in turn, in CPU time of one core.
The last line is JSON.
"""

# ruff: noqa: T201
import argparse
import json
import statistics
import time

import numpy as np

from edgemoe.policy.eviction import RULES
from edgemoe.tracing import load_trace

LAYERS, TOKENS, K, EXPERTS = 48, 32_000, 8, 128
REUSED = 0.35


def synthetic(seed: int = 0) -> np.ndarray:
    """Loads [L, T, k] int16: an expert of the last token is kept with probability REUSED, others come by popularity."""
    rng = np.random.default_rng(seed)
    loads = np.empty((LAYERS, TOKENS, K), dtype=np.int16)
    for layer in range(LAYERS):
        popularity = np.log(rng.dirichlet(np.full(EXPERTS, 0.8)) + 1e-9).astype(np.float32)
        noise = rng.gumbel(size=(TOKENS, EXPERTS)).astype(np.float32)
        ranked = np.argpartition(-(popularity + noise), 2 * K, axis=1)[:, : 2 * K]
        kept = rng.random((TOKENS, K)) < REUSED
        previous = ranked[0, :K].tolist()
        for t in range(TOKENS):
            keep = [e for e, stays in zip(previous, kept[t], strict=True) if stays]
            fresh = [e for e in ranked[t].tolist() if e not in keep]
            previous = (keep + fresh)[:K]
            loads[layer, t] = previous
    return loads


def measure(loads: np.ndarray, n_experts: int, capacity: int, repeat: int) -> dict[str, dict[str, float]]:
    """Median M loads/s and the hit rate of every rule."""
    total = int((loads >= 0).sum())
    seconds: dict[str, list[float]] = {rule: [] for rule in RULES}
    misses = {rule: sum(replay(layer, n_experts, capacity) for layer in loads) for rule, replay in RULES.items()}
    for _ in range(repeat):
        for rule, replay in RULES.items():
            start = time.process_time()
            for layer in loads:
                replay(layer, n_experts, capacity)
            seconds[rule].append(time.process_time() - start)
    return {
        rule: {
            "M_loads_per_s": round(total / statistics.median(times) / 1e6, 1),
            "hit_rate": round(1 - misses[rule] / total, 4),
        }
        for rule, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="a trace file instead of the synthetic one")
    parser.add_argument("--share", type=float, default=0.134, help="experts resident (default 0.134)")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.trace:
        trace = load_trace(arguments.trace)
        loads, n_experts = np.ascontiguousarray(trace.experts), trace.n_experts
    else:
        loads, n_experts = synthetic(), EXPERTS
    capacity = round(arguments.share * n_experts)
    reuse = np.mean([(loads[:, 1:, i, None] == loads[:, :-1]).any(-1).mean() for i in range(loads.shape[2])])
    print(f"{loads.size:,} loads, {capacity} of {n_experts} experts resident, lag-1 reuse {reuse:.3f}")
    rules = measure(loads, n_experts, capacity, arguments.repeat)
    for rule, figures in rules.items():
        print(f"{rule:14} {figures['M_loads_per_s']:7.1f} M loads/s   hit rate {figures['hit_rate']:.1%}")
    print(json.dumps({"loads": loads.size, "capacity": capacity, "repeat": arguments.repeat, "rules": rules}))


if __name__ == "__main__":
    main()
