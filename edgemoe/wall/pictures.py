"""Pictures of the wall: the ladder of bandwidths, speed by batch, speed by budget (arXiv 2608.18261, Figure 2).

In the style of `edgemoe.tracing.pictures`: each function returns a matplotlib Figure whose title states what it found.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np

from edgemoe.tracing.pictures import COLOURS, FAINT, INK, STYLE, save
from edgemoe.units import format_bytes
from edgemoe.wall.batch import Batch
from edgemoe.wall.ceiling import bandwidth_for
from edgemoe.wall.paths import paths
from edgemoe.wall.rates import NAMES
from edgemoe.wall.tiers import Path, Wall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TIER_WORDS = {
    "ssd": "SSD",
    "pcie": "PCIe, RAM to VRAM",
    "cpu": "experts on the CPU",
    "ram": "RAM loads",
    "vram": "VRAM",
}
_TIER_COLOURS = dict(zip(_TIER_WORDS, (COLOURS[1], COLOURS[4], COLOURS[3], COLOURS[0], COLOURS[2]), strict=True))
BUDGETS = 14  # points of the curve over budgets


def write_all(wall: Wall, path: Path | None, table: Sequence[Batch], target: float, folder: FilePath) -> list[FilePath]:
    """The pictures of `edgemoe wall --plots`; what there is nothing to draw of is left out."""
    written = [save(ladder(wall, target), folder / "wall-ladder.png")]
    if any(row.path for row in table):
        written.append(save(by_batch(table), folder / "wall-batch.png"))
    if path is not None and path.hit is not None:
        written.append(save(by_budget(wall, path), folder / "wall-budget.png"))
    return written


def ladder(wall: Wall, target: float) -> "Figure":
    """Every tier's rate on a log scale against the need of `target` tokens per second without any cache (Figure 2a)."""
    import matplotlib

    need = bandwidth_for(wall.fixed + wall.routed[1], target) / 1e9
    tiers = sorted(wall.machine.speeds.items(), key=lambda item: item[1].low)
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure, axes = _figure(7.6, 1.6 + 0.62 * len(tiers))
        least = min([need, *(speed.low / 1e9 for _, speed in tiers)]) / 3
        for at, (tier, speed) in enumerate(tiers):
            low, high = speed.low / 1e9, speed.high / 1e9
            axes.barh(at, low - least, left=least, height=0.56, color=_TIER_COLOURS[tier])
            axes.barh(at, high - low, left=low, height=0.56, color=_TIER_COLOURS[tier], alpha=0.4)
            short = f"{need / low:.0f}× short" if need / low >= 9.5 else f"{need / low:.1f}× short"
            text = f"{speed}" + (f"  {short}" if low < need * 0.995 else "  enough")
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(text, (high, at), fontsize=9.5, color=INK, bbox=behind, zorder=3, **place)
        axes.axvline(need, color=INK, linewidth=1.6, linestyle=(0, (4, 2)))
        axes.annotate(
            f"need: {_number(need)} GB/s", (need, -0.62), (4, 0), textcoords="offset points", fontsize=9.5, color=INK
        )
        axes.set_yticks(range(len(tiers)), [_TIER_WORDS[tier] for tier, _ in tiers])
        axes.set_xscale("log")
        axes.set_xlim(least, max([need, *(speed.high / 1e9 for _, speed in tiers)]) * 14)
        axes.set_ylim(-0.8, len(tiers) - 0.45)
        axes.set_xlabel("GB/s")
        axes.tick_params(axis="y", length=0)
        said = format_bytes(wall.fixed + wall.routed[1])
        _title(
            axes,
            _ladder_claim(tiers[0], need, target),
            f"{wall.geometry.name}: {said} per token, nothing cached; pale: at best",
        )
    return figure


def _ladder_claim(slowest: tuple, need: float, target: float) -> str:
    tier, speed = slowest
    times = need / (speed.low / 1e9)
    if times <= 1:
        return f"Every tier gives the {_number(need)} GB/s that {target:g} tok/s need"
    return f"{target:g} tok/s need {_number(need)} GB/s; the {NAMES[tier]} is {_number(times)}× short"


