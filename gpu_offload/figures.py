"""An executor's counters as the figures that every engine gives."""

import psutil

from edgemoe.generation.engine import EngineStats
from edgemoe.gpu_offload.executor import Counters


def engine_stats(
    counters: Counters, *, tokens: int, seconds: float, expert_bytes: int, timed: bool, vram_bytes: int
) -> EngineStats:
    """timed: whether waiting and deciding are known apart from computing; a device that does all three in one graph
    cannot tell, and then they are None."""
    c = counters
    return EngineStats(
        tokens=tokens,
        seconds=seconds,
        compute_s=max(seconds - c.wait_s - c.policy_s, 0.0) if timed else None,
        demand_wait_s=c.wait_s if timed else None,
        policy_s=c.policy_s if timed else None,
        loads=c.loads,
        hits=c.loads - c.misses,
        demand_reads=c.demand,
        demand_bytes=c.demand * expert_bytes,
        prefetch_reads=c.prefetch,
        prefetch_bytes=c.prefetch * expert_bytes,
        prefetch_in_time=c.in_time,
        prefetch_late=c.late,
        prefetch_unused=c.unused,
        ram_bytes=psutil.Process().memory_info().rss,
        vram_bytes=vram_bytes,
    )
