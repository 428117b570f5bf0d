"""Run the Triton kernels as a GPU's code, on the CPU: `python -m pagewise.experiments.compiled_kernels`.

`cudascope.triton_compiled` compiles a kernel for a GPU and executes its PTX. Each call of CASES runs so for each GPU of
ARCHS, checked, and then in Triton's interpreter. A row says how many instructions the PTX of its kernels has, how far
the two results are apart, what the check found, and what the builds and the launches cost. Interpreter and GPU take
different tiles, and the interpreter computes bfloat16 in float32, so the results may differ in rounding.

All builds are new: the cache is a temporary folder. The builds take about 280 seconds of one core. A third of that is
flash attention for sm_75, where Triton has no tensor cores and writes ten times as many instructions.
"""

import os
import re
import resource
import tempfile
from typing import NamedTuple

import torch

from cudascope import CompileError, check, triton_compiled
from cudascope.ptx.module import read_module
from pagewise.experiments import first_rung_cases, kernel_cases
from pagewise.experiments.kernel_cases import Case, Tensors
from pagewise.tools.progress import progress, say
from pagewise.tools.records import table

ARCHS = ("sm_75", "sm_80", "sm_90")
CALLS = kernel_cases.CALLS | first_rung_cases.CALLS
REPLICATED = ("same value",)  # Triton lets several threads write one number to one place


class Variant(NamedTuple):
    """A call with a dtype, a head size, and with or without the options that its kernels have."""

    call: str
    dtype: torch.dtype
    head_size: int
    options: bool = False

    def __str__(self) -> str:
        return f"{self.call}, {str(self.dtype)[6:]}, D {self.head_size}{', options' * self.options}"

    def case(self) -> Case:
        return CALLS[self.call](self.dtype, self.head_size, self.options)


CASES = (
    Variant("softmax", torch.float16, 40, True),
    Variant("write", torch.bfloat16, 48, True),
    Variant("paged decode", torch.float16, 64, True),
    Variant("varlen", torch.bfloat16, 32, True),
    Variant("decode", torch.float32, 40, True),
    Variant("unified max", torch.float16, 80),
    Variant("lazy rescale", torch.bfloat16, 64, True),
    Variant("flash", torch.float32, 16, True),
    Variant("flash", torch.float16, 32),
    Variant("first paged decode", torch.float16, 16),
    Variant("first split decode", torch.bfloat16, 32),
    Variant("first unified max", torch.float32, 16),
    Variant("first flash", torch.float16, 32),
)


class Run(NamedTuple):
    """A variant, compiled for a GPU and executed, checked."""

    results: Tensors
    instructions: dict[str, int]  # of the PTX of each kernel
    findings: list[str]
    build_seconds: float  # of all cores and processes
    run_seconds: float


def run(variant: Variant, arch: str) -> Run:
    """Compile and check a variant. A call that is refused raises what it raises on that GPU."""
    instructions: dict[str, int] = {}

    def count(ptx: str) -> str:
        ((name, entry),) = read_module(ptx).entries.items()
        instructions[name] = sum(re.match(r"@|[a-z]", each.text) is not None for each in entry.body)
        return ptx

    case, start = variant.case(), cpu_seconds()
    with triton_compiled(arch, edit=count), check(stop=False, ignore=REPLICATED) as report:
        case.run()
        built = cpu_seconds()
        results = case.run()
        seconds = cpu_seconds() - built
    return Run(results, instructions, list(map(str, report.findings)), built - start - seconds, seconds)


def cpu_seconds() -> float:
    """Return the seconds that this process and its children have computed."""
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(sum(resource.getrusage(each)[:2]) for each in who)


def difference(results: Tensors, others: Tensors) -> str:
    """Return the largest difference of two results."""
    pairs = [(a.double(), b.double()) for a, b in zip(results, others, strict=True)]
    if all(torch.equal(a, b) for a, b in pairs):
        return "equal bits"
    return (
        f"{max(float((a - b).abs().max()) for a, b in pairs):.1e} of {max(float(b.abs().max()) for _, b in pairs):.1f}"
    )


def row(variant: Variant, arch: str) -> tuple[str, ...]:
    """Return a row of the table."""
    try:
        found = run(variant, arch)
    except (ValueError, CompileError) as error:
        return str(variant), arch, "–", "–", "–", "–", "–", f"refused: {error}"
    instructions = " + ".join(map(str, found.instructions.values()))
    kernels = ", ".join(name.removesuffix("_kernel") for name in found.instructions)
    apart = difference(found.results, variant.case().run())
    seconds = f"{found.build_seconds:.1f}", f"{found.run_seconds:.2f}"
    for finding in found.findings:
        say(f"{variant}, {arch}: {finding}")
    return str(variant), arch, instructions, apart, str(len(found.findings)), *seconds, kernels


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    header = ("call", "GPU", "PTX instructions", "interpreter", "findings", "build s", "run s", "kernels")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUDASCOPE_CACHE"] = folder
        for head_size in (16, 32, 64):  # builds what all kernels share
            run(Variant("softmax", torch.float32, head_size), "sm_80")
        pairs = [(variant, arch) for variant in CASES for arch in ARCHS]
        rows = [row(*pair) for pair in progress(pairs, "calls")]
    say(table(header, rows))


if __name__ == "__main__":
    main()
