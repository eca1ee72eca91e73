"""The figures of a generation, as a person reads them after the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgemoe.cli.recording import Records
    from edgemoe.generation.summary import Summary

_ENDINGS = {
    "end": "the model ended the text",
    "stop": "a stop string",
    "length": "as many tokens as asked for (-n)",
    "context": "the context is full: -c gives a larger one",
    "interrupted": "interrupted",
}


def print_summary(summary: Summary, title: str, records: Records) -> None:
    """The figures of a generation, on standard error: standard output has the text and nothing else."""
    from rich.text import Text

    from edgemoe.cli.output import errors, say

    out, rows = errors(), list(_rows(summary, title))
    if records.verified and summary.prompt.tokens:
        rows.append(("slots", "each compared with its expert after every step: all as they should be"))
    if str(records):
        rows.append(("trace", str(records)))
    width = 2 + max(len(name) for name, _ in rows)
    out.print()
    for name, words in rows:
        say(out, Text.assemble((name.ljust(width), "bold"), words), hang=width)


def _rows(s: Summary, title: str) -> Iterator[tuple[str, str]]:
    from edgemoe.cli.output import counted
    from edgemoe.units import format_bytes

    rate = f", {s.tokens_per_s:.1f} tok/s" if s.tokens_per_s else ""
    yield title, f"{counted(s.generated_tokens, 'token')}{rate}; ended: {_ENDINGS[s.finish]}; seed {s.seed}"
    yield "prompt", _prompt(s)
    if parts := s.seconds_per_token:
        split = ", ".join(f"{name.replace('_', ' ')} {_seconds(t)}" for name, t in parts.items() if t)
        yield "time per token", f"{_seconds(sum(parts.values()))}: {split}"
    yield from _experts(s)
    if s.read_bytes_per_s:
        share = f": {s.share_of_disk:.0%} of what `edgemoe probe` measured" if s.share_of_disk else ""
        source = s.experts_from if s.experts_from == "disk" else f"from {s.experts_from}"
        yield source, f"{format_bytes(s.read_bytes_per_s)}/s{share}"
    d = s.decode
    held = f"{format_bytes(d.ram_bytes)} of RAM held"
    if s.vram_in_ram:
        held += f", {format_bytes(d.vram_bytes)} of it in place of VRAM"
    elif d.vram_bytes:
        held = f"{format_bytes(d.ram_bytes)} of RAM and {format_bytes(d.vram_bytes)} of VRAM held"
    yield "memory", f"{held}; context {s.context_tokens:,} of {s.n_ctx:,} tokens"


def _prompt(s: Summary) -> str:
    from edgemoe.cli.output import counted

    read = f"{s.read_tokens:,} of " if s.read_tokens < s.prompt_tokens else ""
    reused = f" ({s.reused_tokens:,} of them kept from before)" if s.reused_tokens else ""
    speed = f", {s.prompt_tokens_per_s:,.0f} tok/s" if s.prompt_tokens_per_s else ""
    first = f"; first token after {_seconds(s.first_token_s)}" if s.first_token_s is not None else ""
    return f"{read}{counted(s.prompt_tokens, 'token')}{reused}{speed}{first}"


def _experts(s: Summary) -> Iterator[tuple[str, str]]:
    """What was executed and moved; every number is per token that was decoded."""
    from edgemoe.units import format_bytes

    d, n = s.decode, s.decode.tokens
    if d.hit_rate is None or not n:
        return
    foretold = f" (predicted {s.predicted_hit_rate or 0:.1%} on the calibration's text)"
    if s.predicted_hit_rate is None:
        foretold = f" (no prediction: {s.unpredicted})" if s.unpredicted else ""
    rate = f"hit rate {d.hit_rate:.1%}{foretold}"
    yield "experts", f"{rate}: {d.loads / n:,.1f} loads per token, {d.hits / n:,.1f} of resident experts"
    moved = "reads" if s.experts_from == "disk" else "copies"
    reads = f"{d.demand_reads / n:,.1f} demand {moved} per token"
    if d.prefetch_reads:
        parts = (("in time", d.prefetch_in_time), ("late", d.prefetch_late), ("unused", d.prefetch_unused))
        how = ", ".join(f"{count / n:,.1f} {name}" for name, count in parts)
        reads += f", {d.prefetch_reads / n:,.1f} prefetched per token ({how})"
    yield moved, f"{reads}; {format_bytes(s.bytes_per_token or 0)} per token"


def _seconds(seconds: float) -> str:
    """`0.41 s`, `42.7 ms`, `310 µs`: three digits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
