"""One side of a comparison, in a process of its own: `python -m edgemoe.bench.arm`.

A request is a JSON object in a line of standard input, and so is its answer on standard output; the end of the input
ends the process. `{"open": {…}}` loads (fields of `Opening`), `{"first": s, "count": n, "log": FILE}` decodes n
steps: seconds of each, what the engine counted, what came from the disk (`Server.steps`).
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

MAPPED, STREAMED = "mapped", "streamed"


@dataclass(frozen=True)
class Opening:
    """What an arm is to run. `forced`: a file of `loads.forced_ids`, or none for the model's own router."""

    arm: str
    model: str
    streams: int
    n_ctx: int  # tokens of each stream
    threads: int
    forced: str | None = None
    ram: int = 0  # the rest is for the streamed arm only
    policy: dict[str, Any] | None = None
    readers: int = 8
    join: str | None = None  # the `cgroup.procs` of the memory group to load in


class Arm(Protocol):
    position: int  # of every stream
    n_vocab: int

    def prepare(self) -> None:
        """Import and compile: stock llama.cpp has no interpreter, so that mmap shall not pay for this one."""

    def load(self) -> dict[str, Any]:
        """Load, and describe it."""

    def force(self, ids: Any) -> None: ...

    def step(self, tokens: Any) -> None:
        """Decode one token of every stream."""

    def rewind(self) -> None:
        """Begin the sequences again; what is in RAM stays."""

    def counters(self) -> dict[str, float]: ...

    def log_reads(self) -> Any:
        """A recorder of the reads from now on, None for an arm that does not say what it reads."""

    def close(self) -> None: ...


class Mapped:
    """llama.cpp as people run it."""

    def __init__(self, opening: Opening) -> None:
        self.opening, self.position = opening, 0

    def prepare(self) -> None:
        from edgemoe.bench.forced import ForcedHub
        from edgemoe.llamacpp.session import quiet

        quiet()
        self.hub = ForcedHub()

    def load(self) -> dict[str, Any]:
        from edgemoe.bench.mapped import MappedSession
        from edgemoe.llamacpp.graph import find_routers
        from edgemoe.llamacpp.hub import Tap

        o = self.opening
        self.session = MappedSession(o.model, streams=o.streams, n_ctx=o.n_ctx, n_threads=o.threads, hub=self.hub)
        self.n_vocab = self.session.n_vocab
        if o.forced:
            with self.hub.survey():
                self.step([0] * o.streams)
            routers = find_routers(self.hub.nodes())
            self.hub.install([Tap(routers[layer].topk) for layer in sorted(routers)], o.streams)
            self.rewind()
        return {"engine": "llama.cpp, mmap, not repacked"}

    def force(self, ids: Any) -> None:
        self.hub.force(ids)

    def step(self, tokens: Any) -> None:
        if self.opening.forced and self.position:
            with self.hub.capture():
                self.session.step(tokens, self.position)
        else:
            self.session.step(tokens, self.position)
        self.position += 1

    def rewind(self) -> None:
        self.session.clear()
        self.position = 0

    def counters(self) -> dict[str, float]:
        from edgemoe.machine.page_cache import fetched_bytes

        return {"fetched_bytes": fetched_bytes() or 0}

    def log_reads(self) -> None:
        return None

    def close(self) -> None:
        self.session.close()


class Streamed:
    """The tier."""

    def __init__(self, opening: Opening) -> None:
        self.opening, self.position = opening, 0

    def prepare(self) -> None:
        from edgemoe.bench.forced import compile_streaming
        from edgemoe.bench.replayed import ReplayedEngine
        from edgemoe.llamacpp.session import quiet
        from edgemoe.streaming.compiled import ready

        quiet()
        ready()
        compile_streaming()
        self.type = ReplayedEngine

    def load(self) -> dict[str, Any]:
        from edgemoe.policy import Policy

        o = self.opening
        self.engine = self.type(
            o.model,
            policy=Policy(**(o.policy or {})),
            ram=o.ram,
            n_ctx=o.n_ctx,
            n_threads=o.threads,
            readers=o.readers,
            chunk=1,
            streams=o.streams,
        )
        self.n_vocab = self.engine.n_vocab
        return {
            "engine": "edgemoe",
            "slots": self.engine.capacity,
            "config": self.engine.config_hash,
            "direct": self.engine.direct,
        }

    def force(self, ids: Any) -> None:
        self.engine.force(ids)

    def step(self, tokens: Any) -> None:
        self.engine.step(tokens)
        self.position += 1

    def rewind(self) -> None:
        self.engine.rewind_all()
        self.position = 0

    def counters(self) -> dict[str, float]:
        counted = {name: value for name, value in asdict(self.engine.stats()).items() if name != "ram_bytes"}
        return {**counted, "distinct": self.engine.distinct}

    def log_reads(self) -> Any:
        return self.engine.log_reads()

    def close(self) -> None:
        self.engine.close()


class Server:
    """Answers requests with one arm."""

    def __init__(self, opening: Opening) -> None:
        import numpy as np

        self.arm: Arm = Mapped(opening) if opening.arm == MAPPED else Streamed(opening)
        self.opening = opening
        self.arm.prepare()
        if opening.join:
            Path(opening.join).write_text(str(os.getpid()))
        self.ids = np.load(opening.forced, mmap_mode="r") if opening.forced else None
        self.described = self.arm.load()

    def steps(self, first: int, count: int, log: str | None) -> dict[str, Any]:
        """Decode `count` steps, with the routing that was recorded from step `first` on. What an arm that says so
        reads meanwhile is written to the file `log`, as a `ReadLog`."""
        from edgemoe.streaming.memory import held_bytes

        if self.arm.position + count > self.opening.n_ctx:
            self.arm.rewind()
        recorder = self.arm.log_reads() if log else None
        before = self.arm.counters()
        seconds = [self._one(step) for step in range(first, first + count)]
        after = self.arm.counters()
        counted = {name: after[name] - before[name] for name in after}
        answer: dict[str, Any] = {"seconds": seconds, "counted": counted, "ram_bytes": held_bytes()}
        if recorder is not None and log:
            recorder.end().save(Path(log))
        return answer

    def _one(self, step: int) -> float:
        import numpy as np

        if self.ids is not None:
            self.arm.force(np.ascontiguousarray(self.ids[step % len(self.ids)]))
        tokens = np.random.default_rng(step).integers(self.arm.n_vocab, size=self.opening.streams, dtype=np.int32)
        start = time.perf_counter()
        self.arm.step(tokens)
        return time.perf_counter() - start


def serve() -> None:
    """Until the input ends. Whatever goes wrong is an answer, too."""
    from edgemoe.errors import UserError

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not look like an answer
    server: Server | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "open" in request:
                server = Server(Opening(**request["open"]))
                answer = server.described
            else:
                assert server is not None
                answer = server.steps(**request)
        except UserError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
    if server is not None:
        server.arm.close()


if __name__ == "__main__":
    # Ctrl-C is the parent's to answer. No session of its own: the kernel would schedule that apart (autogroup), and how
    # nice this run is would not count for it. Here, because Popen would run Python code between fork and exec, where an
    # interrupt is lost.
    os.setpgrp()
    serve()
