"""The kernels of this folder: each equals torch, raises no alarm and compiles for two GPUs; each bug is caught."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import cudascope
from cudascope import CudaKernel
from cudascope.ptxas import Resources

FOLDER = Path(__file__).parent
SCHEDULES = 20
ARCHITECTURES = ("sm_80", "sm_90")


class Run(NamedTuple):
    """One launch: `kernel[launch](*args)` must leave `expected` in `out`."""

    launch: tuple
    args: tuple
    out: Tensor
    expected: Tensor
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
    run = Run((ceil(13, 4), 128), (x, sums, positive, 13, 75), sums, x.sum(1), 1e-5, 1e-5)
    return run._replace(out=(sums, positive), expected=(x.sum(1), (x > 0).sum(1).int()))


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
    kernel = case.kernel
    if device.type == "cpu":  # checked first: a stray write is then an error and not the end of the test run
        run = case.make(device)
        with cudascope.check():
            kernel[run.launch](*run.args)
    run = case.make(device)
    kernel[run.launch](*run.args)
    assert_expected(run)


@pytest.mark.parametrize("name", CASES)
def test_no_false_alarm_under_any_schedule(name):
    case = CASES[name]
    kernel = case.kernel
    for seed in range(SCHEDULES):
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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
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


# ------------------------------------------------------------------------------------------------ planted bugs


PLANTED = "planted_bugs.cu"


class Bug(NamedTuple):
    what: str  # Finding.what
    launch: tuple
    make: Callable[[], tuple[tuple, Tensor, Tensor]]  # arguments, output, what it should be
    tensor: str  # what Finding.tensor is


def bug_missing_barrier():
    x, out = random(3, 128, device="cpu"), poisoned(3, 128, device="cpu")
    return (x, out), out, x.flip(1)


def bug_barrier_in_branch():
    x, out = random(300, device="cpu"), poisoned(300, device="cpu")
    return (x, out, 300), out, x + torch.cat([torch.zeros(1), x[:-1]])


def bug_off_by_one():
    x, out = random(300, device="cpu"), poisoned(300, device="cpu")
    return (x, out, 300), out, torch.cat([x.diff(), torch.zeros(1)])


def bug_warp_race():
    x, out = torch.arange(512.0).view(4, 128), poisoned(4, 128, device="cpu")
    return (x, out, 4), out, x.sum(1, keepdim=True).expand(4, 128)


def bug_warp_exchange():
    x, out = random(2, 128, device="cpu"), poisoned(2, 128, device="cpu")
    return (x, out), out, x.view(2, 64, 2).flip(2).view(2, 128)


def bug_unaligned_float4():
    x, out = torch.arange(4.0 * 100 + 1), poisoned(100, device="cpu")
    return (x, out, 100), out, x[1:].view(100, 4).sum(1)


def bug_uninitialised_shared():
    x, out = torch.arange(300.0), poisoned(3, device="cpu")
    return (x, out, 300), out, torch.cat([x, torch.zeros(84)]).view(3, 128).sum(1)


def bug_write_write_race():
    bins = (torch.arange(300, dtype=torch.int32) * 7) % 13
    last = torch.full((13,), -1, dtype=torch.int32)
    expected = torch.tensor([(bins == bin).nonzero().max() for bin in range(13)], dtype=torch.int32)
    return (bins, last, 300), last, expected


BUGS = {
    "missing_barrier": Bug("race", (3, 128), bug_missing_barrier, "row"),
    "barrier_in_branch": Bug("barrier", (3, 128), bug_barrier_in_branch, ""),
    "off_by_one": Bug("out of bounds", (3, 128), bug_off_by_one, "in"),
    "warp_race": Bug("race", (1, 128), bug_warp_race, "partial"),
    "warp_exchange": Bug("race", (2, 128), bug_warp_exchange, "row"),
    "unaligned_float4": Bug("misaligned", (1, 128), bug_unaligned_float4, "in"),
    "uninitialised_shared": Bug("uninitialised", (3, 128), bug_uninitialised_shared, "row"),
    "write_write_race": Bug("race", (3, 128), bug_write_write_race, "last"),
}


def marked_lines(name: str) -> list[int]:
    lines = (FOLDER / PLANTED).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith(f"// BUG {name}")]


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_planted_bug_is_caught_with_its_line(name, seed):
    bug, kernel = BUGS[name], CudaKernel(FOLDER / PLANTED, name)
    args, _, _ = bug.make()
    with pytest.raises(cudascope.Finding) as caught, cudascope.check(schedule=seed):
        kernel[bug.launch](*args, True)
    error = caught.value
    assert error.what == bug.what
    assert error.line in marked_lines(name), str(error)
    assert error.kernel == name
    assert (error.tensor or "") == bug.tensor
    assert f"line {error.line}" in str(error)


def test_the_element_past_the_end_is_named():
    args, _, _ = bug_off_by_one()
    with (
        pytest.raises(cudascope.Finding, match=r"in\[300\], past its end \(300 elements\)") as caught,
        cudascope.check(),
    ):
        CudaKernel(FOLDER / PLANTED, "off_by_one")[3, 128](*args, True)
    assert (caught.value.tensor, caught.value.element) == ("in", 300)
    assert (caught.value.thread_block, caught.value.thread) == ((2, 0, 0), (299 - 256, 0, 0))


@pytest.mark.parametrize("name", BUGS)
def test_the_correct_twin_of_a_bug_passes_under_any_schedule(name):
    bug, kernel = BUGS[name], CudaKernel(FOLDER / PLANTED, name)
    for seed in (None, *range(SCHEDULES)):
        args, out, expected = bug.make()
        with cudascope.check(schedule=seed):
            kernel[bug.launch](*args, False)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_planted_bugs_are_cuda_too(name, arch):
    resources = CudaKernel(FOLDER / PLANTED, name).resources(arch)
    assert isinstance(resources, Resources)
    assert resources.spilled_bytes == 0


# ------------------------------------------------------------------------------------------------ counters by hand

ROWS, COLS = 96, 64  # 6 tiles of 32 × 32; 192 warps read and write a row of 32 floats each
WARP_ROWS = ROWS * COLS // 32


@pytest.mark.parametrize(
    ("name", "write_sectors", "shared_reads", "conflicts"),
    [
        ("transpose_naive", 32, 0, 0),  # 32 lanes write 32 rows: a sector each
        ("transpose<0>", 4, WARP_ROWS, 31),  # a column of 32 words in one bank: 32 turns
        ("transpose<1>", 4, WARP_ROWS, 0),  # rows of 33 words: the column lies in 32 banks
    ],
)
def test_counters_of_the_transposes_equal_those_derived_by_hand(name, write_sectors, shared_reads, conflicts):
    x, out = random(ROWS, COLS, device="cpu"), torch.empty(COLS, ROWS)
    x, out = aligned(x), aligned(out)
    with cudascope.observe() as report:
        CudaKernel(FOLDER / "transpose.cu", name)[(COLS // 32, ROWS // 32), (32, 8)](x, out, ROWS, COLS)
    assert torch.equal(out, x.T)
    read, write = report.count("read", "global"), report.count("write", "global")
    assert (read.requests, read.lanes, read.bytes, read.sectors) == (192, 6144, 24576, 192 * 4)
    assert (write.requests, write.lanes, write.bytes, write.sectors) == (192, 6144, 24576, 192 * write_sectors)
    shared = report.count("read", "shared")
    assert (shared.requests, shared.bytes, shared.bank_conflicts) == (shared_reads, 128 * shared_reads, conflicts * 192)
    assert report.count("write", "shared").bank_conflicts == 0
    assert report.count("barrier").requests == (6 if shared_reads else 0)


def test_sixteen_byte_vectors_move_the_same_sectors_in_a_quarter_of_the_requests():
    a, b, out = (aligned(torch.ones(1024)) for _ in range(3))
    counts = []
    for name, blocks in (("vector_add", 8), ("vector_add4", 2)):
        with cudascope.observe() as report:
            CudaKernel(FOLDER / "vector_add.cu", name)[blocks, 128](a, b, out, 1024)
        read = report.count("read", "global")
        counts.append((read.requests, read.bytes, read.sectors))
    # 2 inputs × 1024 floats = 8192 bytes = 256 sectors; 32 lanes × 4 or 16 bytes a request
    assert counts == [(64, 8192, 256), (16, 8192, 256)]


@pytest.mark.parametrize("offset", [1, 4, 7])
def test_an_offset_that_is_no_multiple_of_a_sector_costs_one_sector_a_request(offset):
    x, out = aligned(torch.ones(1024 + offset))[offset:], torch.empty(1024)
    with cudascope.observe() as report:
        CudaKernel(FOLDER / "vector_add.cu", "vector_add")[8, 128](x, x, out, 1024)
    assert report.count("read", "global").sectors == 64 * 5  # 128 bytes over 5 sectors


def aligned(x: Tensor) -> Tensor:
    """A copy of x that begins at a multiple of 256 bytes, as all of a GPU's memory does."""
    memory = torch.empty(x.numel() * x.element_size() + 256, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    copy = memory[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
    return copy.copy_(x)
