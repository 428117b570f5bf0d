"""An engine of several processes: process 0 decides every step, and the other processes follow (lesson 10).

    process 0                                        processes 1 … n − 1
    schedule, make the batch
    send ── block copies, batch ───────────────────▶ receive
    copy blocks, run its share ◀── all-reduces ────▶ copy blocks, run its share
    sample, advance

Each process has its share of the weights, and the keys and values of its KV heads and of its tokens. Only process 0 has
a scheduler, a block manager and requests. Messages travel by gloo, and the model's numbers between GPUs by NCCL.
"""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pagewise.distributed.communication import compare
from pagewise.distributed.team import STARTING, Team, lost_connection
from pagewise.distributed.tensor_parallel import Cut, check_splits, described_weights, split
from pagewise.engine.batch import Batch
from pagewise.engine.config import EngineConfig, kv_sizes
from pagewise.engine.interrupts import held_back
from pagewise.engine.model_runner import ModelRunner
from pagewise.engine.sharded_memory import ShardedMemory
from pagewise.models import load_model
from pagewise.models.load import build_model, checkpoint
from pagewise.tools.worker import described, start, status_of

SPAWN = multiprocessing.get_context("spawn")
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

        Raise ValueError or TypeError if the model or an option does not fit, and GroupLost if a follower fails.
        """
        self.what, self.lost, self._pid, self._in_step = config.parallel, "", os.getpid(), False
        self._limit = STARTING.total_seconds()  # until all processes are ready
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._folder = ""  # where the processes meet. A TemporaryDirectory would end with any fork
        self._team = join_torchrun(config)
        weight = next(model.parameters()) if isinstance(model, nn.Module) else None
        device, dtype = config.device_and_dtype() if weight is None else (weight.device, weight.dtype)
        config = replace(config, dtype=dtype, device=device.type)
        try:
            check_model(model, config)
            self._team = self._team or self._started(config)
            self._team.send((model, config))
            self.part = make_part(model, config, self._team)
            self.part[0].together = self.step
            self._limit = config.group_timeout
        except BaseException as error:
            if lost_connection(error):
                raise self._given_up(error) from error
            self._end()
            raise

    @contextlib.contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Let the followers compute the same step as the `with` block. Ctrl-C waits for the end of the step.

        Raise GroupLost if a follower has ended, or if the block raised an exception: the followers are in the middle of
        a step then, so the group is given up.
        """
        if os.getpid() != self._pid:
            raise GroupLost("this process is a fork of the engine's process 0, which alone can compute: make a new LLM")
        if self.lost:
            raise GroupLost(self.lost)
        with held_back():
            self._in_step = True
            try:
                self._team.send((list(batch.copies), [x.cpu().numpy() for x in batch[1:-1]]))
                yield
            except Exception as error:
                raise self._given_up(error) from error
            except BaseException as error:
                self._given_up(error)
                raise
            self._in_step = False

    def close(self) -> None:
        """End the followers. A fork of this process has no followers to end."""
        if os.getpid() == self._pid:
            self.lost = self.lost or "the engine is closed: make a new LLM"
            self._end()

    def _started(self, config: EngineConfig) -> Team:
        """Start the followers on this machine, and return the team when all have joined."""
        count = config.num_processes
        if config.device == "cuda" and (gpus := torch.cuda.device_count()) < count:
            raise ValueError(f'{self.what} needs as many GPUs, and there are {gpus}: give device="cpu"')
        self._folder = tempfile.mkdtemp(prefix="pagewise-")
        threads = max(1, torch.get_num_threads() // count)
        for rank in range(1, count):
            process = SPAWN.Process(target=meet, args=(self._folder, rank, count, threads), daemon=True)
            start(process)
            self._processes[rank] = process
        store, deadline = dist.FileStore(f"{self._folder}/store", count), time.monotonic() + STARTING.total_seconds()
        while not store.check([f"started {rank}" for rank in range(1, count)]):
            if self._ended() or time.monotonic() > deadline:
                raise ConnectionError("timed out")
            time.sleep(0.02)
        return Team(store, 0, count, on_one_host=True)

    def _ended(self) -> dict[int, str]:
        """Return how followers have ended that were started here, by rank."""
        ended = {rank: process for rank, process in self._processes.items() if process.exitcode is not None}
        return {rank: f"ended with {status_of(process)}" for rank, process in ended.items()}

    def _given_up(self, error: BaseException) -> GroupLost:
        """End all followers, and return the error that names the process that failed first."""
        rank, reason = 0, f"raised {described(error)}"
        if lost_connection(error):
            others = set(range(1, self._team.count if self._team else len(self._processes) + 1))
            said, deadline = {}, time.monotonic() + GRACE
            while others - said.keys() and time.monotonic() < deadline:
                time.sleep(0.02)
                said = self._ended()  # before the reports: a process reports first, and then ends
                said |= self._team.reports() if self._team else {}  # "": it has lost its connection to another one
            timed_out = re.search("timed out|timeout", f"{error} {error.__cause__}", re.I)
            silence = f"gave no answer within {self._limit:g} s" if timed_out else "ended"
            causes = {r: text for r, text in said.items() if text} or dict.fromkeys(others - said.keys(), silence)
            rank, reason = min(causes.items(), default=(rank, reason))
        self.lost = f"process {rank} of {self.what} {reason}: make a new LLM"
        self._end()
        return GroupLost(self.lost)

    def _end(self) -> None:
        """End the followers. A process that was started here holds nothing that it would have to save."""
        team, self._team = self._team, None
        if team is not None and not self._in_step:  # a server closes its engine from another thread
            with contextlib.suppress(RuntimeError):  # a follower that has ended
                team.send(None)
                for process in self._processes.values():
                    process.join(CLOSING)
        for process in self._processes.values():
            process.kill()
            process.join()
        self._processes = {}
        if team is not None:
            team.leave()
        shutil.rmtree(self._folder, ignore_errors=True)
        if not self._folder and team is not None and "RANK" in os.environ:
            has_left.append(True)


def make_part(
    model: str | Path | nn.Module, config: EngineConfig, team: Team
) -> tuple[ModelRunner, nn.Module, Any, EngineConfig]:
    """Return a runner of this process's share of a model, the share, the tokenizer, and the complete config.

    All processes of the team call this function together. Each reads only its own slices of a checkpoint.
    """
    team.connect(config.mesh, config.device)
    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", team.rank)))
        torch.cuda.set_device(device)
    tensor, cuts = team.groups["tensor"], {}

    def share_of(whole: nn.Module) -> tuple[nn.Module, dict[str, Cut]]:
        share, found = split(whole, tensor) if tensor.size() > 1 else (whole, {})
        cuts.update(found)
        return share, found

    if isinstance(model, nn.Module):
        mine, tokenizer = share_of(model)[0].to(device), None
    else:
        mine, tokenizer = load_model(model, dtype=config.dtype, device=device, split=share_of)
    whole = [weight for name, weight in mine.state_dict().items() if name not in cuts]
    completed = config.completed(mine)
    described = {**described_weights(whole), "num_blocks": completed.num_blocks}
    everyone = compare("LLM", team.groups["all"], lambda: described, may_differ=["num_blocks"])
    completed = replace(completed, num_blocks=min(theirs["num_blocks"] for theirs in everyone))
    sharded = {"memory": partial(ShardedMemory, group=team.groups["context"])} if config.context_parallel > 1 else {}
    runner = ModelRunner(mine, replace(completed, **sharded))
    team.groups["all"].barrier().wait()  # all are ready
    team.wait_at_most(config.group_timeout)
    return runner, mine, tokenizer, completed


def check_model(model: str | Path | nn.Module, config: EngineConfig) -> None:
    """Raise ValueError or TypeError unless the processes can share a model. No weight is read."""
    with torch.device("meta"):
        whole = model if isinstance(model, nn.Module) else build_model(checkpoint(model)[1])
    check_splits(whole, config.tensor_parallel)
    if config.context_parallel > 1:
        if config.memory is not None:
            raise ValueError("context_parallel has a memory of its own: leave memory out")
        if (window := kv_sizes(whole).sliding_window) is not None:
            said = f"attends to whole sequences, and the model has a window of {window} tokens"
            raise ValueError(f"context_parallel = {config.context_parallel} {said}: give tensor_parallel")


def join_torchrun(config: EngineConfig) -> Team | None:
    """Return None where no other program has started the processes, and their team in process 0.

    All other processes follow process 0, and then exit. Raise ValueError if their number is not that of the config, and
    RuntimeError if they have exited.
    """
    number = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    number = dist.get_world_size() if dist.is_initialized() else number
    if number == 1:
        return None
    if number != config.num_processes:
        said = f"{config.parallel} must be the number of processes, and there are {number}"
        remedy = f"give tensor_parallel={number}, or start torchrun --nproc-per-node {config.num_processes}"
        raise ValueError(f"{said}: {remedy}. A replica of the model is a server of its own: see lessons/cluster.md")
    if has_left:
        said = "the other processes of torchrun have exited, because the first LLM was closed"
        raise RuntimeError(f"{said}: make one LLM for each start")
    team = Team.launched()
    if team.rank:
        if status := follow(team):
            os._exit(status)  # Python's own end would wait for the group
        raise SystemExit
    return team


has_left: list[bool] = []  # not empty: this process 0 has let the processes of torchrun exit


def meet(folder: str, rank: int, count: int, threads: int) -> None:
    """Meet the other processes in a folder, and follow. Then end this process, which has nothing to save."""
    torch.set_num_threads(threads)
    store = dist.FileStore(f"{folder}/store", count)
    store.set(f"started {rank}", "")
    os._exit(follow(Team(store, rank, count, on_one_host=True), folder))


def follow(team: Team, folder: str = "") -> int:
    """Compute the steps of process 0 until it closes its engine. Return the exit status of this process."""
    with contextlib.suppress(ValueError):  # this is not the main thread
        for one in (signal.SIGINT, signal.SIGTERM):  # both may reach all processes, and process 0 decides
            signal.signal(one, signal.SIG_IGN)
    try:
        if (first := team.receive()) is not None:  # else the engine was closed before its first step
            runner, model, *_ = make_part(*first, team)
            device = next(model.parameters()).device
            while (step := team.receive()) is not None:
                copies, arrays = step
                runner.step(Batch([], *(torch.from_numpy(array).to(device) for array in arrays), copies))
        team.leave()
        return 0
    except BaseException as error:
        try:
            team.report("" if lost_connection(error) else f"raised {described(error)}")
            if lost_connection(error):
                team.receive()  # returns when process 0 gives up
        except ConnectionError as ended:
            print(f"process {team.rank} of {team.count} ends, because {ended}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
        return 1
