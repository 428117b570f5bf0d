"""Ctrl-C interrupts the engine between two changes of its bookkeeping, never within one (lesson 9)."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Raise a KeyboardInterrupt that arrives inside at the end. Only the main thread receives signals in Python."""
    arrived = []
    usual = signal.getsignal(signal.SIGINT)  # None: not installed from Python
    if usual is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *signal_and_frame: arrived.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if arrived and callable(usual):
            usual(*arrived[-1])
