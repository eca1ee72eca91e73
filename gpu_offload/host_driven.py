"""The host-driven executor: the engine of the PSR paper (§4.2, §5), a host round trip in every layer.

Per layer the device replays two CUDA graphs (`host_driven_layers`); between them the host decides, by the policy's
numba kernels, and sends copies on a stream of their own (`host_driven_copies`, `host_driven_link`). It serves
comparison with the executor that decides on the device, routing on the physical cache, and systems where that executor
cannot run. On the CPU the same code runs without graphs, and copies are over when they are sent, unless slowed.
"""

import time
from typing import Literal

import numpy as np
import torch

from edgemoe.errors import UserError
from edgemoe.gpu_offload.arithmetic import rms_norm
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.executor import Snapshot, memory_full
from edgemoe.gpu_offload.host_driven_copies import Copies
from edgemoe.gpu_offload.host_driven_layers import TokenLayers
from edgemoe.gpu_offload.host_driven_link import CopyStream, Link, MemoryLink, SlowLink
from edgemoe.gpu_offload.host_driven_prompt import HostPrompt
from edgemoe.gpu_offload.host_executor import HostExecutor
from edgemoe.gpu_offload.weights import Weights
from edgemoe.policy import algorithm1

Physical = Literal["no", "issued", "arrived"]
IN_FLIGHT = 2  # prefetch copies, as in the paper


class HostDrivenExecutor(HostExecutor):
    """An `edgemoe.gpu_offload.executor.Executor` on CUDA or the CPU.

    Counters count copies that were made: a prefetch that was dropped before it was sent is none.
    """

    def __init__(
        self,
        weights: Weights,
        decisions: Decisions,
        *,
        n_ctx: int,
        in_flight: int = IN_FLIGHT,
        physical: bool | Physical = "no",
        throttled: bool = False,
        link_gbps: float | None = None,
        delay_s: float = 0.0,
        seed: int = 0,
        recorded: torch.Tensor | None = None,
    ) -> None:
        """in_flight: m, prefetch copies on the link at most. physical: routing favours residents only once their copy
        is issued (paper, Table 1) or has arrived (True); its outputs depend on timing. throttled: part 1 inserts no
        more than the link has room for (§6.1, the best exact baseline): what is resident depends on timing, and so do
        the outputs unless routing is exact. Prompts follow the logical cache alone in either case. link_gbps: slow the
        link to so many 10⁹ bytes per second; delay_s: hold each copy back by a random time up to this, drawn from
        `seed`. recorded: routing that decodes follow (`TokenLayers`).

        Raises `UserError` where the device refuses the memory.
        """
        if in_flight < 1:
            raise UserError(f"{in_flight} prefetch copies in flight: give at least 1")
        self._throttled = throttled
        self._physical = ("arrived" if physical else "no") if isinstance(physical, bool) else physical
        device = weights.embedding.device
        slow = "" if link_gbps is None and not delay_s else f", link {link_gbps} GB/s, delays to {delay_s} s"
        throttle = ", throttled" if throttled else ""
        self.name = f"host-driven {device.type}, {in_flight} in flight, physical {self._physical}{throttle}{slow}"
        try:
            super().__init__(weights, decisions)
            self._layers = TokenLayers(weights, self.slots, n_ctx=n_ctx, recorded=recorded)
            self._link = _link(device, link_gbps, delay_s, seed)
            self._copies = Copies(self.slots, self._state.slot_of, self._link, in_flight, self.counters)
            self._prompt = HostPrompt(self._layers, decisions, self._link, self.counters)
        except torch.cuda.OutOfMemoryError as error:
            raise memory_full(error) from None
        self.reset()

    @torch.inference_mode()
    def step(self, tokens: np.ndarray, position: int, *, all_rows: bool = False) -> np.ndarray:
        self.decisions.begin(tokens)
        if len(tokens) == 1:
            logits = self._decode(int(tokens[0]), position)[None]
        else:
            logits = self._chunk(tokens, position, all_rows)
        self._link.read_clock()
        self.counters.wait_s = self._link.waited_s
        if not np.isfinite(logits).all():
            raise UserError("the logits are not finite: is the model file damaged?")
        return logits if all_rows else logits[-1]

    def _decode(self, token: int, position: int) -> np.ndarray:
        """One token: per layer graph A, part 2 and its demand, graph B, part 1 of the next layer and its prefetches."""
        layers, decisions, copies, c = self._layers, self.decisions, self._copies, self.counters
        n_layers = self.weights.shape.n_layers
        layers.start(token, position)
        layers.attend(0)
        self._predict(0, None)
        for layer in range(n_layers):
            scores, pregate = layers.routed(layer)
            begun = time.perf_counter()
            if not np.isfinite(scores).all():
                raise UserError(f"the scores of layer {layer} are not finite: is the model file damaged?")
            if self._physical == "no":
                demand = decisions.part2(layer, scores)
            else:
                demand = decisions.part2(layer, scores, copies.absent(layer, arrived=self._physical == "arrived"))
            executed = [e for e in decisions.executed[layer, 0].tolist() if e >= 0]
            c.policy_s += time.perf_counter() - begun
            c.loads, c.misses = c.loads + len(executed), c.misses + len(demand)
            self._link.wait(copies.need(layer, demand, executed))
            layers.execute(layer, executed, self._state.slot_of[layer, executed].tolist())
            if layer + 1 < n_layers:
                self._predict(layer + 1, pregate)
                layers.attend(layer + 1)
        return layers.logits()

    def _predict(self, layer: int, pregate: np.ndarray | None) -> None:
        """Part 1 of a layer; then, at this boundary between layers, prefetches that the link has room for."""
        begun = time.perf_counter()
        room = self._copies.room() if self._throttled else algorithm1.NO_LIMIT
        predicted = self.decisions.part1(layer, pregate, room=room)
        self.counters.policy_s += time.perf_counter() - begun
        self._copies.predict(layer, predicted)
        self._copies.boundary()

    def _chunk(self, tokens: np.ndarray, position: int, all_rows: bool) -> np.ndarray:
        self._copies.drain()
        w = self.weights
        x = self._prompt.run(tokens, position)
        last = x if all_rows else x[-1:]
        logits = self._layers.multiply(rms_norm(last, w.norm, w.shape.norm_eps), w.output)
        found: np.ndarray = logits.cpu().numpy()
        return found

    def reset(self) -> None:
        self._stop()
        super().reset()

    def restore(self, snapshot: Snapshot) -> None:
        self._stop()
        super().restore(snapshot)

    def _stop(self) -> None:
        """Let what was sent arrive, also of a step that was interrupted, and forget what was not."""
        self._copies.drain()
        if self._layers.device.type == "cuda":
            torch.cuda.synchronize(self._layers.device)

    def verify(self) -> None:
        """A slot whose prefetch has not been sent holds what it held: no token has needed it yet."""
        self._link.drain()
        expected = self.slot_of()
        for waiting in self._copies.queued():
            expected[waiting.layer, waiting.expert] = -1
        self.slots.verify(expected)

    def close(self) -> None:
        self._link.close()
        self._layers.close()


def _link(device: torch.device, gbps: float | None, delay_s: float, seed: int) -> Link:
    if gbps is not None or delay_s:
        rate = float("inf") if gbps is None else gbps * 1e9
        return SlowLink(device, bytes_per_s=rate, delay_s=delay_s, seed=seed)
    return CopyStream(device) if device.type == "cuda" else MemoryLink()
