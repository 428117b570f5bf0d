"""Run the smallest case of one kernel against the oracle: `make try K=flat_gemm`. `make try` lists the names.

A CUDA kernel runs on the CPU under `cudascope.check`. A Triton kernel runs in Triton's interpreter. Then Triton
compiles it for ARCH, and the CPU executes the PTX under `check`. The tolerance policy of conftest decides whether a
result is right. The last line has the resources of the kernel on ARCH, which CUDA kernels need NVRTC for.

The command exits with 1 if a result is wrong or a check finds something, and with 2 if no kernel has this name.
"""

import contextlib
import re
import sys
from unittest import mock

import torch

from conftest import ROOT, assert_as_accurate_as_naive
from cudascope import CompileError, CudaKernel, check, triton_compiled
from cudascope.toolchain.ptxas import PtxText, Resources, resources_of
from cudascope.triton import launches as triton_launches
from cudascope.triton.compiler import compiled_kernel
from pagewise.experiments import cuda_cases
from pagewise.experiments.compiled_kernels import CALLS, REPLICATED
from pagewise.experiments.kernel_cases import Case, dense, loss_of, seen, with_gradients
from pagewise.flash_attention import flash_attention
from pagewise.naive_attention import attention

ARCH = "sm_80"
# The cases that launch each kernel, by the name of the kernel without "_kernel". They reach each of its barriers, and
# enter each loop that has one twice.
IN_CUDA = {
    "flash_attention": ("flash",),
    "flat_gemm": ("flat product",),
    "gemv": ("gemv",),
    "paged_attention_grouped": ("grouped",),
    "paged_attention_merge": ("v2",),
    "paged_attention_v1": ("v1",),
    "paged_attention_v2": ("v2",),
}
IN_TRITON = {
    "add_splits": "unified max",
    "decode_attention": "paged decode",
    "flash_attention": "flash forward",
    "flash_attention_backward": "flash gradients",
    "flash_attention_delta": "flash gradients",
    "flash_dq": "first flash",
    "flash_forward": "first flash",
    "lazy_rescale": "lazy rescale",
    "merge_items": "varlen",
    "merge_splits": "lazy rescale",
    "online_softmax": "softmax",
    "paged_decode": "first paged decode",
    "split_decode": "first split decode",
    "unified_max": "first unified max",
    "unified_max_attention": "unified max",
    "work_plan": "decode",
    "write_kv_cache": "write",
}


def kernels_of_files() -> dict[str, list[str]]:
    """Return the kernels of each file of kernels/, without "_kernel"."""
    written = re.compile(r"^(?:def|__global__ .*?) ?(\w+)_kernel\(", re.MULTILINE)
    files = sorted(path for ending in ("cu", "py") for path in (ROOT / "kernels").glob(f"*.{ending}"))
    found = {path.name: written.findall(path.read_text()) for path in files}
    return {name: kernels for name, kernels in found.items() if kernels}


def try_in_cuda(name: str) -> bool:
    """Run a CUDA kernel under check. Return whether its results are right and nothing was found."""
    right = True
    with mock.patch.object(CudaKernel, "_launch", autospec=True, side_effect=CudaKernel._launch) as launches:
        for case in IN_CUDA[name]:
            right &= is_right("CUDA on the CPU, checked", cuda_cases.CALLS[case](torch.float16), checked=True)
    launched = {kernel.function: (kernel, shape) for (kernel, shape, *_), _ in launches.call_args_list[::-1]}
    if f"{name}_kernel" not in launched:
        return not_launched()
    kernel, shape = launched[f"{name}_kernel"]
    try:
        show(kernel.resources(ARCH), shape.shared_bytes)
    except RuntimeError as error:  # NVRTC is not installed
        print(f"  {error}")
    return right


def triton_case(name: str) -> Case:
    """Return a case. The kernels of FlashAttention take twice as long to build in float16."""
    if name == "flash forward":
        return cuda_cases.flash(attend_in_triton, 16, torch.float32)
    if name == "flash gradients":
        return flash_gradients(torch.float32, 16, window=30)
    return CALLS[name](torch.float16, 32, name == "decode")  # with options, its programs share the work


