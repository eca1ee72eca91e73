"""The disk's rate over request size, one line per depth: where requests are large enough, and how many must fly."""

from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.machine.profile import Ssd

_KIB = 1 << 10


def draw(ssd: Ssd, path: Path) -> None:
    """Write the picture (format by the name's ending). Raises `UserError` where it cannot be written."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    colours = plt.colormaps["viridis"]
    depths = sorted({point.depth for point in ssd.points})
    for axis, pattern in zip(axes, ("random", "sequential"), strict=True):
        for at, depth in enumerate(depths):
            points = sorted(
                (p for p in ssd.points if p.pattern == pattern and p.depth == depth), key=lambda p: p.request_bytes
            )
            sizes, rates = [p.request_bytes for p in points], [float(p.bytes_per_s) / 1e9 for p in points]
            errors = [rate * p.bytes_per_s.spread for rate, p in zip(rates, points, strict=True)]
            colour = colours(0.9 * at / max(len(depths) - 1, 1))
            axis.errorbar(sizes, rates, errors, marker="o", ms=3.5, lw=1.4, color=colour, label=f"{depth} in flight")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _name(size)))
        axis.set_title(f"{pattern} reads", loc="left")
        axis.set_xlabel("request size")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("GB/s")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    figure.suptitle(f"{ssd.label}, {ssd.method}", x=0.01, ha="left")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        plt.close(figure)


def _name(size: float) -> str:
    return f"{size / _KIB:.0f} KiB" if size < _KIB * _KIB else f"{size / _KIB / _KIB:.0f} MiB"
