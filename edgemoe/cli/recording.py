"""What `run` and `chat` write beside the text: figures per token (--metrics), a trace of the routing (--trace)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from typing import Any, TextIO

    from edgemoe.generation import Step, Writer
    from edgemoe.generation.summary import Meter
    from edgemoe.tracing.live import LiveTrace

TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="OUT.npz",
        help="Write what the routers choose, token by token, as a trace file for edgemoe stats and edgemoe simulate.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing --trace file, once the new one is whole.")
]
MetricsFile = Annotated[
    Path | None, typer.Option("--metrics", metavar="FILE.jsonl", help="Write a line of figures per token.")
]


@dataclass(frozen=True)
class Recording:
    """The files that are asked for."""

    trace: TraceFile = None
    overwrite: Overwrite = False
    metrics: MetricsFile = None

    def refuse(self, beside: str) -> None:
        """Raise `UserError` if any is asked for beside an option that they do not go with."""
        from edgemoe.errors import UserError

        if self.trace or self.metrics:
            raise UserError(f"--trace and --metrics follow one text: leave them out with {beside}")

    @contextmanager
    def of(self, verb: str, model: Path) -> Iterator[Records]:
        """Open them, refusing what cannot be written before the model is loaded; at the end, whatever it is, they are
        whole."""
        from edgemoe.cli.options import writable_file
        from edgemoe.errors import UserError

        if self.overwrite and not self.trace:
            raise UserError("--overwrite is about --trace: give both")
        writable_file("--metrics", self.metrics)
        live = self._live(verb, model) if self.trace else None
        metrics = self.metrics.open("w", encoding="utf-8") if self.metrics else None
        records = Records(live, metrics)
        try:
            yield records
        except BaseException:
            records.partial = True
            raise
        finally:
            if metrics:
                metrics.close()
            if live:
                records.traced_tokens = live.finish(partial=records.partial)

    def _live(self, verb: str, model: Path) -> LiveTrace:
        from edgemoe.errors import UserError
        from edgemoe.model import read_model
        from edgemoe.tracing.live import LiveTrace

        assert self.trace
        described = read_model(model)
        if not described.geometry.is_moe:
            raise UserError(f"{model}: a dense model: it has no experts to trace: leave out --trace")
        return LiveTrace(described, self.trace, overwrite=self.overwrite, domain=verb)


class Records:
    """The files while they grow."""

    def __init__(self, live: LiveTrace | None, metrics: TextIO | None) -> None:
        self.live, self._metrics = live, metrics
        self.partial = False
        """Whether the run was ended before its end."""
        self.traced_tokens = 0

    def about(self, writer: Writer, run: dict[str, Any]) -> None:
        """Say in the trace what ran; where a line per token is asked for, have it decoded by itself."""
        writer.context.singly = self._metrics is not None
        if self.live:
            policy = getattr(writer.engine, "policy", None)
            self.live.about(
                description=writer.engine.description,
                bos=writer.engine.bos,
                steered=policy is not None and policy.routing != "exact",
                run=run,
            )

    def add(self, step: Step, meter: Meter, **more: Any) -> None:
        """A line of JSON for a generated token."""
        if self._metrics is None:
            return
        token = {"index": step.index, "token": step.token, "text": step.text, "latency_s": step.seconds}
        record = {**more, **token, **vars(meter.since_last()), "finish": step.finish}
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()

    def as_json(self) -> dict[str, Any]:
        """What became of the trace, once it is whole; nothing where none was asked for."""
        if not self.live:
            return {}
        return {"trace": {"path": str(self.live.out), "tokens": self.traced_tokens, "partial": self.partial}}

    def __str__(self) -> str:
        """The same for people; empty where no trace was asked for."""
        if not self.live:
            return ""
        if not self.traced_tokens:
            return "nothing was decoded: no trace was written"
        return f"{self.live.out}: {self.traced_tokens:,} tokens; next: edgemoe stats {self.live.out}"
