"""Exercises whose answer is a CUDA kernel, run and checked by the CPU runner, on every machine alike."""

import functools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from pagewise.cuda import CompileError, CudaKernel, simt
from pagewise.cuda.build import cache_dir, publish
from pagewise.exercises import worker
from pagewise.exercises.attempts import attempt
from pagewise.exercises.code import solution_text, stub_text
from pagewise.exercises.exercise import Case, Exercise, Mistake, Verdict, not_yet
from pagewise.exercises.values import Raised

_WORKER = worker.Worker()


class Program(NamedTuple):
    """What `CudaKernel` is made from."""

    source: str
    name: str
    defines: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


class CudaExercise(Exercise):
    """Takes source text, or a `CudaKernel` as `%%cuda` makes it; a worker process judges it."""

    def __call__(self, theirs: object) -> Verdict:
        if isinstance(theirs, CudaKernel):
            text, _, folder, defines, options = theirs.source
            beside = (f"-I{folder}",) if folder else ()
            theirs = Program(text, theirs.name, defines, (*options, *beside))
        elif isinstance(theirs, str) and "__global__" in theirs:
            theirs = Program(theirs, self.name)
        else:
            got = "a string without __global__" if isinstance(theirs, str) else type(theirs).__name__
            return not_yet(f"the answer must be a CudaKernel, or the source of one, got {got}.")
        try:
            return _WORKER.judge(self.name, theirs)
        except worker.Died as died:
            if died.seconds is None:
                return not_yet(f"the kernel ended the process that ran it ({died.what}): a wild pointer?")
            return not_yet(f"no answer after {died.seconds:g} seconds ({died.what}): is there a loop that never ends?")

    def judge(self, program: Program) -> Verdict:
        """In the worker: build it, then as any exercise."""
        try:
            _kernel(program)
        except CompileError as error:
            return not_yet(f"it does not compile\n\n{textwrap.indent(str(error), '    ')}")
        except (ValueError, TypeError) as error:
            return not_yet(f"this source cannot be used: {error}")
        return super().__call__(program)

    def refuses(self, theirs: object) -> None:
        """Nothing: `__call__` has."""

    def outcome(self, case: Case, theirs: Program | str) -> object:
        program = theirs if isinstance(theirs, Program) else Program(theirs, self.name)
        kernel = _kernel(program)
        worker.announce("run", case.what)
        return attempt(lambda: _run(case, kernel), seconds=1000)  # the parent is not so patient

    def outcomes_of_mistakes(self) -> Iterator[tuple[Mistake, list[object]]]:
        names = [f"{self.name}_{i}" for i in range(len(self.mistakes))]
        sources = (
            m.theirs.replace(f" {self.name}(", f" {name}(")
            for m, name in zip(self.mistakes.values(), names, strict=True)
        )
        together = cache_dir() / f"{self.name}_mistakes.cu"  # one file, so that the compiler runs once
        publish(together, "\n".join(sources).encode())
        for mistake, name in zip(self.mistakes.values(), names, strict=True):
            yield mistake, [self.outcome(case, Program(str(together), name)) for case in self.cases]

    def unnamed(self, got: object, found: str) -> str:
        if isinstance(got, Raised):
            return _ADVICE.get(got.kind[0], "") if isinstance(got.kind, tuple) else ""
        return super().unnamed(got, found) + " (NaN: nobody wrote it.)" * ("got nan" in found)


_ADVICE = {
    "race": "Two threads meet in one place: they need a barrier between, or places of their own.",
    "out of bounds": "An index is too large or negative: which threads have nothing to do?",
    "barrier": "Every thread of the thread block must reach the same barrier: take it out of the `if`.",
    "deadlock": "Some threads wait for others that never come.",
    "lane": "A shuffle must be reached by every lane that its mask names.",
    "uninitialised": "Somebody must write it first.",
    TypeError: "Keep the parameters as the task has them.",
}


def cuda_exercise(
    name: str, cases: Sequence[Case], mistakes: Mapping[str, Mistake], praise: str, *, stub: str = ""
) -> CudaExercise:
    """An exercise on `device_code/<name>.cu`. stub: a source with a mistake to be found, instead of holes."""
    return CudaExercise(name, cases, mistakes, solution_text(f"{name}.cu"), stub or stub_text(f"{name}.cu"), praise)


@functools.lru_cache(100)
def _kernel(program: Program) -> CudaKernel:
    worker.announce("build", "the compiler")
    kernel = CudaKernel(program.source, program.name, defines=program.defines, options=program.options)
    with simt.check():  # the build that is checked and observed
        kernel.compile("cpu")
    return kernel


def _run(case: Case, kernel: CudaKernel) -> object:
    """The case's outcome. Where a check of the runner fails, the kind of failure and who failed, not the line."""
    try:
        return case.run(kernel)
    except simt.SimtError as error:
        return Raised((error.what, error.thread_block, error.thread, error.element), _plain(str(error)))
    except (TypeError, ValueError) as error:
        return Raised((type(error),), f"{type(error).__name__}: {error}")


def _plain(message: str) -> str:
    """A message of the runner over several lines, the source line on its own."""
    return re.sub(r", (line \d+) `(.*?)`: ", r", \1\n    \2\n", message, count=1)


def checked(what: str, grid: int, block: int, *args: object) -> Case:
    """A checked launch on copies of these arguments. A `torch.Size` stands for an output; the outputs are compared."""

    def run(kernel: CudaKernel) -> object:
        mine = _fresh(args)
        outputs = [tensor for tensor, arg in zip(mine, args, strict=True) if isinstance(arg, torch.Size)]
        with simt.check(outputs=outputs):
            kernel[grid, block](*mine)
        return outputs[0] if len(outputs) == 1 else outputs

    return Case(what, run)


def counted(what: str, grid: int, block: int, *args: object) -> Case:
    """An observed launch on copies of these arguments, checked before; the sectors it moves are compared."""

    def run(kernel: CudaKernel) -> object:
        with simt.check():  # an observed launch keeps nobody from writing anywhere
            kernel[grid, block](*_fresh(args))
        with simt.observe() as report:
            kernel[grid, block](*_fresh(args))
        return {f"sectors {access}": report.count(access, "global").sectors for access in ("read", "write")}

    return Case(what, run)


def _fresh(args: Sequence[object]) -> list[object]:
    """The arguments of one launch: copies of tensors, NaN in outputs."""
    makes = {torch.Size: lambda size: torch.full(size, torch.nan), torch.Tensor: torch.Tensor.clone}
    return [makes.get(type(arg), lambda same: same)(arg) for arg in args]
