"""Triton kernels compiled for a GPU and executed on the CPU: `triton_compiled`."""

import contextlib
import enum
import json
import linecache
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.language import constexpr
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_helpers import FACTOR, scaled

from conftest import ROOT
from cudascope import Finding, check, observe, triton_compiled
from cudascope.cpp.source import CompileError
from cudascope.ptx.module import read_module
from cudascope.triton import compiler as triton_compiler
from cudascope.triton import launches as triton_launches
from cudascope.triton.compiler import passed, specialised
from cudascope.triton.source import Description
from cudascope.triton.worker import Reader

FILE = Path(__file__)


def line_of(text):
    """The line of this file that contains `text` and then nothing but a comment."""
    (line,) = (n for n, row in enumerate(FILE.read_text().split("\n"), 1) if row.strip() == text)
    return line


@triton.jit
def add_kernel(x, y, out, n, alpha, both, third, SIZE: tl.constexpr):
    cols = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ptr, stride, scale = third
    total = tl.load(x + cols, mask=cols < n) + alpha * tl.load(y + cols, mask=cols < n)
    if both:
        total += scale * tl.load(ptr + cols * stride, mask=cols < n)
    tl.store(out + cols, scaled(total) + triton_helpers.scaled(total, 0), mask=cols < n)


@pytest.mark.slow
def test_a_kernel_gets_ints_floats_bools_tuples_constants_and_helpers_of_another_file():
    x, y, z = torch.randn(100), torch.randn(100), torch.randn(200)
    out = torch.zeros(112)
    with triton_compiled("sm_80"):
        for both in (True, False):
            add_kernel[lambda meta: (triton.cdiv(100, meta["SIZE"]),)](x, y, out, 100, 0.5, both, (z, 2, 0.25), SIZE=64)
            expected = FACTOR.value * (x + 0.5 * y + both * 0.25 * z[::2])
            torch.testing.assert_close(out[:100], expected)
            assert not out[100:].any()


@pytest.mark.slow
def test_reports_name_the_arguments_and_the_lines_of_the_python_source():
    x, out = torch.ones(128), torch.zeros(128)
    arguments = x, x, out, 128, 1.0, False, (x, 1, 1.0)
    with triton_compiled("sm_80"):
        with observe() as report:
            add_kernel[(1,)](*arguments, SIZE=128)
        with check(stop=False) as checked:
            add_kernel[(1,)](x, x, torch.zeros(96), *arguments[3:], SIZE=128)
    load = line_of("total = tl.load(x + cols, mask=cols < n) + alpha * tl.load(y + cols, mask=cols < n)")
    store = line_of("tl.store(out + cols, scaled(total) + triton_helpers.scaled(total, 0), mask=cols < n)")
    assert report.count("read", "global").bytes == report.count("read", "global", load).bytes == 2 * 128 * 4
    assert report.count("write", "global", store).bytes == 128 * 4
    assert "tl.load(x + cols" in str(report)
    assert {(f.rule, f.tensor, f.line, Path(f.file)) for f in checked.findings} == {
        ("out of bounds", "out", store, FILE)
    }


@triton.jit
def softmax_kernel(x, out, num_cols, TILE: tl.constexpr):
    x += tl.program_id(0) * num_cols
    out += tl.program_id(0) * num_cols
    cols = tl.arange(0, TILE)
    m = tl.full([TILE], float("-inf"), tl.float32)
    l = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, num_cols, TILE, num_stages=2):
        scores = tl.load(x + start + cols, mask=start + cols < num_cols, other=float("-inf")).to(tl.float32)
        new = tl.maximum(tl.maximum(m, scores), -1e30)
        l = l * tl.exp(m - new) + tl.exp(scores - new)
        m = new
    top = tl.max(m, 0)
    total = tl.sum(l * tl.exp(m - top), 0)
    for start in range(0, num_cols, TILE):
        inside = start + cols < num_cols
        scores = tl.load(x + start + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + start + cols, (tl.exp(scores - top) / total).to(out.dtype.element_ty), mask=inside)


