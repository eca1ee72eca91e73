"""`edgemoe wall`: how fast can this model go on this machine, and what would have to change?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from edgemoe.wall.report import Answer


def wall(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PRESET",
            help="A GGUF file, a safetensors directory, or a published model by name, with a quantisation if you like:"
            " qwen3-235b-a22b:Q4_K_M, qwen3-30b-a3b, olmoe-1b-7b, moonlight-16b-a3b, qwen3.6-35b-a3b, gpt-oss-120b,"
            " deepseek-v3.",
        ),
    ],
    ram: Annotated[
        str | None,
        typer.Option("--ram", metavar="SIZE", help="RAM that the model may use, like 18GB. Default: what is free now."),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option("--vram", metavar="SIZE", help="VRAM that the model may use. Default: the profiled GPU's."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            "--trace",
            metavar="TRACE",
            help="Take hit rates from a trace of this model; give it several times for several texts. Default: the band"
            " that published traces span.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="What the cache evicts, as in `edgemoe simulate`: lru, lfu, score, static-prefix, static-oracle,"
            " belady, or a preset of Algorithm 1.",
        ),
    ] = "lru",
    hit_rate: Annotated[
        str | None, typer.Option("--hit-rate", metavar="SHARE", help="Say the hit rate yourself, like 65.9%.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="LIST", help="Also for so many concurrent streams, like 1,8,32.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option("--target", metavar="TOK/S", help="What it would take to reach so many tokens per second."),
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx",
            min=1,
            help="Tokens in the context, whose KV cache is read. Default: 4096, or what the model was trained for.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="FILE|none",
            help="Machine profile of `edgemoe probe`. Default: this machine's. none: only the rates given here, to ask"
            " about another machine.",
        ),
    ] = None,
    ssd: Annotated[str | None, typer.Option("--ssd", metavar="RATE", help="SSD reads, like 2.4GB/s.")] = None,
    ram_bandwidth: Annotated[
        str | None, typer.Option("--ram-bandwidth", metavar="RATE", help="RAM loads, like 50GB/s.")
    ] = None,
    cpu_experts: Annotated[
        str | None,
        typer.Option("--cpu-experts", metavar="RATE", help="Experts that the CPU executes. Default: a share of RAM's."),
    ] = None,
    pcie: Annotated[str | None, typer.Option("--pcie", metavar="RATE", help="RAM to VRAM, like 25GB/s.")] = None,
    vram_bandwidth: Annotated[
        str | None, typer.Option("--vram-bandwidth", metavar="RATE", help="VRAM reads, like 448GB/s.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="OUT.json",
            help="Write which experts to keep in VRAM, RAM and on SSD, by the heat of --trace.",
        ),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="DIR", help="Draw the rates, speed by batch, speed by budget.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Decode with llama.cpp on this machine, all in RAM, and compare: a GGUF that fits."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Predict how fast a model can decode on a machine, what bounds it, and what a faster machine would need.

    Bytes per token over bandwidth, for every way of running the model that its memory allows. The answer is a range
    with its reasons: from nothing overlapped at the worst rates to everything overlapped at the best. Only bytes are
    counted.
    """
    from dataclasses import replace

    from edgemoe.cli.wall_run import notes_on_plan, run_room
    from edgemoe.wall.ask import Question, ask

    rates = {"ssd": ssd, "ram": ram_bandwidth, "cpu": cpu_experts, "pcie": pcie, "vram": vram_bandwidth}
    answer = ask(
        Question(
            model=model,
            ram=ram,
            vram=vram,
            traces=tuple(trace or ()),
            policy=policy,
            hit_rate=hit_rate,
            batches=batch,
            target=target,
            n_ctx=ctx,
            profile=profile,
            rates={tier: text for tier, text in rates.items() if text is not None},
            plan=plan,
            verify=verify,
        ),
        run_room,
    )
    answer = replace(answer, notes=(*answer.notes, *notes_on_plan(answer)))
    if verify:
        answer = _verified(answer, quiet=as_json)
    written = [plan] if plan else []
    if plots:
        from edgemoe.wall.pictures import write_all

        written += write_all(answer.wall, answer.best, answer.batches, target or 10.0, plots)
    if as_json:
        import json

        from edgemoe.wall.report import as_json as report

        typer.echo(json.dumps(report(answer), allow_nan=False))
    else:
        _print(answer, written, bool(trace))


