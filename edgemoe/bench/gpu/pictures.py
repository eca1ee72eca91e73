"""Figures 1, 2 and 4 of the PSR paper, of this run: latency against KL, its distribution, and what was copied."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.bench.gpu.clocks import label
from edgemoe.bench.gpu.frontier import family_of
from edgemoe.bench.gpu.rows import Row
from edgemoe.bench.gpu.run import Report

_PARTS = (
    ("demand", "tab:red", "demand: the layer waits for all of it"),
    ("late", "tab:orange", "prefetch, still under way when it was needed"),
    ("in_time", "tab:green", "prefetch, there in time"),
    ("unused", "tab:gray", "prefetch, not executed"),
)


def draw(report: Report, folder: Path) -> list[Path]:
    """Write what can be drawn into `folder`: returns the files."""
    return draw_rows(report.rows, report.n_experts, f"{report.subject}, {report.card}", folder)


def draw_rows(every: Sequence[Row], n_experts: int, title: str, folder: Path) -> list[Path]:
    """The same of rows that were kept; n_experts: slots that hold everything."""
    rows = [row for row in every if row.mean is not None]
    shares = list(dict.fromkeys(row.share for row in rows if row.slots < n_experts))
    drawn = []
    for name, make in (("latency.png", _distribution), ("copies.png", _decomposition), ("frontier.png", _frontier)):
        figure = make(rows, shares, title)
        if figure is not None:
            figure.savefig(folder / name, dpi=100)
            drawn.append(folder / name)
    return drawn


def _figure(count: int, title: str, height: float = 3.2) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height * count + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def _distribution(rows: Sequence[Row], shares: Sequence[str], title: str) -> Any:
    """Figure 2: the share of tokens that are slower than x."""
    if not shares:
        return None
    figure, axes = _figure(len(shares), title)
    names = list(dict.fromkeys(row.name for row in rows if row.share in shares))
    for axis, share in zip(axes, shares, strict=True):
        for row in (row for row in rows if row.share == share):
            slower = 1 - np.linspace(0, 1, len(row.quantiles))
            # A policy has one colour on all executors.
            style, colour = "-" if row.label == row.name else "--", f"C{names.index(row.name)}"
            axis.plot(1e3 * np.array(row.quantiles), slower, style, color=colour, lw=1.2, label=row.label)
        _log_scale(axis.set_xscale, axis.xaxis, (1, 2, 5))
        axis.set_ylabel(f"{share}: share of slower tokens")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=6)
    axes[-1].set_xlabel("ms per token")
    return figure


def _log_scale(set_scale: Callable[[str], None], axis: Any, digits: Sequence[int] = (1, 2, 3, 4, 6, 8)) -> None:
    """With plain numbers at these digits."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _decomposition(rows: Sequence[Row], shares: Sequence[str], title: str) -> Any:
    """Figure 4: copies by what they meant to the layer, and ms per token beside them."""
    shares = [share for share in shares if any(row.share == share and row.copies for row in rows)]
    if not shares:
        return None
    figure, axes = _figure(len(shares), title)
    for axis, share in zip(axes, shares, strict=True):
        found = [row for row in rows if row.share == share]
        places = np.arange(len(found))
        bottom = np.zeros(len(found))
        for name, colour, meaning in _PARTS:
            heights = np.array([getattr(row, name) or 0.0 for row in found])
            axis.bar(places, heights, bottom=bottom, color=colour, width=0.7, label=meaning)
            bottom += heights
        axis.set_ylim(0, 1.3 * max(float(bottom.max()), 1.0))
        axis.set_xticks(places, [row.label for row in found], rotation=30, ha="right", fontsize=7)
        axis.set_ylabel(f"{share}: copies per token")
        times = axis.twinx()
        times.plot(places, [1e3 * (row.mean or 0.0) for row in found], "ko", ms=4)
        times.set_ylim(0, 1.3e3 * max(row.mean or 0.0 for row in found))
        times.set_ylabel("ms per token (dots)")
    axes[0].legend(fontsize=6)
    return figure


def _frontier(rows: Sequence[Row], shares: Sequence[str], title: str) -> Any:
    """Figure 1: ms per token against KL, where a KL was given; on log scales, as rows are compared between."""
    shares = [share for share in shares if any(row.share == share and row.kl is not None for row in rows)]
    if not shares:
        return None
    figure, axes = _figure(len(shares), title, 4.0)
    families: dict[str, list[Row]] = {}
    for row in rows:
        if row.share in shares and row.kl is not None:
            families.setdefault(label(family_of(row.policy), row.executor), []).append(row)
    for axis, share in zip(axes, shares, strict=True):
        # A family has one colour and one marker at all residencies.
        for at, (name, found) in enumerate(families.items()):
            ordered = sorted((row for row in found if row.share == share), key=lambda row: row.kl or 0.0)
            if ordered:
                axis.plot(
                    [row.kl for row in ordered], [1e3 * (row.mean or 0.0) for row in ordered],
                    color=f"C{at}", marker="osDX^v<>Ph*"[at % 11], ms=5, lw=1, label=name,
                )  # fmt: skip
        # exact routing's 0 has no place on log scales
        if all(row.kl for found in families.values() for row in found if row.share == share):
            _log_scale(axis.set_xscale, axis.xaxis)
            _log_scale(axis.set_yscale, axis.yaxis)
        axis.set_xlabel("KL(exact ‖ steered), nats")
        axis.set_ylabel(f"{share}: ms per token")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return figure
