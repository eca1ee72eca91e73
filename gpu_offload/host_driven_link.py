"""The link that a host drives: one ordered queue of copies from the arena into device memory.

What is sent arrives in the order it was sent, so a later copy into a slot completes after an earlier one (PSR paper
§4.2). No slot is written before its last reader has finished: the host sends a copy into a slot only after it has read
scores that the device computed behind that reader; for other buffers, the sender gives the event to wait for.
"""

import random
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch


class Arrival(Protocol):
    """A copy that was sent."""

    def done(self) -> bool:
        """Whether all bytes are there now."""


class Link(Protocol):
    waited_s: float
    """Time that what was enqueued stood still for arrivals, as far as it is known: all of it after `drain`."""

    def send(self, source: torch.Tensor, target: torch.Tensor, after: "torch.cuda.Event | None" = None) -> Arrival:
        """Copy bytes from the host to the device, not before `after`."""

    def wait(self, arrivals: Iterable[Arrival]) -> None:
        """What is computed from here on sees these arrivals' bytes."""

    def read_clock(self) -> None:
        """Bring `waited_s` up to date. The device must have finished what waits."""

    def drain(self) -> None:
        """Return when everything that was sent has arrived."""

    def close(self) -> None:
        """Let go of threads; may be called again."""


class _Arrived:
    def done(self) -> bool:
        return True


class MemoryLink:
    """Host and device are the same memory: a copy is over when `send` returns."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def send(self, source: torch.Tensor, target: torch.Tensor, after: "torch.cuda.Event | None" = None) -> Arrival:
        assert after is None, "nothing runs beside a copy in memory"
        start = time.perf_counter()
        target.copy_(source)
        self.waited_s += time.perf_counter() - start
        return _Arrived()

    def wait(self, arrivals: Iterable[Arrival]) -> None:
        """Nothing is ever on its way."""

    def read_clock(self) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...


class _OnStream:
    def __init__(self, event: "torch.cuda.Event") -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())


class CopyStream:
    """cudaMemcpyAsync on a stream of its own; arrivals are events, and waiting is the compute stream's."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.waited_s = 0.0

    def send(self, source: torch.Tensor, target: torch.Tensor, after: "torch.cuda.Event | None" = None) -> Arrival:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return _OnStream(self._stream.record_event())

    def wait(self, arrivals: Iterable[Arrival]) -> None:
        events = [arrival.event for arrival in arrivals if isinstance(arrival, _OnStream)]
        if not events:
            return
        compute = torch.cuda.current_stream(self._device)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(compute)
        for event in events:
            compute.wait_event(event)
        ended.record(compute)
        self._waits.append((begun, ended))

    def read_clock(self) -> None:
        self.waited_s += sum(begun.elapsed_time(ended) for begun, ended in self._waits) / 1e3
        self._waits.clear()

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._waits.clear()


class SlowLink:
    """A link that is slowed down: a thread moves one copy after the other, each after the time that it would take.

    For tests of what timing may change. The host itself waits for arrivals, on a GPU too.
    """

    def __init__(
        self, device: torch.device, *, bytes_per_s: float = float("inf"), delay_s: float = 0.0, seed: int = 0
    ) -> None:
        """delay_s: the longest of the delays that each copy gets on top, drawn uniformly."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._bytes_per_s, self._delay_s, self._random = bytes_per_s, delay_s, random.Random(seed)
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="link")
        self._last: Future[None] | None = None
        self.waited_s = 0.0

    def send(self, source: torch.Tensor, target: torch.Tensor, after: "torch.cuda.Event | None" = None) -> Arrival:
        takes = source.nbytes / self._bytes_per_s + self._random.uniform(0, self._delay_s)
        self._last = self._mover.submit(self._move, source, target, after, takes)
        return self._last

    @torch.inference_mode()
    def _move(self, source: torch.Tensor, target: torch.Tensor, after: "torch.cuda.Event | None", takes: float) -> None:
        time.sleep(takes)  # before the bytes move: who does not wait for them reads others
        if after is not None:
            after.synchronize()
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def wait(self, arrivals: Iterable[Arrival]) -> None:
        start = time.perf_counter()
        for arrival in arrivals:
            if isinstance(arrival, Future):
                arrival.result()
        self.waited_s += time.perf_counter() - start

    def read_clock(self) -> None: ...

    def drain(self) -> None:
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        self._mover.shutdown(wait=True, cancel_futures=True)
