"""A process that does one task after the other, each with a time limit. A task that hangs or crashes costs only itself.

No thread and no signal can end a call that hangs in C code or on a GPU. A kernel that reads foreign memory leaves its
process without a GPU. The work is therefore done in another process, which is killed when it does not answer.
"""

import contextlib
import multiprocessing.process
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

STARTING = 300.0  # seconds that a new process has to import everything and call `make`


class Failed(Exception):
    """A task without a result; the message says why."""


class Worker(contextlib.AbstractContextManager):
    """Call `make(*args)` once in a fresh process, and call its result with each task.

        with Worker(make, *args) as worker:
            result = worker(*task, limit=60)  # Failed: it raised, took longer, or ended its process

    After a failure, and in a fork of the program, the next task gets a new process. `make`, its arguments, tasks and
    results must be picklable. The process ends when the program that started it ends for any reason. Its end removes a
    `folder`.
    """

    def __init__(self, make: Callable[..., Callable], *args: object, method: str = "spawn", folder: str = "") -> None:
        """`method`: how multiprocessing starts the process. A fork of a program that uses a GPU could not use it."""
        self._work, self._method, self._folder = (make, args), method, folder
        self.process: multiprocessing.process.BaseProcess | None = None

    def __call__(self, *task: object, limit: float) -> Any:
        try:
            if self.process is None or not self.is_mine:
                self.start()
                self.answer(STARTING)
            self.pipe.send(task)
            return self.answer(limit)
        except (EOFError, OSError, Failed) as error:
            reason = str(error) if isinstance(error, Failed) else f"its process ended: {status_of(self.process)}"
            self.close()
            raise Failed(reason) from None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, even if it is busy. A fork leaves the process to the program that started it."""
        if self.process is not None and self.is_mine:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        self.process = None

    @property
    def is_mine(self) -> bool:
        """Whether this program started the process. A fork of the program did not."""
        return self._owner == os.getpid()

    def start(self) -> None:
        """Start the process, which calls `make`. Its first answer is None."""
        context, self._owner = multiprocessing.get_context(self._method), os.getpid()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self._folder, *self._work), daemon=True)
        start(self.process, needs_main=self._work[0].__module__ == "__main__")
        theirs.close()

    def answer(self, limit: float = 0.0) -> Any:
        """Wait for the result of a task. Raise Failed if there is none, or EOFError or OSError if the process ended."""
        if not self.pipe.poll(limit):
            raise Failed(f"no answer within {limit:g} s")
        result, reason = self.pipe.recv()
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
    multiprocessing.process._children.discard(process)  # a fork of this program would end what it finds there


def described(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]


def _serve(pipe: Connection, folder: str, make: Callable[..., Callable], args: tuple) -> None:
    """Serve tasks in the new process. An error may have damaged the process, so it ends."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        call, result = make(*args), None
        while True:
            pipe.send((result, None))
            result = call(*pipe.recv())
    except EOFError:
        return  # there are no more tasks
    except Exception as error:
        pipe.send((None, described(error)))


def _end_with_parent(folder: str) -> None:
    wait([multiprocessing.parent_process().sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def status_of(process: multiprocessing.process.BaseProcess) -> str:
    """Wait for the end of a process. Return its exit status, or the signal that ended it."""
    process.join(10)
    code = process.exitcode
    return f"exit status {code}" if code is None or code >= 0 else signal.Signals(-code).name
