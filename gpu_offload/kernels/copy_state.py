"""What the kernels of `copying` keep beside the slots, on the device."""

import torch


class CopyState:
    """Records of the copies into every slot, queues, tickets and turns of what is executed, and running totals."""

    def __init__(self, n_layers: int, capacity: int, width: int, budget: int, device: str | torch.device) -> None:
        """capacity: slots per layer; width: experts that a layer executes at most; budget: prefetch copies per layer
        and token at most."""

        def integers(size: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=kind, device=device)

        places = n_layers * capacity
        self.claims, self.done, self.after, self.experts = (integers(2 * places) for _ in range(4))
        self.current, self.asked = integers(places), integers(places)
        self.demand_queue, self.prefetch_queue = integers(n_layers * width + 1), integers(n_layers * budget + 1)
        self.queue, self.tally = integers(8), integers(8, torch.int64)
        self.tickets, self.turns = integers(n_layers * width), integers(n_layers * width, torch.int64)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What `deciding.decide` takes after `stop`."""
        return (
            *(self.claims, self.done, self.after, self.experts, self.current, self.asked),
            *(self.tickets, self.turns, self.demand_queue, self.prefetch_queue, self.queue, self.tally),
        )
