"""`edgemoe simulate`: what a cache of a given size would make of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from edgemoe.policy import Policy
    from edgemoe.tracing import Trace
    from edgemoe.tracing.simulate import Calibration


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace file.")],
    capacity: Annotated[
        str,
        typer.Option(
            "--capacity",
            metavar="LIST",
            help="Experts that fit: a share (25%), slots per layer (32) or bytes in all (6GB), separated by commas.",
        ),
    ] = "12.5%,25%,50%",
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="LIST",
            help="Eviction rules on the recorded loads (lru, lfu, static-prefix, static-oracle, score, belady) and"
            " presets of Algorithm 1 on the stored scores (exact-lru, exact-score, exact-prefetch, cache-prior, psr,"
            " psr-gated, speculative) or policy files of edgemoe tune, with their calibration; separated by commas.",
        ),
    ] = "lru,lfu,static-prefix,static-oracle,score,belady",
    layer: Annotated[
        str,
        typer.Option("--layer", metavar="N|all", help="One MoE layer, by the model's numbering, or the sum of all."),
    ] = "all",
    domain: Annotated[
        str | None, typer.Option("--domain", metavar="NAME", help="Only the windows of this domain.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="MODEL", help="The model that was traced: gives the bytes of an expert."),
    ] = None,
    expert_bytes: Annotated[
        str | None,
        typer.Option("--expert-bytes", metavar="SIZE", help="The size of one expert, like 10.6MB, instead of --model."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Where the presets' bonus scale, warm set and token prior come from: a file of `edgemoe calibrate`, or"
            " another trace of the same model (no prior). Default: what TRACE holds of them, or else a running scale,"
            " experts 0, 1, 2, ... and no prior.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="PLAN.json",
            help="Pin the experts that this plan of edgemoe wall --plan puts into VRAM or RAM, as edgemoe run --plan"
            " does, besides the slots of --capacity.",
        ),
    ] = None,
    lam: Annotated[
        float | None, typer.Option("--lambda", metavar="X", help="Presets: bonus of resident experts, in mean ranges.")
    ] = None,
    top_j: Annotated[
        int | None, typer.Option("--top-j", metavar="J", help="Presets: the router's best J get the bonus anyway.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option("--scale", metavar="fixed|running", help="Presets: where the mean range comes from.")
    ] = None,
    tau: Annotated[
        float | None, typer.Option("--tau", metavar="X", help="Presets: tolerance of --routing tau, 0 to 1.")
    ] = None,
    elide: Annotated[
        float | None, typer.Option("--elide", metavar="X", help="Presets: do not execute experts of a smaller gate.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="N|unbounded", help="Presets: prefetches per layer and token at most."),
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", metavar="W", help="Presets: how many predicted experts are considered.")
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option("--routing", metavar="NAME", help="Presets: exact, cache-prior, speculative or tau."),
    ] = None,
    eviction: Annotated[
        str | None, typer.Option("--eviction", metavar="NAME", help="Presets: lru, lfu, static or score.")
    ] = None,
    prefetch: Annotated[
        str | None, typer.Option("--prefetch", metavar="NAME", help="Presets: none, pre-gate or token-prior.")
    ] = None,
    gate: Annotated[
        str | None, typer.Option("--gate", metavar="NAME", help="Presets: none, or predicted: only if it would run.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also every capacity from 5% to 100% in steps of 5%.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw the hit rate over the sweep of capacities."),
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows as CSV.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Replay a trace through caches of several sizes: hit rates, misses and bytes per token.

    Eviction rules replay the recorded loads through an empty cache that lives through the whole trace. Presets replay
    Algorithm 1 of prefetch-steered routing on the stored scores, reset at each window: what the tiers would decide.
    """
    from edgemoe.cli.options import budget_option, layer_option, writable_file
    from edgemoe.cli.policy_options import check_scale
    from edgemoe.policy.policy_file import calibration_beside
    from edgemoe.tracing import load_trace
    from edgemoe.tracing.pictures import ENDINGS
    from edgemoe.wall.plan import pinned_in

    recorded = load_trace(trace)
    if domain is not None:
        recorded = recorded.only(domain)
    pinned = pinned_in(plan, recorded) if plan else None
    overrides = {
        "lam": lam,
        "top_j": top_j,
        "scale": scale,
        "tau": tau,
        "elide": elide,
        "budget": budget_option(budget),
        "window": window,
        "routing": routing,
        "eviction": eviction,
        "prefetch": prefetch,
        "gate": gate,
    }
    policies = _policies(policy, {name: value for name, value in overrides.items() if value is not None})
    sizes, slot_bytes = _sizes(recorded, model, expert_bytes)
    notes = _check_tuned(recorded, policies)
    known = _calibration(recorded, calibration or calibration_beside(*policies))
    check_scale(scale, filter(None, policies.values()), known.delta is not None)
    run = _Run(recorded, policies, layer_option(layer), known, sizes, as_json, notes, pinned)
    asked = _residencies(capacity, recorded.n_experts, slot_bytes)
    writable_file("--plot", plot, ENDINGS)
    writable_file("--csv", csv)
    rows = run.rows(list(asked), "simulating")
    swept = rows
    if sweep or plot:
        swept = run.sweep(rows)
    if plot:
        _draw(swept, plot)
    if sweep:
        rows = swept
    if csv:
        _write_csv(rows, csv)
    if as_json:
        _print_json(run, rows)
    else:
        _print(run, rows, asked, [path for path in (plot, csv) if path])


