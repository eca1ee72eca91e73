"""Ctrl-C while a read is under way, however slow or busy the machine is: the disk waits for it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from edgemoe.streaming import reads
from edgemoe.streaming.store import ExpertStore


@contextmanager
def interrupt_while_reading(store: ExpertStore, begun: int = 1) -> Iterator[None]:
    """Inside, each read of `store` takes up to a second; SIGINT arrives once `begun` of them were begun and one is
    under way. Afterwards reads are fast again."""
    log = store.log(1 << 16)
    assert len(log) and not store.ctl[reads.IN_FLIGHT]
    ended = threading.Event()

    def press() -> None:
        while not ended.is_set():
            if store.ctl[reads.IN_FLIGHT] > 0 and store.ctl[reads.LOG_COUNT] >= begun:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.001)

    person = threading.Thread(target=press, daemon=True)
    store.ctl[reads.DELAY] = 500_000_000
    person.start()
    try:
        yield
    finally:
        ended.set()
        person.join()
        store.ctl[reads.DELAY] = store.ctl[reads.LOG] = 0
