"""What the benchmarks of kernels share: trials of methods on shapes, their records, the command line (lessons 5 to 8).

On a GPU all shapes are timed, those first that targets are set for. On a CPU, where kernels are interpreted and threads
are fibers, the smallest ones only, and the times say nothing about a GPU. Everything runs in a process of its own with
a time limit: what fails, hangs or is wrong is a row that says so.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewise.tools import benchmark
from pagewise.tools.benchmark import Candidate, Failed, Record, Timing, Worker
from pagewise.tools.device import best_device

AGAIN = ", again"  # the name of a benchmark's first method when it comes last once more, to show the noise
ROTATED_BYTES = 2**28  # smaller inputs are drawn three times, and calls take turns


class Trials:
    """Tries one method on one shape after the other. A shape's inputs are kept until another shape comes."""

    def __init__(self, device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
        """`options`: `benchmark.trial`'s."""
        self.device, self.dtype, self.options = device, dtype, options
        self.shape = None

    def build(self, shape: Any) -> tuple[list[Any], list[Tensor]]:
        """The inputs of a shape, several to be taken in turns, and the exact result for each."""
        raise NotImplementedError

    def runs(self, method: str) -> list[Candidate]:
        """The method's call on each of the inputs, prepared as its users would."""
        raise NotImplementedError

    def fault(self, run: Candidate, exact: Tensor) -> str | None:
        """Why a result is not to be timed."""
        return benchmark.fault(run, exact)

    def __call__(self, shape: Any, method: str) -> Timing | str:
        if shape != self.shape:
            self.shape = self.inputs = self.exact = None  # freed before the next are built: both may not fit
            self._empty_cache()
            self.inputs, self.exact = self.build(shape)
            self.shape = shape
        try:
            self._empty_cache()
            runs = self.runs(method)
        except Exception as error:
            return benchmark.described(error)
        result = benchmark.trial(runs, self.exact, check=self.fault, **self.options)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # raises where the method has cost this process its GPU: a new one takes over
        return result

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def records(
    trials: Callable[..., Callable],
    tasks: Sequence[tuple[Any, str]],
    label: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    options: dict[str, Any],
    **about: Any,
) -> Iterator[Record]:
    """A record per task, a shape and a method, as they come. `trials`: a `Trials`; `about`: `records_of`'s."""
    with Worker(trials, device, dtype, options) as worker:
        yield from benchmark.records_of(worker, tasks, label, device=device, dtype=dtype, **about)


def limit_rate(kind: str, device: torch.device, *, limit: float) -> float | None:
    """What a "copy" or a "matmul" reaches on this device, in a process of its own; where it fails, a sentence."""
    kinds = {"copy": benchmark.copy_bandwidth, "matmul": partial(benchmark.matmul_rate, dtype=torch.bfloat16)}
    with Worker(partial, kinds[kind]) as worker:
        try:
            return worker(device, limit=limit)
        except Failed as failed:
            print(f"The rate of a {kind}, of which others reach a fraction, is not known: {failed}")
            return None


def command(
    description: str,
    shapes: Sequence[Any],
    smallest: Sequence[Any],
    records: Callable[..., Iterator[Record]],
    *,
    against: str,
    first: str,
) -> list[Record]:
    """The command line of a benchmark; it prints a table of each shape as it is done, and returns all records.

    Args:
        shapes: those for a GPU; smallest: those for a CPU.
        records: called with shapes, `device`, `rate` (of `against`), `limit` and the options of `benchmark.trial`.
        against: "copy" or "matmul".
        first: what the help says about the first shapes.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--record", type=Path, help="keep each record in this file as it comes (GPU only)")
    parser.add_argument("--first", type=int, metavar="N", help=f"only the first N shapes ({first})")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one method on one shape (%(default)g)")
    asked = parser.parse_args()
    device = best_device()
    on_gpu = device.type == "cuda"
    if asked.record and not on_gpu:
        parser.error("--record needs a GPU: times of interpreted kernels are not kept")
    if not on_gpu:
        print("No GPU here: CUDA runs as fibers and Triton interpreted, and these times say nothing about a GPU.")
    rate = limit_rate(against, device, limit=asked.limit) if on_gpu else None
    options = {} if on_gpu else {"repeats": 1, "warmup": 0}
    shapes = (shapes if on_gpu else smallest)[: asked.first]
    found = []
    coming = records(shapes, device=device, rate=rate, limit=asked.limit, **options)
    for _, of_shape in itertools.groupby(coming, key=lambda record: record.shape):
        begin = len(found)
        for record in of_shape:
            if asked.record:
                benchmark.keep(asked.record, record)
            found.append(record)
        print(benchmark.table_of(found[begin:]), end="\n\n", flush=True)
    return found
