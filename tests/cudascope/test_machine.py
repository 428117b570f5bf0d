"""A kernel does the same on each machine: the runner's own code for x86-64 and for aarch64, on the machine at hand."""

import contextlib
import platform
from pathlib import Path

import numpy as np
import pytest

from cudascope import CudaKernel, Finding, check
from cudascope.cpp.source import CompileError
from cudascope.toolchain.compiler import find_compiler, machine_options

FILE = Path(__file__).with_name("machine.cu")
MODES = pytest.mark.parametrize("mode", [contextlib.nullcontext, check], ids=["plain", "check"])


def run(name: str, block: int, *args: object) -> None:
    CudaKernel(FILE, name)[1, block](*args)


# ------------------------------------------------------------------------------------------------ the compiler


@pytest.fixture
def on(monkeypatch):
    return lambda machine: monkeypatch.setattr(platform, "machine", lambda: machine)


def test_a_machine_without_a_runtime_is_refused_and_so_is_clang_on_aarch64(on):
    on("riscv64")
    with pytest.raises(CompileError, match="needs an x86-64 or aarch64 machine, and this one is riscv64"):
        find_compiler()
    on("aarch64")
    with pytest.raises(CompileError, match=r"needs g\+\+ on aarch64, .* is /usr/bin/clang\+\+: set CXX=g\+\+"):
        machine_options("/usr/bin/clang++")


def test_each_machine_has_its_own_options_and_builds(on, monkeypatch):
    monkeypatch.setenv("CXX", "g++")
    on("x86_64")
    assert machine_options("/usr/bin/g++") == machine_options("/usr/bin/clang++") == ()
    identity = find_compiler()[1]
    on("aarch64")
    assert {"-fsigned-char", "-mtls-dialect=trad"} <= set(machine_options("/usr/bin/g++"))
    assert find_compiler()[1] != identity


# ------------------------------------------------------------------------------------------------ registers


@MODES
def test_a_thread_has_its_registers_back_after_a_barrier(mode):
    x, n = np.linspace(0.1, 6.4, 64), np.arange(64) + 5
    sums, products = np.zeros(64), np.zeros(64, np.int64)
    with mode():
        run("keep_registers", 64, x, n, sums, products)
    a, b, c = x, x + 1, x * 3
    d, e = a * b, b * c
    f, g = c * d, d + e
    once = a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * (e - f) + 9 * (f + g) + 10 * (g * 0.5)
    assert np.array_equal(sums, once + once + once)
    k, l, m = n, n + 1, n * 3
    o, p = k * l, l ^ m
    q, r = m + o, o ^ p
    s, u = p + q, q ^ r
    assert np.array_equal(
        products, 3 * (k + 2 * l + 3 * m + 4 * o + 5 * p + 6 * q + 7 * r + 8 * s + 9 * u + 10 * (r + s))
    )


@pytest.mark.slow
def test_a_rounding_mode_stays_with_its_thread():
    nearest, wrong = np.zeros(64), np.zeros(64, np.int32)
    run("take_turns_rounding", 64, 100_000_000, nearest, wrong)
    assert nearest.tolist() == [1 / 3] * 64
    assert not wrong.any()


# ------------------------------------------------------------------------------------------------ numbers


def test_a_char_has_a_sign():
    x, out = np.array([127, -128, -1], np.int8), np.zeros(3, np.int32)
    run("signed_char", 3, x, out)
    assert out.tolist() == [63, -64, -1]


def test_a_product_and_a_sum_are_rounded_one_by_one():
    x, out = np.array([1 + 2**-12, 1 + 2**-12, -1], np.float32), np.zeros(3, np.float32)
    run("no_contraction", 1, x, out)
    assert out.tolist() == [2**-11, 2**-11, 2**-11 + 2**-24]


INTEGERS = pytest.mark.parametrize(
    ("name", "kind", "function"),
    [
        ("divide_i32", "i4", lambda a, b: int(a / b)),
        ("divide_u32", "u4", lambda a, b: a // b),
        ("divide_i64", "i8", lambda a, b: int(a / b)),
        ("divide_u64", "u8", lambda a, b: a // b),
        ("remain_i32", "i4", lambda a, b: a - b * int(a / b)),
        ("remain_i64", "i8", lambda a, b: a - b * int(a / b)),
    ],
)


@INTEGERS
@MODES
def test_integers_are_divided(name, kind, function, mode):
    negative = kind[0] == "i"
    least = -(1 << 8 * int(kind[1]) - 1)
    pairs = [(7, 2), (0, 5), *([(-7, 2), (7, -2), (-7, -1), (7, -1), (least, 1), (least, 2)] if negative else [])]
    a, b = (np.array(values, kind) for values in zip(*pairs, strict=True))
    out = np.zeros(len(pairs), kind)
    with mode():
        run(name, len(pairs), a, b, out)
    assert out.tolist() == [function(*pair) for pair in pairs]


@INTEGERS
@MODES
def test_a_division_without_a_result_is_found(name, kind, function, mode):
    least = -(1 << 8 * int(kind[1]) - 1)
    for a, b in [(7, 0), (0, 0), *([(least, -1)] if kind[0] == "i" else [])]:
        with pytest.raises(Finding) as caught, mode():
            run(name, 2, np.array([6, a], kind), np.array([3, b], kind), np.zeros(2, kind))
        assert (caught.value.rule, tuple(caught.value.thread)) == ("division by zero", (1, 0, 0))
        text = FILE.read_text().splitlines()[caught.value.line - 1]
        assert "__device__ void divide(" in text or "__device__ void remain(" in text


def test_a_comparison_around_a_division_keeps_its_result():
    out = np.zeros(3, np.int32)
    run("compare_around_division", 3, np.array([4, 8, 9], "i4"), np.array([8, 8, 4], "i4"), out)
    assert out.tolist() == [-1, 11, 102]


# ------------------------------------------------------------------------------------------------ faults and memory


@MODES
def test_a_trap_names_its_thread_and_line(mode):
    with pytest.raises(Finding) as caught, mode():
        run("stop_itself", 8, np.zeros(8, np.int32))
    assert (caught.value.rule, tuple(caught.value.thread)) == ("trap", (3, 0, 0))
    assert "__builtin_trap" in FILE.read_text().splitlines()[caught.value.line - 1]


def test_a_thread_has_512_kb_of_local_memory_and_no_more():
    out = np.zeros(2, np.int32)
    run("use_stack", 2, out, 41)  # 42 frames of 12345 bytes
    assert out.tolist() == [41, 41]
    for depth in range(55, 80):
        with pytest.raises(Finding, match="overflows its stack"):
            run("use_stack", 2, out, depth)


@MODES
def test_variables_of_the_file_keep_apart(mode):
    out = np.zeros(7, np.int32)
    with mode():
        run("use_variables", 1, out)
    expected = [(10 + i) * (i < 3) + 100 * (20 + i) * (i < 5) + 10000 * (30 + i) for i in range(7)]
    assert out.tolist() == expected


@MODES
def test_memory_of_a_kernel_is_the_runtimes(mode):
    out = np.zeros(2, np.int32)
    with mode():
        run("allocate", 2, out)
    assert out.tolist() == [12, 12]
