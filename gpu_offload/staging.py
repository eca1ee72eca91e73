"""Buffers on the device through which a prompt's experts come: the link never waits for a slot to become free."""

from collections import deque
from dataclasses import dataclass

import torch

from edgemoe.gpu_offload.slots import Slots

WORKING = 3  # experts on their way, running, and being moved
_AHEAD_BYTES = 256 << 20
_MOST_AHEAD = 8


def read_ahead(expert_bytes: int) -> int:
    """Experts that may be brought before their layer has decided."""
    return min(_MOST_AHEAD, _AHEAD_BYTES // expert_bytes)


def staging_bytes(expert_bytes: int) -> int:
    return (WORKING + read_ahead(expert_bytes)) * expert_bytes


@dataclass(frozen=True, eq=False)
class Staged:
    """An expert that was sent: its bytes are in `content` for what follows `Staging.arrived`."""

    content: torch.Tensor
    event: "torch.cuda.Event | None"


class Staging:
    """A few buffers of one expert each, filled in the order of `send` on a stream of their own."""

    def __init__(self, slots: Slots) -> None:
        self._arena, self._device = slots.arena.bytes, slots.bytes.device
        size = slots.arena.expert_bytes
        self.ahead = read_ahead(size)
        self._buffers = torch.empty((WORKING + self.ahead, size), dtype=torch.uint8, device=self._device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self.clear()

    def clear(self) -> None:
        """All buffers are free, once what was enqueued before has read them."""
        event = torch.cuda.current_stream(self._device).record_event() if self._stream else None
        self._free = deque((buffer, event) for buffer in self._buffers)

    @property
    def room(self) -> int:
        """How many more may be sent before one is released."""
        return len(self._free)

    def send(self, layer: int, expert: int) -> Staged:
        buffer, read = self._free.popleft()
        if self._stream is None:
            buffer.copy_(self._arena[layer, expert])
            return Staged(buffer, None)
        with torch.cuda.stream(self._stream):
            if read is not None:
                self._stream.wait_event(read)
            buffer.copy_(self._arena[layer, expert], non_blocking=True)
            return Staged(buffer, self._stream.record_event())

    def arrived(self, staged: Staged) -> torch.Tensor:
        """Its bytes, for what is enqueued from here on."""
        if staged.event is not None:
            torch.cuda.current_stream(self._device).wait_event(staged.event)
        return staged.content

    def release(self, staged: Staged) -> None:
        """Nothing that is enqueued later reads it."""
        event = None if staged.event is None else torch.cuda.current_stream(self._device).record_event()
        self._free.append((staged.content, event))
