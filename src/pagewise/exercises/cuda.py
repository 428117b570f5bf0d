"""Exercises whose answer is a CUDA kernel, run and checked by the CPU runner, on every machine alike."""

import atexit
import contextlib
import functools
import io
import pickle
import re
import signal
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import torch

import cudascope
from cudascope import CompileError, CudaKernel
from cudascope.toolchain.cache import cache_dir, publish
from cudascope.watch.report import Launch
from pagewise.exercises.exercise import Case, Exercise
from pagewise.exercises.values import Raised
from pagewise.tools.worker import Failed, Worker

BUILD_SECONDS, RUN_SECONDS = 300.0, 10.0


class Program(NamedTuple):
    """The arguments of `CudaKernel`."""

    source: str
    name: str
    defines: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


class CudaExercise(Exercise):
    """Takes source text, or a `CudaKernel` as `%%cuda` makes it. Another process builds and runs it."""

    is_kernel = True

    def answer(self, source: str) -> str:
        return source

    def refuses(self, theirs: object) -> str | None:
        if not isinstance(theirs, CudaKernel) and not (isinstance(theirs, str) and "__global__" in theirs):
            got = "a string without __global__" if isinstance(theirs, str) else type(theirs).__name__
            return f"the answer must be a CudaKernel, or the source of one, got {got}."
        built = self._in_worker(None, theirs, BUILD_SECONDS)
        return built.message if isinstance(built, Raised) else None

    def is_stub(self, theirs: CudaKernel | Program | str) -> bool:
        return self._program(theirs).source.strip() == self.stub.strip()

    def outcome(self, case: Case, theirs: CudaKernel | Program | str) -> object:
        built = self._in_worker(None, theirs, BUILD_SECONDS)
        return built if isinstance(built, Raised) else self._in_worker(self.cases.index(case), theirs, RUN_SECONDS)

    def wrong_answers(self) -> list[Program]:
        """Return the program of each mistake. One source has all mistakes, so that the compiler runs once."""
        names = {f"{self.name}_{i}": mistake.source for i, mistake in enumerate(self.mistakes.values())}
        sources = [source.replace(f" {self.name}(", f" {name}(") for name, source in names.items()]
        together = cache_dir() / f"{self.name}_mistakes.cu"
        publish(together, "\n".join(sources).encode())
        return [Program(str(together), name) for name in names]

    def unnamed(self, got: object, found: str) -> str:
        if isinstance(got, Raised):
            return _ADVICE.get(got.kind[0], "")
        return super().unnamed(got, found) + " (NaN: nobody wrote it.)" * ("got nan" in found)

    def _in_worker(self, case: int | None, theirs: CudaKernel | Program | str, limit: float) -> object:
        """Return what `_Runner` does. A kernel on the CPU is native code, which only the end of its process stops."""
        try:
            outcome, printed = pickle.loads(_worker()(self.name, case, self._program(theirs), limit=limit))
        except Failed as failure:
            return Raised(("no answer",), str(failure))
        except BaseException:  # the user's interrupt: the process must not go on
            _worker().close()
            raise
        print(printed, end="")
        return outcome

    def _program(self, theirs: CudaKernel | Program | str) -> Program:
        if isinstance(theirs, CudaKernel):
            text, _, folder, defines, options = theirs.source
            beside = (f"-I{folder}",) if folder else ()
            return Program(text, theirs.name, defines, (*options, *beside))
        return Program(theirs, self.name) if isinstance(theirs, str) else theirs


_ADVICE = {
    "race": "Two threads meet in one place: they need a barrier between, or places of their own; and what is copied "
    "asynchronously must be waited for.",
    "out of bounds": "An index is too large or negative: which threads have nothing to do?",
    "barrier": "Every thread of the thread block must reach the same barrier: take it out of the `if`.",
    "deadlock": "Some threads wait for others that never come.",
    "lane": "A shuffle must be reached by every lane that its mask names.",
    "uninitialised": "Somebody must write it first.",
    "no answer": "Is there a loop that never ends, or a pointer that was never right?",
    TypeError: "Keep the parameters as the task has them.",
}


# ----------------------------------------------------------------------------------------------- the other process


