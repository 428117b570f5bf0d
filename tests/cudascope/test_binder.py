"""The same rules for arguments in every kind of kernel: CUDA C++ on the CPU, through PTX, plain PTX, and Triton's."""

import ctypes

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from cudascope import CudaKernel, PtxKernel, triton_compiled

CUDA = """
struct S { int a, b; };
__global__ void k(float* x, int n, float a, S s) { if (n > 0) x[0] = n + a + s.b; }
"""
PTX = """
.version 8.4
.target sm_80
.address_size 64
.visible .entry k(.param .u64 x, .param .u32 n, .param .f32 a, .param .align 4 .b8 s[8])
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .f32 %f<6>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    ld.param.f32 %f1, [a];
    ld.param.u32 %r2, [s+4];
    setp.le.s32 %p1, %r1, 0;
    @%p1 bra $DONE;
    cvt.rn.f32.s32 %f2, %r1;
    cvt.rn.f32.s32 %f3, %r2;
    add.f32 %f4, %f1, %f2;
    add.f32 %f5, %f4, %f3;
    st.global.f32 [%rd1], %f5;
$DONE:
    ret;
}
"""


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_int))


ENDS = r"x has data_ptr\(\) and dtype, but nothing tells where its memory ends"


class Only:
    """An object with some of an array's attributes."""

    dtype = torch.float32

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def data_ptr(self):
        return 0


class Dlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def zeros() -> np.ndarray:
    return np.zeros(4, np.float32)


def read_only() -> np.ndarray:
    array = zeros()
    array.flags.writeable = False
    return array


KERNELS = {
    "CudaKernel": lambda: CudaKernel(CUDA, "k"),
    "through PTX": lambda: CudaKernel(CUDA, "k", through="ptx"),
    "PtxKernel": lambda: PtxKernel(PTX),
}
X, N, A, S = range(4)

TAKEN = {  # the parameter, a value, and x[0] after the launch with n = 1, a = 0.5 and s = {1, 2} for the others
    "a numpy array": (X, zeros, 3.5),
    "a torch tensor": (X, lambda: torch.zeros(4), 3.5),
    "every other element": (X, lambda: zeros()[::2], 3.5),
    "a transposed tensor": (X, lambda: torch.zeros(3, 4).T, 3.5),
    "DLPack alone": (X, lambda: Dlpack(zeros()), 3.5),
    "an array without dimensions": (X, lambda: np.array(0, np.float32), 3.5),
    "np.int32": (N, lambda: np.int32(7), 9.5),
    "np.int64": (N, lambda: np.int64(7), 9.5),
    "np.uint8": (N, lambda: np.uint8(7), 9.5),
    "a negative int": (N, lambda: -3, 0),
    "the least np.int32": (N, lambda: np.int32(-(2**31)), 0),
    "np.float32": (A, lambda: np.float32(1.5), 4.5),
    "np.float64": (A, lambda: np.float64(1.5), 4.5),
    "np.float16": (A, lambda: np.float16(1.5), 4.5),
    "an int for a float": (A, lambda: 2, 5),
    "np.int32 for a float": (A, lambda: np.int32(2), 5),
    "infinity": (A, lambda: float("inf"), np.inf),
    "bytes for a struct": (S, lambda: bytes(Pair(1, 4)), 5.5),
    "a ctypes.Structure": (S, lambda: Pair(1, 4), 5.5),
}
REFUSED = {
    "a read-only array": (X, read_only, ValueError, "x is read-only memory, and the kernel may .*: pass a copy"),
    "a broadcast array": (X, lambda: np.broadcast_to(zeros()[:1], 4), ValueError, "x is read-only memory"),
    "negative strides": (X, lambda: zeros()[::-1], ValueError, "x must have no negative strides"),
    "another byte order": (X, lambda: np.zeros(4, ">f4"), ValueError, "x must have this machine's byte order"),
    "a field of a record": (X, lambda: np.zeros(4, "f4,u1")["f0"], ValueError, "x must have strides of whole elements"),
    "a sparse tensor": (X, lambda: torch.zeros(4).to_sparse(), ValueError, "x must be a dense tensor"),
    "another device": (X, lambda: torch.zeros(4, device="meta"), ValueError, "x must be on the CPU or a GPU, got meta"),
    "a list": (X, lambda: [0.0], TypeError, "x must be a tensor .*None.*got list"),
    "bytes for a pointer": (X, lambda: bytes(16), TypeError, "x must be a tensor .*None.*got bytes"),
    "a float for a pointer": (X, lambda: 0.0, TypeError, "x must be a tensor .*None.*got float"),
    "data_ptr alone": (X, Only, ValueError, ENDS),
    "__array_interface__ alone": (
        X, lambda: Only(__array_interface__=zeros().__array_interface__), ValueError, ENDS,
    ),
    "__cuda_array_interface__ alone": (
        X, lambda: Only(__cuda_array_interface__=zeros().__array_interface__), ValueError, ENDS,
    ),
    "True for an int": (N, lambda: True, TypeError, "n must be an int .*got bool"),
    "np.bool_ for an int": (N, lambda: np.bool_(True), TypeError, "n must be an int .*got bool"),
    "a float for an int": (N, lambda: 1.0, TypeError, "n must be an int .*got float"),
    "np.float32 for an int": (N, lambda: np.float32(1), TypeError, "n must be an int .*got float32"),
    "None for an int": (N, lambda: None, TypeError, "n must be an int .*got NoneType"),
    "a string for an int": (N, lambda: "1", TypeError, "n must be an int .*got str"),
    "a tensor for an int": (N, lambda: torch.tensor(1), TypeError, r"n must be an int .*got Tensor: pass its \.item"),
    "an array for an int": (N, lambda: np.array(1), TypeError, r"n must be an int .*got ndarray: pass its \.item"),
    "an int above the range": (N, lambda: 2**33, ValueError, "n must fit in .* to .*, got 8589934592"),
    "np.int64 below the range": (N, lambda: np.int64(-(2**40)), ValueError, "n must fit in .* to .*, got -1099511"),
    "True for a float": (A, lambda: True, TypeError, "a must be a number .*got bool"),
    "a string for a float": (A, lambda: "1", TypeError, "a must be a number .*got str"),
    "None for a float": (A, lambda: None, TypeError, "a must be a number .*got NoneType"),
    "complex for a float": (A, lambda: 1j, TypeError, "a must be a number .*got complex"),
    "a tensor for a float": (A, lambda: torch.tensor(1.0), TypeError, r"a must be a number .*Tensor: pass its \.item"),
    "a float above the range": (A, lambda: 1e39, ValueError, r"a must fit in `.*`, up to 3\.40282e\+38, got 1e\+39"),
    "too many bytes": (S, lambda: bytes(9), ValueError, "s must be 8 bytes .*got 9"),
    "too few bytes": (S, lambda: bytes(7), ValueError, "s must be 8 bytes .*got 7"),
    "a tuple for a struct": (S, lambda: (1, 2), TypeError, "s must be a ctypes.Structure or bytes .*got tuple"),
    "an int for a struct": (S, lambda: 3, TypeError, "s must be a ctypes.Structure or bytes .*got int"),
}  # fmt: skip