@pytest.mark.slow
@pytest.mark.parametrize("num_warps", [1, 4])
def test_a_softmax_with_a_pipelined_loop_equals_torchs(num_warps):
    x = torch.randn(3, 150, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    with triton_compiled("sm_80"), check(outputs=[out], ignore=("same value",)):
        softmax_kernel[(3,)](x, out, 150, TILE=64, num_warps=num_warps)
    torch.testing.assert_close(out, x.float().softmax(-1).to(x.dtype))


@triton.jit
def matmul_kernel(a, b, out, M, N, K, TILE: tl.constexpr):
    (a, a_row, a_col), (b, b_row, b_col), (out, out_row) = a, b, out
    rows, cols = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, TILE)
    acc = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K, TILE):
        k = start + inner
        a_tile, in_a = a + rows[:, None] * a_row + k[None, :] * a_col, (rows < M)[:, None] & (k < K)[None, :]
        b_tile, in_b = b + k[:, None] * b_row + cols[None, :] * b_col, (k < K)[:, None] & (cols < N)[None, :]
        x = tl.load(a_tile, mask=in_a, other=0.0)
        y = tl.load(b_tile, mask=in_b, other=0.0)
        acc = tl.dot(x, y, acc)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out + rows[:, None] * out_row + cols[None, :], acc, mask=mask)