def by_batch(table: Sequence[Batch]) -> "Figure":
    """Tokens per second of all streams together, by the number of streams (Figure 2b), as a band from slow to fast."""
    import matplotlib

    rows = [(row.streams, *row.path.tokens_per_s, row.path.name) for row in table if row.path]
    streams, low, high = (np.array([row[column] for row in rows], dtype=float) for column in range(3))
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(7.6, 4.6)
        _band(axes, streams, low, high)
        axes.plot(
            streams,
            streams * low[0] / streams[0],
            color=FAINT,
            linestyle=(0, (1, 2)),
            label="streams that share every byte",
        )
        for at, row in enumerate(rows):
            if at == 0 or row[3] != rows[at - 1][3]:
                axes.annotate(row[3], (row[0], row[1]), (0, -14), textcoords="offset points", fontsize=8.5, ha="center")
        axes.set_xscale("log", base=2)
        axes.set_xticks(streams, [f"{int(count)}" for count in streams])
        axes.minorticks_off()
        axes.set_ylim(0, max(high) * 1.12)
        axes.set_xlabel("concurrent streams")
        axes.set_ylabel("tokens per second, all streams")
        gain = low[-1] / low[0]
        worth = f"{int(streams[-1])} streams together give {gain:.1f}× the tokens of one"
        _title(
            axes,
            worth if len(rows) > 1 else "One batch size: nothing to compare",
            f"the best way for each; {table[-1].source}",
        )
        _legend(axes)
    return figure


def by_budget(wall: Wall, path: Path) -> "Figure":
    """Tokens per second by the memory that misses are copied into: VRAM over PCIe, RAM from SSD."""
    import matplotlib

    memory = "vram" if any(leg.tier == "pcie" for leg in path.legs) else "ram"
    budgets, low, high = _over_budgets(wall, path, memory)
    now = getattr(wall.machine, f"{memory}_bytes") / 1e9
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(7.6, 4.6)
        _band(axes, budgets / 1e9, low, high)
        axes.axvline(now, color=FAINT, linewidth=0.9)
        axes.annotate(f"now: {format_bytes(now * 1e9)}", (now, 0), (4, 6), textcoords="offset points", fontsize=9)
        axes.set_ylim(0, max(high) * 1.1)
        axes.set_xlabel(f"{memory.upper()} that the model may use (GB)")
        axes.set_ylabel("tokens per second")
        at = float(np.interp(now, budgets / 1e9, low))
        claim = f"{format_bytes(now * 1e9)} give at least {_number(at)} tok/s, room for every expert {_number(low[-1])}"
        _title(axes, claim, f"{wall.geometry.name}, way: {path.name}, {path.how}")
        _legend(axes)
    return figure


def _over_budgets(wall: Wall, path: Path, memory: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Budgets in bytes from the least that this way needs to every expert, and its tokens per second there."""
    least = path.vram_need if memory == "vram" else path.ram_need
    most = least + wall.geometry.routed_bytes
    found = []
    for budget in np.linspace(least, most, BUDGETS):
        change: dict[str, Any] = {f"{memory}_bytes": int(budget) + 1}
        machine = replace(wall.machine, **change)
        same = next(way for way in paths(replace(wall, machine=machine)) if way.name == path.name)
        if same.possible:
            found.append((budget, *same.tokens_per_s))
    columns = np.array(found).T
    return columns[0], columns[1], columns[2]


def _band(axes: "Axes", at: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    axes.fill_between(at, low, high, color=COLOURS[0], alpha=0.16, linewidth=0)
    axes.plot(at, high, color=COLOURS[0], linewidth=1.2, label="all overlapped, best text")
    axes.plot(at, low, color=COLOURS[0], marker="o", markersize=4.5, label="nothing overlapped, worst text")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


def _figure(width: float, height: float) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    return figure, figure.subplots()


def _legend(axes: "Axes") -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9.5, handlelength=2.8)


def _title(axes: "Axes", claim: str, detail: str) -> None:
    axes.set_title(claim)
    axes.annotate(
        detail, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color="#555555", fontsize=9.5
    )
