"""Windows of token ids, and forward passes over them: whole, or in chunks with a KV cache."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgemoe.errors import UserError


def kv_name(model: nn.Module) -> str:
    """What this transformers calls the KV cache, as an argument and in the output."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def passes(model: nn.Module, ids: Tensor, chunk: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """(first position, logits [B, S, V]) of windows [B, T], teacher-forced; at most `chunk` positions a pass.

    A pass over many positions routes as generation does, one token after the other: each layer decides its positions in
    order, on its own state, which no other layer reads. Only the order of additions differs, so decisions from the same
    scores are the same, and scores of another chunk size differ in their last bits.
    """
    if chunk is not None and chunk < 1:
        raise UserError(f"{chunk} positions per pass: give at least 1")
    length = ids.shape[1]
    if chunk is None or chunk >= length:
        yield 0, model(input_ids=ids, use_cache=False).logits
        return
    name = kv_name(model)
    kv: dict[str, Any] = {}
    for at in range(0, length, chunk):
        out = model(input_ids=ids[:, at : at + chunk], use_cache=True, **kv)
        kv = {name: getattr(out, name)}
        yield at, out.logits


def batches(windows: Sequence[np.ndarray], size: int) -> Iterator[list[int]]:
    """Indices of neighbouring windows of one length, at most `size` together: no padding, so none to account for."""
    if size < 1:
        raise UserError(f"a batch of {size} windows: give at least 1")
    group: list[int] = []
    for at, window in enumerate(windows):
        if group and (len(group) == size or len(window) != len(windows[group[0]])):
            yield group
            group = []
        group.append(at)
    if group:
        yield group


def stacked(model: nn.Module, windows: Sequence[np.ndarray]) -> Tensor:
    """[B, T] int64 on the model's device."""
    device = next(model.parameters()).device
    return torch.from_numpy(np.stack([np.asarray(window, np.int64) for window in windows])).to(device)


def check_windows(model: nn.Module, windows: Sequence[np.ndarray]) -> None:
    """Raise `UserError` for windows that predict nothing, or hold ids that the model does not know."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    for at, window in enumerate(windows):
        if len(window) < 2:
            raise UserError(f"window {at} has {len(window)} tokens: at least 2 are needed to predict one")
        if min(window) < 0 or max(window) >= vocabulary:
            wrong = min(window) if min(window) < 0 else max(window)
            raise UserError(f"window {at} holds token {wrong}, the model knows 0 to {vocabulary - 1}: wrong tokenizer?")
    if not windows:
        raise UserError("no windows of text: give at least one of 2 tokens")


def text_windows(tokenizer: Any, text: str, length: int, limit: int | None = None) -> list[np.ndarray]:
    """A text as windows of at most `length` tokens, each starting with BOS where the tokenizer puts one.

    Special tokens in the text are plain text. limit: the first so many windows. A last window of one token, which
    predicts nothing, is left out.
    """
    if length < 2:
        raise UserError(f"windows of {length} tokens predict nothing: give at least 2")
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    bos = first_token(tokenizer)
    start = [] if bos is None else [bos]
    step = length - len(start)
    cut = [np.array([*start, *ids[at : at + step]], np.int64) for at in range(0, len(ids), step)]
    return [window for window in cut if len(window) > 1][:limit]


def first_token(tokenizer: Any) -> int | None:
    """The BOS token that the tokenizer puts before a text, if it does."""
    bos = tokenizer.bos_token_id
    opened = tokenizer("a")["input_ids"]
    return int(bos) if bos is not None and opened and opened[0] == bos else None
