"""Answers of a Hugging Face model under the harness, several requests per pass.

A continuation is scored in one pass over context and continuation: from the same scores, the decisions are those of
decoding token by token (`edgemoe.gpu_offload.harness.windows.passes` says why). Rows are padded on the left.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgemoe.calibration import Calibration
from edgemoe.evaluation.answers import Pair, Prompt, predicted, rows_of
from edgemoe.generation.engine import Language
from edgemoe.generation.generate import Draft
from edgemoe.generation.sampling import Sampler
from edgemoe.gpu_offload.harness.steer import steer
from edgemoe.gpu_offload.harness.windows import kv_name
from edgemoe.policy import Policy


class HarnessAnswers:
    """An `edgemoe.evaluation.answers.Answers`; made by `harness_answers`, whose policy steers the model meanwhile."""

    def __init__(self, model: nn.Module, language: Language, n_ctx: int, batch: int) -> None:
        self._model, self._language, self._n_ctx, self.batch = model, language, n_ctx, batch

    @property
    def language(self) -> Language:
        return self._language

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    def loglikelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for group in self._groups([len(context) + len(continuation) for context, continuation in pairs]):
            rows = [[*pairs[at][0], *pairs[at][1]][:-1] for at in group]
            kept = max(len(pairs[at][1]) for at in group)
            logits = rows_of(self._pass(*self._padded(rows), use_cache=False, logits_to_keep=kept).logits)
            for row, at in zip(logits, group, strict=True):
                continuation = pairs[at][1]
                parts = [predicted(*pair) for pair in zip(row[kept - len(continuation) :], continuation, strict=True)]
                found[at] = sum(nats for nats, _ in parts), all(greedy for _, greedy in parts)
        return found

    def texts(self, prompts: Sequence[Prompt]) -> list[str]:
        found = [""] * len(prompts)
        for group in self._groups([len(prompt) for prompt, _ in prompts]):
            for at, text in zip(group, self._written([prompts[at] for at in group]), strict=True):
                found[at] = text
        return found

    def _groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indices that share a pass: of like lengths, since the shorter ones are padded."""
        order = sorted(range(len(lengths)), key=lambda at: lengths[at])
        return (order[at : at + self.batch] for at in range(0, len(order), self.batch))

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens and attention mask, both [B, S]; token 0 where the mask is 0."""
        width = max(map(len, rows))
        ids, mask = np.zeros((2, len(rows), width), np.int64)
        for at, row in enumerate(rows):
            ids[at, width - len(row) :], mask[at, width - len(row) :] = row, 1
        device = next(self._model.parameters()).device
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    @torch.no_grad()
    def _pass(self, ids: Tensor, mask: Tensor, **more: Any) -> Any:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self._model(input_ids=ids, attention_mask=mask, position_ids=positions, **more)

    def _written(self, prompts: Sequence[Prompt]) -> list[str]:
        drafts = [Draft(self._language, options, Sampler(options)) for _, options in prompts]
        room = [self._n_ctx - len(prompt) for prompt, _ in prompts]
        texts, going = [""] * len(prompts), np.ones(len(prompts), np.bool_)
        ids, mask = self._padded([prompt for prompt, _ in prompts])
        name = kv_name(self._model)
        kv: dict[str, Any] = {}
        while True:
            out = self._pass(ids, mask, use_cache=True, logits_to_keep=1, **kv)
            kv = {name: getattr(out, name)}
            # A finished row goes on as padding, which touches neither its cache nor the others.
            following = np.zeros((len(prompts), 1), np.int64)
            for at, row in enumerate(rows_of(out.logits[:, -1])):
                if going[at]:
                    step = drafts[at].take(row, room[at] > 0, 0.0)
                    room[at] -= 1
                    texts[at] += step.text
                    following[at], going[at] = step.token, not step.finish
            if not going.any():
                return texts
            ids = torch.from_numpy(following * going[:, None]).to(mask.device)
            mask = torch.cat([mask, torch.from_numpy(going[:, None].astype(np.int64)).to(mask.device)], dim=1)


@contextmanager
def harness_answers(
    model: nn.Module,
    language: Language,
    policy: Policy,
    slots: int,
    calibration: Calibration | None,
    n_ctx: int,
    batch: int = 1,
) -> Iterator[HarnessAnswers]:
    """A loaded model that routes by `policy` on `slots` slots per layer as long as the context is open.

    Raises `UserError` as `edgemoe.gpu_offload.harness.steer.steer` does.
    """
    with steer(model, policy, slots, calibration):
        yield HarnessAnswers(model, language, n_ctx, batch)
