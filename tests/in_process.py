"""Benchmarks and their command lines in this process, and workers that need not import everything again."""

import multiprocessing
import sys
from contextlib import contextmanager

import pytest
import torch

from pagewise.experiments import speed
from pagewise.tools.benchmark import Timing
from pagewise.tools.timing import Spread

CPU = torch.device("cpu")


@contextmanager
def forked_workers():
    """Let workers fork their processes from one process that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["pagewise.experiments.speed"])
        patch.setattr(multiprocessing, "get_context", lambda method: server)
        yield


class InProcess:
    """Replace the worker: make the same calls in this process, which has imported everything."""

    def __init__(self, make, *args):
        self.call = make(*args)

    def __call__(self, *task, limit):
        return self.call(*task)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def records(trials, shapes, *, device=CPU, **options):
    """Return the records of a benchmark, measured in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "Worker", InProcess)
        return list(speed.records(trials, shapes, device=device, **options))


def planted(trials, seconds):
    """Return a benchmark in which nothing runs: a method takes `seconds(shape, method)`, or fails as that call does."""

    class Planted(trials):
        def __call__(self, shape, method):
            taken = seconds(shape, method)
            return Timing(Spread(taken, 0.75 * taken, 1.25 * taken), "planted")

    return Planted


def run_on_a_cpu(main, *arguments):
    """Run a command line as on a machine without a GPU, with its benchmarks in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "Worker", InProcess)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(sys, "argv", ["command", *arguments])
        return main()
