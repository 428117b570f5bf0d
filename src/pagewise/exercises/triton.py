"""Exercises whose answer is a Triton kernel. Solution and mistakes are source text here, kernels outside."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from pagewise.exercises.attempts import attempt
from pagewise.exercises.code import solution_text, stub_text, triton_kernel
from pagewise.exercises.exercise import Case, Exercise, Mistake
from pagewise.tools.device import best_device, check_triton_device, triton_launch

SECONDS = 20.0  # on a GPU the first launch compiles; in the interpreter an operation takes a millisecond


class TritonExercise(Exercise):
    """Launched on the GPU where there is one, else interpreted. (A GPU's endless loop is ended by nobody.)"""

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


def triton_exercise(name: str, cases: Sequence[Case], mistakes: Mapping[str, Mistake], praise: str) -> TritonExercise:
    """An exercise on `device_code/<name>.py`."""
    return TritonExercise(name, cases, mistakes, solution_text(f"{name}.py"), stub_text(f"{name}.py"), praise)


@functools.cache
def _kernel(source: str) -> object:
    return triton_kernel(source)


def launching(what: str, launch: Callable[[object, torch.device], object]) -> Case:
    """A case that launches a kernel on tensors of the device it is told."""

    def run(kernel: object) -> object:
        device = best_device()
        with triton_launch(device), np.errstate(all="ignore"):  # an answer may overflow; it is told so in our words
            return launch(kernel, device)

    return Case(what, run)
