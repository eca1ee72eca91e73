"""The frontier of `edgemoe tune`: copies per token against KL, like Figure 1 of the PSR paper."""

from collections.abc import Sequence
from pathlib import Path

from edgemoe.evaluation.tune import Limits, Point, frontier


def draw(points: Sequence[Point], chosen: Point, limits: Limits, path: Path) -> None:
    """All points with 95% intervals of their KL, the frontier as a line, the limit, and the chosen point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4))
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for label, marker, family in (
        ("exact", "o", [p for p in points if not p.policy.uses_bonus]),
        ("cache-prior", "s", [p for p in points if p.policy.uses_bonus and p.policy.prefetch == "none"]),
        ("psr", "D", [p for p in points if p.policy.prefetch != "none" and p.policy.gate == "none"]),
        ("psr, gated", "X", [p for p in points if p.policy.gate != "none"]),
    ):
        if family:
            kl, widths = [p.kl.mean for p in family], [p.kl.half_width for p in family]
            copies = [p.copies for p in family]
            drawn = axis.errorbar(copies, kl, widths, fmt=marker, ms=5, elinewidth=0.6, label=label, zorder=3)
            drawn.lines[0].set_clip_on(label != "exact")  # exact routing lies on the axis, which would cut it
    best = frontier(points)
    axis.plot([p.copies for p in best], [p.kl.mean for p in best], color="gray", lw=1, zorder=0, label="frontier")
    axis.axhline(limits.max_kl, color="tab:red", ls="--", lw=1, label=f"at most {limits.max_kl:g}")
    axis.plot([chosen.copies], [chosen.kl.mean], "o", ms=13, mfc="none", mec="tab:red", label="chosen")
    axis.set_ylim(bottom=0)  # an interval may reach below, a KL does not
    axis.set_xlabel("copies per token")
    axis.set_ylabel("KL(exact ‖ steered), nats")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