class _Run:
    """One command's replays: the same trace, policies, layer and calibration at any capacities."""

    def __init__(
        self,
        trace: Trace,
        policies: dict[str, Policy | None],
        layer: int | str | None,
        calibration: Calibration,
        sizes: list[int] | None,
        quiet: bool,
        tuned: list[str],
        pinned: list[tuple[int, ...]] | None,
    ) -> None:
        self.pinned = pinned
        self.trace, self.calibration, self.sizes, self.quiet, self.tuned = trace, calibration, sizes, quiet, tuned
        self.layer = "all" if layer is None else layer
        there = calibration.delta is not None, calibration.prior is not None
        self.policies = {name: policy and policy.completed(*there) for name, policy in policies.items()}

    def rows(self, capacities: list[int], what: str) -> pd.DataFrame:
        """Every policy at every capacity; what Algorithm 1 is not defined for is refused."""
        return self._replay([(self.policies, capacities)], what)

    def sweep(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The given rows and the missing ones of the sweep, by capacity. Presets start where they are defined."""
        import pandas as pd

        slots = {max(1, round(share / 100 * self.trace.n_experts)) for share in range(5, 101, 5)}
        new = sorted(c for c in slots if c not in set(rows["capacity"]))
        jobs = [
            ({name: policy}, [c for c in new if policy is None or c >= max(self.trace.top_k, policy.window)])
            for name, policy in self.policies.items()
        ]
        both = pd.concat([rows, self._replay(jobs, "sweeping")], ignore_index=True)
        order = {name: at for at, name in enumerate(self.policies)}
        return both.sort_values(["capacity", "policy"], key=lambda c: c.map(order) if c.name == "policy" else c)

    def _replay(self, jobs: list[tuple[dict[str, Policy | None], list[int]]], what: str) -> pd.DataFrame:
        import pandas as pd

        from edgemoe.progress import progress
        from edgemoe.tracing.simulate import n_replays, simulate

        total = sum(n_replays(self.trace, capacities, list(named), self.layer) for named, capacities in jobs)
        with progress(what, total, "replays of a layer", quiet=self.quiet) as advance:
            frames = [
                simulate(self.trace, capacities, named, self.layer, self.calibration, self.sizes, advance, self.pinned)
                for named, capacities in jobs
            ]
        return pd.concat([frame for frame in frames if len(frame)], ignore_index=True)

    def notes(self) -> list[str]:
        """What each preset was, and where its held-out knowledge came from."""
        steered = {name: policy for name, policy in self.policies.items() if policy}
        notes = [f"{name} ({policy.hash}): {policy}" for name, policy in steered.items()]
        if self.pinned is not None:
            counts = sorted({len(experts) for experts in self.pinned})
            many = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
            notes.append(f"the plan pins {many} experts per layer besides these slots; loading them is not counted")
        if not steered:
            return notes
        known = self.calibration
        warm = f"experts by frequency from {known.source}" if known.warm is not None else "experts 0 to C - 1"
        prior = f"token prior from {known.source}" if known.prior is not None else "no token prior"
        said = f"warm set: {warm}; {prior}"
        if any(policy.uses_bonus for policy in steered.values()):
            fixed = any(policy.needs_scale for policy in steered.values())
            said = f"bonus scale: {f'mean range from {known.source}' if fixed else 'running mean of the range'}; {said}"
        return [*notes, said, *self.tuned]


def _policies(text: str, overrides: dict[str, Any]) -> dict[str, Policy | None]:
    from edgemoe.errors import UserError
    from edgemoe.policy import PRESETS, presets
    from edgemoe.policy.eviction import RULES
    from edgemoe.policy.policy_file import is_policy_file

    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in RULES and name not in PRESETS and not is_policy_file(name):
            known = f"eviction rules are {', '.join(RULES)}; presets are {', '.join(PRESETS)}"
            raise UserError(f"no policy {name!r}: {known}")
    steered = presets([name for name in names if name not in RULES], **overrides)
    return {name: steered.get(name) for name in names}


def _check_tuned(recorded: Trace, policies: Iterable[str]) -> list[str]:
    """Refuse policy files that were tuned for another model than the trace's; what to know where it does not say."""
    from edgemoe.policy.policy_file import is_policy_file, load_policy_file

    notes = []
    for name in filter(is_policy_file, policies):
        file = load_policy_file(name)
        if "header_sha256" in recorded.meta:
            file.check_trace(name, recorded.meta["header_sha256"])
        else:
            notes.append(f"{name} was tuned for {file.model['name']}; this trace does not say which model it is of")
    return notes


def _residencies(text: str, n_experts: int, slot_bytes: int | None) -> dict[int, str]:
    """Slots per layer → what was asked for, in order."""
    from edgemoe.units import Residency

    asked = [Residency.parse(part) for part in text.split(",")]
    return {residency.slots(n_experts, slot_bytes): residency.text for residency in asked}


def _calibration(recorded: Trace, path: Path | None) -> Calibration:
    from edgemoe.calibration import is_calibration, load_calibration
    from edgemoe.tracing import load_trace
    from edgemoe.tracing.simulate import Calibration

    if path is None:
        return Calibration.stored(recorded)
    if is_calibration(path):
        return Calibration.loaded(load_calibration(path), recorded, path.name)
    return Calibration.measured(load_trace(path), recorded)


def _sizes(recorded: Trace, model: Path | None, size: str | None) -> tuple[list[int] | None, int | None]:
    """Bytes of one expert in each layer of the trace, and of one expert summed over all MoE layers of the model."""
    from edgemoe.errors import UserError
    from edgemoe.units import parse_bytes

    if model and size:
        raise UserError("--model and --expert-bytes both give the size of an expert: give one")
    if size:
        sizes = [parse_bytes(size)] * recorded.n_layers
        if not sizes[0]:
            raise UserError(f"--expert-bytes {size}: an expert has at least 1 byte")
        return sizes, sum(sizes)
    if not model:
        return None, None
    from edgemoe.model import read_model

    geometry = read_model(model).geometry
    by_layer = dict(zip(geometry.moe_layers, geometry.expert_bytes, strict=True))
    missing = [int(layer) for layer in recorded.layers if int(layer) not in by_layer]
    if missing or geometry.n_experts != recorded.n_experts:
        what = f"its layer {missing[0]} has no experts" if missing else f"it has {geometry.n_experts} experts per layer"
        raise UserError(f"{model} is not the model of {recorded.name} ({recorded.n_experts} experts): {what}")
    return [by_layer[int(layer)] for layer in recorded.layers], sum(geometry.expert_bytes)


def _draw(rows: pd.DataFrame, path: Path) -> None:
    from edgemoe.tracing.pictures import hit_rate_by_capacity, save

    save(hit_rate_by_capacity(rows), path)


def _write_csv(rows: pd.DataFrame, path: Path) -> None:
    from edgemoe.errors import UserError

    try:
        rows.to_csv(path, index=False)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _print_json(run: _Run, rows: pd.DataFrame) -> None:
    import json

    records = [{name: value for name, value in record.items() if value == value} for record in rows.to_dict("records")]
    typer.echo(json.dumps({"rows": records, "notes": run.notes()}, allow_nan=False))


def _print(run: _Run, rows: pd.DataFrame, asked: dict[int, str], written: list[Path]) -> None:
    from rich.text import Text

    from edgemoe.cli.output import console, say, say_notes, table

    out, trace = console(), run.trace
    over = f"layer {run.layer}" if isinstance(run.layer, int) else f"all {trace.n_layers} MoE layers"
    say(out, f"{trace.name}: {trace.n_tokens:,} tokens, {over}, top-{trace.top_k} of {trace.n_experts} experts")
    say(out, "Hits: the share of the expert loads (hit rate). All else is per token.\n")
    columns = {name: words for name, words in _COLUMNS.items() if name in rows and rows[name].notna().any()}
    shown = table("slots", "policy", *(words for words, _ in columns.values()), left=["policy"])
    text = {name: show(rows[name]) for name, (_, show) in columns.items()}
    previous = None
    for at, (_, row) in enumerate(rows.iterrows()):
        slots = _slots(row, asked) if row["capacity"] != previous else ""
        cells = [cells[at] for cells in text.values()]
        if previous is not None and slots:
            shown.add_row()
        shown.add_row(slots, Text(row["policy"]), *cells)
        previous = row["capacity"]
    out.print(shown)
    out.print()
    say_notes(out, run.notes(), written)


def _slots(row: pd.Series, asked: dict[int, str]) -> str:
    """`13.4% = 17`, or `17` where slots were asked for."""
    count = row["capacity"]
    text = asked.get(count, str(count))
    return str(count) if text == str(count) else f"{text} = {count}"


def _shares(column: pd.Series) -> list[str]:
    return [f"{value:.1%}" if value == value else "" for value in column]


def _figures(column: pd.Series) -> list[str]:
    """As many decimals as fit six characters, the same in the whole column; nothing where nothing is known."""
    top = column.max()
    digits = 3 if top < 99.9995 else 2 if top < 999.995 else 1
    return [f"{value:,.{digits}f}" if value == value else "" for value in column]


def _bytes(column: pd.Series) -> list[str]:
    from edgemoe.units import format_bytes

    return [format_bytes(value) if value == value else "" for value in column]


_COLUMNS: dict[str, tuple[str, Any]] = {
    "hit_rate": ("hits", _shares),
    "misses_per_token": ("misses", _figures),
    "prefetch_per_token": ("prefetch", _figures),
    "unused_per_token": ("unused", _figures),
    "replaced_per_token": ("replaced", _figures),
    "bytes_per_token": ("bytes", _bytes),
}