def arguments(at: int, value: object) -> list:
    given = [zeros(), 1, 0.5, Pair(1, 2)]
    given[at] = value
    return given


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request):
    return KERNELS[request.param]()


@pytest.mark.parametrize(("at", "value", "expected"), TAKEN.values(), ids=TAKEN)
def test_every_kernel_takes_it(kernel, at, value, expected):
    given = arguments(at, value())
    kernel[1, 1](*given)
    x = given[X].array if isinstance(given[X], Dlpack) else given[X]
    assert float(x.reshape(-1)[0]) == expected


@pytest.mark.parametrize(("at", "value", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_every_kernel_refuses_it_in_the_same_words(kernel, at, value, error, message):
    given = arguments(at, value())
    with pytest.raises(error, match=f"^kernel k: {message}") as refused:
        kernel[1, 1](*given)
    assert type(refused.value) is error
    assert not np.any(given[X]) if isinstance(given[X], np.ndarray) else True, "nothing was written"


def test_every_kernel_takes_no_element_a_null_pointer_and_counts_its_arguments(kernel):
    kernel[1, 1](np.zeros(0, np.float32), 0, 0.5, Pair())
    kernel[1, 1](None, 0, 0.5, Pair())
    with pytest.raises(TypeError, match=r"^kernel k takes 4 arguments \(.* x, .* n, .* a, .* s\), got 3"):
        kernel[1, 1](None, 0, 0.5)


def test_two_devices_in_one_launch_are_refused():
    two = PtxKernel(PTX.replace(".param .u32 n", ".param .u64 y, .param .u32 n"))
    with pytest.raises(ValueError, match="kernel k: y must be on cpu as x is, got meta"):
        two[1, 1](zeros(), torch.zeros(1, device="meta"), 0, 0.5, Pair())


@pytest.mark.slow
def test_a_parameter_of_64_bits_takes_a_number_or_an_address():
    kernel, x = PtxKernel(PTX), zeros()
    kernel[1, 1](x.ctypes.data, 1, 0.5, Pair(1, 2))  # the address of memory that is no argument
    assert x[0] == 3.5
    kernel[1, 1](-1, 2**32 - 1, 0.5, Pair())  # PTX does not tell signed from unsigned
    for value, error, message in (
        (2**64, ValueError, "x must fit in `.u64`"),
        (-(2**63) - 1, ValueError, "x must fit in `.u64`"),
        (True, TypeError, "x must be an int"),
    ):
        with pytest.raises(error, match=message):
            kernel[1, 1](value, 1, 0.5, Pair())


@triton.jit
def store(x, y, n):
    tl.store(x, n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (lambda: torch.zeros(4, device="meta"), ValueError, "kernel store: x must be on the CPU or a GPU, got meta"),
        (lambda: Only(), ValueError, f"kernel store: {ENDS}"),
    ],
)
def test_a_triton_kernel_refuses_it_in_the_same_words(x, error, message):
    with triton_compiled(), pytest.raises(error, match=message):
        store[1,](x(), torch.zeros(1), 7)


@pytest.mark.slow
@pytest.mark.parametrize("x", [torch.zeros(3, 4).T, torch.zeros(4)[::2], torch.zeros(2, requires_grad=True).detach()])
def test_a_triton_kernel_takes_tensors_that_are_not_contiguous(x):
    with triton_compiled():
        store[1,](x, torch.zeros(1), 7)
    assert float(x.reshape(-1)[0]) == 7
