"""Tensor parallelism in the engine: process 0 decides every step, and the other processes follow (lesson 10).

    process 0                                        processes 1 … n − 1
    schedule, make the batch
    send ── block copies, batch ───────────────────▶ receive
    copy blocks, run its share ◀── all-reduces ────▶ copy blocks, run its share
    sample, advance

Each process has its share of the weights, and the keys and values of its KV heads. Only process 0 has a scheduler, a
block manager, requests and logits. A step tells a follower token ids, positions, slots, block tables and lengths.

The all-reduces use gloo on CPUs. On GPUs they use NCCL, and each process needs a GPU of its own.

Process 0 has a connection to each follower. The end of a connection tells both sides that the other process has ended.
A process that waits in an all-reduce then ends too, so nothing waits for ever.
"""

import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import connection as connections
from multiprocessing.connection import Connection, Listener, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pagewise.distributed.tensor_parallel import check_splits
from pagewise.engine.batch import Batch
from pagewise.engine.config import EngineConfig
from pagewise.engine.follower import CLOSE, OTHERS, READY, launched, my_share, new_group, sent, started
from pagewise.engine.interrupts import held_back
from pagewise.tools.worker import described

GRACE = 1.0  # seconds that a follower has to report why it failed


class GroupLost(RuntimeError):
    """A process of tensor parallelism has ended, or the engine is closed: no further step is possible."""


class Leader:
    """Process 0, which starts the followers and tells them every step. `model` is its share.

    Under torchrun the followers exist already: they call `follow_torchrun`.
    """

    def __init__(self, model: str | Path | nn.Module, whole: nn.Module, config: EngineConfig) -> None:
        """Give each process its share of the model.

        Args:
            model: what the followers load. whole: the same model, loaded in this process.
            config: with the dtype of the model, and with the device "cpu" or "cuda".

        Raises:
            ValueError, TypeError: the processes cannot share the model. No process is started.
            GroupLost: a follower failed.
        """
        count = config.tensor_parallel
        check_splits(whole, count)
        if config.device == "cuda" and not launched() and (gpus := torch.cuda.device_count()) < count:
            raise ValueError(f'tensor_parallel = {count} needs as many GPUs, and there are {gpus}: give device="cpu"')
        self.count, self.lost, self._pid = count, "", os.getpid()
        self._processes: dict[int, subprocess.Popen] = {}
        self._connections: dict[int, Connection] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="pagewise-")  # where the processes meet
        try:
            if launched():
                self._connections = _accept(count)
            else:
                self._start()
            self.tell((model, config))
            self.wait()
            self.model = my_share(whole, self._met(config.device), config.device)
            if config.device == "cpu":  # gloo has met. NCCL needs the folder until its first all-reduce
                self._folder.cleanup()
        except BaseException:
            self._end()
            raise

    def tell(self, message: object) -> None:
        """Send a message to each follower."""
        packed = pickle.dumps(message)
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the follower has ended: the next `wait` or all-reduce says so
                connection.send_bytes(packed)

    def wait(self) -> None:
        """Wait until each follower is ready. Raise GroupLost if one has ended or raised an exception."""
        missing = set(self._connections)
        while missing:
            reports = self._reports(None)
            if failed := {rank: report for rank, report in reports.items() if report != READY}:
                raise self._given_up(failed)
            missing -= reports.keys()

    @contextlib.contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Let the followers compute the same step as the `with` block. Ctrl-C waits for the end of the step.

        Raises:
            GroupLost: a follower has ended, or the block raised an exception. The followers are in the middle of a
                step then, so the group is given up.
        """
        if self.lost:
            raise GroupLost(self.lost)
        together = False
        try:
            with held_back():
                self.tell(sent(batch))
                yield
                together = True
        except BaseException as error:
            if together:  # Ctrl-C, after the step
                raise
            lost = self._given_up(self._reports(GRACE), error)
            if not isinstance(error, Exception):
                raise
            raise lost from error

    def close(self) -> None:
        """End the followers. A fork of this process has no followers to end."""
        if os.getpid() != self._pid:
            return
        self.lost = self.lost or "the engine is closed: make a new LLM"
        self._end()

    def _met(self, device: str) -> Any:
        """Return the group when all processes have joined it. Raise GroupLost if one of them ends before."""
        group: Future[Any] = Future()

        def join() -> None:
            try:
                group.set_result(
                    dist.group.WORLD if launched() else new_group(self._folder.name, 0, self.count, device)
                )
            except Exception as error:
                group.set_exception(error)

        threading.Thread(target=join, daemon=True).start()  # it would wait for minutes for a process that has ended
        self.wait()
        return group.result()

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}
        threads = max(1, torch.get_num_threads() // self.count)
        for rank in range(1, self.count):
            ours, theirs = Pipe()
            arguments = (theirs.fileno(), rank, self.count, self._folder.name, threads)
            command = [sys.executable, "-c", f"from {started.__module__} import started; started{arguments}"]
            with theirs:
                self._processes[rank] = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # so that Ctrl-C in a terminal reaches process 0 alone
                )
            self._connections[rank] = ours

    def _reports(self, timeout: float | None) -> dict[int, str]:
        """Wait for the first report of a follower, and a moment for the others. "": the follower has ended."""
        waiting, found = {connection: rank for rank, connection in self._connections.items()}, {}
        while waiting and (ready := connections.wait(waiting, timeout)):
            for connection in ready:
                rank, timeout = waiting.pop(connection), OTHERS
                try:
                    found[rank] = connection.recv()
                except (EOFError, OSError):
                    found[rank] = ""
        return found

    def _given_up(self, reports: dict[int, str], error: BaseException | None = None) -> GroupLost:
        """End all followers, and return the error that names the first process that failed."""
        silent = [rank for rank, report in reports.items() if not report]  # the others lost their connection to these
        rank = min(silent or reports, default=0)
        reason = f"raised {reports.get(rank) or (error and described(error))}"
        if silent:
            reason = "ended"
            with contextlib.suppress(KeyError, subprocess.TimeoutExpired):
                code = self._processes[rank].wait(GRACE)
                reason += f" with {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"
        self.lost = f"process {rank} of tensor_parallel = {self.count} {reason}: make a new LLM"
        self._end()
        return GroupLost(self.lost)

    def _end(self) -> None:
        """End the followers. A process that was started here holds nothing that it would have to save."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(CLOSE)
            connection.close()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._connections, self._processes = {}, {}
        self._folder.cleanup()


def _accept(count: int) -> dict[int, Connection]:
    """Return connections to all followers, by rank."""
    key, connections = secrets.token_bytes(32), {}
    with Listener((os.environ.get("MASTER_ADDR", "127.0.0.1"), 0), backlog=count, authkey=key) as listener:
        dist.broadcast_object_list([(listener.address, key)])
        while len(connections) < count - 1:
            connection = listener.accept()
            connections[connection.recv()] = connection
    return connections
