"""What a system refuses to a process, or an engine to a text, in one line that says what a person can do about it."""

import re
import sys
from collections.abc import Sequence

import numpy as np

from edgemoe.errors import UserError
from edgemoe.machine.memory import ram
from edgemoe.units import format_bytes


def limit(name: str) -> int | None:
    """A limit on this process in bytes, as `resource` names it (`RLIMIT_AS`); None without one. Raises `OSError` where
    the system does not say."""
    if sys.platform == "win32":
        raise OSError("limits of processes are Unix's")
    import resource

    found = resource.getrlimit(getattr(resource, name))[0]
    return None if found == resource.RLIM_INFINITY else found


def ram_full(error: BaseException) -> UserError | None:
    """What torch, numpy or a thread's start say of RAM that the system refuses; None for any other error."""
    words = str(error)
    if "can't start new thread" in words:
        what = "RAM for another thread is"
    elif isinstance(error, MemoryError) or "DefaultCPUAllocator" in words:
        asked = re.search(r"allocate ([\d.]+) (\w+)", words)
        size = "" if not asked else format_bytes(int(asked[1])) if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"
        what = f"{size} more of RAM are" if size else "more RAM is"
    else:
        return None
    return ram_refused(what, "give fewer slots (--residency), a smaller context (-c) or --chunk")


def ram_refused(what: str, instead: str) -> UserError:
    """`what` (with its verb) is refused: why, as far as the system says, and what to do, or do `instead`."""
    try:
        allowed = limit("RLIMIT_AS")
    except OSError:
        allowed = None
    if allowed is None:
        why, first = f"{format_bytes(ram().available)} are free", "close other programs"
    else:
        why, first = f"`ulimit -v` allows {format_bytes(allowed)} in all", "raise that limit"
    return UserError(f"{what} refused ({why}): {first}, or {instead}")


def check_room(position: int, count: int, n_ctx: int) -> None:
    """Raises `UserError` unless a context of `n_ctx` tokens has room for `count` after `position`."""
    if position + count > n_ctx:
        held = f" after {position:,}" if position else ""
        raise UserError(f"{count:,} tokens{held} do not fit into a context of {n_ctx:,}: give a larger one")


def check_tokens(tokens: np.ndarray, n_vocab: int) -> None:
    """Raises `UserError` for the first of the tokens [T] that is none of the model's."""
    strange = tokens[(tokens < 0) | (tokens >= n_vocab)]
    if len(strange):
        raise UserError(f"token {strange[0]} is not one of the model's {n_vocab:,}: another tokenizer's?")


def checked(tokens: Sequence[int] | np.ndarray, position: int, n_ctx: int, n_vocab: int) -> np.ndarray:
    """Tokens [T] that are to follow `position`, as int32. Raises `UserError` where there are none, no room for them, or
    one that is none of the model's."""
    if not len(tokens):
        raise UserError("no tokens: give one at least")
    check_room(position, len(tokens), n_ctx)
    given = np.asarray(tokens)
    check_tokens(given, n_vocab)
    return given.astype(np.int32)
