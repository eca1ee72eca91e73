"""What every test may rely on: Ctrl-C means the same wherever the suite runs."""

import signal

# A job in the background of a shell ignores SIGINT, and hands that on to every program it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
