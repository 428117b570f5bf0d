"""A process of its own for CUDA answers: a kernel on the CPU runner is native code, which only its process's end stops.

It is started by the first CUDA check, kept for the next ones, killed when an answer takes too long, and ends with us.
"""

import atexit
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

SECONDS = {"start": 300.0, "build": 300.0, "run": 10.0}
"""How long each stage may take; the first two are bounds for a machine that is very busy."""

announce: Callable[[str, str], object] = lambda stage, what: None  # noqa: E731
"""In the worker: tells the parent which stage comes next, and what is done in it."""


class Died(RuntimeError):
    """The worker took too long or crashed. `what` it was doing; `seconds` it had, or None if it crashed."""

    def __init__(self, what: str, seconds: float | None) -> None:
        super().__init__(what)
        self.what, self.seconds = what, seconds


class Worker:
    """A child process that judges answers to CUDA exercises, one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def judge(self, exercise: str, answer: object) -> object:
        """The verdict on `answer`; what its kernels print is printed here. Raises Died."""
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            self._start()
        try:
            return self._exchange(exercise, answer)
        except BaseException:  # the user's interrupt too: whatever it is doing, it shall not go on
            self.stop()
            raise

    def stop(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its compiler too
            self._process.wait()
            self._connection.close()
        self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = f"from pagewise.exercises.worker import serve; serve({theirs.fileno()})"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", command], pass_fds=[theirs.fileno()], env=environment, start_new_session=True
        )
        theirs.close()
        self._connection, self._owner = Connection(ours.detach()), os.getpid()
        atexit.register(self.stop)

    def _exchange(self, exercise: str, answer: object) -> object:
        self._connection.send((exercise, answer))
        stage, what = "start", "the start"
        while self._connection.poll(SECONDS[stage]):
            try:
                kind, *rest = self._connection.recv()
            except (EOFError, ConnectionError):
                raise Died(what, None) from None
            if kind == "verdict":
                verdict, printed = rest
                print(printed, end="")
                return verdict
            stage, what = rest
        raise Died(what, SECONDS[stage])


def serve(descriptor: int) -> None:
    """The worker's life: judge what comes in, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from pagewise.exercises.checkers import BY_NAME

    connection = Connection(descriptor)
    globals()["announce"] = lambda stage, what: connection.send(("stage", stage, what))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            exercise, answer = connection.recv()
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                verdict = BY_NAME[exercise].judge(answer)
            connection.send(("verdict", verdict, printed.getvalue()))
