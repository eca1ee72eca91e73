"""What `edgemoe probe` prints: one table per tier, every figure with its spread, and the ladder that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from edgemoe.machine.profile import ExpertRate, GpuRates, Profile, RamRates, Rate, Ssd

_BAR, _SHORT_BAR = 20, 8
_EXPERT_BYTES = 10_600_000  # one of Qwen3-235B-A22B's, the bandwidth-wall paper's example


def show(profile: Profile, path: Path, plot: Path | None) -> None:
    """Print a profile that was just saved at `path`."""
    from edgemoe.cli.output import console as output

    console = output()
    if profile.ssd:
        _show_disk(profile.ssd, console)
    console.print(_ram(profile.ram), "")
    if profile.cpu_experts:
        console.print(_products(profile), "")
    for gpu in profile.gpus:
        console.print(_gpu(gpu), "")
    console.print(_ladder(profile), "")
    for note in profile.notes:
        console.print(f"[yellow]{_escape(note)}[/]", soft_wrap=True)
    about = "± is half the interquartile range of the rounds"
    if profile.unstable:
        about += "; [yellow]~[/] marks medians that had not settled to 3% when time was up: something else was running"
    console.print(f"[dim]{about}.[/]", soft_wrap=True)
    for what, where in (("profile", path), ("curve", plot)):
        if where:
            console.print(f"{what} → [bold]{_escape(str(where))}[/]", soft_wrap=True)
    console.print("Next: what a model can do on this machine:  [bold]edgemoe wall MODEL[/]", soft_wrap=True)


def _show_disk(ssd: Ssd, console: Console) -> None:
    from edgemoe.units import format_bytes

    console.print(f"[bold]{_escape(ssd.label)}[/], under {_escape(ssd.dir)}", soft_wrap=True)
    how = f"{ssd.method}, {ssd.alignment}-byte alignment" if ssd.method == "O_DIRECT" else ssd.method
    console.print(f"[dim]{how}; {_escape(ssd.source)} of {format_bytes(ssd.source_bytes)}[/]", soft_wrap=True)
    console.print(f"[dim]{_escape('; '.join(ssd.evidence))}[/]\n", soft_wrap=True)
    for pattern in ("random", "sequential"):
        console.print(_reads(ssd, pattern), "")
    console.print("[dim]×8: eight requests in flight; bars: the best of a row[/]\n")


def _reads(ssd: Ssd, pattern: str) -> Table:
    """Rows: request sizes; columns: depths; the curve of the best depth beside them."""
    points = [point for point in ssd.points if point.pattern == pattern]
    depths = sorted({point.depth for point in points})
    table = _table(f"{pattern.capitalize()} reads, GB/s", *(f"×{depth}" for depth in depths), "rounds", "")
    top = max(float(point.bytes_per_s) for point in ssd.points)
    for size in sorted({point.request_bytes for point in points}):
        row = {point.depth: point.bytes_per_s for point in points if point.request_bytes == size}
        best = max(map(float, row.values()))
        cells = (_figure(row[depth]) if depth in row else "–" for depth in depths)
        table.add_row(_binary(size), *cells, _rounds(row.values()), _bar(best / top, _SHORT_BAR))
    return table


def _ram(ram: RamRates) -> Table:
    from edgemoe.units import format_bytes

    table = _table("RAM, GB/s", "load", "copy (read + write)", "rounds", "")
    top = float(ram.best_load)
    for load, copy in zip(ram.load, ram.copy, strict=True):
        threads = f"{load.threads} thread{'s' * (load.threads > 1)}"
        both = (load.bytes_per_s, copy.bytes_per_s)
        table.add_row(threads, *map(_figure, both), _rounds(both), _bar(float(load.bytes_per_s) / top))
    table.caption = f"arrays of {format_bytes(ram.array_bytes)}; last-level cache {format_bytes(ram.cache_bytes)}"
    table.caption_justify = "left"
    return table


def _products(profile: Profile) -> Table:
    """ggml's products with all threads; how much of the raw load rate they reach."""
    most = max(rate.threads for rate in profile.cpu_experts)
    dense = {(rate.type, rate.repacked): rate for rate in profile.cpu_dense if rate.threads == most}
    title = f"ggml, {most} thread{'s' * (most > 1)}, GB/s"
    table = _table(title, "experts", "dense", "rounds", "of RAM's load rate", "")
    experts = [rate for rate in profile.cpu_experts if rate.threads == most]
    for rate in sorted(experts, key=lambda rate: -float(rate.bytes_per_s)):
        share = float(rate.bytes_per_s) / float(profile.ram.best_load)
        beside: ExpertRate | None = dense.get((rate.type, rate.repacked))
        both = [rate.bytes_per_s, *([beside.bytes_per_s] if beside else [])]
        cells = (_figure(rate.bytes_per_s), _figure(beside.bytes_per_s) if beside else "–")
        table.add_row(
            rate.type + ", repacked" * rate.repacked, *cells, _rounds(both), f"{share:.0%}", _bar(min(share, 1))
        )
    return table


