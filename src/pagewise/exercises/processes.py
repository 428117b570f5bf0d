"""Exercises whose answer runs in several processes of torch.distributed."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from pagewise.distributed.processes import Processes
from pagewise.exercises.attempts import attempt
from pagewise.exercises.exercise import Case
from pagewise.exercises.python import PythonExercise

COUNT = 3  # with two processes, the next and the previous are the same
WAITING = 5.0  # seconds in which the processes must answer: each may wait for another
STARTING = 60.0  # seconds with the start of the processes


class ProcessExercise(PythonExercise):
    """An exercise whose function runs in COUNT processes at the same time. An answer that blocks ends them."""

    def outcome(self, case: Case, theirs: object) -> object:
        return attempt(lambda: case.run(theirs), seconds=STARTING, code=theirs)


@functools.cache
def _processes() -> Processes:
    return Processes(COUNT, timeout=WAITING)


def passing(what: str, of_rank: Callable[[int], list]) -> Case:
    """Return a case in which every process calls the answer with the tensor of `of_rank(rank)`."""

    def run(theirs: Callable) -> object:
        def in_process() -> tuple[object, bool]:
            x = torch.tensor(of_rank(dist.get_rank()))
            before, got = x.clone(), theirs(x)
            return got.tolist() if isinstance(got, torch.Tensor) else got, torch.equal(x, before)

        found = _processes().run(in_process)
        return {"returned": [got for got, _ in found], "x is as before": all(same for _, same in found)}

    return Case(what, run)