def _verified(answer: Answer, quiet: bool) -> Answer:
    """The answer with the measurement beside it."""
    from dataclasses import replace

    from edgemoe.progress import progress
    from edgemoe.wall.verify import n_rounds, verify

    assert answer.model is not None and answer.profile is not None  # `ask` refuses the question otherwise
    with progress("decoding", n_rounds(), "rounds", quiet=quiet) as advance:
        return replace(answer, verified=verify(answer.model, answer.profile, advance=advance))


def _print(answer: Answer, written: list[Path], traced: bool) -> None:
    from rich.text import Text

    from edgemoe.cli.output import console as output
    from edgemoe.cli.output import say, say_notes

    console = output()
    _headline(answer, console)
    for table in (_bytes(answer), _machine(answer), _ways(answer)):
        console.print(table)
        console.print()
    _reasons(answer, console)
    if answer.batches:
        for table in _batches(answer):
            console.print(table)
            console.print()
    if answer.residency:
        console.print(_residency(answer))
        console.print()
    _target(answer, console)
    if answer.verified:
        _print_verified(answer, console)
    if answer.plan:
        shares = ", ".join(f"{share:.1%} from {tier.upper()}" for tier, share in answer.plan.loads.items())
        say(console, Text.assemble(("plan", "bold"), f" serves the traced loads {shares}"), hang=5)
    say_notes(console, answer.notes, written)
    if not traced and answer.wall.geometry.is_moe:
        how = ("edgemoe trace", "bold"), ", then --trace"
        say(console, Text.assemble("Narrow the range with a trace of this model on your text:  ", *how))


def _paragraph(console: Console, bold: str, text: str) -> None:
    from rich.text import Text

    from edgemoe.cli.output import say

    say(console, Text.assemble((bold, "bold"), text))


def _point(console: Console, text: str) -> None:
    """One of several under a paragraph."""
    from edgemoe.cli.output import say

    say(console, f"  {text}", hang=4)


def _headline(answer: Answer, console: Console) -> None:
    from edgemoe.wall.rates import format_pair

    best, name = answer.best, answer.wall.geometry.name
    if best is None:
        _paragraph(console, name, ": no way of running it is possible with what is known of the machine\n")
        return
    low, high = best.tokens_per_s
    _paragraph(console, f"{name}: {format_pair(low, high)} tok/s", f", {best.name}, bound by {best.bound}\n")


def _bytes(answer: Answer) -> Table:
    from edgemoe.units import format_bytes

    token = answer.wall.token
    table = _table("Bytes per token", "size", "share")
    rows = {
        "routed experts": token.routed,
        "shared experts": token.shared,
        "attention": token.attention,
        "dense FFN": token.dense,
        "output and embeddings": token.output + token.embedding,
        "routers, norms": token.routers + token.norms,
        f"KV cache at {answer.wall.n_ctx:,} tokens": token.kv,
    }
    for name, size in rows.items():
        if size:
            table.add_row(name, format_bytes(size), f"{size / token.total:.1%}")
    table.add_row("in all", format_bytes(token.total), "")
    return table


def _machine(answer: Answer) -> Table:
    from edgemoe.units import format_bytes
    from edgemoe.wall.rates import NAMES

    machine = answer.wall.machine
    words = {"cpu": "experts on the CPU", "pcie": "PCIe, RAM to VRAM"}
    table = _table("The machine", "gives", "")
    for tier, speed in machine.speeds.items():
        table.add_row(words.get(tier, NAMES[tier]), f"{speed}", f"[dim]{speed.source}[/]")
    for name, size, source in (
        ("RAM to use", machine.ram_bytes, machine.ram_source),
        ("VRAM to use", machine.vram_bytes, machine.vram_source),
    ):
        table.add_row(name, format_bytes(size) if size else "–", f"[dim]{source}[/]")
    return table


def _ways(answer: Answer) -> Table:
    from edgemoe.wall.rates import NAMES, format_pair

    table = _table("Ways to run it", "tok/s", "bound by", "")
    for path in answer.ways:
        if not path.possible:
            table.add_row(f"[dim]{path.name}[/]", "–", "", f"[dim]{path.missing}[/]")
            continue
        shares = " · ".join(f"{NAMES[tier]} {share:.0%}" for tier, share in path.shares().items())
        name = f"[bold]{path.name}[/]" if path is answer.best else path.name
        table.add_row(name, format_pair(*path.tokens_per_s), path.bound, f"time at worst: {shares}")
    return table


