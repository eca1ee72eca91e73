"""`edgemoe run --parallel`: many prompts from a file, side by side, their texts in the file's order."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.cli.status_line import StatusLine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from edgemoe.generation import Options
    from edgemoe.generation.chat import ChatTemplate, Message
    from edgemoe.generation.parallel import Parallel
    from edgemoe.streaming.streams import Streams

_REDRAW_S = 0.2
_HEADER = 60


def run_prompts(
    model: Path,
    places: int,
    text: str,
    options: Options,
    streaming: dict[str, Any],
    holding: dict[str, Any],
    templating: tuple[bool | None, str | None, str | None],
    quiet: bool,
) -> bool:
    """Write a text for each line of `text`, at most `places` at a time; whether it was interrupted.

    `templating` is whether the prompts are a user's turns (None: where the model has a template), the instructions
    before them, and a template of one's own.
    """
    from edgemoe.cli.generating import beyond_training
    from edgemoe.cli.output import counted, errors, say_notes
    from edgemoe.errors import UserError
    from edgemoe.generation.parallel import Parallel, seeded

    if not streaming:
        raise UserError("--parallel reads experts from disk for all texts at once: give --ram or --residency with it")
    prompts, counts = parse_prompts(text, options.n)
    asked = [_with_count(each, n) for each, n in zip(seeded(options, len(prompts)), counts, strict=True)]
    with _loaded(model, places, streaming, holding, quiet) as streams:
        if not quiet:
            words = f"{streams.capacity} of {streams.model.geometry.n_experts} experts per layer have a slot in RAM"
            notes = [f"{words}, for {counted(places, 'stream')}; policy: {streams.policy}"]
            say_notes(errors(), [*notes, *beyond_training(model, holding["n_ctx"])], ())
        work = Parallel(streams, _tokens(streams, prompts, *templating), asked)
        start = time.perf_counter()
        interrupted = _perform(work, prompts, quiet)
        figures = _figures(work, time.perf_counter() - start)
        how = {"slots": streams.capacity, "policy": str(streams.policy), "config_hash": streams.config_hash}
    if quiet:
        texts = [{"prompt": prompts[w.index], **vars(w), "tokens_per_s": w.tokens_per_s} for w in work.written]
        said = {"texts": texts, "interrupted": interrupted, "parallel": places, **figures, **how}
        print(json.dumps(said, allow_nan=False))  # noqa: T201
    else:
        _print_summary(work, figures)
    return interrupted


def parse_prompts(text: str, n: int | None) -> tuple[list[str], list[int | None]]:
    """The prompts of a text, one a line, or as JSON objects `{"prompt": "…", "n": 20}`; and how many tokens each may
    have. Empty lines are none."""
    from edgemoe.errors import UserError

    prompts: list[str] = []
    counts: list[int | None] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not line.startswith('{"'):
            prompts.append(line)
            counts.append(n)
            continue
        expected = f'line {number}: expected a prompt, or an object like {{"prompt": "…", "n": 20}}'
        try:
            given = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{expected}: no JSON ({error.msg} at column {error.colno})") from None
        count = given.get("n", n)
        if not isinstance(given.get("prompt"), str) or not given["prompt"] or given.keys() - {"prompt", "n"}:
            raise UserError(expected)
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise UserError(f"line {number}: n {count!r} is no number of tokens: give at least 1")
        prompts.append(given["prompt"])
        counts.append(count)
    if not prompts:
        raise UserError("no prompts: give one a line")
    return prompts, counts


def _with_count(options: Options, n: int | None) -> Options:
    from dataclasses import replace

    return replace(options, n=n)


def _loaded(model: Path, places: int, streaming: dict[str, Any], holding: dict[str, Any], quiet: bool) -> Streams:
    from edgemoe.cli.generating import make_ready
    from edgemoe.generation.loading import check_fit, load_steps
    from edgemoe.generation.parallel import load_streams
    from edgemoe.progress import progress

    check_fit(model, streams=places, **streaming, **holding)
    make_ready(quiet)
    total, _ = load_steps(model, streamed=True)
    done = 0
    with progress(f"loading {model.name}", max(1, total // 10**6), "MB", quiet=quiet) as advance:

        def count(more: int) -> None:
            nonlocal done
            advance((done + more) // 10**6 - done // 10**6)
            done += more

        return load_streams(model, places, advance=count, **streaming, **holding)


def _tokens(
    streams: Streams, prompts: Sequence[str], chat: bool | None, system: str | None, template: str | None
) -> list[list[int]]:
    from edgemoe.errors import UserError
    from edgemoe.generation.chat import ChatTemplate
    from edgemoe.generation.prompt import plain_prompt

    if chat is None:
        chat = streams.chat_template is not None or template is not None
    if not chat:
        if system or template:
            raise UserError("--system and --chat-template mean nothing to a text that is continued as it stands")
        return [plain_prompt(streams, text) for text in prompts]
    turns = ChatTemplate.of(streams, template)
    return [_turn(streams, turns, system, text) for text in prompts]


def _turn(streams: Streams, turns: ChatTemplate, system: str | None, text: str) -> list[int]:
    from edgemoe.generation.prompt import chat_prompt

    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return chat_prompt(streams, turns.render([*before, {"role": "user", "content": text}]))


def _perform(work: Parallel, prompts: Sequence[str], quiet: bool) -> bool:
    """Run to the end, printing each text once all before it are; at Ctrl-C also what is not whole. Whether it was."""
    printed, drawn = 0, 0.0
    with StatusLine(quiet) as line:
        try:
            for _ in work.run():
                while printed < len(work.written) and work.written[printed].finish:
                    _show(line, work, prompts, printed, quiet)
                    printed += 1
                if line.active and time.monotonic() - drawn > _REDRAW_S:
                    drawn = time.monotonic()
                    line.show(_status(work))
        except KeyboardInterrupt:
            for at in range(printed, len(work.written)):
                work.written[at].finish = work.written[at].finish or "interrupted"
                _show(line, work, prompts, at, quiet)
            return True
    return False


def _show(line: StatusLine, work: Parallel, prompts: Sequence[str], at: int, quiet: bool) -> None:
    """A header and the text."""
    if quiet:
        return
    asked = " ".join(prompts[at].split())
    shown = asked if len(asked) <= _HEADER else asked[: _HEADER - 1] + "…"
    ended = ", interrupted" if work.written[at].finish == "interrupted" else ""
    line.write(f"== {at + 1} of {work.total}{ended}: {shown}\n{work.written[at].text}\n\n")


def _status(work: Parallel) -> str:
    """`52.1 tok/s · 8 streams · 12 of 40 prompts done · hit rate 83% · disk 1.2 GB/s · RAM 4.1 GB`"""
    from edgemoe.cli.output import counted
    from edgemoe.units import format_bytes

    d, parts = work.decode, []
    if work.step_s:
        parts.append(f"{work.rows / work.step_s:.1f} tok/s")
    done = sum(written.finish is not None for written in work.written)
    parts += [counted(work.live, "stream"), f"{done:,} of {counted(work.total, 'prompt')} done"]
    if d.hit_rate is not None:
        parts.append(f"hit rate {d.hit_rate:.0%}")
    if d.read_bytes and work.step_s:
        parts.append(f"disk {format_bytes(d.read_bytes / work.step_s)}/s")
    if d.ram_bytes:
        parts.append(f"RAM {format_bytes(d.ram_bytes)}")
    return " · ".join(parts)


def _figures(work: Parallel, seconds: float) -> dict[str, Any]:
    """How it went, by name; None for what there was none of. Rates per token are of steps, prompts apart."""
    distinct, layers = work.streams.union
    d, rows = work.decode, work.rows
    rates = [written.tokens_per_s for written in work.written if written.tokens_per_s]
    tokens = sum(written.tokens for written in work.written)
    return {
        "prompts": work.total,
        "generated_tokens": tokens,
        "prompt_tokens": sum(written.prompt_tokens for written in work.written),
        "seconds": seconds,
        "overall_tokens_per_s": tokens / seconds,
        "tokens_per_s": rows / work.step_s if rows else None,
        "tokens_per_s_per_stream": sum(rates) / len(rates) if rates else None,
        "streams_per_step": rows / work.steps if rows else None,
        "experts_per_layer": distinct / layers if layers else None,
        "hit_rate": d.hit_rate,
        "demand_reads_per_token": d.demand_reads / rows if rows else None,
        "prefetch_reads_per_token": d.prefetch_reads / rows if rows else None,
        "bytes_per_token": d.read_bytes / rows if rows else None,
        "read_bytes_per_s": d.read_bytes / work.step_s if rows else None,
        "seconds_per_step": {name: share / work.steps for name, share in d.shares.items()} if rows else None,
        "ram_bytes": work.streams.stats().ram_bytes,
    }


def _print_summary(work: Parallel, f: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    from edgemoe.cli.output import counted, say
    from edgemoe.units import format_bytes

    done = sum(written.finish not in (None, "interrupted") for written in work.written)
    written = counted(f["generated_tokens"], "token")
    rows = [
        ("texts", f"{done:,} of {counted(work.total, 'prompt')}, {written} in {f['seconds']:.1f} s"),
        ("prompts", f"{counted(f['prompt_tokens'], 'token')}; with them {f['overall_tokens_per_s']:.1f} tok/s overall"),
    ]
    if f["tokens_per_s"]:
        each = f", {f['tokens_per_s_per_stream']:.1f} per text" if f["tokens_per_s_per_stream"] else ""
        per_step = {name: 1e3 * seconds for name, seconds in f["seconds_per_step"].items()}
        rows += [
            ("speed", f"{f['tokens_per_s']:.1f} tok/s together{each}; {f['streams_per_step']:.1f} streams per step"),
            (
                "time per step",
                f"compute {per_step['compute']:.1f} ms, demand wait {per_step['demand_wait']:.1f} ms, "
                f"policy {per_step['policy']:.1f} ms",
            ),
            (
                "experts",
                f"{f['experts_per_layer']:.1f} different ones per layer and step; hit rate {f['hit_rate']:.1%}",
            ),
            (
                "reads",
                f"{f['demand_reads_per_token']:,.1f} demand, {f['prefetch_reads_per_token']:,.1f} prefetch; "
                f"{format_bytes(f['bytes_per_token'])} per token",
            ),
            ("disk", f"{format_bytes(f['read_bytes_per_s'])}/s"),
        ]
    rows.append(("memory", f"{format_bytes(f['ram_bytes'])} of RAM held"))
    out, width = Console(stderr=True, highlight=False), 2 + max(len(name) for name, _ in rows)
    for name, words in rows:
        say(out, Text.assemble((name.ljust(width), "bold"), words), hang=width)
