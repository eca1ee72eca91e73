"""Pictures of a trace: load heat map, reuse by lag, working set, similarity, hit rate by capacity.

Each function returns a matplotlib Figure whose title states what it found; `save` writes it. No display is needed and
no global state is touched.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from edgemoe.errors import UserError
from edgemoe.tracing import stats
from edgemoe.tracing.summary import Summary, short_names
from edgemoe.tracing.tracefile import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf", ".jpg")
# Okabe and Ito's palette, told apart with any colour vision; yellow is left out: too faint for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
POLICY_COLOURS = {
    "belady": "#000000",
    "lru": "#0072B2",
    "lfu": "#56B4E9",
    "score": "#CC79A7",
    "static-oracle": "#009E73",
    "static-prefix": "#D55E00",
}
POLICY_NAMES = {
    "belady": "Belady (knows the future)",
    "lru": "LRU",
    "lfu": "LFU",
    "score": "score eviction (PSR)",
    "static-oracle": "pinned, with hindsight",
    "static-prefix": "pinned, from the first 20%",
}
INK, FAINT = "#222222", "#8a8a8a"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 26,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "figure.constrained_layout.use": True,
}


def save(figure: "Figure", path: Path) -> Path:
    """Write the picture (its name's ending decides the format); a `UserError` if that is not possible."""
    import matplotlib

    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"cannot write {path}: expected a picture's name, ending in {', '.join(ENDINGS)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE):
            figure.savefig(path, bbox_inches="tight", pad_inches=0.15)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name a folder that is writable") from None
    return path


def write_all(summary: Summary, folder: Path) -> list[Path]:
    """The pictures of `edgemoe stats --plots`: one heat map per text, and the three comparisons."""
    names = short_names([trace.name for trace in summary.traces])
    written = [
        save(load_heat_map(trace, name), folder / f"load-{_file_name(name)}.png")
        for trace, name in zip(summary.traces, names, strict=True)
    ]
    if summary.reuse["reuse"].notna().any():
        written.append(save(reuse_by_lag(summary.reuse), folder / "reuse-by-lag.png"))
    written.append(save(working_set_curve(summary.traces), folder / "working-set.png"))
    if len(summary.traces) > 1:
        written.append(save(similarity_matrix(summary.cosine, summary.jaccard), folder / "similarity.png"))
    return written


def load_heat_map(trace: Trace, name: str | None = None) -> "Figure":
    """Load of every expert (columns) of every layer (rows) over the even share, log scale; unused ones in black."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    loads = stats.expert_loads(trace)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.log2(loads / loads.mean(1, keepdims=True))
    relative[~np.isfinite(relative)] = np.nan
    share = _all(stats.working_set(trace, [0.95]))["share"].iloc[0]
    peak = _all(stats.load(trace))["imbalance"].iloc[0]
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = _figure(9.0, float(np.clip(2.2 + 0.085 * trace.n_layers, 3.2, 9.0)))
        # Without the map's darkest ends, so that black is told apart from the rarest.
        shades = matplotlib.colormaps["RdBu_r"](np.linspace(0.08, 0.92, 256))
        colours = ListedColormap(shades).with_extremes(bad="black")
        image = axes.imshow(relative, aspect="auto", cmap=colours, vmin=-4, vmax=4, interpolation="nearest")
        rows = range(0, trace.n_layers, -(-trace.n_layers // 9))
        axes.set_yticks(rows, [str(trace.layers[row]) for row in rows])
        axes.set_xlabel("expert")
        axes.set_ylabel("MoE layer")
        _title(
            axes,
            f"{name or trace.name}: {share:.0%} of the experts serve 95% of the loads",
            f"the busiest expert of a layer carries {peak:.1f}× its even share; {trace.n_tokens:,} tokens,"
            f" {trace.n_experts} experts, top-{trace.top_k}",
        )
        bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=30, extend="both")
        bar.set_ticks([-4, -2, 0, 2, 4], labels=["1/16×", "1/4×", "even", "4×", "16×"])
        bar.set_label("load ÷ even share (black: never)")
        bar.outline.set_visible(False)
    return figure


def reuse_by_lag(reuse: pd.DataFrame) -> "Figure":
    """Reuse (solid) and chance (dotted) by lag, a line per text, from the rows of `stats.reuse` over all layers.

    Where there are no such rows, those of the first layer found are drawn.
    """
    import matplotlib

    rows = _all(reuse).dropna(subset=["reuse"])
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(7.6, 4.6)
        groups = list(rows.groupby("trace", sort=False))
        names = short_names([str(name) for name, _ in groups])
        for look, name, (_, group) in zip(_looks(len(groups)), names, groups, strict=True):
            axes.plot(group["lag"], group["reuse"], markersize=4.5, label=name, **look)
            dots = {"color": look["color"], "linestyle": (0, (1, 2)), "linewidth": 1.4}
            axes.axhline(group["chance"].iloc[0], **dots)
        axes.plot([], [], color=FAINT, linestyle=(0, (1, 2)), linewidth=1.4, label="chance")
        lags = sorted(rows["lag"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(lags, [f"{lag:,}" for lag in lags])
        axes.minorticks_off()
        axes.set_ylim(0, _headroom(rows[["reuse", "chance"]].to_numpy().max()))
        axes.yaxis.set_major_formatter(_percent())
        axes.set_xlabel("lag (tokens)")
        axes.set_ylabel("experts executed again")
        nearest = rows[rows["lag"] == lags[0]]
        now, chance = nearest["reuse"].mean(), nearest["chance"].mean()
        when = "by the next token" if lags[0] == 1 else f"{lags[0]:,} tokens later"
        claim = f"{now:.0%} of the experts are used again {when}, {now / chance:.1f}× chance"
        _title(axes, claim, f"{_layer_words(rows)}; chance: the same expert frequencies without memory")
        _legend(axes)
    return figure


def working_set_curve(traces: Sequence[Trace]) -> "Figure":
    """Loads served by the most frequent experts of each layer, mean over layers, by the share of experts."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(7.6, 4.6)
        shares = []
        names = short_names([trace.name for trace in traces])
        for look, name, trace in zip(_looks(len(traces)), names, traces, strict=True):
            loads = np.sort(stats.expert_loads(trace), axis=1)[:, ::-1]
            served = np.cumsum(loads, axis=1) / np.maximum(loads.sum(1, keepdims=True), 1)
            curve = np.concatenate([[0.0], served[loads.sum(1) > 0].mean(0)])
            axes.plot(np.linspace(0, 1, trace.n_experts + 1), curve, label=name, **look | {"marker": ""})
            shares.append(_all(stats.working_set(trace, [0.95]))["share"].iloc[0])
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle=(0, (1, 2)), linewidth=1.4, label="even use")
        axes.axhline(0.95, color=FAINT, linewidth=0.9)
        axes.annotate("95%", (0.005, 0.95), (0, 3), textcoords="offset points", color=FAINT, fontsize=9)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_formatter(_percent())
        axes.yaxis.set_major_formatter(_percent())
        axes.set_xlabel("experts kept, most frequent first (share of each layer)")
        axes.set_ylabel("loads served")
        low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
        span = low if low == high else f"{low.rstrip('%')}–{high}"
        _title(axes, f"95% of the loads need {span} of the experts", "mean over layers; each text on its own")
        _legend(axes)
    return figure


