"""Progress bars for commands that take more than a few seconds. They need tqdm and a terminal as stderr.

Without tqdm, or if stderr is a file, the same code runs without a bar.
"""

import sys
import threading
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None
else:
    if not hasattr(tqdm, "_lock"):  # by default it is a semaphore, too, which a process that is killed leaves behind
        tqdm.set_lock(threading.RLock())

T = TypeVar("T")


class NoBar:
    """A bar that shows nothing."""

    def update(self, count: int = 1) -> None:
        pass

    def set_description(self, text: str) -> None:
        pass


def progress(items: Collection[T], label: str, *, delay: float = 0.0) -> Iterable[T]:
    """Return the items, with a progress bar on stderr that appears after `delay` seconds."""
    return items if tqdm is None else tqdm(items, desc=label, file=sys.stderr, disable=None, delay=delay)


def progress_bar(total: int, label: str, *, show: bool | None = None) -> AbstractContextManager[Any]:
    """Return a bar from 0 to `total` for a `with` statement. Call its `update(count)` whenever `count` more are done.

    `show`: whether to show the bar. The default is to show it if stderr is a terminal.
    """
    disable = None if show is None else not show
    return nullcontext(NoBar()) if tqdm is None else tqdm(total=total, desc=label, file=sys.stderr, disable=disable)


def say(text: str) -> None:
    """Print a text while a bar may be shown. The bar moves below the text."""
    with nullcontext() if tqdm is None else tqdm.external_write_mode():
        print(text, flush=True)
