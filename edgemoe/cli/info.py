"""`edgemoe info`: what a model is and where its bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    from edgemoe.model import Model, ModelGeometry


_SLOTS = "Slots: keep C experts of every MoE layer, copy others in when they fire."


def info(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A GGUF file, any shard of a split one, or a safetensors directory."),
    ],
    ctx: Annotated[
        int, typer.Option("--ctx", metavar="N", min=1, help="Context in tokens at which memory is counted.")
    ] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what a model is: experts and routing, bytes by part, bytes per token, and the memory it needs.

    Reads headers only, so that a model of any size answers at once. Sizes are decimal (1 GB = 10⁹ bytes).
    """
    from edgemoe.model import read_model

    found = read_model(model)
    if as_json:
        from json import dumps

        from edgemoe.model.report import model_report

        typer.echo(dumps(model_report(found, ctx), ensure_ascii=False))
    else:
        from edgemoe.cli.output import console

        show(found, ctx, console())


def show(model: Model, ctx: int, out: Console) -> None:
    """Print the panel, the tables and the next command to try."""
    from rich.text import Text

    from edgemoe.cli.output import say

    g = model.geometry
    out.print(card(model))
    for table in (_parts(g), _per_token(g, ctx), _memory(g, ctx)):
        out.print(table)
        out.print()
    if g.is_moe:
        say(out, Text(f"{_SLOTS}\n", style="dim"))
    words, command = _next_step(model)
    say(out, words)
    out.print(f"  {command}", style="bold", markup=False, soft_wrap=True)


def card(model: Model) -> Panel:
    """A few lines in a box: name, architecture, routing, size."""
    from rich.panel import Panel
    from rich.text import Text

    title = Text(model.geometry.name, style="bold")
    return Panel(Text(_identity(model)), title=title, title_align="left", padding=(0, 1))


def _identity(model: Model) -> str:
    from edgemoe.units import format_bytes

    g = model.geometry
    files = f"{len(model.files)} files" if len(model.files) > 1 else "1 file"
    types = ", ".join(
        f"{name} {size / sum(g.type_bytes.values()):.0%}" for name, size in list(g.type_bytes.items())[:3]
    )
    ends = f"context {g.n_ctx:,} · vocabulary {g.n_vocab:,}"
    lines = [
        f"{g.architecture} · {_billions(g.parameters)} parameters, {_billions(g.active_parameters)} per token"
        if g.is_moe
        else f"{g.architecture} · dense, {_billions(g.parameters)} parameters · {g.n_layers} layers",
        *(_routing(g) if g.is_moe else []),
        ends,
        f"{model.format}, {files}, {format_bytes(g.file_bytes)} · {types}",
    ]
    return "\n".join(lines)


def _routing(g: ModelGeometry) -> list[str]:
    from edgemoe.units import format_bytes, format_ranges

    moe = (
        f"all {g.n_layers} layers MoE"
        if g.n_moe_layers == g.n_layers
        else f"{g.n_moe_layers} of {g.n_layers} layers MoE"
    )
    if g.n_moe_layers != g.n_layers:
        moe += f" ({format_ranges(g.moe_layers, most=4)})"
    top_k = f"top-{g.top_k}" if len(set(g.layer_top_k)) == 1 else f"top-{min(g.layer_top_k)} to {g.top_k} by layer"
    rules = [f"{g.gating} gating"]
    rules += ["selection bias"] if g.selection_bias else []
    rules += [f"{g.expert_groups_used} of {g.expert_groups} groups"] if g.expert_groups else []
    rules += (
        [f"{g.n_shared_experts} shared {'expert' if g.n_shared_experts == 1 else 'experts'}"]
        if g.n_shared_experts
        else []
    )
    sizes = list(g.expert_sizes)
    size = format_bytes(sizes[0]) if len(sizes) == 1 else f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}"
    merged = ", gate and up merged" if g.merged_gate_up else ""
    return [
        f"{moe} · {g.n_experts} experts, {top_k}" + (f" · {rules[0]}" if len(rules) == 1 else ""),
        *([", ".join(rules)] if len(rules) > 1 else []),
        f"an expert: {g.d_model:,} × {g.d_expert:,} in {' + '.join(g.expert_types)}, {size}{merged}",
    ]


def _parts(g: ModelGeometry) -> Table:
    from edgemoe.units import format_bytes

    table = _table("Bytes in the file", "size", "share", "")
    total = max(sum(g.part_bytes.values()), 1)
    for part, size in sorted(g.part_bytes.items(), key=lambda item: -item[1]):
        if size:
            bar = "█" * round(24 * size / total) or "▏"
            table.add_row(part.value, format_bytes(size), f"{size / total:.1%}", f"[cyan]{bar}[/]")
    return table


def _per_token(g: ModelGeometry, ctx: int) -> Table:
    from edgemoe.units import format_bytes

    table = _table("Bytes per token of decoding", "size", "")
    spared = ["experts"] * g.is_moe + ["embeddings"] * (not g.tied_output)
    note = "all weights" if not spared else f"all but {' and '.join(spared)}"
    table.add_row("always read", format_bytes(g.always_read_bytes), note)
    if g.is_moe:
        loads = sum(g.layer_top_k)
        table.add_row("routed experts", format_bytes(g.active_expert_bytes), f"{loads} loads that a cache can catch")
        share = f"{g.active_bytes / max(g.used_bytes, 1):.1%} of the weights"
        table.add_row("in all", format_bytes(g.active_bytes), share)
    table.add_row("KV cache, when full", format_bytes(g.kv.at(ctx)), _kv_note(g, ctx))
    return table


def _kv_note(g: ModelGeometry, ctx: int) -> str:
    from edgemoe.units import format_bytes

    notes = [f"{ctx:,} tokens × {format_bytes(g.kv.per_token)}, F16"]
    notes += ["latent attention"] if g.kv.latent else []
    notes += (
        [f"{g.kv.windowed / max(g.kv.per_token, 1):.0%} of it within a window of {g.kv.window:,}"]
        if g.kv.window
        else []
    )
    notes += [f"{g.kv.recurrent_layers} recurrent layers keep none"] if g.kv.recurrent_layers else []
    return "; ".join(notes)


def _memory(g: ModelGeometry, ctx: int) -> Table:
    from edgemoe.model.memory import memory_needs
    from edgemoe.units import format_bytes

    table = _table(f"Least memory at {ctx:,} tokens", "VRAM", "RAM", "")
    for need in memory_needs(g, ctx):
        slots = f"C = {need.slots}, +{format_bytes(need.per_slot)} per slot" if need.slots else ""
        vram = format_bytes(need.vram) if need.vram else "–"
        table.add_row(need.how, vram, format_bytes(need.ram), slots)
    return table


def _next_step(model: Model) -> tuple[str, str]:
    """Words, and the command that they end with."""
    from shlex import quote

    if not model.geometry.is_moe:
        return "This model is dense: it has no experts to trace. See a real MoE at work with", "edgemoe demo"
    if model.format != "GGUF":
        return "Tracing needs GGUF: convert it, then", "edgemoe trace model.gguf -f TEXT -o trace.npz"
    path = quote(str(model.path))
    return "Next: see which experts fire on your text with", f"edgemoe trace {path} -f TEXT -o trace.npz"


def _table(title: str, *columns: str) -> Table:
    from edgemoe.cli.output import table

    made = table(title, *columns)
    made.columns[0].min_width = 29  # the tables below each other line up
    return made


def _billions(count: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:,}"
