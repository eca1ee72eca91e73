"""A service manager's stop (SIGTERM) and a terminal that goes away (SIGHUP) end a command like Ctrl-C, so that one way
of cleaning up serves all."""

import signal
from typing import Any


def interrupt_on_sigterm() -> None:
    """Raise KeyboardInterrupt in the main thread when SIGTERM arrives, or SIGHUP where that is not ignored (nohup)."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    hang_up = getattr(signal, "SIGHUP", None)
    if hang_up is not None and signal.getsignal(hang_up) is signal.SIG_DFL:
        signal.signal(hang_up, interrupt)
