"""An engine of several processes: process 0 decides every step, and the other processes follow (lesson 10).

    process 0                                        processes 1 … n − 1
    schedule, make the batch
    send ── block copies, batch ───────────────────▶ receive
    copy blocks, run its share ◀── all-reduces ────▶ copy blocks, run its share
    sample, advance

Each process has its share of the weights, and the keys and values of its KV heads and of its tokens. Only process 0 has
a scheduler, a block manager, requests and logits. A step tells a follower token ids, positions, slots, block tables and
lengths.

The messages travel through a group of gloo (see `pagewise.distributed.team`). What the model exchanges uses gloo on
CPUs. On GPUs it uses NCCL, and each process needs a GPU of its own.

A process that ends closes its connections, so the others get an exception. A process that stands still is named after
`group_timeout` seconds. Nothing waits for ever.
"""

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from pagewise.distributed.team import STARTING, Team, lost_connection
from pagewise.engine.batch import Batch
from pagewise.engine.config import EngineConfig
from pagewise.engine.follower import (
    check_model,
    join_torchrun,
    leave_torchrun,
    make_part,
    sent,
    shared_config,
    started,
)
from pagewise.engine.interrupts import held_back
from pagewise.tools.worker import described, status_of

GRACE = 2.0  # seconds that the followers have to report why they failed
CLOSING = 1.0  # seconds that a follower has to end


class GroupLost(RuntimeError):
    """A process of the engine has ended or stands still, or the engine is closed: no further step is possible."""


class Leader:
    """Process 0, which starts the followers and tells them every step. `part` is its own part of the engine.

    Under torchrun the followers exist already: there they never return from this constructor.
    """

    def __init__(self, model: str | Path | nn.Module, config: EngineConfig) -> None:
        """Start the followers, and let each process load its share of the model.

        Raises:
            ValueError, TypeError: the processes cannot share the model, or an option does not fit.
            GroupLost: a follower failed.
        """
        self.what, self.lost, self._pid, self._in_step = config.parallel, "", os.getpid(), False
        self._limit = STARTING.total_seconds()  # until all processes are ready
        self._processes: dict[int, subprocess.Popen] = {}
        self._folder: str | None = None  # where the processes meet. A TemporaryDirectory would end with any fork
        self._team = join_torchrun(model, config)
        self._is_launched = self._team is not None
        try:
            check_model(model, config)
            if config.context_parallel > 1 and config.memory is not None:
                raise ValueError("context_parallel has a memory of its own: leave memory out")
            config = shared_config(model, config)
            if self._team is None:
                self._team = self._started(config)
            self._team.send((model, config))
            self.part = make_part(model, config, self._team, self.step)
            self._limit = config.group_timeout
        except BaseException as error:
            if lost_connection(error):
                raise self._given_up(error) from error
            self._end()
            raise

    @contextlib.contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Let the followers compute the same step as the `with` block. Ctrl-C waits for the end of the step.

        Raises:
            GroupLost: a follower has ended, or the block raised an exception. The followers are in the middle of a
                step then, so the group is given up.
        """
        if os.getpid() != self._pid:
            raise GroupLost("this process is a fork of the engine's process 0, which alone can compute: make a new LLM")
        if self.lost:
            raise GroupLost(self.lost)
        together = False
        try:
            with held_back():
                self._in_step = True
                self._team.send(sent(batch))
                yield
                self._in_step, together = False, True
        except BaseException as error:
            if together:  # Ctrl-C, after the step
                raise
            lost = self._given_up(error)
            if not isinstance(error, Exception):
                raise
            raise lost from error

    def close(self) -> None:
        """End the followers. A fork of this process has no followers to end."""
        if os.getpid() != self._pid:
            return
        self.lost = self.lost or "the engine is closed: make a new LLM"
        if self._in_step and self._is_launched:  # another thread waits, and to destroy its group would wait, too
            atexit.unregister(leave_torchrun)
        else:
            self._end()

    def _started(self, config: EngineConfig) -> Team:
        """Start the followers on this machine, and return the team when all have joined."""
        count = config.num_processes
        if config.device == "cuda" and (gpus := torch.cuda.device_count()) < count:
            raise ValueError(f'{self.what} needs as many GPUs, and there are {gpus}: give device="cpu"')
        self._folder = tempfile.mkdtemp(prefix="pagewise-")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}
        threads = max(1, torch.get_num_threads() // count)
        for rank in range(1, count):
            arguments = (self._folder, rank, config.mesh, config.device, threads)
            command = [sys.executable, "-c", f"from {started.__module__} import started; started{arguments}"]
            # in a session of its own, so that Ctrl-C in a terminal reaches process 0 alone
            self._processes[rank] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        deadline = time.monotonic() + STARTING.total_seconds()
        while len(list(Path(self._folder).glob("follower *"))) < count - 1:
            if self._ended() or time.monotonic() > deadline:
                raise ConnectionError("timed out")
            time.sleep(0.02)
        return Team.met_in(self._folder, 0, config.mesh, config.device)

    def _ended(self) -> dict[int, str]:
        """Return how followers have ended that were started here, by rank."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: status_of(code) for rank, code in codes.items() if code is not None}

    def _given_up(self, error: BaseException) -> GroupLost:
        """End all followers, and return the error that names the process that failed first."""
        rank, reason = 0, f"raised {described(error)}"
        if lost_connection(error):
            others = set(range(1, self._team.count if self._team else len(self._processes) + 1))
            deadline = time.monotonic() + GRACE
            while True:
                ended = self._ended()  # before the reports: a process reports first, and then ends
                reports = self._team.reports() if self._team else {}
                if others <= reports.keys() | ended.keys() or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            silent = sorted(others - reports.keys())
            if told := [(r, text) for r, text in reports.items() if text]:
                rank, reason = told[0][0], f"raised {told[0][1]}"
            elif dead := [r for r in silent if r in ended]:
                rank, reason = dead[0], f"ended with {ended[dead[0]]}"
            elif silent:
                timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
                rank, reason = silent[0], f"gave no answer within {self._limit:g} s" if timed_out else "ended"
        self.lost = f"process {rank} of {self.what} {reason}: make a new LLM"
        self._end()
        return GroupLost(self.lost)

    def _end(self) -> None:
        """End the followers. A process that was started here holds nothing that it would have to save."""
        team, self._team = self._team, None
        if team is not None and not self._in_step:
            with contextlib.suppress(RuntimeError):  # a follower that has ended
                team.send(None)
                for process in self._processes.values():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(CLOSING)
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes = {}
        if team is not None:
            team.leave()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._is_launched:
            leave_torchrun()