def similarity_matrix(cosine: pd.DataFrame, jaccard: pd.DataFrame) -> "Figure":
    """Two matrices side by side: cosine of the load vectors, and Jaccard index of the 95% working sets."""
    import matplotlib

    names = short_names(list(cosine.index))
    side = float(np.clip(0.62 * len(names) + 2.1, 3.6, 9.0))
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "axes.titlepad": 10, "axes.titlesize": 11}):
        figure, (left, right) = _figure(2 * side - 0.8, side + 0.3, columns=2)
        _matrix(left, cosine.to_numpy(), names)
        _matrix(right, jaccard.to_numpy(), names)
        right.set_yticklabels([])
        left.set_title("cosine of the loads", fontweight="normal")
        right.set_title("Jaccard index of the sets that serve 95%", fontweight="normal")
        figure.suptitle(_least_alike(cosine, names) + "\n", x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    return figure


def _matrix(axes: "Axes", values: np.ndarray, names: list[str]) -> None:
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1.15)
    slanted: dict[str, Any] = (
        {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if max(map(len, names)) > 8 else {}
    )
    axes.set_xticks(range(len(names)), names, **slanted)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if len(names) > 16:
        return
    for (row, column), value in np.ndenumerate(values):
        text = "–" if np.isnan(value) else f"{value:.2f}"
        ink = "white" if value > 0.65 else INK
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9.5 if len(names) < 9 else 7)


