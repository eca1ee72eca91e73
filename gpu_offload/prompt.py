"""A chunk of a prompt on the device, layer by layer: every token decided in order, then every expert brought once.

An expert that is not held comes into a staging buffer, runs from there, and is moved on the device into the slot that
it ends in. While the next layer attends and decides, the link brings what its pre-gate names most often: in a chunk of
many tokens, hardly an expert of those is executed by none. What is decided does not depend on it.

The host runs ahead of the device: it waits once per layer, for what was decided, and enqueues all else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from edgemoe.gpu_offload.chunk_experts import ChunkExperts
from edgemoe.gpu_offload.chunk_layers import ChunkLayers
from edgemoe.gpu_offload.executor import Counters, kept_in_place
from edgemoe.gpu_offload.grouped import count_settled, rows_by_expert
from edgemoe.gpu_offload.kernels import chunk_rows, layout
from edgemoe.gpu_offload.kernels.device_policy import Decisions, DevicePolicy
from edgemoe.gpu_offload.program import TokenProgram
from edgemoe.gpu_offload.slots import NOTHING, Slots
from edgemoe.gpu_offload.staging import Staging
from edgemoe.gpu_offload.weights import Weights

_TOLD_VALUES = 2048  # of a pre-gate that a block looks at, at once


@dataclass(frozen=True)
class Told:
    """What a layer's decision says, on the host."""

    executed: np.ndarray  # [T, k], −1 beyond a token's
    slot_of: np.ndarray  # [E], of each expert after the chunk
    misses: int
    likely: list[int]
    """The experts that the next layer's pre-gate chooses for any token, most often first."""


