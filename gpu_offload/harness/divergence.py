"""How far a policy moves a model's predictions from exact routing, token by token (PSR paper §6.1, §6.6).

The same windows under exact and under steered routing, teacher-forced in decode order, both with float32 router scores
and in passes of the same shape, so that the policy is the only difference.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from edgemoe.calibration import Calibration
from edgemoe.gpu_offload.harness.families import find_routers
from edgemoe.gpu_offload.harness.steer import Steered, steer
from edgemoe.gpu_offload.harness.windows import batches, check_windows, passes, stacked
from edgemoe.policy import Policy
from edgemoe.policy.replay import DEMAND, EXECUTED, PREFETCHED, REPLACED, UNUSED
from edgemoe.progress import Advance, no_progress


@dataclass(frozen=True)
class Setting:
    """What is compared with exact routing."""

    policy: Policy
    capacity: int  # C: slots per layer


@dataclass(frozen=True, eq=False)
class WindowDivergence:
    """One window of T tokens, which holds T − 1 predictions, under one setting."""

    nll_exact: np.ndarray  # [T − 1] float32, nats
    nll_steered: np.ndarray  # [T − 1] float32
    kl: np.ndarray  # [T − 1] float32: KL(exact ‖ steered) of the next-token distribution, nats
    agree: np.ndarray  # [T − 1] bool: both put the same token first
    counts: np.ndarray  # [T, 5] int32, summed over layers, by the names in `edgemoe.policy.replay`
    copies: np.ndarray  # [L]: prefetch and demand copies of the first T − 1 tokens, by layer


def exactly(model: nn.Module) -> Steered:
    """The model under exact routing: the reference, with the same float32 scores as every policy."""
    return steer(model, Policy(), find_routers(model)[0].n_experts)


def divergences(
    model: nn.Module,
    settings: Sequence[Setting],
    windows: Sequence[np.ndarray],
    calibration: Calibration | None = None,
    *,
    batch: int = 1,
    chunk: int | None = None,
    skip: Container[int] = (),
    advance: Advance = no_progress,
) -> Iterator[tuple[int, list[WindowDivergence]]]:
    """(index of the window, its divergence under each setting), window by window, exact routing run once for all.

    windows: token ids [T]. batch: windows of equal length per pass. chunk: positions per pass, None for whole windows;
    both decide the last bits and belong to a result's configuration. skip: windows that are finished; the others are
    batched as if all ran, so a resumed run repeats the bits of one that was not interrupted. advance: told of tokens,
    T · (settings + 1) per window. Exact log-probabilities of a batch are held, 4 · B · T · V bytes.

    Raises `UserError` for windows that are too short or of another vocabulary, and whatever `steer` refuses.
    """
    check_windows(model, windows)
    exact = exactly(model)
    steered = [steer(model, s.policy, s.capacity, calibration, record="counts") for s in settings]
    for group in batches(windows, batch):
        if all(at in skip for at in group):
            continue
        ids = stacked(model, [windows[at] for at in group])
        with exact:
            reference = [(at, logits.float().log_softmax(-1)) for at, logits in passes(model, ids, chunk)]
        advance(ids.numel())
        found: list[list[WindowDivergence]] = []
        for one in steered:
            found.append(_compared(one, ids, reference, chunk))
            advance(ids.numel())
        for row, at in enumerate(group):
            if at not in skip:
                yield at, [rows[row] for rows in found]


def _compared(
    one: Steered, ids: Tensor, reference: list[tuple[int, Tensor]], chunk: int | None
) -> list[WindowDivergence]:
    """The divergence of each row under one setting."""
    parts = []
    with one:
        for (at, exact), (_, logits) in zip(reference, passes(one.model, ids, chunk), strict=True):
            targets = ids[:, at + 1 : at + 1 + exact.shape[1]]
            predicted = targets.shape[1]  # the last position of a window predicts what it does not hold
            parts.append(_tokens(exact[:, :predicted], logits[:, :predicted].float().log_softmax(-1), targets))
    exact, steered, kl, agree = (torch.cat(column, dim=1).cpu().numpy() for column in zip(*parts, strict=True))
    return [
        WindowDivergence(
            exact[row],
            steered[row],
            kl[row],
            agree[row],
            record.counts.sum(axis=0, dtype=np.int32),
            record.counts[:, :-1, [DEMAND, PREFETCHED]].sum(axis=(1, 2), dtype=np.int64),
        )
        for row, record in enumerate(one.take())
    ]


def _tokens(exact: Tensor, steered: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """NLL of both, KL and agreement [B, S] of log-probabilities [B, S, V]."""
    at = targets.unsqueeze(-1)
    kl = (exact.exp() * (exact - steered)).sum(-1, dtype=torch.float64).float()
    return (
        -exact.gather(-1, at).squeeze(-1),
        -steered.gather(-1, at).squeeze(-1),
        kl,
        exact.argmax(-1) == steered.argmax(-1),
    )


def summarise(windows: Sequence[WindowDivergence]) -> dict[str, float]:
    """Means over all tokens of the windows.

    excess_nll is the paired difference in nats, and `excess_perplexity` what it does to perplexity, as a share: on text
    that the exact model itself wrote, the first estimates the KL divergence (the selfgen diagnostic, PSR paper §6.1).
    Copies, loads and replaced slots are per token, over all layers.
    """
    exact, steered, kl = (
        np.concatenate([getattr(window, name) for window in windows]).astype(np.float64)
        for name in ("nll_exact", "nll_steered", "kl")
    )
    counts = np.concatenate([window.counts for window in windows])
    per_token = counts.mean(axis=0)
    excess = float((steered - exact).mean())
    return {
        "windows": len(windows),
        "tokens": len(counts),
        "predictions": len(kl),
        "perplexity_exact": float(np.exp(exact.mean())),
        "perplexity": float(np.exp(steered.mean())),
        "excess_nll": excess,
        "excess_perplexity": float(np.expm1(excess)),
        "kl": float(kl.mean()),
        "agreement": float(np.concatenate([window.agree for window in windows]).mean()),
        "loads": float(per_token[EXECUTED]),
        "replaced": float(per_token[REPLACED]),
        "demand": float(per_token[DEMAND]),
        "prefetch": float(per_token[PREFETCHED]),
        "unused": float(per_token[UNUSED]),
        "copies": float(per_token[DEMAND] + per_token[PREFETCHED]),
    }
