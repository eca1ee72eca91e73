"""Text sampled from the exact model at temperature 1: on it, the excess log-likelihood loss estimates the divergence.

The selfgen diagnostic of the PSR paper (§6.1) traces frontiers cheaply; it does not accept configurations.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from edgemoe.errors import UserError
from edgemoe.gpu_offload.harness.divergence import exactly
from edgemoe.gpu_offload.harness.windows import kv_name, stacked
from edgemoe.progress import Advance, no_progress


@torch.no_grad()
def sample_windows(
    model: nn.Module,
    count: int,
    length: int,
    *,
    prefix: Sequence[int],
    seed: int = 0,
    batch: int = 1,
    advance: Advance = no_progress,
) -> list[np.ndarray]:
    """`count` windows [length] int64 that start with `prefix` (BOS) and go on as the exact model would, temperature 1.

    Nothing ends a window early: an end-of-text token is one more token, after which the model goes on, so the windows
    are samples of its own distribution. Window i draws its random numbers from (seed, i) alone; `batch` changes the
    last bits of probabilities and belongs to the configuration. advance: told of sampled tokens.
    """
    if not 1 <= len(prefix) < length:
        raise UserError(f"windows of {length} tokens after a prefix of {len(prefix)}: give a prefix and room to sample")
    if count < 1 or batch < 1:
        raise UserError(f"{count} windows in batches of {batch}: give at least 1")
    found: list[np.ndarray] = []
    name = kv_name(model)
    with exactly(model):
        for first in range(0, count, batch):
            rows = range(first, min(first + batch, count))
            draws = np.stack([np.random.default_rng([seed, row]).random(length) for row in rows])
            chosen = [stacked(model, [np.asarray(prefix)] * len(rows))]
            kv: dict[str, Any] = {}
            for at in range(len(prefix), length):
                out = model(input_ids=chosen[-1], use_cache=True, **kv)
                kv = {name: getattr(out, name)}
                sums = out.logits[:, -1].double().softmax(-1).cumsum(-1)
                drawn = torch.from_numpy(draws[:, at : at + 1]).to(sums) * sums[:, -1:]
                chosen.append(torch.searchsorted(sums, drawn, right=True).clamp(max=sums.shape[-1] - 1))
                advance(len(rows))
            found.extend(torch.cat(chosen, dim=1).cpu().numpy())
    return found
