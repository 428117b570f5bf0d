"""A follower of tensor parallelism: a process that computes the steps of process 0 (lesson 10).

`leader` describes both sides. A follower does not decide anything. It loads the model, keeps its share of the
weights, and makes the cache of its KV heads. Then it computes one step after the other until process 0 closes its
engine.
"""

import atexit
import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pagewise.distributed.tensor_parallel import tensor_parallel
from pagewise.engine.batch import Batch
from pagewise.engine.model_runner import make_runner
from pagewise.models import load_model
from pagewise.tools.worker import described

TIMEOUT = timedelta(minutes=5)  # for one all-reduce
CLOSING = 5.0  # seconds that a follower has to end
OTHERS = 0.3  # seconds to learn why a connection was lost, after the first sign of it
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
READY, CLOSE = "ready", b""  # a follower is ready; the last message to a follower


def my_share(whole: nn.Module, group: Any, device: str) -> nn.Module:
    """Return the share of this process of a model, on its own "cpu" or "cuda" device."""
    return tensor_parallel(whole, group).to(torch.device(device, _gpu(group.rank())) if device == "cuda" else "cpu")


def follow_torchrun(count: int) -> None:
    """Return in process 0, and where torchrun does not run. In all other processes, follow process 0 and then exit.

    Raises:
        ValueError: the number of processes is not `count`.
    """
    if not launched():
        return
    number = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if number != count:
        raise ValueError(
            f"tensor_parallel = {count} must be the number of processes, and there are {number}: give "
            f"tensor_parallel={number}, or start torchrun --nproc-per-node {count}"
        )
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
        atexit.register(_leave)
    if (rank := dist.get_rank()) > 0:
        # torchrun passes both signals to all processes, and process 0 decides when the engine ends
        with _ignored(signal.SIGINT, signal.SIGTERM):
            _follow(_connect(), rank, lambda device: dist.group.WORLD)
        raise SystemExit


def _leave() -> None:
    """Leave the default group. If its threads still run when Python has ended, C++ may abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launched() -> bool:
    """Return whether this process already belongs to a group, as under torchrun."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def _connect() -> Connection:
    """Return a connection to process 0."""
    found = [None]
    dist.broadcast_object_list(found)
    address, key = found[0]
    connection = Client(address, authkey=key)
    connection.send(dist.get_rank())
    return connection


def started(fd: int, rank: int, count: int, folder: str, threads: int) -> None:
    """Follow in a process that `Leader` started."""
    torch.set_num_threads(threads)
    _follow(Connection(fd), rank, lambda device: new_group(folder, rank, count, device))


def new_group(folder: str, rank: int, count: int, device: str) -> Any:
    """Return a group of its own, so that an engine leaves the default group of torch.distributed alone."""
    store = dist.FileStore(f"{folder}/store", count)
    if device == "cuda":
        return dist.ProcessGroupNCCL(store, rank, count, timeout=TIMEOUT)
    gloo = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME") or LOOPBACK  # by default, gloo looks up the name of this machine
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=interface) for interface in interfaces.split(",")]
    options._threads = 2 * len(options._devices)
    options._timeout = TIMEOUT
    return gloo(store, rank, count, options)


def _follow(connection: Connection, rank: int, group_for: Callable[[str], Any]) -> None:
    """Compute the steps of process 0 until it closes its engine. An exception or a lost connection ends the process."""
    inbox, ended = SimpleQueue(), threading.Event()
    reader = threading.Thread(target=_receive, args=(connection, inbox, ended, rank), daemon=True)
    reader.start()
    try:
        _steps(map(pickle.loads, iter(inbox.get, CLOSE)), lambda: connection.send(READY), group_for)
    except StopIteration:  # the engine was closed before the first step
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(described(error))
        reader.join(OTHERS)  # if process 0 has ended, the reader says so
        os._exit(1)
    ended.set()
    connection.close()


def _steps(messages: Iterator[Any], ready: Callable[[], None], group_for: Callable[[str], Any]) -> None:
    """Do what process 0 says: load the model, make the memory, compute steps."""
    model, config = next(messages)
    whole = model if isinstance(model, nn.Module) else load_model(model, dtype=config.dtype)[0]
    ready()
    group = group_for(config.device)
    ready()
    model = my_share(whole, group, config.device)
    del whole
    runner = make_runner(model, next(messages))
    ready()
    device = next(model.parameters()).device
    with torch.inference_mode():
        for copies, arrays in messages:
            runner.forward(_received(copies, arrays, device))


def _receive(connection: Connection, inbox: SimpleQueue, ended: threading.Event, rank: int) -> None:
    """Pass the messages of process 0 to the thread that computes. End the process if that thread waits in vain."""
    try:
        while message := connection.recv_bytes():
            inbox.put(message)
    except (EOFError, OSError):
        if ended.is_set():
            return
        print(f"process {rank} of tensor parallelism ends, because process 0 has ended", file=sys.stderr, flush=True)
        os._exit(1)
    inbox.put(CLOSE)
    if not ended.wait(CLOSING):  # process 0 has given up a step
        os._exit(1)


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
    """Return what a follower needs of a batch: neither the requests nor the tokens whose logits are wanted."""
    tensors = (batch.token_ids, batch.positions, batch.slots, batch.block_tables, batch.seq_lens, batch.cu_seqlens_q)
    return list(batch.copies), [x.cpu().numpy() for x in tensors]


def _received(copies: list[tuple[int, int]], arrays: list[np.ndarray], device: torch.device) -> Batch:
    token_ids, positions, *others = (torch.from_numpy(array).to(device) for array in arrays)
    return Batch([], token_ids, positions, token_ids[:0], *others, copies)