def matmul(arch="sm_80", tile=32, edit=None):
    a, b = torch.randn(40, 80, dtype=torch.float16), torch.randn(80, 32, dtype=torch.float16)
    out = torch.empty(40, 32)
    arguments = (a, *a.stride()), (b, *b.stride()), (out, 32)
    with triton_compiled(arch, edit=edit):
        compiled = matmul_kernel[2, 1](*arguments, 40, 32, 80, TILE=tile, num_stages=3, num_warps=tile // 16)
    return out, a.float() @ b.float(), compiled


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "tile", "instruction"), [("sm_80", 32, "mma.sync"), ("sm_90", 64, "wgmma.mma_async")])
def test_a_product_on_tensor_cores_equals_torchs_and_has_no_findings(arch, tile, instruction):
    with check(stop=False, ignore=("same value",)) as report:
        out, expected, compiled = matmul(arch, tile)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=1e-3)
    # Triton 3.6 writes no fence between an asynchronous copy and the wgmma that reads it. 3.7 writes it.
    is_without = arch == "sm_90" and triton.__version__.startswith("3.6.")
    assert all(is_without and "no fence.proxy.async" in str(finding) for finding in report.findings)
    assert all(each in compiled.ptx for each in (instruction, "cp.async.wait_group"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instruction", "number", "rule"), [("cp.async.wait_group", 0, "copy in flight"), ("bar.sync", 2, "race")]
)
def test_an_instruction_left_out_of_the_ptx_is_found_at_a_line_of_the_kernel(instruction, number, rule):
    def without(ptx):
        found = [*re.finditer(rf"^\s*{re.escape(instruction)}[^;]*;", ptx, re.MULTILINE)][number]
        return ptx[: found.start()] + ptx[found.end() :]

    with check(stop=False, ignore=("same value",)) as report:
        matmul(edit=without)
    loads = line_of("x = tl.load(a_tile, mask=in_a, other=0.0)"), line_of("y = tl.load(b_tile, mask=in_b, other=0.0)")
    assert {(f.rule, f.line) for f in report.findings} == {(rule, line) for line in loads}
    assert re.search(r"ldmatrix|cp\.async", str(report.findings[0]))


@triton.jit(noinline=True)
def next_but_one(n):
    return n + 2


@triton.jit
def talking_kernel(x, out, n, SIZE: tl.constexpr):
    cols = tl.arange(0, SIZE)
    values = tl.load(x + cols)
    tl.device_assert(n > 3, "n is small")
    tl.device_print("value", values)
    tl.store(out + cols, values + next_but_one(n))


@pytest.mark.slow
def test_a_kernel_calls_a_function_prints_and_asserts(capsys):
    x, out = torch.arange(32), torch.zeros(32, dtype=torch.int64)
    with triton_compiled("sm_80"):
        talking_kernel[(1,)](x, out, 5, SIZE=32, num_warps=1, debug=True)
        assert out.equal(x + 7)
        assert "pid (0, 0, 0) idx (31) value: 31\n" in capsys.readouterr().out
        with pytest.raises(Finding, match="assertion failed: n is small") as found:
            talking_kernel[(1,)](x, out, 2, SIZE=32, num_warps=1, debug=True)
    assert found.value.line == line_of('tl.device_assert(n > 3, "n is small")')


@triton.autotune([triton.Config({"SIZE": 256}, num_warps=2), triton.Config({"SIZE": 64}, num_warps=1)], key=["n"])
@triton.heuristics({"IS_EVEN": lambda arguments: arguments["n"] % arguments["SIZE"] == 0})
@triton.jit
def histogram_kernel(x, counts, total, n, weights, SIZE: tl.constexpr, IS_EVEN: tl.constexpr):
    cols = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = cols >= 0 if IS_EVEN else cols < n
    values = tl.load(x + cols, mask=inside, other=0)
    tl.atomic_add(counts + values, 1, mask=inside, sem="relaxed")
    if weights is not None:
        values *= tl.load(weights + values, mask=inside, other=0)
    tl.atomic_add(total, tl.sum(tl.where(inside, values, 0)))


@pytest.mark.slow
def test_atomics_in_an_autotuned_kernel_with_heuristics():
    x, counts, total = torch.randint(10, (300,)), torch.zeros(10, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    grid = lambda meta: (triton.cdiv(300, meta["SIZE"]),)  # noqa: E731
    with triton_compiled("sm_80"), observe() as report:
        compiled = histogram_kernel[grid](x, counts, total, 300, None)
    assert counts.tolist() == x.bincount(minlength=10).tolist()
    assert total.item() == x.sum().item()
    assert compiled.num_warps == 2, "the first configuration"
    assert report.launches[0].grid == (2, 1, 1)
    assert not histogram_kernel.cache, "nothing was timed"


def test_a_configuration_that_does_not_fit_the_gpu_is_passed_over_and_a_cached_one_is_taken():
    launches = []

    class Kernel:
        def run(self, *args, **options):
            launches.append(options["SIZE"])
            if options["SIZE"] == 1024:
                raise OutOfResources(2, 1, "shared memory")

    large, small, best = (triton.Config({"SIZE": size}) for size in (1024, 64, 128))
    tuner = triton.autotune([large, small, best], key=["n"])(histogram_kernel.fn.fn)
    tuner.fn = Kernel()
    with triton_compiled("sm_80"):
        tuner[(1,)](torch.zeros(1), None, None, 5, None)
        tuner.cache[5, "torch.float32"] = best
        tuner[(1,)](torch.zeros(1), None, None, 5, None)
        assert launches == [1024, 64, 128]
        tuner.configs = [large]
        with pytest.raises(OutOfResources):
            tuner[(1,)](torch.zeros(1), None, None, 5, None)


@triton.jit
def transpose_kernel(x, out, M, N, TILE: tl.constexpr):
    source = x if isinstance(x, tl.tensor_descriptor) else tl.make_tensor_descriptor(x, [M, N], [N, 1], [TILE, TILE])
    target = tl.make_tensor_descriptor(out, [N, M], [M, 1], [TILE, TILE])
    row, col = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    target.store([col, row], source.load([row, col]).T)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "from_host"), [("sm_80", False), ("sm_90", True)])
def test_a_kernel_with_tensor_descriptors(arch, from_host):
    x, out = torch.randn(24, 36), torch.zeros(36 * 24 + 100)
    source = TensorDescriptor.from_tensor(x, [16, 16]) if from_host else x
    with triton_compiled(arch), check(ignore=("same value",)):
        compiled = transpose_kernel[2, 3](source, out, 24, 36, TILE=16, num_warps=1)
    assert ("cp.async.bulk.tensor" in compiled.ptx) == (arch == "sm_90")
    assert torch.equal(out[: 36 * 24].view(36, 24), x.T)
    assert not out[36 * 24 :].any()


