"""Calls of the reader's code: an exception or an endless loop in it must not stop the notebook."""

import contextlib
import ctypes
import linecache
import threading
import traceback
from collections.abc import Callable, Iterator

from pagewise.exercises.values import Raised

SECONDS = 5.0


class TimeUp(BaseException):
    """Raised inside a call that takes too long. It is not an Exception, so that `except Exception` cannot catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp in this thread if the `with` block takes longer than this, and again after each further second.

    It is raised between two steps of Python code, so a long sleep or a long call of C code ends first.
    """
    ended, this = threading.Event(), ctypes.c_ulong(threading.get_ident())

    def watch() -> None:
        wait = seconds
        while not ended.wait(wait):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(this, ctypes.py_object(TimeUp))
            wait = 1.0

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        while watcher.is_alive():
            with contextlib.suppress(TimeUp):  # it may be raised here, too
                ended.set()
                watcher.join()


def attempt(call: Callable[[], object], *, seconds: float | None = None, code: object = None) -> object:
    """Return the result of `call`, or `Raised`. Only KeyboardInterrupt, the user's own interrupt, passes through.

    Args:
        seconds: the time limit; None means SECONDS.
        code: the reader's function; the report of an exception names the line of this function.
    """
    seconds = SECONDS if seconds is None else seconds
    try:
        with time_limit(seconds):
            return call()
    except TimeUp:
        return Raised("time", f"no answer after {seconds:g} seconds: is there a loop that never ends?")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        return Raised(type(error), f"{_said(error)}{_where(error, code)}")


def _said(error: BaseException) -> str:
    try:
        message = str(error).strip()
    except Exception:
        message = ""
    lines = message.splitlines()
    short = "\n".join(lines[:12] + ["…"] * (len(lines) > 12))
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def _where(error: BaseException, code: object) -> str:
    """Return the innermost line of the reader's function in the traceback."""
    code = getattr(getattr(code, "fn", code), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__, limit=200)
    for frame in reversed(frames):
        if code is not None and frame.filename == code.co_filename and frame.name == code.co_name:
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"\nin line {frame.lineno - code.co_firstlineno + 1} of {frame.name}: {line}"
    return ""
