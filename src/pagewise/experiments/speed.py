"""The common part of the benchmarks of kernels: trials of methods on shapes, records, the command (lessons 5 to 8).

On a GPU all shapes are timed, first those that have targets. On a CPU, kernels are interpreted or run as fibers. Only
the smallest shapes are timed there, and the times say nothing about a GPU. Everything runs in a process of its own with
a time limit. A method that fails, hangs or computes a wrong result becomes a row that says so.
"""

import argparse
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewise.tools import benchmark
from pagewise.tools.benchmark import Candidate, Timing
from pagewise.tools.device import best_device
from pagewise.tools.progress import progress, progress_bar, say
from pagewise.tools.records import Record, keep, surroundings, table_of
from pagewise.tools.timing import copy_bandwidth, matmul_rate
from pagewise.tools.worker import Failed, Worker, described

AGAIN = ", again"  # in the name of the first method when it is timed once more at the end, which shows the noise


class Trials:
    """A benchmark: its shapes and methods. A call tries one method on one shape.

    The inputs of a shape are kept until another shape comes. A shape is a NamedTuple of ints with `flops` and
    `bytes(itemsize)`.
    """

    title: str  # what is timed, such as "paged decode"
    against = "copy"  # or "matmul": the measured rate that limits the work
    dtype = torch.bfloat16
    shapes: Sequence[Any]  # for a GPU
    smallest: Sequence[Any]  # for a CPU
    first: str  # what the help says about the first shapes

    def __init__(self, device: torch.device, options: dict[str, Any]) -> None:
        """Set the device and the options of `benchmark.trial`."""
        self.device, self.options = device, options
        self.shape = None

    @classmethod
    def methods(cls, device: torch.device, shape: Any) -> dict[str, Callable]:
        """Return every method that this machine has, by name: given the inputs, a call for each of them."""
        raise NotImplementedError

    def build(self, shape: Any) -> tuple[list[Any], list[Tensor]]:
        """Return inputs of a shape, to be taken in turns, and the exact result for each."""
        raise NotImplementedError

    def runs(self, method: str) -> list[Candidate]:
        """Return the method's call on each of the inputs, prepared as its users would."""
        return self.methods(self.device, self.shape)[method](self.inputs)

    def fault(self, run: Candidate, exact: Tensor) -> str | None:
        """Return why a result is not to be timed, or None."""
        return benchmark.fault(run, exact)

    def __call__(self, shape: Any, method: str) -> Timing | str:
        if shape != self.shape:
            self.shape = self.inputs = self.exact = None  # freed before the next are built: both may not fit
            torch.cuda.empty_cache()  # does nothing without a GPU
            self.inputs, self.exact = self.build(shape)
            self.shape = shape
        try:
            torch.cuda.empty_cache()
            runs = self.runs(method)
        except Exception as error:
            return described(error)
        result = benchmark.trial(runs, self.exact, check=self.fault, **self.options)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # raises if the method left this process without a GPU: a new process takes over
        return result


def records(
    trials: type[Trials],
    shapes: Sequence[Any],
    *,
    device: torch.device,
    rate: float | None = None,
    limit: float = 120.0,
    **options: int,
) -> Iterator[Record]:
    """Yield a record for each shape and method as soon as it is known.

    Args:
        rate: bytes per second of a copy or operations per second of a matrix product, as `trials.against` says.
        limit: seconds for one method on one shape.
        options: those of `benchmark.trial`.
    """
    about = surroundings(device)
    tasks = [(shape, method) for shape in shapes for method in trials.methods(device, shape)]
    with Worker(trials, device, options) as worker:
        for shape, method in progress(tasks, trials.title):
            record = Record(
                what=method,
                shape=shape._asdict(),
                dtype=str(trials.dtype).removeprefix("torch."),
                how="not timed",
                bytes=shape.bytes(trials.dtype.itemsize),
                flops=shape.flops,
                limit=trials.against,
                limit_rate=rate,
                **about,
            )
            try:
                result = worker(shape, method, limit=limit)
            except Failed as failed:
                result = str(failed)
            if isinstance(result, str):
                yield record._replace(refused=result)
                continue
            seconds, how = result
            yield record._replace(seconds=seconds.median, spread=seconds.high - seconds.low, how=how)


def limit_rate(kind: str, device: torch.device, *, limit: float) -> float | None:
    """Measure the rate of a "copy" or a "matmul" in a process of its own. If that fails, print why and return None."""
    kinds = {"copy": copy_bandwidth, "matmul": partial(matmul_rate, dtype=torch.bfloat16)}
    with Worker(partial, kinds[kind]) as worker, progress_bar(1, f"the rate of a {kind}") as bar:
        try:
            rate = worker(device, limit=limit)
            bar.update()
            return rate
        except Failed as failed:
            say(f"The rate of a {kind} is unknown, so no fractions of it are shown: {failed}")
            return None


def command(trials: type[Trials]) -> list[Record]:
    """Run the command line of a benchmark: print a table of each shape when it is done, and return all records."""
    parser = argparse.ArgumentParser(description=f"Time every way of {trials.title} on this machine.")
    parser.add_argument("--record", type=Path, help="keep each record in this file as it comes (GPU only)")
    parser.add_argument("--first", type=int, metavar="N", help=f"only the first N shapes ({trials.first})")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one method on one shape (%(default)g)")
    asked = parser.parse_args()
    device = best_device()
    on_gpu = device.type == "cuda"
    if asked.record and not on_gpu:
        parser.error("--record needs a GPU: times of interpreted kernels are not kept")
    if not on_gpu:
        print("No GPU here: CUDA runs as fibers and Triton interpreted, and these times say nothing about a GPU.")
    rate = limit_rate(trials.against, device, limit=asked.limit) if on_gpu else None
    options = {} if on_gpu else {"repeats": 1, "warmup": 0}
    shapes = (trials.shapes if on_gpu else trials.smallest)[: asked.first]
    found = []
    coming = records(trials, shapes, device=device, rate=rate, limit=asked.limit, **options)
    for _, of_shape in itertools.groupby(coming, key=lambda record: record.shape):
        begin = len(found)
        for record in of_shape:
            if asked.record:
                keep(asked.record, record)
            found.append(record)
        say(f"{table_of(found[begin:])}\n")
    return found


def caption(found: Sequence[Record]) -> str:
    """Return what a figure of records says about the machine and the date."""
    return f"{found[0].device}, {found[0].date[:10]}, torch {found[0].versions['torch']}"


def drawn(found: Sequence[Record], *, methods: Collection[str] | None = None, **of_shape: int) -> list[Record]:
    """Return the records that a figure can show: those with a time, and with these sizes in their shape.

    The repetition of the first method is left out. `methods` keeps only the methods with these names.

    Raises:
        ValueError: there is no such record. The message says which sizes were timed.
    """
    timed = [r for r in found if r.seconds and not r.what.endswith(AGAIN) and (methods is None or r.what in methods)]
    chosen = [r for r in timed if of_shape.items() <= r.shape.items()]
    if not chosen:
        wanted = " ".join(f"{name}={size}" for name, size in of_shape.items())
        sizes = sorted({tuple(r.shape.get(name) for name in of_shape) for r in timed}, key=str)
        have = "; ".join(" ".join(f"{name}={n}" for name, n in zip(of_shape, of, strict=True)) for of in sizes)
        raise ValueError(f"no record with a time has {wanted}; there are {have or 'none'}")
    return chosen