class Vector(NamedTuple):
    ptr: Any
    length: Any


@triton.constexpr_function
def log_2(n):
    return int(math.log2(n))


@triton.jit
def square(x):
    return x * x


HALVES = torch.finfo(torch.float16)


class Mode(enum.IntEnum):
    PLAIN = 0
    SQUARE = 1


@triton.jit
def halved(x, LEAST: constexpr = HALVES.min, half=HALVES.eps * 512):
    return tl.maximum(x * half, LEAST)


@triton.jit
def double(
    vector, out, f: tl.constexpr, half: tl.float16, SHAPE: constexpr, MODE: constexpr, MOST: constexpr = HALVES.max
):
    SIZE: constexpr = SHAPE[0]
    cols = tl.arange(0, SIZE)
    values = tl.load(vector.ptr + cols, mask=cols < vector.length, other=0.0)
    if MODE >= 1:
        values = 2 * halved(tl.minimum(f(values), MOST))
    tl.store(out + cols, tl.cumsum(values + log_2(SIZE), 0) + half)


@pytest.mark.slow
def test_a_kernel_with_named_tuples_functions_shapes_and_enums_as_arguments_and_the_name_of_a_type_of_cpp():
    x, out = torch.randn(40), torch.empty(64)
    with triton_compiled("sm_75"), check(outputs=[out], ignore=("same value",)):
        double[1,](Vector(x, 40), out, square, 0.3, out.shape, Mode.SQUARE, num_warps=1)
    expected = torch.cat([x * x, torch.zeros(24)]).add(6).cumsum(0) + torch.tensor(0.3).half().item()
    torch.testing.assert_close(out, expected)


class Filling(NamedTuple):
    ptr: Any
    value: Any = 3


@triton.jit
def fill_kernel(x, SIZE: tl.constexpr):
    filling = Filling(x)
    tl.store(filling.ptr + tl.arange(0, SIZE), filling.value)


@pytest.mark.slow
def test_a_kernel_that_makes_a_named_tuple_with_defaults():
    x = torch.zeros(32)
    with triton_compiled("sm_80"), check(outputs=[x]):
        fill_kernel[1,](x, 32, num_warps=1)
    assert x.tolist() == [3.0] * 32


@triton.jit
def in_place_kernel(x, out, TILE: tl.constexpr, FIRST: tl.constexpr):
    cols = tl.arange(0, TILE)
    if FIRST:
        first = tl.load(x)
        tl.store(out + cols, first + cols)
        tl.store(x, first + 1)
    else:
        tl.store(x + cols, 2 * tl.load(x + cols))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
def test_a_late_load_of_a_thread_that_stores_nothing_is_no_race(seed):
    x = torch.ones(64)  # 128 threads: two load each element, one of them stores
    with triton_compiled("sm_80"), check(schedule=seed, ignore=("same value",)):
        in_place_kernel[1,](x, x, 64, False)
    assert x.tolist() == [2.0] * 64


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
def test_a_late_load_of_a_thread_that_stores_what_it_has_loaded_is_a_race(seed):
    x, out = torch.ones(1), torch.zeros(128)
    with triton_compiled("sm_80"), check(schedule=seed, stop=False, ignore=("same value",)) as report:
        in_place_kernel[1,](x, out, 128, True)
    load, store = line_of("first = tl.load(x)"), line_of("tl.store(x, first + 1)")
    assert {(f.rule, f.tensor, f.line) for f in report.findings} <= {("race", "x", load), ("race", "x", store)}
    assert report.findings


# ------------------------------------------------------------------------------------------------ specialisation


@triton.jit(do_not_specialize=["fixed"], do_not_specialize_on_alignment=["loose"])
def any_kernel(x, fixed, loose, typed: tl.int64, SIZE: tl.constexpr):
    pass


