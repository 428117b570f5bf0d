"""Run a function on n processes that form one group of torch.distributed (lesson 10).

`torchrun` starts a script n times. `Processes` does the same for a notebook cell, and imports torch only once for all
cells. The processes use gloo, and NCCL for tensors on GPUs if each process can have a GPU of its own.
"""

import contextlib
import faulthandler
import io
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from pagewise.tools.checks import check_count, check_number

STARTING = 120.0  # seconds that the processes have to import torch and to find each other
OTHERS = 0.3  # seconds that the other processes have to report their errors after the first error


class Processes(contextlib.AbstractContextManager):
    """A group of `count` processes for `torch.distributed`. Each process computes with one thread.

        with Processes(3) as processes:
            ranks = processes.run(torch.distributed.get_rank)  # [0, 1, 2]

    The first `run` starts the processes, and later calls use the same processes. A failure ends all processes, because
    the others may wait for the process that failed. The next `run` then starts new processes. The processes end with
    the `with` block, and also when the process that started them ends for any reason.
    """

    def __init__(self, count: int, *, timeout: float = 120.0) -> None:
        """Prepare `count` processes. Each call of `run` may take `timeout` seconds."""
        check_count("count", count)
        check_number("timeout", timeout, low=0.0)
        self.count, self.timeout = count, timeout
        self._workers: list[tuple[subprocess.Popen, Connection]] = []

    def run(self, function: Callable, *args: object) -> list[Any]:
        """Call `function(*args)` in every process and return the results in the order of the ranks.

        The function travels by cloudpickle, so a notebook cell may define it. Its printed lines appear after the call.

        Raises:
            RuntimeError: the function raised an exception in a process, or a process ended. The message names the
                rank of the process and contains the traceback.
            TimeoutError: a process did not return in time. The message shows the line at which the process waits.
        """
        task = cloudpickle.dumps((function, args))
        try:
            if not self._workers:
                self._start()
            for _, pipe in self._workers:
                with contextlib.suppress(OSError):  # the process ended: `_results` says so
                    pipe.send_bytes(task)
            return self._results(self.timeout)
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._workers:
            process.kill()
            process.wait()
            pipe.close()
        self._workers = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pagewise-")  # where the processes meet, and their logs
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}
        for rank in range(self.count):
            ours, theirs = Pipe()
            fd = theirs.fileno()
            command = f"from {__name__} import _serve; _serve{fd, rank, self.count, self._folder.name}"
            with theirs, self._log(rank).open("wb") as log:
                options = {"env": environment, "pass_fds": [fd], "stdout": log, "stderr": log}
                options["start_new_session"] = True  # Ctrl-C in a terminal reaches this process alone
                self._workers.append((subprocess.Popen([sys.executable, "-c", command], **options), ours))
        self._results(STARTING)

    def _results(self, limit: float) -> list[Any]:
        """Wait for a result of each process. Raise the error of a process that ended, else of the lowest rank."""
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        results, printed, errors, deadline = {}, {}, {}, time.monotonic() + limit
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    results[rank], printed[rank], error = cloudpickle.loads(pipe.recv_bytes())
                    errors |= {(1, rank): f"raised {error}"} if error else {}
                except (EOFError, OSError):
                    code = self._workers[rank][0].wait()
                    status = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                    errors[0, rank] = f"ended with {status}\n\n{self._log(rank).read_text()}"
            deadline = min(deadline, time.monotonic() + OTHERS) if errors else deadline
        for rank, text in sorted(printed.items()):
            print("".join(f"process {rank}: {line}\n" for line in text.splitlines()), end="")
        for (_, rank), error in sorted(errors.items()):
            raise RuntimeError(f"process {rank} of {self.count} {error.strip()}")
        if waiting:
            for rank in waiting.values():
                self._workers[rank][0].send_signal(signal.SIGUSR1)  # the process writes its stack into its log
            time.sleep(OTHERS)
            stacks = "".join(f"\n\nprocess {rank}:\n{self._log(rank).read_text()}" for rank in waiting.values())
            raise TimeoutError(f"{len(waiting)} of {self.count} processes gave no result within {limit:g} s{stacks}")
        return [results[rank] for rank in range(self.count)]

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"log of {rank}")


def _serve(fd: int, rank: int, count: int, folder: str) -> None:
    """Call one function after the other in a process of `Processes`."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    pipe, tasks = Connection(fd), queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, tasks), daemon=True).start()
    torch.set_num_threads(1)
    has_gpu = torch.cuda.device_count() >= count
    if has_gpu:
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=count)
    answer = cloudpickle.dumps((None, "", None))  # ready
    while True:
        pipe.send_bytes(answer)
        answer = _call(tasks.get())


def _receive(pipe: Connection, tasks: queue.SimpleQueue) -> None:
    """Receive tasks until the other end of the pipe is closed. Then end this process, even in the middle of a call."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            tasks.put(pipe.recv_bytes())
    os._exit(1)


def _call(task: bytes) -> bytes:
    """Return (result, printed text, None), or (None, printed text, the error and its traceback), pickled."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            function, args = cloudpickle.loads(task)
            return cloudpickle.dumps((function(*args), printed.getvalue(), None))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        return cloudpickle.dumps((None, printed.getvalue(), text))
