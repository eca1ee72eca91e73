"""The device-resident executor (default on CUDA): one graph per token, no host in the loop.

Many tokens can be enqueued at once (`extend`); after one that ends the text the remaining replays do nothing. The host
appears between tokens only: to read logits, to take a snapshot, to start a sequence, and for prompts (`prompt`).

On Triton's interpreter the same launches run on the CPU one by one (`concurrent=False`): what they decide and compute
is tested without a GPU; what runs at the same time as what, is not.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgemoe.errors import UserError
from edgemoe.generation.options import Options
from edgemoe.gpu_offload.executor import Counters, Snapshot, kept_in_place, memory_full
from edgemoe.gpu_offload.kernels import draw
from edgemoe.gpu_offload.kernels.device_policy import DevicePolicy
from edgemoe.gpu_offload.kernels.sampling import NOT_FINITE, RUNNING, STATE, DeviceSampler, supported
from edgemoe.gpu_offload.memory import CHOICES
from edgemoe.gpu_offload.program import TokenProgram, Tuning
from edgemoe.gpu_offload.prompt import Prompt
from edgemoe.gpu_offload.records import Records
from edgemoe.gpu_offload.slots import Slots
from edgemoe.gpu_offload.weights import Weights
from edgemoe.policy import LogicalCache

_WARM_UP = 3  # launches before a capture: compiling and loading must not fall into it


@dataclass(frozen=True)
class DeviceSnapshot(Snapshot):
    """The logical cache of a moment, on the device."""

    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class _Choice:
    """A token and the choice of the next, which goes to `sequence` by its position. Its graph works on memory that this
    holds."""

    launch: Callable[[], None]
    sequence: torch.Tensor


class DeviceExecutor:
    """An `edgemoe.gpu_offload.executor.Executor` that decides on the device."""

    def __init__(
        self,
        weights: Weights,
        cache: LogicalCache,
        *,
        n_ctx: int,
        chunk: int,
        tuning: Tuning | None = None,
        concurrent: bool = True,
        recorded: torch.Tensor | None = None,
    ) -> None:
        """cache: policy, warm set, bonus scale and token prior, at the start of a sequence. chunk: the most tokens of a
        prompt's step. recorded: routing that decodes follow (`TokenProgram`).

        Raises `UserError` where the device refuses the memory.
        """
        self.weights, self.tuning, self.n_ctx = weights, tuning or Tuning(), n_ctx
        self.name = f"device {self.tuning}"
        shape, self._device = weights.shape, weights.embedding.device
        try:
            self._policy = DevicePolicy(
                cache, weights="softmax-executed" if shape.norm_topk else "softmax", device=self._device
            )
            self.slots = Slots(weights.arena, int(cache.state.capacity), self._device)
            self.records = Records(self.slots, self._policy.width, self._policy.budget)
            self._control = torch.zeros(4, dtype=torch.int64, device=self._device)
            self._program = TokenProgram(
                weights, self._policy, self.records, self._control,
                n_ctx=n_ctx, tuning=self.tuning, concurrent=concurrent, recorded=recorded,
            )  # fmt: skip
            self._prompt = Prompt(weights, self._policy, self.slots, self._program, chunk)
        except torch.cuda.OutOfMemoryError as error:
            raise memory_full(error) from None
        self._concurrent = concurrent
        self._graphs: dict[Any, Callable[[], None]] = {}
        """Of the token alone, and of each choice that has run."""
        self._choices: OrderedDict[Any, _Choice] = OrderedDict()
        """By the options that it depends on, the seed aside; the least recently used first."""
        self._host = Counters()
        self.reset()

    @property
    def counters(self) -> Counters:
        """As of now: asks the device."""
        totals = self.records.counts()
        return Counters(**{**vars(self._host), **{name: getattr(self._host, name) + n for name, n in totals.items()}})

    @torch.inference_mode()
    def step(self, tokens: np.ndarray, position: int, *, all_rows: bool = False) -> np.ndarray:
        if len(tokens) > 1:
            logits = self._chunk(tokens, position)
            out = logits if all_rows else logits[-1:]
        else:
            self._aim(0, position, int(tokens[0]))
            self._run("token", self._program.launch)
            out = self._program.logits.view(1, -1)
        found = np.array(out.cpu())  # a copy: the buffer is written again
        self.records.check()
        if not np.isfinite(found).all():
            raise UserError("the logits are not finite: is the model file damaged?")
        return found if all_rows else found[-1]

    def _chunk(self, tokens: np.ndarray, position: int) -> torch.Tensor:
        self.records.look(self.slot_of())
        logits = self._prompt.run(tokens, position, self._host)
        start = time.perf_counter()
        self.records.settle(self.slot_of())
        self._host.wait_s += time.perf_counter() - start
        return logits

    def _aim(self, seed: int, position: int, token: int) -> None:
        signed = seed - 2**64 if seed >= 2**63 else seed
        self._control.copy_(torch.tensor([signed, position, RUNNING, token], dtype=torch.int64))
        self.records.known = False

    def _run(self, name: Any, launch: Callable[[], None]) -> None:
        """Launch, by replaying a graph of it where the device has graphs."""
        if not self._concurrent:
            launch()
            return
        if name not in self._graphs:
            self._graphs[name] = self._captured(launch)
        self._graphs[name]()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compile the kernels of a token and capture its graph now, not while the first token is waited for."""
        if self._concurrent and "token" not in self._graphs:
            self._graphs["token"] = self._captured(self._program.launch)

    def _captured(self, launch: Callable[[], None]) -> Callable[[], None]:
        """A graph of `launch`. Its warm-up does nothing: the text has ended, as far as the kernels know."""
        aim, stream = self._control.clone(), self._program.stream
        assert stream is not None
        self._control[STATE] = NOT_FINITE
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                launch()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        self._control.copy_(aim)
        return graph.replay

    @torch.inference_mode()
    def extend(self, token: int, position: int, count: int, options: Options, ends: frozenset[int]) -> Sequence[int]:
        """As `Executor.extend`. Interrupted between two launches, the tokens that were launched run to their end, and
        `restore` waits for them: no token is cut, and no copy."""
        if not supported(options):
            return self._extend_by_host(token, position, count, options, ends)
        choice = self._choice(options, ends)
        self._aim(options.seed or 0, position, token)
        for _ in range(count):
            self._run(choice, choice.launch)
        _, after, state, _ = self._control.tolist()
        self.records.check()
        if state == NOT_FINITE:
            raise UserError("the logits are not finite: is the model file damaged?")
        return choice.sequence[position:after].tolist()

    def _choice(self, options: Options, ends: frozenset[int]) -> _Choice:
        """A token and the choice of the next by these options; of what was made for others, the last few are kept."""
        key = (options.temperature, options.top_k, options.top_p, options.min_p, ends)
        if key in self._choices:
            self._choices.move_to_end(key)
            return self._choices[key]
        while len(self._choices) >= CHOICES:
            if self._concurrent:
                torch.cuda.synchronize(self._device)  # no graph may go while it runs
            oldest = next(iter(self._choices))
            self._graphs.pop(self._choices[oldest], None)  # first: interrupted here, the choice gets another
            del self._choices[oldest]
        sampler = DeviceSampler(
            options, self.weights.shape.n_vocab, self.n_ctx,
            ends=tuple(sorted(ends)), control=self._control, device=self._device,
        )  # fmt: skip
        program = self._program

        def launch() -> None:
            program.launch()
            sampler.sample(program.logits)

        self._choices[key] = choice = _Choice(launch, sampler.sequence)
        return choice

    def _extend_by_host(
        self, token: int, position: int, count: int, options: Options, ends: frozenset[int]
    ) -> Sequence[int]:
        """Options that the device does not choose by: it gives the logits, token by token."""
        chosen: list[int] = []
        while len(chosen) < count and not (chosen and chosen[-1] in ends):
            token = draw.choose(self.step(np.array([token]), position), options, options.seed or 0, position)
            chosen.append(token)
            position += 1
        return chosen

    def record(self, count: int) -> dict[str, np.ndarray]:
        return self._prompt.record(count) if count > 1 else self._prompt.record_of_token()

    @torch.inference_mode()
    def reset(self) -> None:
        """As `Executor.reset`. Reading the state waits for all tokens that were launched, and no token's copies outlast
        it: nothing is under way when slots are given out anew."""
        before = self.slot_of()
        self.records.look(before)
        self._policy.state.reset()
        self._place()

    def snapshot(self) -> DeviceSnapshot:
        return DeviceSnapshot(np.zeros(0, np.uint8), self._policy.state.snapshot())

    @torch.inference_mode()
    def restore(self, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, DeviceSnapshot), "a snapshot of another executor"
        self.records.look(self.slot_of())
        self._policy.state.restore(snapshot.tensors)
        self._place()

    def _place(self) -> None:
        """The residents that the state says, in the slots that need the fewest copies."""
        start = time.perf_counter()
        said = self.slot_of()
        kept = np.stack([kept_in_place(row, held) for row, held in zip(said, self.slots.held, strict=True)])
        self._policy.state.ints[:, 0, : kept.shape[1]] = torch.from_numpy(kept).to(self._device)
        self._host.reset_copies += self.records.settle(kept)
        self._host.reset_s += time.perf_counter() - start

    def slot_of(self) -> np.ndarray:
        return self._policy.state.slot_of()

    def verify(self) -> None:
        self.records.verify(self.slot_of())

    def close(self) -> None:
        self._graphs.clear()
        self._choices.clear()
