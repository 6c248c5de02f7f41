"""Imports whose memory stays: what they make is never garbage."""

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@contextmanager
def kept_imports() -> Iterator[None]:
    """Search for no garbage while modules are imported, and never among what they made.

    That search was a fifth of a start. What is left out of it stays in the memory that the workers
    of the proxy share.
    """
    gc.disable()
    # A thread that a module starts, as OpenBLAS does, leaves signals to the main thread for good.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        gc.freeze()
        gc.enable()
