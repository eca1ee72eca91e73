"""What every test may rely on: Ctrl-C and the width of what is printed are the same wherever the suite runs, a busy
machine is no failure, and a worker keeps to its share of the cores.
"""

import gc
import os
import signal

from hypothesis import HealthCheck, settings

# A job in the background of a shell ignores SIGINT, one under nohup SIGHUP, and both hand that on to every program that
# they start.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

# The caller's terminal is nothing to a test. pytest imports readline, which sets both for the programs that it starts,
# workers among them, where `os.environ` does not show it.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)

# Beside another worker an example may take any time, and making one too.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# Threads that take every core wait for one another in loops, for as long as another worker has a core of theirs. So
# torch and BLAS take one, in the tests' own programs too, and what asks for more, as llama.cpp does, waits asleep.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_finish() -> None:
    """What was imported stays: garbage is not looked for there again, which took longer than many a test."""
    gc.collect()
    gc.freeze()
