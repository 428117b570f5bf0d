"""Stand-ins for a `Worker` that need not import everything in a process of their own."""

import multiprocessing
from contextlib import contextmanager

import pytest


@contextmanager
def forked_workers():
    """Let workers fork their processes from one process that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["pagewise.experiments.speed"])
        patch.setattr(multiprocessing, "get_context", lambda method: server)
        yield


class InProcess:
    """Stands in for the worker: the same calls, in this process, where methods can be replaced."""

    def __init__(self, make, *args):
        self.call = make(*args)

    def __call__(self, *task, limit):
        return self.call(*task)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass
