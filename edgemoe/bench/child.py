"""The parent's end of an arm: start it within its memory group, ask, and be sure that it is gone afterwards."""

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from edgemoe.bench.arm import Opening
from edgemoe.bench.memory_group import Hierarchy, MemoryGroup
from edgemoe.errors import UserError
from edgemoe.units import format_bytes

_KILLED = -9


class Child:
    """An arm in a process; a context manager. `limit` bytes of memory, where there is a `hierarchy` to limit it in."""

    def __init__(self, opening: Opening, hierarchy: Hierarchy | None, limit: int) -> None:
        self.opening, self.limit = opening, limit
        self._held = ExitStack()
        try:
            # Before the process, because it is left in the opposite order: a group with a process cannot be removed.
            self.group = (
                self._held.enter_context(MemoryGroup(hierarchy, limit, f"{opening.arm}-{id(self)}"))
                if hierarchy
                else None
            )
            self._complaints = self._held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
            self._process = subprocess.Popen(
                [sys.executable, "-m", "edgemoe.bench.arm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                text=True,
            )
            self._held.callback(self._end)
            join = str(self.group.joined_by) if self.group else None
            self.described = self._ask({"open": asdict(replace(opening, join=join))})
        except BaseException:
            self.close()
            raise

    def steps(self, first: int, count: int, log: Path | None = None) -> dict[str, Any]:
        """`edgemoe.bench.arm.Server.steps` over there."""
        return self._ask({"first": first, "count": count, "log": str(log) if log else None})

    @property
    def peak(self) -> int | None:
        """The most bytes that its group has held."""
        return self.group.peak if self.group else None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UserError(f"{self.opening.arm}: {self._why_gone()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UserError(str(answer["error"]))
        return answer

    def _why_gone(self) -> str:
        code = self._process.wait(60)
        if code == _KILLED and self.group:
            return f"the kernel ended it, because it needs more than the {format_bytes(self.limit)} of its group"
        self._complaints.seek(0)
        said = [line for line in self._complaints.read().splitlines() if line.strip()]
        return f"its process ended with code {code} ({said[-1] if said else 'it says nothing'})"

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
