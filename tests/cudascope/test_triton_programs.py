"""Programs around Triton kernels: constant functions, questions about the GPU, arguments that are no tensors."""

import math
import subprocess
import sys
import textwrap
import threading
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from covering import one_in_three

from cudascope import Finding, PtxKernel, check, triton_compiled
from cudascope.toolchain.ptxas import resources_of

# ------------------------------------------------------------------------------------------------ constant functions


def doubled(n):
    return 2 * n


UNIT = doubled(8)


@tl.constexpr
def least_of(dtype: tl.constexpr):
    dtype = dtype.value if isinstance(dtype, tl.constexpr) else dtype
    return -math.inf if dtype.is_floating() else -(1 << dtype.primitive_bitwidth - 1)


@tl.constexpr
def rounded_up(n, unit=UNIT):
    return doubled((n + unit - 1) // unit * unit) // 2


@triton.constexpr_function
def chosen(n):
    return 32 if n > 3 else 3


ceil_of, THIRD = tl.constexpr(math.ceil), tl.constexpr(lambda n: n // 3)


@triton.jit
def inner(x, KIND: tl.constexpr):
    return tl.where(x > least_of(KIND), x, 7)


@triton.jit
def constants_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, 32)
    value = tl.load(x + i, mask=i < N, other=least_of(x.dtype.element_ty))
    tl.store(out + i, inner(value, x.dtype.element_ty) + rounded_up(N) + chosen(2) + chosen(N) + ceil_of(0.5))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", one_in_three([torch.int16, torch.float32]))
def test_a_function_in_a_constexpr_is_called_by_the_compiler(dtype):
    x, out = torch.arange(32).to(dtype), torch.zeros(32, dtype=dtype)
    with triton_compiled("sm_80"):
        constants_kernel[(1,)](x, out, N=20)
    expected = torch.where(torch.arange(32) < 20, x, 7) + 32 + 3 + 32 + 1
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.slow
def test_a_closure_and_a_method_of_a_constant_function():
    unit = 5

    @tl.constexpr
    def times_unit(n):
        return n * unit

    @triton.jit
    def kernel(out):
        tl.store(out, times_unit(4))

    out = torch.zeros(1, dtype=torch.int32)
    with triton_compiled("sm_80"):
        kernel[(1,)](out)
        assert out.item() == 20
        unit = 6
        kernel[(1,)](out)
    assert out.item() == 24


@pytest.mark.slow
def test_functions_of_a_script_are_known_to_the_compiler(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import torch, triton, triton.language as tl
            from cudascope import triton_compiled

            def halved(n):
                return n // 2

            @tl.constexpr
            def of_constexpr(n):
                return halved(n)

            @triton.constexpr_function
            def of_function(n):
                return n // 2 + 1

            @triton.jit
            def kernel(out):
                tl.store(out, of_constexpr(10) + of_function(20))

            out = torch.zeros(1, dtype=torch.int32)
            with triton_compiled("sm_80"):
                kernel[(1,)](out)
            print(out.item())
        """)
    )
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert done.stdout == "16\n", done.stderr


# ------------------------------------------------------------------------------------------------ questions

QUERIES = (
    "current_device",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "synchronize",
    "_DeviceGuard",
    "device",
    "set_device",
)


def asked():
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (
        torch.cuda.get_device_capability(),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


def test_torch_describes_a_gpu_of_the_architecture_inside_and_nothing_outside():
    before = [getattr(torch.cuda, name) for name in QUERIES]
    with triton_compiled("sm_80"):
        assert asked() == ((8, 0), 108, 166912)
        with triton_compiled("sm_90"):
            assert asked() == ((9, 0), 132, 232448)
            assert triton.runtime.driver.active.get_device_interface().get_device_capability(0) == (9, 0)
            assert triton.runtime.driver.active.get_device_capability(0) == (9, 0)
        assert asked()[0] == (8, 0)
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
        assert torch.cuda.get_device_name() == "A100"
    assert before == [getattr(torch.cuda, name) for name in QUERIES]
    with pytest.raises(AssertionError, match="not compiled with CUDA"):
        asked()


def test_a_device_of_the_cpu_may_be_selected_inside():
    with triton_compiled("sm_80"):
        for device in (torch.device("cpu"), 0, None, torch.zeros(1).device.index):
            with torch.cuda.device(device) as nothing:
                assert nothing is None
            torch.cuda.synchronize(device)
        with torch.cuda._DeviceGuard(torch.zeros(1).device.index):  # in programs that were generated
            torch.cuda.set_device(0)
        inside = torch.cuda.device
        assert issubclass(inside, torch.cuda.device)
        with pytest.raises(KeyError), torch.cuda.device("cpu"):
            raise KeyError
    with pytest.raises(ValueError, match="Expected a cuda device"):
        inside("cpu")  # kept by a program, and used outside


def test_another_thread_gets_torchs_own_answers():
    found = []

    def ask():
        try:
            found.append(asked())
        except AssertionError as error:
            found.append(str(error))

    with triton_compiled("sm_80"):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        ask()
    assert found == ["Torch not compiled with CUDA enabled", ((8, 0), 108, 166912)]


def test_with_a_gpu_torch_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    with triton_compiled("sm_80"):
        assert torch.cuda.current_device() == 5


# ------------------------------------------------------------------------------------------------ what was compiled


@triton.jit
def sum_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out, tl.sum(tl.load(x + i), 0))


@pytest.mark.slow
def test_a_compiled_kernel_tells_what_tritons_own_does():
    x, out = torch.arange(256.0), torch.zeros(1)
    with triton_compiled("sm_80"):
        warm = sum_kernel.warmup(x, out, SIZE=256, num_warps=2, grid=(1,))
        warm._init_handles()
        launched = sum_kernel[(1,)](x, out, SIZE=256, num_warps=2)
    assert out.item() == x.sum()
    assert launched is warm
    assert (warm.metadata.shared, warm.metadata.num_warps, warm.metadata.name) == (warm.shared, 2, "sum_kernel")
    assert (warm.metadata.target.arch, warm.metadata.num_stages) == (80, 3)
    assert warm.metadata._asdict()["num_ctas"] == 1
    assert list(warm.asm) == ["ttir", "ttgir", "llir", "ptx"]
    assert ".visible .entry sum_kernel" in warm.asm["ptx"]
    assert "ttg.num-warps" in warm.asm["ttgir"]
    assert warm.n_regs == resources_of(PtxKernel(warm.ptx).executable.ptx.text, 80).registers > 0
    assert warm.n_spills == 0


@triton.jit
def product_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(x + at)
    tl.store(out + at, tl.dot(tile, tile))


@triton.jit
def softmax_kernel(x, y, out, COLS: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, COLS)
    values = tl.load(x + row * COLS + cols)
    weights = tl.exp(values - tl.max(values, 0))
    other = tl.load(y + cols, mask=cols < 5)  # 0 elsewhere
    tl.store(out + row * COLS + cols, weights / tl.sum(weights, 0) + other)


@pytest.mark.slow
@pytest.mark.parametrize("arch", one_in_three(["sm_100", "sm_80", "sm_120"]))
def test_a_softmax_runs_for_every_architecture(arch):
    x, y, out = torch.randn(3, 128), torch.ones(128), torch.zeros(3, 128)
    with triton_compiled(arch), check():
        softmax_kernel[(3,)](x, y, out, COLS=128)
    torch.testing.assert_close(out, x.softmax(-1) + (torch.arange(128) < 5))


@pytest.mark.slow
def test_a_product_for_sm_100_is_refused_with_the_reason():
    x, out = torch.zeros(64, 64, dtype=torch.float16), torch.zeros(64, 64)
    sentence = r"kernel product_kernel, .*test_triton_programs.*tcgen05.* an instruction of tensor memory \(sm_100\)"
    with triton_compiled("sm_100"), pytest.raises(ValueError, match=sentence):
        product_kernel[(1,)](x, out, SIZE=64)


@triton.jit
def halves_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.where(a > b, a, b))
    tl.store(out + SIZE + i, a + b)
    tl.store(out + 2 * SIZE + i, tl.where(a != a, b, a))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "arch"), one_in_three(list(product([torch.float16, torch.bfloat16, torch.int16], ["sm_80", "sm_90"])))
)
def test_pairs_of_16_bit_numbers_are_compared_and_added(arch, dtype):
    x, y, out = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 90 for n in (256, 257, 768))
    x, y, out = x.to(dtype), y[1:].to(dtype), out.to(dtype)
    if dtype.is_floating_point:
        x[::7] = torch.nan
    with triton_compiled(arch), check():
        halves_kernel[(1,)](x, y.clone(), out, SIZE=256, num_warps=1)
    expected = torch.cat([torch.where(x > y, x, y), x + y, torch.where(x != x, y, x)])
    assert (
        torch.equal(out.nan_to_num(0.25), expected.nan_to_num(0.25)) if dtype.is_floating_point else out.equal(expected)
    )


@pytest.mark.slow
def test_a_product_may_sum_in_halves():
    @triton.jit
    def kernel(x, out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        tile = tl.load(x + at)
        tl.store(out + at, tl.dot(tile, tile, out_dtype=tl.float16))

    x, out = torch.randint(-3, 4, (64, 64)).half(), torch.zeros(64, 64, dtype=torch.float16)
    with triton_compiled("sm_90"), check():
        kernel[(1,)](x, out, SIZE=64)
    assert torch.equal(out, (x.float() @ x.float()).half())


@pytest.mark.slow
def test_registers_beyond_a_limit_are_spilled():
    x, out = torch.zeros(64, 64, dtype=torch.float16), torch.zeros(64, 64)
    with triton_compiled("sm_80"):
        kernel = product_kernel.warmup(x, out, SIZE=64, num_warps=1, grid=(1,), maxnreg=32)
    assert kernel.n_regs == 32
    assert kernel.n_spills > 0


# ------------------------------------------------------------------------------------------------ arguments


class Buffer:
    """Memory from an element of a tensor on. `base` is the name of the attribute that has the tensor."""

    def __init__(self, tensor, first=0, name="base", dtype=None):
        self.dtype = dtype or tensor.dtype
        self._address = tensor.data_ptr() + first * tensor.element_size()
        if name:
            setattr(self, name, tensor)

    def data_ptr(self):
        return self._address


class Storage(Buffer):
    def untyped_storage(self):
        return self.tensor.untyped_storage()


@triton.jit
def scale_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, 2 * tl.load(x + i))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(Buffer, "base"), (Buffer, "_base"), (Storage, "tensor")])
def test_an_argument_may_have_only_an_address_and_a_dtype(kind, name):
    whole, out = torch.arange(64.0), torch.zeros(40)
    with triton_compiled("sm_80"), check():
        scale_kernel[(1,)](kind(whole, 16, name), kind(out, 8, name), SIZE=32, num_warps=1)
    assert torch.equal(out[8:], 2 * whole[16:48])
    assert not out[:8].any()
    with triton_compiled("sm_80"), check(), pytest.raises(Finding, match=r"x\[16\], past the end of the storage"):
        scale_kernel[(1,)](kind(whole, 48, name), out, SIZE=32, num_warps=1)


@pytest.mark.slow
def test_two_buffers_of_one_tensor_are_one_memory():
    whole = torch.arange(96.0)
    with triton_compiled("sm_80"):
        scale_kernel[(1,)](Buffer(whole), Buffer(whole, 32), SIZE=32, num_warps=1)
        scale_kernel[(1,)](Buffer(whole, 32), Buffer(whole, 64, dtype=torch.float32), SIZE=32, num_warps=1)
    assert torch.equal(whole.view(3, 32)[2], 4 * torch.arange(32.0))


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        (lambda x: Buffer(x, 0, ""), r"kernel scale_kernel: x has data_ptr\(\) and dtype, but nothing tells where"),
        (lambda x: Buffer(x, 64), r"x has a data_ptr\(\) outside of the memory"),
        (lambda x: Buffer(x, -1), r"x has a data_ptr\(\) outside of the memory"),
        (lambda x: Buffer(torch.zeros(8, device="meta")), r"x has a data_ptr\(\) outside|must be on the CPU"),
    ],
)
def test_an_address_of_unknown_memory_is_refused(argument, sentence):
    x, out = torch.arange(64.0), torch.zeros(32)
    with triton_compiled("sm_80"), pytest.raises(ValueError, match=sentence):
        scale_kernel[(1,)](argument(x), out, SIZE=32, num_warps=1)
    assert not out.any()


# ------------------------------------------------------------------------------------------------ halves and sums


@triton.jit
def mixed_kernel(x, y, out, KIND: tl.constexpr):
    i = tl.arange(0, 256)
    a, c = tl.load(x + i).to(tl.float32), tl.load(y + i)
    result = c + a if KIND == "add" else a - c if KIND == "sub" else a * a + c
    tl.store(out + i, result)


@pytest.mark.slow
@pytest.mark.skipif(triton.__version__.startswith("3.6."), reason="the LLVM of Triton 3.6 widens the half by itself")
@pytest.mark.parametrize(
    ("kind", "dtype"), one_in_three(list(product(["add", "sub", "fma"], [torch.float16, torch.bfloat16])))
)
def test_a_half_may_be_widened_by_the_sum_that_takes_it(kind, dtype):
    """From sm_100 on, LLVM writes `add.rn.f32.f16`: the operands but the last are halves."""
    x, y, out = torch.randn(256).to(dtype), torch.randn(256), torch.empty(256)
    with triton_compiled("sm_100"), check(stop=False) as report:
        compiled = mixed_kernel[(1,)](x, y, out, kind)
    assert f"{kind}.rn.f32.{'f16' if dtype == torch.float16 else 'bf16'}" in compiled.asm["ptx"]
    wide = x.float()
    assert out.equal({"add": y + wide, "sub": wide - y, "fma": (wide.double() ** 2 + y.double()).float()}[kind])
    assert not report.findings


@triton.jit
def product_of_halves_kernel(a, b, out, STEPS: tl.constexpr):
    row, column, inner = tl.arange(0, 64)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 16)
    x, y = tl.load(a + row * 16 + inner[None, :]), tl.load(b + inner[:, None] * 16 + column)
    acc = tl.zeros([64, 16], tl.float32)
    for _ in range(STEPS):
        acc += tl.dot(x, y, out_dtype=tl.float16)
    tl.store(out + row * 16 + column, acc)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "arch"), one_in_three(list(product([3, 1, 2], ["sm_90", "sm_80"]))))
def test_sums_of_halves_may_be_unpacked_before_the_wait(arch, steps):
    """Triton writes `mov.b32 {%rs1, %rs2}` of a wgmma's result before wgmma.wait_group."""
    a, b, out = torch.randn(64, 16).half(), torch.randn(16, 16).half(), torch.empty(64, 16)
    with triton_compiled(arch), check(stop=False) as report:
        product_of_halves_kernel[(1,)](a, b, out, steps)
    torch.testing.assert_close(out, steps * (a.float() @ b.float()), rtol=2e-3, atol=2e-2)
    assert not report.findings
