"""Warm set, Δ̄ and token prior of a Hugging Face model, from held-out text (PSR paper §4.1, Appendix B)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from edgemoe.calibration import Calibration, score_ranges
from edgemoe.gpu_offload.harness.families import find_routers
from edgemoe.gpu_offload.harness.steer import steer
from edgemoe.gpu_offload.harness.windows import batches, check_windows, passes, stacked
from edgemoe.policy import Policy
from edgemoe.progress import Advance, no_progress
from edgemoe.tracing.calibrate import estimate


def calibrate_model(
    model: nn.Module,
    windows: Sequence[np.ndarray],
    *,
    texts: Sequence[dict[str, Any]] = (),
    batch: int = 1,
    chunk: int | None = None,
    advance: Advance = no_progress,
) -> Calibration:
    """Route windows of token ids exactly, and estimate as `edgemoe calibrate` does.

    texts: domain, file, sha256 and tokens of each text, for the file's record. Of the scores only their ranges are
    kept, so memory is T · L · (2k + 4) bytes. advance: told of tokens. Raises `UserError` as `steer` and the estimate
    do.
    """
    check_windows(model, windows)
    routers = find_routers(model)
    tokens, experts, ranges = [], [], []
    with steer(model, Policy(), routers[0].n_experts, record="scores") as exact:
        for group in batches(windows, batch):
            ids = stacked(model, [windows[at] for at in group])
            for _ in passes(model, ids, chunk):
                pass
            for record in exact.take():
                assert record.own is not None and record.scores is not None
                tokens.append(record.tokens)
                experts.append(record.own)
                ranges.append([score_ranges(scores) for scores in record.scores])
            advance(ids.numel())
    about = exact.provenance(batch=batch, chunk=chunk)
    layers = [
        (np.concatenate([part[at] for part in experts]), np.concatenate([part[at] for part in ranges]))
        for at in range(len(routers))
    ]
    about["texts"] = list(texts)
    return estimate(
        about["model"], np.concatenate(tokens), np.asarray(about["layers"]), routers[0].n_experts, layers, about
    )
