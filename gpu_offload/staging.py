"""Buffers on the device through which a prompt's experts come: the link never waits for a slot to become free.

They are a ring: the n-th expert that is sent comes into buffer n modulo their number, and they are released in the
order in which they were sent. So where an expert will lie is known before it is sent.
"""

from collections.abc import Sequence

import torch

from edgemoe.gpu_offload.slots import Slots

WORKING = 3  # experts on their way, running, and being moved
_AHEAD_BYTES = 256 << 20
_MOST_AHEAD = 16  # what the link brings while a layer attends and decides, and then some
_MOST_TOGETHER = 4  # experts that come and run together: more would come late, fewer cost more launches


def read_ahead(expert_bytes: int) -> int:
    """Experts that may be brought before their layer has decided."""
    return min(_MOST_AHEAD, _AHEAD_BYTES // expert_bytes)


def staging_bytes(expert_bytes: int) -> int:
    return (WORKING + read_ahead(expert_bytes)) * expert_bytes


class Staging:
    """`buffers` [n, bytes_per_expert] uint8 on the device, filled in the order of `send` on a stream of their own."""

    def __init__(self, slots: Slots) -> None:
        self._device = slots.bytes.device
        size = slots.arena.expert_bytes
        self.ahead = read_ahead(size)
        self.size = WORKING + self.ahead
        self.together = max(1, min(_MOST_TOGETHER, self.size // 4))
        self.buffers = torch.empty((self.size, size), dtype=torch.uint8, device=self._device)
        self._targets = self.buffers.unbind(0)
        self._sources = [layer.unbind(0) for layer in slots.arena.bytes.unbind(0)]
        self._sent = self._released = 0
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if self._stream is not None:
            # Who waits for an event waits for what it stood for then: each can be recorded again.
            self._arrivals, self._reads = ([torch.cuda.Event() for _ in range(self.size)] for _ in range(2))
            self._read = list(self._reads)  # of each buffer, behind its last reader
        self.clear()

    def clear(self) -> None:
        """All buffers are free, once what was enqueued before has read them."""
        self._sent = self._released = 0
        if self._stream is not None:
            self._reads[-1].record(torch.cuda.current_stream(self._device))
            self._read = [self._reads[-1]] * self.size

    @property
    def room(self) -> int:
        """How many more may be sent before one is released."""
        return self.size - (self._sent - self._released)

    def places(self, count: int) -> list[int]:
        """The buffers of the next `count` experts to be released, sent or not."""
        return [(self._released + i) % self.size for i in range(count)]

    def send(self, layer: int, experts: Sequence[int]) -> None:
        """Bring experts, of which there is `room` for all."""
        assert len(experts) <= self.room, "a buffer would be filled before it was read"
        if not experts:
            return
        if self._stream is None:
            for expert in experts:
                self._next().copy_(self._sources[layer][expert])
            return
        awaited = None
        with torch.cuda.stream(self._stream):
            for expert in experts:
                at = self._sent % self.size
                if self._read[at] is not awaited:
                    awaited = self._read[at]
                    self._stream.wait_event(awaited)
                self._next().copy_(self._sources[layer][expert], non_blocking=True)
                self._arrivals[at].record(self._stream)

    def _next(self) -> torch.Tensor:
        self._sent += 1
        return self._targets[(self._sent - 1) % self.size]

    def arrive(self, count: int) -> None:
        """What is enqueued from here on finds the next `count` experts that were sent."""
        assert self._released + count <= self._sent, "they would not come"
        if self._stream is not None:
            last = self._arrivals[(self._released + count - 1) % self.size]  # they come in order
            torch.cuda.current_stream(self._device).wait_event(last)

    def release(self, count: int) -> None:
        """Nothing that is enqueued later reads them."""
        places = self.places(count)
        self._released += count
        if self._stream is not None:
            event = self._reads[places[-1]]
            event.record(torch.cuda.current_stream(self._device))
            for at in places:
                self._read[at] = event
