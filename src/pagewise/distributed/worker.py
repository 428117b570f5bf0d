"""One process of `Processes`: it joins the group, and then calls the functions that it receives (lesson 10).

Its standard output and standard error go into a log. Lines that a function prints travel back with the result.
"""

import contextlib
import faulthandler
import io
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist


def serve(pipe: Connection, rank: int, count: int, log: Path) -> None:
    """Join a group of `count` processes that meet beside `log`. Then call one function after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all processes; the first one decides
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    tasks = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, tasks, log.parent), daemon=True).start()
    torch.set_num_threads(1)
    has_gpu = torch.cuda.device_count() >= count
    if has_gpu:
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{log.parent}/store", rank=rank, world_size=count)
    answer = cloudpickle.dumps((None, "", None))  # ready
    while True:
        pipe.send_bytes(answer)
        answer = _call(tasks.get())


def _receive(pipe: Connection, tasks: queue.SimpleQueue, folder: Path) -> None:
    """Receive tasks until the program that sends them ends. Then end this process, even in the middle of a call."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            tasks.put(pipe.recv_bytes())
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _call(task: bytes) -> bytes:
    """Return (result, printed text, None), or (None, printed text, the error and its traceback), pickled."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            function, args = cloudpickle.loads(task)
            return cloudpickle.dumps((function(*args), printed.getvalue(), None))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # as at the end of a script: a result of None
            return cloudpickle.dumps((None, printed.getvalue(), None))
        text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        return cloudpickle.dumps((None, printed.getvalue(), text))