def _gpu(gpu: GpuRates) -> Table:
    table = _table(f"{_escape(gpu.name)}, GB/s", "rate", "rounds", "")
    ways = (("pinned", gpu.h2d_pinned), ("pageable", gpu.h2d_pageable))
    rows = [(f"host → device, {how}, {_binary(t.bytes)}", t.bytes_per_s) for how, ts in ways for t in ts]
    rows += [(f"zero-copy, {z.ctas} CTAs, {_binary(z.bytes)}", z.bytes_per_s) for z in gpu.zero_copy]
    rows += [(f"device → host, {_binary(t.bytes)}", t.bytes_per_s) for t in gpu.d2h]
    if gpu.ram_while_h2d:
        both = gpu.ram_while_h2d
        rows += [("both at once: RAM loads", both.ram), ("both at once: host → device", both.h2d)]
    top = max(float(rate) for _, rate in rows)
    for what, rate in rows:
        table.add_row(what, _figure(rate), _rounds([rate]), _bar(float(rate) / top))
    table.add_row("VRAM read", _figure(gpu.vram_read), _rounds([gpu.vram_read]), "")
    return table


def _ladder(profile: Profile) -> Table:
    """The tiers beside each other, and what one expert costs on each."""
    steps: list[tuple[str, float]] = []
    if profile.ssd:
        steps.append((f"{profile.ssd.kind}, random reads of 1 MiB", profile.ssd.random_expert(1 << 20)))
    steps.append(("RAM, loads", float(profile.ram.best_load)))
    if profile.cpu_experts:
        most = max(rate.threads for rate in profile.cpu_experts)
        best = max((r for r in profile.cpu_experts if r.threads == most), key=lambda rate: float(rate.bytes_per_s))
        steps.append((f"RAM, through ggml ({best.type})", float(best.bytes_per_s)))
    for gpu in profile.gpus:
        steps.append(("host → GPU, pinned", max(float(point.bytes_per_s) for point in gpu.h2d_pinned)))
        steps.append(("VRAM", float(gpu.vram_read)))
    table = _table("The ladder", "GB/s", "an expert of 10.6 MB", "")
    top = max(rate for _, rate in steps)
    for name, rate in sorted(steps, key=lambda step: step[1]):
        table.add_row(name, f"{rate / 1e9:,.2f}", f"{_EXPERT_BYTES / rate * 1e3:,.2f} ms", _bar(rate / top))
    return table


def _figure(rate: Rate) -> str:
    """`1.24 ±2%`, with a mark if it had not settled."""
    value = float(rate) / 1e9
    text = f"{value:.{3 if value < 0.1 else 2 if value < 100 else 0}f} ±{rate.spread:.0%}"
    return text + (" " if rate.stable else "[yellow]~[/]")


def _rounds(rates: Iterable[Rate]) -> str:
    counts = sorted(rate.rounds for rate in rates)
    return f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]}–{counts[-1]}"


def _bar(share: float, width: int = _BAR) -> str:
    return f"[cyan]{'█' * round(width * share) or '▏'}[/]"


def _binary(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column(title, min_width=22)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table
