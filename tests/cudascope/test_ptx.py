"""Kernels that are made of inline PTX, on the CPU: what they leave, and that their bugs are found."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import cudascope
from cudascope import CudaKernel
from cudascope.cpp.source import CompileError

FILE = Path(__file__).parent / "ptx.cu"
SCHEDULES = (None, *range(20))


def ints(*values: int | list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(name: str, launch: tuple, *args: object, schedule: int | None = None) -> cudascope.Report:
    with cudascope.check(schedule=schedule) as report:
        CudaKernel(FILE, name)[launch](*args)
    return report


def bits(patterns: torch.Tensor) -> list[int]:
    return [x % 2**32 for x in patterns.flatten().tolist()]


@pytest.mark.slow
def test_special_registers():
    out = torch.zeros(2 * 12 * 6, 8, dtype=torch.int32)
    run("who_am_i", (2, (12, 6)), out)
    for i, row in enumerate(out.tolist()):
        thread = i % 72
        lane = thread % 32
        assert row == [thread % 12, thread // 12, i // 72, 6, lane, thread // 32, 2**lane - 1, 2]


LANES, ROW = range(32), torch.randn(64)
MATRIX = torch.arange(64, dtype=torch.int16).view(8, 8)
EXCHANGED = [
    [105] * 32,
    [100 + lane if lane < 3 else 1097 + lane for lane in LANES],
    [100 + lane if lane % 8 == 7 else 1101 + lane for lane in LANES],
    [100 + (lane ^ 16) for lane in LANES],
    [2**32 - 2**21 - 2**32] * 32,
    [1] * 32,
    [15 << lane // 4 * 4 if lane < 28 else -(2**28) for lane in LANES],
    [sum(LANES)] * 32,
    [-1] * 32,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "threads", "given", "expected"),
    [
        pytest.param("early_exit", 8, [], ints(1, 1, 1, 1, 1, 0, 0, 0), id="exit ends a thread"),
        pytest.param("countdown", 6, [ints(0, 1, 2, 7, 8, 1000)], ints(0, 1, 2, 3, 4, 10), id="labels and branches"),
        pytest.param("updated_operand", 3, [torch.tensor([-2.0, 0.0, 3.0])], torch.tensor([2.0, 0.0, 7.0]),
                     id="an operand is read and written"),
        pytest.param("exchanges", 32, [ints(*range(100, 132))], ints(*EXCHANGED), id="exchanges of a warp"),
        pytest.param("narrow_loads", 3, [torch.tensor([-1, 5, -128]).char()], ints([-1, 255], [5, 5], [-128, 128]),
                     id="narrow loads extend by their sign"),
        pytest.param("rotate_shared", 64, [ROW], ROW.roll(-1), id="addresses of shared memory"),
        pytest.param("transposes", 32, [MATRIX], MATRIX.T.expand(3, 8, 8), id="matrices are transposed"),
    ],
)  # fmt: skip
def test_one_thread_block_computes(name, threads, given, expected):
    out = torch.zeros_like(expected, memory_format=torch.contiguous_format)
    run(name, (1, threads), *given, out)
    assert torch.equal(out, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b"), [(2**96 - 1, 1), (2**64, 2**32 + 5), (12345678901234567890123456789, 2**95 + 2**33 - 1)]
)
def test_carries_go_from_one_statement_to_the_next(a, b):
    words = [np.array([x >> 32 * i & 0xFFFFFFFF for i in range(3)], np.uint32) for x in (a, b)]
    x, y = (torch.from_numpy(each.view(np.int32)) for each in words)
    total, difference = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    run("wide_sum", (1, 1), x, y, total, difference)
    assert sum(word << 32 * i for i, word in enumerate(bits(total))) == (a + b) % 2**96
    assert sum(word << 32 * i for i, word in enumerate(bits(difference))) == (a - b) % 2**96


@pytest.mark.parametrize("n", [1024, 1021])
def test_vectors_and_offsets(n):
    x, out = torch.randn(n), torch.zeros(n)
    run("copies", (3, 128), x, out, n)
    assert torch.equal(out, x)


def test_atomics():
    u, f, halves = torch.zeros(3, dtype=torch.int32), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    run("atomics", (2, 64), u, f, halves)
    assert u.tolist() == [256, 7, 63]
    assert f.item() == 64.0
    assert halves.view(torch.float16).tolist() == [256.0, 128.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_released_flag_orders_what_was_written_before(schedule):
    data, ready, out = (torch.zeros(n, dtype=torch.int32) for n in (8, 1, 8))
    run("flag", (2, 8), data, ready, out, schedule=schedule)
    assert out.tolist() == list(range(10, 18))


@pytest.mark.slow
def test_load_in_a_loop_sees_what_another_thread_block_stores():
    ready, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    CudaKernel(FILE, "volatile_flag")[2, 1](ready, out)
    assert out.item() == 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_barriers_of_some_warps(schedule):
    x, out = torch.randn(128), torch.zeros(128)
    run("pairs_of_warps", (1, 128), x, out, schedule=schedule)
    assert torch.equal(out, x.view(2, 2, 32).flip(1).reshape(-1))
    x, out = torch.randn(6, 32), torch.zeros(6, 32)
    run("produce_and_consume", (1, 64), x, out, schedule=schedule)
    assert torch.equal(out, x.flip(1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_and_tensor_cores_multiply_matrices(schedule):
    a, b, c = torch.randn(16, 64).half(), torch.randn(8, 64).half(), torch.full((16, 8), torch.nan)
    run("tensor_cores", (1, 32), a, b, c, 64, schedule=schedule)
    assert torch.allclose(c, a.float() @ b.float().T, atol=1e-5)


def test_unknown_instruction_stops_the_kernel_where_it_is_reached():
    out = torch.zeros(4, dtype=torch.int32)
    run("knows_most", (1, 4), out, 0)
    assert out.tolist() == [1] * 4
    with pytest.raises(cudascope.Finding, match=r"does not know cp\.async\.mbarrier\.arrive\.shared\.b64"):
        run("knows_most", (1, 4), out, 1)


HALVES = torch.randn(16, 64).half(), torch.randn(8, 64).half()
BUGS = {  # what is found, the instruction in whose line, the launch, the arguments
    "no_barrier": ("race", "shared.f32", (1, 64), lambda: (torch.randn(64), torch.zeros(64))),
    "reads_past_the_end": ("out of bounds", "ld.global.f32", (1, 64), lambda: (torch.randn(64), torch.zeros(64))),
    "misaligned": ("misaligned", "ld.global.v2.f32", (1, 8), lambda: (torch.randn(64), torch.zeros(64))),
    "never_waits": ("race", "ldmatrix", (1, 32), lambda: (*HALVES, torch.zeros(16, 8), 64)),
    "a_lane_stays_away": ("deadlock", "mma.sync", (1, 32), lambda: (*HALVES, torch.zeros(16, 8), 64)),
    "pairs_share_a_barrier": ("race", "out[t] = row", (1, 128), lambda: (torch.randn(128), torch.zeros(128))),
    "flag_not_released": (
        "race", "out[threadIdx.x] = data", (2, 8), lambda: tuple(torch.zeros(n, dtype=torch.int32) for n in (8, 1, 8))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found_on_its_line(name):
    what, where, launch, make = BUGS[name]
    findings = []
    for schedule in SCHEDULES:
        try:
            run(name, launch, *make(), schedule=schedule)
        except cudascope.Finding as error:
            findings.append(error)
    assert findings
    assert {error.what for error in findings} == {what}
    lines = FILE.read_text().splitlines()
    assert all(where in lines[error.line - 1] for error in findings), findings[0]


@pytest.mark.slow
def test_the_same_source_compiles_for_gpus():
    for arch in ("sm_80", "sm_90"):
        CudaKernel(FILE, "who_am_i").resources(arch)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ('asm("add.s32 %0, %1;" : "=r"(d) : "r"(x[0]));', "line 3: asm: add.s32 has 3 operands, got 2"),
        ('asm("add.s32 %0, %1, %2;" : "=r"(d) : "r"(x[0]));', "line 3: asm: %2 is no operand"),
        ('asm("{ mov.u32 %0, 1;" : "=r"(d));', "line 3: asm: a { without its }"),
        ('asm("mov.u32 %0, 1;" : "=r" d);', "line 3: asm: an operand is written"),
    ],
)
def test_statement_that_no_compiler_takes_is_refused(statement, message):
    source = f"__global__ void f(int* x) {{\n    int d = 0;\n    {statement}\n    x[0] = d;\n}}\n"
    with pytest.raises(CompileError, match=re.escape(message)):
        CudaKernel(source, "f")[1, 1](torch.zeros(1, dtype=torch.int32))