def _reasons(answer: Answer, console: Console) -> None:
    if answer.best is None:
        return
    _paragraph(console, "Why a range", f" ({answer.best.name}: {answer.best.how})")
    for reason in answer.best.reasons or ("one rate, nothing to overlap: only what is not counted makes it slower",):
        _point(console, reason)
    console.print()


def _batches(answer: Answer) -> tuple[Table, Table]:
    """What a step of several streams needs, and what all of them together get."""
    from edgemoe.wall.rates import format_pair, format_range

    needs = _table("Streams", "experts/layer", "if independent", "bytes per step", "slots", "hits")
    gets = _table("Streams, tok/s", "reads + computing", "max(reads, computing)", "way")
    for row in answer.batches:
        path, streams = row.path, str(row.streams)
        slots = str(min(path.slots)) if path and path.slots else ""
        hit = str(path.hit) if path and path.hit else ""
        size = format_range(*row.step_bytes)
        needs.add_row(streams, format_pair(*row.union), f"{row.independent:.1f}", size, slots, hit)
        if path is None:
            gets.add_row(streams, "–", "–", "none: their KV caches do not fit")
            continue
        overlapped = format_pair(*path.overlapped) if path.copies else ""
        gets.add_row(streams, format_pair(*path.in_turn), overlapped, path.name)
    needs.caption = f"experts/layer: {answer.batches[-1].source}"
    gets.caption = (
        "of all together; exact routing without prediction gets the first, all predicted a layer early the second"
    )
    return needs, gets


def _residency(answer: Answer) -> Table:
    table = _table("Residency, same bytes", "loads served", "")
    for row in answer.residency:
        low, high = (f"{share:.1%}" for share in row.hit_rate)
        table.add_row(row.name, low if low == high else f"{low}–{high}", f"[dim]{row.how}[/]")
    table.caption = "second half of each text"
    return table


def _target(answer: Answer, console: Console) -> None:
    from edgemoe.units import format_bytes
    from edgemoe.wall.rates import NAMES

    c = answer.ceiling
    if c is None:
        return
    console.print(f"[bold]For {c.target:g} tok/s[/] ({c.path}): {c.reached}")
    short = [
        f"{NAMES[tier]} {c.bandwidth / speed.high:.2g}× short"
        for tier, speed in answer.wall.machine.speeds.items()
        if c.bandwidth > speed.high
    ]
    has = ", ".join(short) or "every tier has it"
    _point(console, f"nothing cached: {format_bytes(c.bandwidth)}/s to all of a token's bytes; {has}")
    for line in c.advice:
        _point(console, line)
    console.print()


def _print_verified(answer: Answer, console: Console) -> None:
    from edgemoe.units import format_bytes
    from edgemoe.wall.rates import format_number

    v = answer.verified
    assert v is not None
    predicted, measured = format_number(v.predicted.tokens_per_s), format_number(v.measured.median)
    console.print(f"[bold]Verified[/] (all in RAM, {v.threads} threads, {v.context} tokens of context)")
    _point(console, f"predicted {predicted} tok/s, measured {measured}: {v.error:+.1%}")
    rounds = f"{v.measured.rounds} rounds ± {v.measured.spread:.1%}"
    settled = "" if v.measured.stable else ", not settled: is something else running?"
    _point(console, f"{format_bytes(v.bytes_per_s)}/s of weights and cache, {rounds}{settled}")
    if abs(v.drift - 1) >= 0.02:
        now = f"{v.reference} now get {v.drift:.0%} of what the profile says"
        _point(console, f"the machine has changed since: {now}; with that, {v.error_now:+.1%}")
    for kind, sources in v.predicted.estimated.items():
        _point(console, f"{kind} was not measured: {', '.join(sources)} stood in for it")
    console.print()


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="bold")
    table.caption_justify = "left"
    table.add_column(title, no_wrap=True)
    for column in columns:
        left = column in ("", "bound by", "way")
        table.add_column(column, justify="left" if left else "right", no_wrap=not left)
    return table
