"""`edgemoe info`: what a model is and where its bytes are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from edgemoe.model import Model, ModelGeometry


_SLOTS = "Slots: keep C experts of every MoE layer, copy others in when they fire."


def info(
    model: Annotated[Path, typer.Argument(help="A GGUF file, any shard of a split one, or a safetensors directory.")],
    ctx: Annotated[int, typer.Option("--ctx", min=1, help="Context in tokens at which memory is counted.")] = 4096,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what a model is: experts and routing, bytes by part, bytes per token, and the memory it needs.

    Reads headers only, so that a model of any size answers at once. Sizes are decimal (1 GB = 10⁹ bytes).
    """
    from edgemoe.model import read_model

    found = read_model(model)
    if json:
        from json import dumps

        from edgemoe.model.report import model_report

        typer.echo(dumps(model_report(found, ctx), ensure_ascii=False))
    else:
        from rich.console import Console

        show(found, ctx, Console(highlight=False))


def show(model: "Model", ctx: int, console: "Console") -> None:
    """Print the panel, the tables and the next command to try."""
    from rich.panel import Panel

    g = model.geometry
    console.print(Panel(identity(model), title=f"[bold]{_escape(g.name)}[/]", title_align="left", padding=(0, 1)))
    for table in (_parts(g), _per_token(g, ctx), _memory(g, ctx)):
        console.print(table)
        console.print()
    if g.is_moe:
        console.print(f"[dim]{_SLOTS}[/]\n")
    console.print(_next_step(model), soft_wrap=True)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def identity(model: "Model") -> str:
    """A few lines, in rich's markup: architecture, routing, size."""
    from edgemoe.units import format_bytes

    g = model.geometry
    files = f"{len(model.files)} files" if len(model.files) > 1 else "1 file"
    types = ", ".join(
        f"{name} {size / sum(g.type_bytes.values()):.0%}" for name, size in list(g.type_bytes.items())[:3]
    )
    ends = f"context {g.n_ctx:,} · vocabulary {g.n_vocab:,}"
    lines = [
        f"{_escape(g.architecture)} · {_billions(g.parameters)} parameters, {_billions(g.active_parameters)} per token"
        if g.is_moe
        else f"{_escape(g.architecture)} · dense, {_billions(g.parameters)} parameters · {g.n_layers} layers",
        *(_routing(g) if g.is_moe else []),
        ends,
        f"{model.format}, {files}, {format_bytes(g.file_bytes)} · {types}",
    ]
    return "\n".join(lines)


def _routing(g: "ModelGeometry") -> list[str]:
    from edgemoe.units import format_bytes

    moe = (
        f"all {g.n_layers} layers MoE"
        if g.n_moe_layers == g.n_layers
        else f"{g.n_moe_layers} of {g.n_layers} layers MoE"
    )
    if g.n_moe_layers != g.n_layers:
        moe += f" ({_ranges(g.moe_layers)})"
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


def _parts(g: "ModelGeometry") -> "Table":
    from edgemoe.units import format_bytes

    table = _table("Bytes in the file", "size", "share", "")
    total = max(sum(g.part_bytes.values()), 1)
    for part, size in sorted(g.part_bytes.items(), key=lambda item: -item[1]):
        if size:
            bar = "█" * round(24 * size / total) or "▏"
            table.add_row(part.value, format_bytes(size), f"{size / total:.1%}", f"[cyan]{bar}[/]")
    return table


def _per_token(g: "ModelGeometry", ctx: int) -> "Table":
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


def _kv_note(g: "ModelGeometry", ctx: int) -> str:
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


def _memory(g: "ModelGeometry", ctx: int) -> "Table":
    from edgemoe.model.memory import memory_needs
    from edgemoe.units import format_bytes

    table = _table(f"Least memory at {ctx:,} tokens", "VRAM", "RAM", "")
    for need in memory_needs(g, ctx):
        slots = f"C = {need.slots}, +{format_bytes(need.per_slot)} per slot" if need.slots else ""
        vram = format_bytes(need.vram) if need.vram else "–"
        table.add_row(need.how, vram, format_bytes(need.ram), slots)
    return table


def _next_step(model: "Model") -> str:
    from shlex import quote

    path = _escape(quote(str(model.path)))
    if not model.geometry.is_moe:
        return "This model is dense: it has no experts to trace. See a real MoE at work with  [bold]edgemoe demo[/]"
    if model.format != "GGUF":
        return "Tracing needs GGUF: convert it, then  [bold]edgemoe trace model.gguf -f TEXT -o trace.npz[/]"
    return f"Next: see which experts fire on your text with  [bold]edgemoe trace {path} -f TEXT -o trace.npz[/]"


def _table(title: str, *columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column(title, min_width=29)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table


def _billions(count: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:,}"


def _ranges(ids: "tuple[int, ...]") -> str:
    """`3–60` or `1, 3, 5, …`: runs are shortened, and so is a list of many runs."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(text[:4]) + (", …" if len(text) > 4 else "")