def _least_alike(cosine: pd.DataFrame, names: list[str]) -> str:
    values = cosine.to_numpy().copy()
    values[np.tril_indices(len(values))] = np.nan
    if np.isnan(values).all():
        return "No two of these texts have experts to compare"
    a, b = np.unravel_index(np.nanargmin(values), values.shape)
    return f"{names[a]} and {names[b]} share their experts least: cosine {values[a, b]:.2f}"


def hit_rate_by_capacity(rows: pd.DataFrame, at: float = 0.25) -> "Figure":
    """Hit rate of each policy by the share of experts that a layer's cache holds (arXiv 2608.18261, Figure 3).

    `rows` has columns trace, layer, policy, share, hit_rate (as `edgemoe simulate` computes them); several traces or
    layers are averaged. The title compares the policies at the share nearest to `at`.
    """
    import matplotlib

    means = rows.groupby(["policy", "share"], sort=False)["hit_rate"].mean().reset_index()
    shares = np.sort(means["share"].unique())
    nearest = shares[np.argmin(np.abs(shares - at))]
    there = means[means["share"] == nearest].sort_values("hit_rate", ascending=False)
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(7.6, 4.6)
        for policy in there["policy"]:
            line = means[means["policy"] == policy].sort_values("share")
            colour = POLICY_COLOURS.get(policy) or COLOURS[len(axes.lines) % len(COLOURS)]
            style = (0, (4, 2)) if policy == "belady" else "-"
            label = POLICY_NAMES.get(policy, policy)
            axes.plot(line["share"], line["hit_rate"], color=colour, linestyle=style, marker="o", ms=4.5, label=label)
        axes.axvline(nearest, color=FAINT, linewidth=0.9)
        axes.set_xlim(0, min(1.0, shares[-1] * 1.04))
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_formatter(_percent())
        axes.yaxis.set_major_formatter(_percent())
        axes.set_xlabel("experts resident (share of each layer)")
        axes.set_ylabel("hit rate (share of loads)")
        texts = short_names(list(dict.fromkeys(rows["trace"])))
        _title(axes, _best_at(there, nearest), f"{', '.join(texts)}; {_layer_words(rows)}")
        _legend(axes)
    return figure


def _best_at(there: pd.DataFrame, share: float) -> str:
    real = there[~there["policy"].isin(["belady", "static-oracle"])]  # those two know the future
    best = (real if len(real) else there).iloc[0]
    name = POLICY_NAMES.get(best["policy"], best["policy"])
    return f"With {share:.0%} of the experts resident, {name} serves {best['hit_rate']:.0%} of the loads"


def _figure(width: float, height: float, columns: int = 1) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    return figure, figure.subplots(1, columns)


def _title(axes: "Axes", claim: str, detail: str) -> None:
    axes.set_title(claim)
    axes.annotate(
        detail, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color="#555555", fontsize=9.5
    )


def _legend(axes: "Axes") -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9.5, handlelength=2.8)


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


def _headroom(highest: float) -> float:
    return float(min(1.02, np.ceil(highest * 1.08 * 20) / 20))


def _all(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows over all layers; without any, those of the first layer there is."""
    rows = frame[frame["layer"] == stats.ALL]
    return rows if len(rows) else frame[frame["layer"] == frame["layer"].iloc[0]]


def _layer_words(rows: pd.DataFrame) -> str:
    layers = list(dict.fromkeys(rows["layer"]))
    if layers == [stats.ALL]:
        return "all layers"
    return f"layer {layers[0]}" if len(layers) == 1 else f"mean of {len(layers)} layers"


def _looks(count: int) -> list[dict[str, Any]]:
    """A colour for each line, and another dash and marker each time that the colours begin again."""
    again = (("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"))
    looks = [(COLOURS[i % len(COLOURS)], *again[i // len(COLOURS) % len(again)]) for i in range(count)]
    return [{"color": colour, "linestyle": line, "marker": marker} for colour, line, marker in looks]


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
