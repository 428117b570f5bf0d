"""Exercises whose answer is a Triton kernel. Solution and mistakes are source text here, kernels outside."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from pagewise.exercises.attempts import attempt
from pagewise.exercises.code import Gap, kernel_text, triton_kernel, variants_of, with_gaps
from pagewise.exercises.exercise import Case, Exercise
from pagewise.tools.device import best_device, check_triton_device

SECONDS = 20.0  # on a GPU the first launch compiles; in the interpreter an operation takes a millisecond


class TritonExercise(Exercise):
    """An exercise whose kernel runs on the GPU if there is one, else interpreted. No limit ends a loop on a GPU."""

    def refuses(self, theirs: object) -> str | None:
        if not (hasattr(theirs, "fn") and hasattr(theirs, "run")):
            remedy = ": is `@triton.jit` above it?" if callable(theirs) else "."
            return f"the answer must be a Triton kernel, got {type(theirs).__name__}{remedy}"
        try:
            check_triton_device(best_device())
        except (ValueError, RuntimeError) as error:
            return f"Triton cannot run here: {error}"
        return None

    def answer(self, theirs: object) -> object:
        return _kernel(theirs) if isinstance(theirs, str) else theirs

    def outcome(self, case: Case, theirs: object) -> object:
        return attempt(lambda: case.run(self.answer(theirs)), seconds=SECONDS, code=theirs)


def first_rung(
    module: str,
    name: str,
    gaps: Sequence[Gap],
    cases: Sequence[Case],
    mistakes: Mapping[str, tuple],
    praise: str,
    *,
    imports: str = "",
) -> TritonExercise:
    """Return an exercise whose solution is kernel `name` of `pagewise.kernels.<module>`.

    Args:
        mistakes: as `variants_of` takes them.
        imports: lines that the kernel needs besides those of Triton.
    """
    solution = kernel_text(module, name, imports)
    return TritonExercise(name, cases, variants_of(solution, **mistakes), solution, with_gaps(solution, *gaps), praise)


@functools.cache
def _kernel(source: str) -> object:
    return triton_kernel(source)


def launching(what: str, launch: Callable[[object, torch.device], object]) -> Case:
    """Return a case that launches a kernel on tensors of the device that `launch` gets."""

    def run(kernel: object) -> object:
        with np.errstate(all="ignore"):  # an answer may overflow: the hint says so in words
            return launch(kernel, best_device())

    return Case(what, run)