class Prompt:
    """Chunks of a sequence whose KV cache is a `TokenProgram`'s."""

    def __init__(self, weights: Weights, policy: DevicePolicy, slots: Slots, program: TokenProgram, chunk: int) -> None:
        self.weights, self.policy, self.slots, self.program = weights, policy, slots, program
        shape, device = weights.shape, weights.embedding.device
        self._staging = Staging(slots)
        self._likely: list[int] = []  # experts of the layer that comes next, and how many of them were sent
        self._ahead = 0
        self._decided = [Decisions.empty(chunk, policy.width, policy.budget, device) for _ in range(shape.n_layers)]
        self._layers = ChunkLayers(weights, program, chunk)
        self._products = ChunkExperts(shape, weights.dtype, chunk, policy.width, device)
        size = 2 * shape.n_experts + 1 + chunk * policy.width  # as `chunk_rows.tell` has it
        self._told = torch.zeros((shape.n_layers, size), dtype=torch.int32, device=device)
        gpu = device.type == "cuda"
        self._heard = torch.empty(size, dtype=torch.int32, pin_memory=gpu)
        self._asked = torch.cuda.Event() if gpu else None

    def run(self, tokens: np.ndarray, position: int, counters: Counters) -> torch.Tensor:
        """Append tokens [T]; the logits after each, [T, V] float32. The slots' `held` must be known; what they hold
        afterwards is what they held, or what the logical cache says."""
        device, shape = self.weights.embedding.device, self.weights.shape
        ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(device)
        self._staging.clear()
        self._likely, self._ahead = [], 0
        self._told.zero_()
        placed = np.empty((shape.n_layers, shape.n_experts), np.int32)
        layers = self._layers
        layers.begin(ids, position)
        for layer in range(shape.n_layers):
            layers.attend(layer)
            scores, pregate, following = layers.route(layer)
            uses = self.policy.uses_pregate
            decided = self.policy.chunk(layer, scores, pregate if uses else None, ids, out=self._decided[layer])
            self._ask(layer, decided, following, len(tokens))
            self._read_ahead(layer, self._staging.ahead)  # while the device decides
            self._experts(layer, self._hear(len(tokens)), placed[layer], counters)
            layers.mix(layer, self._products.outputs, decided)
        self.policy.state.ints[:, 0, : shape.n_experts] = torch.from_numpy(placed).to(device)
        return layers.logits()

    def _experts(self, layer: int, told: Told, slot_of: np.ndarray, counters: Counters) -> None:
        """The union of what the tokens execute, each expert once: those in slots first, then the others.

        Out: slot_of [E], the residents that were decided; whoever has a slot and stays keeps it, and need not come
        again.
        """
        held, n_experts = self.slots.held[layer], self.weights.shape.n_experts
        slot_of[:] = kept_in_place(told.slot_of, held)
        order, bounds = rows_by_expert(told.executed, n_experts)
        where = np.full(n_experts, -1)
        where[held[held != NOTHING]] = np.flatnonzero(held != NOTHING)
        executed = np.diff(bounds) > 0
        missing = np.flatnonzero(executed & (where < 0)).tolist()
        here = np.flatnonzero(executed & (where >= 0))
        sent = self._likely[: self._ahead]
        unused = int((~executed[sent]).sum())
        counters.loads += len(order)
        counters.misses += told.misses
        counters.demand += len(missing)
        counters.prefetch, counters.unused = counters.prefetch + unused, counters.unused + unused
        known = set(sent)
        coming = [*sent, *(e for e in missing if e not in known)]
        ends = slot_of[np.array(coming, np.int64)]
        self._products.plan(order, bounds, (here, where[here]), (coming, self._staging.places(len(coming))), ends)
        self._products.run_held(self._layers.rows(), self.slots.bytes[layer])
        after = set() if layer + 1 == len(self.slots.held) else set(self.slots.held[layer + 1].tolist())
        self._likely, self._ahead = [e for e in told.likely if e not in after], 0
        self._run(layer, coming, len(sent), slot_of)
        residents = np.flatnonzero(slot_of >= 0)
        count_settled(counters, int((held[slot_of[residents]] != residents).sum()))  # moved when the chunk ends

    def _run(self, layer: int, coming: list[int], sent: int, slot_of: np.ndarray) -> None:
        """Run `coming` as they arrive, the first `sent` of which are under way; and let the link go on with what the
        next layer is likely to execute."""
        staging, done = self._staging, 0
        ends = self._batches(len(coming), sent)
        for end in [0, *ends]:
            if end:
                self._arrived(layer, coming, done, end, slot_of)
            done = end
            more = min(staging.room, len(coming) - sent)
            staging.send(layer, coming[sent : sent + more])
            sent += more
            if sent == len(coming):
                self._read_ahead(layer + 1, staging.ahead // 2)

    def _batches(self, count: int, sent: int) -> list[int]:
        """Where those that run together end, of `count` that come: what was sent before in two parts."""
        half, together = -(-sent // 2), self._staging.together
        return sorted({half, sent, *range(sent + together, count, together), count} - {0})

    def _arrived(self, layer: int, coming: list[int], first: int, last: int, slot_of: np.ndarray) -> None:
        """Run a part of `coming`, and move those that end in a slot."""
        staging, products, slots = self._staging, self._products, self.slots
        staging.arrive(last - first)
        products.run(self._layers.rows(), first, last, staging.buffers)
        experts = np.array(coming[first:last])
        experts = experts[slot_of[experts] >= 0]
        held = slots.held[layer]
        held[slot_of[experts]] = NOTHING  # interrupted, they hold nothing
        products.move(first, last, staging.buffers, slots.bytes[layer])
        held[slot_of[experts]] = experts
        staging.release(last - first)

    def _read_ahead(self, layer: int, most: int) -> None:
        """Send what a layer that has not decided is likely to execute, `most` of it with what was sent before."""
        more = min(most, len(self._likely)) - self._ahead
        if layer < len(self.slots.held) and more > 0:
            more = min(more, self._staging.room)
            self._staging.send(layer, self._likely[self._ahead : self._ahead + more])
            self._ahead += more

    def _ask(self, layer: int, decided: Decisions, pregate: torch.Tensor | None, count: int) -> None:
        """Enqueue what brings a layer's decision to the host. pregate [T, E]: the next layer's."""
        policy, told = self.policy, self._told[layer]
        rows = max(1, _TOLD_VALUES // policy.padded)
        chunk_rows.tell[(triton.cdiv(count, rows),)](
            decided.weights if pregate is None else pregate, decided.executed, decided.counts,
            policy.state.ints[layer, 0], told, count,
            E=policy.n_experts, EP=policy.padded, WIDTH=policy.width, WIDTH_P=triton.next_power_of_2(policy.width),
            COUNTS=len(layout.COUNTS), K_NEXT=0 if pregate is None else policy.top_k[layer + 1], ROWS=rows,
        )  # fmt: skip
        size = 2 * policy.n_experts + 1 + count * policy.width
        self._heard[:size].copy_(told[:size], non_blocking=True)
        if self._asked is not None:
            self._asked.record(torch.cuda.current_stream(told.device))

    def _hear(self, count: int) -> Told:
        """Wait for it."""
        if self._asked is not None:
            self._asked.synchronize()
        n_experts, width = self.policy.n_experts, self.policy.width
        heard = self._heard.numpy()[: 2 * n_experts + 1 + count * width].copy()
        often, slot_of, misses, executed = np.split(heard, (n_experts, 2 * n_experts, 2 * n_experts + 1))
        by_count = np.argsort(-often, kind="stable")
        likely = by_count[: np.count_nonzero(often)].tolist()
        return Told(executed.reshape(count, width), slot_of, int(misses[0]), likely)

    def record(self, count: int) -> dict[str, np.ndarray]:
        """What the last chunk of `count` tokens decided, as `edgemoe.gpu_offload.decisions.Decisions.record`."""
        routed = self._layers.routed[:, :, :count]
        return self._recorded([_rows(d, count) for d in self._decided], routed, count)

    def record_of_token(self) -> dict[str, np.ndarray]:
        """The same of the last token that went through the program."""
        p, lists = self.program, self.policy.decisions
        layers = [tuple(t[layer : layer + 1] for t in lists.tensors) for layer in range(p.weights.shape.n_layers)]
        return self._recorded(layers, p.scores.unsqueeze(2), 1)

    def _recorded(
        self, layers: Sequence[tuple[torch.Tensor, ...]], routed: torch.Tensor, count: int
    ) -> dict[str, np.ndarray]:
        """routed [L, 2, T, E]: each layer's scores, and the pre-gates of the next."""
        n_experts, width = self.weights.shape.n_experts, self.policy.width
        size = (len(layers), count)
        out = {
            "executed": np.full((*size, width), -1, np.int32),
            "counts": np.zeros((*size, 2), np.int32),
            "copies": np.zeros((*size, 2, n_experts), np.int32),
            "scores": routed[:, 0].cpu().numpy().copy(),
        }
        for layer, (executed, _, _, _, copies, counts) in enumerate(layers):
            m, demand, prefetch = counts.cpu().numpy().T
            out["counts"][layer] = np.stack([prefetch, demand], axis=1)
            here = np.arange(width) < m[:, None]
            out["executed"][layer][here] = executed.cpu().numpy()[here]
            pairs = copies.cpu().numpy()
            out["copies"][layer, :, 1, :width] = pairs[:, :width, 0]
            out["copies"][layer, :, 0, : pairs.shape[1] - width] = pairs[:, width:, 0]
        if self.policy.uses_pregate:
            out["pregate"] = np.zeros_like(out["scores"])
            out["pregate"][1:] = routed[:-1, 1].cpu().numpy()
        return out


def _rows(decided: Decisions, count: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[:count] for tensor in decided.tensors)
