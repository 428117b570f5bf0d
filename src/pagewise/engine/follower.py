"""A follower: a process that computes the steps of process 0 (lesson 10).

`leader` describes both sides. A follower does not decide anything. It loads its share of the weights, and makes the
cache of its KV heads and tokens. Then it computes one step after the other until process 0 closes its engine.
"""

import atexit
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pagewise.distributed.team import Team, is_launched, lost_connection
from pagewise.distributed.tensor_parallel import Cut, check_same_weights, check_splits, split
from pagewise.engine.batch import Batch
from pagewise.engine.config import EngineConfig, kv_sizes
from pagewise.engine.model_runner import ModelRunner, make_runner
from pagewise.engine.sharded_memory import ShardedMemory
from pagewise.models import load_model
from pagewise.tools.device import best_device
from pagewise.tools.worker import described


class Part(NamedTuple):
    """What one process has of an engine."""

    runner: ModelRunner
    model: nn.Module
    tokenizer: Any  # of the checkpoint
    config: EngineConfig  # complete


def make_part(
    model: str | Path | nn.Module,
    config: EngineConfig,
    team: Team,
    together: Callable[[Batch], AbstractContextManager] | None = None,
) -> Part:
    """Load this process's share of a model, and make its memory. All processes of the team call this together.

    Every process reads only its own slices of a checkpoint. The number of blocks is the least of all processes.
    """
    device = torch.device("cuda", _gpu(team.rank)) if config.device == "cuda" else torch.device("cpu")
    tensor, context = team.groups["tensor"], team.groups["context"]
    cuts: dict[str, Cut] = {}

    def share_of(whole: nn.Module) -> tuple[nn.Module, dict[str, Cut]]:
        check_splits(whole, tensor.size())
        share, found = split(whole, tensor) if tensor.size() > 1 else (whole, {})
        cuts.update(found)
        return share, found

    if isinstance(model, nn.Module):
        mine, tokenizer = share_of(model)[0].to(device), None
    else:
        mine, tokenizer = load_model(model, dtype=config.dtype, device=device, split=share_of)
    for group in (tensor, context):
        if group.size() > 1:
            check_same_weights([weight for name, weight in mine.state_dict().items() if name not in cuts], group)
    completed = config.completed(mine)
    completed = with_memory = replace(completed, num_blocks=team.least(completed.num_blocks))
    if config.context_parallel > 1:
        memory = partial(ShardedMemory, group=context, wants_logits=team.rank == 0)
        with_memory = replace(completed, memory=memory)
    part = Part(make_runner(mine, with_memory, together), mine, tokenizer, completed)
    team.least(0)  # all are ready
    team.wait_at_most(config.group_timeout)
    return part


class _Checked(Exception):
    """The model fits, and its weights are not wanted yet."""


def check_model(model: str | Path | nn.Module, config: EngineConfig) -> None:
    """Raise ValueError or TypeError unless the processes can share a model. No weight is read."""

    def check(whole: nn.Module) -> None:
        check_splits(whole, config.tensor_parallel)
        window = kv_sizes(whole).sliding_window
        if config.context_parallel > 1 and window is not None:
            raise ValueError(
                f"context_parallel = {config.context_parallel} attends to whole sequences, and the model has a "
                f"window of {window} tokens: give tensor_parallel"
            )
        raise _Checked

    with contextlib.suppress(_Checked):
        if isinstance(model, nn.Module):
            check(model)
        load_model(model, split=check)


def shared_config(model: object, config: EngineConfig) -> EngineConfig:
    """Return the config with a dtype, and with the kind of device that all processes use."""
    if isinstance(model, nn.Module):
        weight = next(model.parameters())
        dtype, device = weight.dtype, torch.device(config.device or weight.device)
    else:
        device = best_device() if config.device is None else torch.device(config.device)
        dtype = config.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return replace(config, dtype=dtype, device=device.type)


