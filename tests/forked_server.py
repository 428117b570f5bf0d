"""The commands of the engine in processes that are forked, which spares them the import of torch."""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import torch
from eventually import soon

from pagewise.distributed.processes import IMPORTED
from pagewise.engine import LLM, leader
from pagewise.engine.leader import meet
from pagewise.tools.worker import start


class ForkedServer:
    """A server in a process of its own, and what it and its follower wrote to stderr."""

    def __init__(self, process: multiprocessing.process.BaseProcess, folder: Path) -> None:
        self.process, self._said, self._follower = process, folder / "said", folder / "follower"
        assert soon(lambda: self.address or process.exitcode is not None, 120, every=0.05)
        assert self.address, self.said

    @property
    def said(self) -> str:
        return self._said.read_text() if self._said.exists() else ""

    @property
    def address(self) -> str:
        return next(iter(re.findall(r"http://[\d.:]+", self.said)), "")

    @property
    def follower_pid(self) -> int:
        return int(self._follower.read_text())

    def ended_with(self, seconds: float) -> int | None:
        """Wait for the end of the server. Return its exit status, or None if it still runs."""
        self.process.join(seconds)
        return self.process.exitcode


@contextlib.contextmanager
def forked_server(
    folder: Path, *arguments: str, step_seconds: float = 0.0
) -> Iterator[tuple[ForkedServer, httpx.Client]]:
    """Yield a server of the tiny model on the CPU, and a client. Each step of the engine takes `step_seconds` more.

    Its followers are forked, too. Other tests start the command and followers as users do.
    """
    arguments = ("--port", "0", "--device", "cpu", *arguments)
    process = _started(_serve, folder, arguments, step_seconds)
    try:
        server = ForkedServer(process, folder)
        # Reading certificates takes longer than a request.
        with httpx.Client(base_url=server.address, timeout=60, verify=False) as client:
            yield server, client
    finally:
        process.kill()
        process.join()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((folder / "follower").read_text()), signal.SIGKILL)


def _started(target: Callable, *arguments: object) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("forkserver")
    # it has no effect if the process that forks runs already
    context.set_forkserver_preload(IMPORTED if torch.cuda.is_available() else [*IMPORTED, "pagewise.engine"])
    process = context.Process(target=target, args=arguments)
    start(process)
    return process


def torchrun(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Run torchrun, which starts the processes itself. Return its exit status, and the texts of stdout and stderr."""
    process = _started(_torchrun, folder, arguments)
    process.join(300)
    process.kill()
    process.join()
    return process.exitcode, (folder / "printed").read_text(), (folder / "said").read_text()


def _torchrun(folder: Path, arguments: tuple[str, ...]) -> None:
    from torch.distributed.run import main

    _write_to(folder)
    with (folder / "printed").open("a") as file:
        os.dup2(file.fileno(), 1)
    main([*arguments])


def _serve(folder: Path, arguments: tuple[str, ...], step_seconds: float) -> None:
    from pagewise.engine.serve.__main__ import main

    _write_to(folder)
    leader.SPAWN = multiprocessing.get_context("forkserver")
    leader.meet = _Meet(folder)
    if step_seconds:
        step = LLM.step
        LLM.step = lambda self: (threading.Event().wait(step_seconds) and None) or step(self)
    sys.exit(main(arguments))


class _Meet:
    """`leader.meet` in a follower that writes its id into a file, and its errors to where the server writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: object) -> None:
        _write_to(self.folder)
        (self.folder / "follower").write_text(str(os.getpid()))
        meet(*arguments)


def _write_to(folder: Path) -> None:
    with (folder / "said").open("a") as file:
        os.dup2(file.fileno(), 2)
