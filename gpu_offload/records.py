"""The records of the copies that fill the slots on the device, as `kernels.copying` describes; the host's view of them.

Between tokens the host may ask what has arrived, bring what has not, and start the records anew.
"""

import numpy as np
import torch

from edgemoe.errors import UserError
from edgemoe.gpu_offload.kernels import copying
from edgemoe.gpu_offload.kernels.copy_state import CopyState
from edgemoe.gpu_offload.slots import NOTHING, Slots

CHUNK_BYTES = 1 << 16
TILE_WORDS = 4096  # that a block moves at once at most
WORDS_AT_ONCE = 16  # that a thread has under way: more registers of them keep other experts' blocks from starting
_WORD = 4  # bytes
_ERROR, _NUMBER = copying.ERROR.value, copying.NUMBER.value  # words of the queue; numbers go on when records start anew
_TALLY = ("loads", "misses", "demand", "prefetch", "in_time", "late", "unused")


class Records(CopyState):
    """What the kernels keep beside the slots. While they run, `slots.held` is out of date: `look` first."""

    def __init__(self, slots: Slots, width: int, budget: int) -> None:
        """width: experts that a layer executes at most; budget: prefetch copies per layer and token at most."""
        super().__init__(len(slots.held), slots.capacity, width, budget, slots.bytes.device)
        self.slots = slots
        self.words = slots.arena.expert_bytes // _WORD
        self.chunk = min(CHUNK_BYTES // _WORD, -(-self.words // TILE_WORDS) * TILE_WORDS)
        self.chunks = -(-self.words // self.chunk)
        self.known = False

    def look(self, slot_of: np.ndarray) -> None:
        """Ask the device which slots are whole, none of them after a copy that went over another; `slot_of` [L, E] is
        what its logical cache says."""
        if self.known:
            return
        current = self.current.cpu().numpy().astype(np.int64)
        done = self.done.cpu().numpy()[2 * np.arange(len(current)) + current]
        held = self.slots.held
        # Once a copy did not wait for the one it cancels, that one may have landed on any other: no record says where.
        trusted = not int(self.queue[_ERROR]) & copying.CANCELLED_COPY.value
        whole = (done >= self.chunks).reshape(held.shape) & trusted
        held[:] = NOTHING
        layers, experts = np.nonzero(slot_of >= 0)
        places = slot_of[layers, experts]
        held[layers, places] = np.where(whole[layers, places], experts, NOTHING)
        self.known = True

    def settle(self, slot_of: np.ndarray) -> int:
        """Make every slot hold what `slot_of` [L, E] says, and start the records anew; how many experts were moved."""
        moved = sum(len(self.slots.settle(layer, row)) for layer, row in enumerate(slot_of))
        for tensor in (self.claims, self.done):
            tensor.fill_(self.chunks)
        for tensor in (self.after, self.current, self.asked, self.queue[:_NUMBER]):
            tensor.zero_()
        self.known = True
        return moved

    def counts(self) -> dict[str, int]:
        """Running totals by their name in `Counters`."""
        return dict(zip(_TALLY, self.tally.tolist(), strict=False))

    def check(self) -> None:
        """Raise `UserError` if a spin on the device gave up: what followed is not to be trusted."""
        code = int(self.queue[_ERROR])
        if code & copying.TURN.value:
            raise UserError("a layer's experts waited in vain for the GPU's decision: give --executor host, report it")
        if code:
            raise UserError(
                f"a copy on the GPU did not arrive within its bound (code {code}): another program may hold the link; "
                "try again, or give --device cpu"
            )

    def verify(self, slot_of: np.ndarray) -> None:
        """Compare every slot that is whole with the arena. Raises `UserError` at the first difference. A slot that is
        not whole awaits a prefetch that no token has needed yet."""
        self.look(slot_of)
        held = self.slots.held
        for layer, slot in np.argwhere(held != NOTHING).tolist():
            expert = int(held[layer, slot])
            if not torch.equal(self.slots.bytes[layer, slot].cpu(), self.slots.arena.bytes[layer, expert]):
                raise UserError(
                    f"slot {slot} of layer {layer} does not hold the bytes of expert {expert}: memory or a copy is at "
                    "fault, and the text so far may be wrong"
                )