def attend_in_triton(*qkv: torch.Tensor, **options: int) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_attention(*qkv, causal=True, return_lse=True, backend="triton", **options)


def flash_gradients(dtype: torch.dtype, D: int, **options: int) -> Case:
    """The backward. Its forward runs only once, here, in Triton's interpreter."""
    leaves = [x.requires_grad_() for x in dense(1, 37, 70, D, dtype)]
    out, lse = attend_in_triton(*leaves, **options)
    loss = loss_of(out, lse)

    def run() -> tuple[torch.Tensor, ...]:
        return out.detach(), seen(lse.detach()), *torch.autograd.grad(loss, leaves, retain_graph=True)

    def naive(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        attend = lambda *qkv: attention(*qkv, causal=True, return_lse=True, **options)  # noqa: E731
        return with_gradients(attend, (x.detach().to(dtype) for x in leaves))

    return Case(run, naive)


def try_in_triton(name: str) -> bool:
    """Run a Triton kernel interpreted, then compiled under check. Return whether both are right."""
    case = triton_case(IN_TRITON[name])
    with mock.patch.object(triton_launches, "compiled_kernel", side_effect=compiled_kernel) as compiled:
        right = is_right("Triton, interpreted", case)
        with triton_compiled(ARCH):
            right &= is_right("Triton, compiled and checked", case, checked=True)
    launched = [launch for (launch,), _ in compiled.call_args_list if launch.name == f"{name}_kernel"]
    if not launched:
        return not_launched()
    kernel = compiled_kernel(launched[0])
    if resources := resources_of(PtxText(kernel.ptx, kernel.name, ARCH), int(ARCH[3:])):
        show(resources, kernel.shared)
    return right


def is_right(how: str, case: Case, *, checked: bool = False) -> bool:
    """Run a case and print a line about it. Return whether its results are right and nothing was found."""
    checking = check(stop=False, ignore=REPLICATED) if checked else contextlib.nullcontext()
    try:
        with checking as report:
            results = case.run()
    except CompileError as error:
        print(f"  {how}: {error}")
        return False
    wrong = fault(results, case)
    findings = report.findings if checked else []
    plural = "" if len(findings) == 1 else "s"
    print(f"  {how}: {wrong or 'right'}" + f", {len(findings) or 'no'} finding{plural}" * checked)
    for finding in findings:
        print(f"    {finding}")
    return not (wrong or findings)


def fault(results: tuple[torch.Tensor, ...], case: Case) -> str | None:
    """Return the sentence of the tolerance policy about the first wrong result, or None.

    The first two results are an output and its log-sum-exp. Later ones are gradients, as in `with_gradients`.
    """
    dtype = results[0].dtype
    for number, each in enumerate(zip(results, case.naive(torch.float64), case.naive(dtype), strict=True)):
        try:
            assert_as_accurate_as_naive(*each, factor=3 if number >= 2 else 2)
        except AssertionError as error:
            return f"result {number} is wrong: {str(error).splitlines()[0]}"
    return None


def show(resources: Resources, dynamic_bytes: int) -> None:
    """Print the resources of a kernel."""
    shared = resources.shared_bytes + dynamic_bytes
    print(
        f"  {ARCH}: {resources.registers} registers per thread, {shared:,} bytes of shared memory, "
        f"{resources.spilled_bytes} bytes spilled per thread"
    )


def not_launched() -> bool:
    print("  the kernel was never launched")
    return False


def main(names: list[str]) -> int:
    """Return the exit status of the command."""
    if not names:
        for file, kernels in kernels_of_files().items():
            print(f"{file:30} {' '.join(kernels)}")
        return 0
    status = 0
    for name in names:
        if name not in IN_CUDA | IN_TRITON:
            print(f"no kernel is called {name!r}: `make try` lists the names", file=sys.stderr)
            return 2
        for calls, run in ((IN_CUDA, try_in_cuda), (IN_TRITON, try_in_triton)):
            if name in calls:
                print(name, flush=True)
                status |= not run(name)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
