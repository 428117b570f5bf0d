"""A process that does one task after the other, each with a time limit. A task that hangs or crashes costs only itself.

No thread and no signal can end a call that hangs in C code or on a GPU. A kernel that reads foreign memory leaves its
process without a GPU. The work is therefore done in another process, which is killed when it does not answer.
"""

import contextlib
import multiprocessing.process
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

STARTING = 300.0  # seconds that a new process has to import everything and call `make`


class Failed(Exception):
    """A task without a result; the message says why."""


class Worker(contextlib.AbstractContextManager):
    """Call `make(*args)` once in a fresh process, and call its result with each task.

        with Worker(make, *args) as worker:
            result = worker(*task, limit=60)  # Failed: it raised, took longer, or ended its process

    After a failure the next task gets a new process. `make`, its arguments, tasks and results must be picklable.
    """

    def __init__(self, make: Callable[..., Callable], *args: object) -> None:
        self._work = make, args
        self._process: multiprocessing.process.BaseProcess | None = None

    def __call__(self, *task: object, limit: float) -> Any:
        try:
            if self._process is None:
                self._start()
            self._pipe.send(task)
            return self._answer(limit)
        except Failed:
            self.close()
            raise
        except (EOFError, OSError):
            self._process.join(10)
            status = status_of(self._process.exitcode)
            self.close()
            raise Failed(f"its process ended: {status}") from None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, even if it is busy."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        """Start a process and wait until it takes tasks."""
        spawn = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, *self._work))
        start(self._process, needs_main=self._work[0].__module__ == "__main__")
        theirs.close()
        self._answer(STARTING)

    def _answer(self, limit: float) -> Any:
        if not self._pipe.poll(limit):
            raise Failed(f"no answer within {limit:g} s")
        result, reason = self._pipe.recv()
        if reason is not None:
            raise Failed(reason)
        return result


def start(process: multiprocessing.process.BaseProcess, *, needs_main: bool = False) -> None:
    """Start a process, which does not run the caller's script again unless it `needs_main`."""
    caller = sys.modules["__main__"]
    if not needs_main:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = caller
    if process.daemon:  # a fork of this program would end what it finds there
        multiprocessing.process._children.discard(process)


def described(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]


def _serve(pipe: Connection, make: Callable[..., Callable], args: tuple) -> None:
    """Serve tasks in the new process. An error may have damaged the process, so it ends."""
    try:
        call, result = make(*args), None
        while True:
            pipe.send((result, None))
            result = call(*pipe.recv())
    except EOFError:
        return  # there are no more tasks
    except Exception as error:
        pipe.send((None, described(error)))


def status_of(exitcode: int | None) -> str:
    """Return how a process has ended: with an exit status or by a signal."""
    return f"exit status {exitcode}" if exitcode is None or exitcode >= 0 else signal.Signals(-exitcode).name
