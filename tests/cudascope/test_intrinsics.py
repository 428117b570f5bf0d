"""CUDA's intrinsic functions on the CPU against models in Python: bytes in a word exhaustively, rounding exactly."""

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from source_files import file_of

from cudascope import CudaKernel

# ------------------------------------------------------------------------------------------------ bytes and halves


def signed(x: np.ndarray, bits: int) -> np.ndarray:
    return (x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def clamp(x: np.ndarray, bits: int, is_signed: bool) -> np.ndarray:
    low = -(2 ** (bits - 1)) if is_signed else 0
    return np.clip(x, low, low + 2**bits - 1)


COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal}
COMPARISONS |= {"lt": np.less}
SIGNS = {"eq": ("",), "ne": ("",)}

# name without its size -> (are the lanes signed, what a lane becomes, given the bits of a lane)
WORDS: dict[str, tuple[bool, Callable]] = {
    "__vadd": (False, lambda a, b, n: a + b),
    "__vsub": (False, lambda a, b, n: a - b),
    "__vaddss": (True, lambda a, b, n: clamp(a + b, n, True)),
    "__vaddus": (False, lambda a, b, n: clamp(a + b, n, False)),
    "__vsubss": (True, lambda a, b, n: clamp(a - b, n, True)),
    "__vsubus": (False, lambda a, b, n: clamp(a - b, n, False)),
    "__vavgs": (True, lambda a, b, n: (a + b + (a + b >= 0)) // 2),
    "__vavgu": (False, lambda a, b, n: (a + b + 1) // 2),
    "__vhaddu": (False, lambda a, b, n: (a + b) // 2),
    "__vabsdiffs": (True, lambda a, b, n: abs(a - b)),
    "__vabsdiffu": (False, lambda a, b, n: abs(a - b)),
    **{f"__vmax{s}": (s == "s", lambda a, b, n: np.maximum(a, b)) for s in "su"},
    **{f"__vmin{s}": (s == "s", lambda a, b, n: np.minimum(a, b)) for s in "su"},
    **{
        f"__v{kind}{name}{s}": (s == "s", lambda a, b, n, holds=holds, true=true: true * holds(a, b))
        for kind, true in (("cmp", -1), ("set", 1))
        for name, holds in COMPARISONS.items()
        for s in SIGNS.get(name, "su")
    },
}
OF_ONE: dict[str, Callable] = {
    "__vabs": lambda a, n: abs(a),
    "__vneg": lambda a, n: -a,
    "__vabsss": lambda a, n: clamp(abs(a), n, True),
    "__vnegss": lambda a, n: clamp(-a, n, True),
}
CALLS = [(f"{name}{lanes}(a, b)", lanes, *model) for name, model in WORDS.items() for lanes in (2, 4)]
CALLS += [
    (f"{name}{lanes}(a)", lanes, True, lambda a, b, n, f=f: f(a, n)) for name, f in OF_ONE.items() for lanes in (2, 4)
]


class Calls(NamedTuple):
    """A kernel: out[i, j] is the i-th call of a[j], b[j], c[j], which have these types."""

    calls: Sequence[str]
    types: str
    result: str = "unsigned"

    def source(self, name: str) -> str:
        lines = "\n".join(f"    out[{i} * n + j] = {call};" for i, call in enumerate(self.calls))
        names = list(zip(self.types.split(), "abc", strict=False))
        pointers = ", ".join(f"const {kind}* {name}s" for kind, name in names)
        reads = " ".join(f"{kind} {name} = {name}s[j];" for kind, name in names)
        return (
            f"__global__ void {name}({pointers}, {self.result}* out, int n) {{\n"
            f"    int j = blockIdx.x * blockDim.x + threadIdx.x;\n    if (j >= n) return;\n    {reads}\n{lines}\n}}\n"
        )


def source_file() -> Path:
    """All kernels in one file, which is compiled once."""
    sources = [kernel.source(name) for name, kernel in KERNELS.items()]
    return file_of("#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n" + "".join(sources))


def run(name: str, *inputs: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    n = inputs[0].numel()
    out = torch.zeros(len(KERNELS[name].calls), n, dtype=dtype)
    CudaKernel(source_file(), name)[-(-n // 128), 128](*inputs, out, n)
    return out


@pytest.mark.slow
def test_words_of_bytes_and_halves_lane_by_lane():
    low, high = np.divmod(np.arange(2**16), 256)  # every pair of bytes in the lowest lane, others elsewhere
    a = low | (high ^ 0x5A) << 8 | (255 - low) << 16 | (low * 7 + high & 255) << 24
    b = high | (low * 3 & 255) << 8 | (high ^ low) << 16 | (high + 128 & 255) << 24
    inputs = [torch.from_numpy(x.astype(np.uint32).view(np.int32)) for x in (a, b)]
    out = run("words", *inputs).numpy().view(np.uint32)
    for (call, lanes, is_signed, model), found in zip(CALLS, out, strict=True):
        bits = 32 // lanes
        expected = np.zeros_like(a)
        for lane in range(lanes):
            parts = [x >> bits * lane & 2**bits - 1 for x in (a, b)]
            x, y = (signed(part, bits) if is_signed else part for part in parts)
            expected |= model(x, y, bits) % 2**bits << bits * lane
        assert np.array_equal(found, expected), call


# ------------------------------------------------------------------------------------------------ integers

PATTERNS = [0, 1, 5, 31, 32, 33, 0x7F80, 0xFFFFFF, 0x01234567, 0x7FFFFFFF, 0x80000000, 0x89ABCDEF, 0xFFFFFFFF]


def s32(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def parts(x: int, bits: int, is_signed: bool) -> list[int]:
    found = [x >> at & 2**bits - 1 for at in range(0, 32, bits)]
    return [y - 2**bits if is_signed and y >> bits - 1 else y for y in found]


def distance(a: list[int], b: list[int]) -> int:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True))


def dot(a: int, b: int, c: int, is_signed: bool) -> int:
    return c + sum(x * y for x, y in zip(parts(a, 8, is_signed), parts(b, 8, is_signed), strict=True))


def half_dot(a: int, b: int, c: int, is_signed: bool, first: int) -> int:
    x, y = parts(a, 16, is_signed), parts(b, 8, is_signed)
    return c + x[0] * y[first] + x[1] * y[first + 1]


INTEGERS: dict[str, Callable[[int, int, int], int]] = {
    "__funnelshift_l(a, b, c)": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "__funnelshift_r(a, b, c)": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "__funnelshift_lc(a, b, c)": lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32,
    "__funnelshift_rc(a, b, c)": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "__umul24(a, b)": lambda a, b, c: a % 2**24 * (b % 2**24),
    "__mul24((int)a, (int)b)": lambda a, b, c: s32(a << 8) // 256 * (s32(b << 8) // 256),
    "__umulhi(a, b)": lambda a, b, c: a * b >> 32,
    "__mulhi((int)a, (int)b)": lambda a, b, c: s32(a) * s32(b) >> 32,
    "(unsigned)(__umul64hi((unsigned long long)a << 32 | b, (unsigned long long)b << 32 | c) >> 7)": (
        lambda a, b, c: (a << 32 | b) * (b << 32 | c) >> 71
    ),
    "(unsigned)__mul64hi((long long)((unsigned long long)a << 32 | b), (int)c)": (
        lambda a, b, c: (s32(a) * 2**32 + b) * s32(c) >> 64
    ),
    "__dp4a(a, b, c)": lambda a, b, c: dot(a, b, c, False),
    "__dp4a((int)a, (int)b, (int)c)": lambda a, b, c: dot(a, b, c, True),
    **{
        f"__dp2a_{half}({kind}a, {kind}b, {kind}c)": (
            lambda a, b, c, first=first, is_signed=bool(kind): half_dot(a, b, c, is_signed, first)
        )
        for half, first in (("lo", 0), ("hi", 2))
        for kind in ("", "(int)")
    },
    "__sad((int)a, (int)b, c)": lambda a, b, c: abs(s32(a) - s32(b)) + c,
    "__usad(a, b, c)": lambda a, b, c: abs(a - b) + c,
    "__hadd((int)a, (int)b)": lambda a, b, c: s32(a) + s32(b) >> 1,
    "__rhadd((int)a, (int)b)": lambda a, b, c: s32(a) + s32(b) + 1 >> 1,
    "__uhadd(a, b)": lambda a, b, c: a + b >> 1,
    "__urhadd(a, b)": lambda a, b, c: a + b + 1 >> 1,
    "__vsadu4(a, b)": lambda a, b, c: distance(parts(a, 8, False), parts(b, 8, False)),
    "__vsads2(a, b)": lambda a, b, c: distance(parts(a, 16, True), parts(b, 16, True)),
    "__brev(a)": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "__clz(a)": lambda a, b, c: 32 - a.bit_length(),
    "__ffs(a)": lambda a, b, c: (a & -a).bit_length(),
    "__popc(a)": lambda a, b, c: a.bit_count(),
    "max((int)a, (int)b)": lambda a, b, c: max(s32(a), s32(b)),
    "max(a, b)": lambda a, b, c: max(a, b),
    "(unsigned)(__brevll((unsigned long long)a << 32 | b) >> 32)": lambda a, b, c: int(f"{b:032b}"[::-1], 2),
    "__byte_perm(a, b, c)": lambda a, b, c: sum(
        ((b << 32 | a) >> 8 * (c >> 4 * i & 7) & 255) << 8 * i for i in range(4)
    ),
}


@pytest.mark.slow
def test_integer_functions():
    triples = [(a, b, PATTERNS[(i + 4 * j) % 13]) for i, a in enumerate(PATTERNS) for j, b in enumerate(PATTERNS)]
    inputs = [torch.tensor([s32(x) for x in column], dtype=torch.int32) for column in zip(*triples, strict=True)]
    out = run("integers", *inputs).numpy().view(np.uint32).tolist()
    for (call, model), found in zip(INTEGERS.items(), out, strict=True):
        assert found == [model(*triple) % 2**32 for triple in triples], call


# ------------------------------------------------------------------------------------------------ rounding

MODES = ("rn", "rz", "rd", "ru")  # to the nearest, towards zero, down, up


def is_rounded(found: float, exact: Callable[[Fraction], int], mode: str, dtype: type) -> bool:
    """Whether `found` is the number of `dtype` next to the exact one that `mode` says; `exact(x)`: the sign of
    the exact number less x."""
    if exact(Fraction(found)) == 0:
        return True
    x = dtype(found)
    other = float(np.nextafter(x, dtype(math.inf) if exact(Fraction(found)) > 0 else dtype(-math.inf)))
    low, high = sorted((Fraction(found), Fraction(other)))
    if not exact(low) > 0 > exact(high):
        return False  # not even next to it
    if mode == "rn":
        nearer = low if exact((low + high) / 2) < 0 else high
        return exact((low + high) / 2) == 0 or Fraction(found) == nearer
    towards_low = mode == "rd" or (mode == "rz" and low >= 0)
    return Fraction(found) == (low if towards_low else high)


def sign(x: Fraction) -> int:
    return (x > 0) - (x < 0)


ROUNDED: dict[str, Callable] = {  # the sign of the exact result less x
    "add": lambda a, b, c, x: sign(a + b - x),
    "sub": lambda a, b, c, x: sign(a - b - x),
    "mul": lambda a, b, c, x: sign(a * b - x),
    "div": lambda a, b, c, x: sign(a / b - x),
    "rcp": lambda a, b, c, x: sign(1 / a - x),
    "sqrt": lambda a, b, c, x: 1 if x < 0 else sign(abs(a) - x * x),
    "fma": lambda a, b, c, x: sign(a * b + c - x),
}


ARGUMENTS = {"rcp": "a", "sqrt": "fabs(a)", "fma": "a, b, c"}
IN_MODES = [(name, mode) for name in ROUNDED for mode in MODES]
SINGLE = [f"__{'fmaf' if op == 'fma' else 'f' + op}_{mode}({ARGUMENTS.get(op, 'a, b')})" for op, mode in IN_MODES]
DOUBLE = [f"__{'fma' if op == 'fma' else 'd' + op}_{mode}({ARGUMENTS.get(op, 'a, b')})" for op, mode in IN_MODES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("single", torch.float32), ("double_", torch.float64)])
def test_arithmetic_rounds_as_its_name_says(name, dtype):
    generator = torch.Generator().manual_seed(0)
    scales = (1.0, 512.0, 0.125)
    inputs = [(scale * torch.randn(40, generator=generator, dtype=torch.float64)).to(dtype) for scale in scales]
    out = run(name, *inputs, dtype=dtype)
    for (operation, mode), call, found in zip(IN_MODES, KERNELS[name].calls, out.tolist(), strict=True):
        for a, b, c, y in zip(*(map(Fraction, x.tolist()) for x in inputs), found, strict=True):
            exact = lambda x: ROUNDED[operation](a, b, c, x)  # noqa: B023, E731
            assert is_rounded(y, exact, mode, np.float32 if dtype == torch.float32 else np.float64), (call, a, b, c)


CONVERSIONS = {
    "__float2int_rn(a)": [2, 3 - 1, -2, 2**31 - 1, 0],
    "__float2int_ru(a)": [3, 2, -2, 2**31 - 1, 0],
    "__float2uint_rz(a)": [2, 1, 0, 2**32 - 1 - 2**32, 0],
    "(int)(__float2ll_rd(a) >> 32)": [0, 0, -1, 2**31 - 1, -(2**31)],
    "__half2int_rd(__float2half(a))": [2, 1, -3, 2**31 - 1, 0],
    "__bfloat162short_rn(__float2bfloat16(a))": [2, 2, -2, 2**15 - 1, 0],
    "__float_as_int(__int2float_rz(0x7fffffff))": [0x4EFFFFFF] * 5,
    "__float_as_int(__uint2float_ru(0x80000001u))": [0x4F000001] * 5,
    "__float_as_int(__double2float_rd(0.1))": [0x3DCCCCCC] * 5,
    "__double2hiint(__hiloint2double(0x40080000, 7)) + __double2loint(__hiloint2double(0, 7))": [0x40080007] * 5,
}


@pytest.mark.slow
def test_conversions():
    x = torch.tensor([2.5, 1.5, -2.25, 1e20, math.nan])
    assert run("conversions", x).tolist() == list(CONVERSIONS.values())


# ------------------------------------------------------------------------------------------------ functions

POINTS = torch.tensor([1e-30, 1e-9, 0.01, 0.2, 0.5, 0.7, 0.9, 0.999], dtype=torch.float64)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normcdf(a)": torch.special.ndtr,
    "normcdf(-30 * a)": lambda x: torch.special.ndtr(-30 * x),
    "normcdfinv(a)": torch.special.ndtri,
    "erfinv(a)": torch.special.erfinv,
    "erfcinv(a)": lambda x: -torch.special.ndtri(x / 2) / math.sqrt(2),
    "erfcx(a)": torch.special.erfcx,
    "erfcx(30 * a)": lambda x: torch.special.erfcx(30 * x),
    "cyl_bessel_i0(a)": torch.special.i0,
    "cyl_bessel_i1(a)": torch.special.i1,
    "sinpi(a)": lambda x: torch.sin(math.pi * x),
    "cospi(a + 1e6)": lambda x: torch.cos(math.pi * ((x + 1e6) % 2)),
    "rhypot(a, 2.0)": lambda x: 1 / torch.hypot(x, torch.tensor(2.0, dtype=torch.float64)),
    "norm4d(a, a, a, a)": lambda x: 2 * x,
    "rcbrt(a)": lambda x: x ** (-1 / 3),
}


IN_FLOAT = {
    re.sub(r"^(\w+)\(", r"\1f(", call).replace("2.0", "2.0f"): model
    for call, model in FUNCTIONS.items()
    if "1e6" not in call
}
IN_FLOAT |= {
    "__expf(a)": torch.exp,
    "__logf(a)": torch.log,
    "rsqrtf(a)": torch.rsqrt,
    "exp2f(a)": torch.exp2,
    "__fdividef(1.0f, a)": torch.reciprocal,
    "fmaf(a, a, 1.0f)": lambda x: x * x + 1,
    "max(a, 0.3f) + 2 * min(a, 0.4f)": lambda x: x.clamp(min=0.3) + 2 * x.clamp(max=0.4),
    "__int_as_float(__float_as_int(a))": lambda x: x,
    "__saturatef(3 * a - 1)": lambda x: (3 * x - 1).clamp(0, 1),
    "isinf(a / 0.0f) + 2 * isnan(0.0f / 0.0f)": lambda x: torch.full_like(x, 3),
}


@pytest.mark.slow
def test_functions_that_the_c_library_lacks():
    for call, found in zip(FUNCTIONS, run("functions", POINTS, dtype=torch.float64), strict=True):
        assert torch.allclose(found, FUNCTIONS[call](POINTS), rtol=1e-12, atol=1e-15), call
    x = POINTS.float()
    for call, found in zip(IN_FLOAT, run("functions_in_float", x, dtype=torch.float32), strict=True):
        assert torch.allclose(found.double(), IN_FLOAT[call](x.double()), rtol=1e-6, atol=1e-37), call


HALVES = {
    "__hfma_relu(a, b, c)": 0.0,
    "__hfma_sat(a, a, c)": 1.0,
    "__low2half(__hfma2_relu(__halves2half2(a, a), __halves2half2(a, b), __halves2half2(c, c)))": 7.0,
    "__high2half(__hfma2_sat(__halves2half2(a, a), __halves2half2(a, b), __halves2half2(c, c)))": 0.0,
    # (2 - 3 i) (3 + 2 i) + 3 + 3 i
    "__low2half(__hcmadd(__halves2half2(a, b), __halves2half2(c, a), __halves2half2(c, c)))": 15.0,
    "__high2half(__hcmadd(__halves2half2(a, b), __halves2half2(c, a), __halves2half2(c, c)))": -2.0,
    "htanh_approx(__float2half(20.0f))": 1.0,
    "hexp2(c)": 8.0,
    "hexp(__hsub(c, c))": 1.0,
    "__low2half(__hmul2(__halves2half2(a, b), __half2half2(c)))": 6.0,
    "__float2half(__high2float(__floats2half2_rn(1.0f, __half2float(b))))": -3.0,
    "__float2half(make_float4(1.0f, __half2float(a), 4.0f, 8.0f).y)": 2.0,
    "__hmax(a, b)": 2.0,
    "__hmin_nan(a, __ushort_as_half(0x7fff))": math.nan,
}


def test_halves_have_what_only_the_device_has():
    inputs = [torch.tensor([x], dtype=torch.float16) for x in (2.0, -3.0, 3.0)]
    out = run("halves", *inputs, dtype=torch.float16)[:, 0].float()
    expected = torch.tensor(list(HALVES.values()))
    assert torch.equal(out.nan_to_num(99.0), expected.nan_to_num(99.0)), list(zip(HALVES, out.tolist(), strict=True))


# ------------------------------------------------------------------------------------------------ one file

KERNELS = {
    "words": Calls([call for call, *_ in CALLS], "unsigned unsigned"),
    "integers": Calls(list(INTEGERS), "unsigned unsigned unsigned"),
    "single": Calls(SINGLE, "float float float", "float"),
    "double_": Calls(DOUBLE, "double double double", "double"),
    "conversions": Calls(list(CONVERSIONS), "float", "int"),
    "functions": Calls(list(FUNCTIONS), "double", "double"),
    "functions_in_float": Calls(list(IN_FLOAT), "float", "float"),
    "halves": Calls(list(HALVES), "__half __half __half", "__half"),
}


@pytest.mark.slow
def test_a_gpu_has_the_same_functions():
    CudaKernel(source_file(), "words").resources("sm_90")