@pytest.mark.parametrize(
    ("argument", "kind", "is_aligned"),
    [
        (torch.zeros(8), "*fp32", True),
        (torch.zeros(8)[1:], "*fp32", False),
        (torch.zeros(8, dtype=torch.bool), "*u1", True),
        (torch.zeros(8, dtype=torch.float8_e5m2), "*fp8e5", True),
        (triton.reinterpret(torch.zeros(8, dtype=torch.int8), tl.float8e5), "*fp8e5", True),
        (1, "constexpr", False),
        (7, "i32", False),
        (32, "i32", True),
        (2**31, "i64", True),
        (2**63, "u64", True),
        (True, "u1", False),
        (1.0, "fp32", False),
        (None, "constexpr", False),
        ((torch.zeros(1), 1, (8, 64)), ("*fp32", "constexpr", ("i32", "i32")), True),
    ],
)
def test_arguments_are_specialised_as_for_a_gpu(argument, kind, is_aligned):
    launch = specialised(any_kernel, 80, (argument, 1, 64, 1, 4), {})
    _, *described = json.loads(launch.request)["kernel"]
    signature, constants, attributes, _ = map(Reader([]).value, described)
    assert signature == {"x": kind, "fixed": "i32", "loose": "i32", "typed": "i64", "SIZE": "constexpr"}
    assert constants[4,] == 4
    assert any(path[0] == 0 and each == [["tt.divisibility", 16]] for path, each in attributes.items()) == is_aligned
    assert not attributes.get((2,))


# ------------------------------------------------------------------------------------------------ where kernels live

SOURCE = """
import triton
import triton.language as tl

WIDTH = tl.constexpr({width})

@triton.jit
def step(n):
    return 1 + again(n - 1) if n > 0 else WIDTH

@triton.jit
def again(n):
    return step(n)

@triton.jit
def kernel(out, n: tl.constexpr):
    tl.store(out, step(n))
"""


def executed(width):
    """The kernel of a text that is in no file, as a cell of a notebook is."""
    text, file = SOURCE.format(width=width), f"<cell {width}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    scope = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), scope)
    return scope["kernel"]


@pytest.mark.slow
def test_a_kernel_of_a_text_and_functions_that_need_each_other():
    out = torch.zeros(1, dtype=torch.int32)
    compiled = []
    with triton_compiled("sm_80"):
        compiled += [executed(5).warmup(out, 2, grid=(1,)), executed(7).warmup(out, 2, grid=(1,))]
    assert [re.search(r"mov\.b32\s+%r\d+, (\d+);", each.ptx)[1] for each in compiled] == ["7", "9"]
    assert "<cell 5>" in compiled[0].ptx


@pytest.mark.slow
def test_a_kernel_is_executed_in_the_same_way_where_triton_is_not_interpreted():
    code = "import test_triton_compiled as t; print(type(t.add_kernel).__name__); t." + (
        "test_a_kernel_gets_ints_floats_bools_tuples_constants_and_helpers_of_another_file()"
    )
    path = os.pathsep.join(map(str, (ROOT / "src", FILE.parent, ROOT / "tests")))  # tests/cudascope is no package
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("JITFunction\n", 0), done.stderr


@pytest.mark.slow
def test_a_second_run_needs_no_second_process(monkeypatch):
    x = torch.ones(64)

    def run():
        out = torch.empty(64)
        with triton_compiled("sm_80"):
            add_kernel[(1,)](x, x, out, 64, 1.0, False, (x, 1, 1.0), SIZE=64)
        return out

    run()
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(triton_compiler, "_compiled", {})
    assert run().tolist() == [6.0] * 64


@triton.jit
def logarithm_kernel(x, SIZE: tl.constexpr):
    cols = tl.arange(0, SIZE)
    tl.store(x + cols, tl.log(tl.load(x + cols)))


@pytest.mark.slow
def test_the_string_that_libdevice_leaves_is_no_variable_of_the_kernel():
    """A kernel with variables is built twice to be checked."""
    with triton_compiled("sm_80"):
        compiled = logarithm_kernel.warmup(torch.ones(32), 32, num_warps=1, grid=(1,))
    assert {each.space for each in read_module(compiled.ptx).variables} <= {"shared"}


