"""Exercises whose answer is a Triton kernel. The solution is source text, so importing this does not import Triton."""

import ast
import functools
import importlib.util
import linecache
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pagewise.exercises.attempts import attempt
from pagewise.exercises.code import same_function
from pagewise.exercises.exercise import Case, Exercise
from pagewise.tools.device import best_device, check_triton_device

RESCALING = [
    "acc keeps the old maximum: The maximum rose with a later tile. l was multiplied by alpha and acc was not: both "
    "are relative to m.",
    ("alpha[:, None] * acc", "acc"),
    "l keeps the old maximum: The maximum rose with a later tile. acc was multiplied by alpha and l was not: both are "
    "relative to m.",
    ("alpha * l", "l"),
]
SECONDS = 20.0  # on a GPU the first launch compiles; in the interpreter an operation takes a millisecond


class TritonExercise(Exercise):
    """An exercise whose kernel runs on the GPU if there is one, else interpreted. No limit ends a loop on a GPU."""

    is_kernel = True

    def answer(self, source: str) -> object:
        return triton_kernel(source)

    def refuses(self, theirs: object) -> str | None:
        if not (hasattr(theirs, "fn") and hasattr(theirs, "run")):
            remedy = ": is `@triton.jit` above it?" if callable(theirs) else "."
            return f"the answer must be a Triton kernel, got {type(theirs).__name__}{remedy}"
        try:
            check_triton_device(best_device())
        except (ValueError, RuntimeError) as error:
            return f"Triton cannot run here: {error}"
        return None

    def is_stub(self, theirs: object) -> bool:
        return same_function(theirs.fn, self.stub)

    def outcome(self, case: Case, theirs: object) -> object:
        return attempt(lambda: case.run(theirs), seconds=SECONDS, code=theirs)


def kernel_text(module: str, name: str, imports: str = "") -> str:
    """Return the live source of a kernel of `pagewise.kernels`, below the imports of Triton and these lines."""
    text = Path(importlib.util.find_spec(f"pagewise.kernels.{module}").origin).read_text(encoding="utf-8")
    (function,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name)
    lines = text.splitlines()[function.decorator_list[0].lineno - 1 : function.end_lineno]
    return "\n".join(["import triton", "import triton.language as tl", *imports.splitlines(), "", "", *lines])


@functools.cache
def triton_kernel(source: str) -> object:
    """Return the Triton kernel of a Python source text. Triton can read the text again, as it could a cell's."""
    filename = f"<exercise {zlib.crc32(source.encode()):08x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {"__name__": __name__}
    exec(compile(source, filename, "exec"), namespace)
    return [value for value in namespace.values() if hasattr(value, "fn")][-1]


def launching(what: str, launch: Callable[[object, torch.device], object]) -> Case:
    """Return a case that launches a kernel on tensors of the device that `launch` gets."""

    def run(kernel: object) -> object:
        with np.errstate(all="ignore"):  # an answer may overflow: the hint says so in words
            return launch(kernel, best_device())

    return Case(what, run)
