"""A service manager's stop (SIGTERM) ends a command like Ctrl-C, so that one way of cleaning up serves both."""

import signal
from typing import Any


def interrupt_on_sigterm() -> None:
    """Raise KeyboardInterrupt in the main thread when SIGTERM arrives."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