def test_a_string_that_an_instruction_names_stays_and_lines_keep_their_numbers():
    unused, used = (f".global .align 1 .b8 {name}[2] = {{95, 0}};" for name in ("_$_str", "_$_str_$_1"))
    rest = "mov.u64 %rd1, _$_str_$_1;"
    assert triton_compiler.without_unused_strings(f"{unused}\n{used}\n{rest}") == f"\n{used}\n{rest}"


# ------------------------------------------------------------------------------------------------ contexts and errors


@triton.jit
def one_kernel(out):
    tl.store(out, 1)


@pytest.fixture
def launches(monkeypatch):
    """The architectures for which kernels are launched here; nothing is compiled."""
    seen = []

    def compiled_kernel(launch):
        seen.append(launch.sm)
        raise CompileError("enough")

    monkeypatch.setattr(triton_launches, "compiled_kernel", compiled_kernel)
    return seen


def launch():
    """ "compiled", or "interpreted" if the kernel has run in Triton's interpreter."""
    out = torch.zeros(1)
    with contextlib.suppress(CompileError):
        one_kernel[(1,)](out)
    return "interpreted" if out.item() else "compiled"


def test_contexts_nest_and_outside_of_them_triton_does_what_it_did(launches):
    before = [owner.run for owner in (JITFunction, InterpretedFunction, Autotuner)]
    with triton_compiled("sm_80"):
        assert launch() == "compiled"
        with contextlib.suppress(KeyError), triton_compiled("sm_90"):
            launch()
            raise KeyError
        launch()
    assert launches == [80, 90, 80]
    assert before == [owner.run for owner in (JITFunction, InterpretedFunction, Autotuner)]
    assert launch() == "interpreted"


def test_inside_the_active_driver_describes_a_gpu_of_the_architecture():
    before = triton.runtime.driver.__class__.active
    for sm, shared in ((80, 166912), (90, 232448)):
        with triton_compiled(f"sm_{sm}"):
            active = triton.runtime.driver.active
            assert active.get_current_target() == GPUTarget("cuda", sm, 32)
            assert active.get_active_torch_device() == torch.zeros(1).device
            assert active.utils.get_device_properties(active.get_current_device())["max_shared_mem"] == shared
            with pytest.raises(AttributeError, match=r"has no GPU: .* utils, but not get_current_stream"):
                active.get_current_stream(0)
    assert triton.runtime.driver.__class__.active is before


def test_another_thread_is_not_concerned_and_may_stay_inside_for_longer(launches):
    is_inside, may_leave, found = threading.Event(), threading.Event(), []

    def work():
        found.append(launch())
        with triton_compiled("sm_75"):
            is_inside.set()
            may_leave.wait(60)
            found.append(launch())

    thread = threading.Thread(target=work)
    with triton_compiled("sm_80"):
        thread.start()
        assert is_inside.wait(60)
        launch()
    assert launch() == "interpreted"
    may_leave.set()
    thread.join()
    assert found == ["interpreted", "compiled"]
    assert launches == [80, 75]


@pytest.mark.slow
def test_hooks_run_before_a_launch_and_an_empty_grid_launches_nothing():
    kernel, seen, out = triton.jit(one_kernel.fn), [], torch.zeros(1)
    kernel.add_pre_run_hook(lambda *arguments, **options: seen.append((arguments, options["num_warps"])))
    with triton_compiled("sm_80"):
        kernel[(0,)](out, num_warps=1)
        assert seen == [((out,), 1)]
        assert not out.item()
        kernel[(1,)](out, num_warps=1)
    assert out.item() == 1


@triton.jit
def wrong_kernel(out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), missing)


