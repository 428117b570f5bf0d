"""Run a function on n processes that form one group of torch.distributed (lesson 10).

`torchrun` starts a script n times. `Processes` does the same for a notebook cell. A server process imports torch, and
the n processes are forks of the server. They use gloo, and NCCL for tensors on GPUs if each can have its own GPU.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from pagewise.distributed.team import LOOPBACK
from pagewise.tools.checks import check_count, check_number
from pagewise.tools.worker import STARTING, Failed, Worker, status_of

IMPORTED = ["torch.distributed", "torch._dynamo"]  # before forking; this takes seconds and does not touch a GPU
OTHERS = 0.3  # seconds that the other processes have to report their errors after the first error


class Processes(contextlib.AbstractContextManager):
    """A group of `count` processes for `torch.distributed`. Each process computes with one thread.

        with Processes(3) as processes:
            ranks = processes.run(torch.distributed.get_rank)  # [0, 1, 2]

    The first `run` starts the processes, and later calls use the same processes. A failure ends all processes, because
    the others may wait for the process that failed. The next `run` then starts new processes. The processes end with
    the `with` block, and also when the process that started them ends for any reason. A fork of that process
    cannot use them.
    """

    def __init__(self, count: int, *, timeout: float = 120.0) -> None:
        """Prepare `count` processes. Each call of `run` may take `timeout` seconds."""
        check_count("count", count)
        check_number("timeout", timeout, low=0.0)
        self.count, self.timeout = count, timeout
        self._workers: list[Worker] = []

    def run(self, function: Callable, *args: object) -> list[Any]:
        """Call `function(*args)` in every process and return the results in the order of the ranks.

        The function travels by cloudpickle, so a notebook cell may define it. Its printed lines appear after the call.

        Raises:
            RuntimeError: the function raised an exception in a process, or a process ended. The message names the
                rank of the process and contains the traceback.
            TimeoutError: a process did not return in time. The message shows the line at which the process waits.
        """
        task = cloudpickle.dumps((function, args))
        if self._workers and not self._workers[0].is_mine:
            raise RuntimeError("this process is a fork of the program that started the processes: only it runs them")
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                with contextlib.suppress(OSError):  # the process ended: `_results` says so
                    worker.pipe.send((task,))
            return self._results(self.timeout)
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if "forkserver" not in multiprocessing.get_all_start_methods():
            raise RuntimeError("Windows cannot fork processes: run this under WSL, in a container or on Colab")
        self._folder = tempfile.mkdtemp(prefix="pagewise-")  # where the processes meet, and their logs
        # pagewise asks for a GPU when it is imported, and a process that did may not be forked where there is one
        preload = IMPORTED if torch.cuda.is_available() else [*IMPORTED, "pagewise.distributed"]
        multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
        how = {"method": "forkserver", "folder": self._folder}
        self._workers = [Worker(_join, rank, self.count, self._log(rank), **how) for rank in range(self.count)]
        for worker in self._workers:
            worker.start()
        self._results(STARTING)

    def _results(self, limit: float) -> list[Any]:
        """Wait for a result of each process. Raise the error of a process that ended, else of the lowest rank."""
        waiting = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        results, printed, errors, deadline = {}, {}, {}, time.monotonic() + limit
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                worker = self._workers[rank]
                try:
                    answer = worker.answer()
                    results[rank], printed[rank], error = cloudpickle.loads(answer) if answer else (None, "", None)
                    errors |= {(1, rank): f"raised {error}"} if error else {}
                except Failed as error:
                    errors[1, rank] = f"raised {error}"
                except (EOFError, OSError):
                    errors[0, rank] = f"ended with {status_of(worker.process)}\n\n{self._log(rank).read_text()}"
            deadline = min(deadline, time.monotonic() + OTHERS) if errors else deadline
        for rank, text in sorted(printed.items()):
            print("".join(f"process {rank}: {line}\n" for line in text.splitlines()), end="")
        for (_, rank), error in sorted(errors.items()):
            raise RuntimeError(f"process {rank} of {self.count} {error.strip()}")
        if waiting:
            for rank in waiting.values():
                os.kill(self._workers[rank].process.pid, signal.SIGUSR1)  # the process writes its stack into its log
            time.sleep(OTHERS)
            stacks = "".join(f"\n\nprocess {rank}:\n{self._log(rank).read_text()}" for rank in waiting.values())
            raise TimeoutError(f"{len(waiting)} of {self.count} processes gave no result within {limit:g} s{stacks}")
        return [results[rank] for rank in range(self.count)]

    def _log(self, rank: int) -> Path:
        return Path(self._folder, f"log of {rank}")


def _join(rank: int, count: int, log: Path) -> Callable[[bytes], bytes]:
    """Join the group in a new process, whose output goes into a log. Return what calls one function after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all processes; the first one decides
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    torch.set_num_threads(1)
    has_gpu = torch.cuda.device_count() >= count
    if has_gpu:
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{log.parent}/store", rank=rank, world_size=count)
    return _call


def _call(task: bytes) -> bytes:
    """Return (result, printed text, None), or (None, printed text, the error and its traceback), pickled."""
    error, printed = None, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            function, args = cloudpickle.loads(task)
            return cloudpickle.dumps((function(*args), printed.getvalue(), None))
    except BaseException as raised:
        if not isinstance(raised, SystemExit) or raised.code:  # else it ends its script: a result of None
            error = f"{type(raised).__name__}: {raised}\n\n{traceback.format_exc()}"
        return cloudpickle.dumps((None, printed.getvalue(), error))
