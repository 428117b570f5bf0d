"""The kernels of this folder: each equals torch, raises no alarm and compiles for two GPUs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from covering import in_turns, is_full
from planted import SCHEDULES
from torch import Tensor

import cudascope
from cudascope import CudaKernel

FOLDER = Path(__file__).parent
ARCHITECTURES = ("sm_80", "sm_90")


class Run(NamedTuple):
    """One launch: `kernel[launch](*args)` must leave `expected` in `out`."""

    launch: tuple
    args: tuple
    out: Tensor | tuple[Tensor, ...]
    expected: Tensor | tuple[Tensor, ...]
    rtol: float = 0.0
    atol: float = 0.0


class Case(NamedTuple):
    file: str
    name: str
    make: Callable[[torch.device], Run]

    @property
    def kernel(self) -> CudaKernel:
        return CudaKernel(FOLDER / self.file, self.name)


CASES: dict[str, Case] = {}


def case(file: str, *names: str) -> Callable:
    """Registers a function that makes the Run of each kernel of `names`. Sizes fit no tile unless they must."""

    def register(make: Callable) -> Callable:
        for name in names:
            CASES[name] = Case(file, name, lambda device, name=name: make(name, device))
        return make

    return register


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(device, dtype)


def poisoned(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output that no correct kernel leaves as it is."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 99, device=device).to(dtype)


def ceil(n: int, size: int) -> int:
    return -(-n // size)


# ------------------------------------------------------------------------------------------------ correct kernels


@case("vector_add.cu", "vector_add")
def vector_add(name, device):
    a, b, out = random(1000, device=device), random(1000, 1, device=device)[:, 0], poisoned(1000, device=device)
    return Run((ceil(1000, 128), 128), (a, b, out, 1000), out, a + b)


@case("vector_add.cu", "vector_add4")
def vector_add4(name, device):
    a, b, out = random(1004, device=device), random(1004, 1, device=device)[:, 0], poisoned(1004, device=device)
    return Run((ceil(251, 128), 128), (a, b, out, 1004), out, a + b)


@case("transpose.cu", "transpose_naive", "transpose<0>", "transpose<1>")
def transpose(name, device):
    x, out = random(45, 70, device=device), poisoned(70, 45, device=device)
    return Run(((ceil(70, 32), ceil(45, 32)), (32, 8)), (x, out, 45, 70), out, x.T)


@case("reduction.cu", "warp_reduction")
def warp_reduction(name, device):
    x, sums = random(13, 75, device=device), poisoned(13, device=device)
    positive = poisoned(13, device=device, dtype=torch.int32)
    x[0] = x[0].abs()
    expected = x.sum(1), (x > 0).sum(1).int()
    return Run((ceil(13, 4), 128), (x, sums, positive, 13, 75), (sums, positive), expected, 1e-5, 1e-5)


@case("reduction.cu", "block_reduction<128>", "block_reduction<1024>")
def block_reduction(name, device):
    x, sums = random(7, 301, device=device), poisoned(7, device=device)
    threads = int(re.search(r"\d+", name)[0])
    return Run((7, threads), (x, sums, 301), sums, x.sum(1), 1e-5, 1e-5)


@case("scan.cu", "inclusive_scan<128>")
def inclusive_scan(name, device):
    x = torch.randint(-9, 9, (3, 300), dtype=torch.int32, generator=torch.Generator().manual_seed(0)).to(device)
    out = poisoned(3, 300, device=device, dtype=torch.int32)
    return Run((3, 128), (x, out, 300), out, x.cumsum(1).int())


@case("histogram.cu", "histogram")
def histogram(name, device):
    values = torch.randint(0, 50, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    counts = torch.zeros(50, dtype=torch.int32, device=device)
    return Run((3, 96, 4 * 50), (values, counts, 1000, 50), counts, values.int().bincount(minlength=50).int())


@case("softmax.cu", "softmax<float>", "softmax<__half, 64>")
def softmax(name, device):
    dtype, threads = (torch.float16, 64) if "half" in name else (torch.float32, 128)
    x, out = 30 * random(5, 331, device=device, dtype=dtype), poisoned(5, 331, device=device, dtype=dtype)
    expected = (0.5 * x.float()).softmax(1).to(dtype)
    rounding = torch.finfo(dtype).eps
    return Run((5, threads), (x, out, 331, 0.5), out, expected, max(1e-5, rounding), 1e-30 + (rounding > 1e-6) * 1e-7)


@case("matmul.cu", "matmul<16>")
def matmul(name, device):
    a, b, c = random(21, 50, device=device), random(50, 35, device=device), poisoned(21, 35, device=device)
    return Run(((ceil(35, 16), ceil(21, 16)), (16, 16)), (a, b, c, 21, 35, 50), c, a @ b, 1e-4, 1e-4)


@case("double_buffer.cu", "gemv<32>")
def gemv(name, device):
    a, x, y = random(70, 150, device=device), random(150, device=device), poisoned(70, device=device)
    return Run((ceil(70, 64), 64), (a, x, y, 70, 150), y, a @ x, 1e-4, 1e-4)


TYPES = {
    "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
}  # fmt: skip
NARROW = list(TYPES)[1:]


@case("convert.cu", *(f"float_to_{narrow}" for narrow in NARROW), *(f"{narrow}_to_float" for narrow in NARROW))
def convert(name, device):
    source, target = (TYPES[t] for t in name.split("_to_"))
    if source == torch.float32:  # ties, subnormals and both signs: every rounding there is, up to the largest e4m3
        x = torch.cat([random(997, device=device), torch.logspace(-12, 8.8, 500, base=2).to(device)])
        x = torch.cat([x, x.to(target).float() * (1 + torch.finfo(target).eps / 2), torch.zeros(3, device=device), -x])
        if target.itemsize == 1:  # beyond its largest number, versions of torch differ: NaN, or saturated as CUDA's
            x = x.clamp(-torch.finfo(target).max, torch.finfo(target).max)
    else:  # every finite number of 8 bits, every fifth of 16
        bits = torch.arange(2**8).byte() if source.itemsize == 1 else torch.arange(0, 2**16, 5).to(torch.uint16)
        x = bits.view(source).to(device)
        x = x[x.float().isfinite()]
    out = poisoned(len(x), device=device, dtype=target)
    return Run((ceil(len(x), 128), 128), (x, out, len(x)), out, x.to(target))


@case("convert.cu", "dequantise")
def dequantise(name, device):
    x, out = (3 * random(404, device=device)).to(torch.float8_e4m3fn), poisoned(404, device=device)
    return Run((1, 128), (x, out, 0.25, 404), out, x.float() * 0.25)


@case("convert.cu", "axpy_half2")
def axpy_half2(name, device):
    x, y = (random(*shape, device=device, dtype=torch.float16).flatten() for shape in ((246,), (246, 1)))
    out = poisoned(246, device=device, dtype=torch.float16)
    expected = (0.75 * x.double() + y.double()).half()  # one rounding, as of a fused multiply-add
    return Run((1, 128), (0.75, x, y, out, 246), out, expected)


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_torch(name, device):
    case = CASES[name]
    run = case.make(device)
    case.kernel[run.launch](*run.args)
    assert_expected(run)


@pytest.mark.parametrize("name", CASES)
def test_no_false_alarm_under_any_schedule(name):
    case = CASES[name]
    kernel = case.kernel
    for seed in SCHEDULES if is_full() else SCHEDULES[:7]:
        run = case.make(torch.device("cpu"))
        with cudascope.check(schedule=seed) as report:
            kernel[run.launch](*run.args)
        assert_expected(run)
        for out in run.out if isinstance(run.out, tuple) else [run.out]:
            if name != "histogram":  # adds only where there is something to add
                assert not len(report.unwritten(out)), f"schedule {seed}: elements never written"


def assert_expected(run: Run) -> None:
    pairs = zip(run.out, run.expected, strict=True) if isinstance(run.out, tuple) else [(run.out, run.expected)]
    for out, expected in pairs:
        if expected.dtype.itemsize == 1 and expected.dtype.is_floating_point:  # fp8 is compared by its bits
            out, expected = out.view(torch.uint8), expected.view(torch.uint8)
        torch.testing.assert_close(out, expected, rtol=run.rtol, atol=run.atol)


# ------------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize(("name", "arch"), in_turns(list(CASES), ARCHITECTURES))
def test_kernel_compiles_for_a_gpu_and_spills_nothing(name, arch):
    resources = CASES[name].kernel.resources(arch)
    assert 0 < resources.registers <= 64
    assert resources.spilled_bytes == 0
    assert resources.shared_bytes == STATIC_SHARED.get(name, 0)


# 4 bytes × what the source declares
STATIC_SHARED = {
    "transpose<0>": 4 * 32 * 32, "transpose<1>": 4 * 32 * 33, "block_reduction<128>": 4 * 4,
    "block_reduction<1024>": 4 * 32, "inclusive_scan<128>": 4 * 4, "softmax<float>": 4 * 4, "gemv<32>": 4 * 2 * 32,
    "softmax<__half, 64>": 4 * 2, "matmul<16>": 4 * 2 * 16 * 16,
}  # fmt: skip