@pytest.mark.slow
def test_a_kernel_that_needs_more_shared_memory_than_the_gpu_has_is_refused_as_on_a_gpu(monkeypatch):
    monkeypatch.setitem(triton_launches.SHARED_BYTES, 80, 4096)
    with pytest.raises(OutOfResources, match="shared memory, Required: 8192, Hardware limit: 4096"):
        matmul()


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: triton_compiled("sm_81").__enter__(), ValueError, "arch must be one of sm_75, .* got 'sm_81'"),
        (lambda: triton_compiled(edit="x").__enter__(), TypeError, "edit must be a function of the PTX, got 'x'"),
        (
            lambda: one_kernel[1](torch.zeros(1)),
            TypeError,
            "one_kernel: the grid must be a tuple of 1 to 3 ints, got 1",
        ),
        (lambda: one_kernel[1.5,](torch.zeros(1)), TypeError, "one_kernel: grid must be made of ints"),
        (
            lambda: one_kernel[1,](torch.zeros(1, device="meta")),
            ValueError,
            "one_kernel: out must be on the CPU or a GPU, got meta",
        ),
        (lambda: one_kernel[1,](torch.zeros(1), num_warp=4), KeyError, "num_warp was specified but unrecognised"),
        (lambda: one_kernel[1,](), TypeError, "missing 1 required positional argument: 'out'"),
        (lambda: wrong_kernel[1,](torch.zeros(8), SIZE=8), CompileError, r"(?s)wrong_kernel .* sm_80.*missing is not"),
        (lambda: one_kernel.warmup(torch.zeros(1), grid=(1,)).module, AttributeError, "one_kernel was .* not module"),
        (lambda: one_kernel[1,](torch.zeros(1), num_ctas=2), ValueError, "num_ctas > 1 requires NVIDIA SM90"),
    ],
)
def test_a_wrong_launch_is_refused_in_a_sentence(call, error, sentence):
    with triton_compiled("sm_80"), pytest.raises(error, match=sentence):
        call()


# ------------------------------------------------------------------------------------------------ descriptions


def _described(kernel):
    description = Description()
    description.value(kernel)
    return description


@pytest.mark.parametrize(("owner", "name"), [(sys.modules[__name__], "scaled"), (triton_helpers, "scaled")])
def test_a_description_lasts_until_the_kernel_reads_another_object(owner, name, monkeypatch):
    description = _described(add_kernel)
    assert description.is_current()
    monkeypatch.setattr(owner, name, triton.jit(triton_helpers.scaled.fn))
    assert not description.is_current()
    assert _described(add_kernel).is_current()


def test_a_description_lasts_until_a_variable_of_a_closure_changes():
    factor = constexpr(2)

    @triton.jit
    def kernel(out):
        tl.store(out, factor)

    description = _described(kernel)
    assert description.is_current()
    factor = constexpr(3)
    assert not description.is_current()
    assert description.functions != _described(kernel).functions
    del factor
    assert not description.is_current()


def test_a_description_ends_where_a_missing_name_appears(monkeypatch):
    @triton.jit
    def kernel(out):
        tl.store(out, appears_later)

    description = _described(kernel)
    assert description.is_current()
    monkeypatch.setitem(globals(), "appears_later", constexpr(1))
    assert not description.is_current()


TABLE = [1, 2]


def test_a_kernel_that_reads_a_list_is_described_at_each_launch():
    @triton.jit
    def kernel(out):
        tl.store(out, TABLE[0])

    assert not _described(kernel).is_current()


@pytest.mark.slow
def test_a_warm_launch_describes_its_kernel_no_more(monkeypatch):
    x, out = torch.randn(64), torch.zeros(64)
    described, counts = [], []
    monkeypatch.setattr(triton_compiler, "_views", {})  # as if no kernel had been launched
    real = Description._described
    monkeypatch.setattr(Description, "_described", lambda self, *args: described.append(args) or real(self, *args))
    with triton_compiled("sm_80"):
        for _ in range(3):
            add_kernel[(1,)](x, x, out, 64, 1.0, False, (x, 1, 1.0), SIZE=64)
            counts.append(len(described))
    assert counts[0] == counts[2] > 0


@pytest.mark.parametrize("size", [64, 192, 4096])
def test_scratch_memory_starts_where_a_tensor_map_may_lie(size):
    kept = [passed("k", (), {}, ("scratch", "profile"), (size, 0), (3, 1, 1)) for _ in range(8)]
    assert all(scratch.nbytes == 3 * size and profile is None for scratch, profile in kept)
    assert [scratch.ctypes.data % 128 for scratch, _ in kept] == [0] * 8
