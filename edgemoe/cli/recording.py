"""What `run` and `chat` write beside the text: figures per token (--metrics), a trace of the routing (--trace)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from typing import Any

    from edgemoe.cli.metrics import Metrics
    from edgemoe.cli.policy_options import Streaming
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
    bool,
    typer.Option(
        "--overwrite",
        help="Replace an existing --trace file, once the new one is whole, and an existing --metrics file, at the first"
        " token.",
    ),
]
MetricsFile = Annotated[
    Path | None,
    typer.Option("--metrics", metavar="FILE.jsonl", help="Write a line of figures per token, as they come."),
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
    def of(self, verb: str, model: Path, inputs: Iterable[Path]) -> Iterator[Records]:
        """Refuse what cannot be written before the model is loaded, and what would replace the model or any of the
        other `inputs`; at the end, whatever it is, the files are whole."""
        from edgemoe.cli.metrics import Metrics
        from edgemoe.errors import UserError

        if self.overwrite and not (self.trace or self.metrics):
            raise UserError("--overwrite is about --trace and --metrics: give one with it")
        metrics = Metrics(self.metrics, self.overwrite) if self.metrics else None
        if self.trace or self.metrics:
            self._spare([*_files_of(model), *inputs, Path("/dev/stdin")])
        if metrics:
            metrics.check()
        records = Records(self._live(verb, model) if self.trace else None, metrics)
        try:
            yield records
        except BaseException:
            records.partial = True
            raise
        finally:
            records.finish()

    def _spare(self, inputs: Iterable[Path]) -> None:
        """Raise `UserError` for a file to write that is one to read, or both of those to write."""
        from edgemoe.errors import UserError

        asked = [(name, path) for name, path in (("--trace", self.trace), ("--metrics", self.metrics)) if path]
        if len(asked) == 2 and asked[0][1].resolve() == asked[1][1].resolve():
            raise UserError(f"--trace and --metrics both name {self.trace}: give each a file of its own")
        for name, path in asked:
            for read in inputs:
                if path.is_file() and read.exists() and path.samefile(read):
                    raise UserError(f"{name} {path}: is what the run reads: choose another name for it")

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

    def __init__(self, live: LiveTrace | None, metrics: Metrics | None) -> None:
        self.live, self._metrics = live, metrics
        self.partial = False
        """Whether the run was ended before its end."""
        self.traced_tokens = 0
        self.verified = False
        """Whether every slot is compared with its expert as the run goes."""

    def about(self, writer: Writer, run: dict[str, Any], verified: bool) -> None:
        """Say in the trace what ran; where a line per token is asked for, have it decoded by itself."""
        writer.context.singly, self.verified = self._metrics is not None, verified
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
        self._metrics.add({**more, **token, **vars(meter.since_last()), "finish": step.finish})

    def finish(self) -> None:
        """Nothing more comes: make the files whole."""
        if self._metrics:
            self._metrics.close()
        if self.live:
            self.traced_tokens = self.live.finish(partial=self.partial)

    def as_json(self) -> dict[str, Any]:
        """What became of the trace, once it is whole: no path where none was written; and whether slots were compared.
        Nothing of what was not asked for."""
        verified = {"verify_slots": True} if self.verified else {}
        if not self.live:
            return verified
        path = str(self.live.out) if self.traced_tokens else None
        return {**verified, "trace": {"path": path, "tokens": self.traced_tokens, "partial": self.partial}}

    def __str__(self) -> str:
        """What became of the trace, for people; empty where none was asked for."""
        from edgemoe.cli.output import counted

        if not self.live:
            return ""
        if not self.traced_tokens:
            return "nothing was decoded: no trace was written"
        held = counted(self.traced_tokens, "token")
        return f"{self.live.out}: {held}; next: edgemoe stats {self.live.out}"


def inputs_of(experts: Streaming, settings: dict[str, Any], *texts: Path | None) -> list[Path]:
    """What a run reads besides the model: texts, and what its policy comes from; `settings` are those of `load`."""
    from edgemoe.policy.policy_file import is_policy_file

    policy = Path(experts.policy) if experts.policy and is_policy_file(experts.policy) else None
    read = (policy, settings.get("calibration"), settings.get("plan"), *texts)
    return [path for path in read if path is not None]


def _files_of(model: Path) -> list[Path]:
    """Every file of the model; of a folder those beside the weights, too."""
    from edgemoe.model import read_model

    beside = list(model.iterdir()) if model.is_dir() else []
    return [*beside, *read_model(model).files]