def join_torchrun(model: object, config: EngineConfig) -> Team | None:
    """Return None where no other program has started the processes, and their team in process 0.

    All other processes follow process 0, and then exit.

    Raises:
        ValueError: the number of processes is not that of the config.
        RuntimeError: the other processes have exited.
    """
    if not is_launched():
        return None
    number = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if number != config.num_processes:
        raise ValueError(
            f"{config.parallel} must be the number of processes, and there are {number}: give tensor_parallel="
            f"{number}, or start torchrun --nproc-per-node {config.num_processes}"
        )
    if _left:
        raise RuntimeError(
            "the other processes of torchrun have exited, because the first LLM was closed: make one LLM for each start"
        )
    if not dist.is_initialized():
        atexit.register(leave_torchrun, os.getpid())
    team = Team.joined(config.mesh, shared_config(model, config).device)
    if team.rank:
        # torchrun passes both signals to all processes, and process 0 decides when the engine ends
        with _ignored(signal.SIGINT, signal.SIGTERM):
            if status := follow(team):
                os._exit(status)  # Python's own end would wait for the group
        raise SystemExit
    return team


_left: list[int] = []  # not empty: this process has let the processes of torchrun exit


def leave_torchrun(pid: int | None = None) -> None:
    """Leave the default group that `join_torchrun` made: C++ may abort a process that ends with its threads.

    Where another program made the group, as `Processes` does, the processes may make another LLM.
    """
    if pid in (None, os.getpid()) and "RANK" in os.environ and not _left:
        _left.append(os.getpid())
        if dist.is_initialized():
            dist.destroy_process_group()


def started(folder: str, rank: int, mesh: dict[str, int], device: str, threads: int) -> None:
    """Follow in a process that `Leader` started, and end the process."""
    torch.set_num_threads(threads)
    os._exit(meet(folder, rank, mesh, device))  # there is nothing to save, and torch takes its time to end


def meet(folder: str, rank: int, mesh: dict[str, int], device: str) -> int:
    """Meet the other processes in a folder, and follow. Return as `follow`."""
    Path(folder, f"follower {rank}").touch()
    return follow(Team.met_in(folder, rank, mesh, device), folder)


def follow(team: Team, folder: str | None = None) -> int:
    """Compute the steps of process 0 until it closes its engine. Return the exit status of this process."""
    try:
        if (first := team.receive()) is not None:  # else the engine was closed before its first step
            part = make_part(*first, team)
            device = next(part.model.parameters()).device
            with torch.inference_mode():
                while (step := team.receive()) is not None:
                    part.runner.forward(_received(*step, device, part.config))
        team.leave()
        return 0
    except BaseException as error:
        try:
            team.report("" if lost_connection(error) else described(error))
            if lost_connection(error):
                team.receive()  # returns when process 0 gives up
        except ConnectionError as ended:
            print(f"process {team.rank} of {team.count} ends, because {ended}", file=sys.stderr, flush=True)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        return 1


@contextlib.contextmanager
def _ignored(*signals: signal.Signals) -> Iterator[None]:
    """Ignore signals. Only the main thread can enter."""
    usual = [(one, signal.signal(one, signal.SIG_IGN)) for one in signals]
    try:
        yield
    finally:
        for one, handler in usual:
            signal.signal(one, handler)


def _gpu(rank: int) -> int:
    """Return the number of this process's GPU, and make it the current one."""
    number = int(os.environ.get("LOCAL_RANK", rank))
    torch.cuda.set_device(number)
    return number


def sent(batch: Batch) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    """Return what a follower needs of a batch: all but the requests."""
    return list(batch.copies), [x.cpu().numpy() for x in batch[1:-1]]


def _received(
    copies: list[tuple[int, int]], arrays: list[np.ndarray], device: torch.device, config: EngineConfig
) -> Batch:
    batch = Batch([], *(torch.from_numpy(array).to(device) for array in arrays), copies)
    # only process 0 computes logits. With context parallelism, these rows are also what all processes compute
    return batch if config.context_parallel > 1 else batch._replace(logits_for=batch.logits_for[:0])
