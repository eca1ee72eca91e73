"""Ctrl-C and SIGTERM while a trace is being written: at the end too late to be obeyed, before that not at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM do nothing. Elsewhere than on the main thread nobody receives them anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that C installed: Python cannot put it back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM wait; at the end, the one that came is answered as it would have been."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, Any]] = []
    before = {
        number: signal.signal(number, lambda *what: came.append(what)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0][0])