@functools.cache
def _worker() -> Worker:
    worker = Worker(_Runner)
    atexit.register(worker.close)
    return worker


class _Runner:
    """Work in the other process: build a program (case None) or run a case. Return outcome and output, pickled."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._kernels: dict[Program, CudaKernel] = {}

    def __call__(self, exercise: str, case: int | None, program: Program) -> bytes:
        from pagewise.exercises.checkers import BY_NAME

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            outcome = self._build(program) if case is None else self._run(BY_NAME[exercise].cases[case], program)
        return pickle.dumps((outcome, printed.getvalue()))

    def _build(self, program: Program) -> Raised | None:
        if program in self._kernels:
            return None
        try:
            kernel = CudaKernel(program.source, program.name, defines=program.defines, options=program.options)
            with cudascope.check():  # the build that is checked and observed
                kernel.compile("cpu")
        except CompileError as error:
            return Raised((CompileError,), f"it does not compile\n\n{textwrap.indent(str(error), '    ')}")
        except (ValueError, TypeError) as error:
            return Raised((type(error),), f"this source cannot be used: {error}")
        self._kernels[program] = kernel
        return None

    def _run(self, case: Case, program: Program) -> object:
        """Return the outcome of the case. If a check of the runner fails, that is the kind and place of the failure."""
        try:
            return case.run(self._kernels[program])
        except cudascope.Finding as error:
            return Raised((error.what, error.thread_block, error.thread, error.element), _in_lines(str(error)))
        except (TypeError, ValueError) as error:
            return Raised((type(error),), f"{type(error).__name__}: {error}")


def _in_lines(message: str) -> str:
    """Return a message of the runner with the source line on a line of its own, and without the remedy for a race."""
    message = re.sub(r": a __sync\w+\(\) belongs [^;]*", "", message)
    return re.sub(r", (line \d+) `(.*?)`: ", r", \1\n    \2\n", message, count=1)


def checked(what: str, grid: int, block: int, *args: object) -> Case:
    """Return a checked launch on copies of these arguments. A `torch.Size` makes an output; outputs are compared."""

    def run(kernel: CudaKernel) -> object:
        mine = _fresh(args)
        outputs = [tensor for tensor, arg in zip(mine, args, strict=True) if isinstance(arg, torch.Size)]
        with cudascope.check(outputs=outputs):
            kernel[grid, block](*mine)
        return outputs[0] if len(outputs) == 1 else outputs

    return Case(what, run)


class Reads(NamedTuple):
    """How a launch read a tensor: requests of warps, the pieces of memory that they touch, and the bytes asked for."""

    requests: int
    pieces: int
    bytes: int


def reads_of(launch: Launch, tensor: str, *, itemsize: int, piece: int = 32) -> Reads:
    """Count the reads of one tensor of an observed launch, named as in the kernel's parameters.

    `itemsize`: bytes of an element of the tensor. `piece`: bytes of an aligned piece, 32 for sectors, 128 for cache
    lines. A request that touches a piece counts it once. ValueError if the kernel has no parameter of this name.
    """
    reads = launch.accesses(tensor)
    reads = reads[reads["access"] == "read"]
    first = reads["element"] * itemsize // piece
    last = (reads["element"] * itemsize + reads["bytes"] - 1) // piece
    touched: dict[tuple[int, ...], set[int]] = {}
    seen: dict[tuple[int, ...], int] = {}  # loads of one thread in one execution of a line
    for read, start, stop in zip(reads, first.tolist(), last.tolist(), strict=True):
        block, warp, thread, line, turn = (
            int(read[field]) for field in ("thread_block", "warp", "thread", "line", "execution")
        )
        load = seen[block, thread, line, turn] = seen.get((block, thread, line, turn), -1) + 1
        touched.setdefault((block, warp, line, turn, load), set()).update(range(start, stop + 1))
    return Reads(len(touched), sum(map(len, touched.values())), int(reads["bytes"].sum()))


def _fresh(args: Sequence[object]) -> list[object]:
    """Return the arguments of one launch: copies of tensors, NaN in outputs."""
    makes = {torch.Size: lambda size: torch.full(size, torch.nan), torch.Tensor: torch.Tensor.clone}
    return [makes.get(type(arg), lambda same: same)(arg) for arg in args]
