"""Ctrl-C and SIGTERM while a trace is being written: too late to be obeyed, too early to be let through."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
