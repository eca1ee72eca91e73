"""Progress of long work: a rich bar on a terminal, plain lines when piped, nothing where a program reads the output.

Library code takes an `Advance` callback and knows nothing of terminals; commands make one with `progress`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

Advance = Callable[[int], None]

PLAIN_INTERVAL_S = 5.0


def no_progress(_: int) -> None:
    """The `Advance` of work that nobody watches."""


@contextmanager
def progress(what: str, total: int, unit: str = "tokens", quiet: bool = False) -> Iterator[Advance]:
    """Yield a callback that takes how many more `unit`s are done; progress goes to stderr, with rate and ETA."""
    if quiet:
        yield no_progress
    elif sys.stderr.isatty():
        yield from _bar(what, total, unit)
    else:
        yield from _lines(what, total, unit)


def _bar(what: str, total: int, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit + " · {task.fields[rate]}/s · ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total, rate="–")
        start = time.monotonic()
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bars.update(task, completed=done, rate=f"{done / max(time.monotonic() - start, 1e-9):,.0f}")

        yield advance


def _lines(what: str, total: int, unit: str) -> Iterator[Advance]:
    start = last = time.monotonic()
    done = 0

    def say() -> None:
        spent = max(time.monotonic() - start, 1e-9)
        left = f", ETA {timedelta(seconds=round(spent * (total - done) / done))}" if 0 < done < total else ""
        print(f"{what}: {done:,}/{total:,} {unit}, {done / spent:,.0f}/s{left}", file=sys.stderr, flush=True)  # noqa: T201

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= PLAIN_INTERVAL_S:
            last = now
            say()

    yield advance
    say()
