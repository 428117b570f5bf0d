"""gemv and flat_gemm: held against float64, watched on the CPU, compiled for GPUs.

`make test` builds some of the instantiations; PAGEWISE_FULL=1 all. With PAGEWISE_RECORD=<file>, too, what each takes of
a GPU becomes a line of the table in RESOURCES.md.
"""

import importlib
import os

import pytest
import torch
from covering import covering
from planted import SCHEDULES

from conftest import assert_as_accurate_as_naive
from pagewise.cuda import CudaKernel, simt
from pagewise.flash_decoding_plus_plus import flat_gemm, gemv
from pagewise.tools.work import count_work

module = importlib.import_module("pagewise.flash_decoding_plus_plus.flat_gemm")

FULL = os.environ.get("PAGEWISE_FULL") == "1"
SOURCE = module.SOURCE.read_text()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LLAMA_2_7B = ((12288, 4096), (4096, 4096), (11008, 4096), (4096, 11008))  # [N, K]
SCALED = tuple((N // 32, K // 32) for N, K in LLAMA_2_7B)
ODD = ((1, 1), (5, 7), (33, 65), (31, 999), (40, 1024), (97, 130), (3, 2056))
CANARY = -123.0


def in_a_room(x, *, apart=0, shift=0):
    """x, its rows `apart` elements further apart, `shift` elements further on; the memory around it is NaN."""
    rows, columns = x.shape
    stride = columns + apart
    room = torch.full((64 + shift + rows * stride + 64,), torch.nan, dtype=x.dtype, device=x.device)
    return room[64 + shift :].as_strided(x.shape, (stride, 1)).copy_(x)


LAYOUTS = {
    "side by side": {},
    "rows apart": {"apart": 16},
    "rows apart by an odd number": {"apart": 3},
    "at an odd address": {"shift": 1},
}


def random_matrices(M, N, K, dtype=torch.float16, device="cpu", x_layout="side by side", w_layout="side by side"):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, K, generator=generator).to(device, dtype) for rows in (M, N))
    return in_a_room(x, **LAYOUTS[x_layout]), in_a_room(w, **LAYOUTS[w_layout])


def assert_matches(out, x, w):
    assert_as_accurate_as_naive(out, x.double() @ w.double().mT, x @ w.mT)


@pytest.fixture
def canaries(monkeypatch):
    """The output gets room before and after it, full of canaries; returns a function that says whether all live."""
    rooms = []

    def guarded(x, w):
        room = torch.full((len(x) * len(w) + 128,), CANARY, dtype=x.dtype, device=x.device)
        rooms.append(room)
        return room[64:-64].view(len(x), len(w)).fill_(torch.nan)

    monkeypatch.setattr(module, "_output", guarded)
    return lambda: bool(rooms) and all((room[:64] == CANARY).all() and (room[-64:] == CANARY).all() for room in rooms)


# ------------------------------------------------------------------------------------------ against float64

QUICK_ROWS = (1, 2, 3, 7, 8, 9, 15, 57, 64)
AXES = {
    "M": tuple(range(1, 65)) if FULL else QUICK_ROWS,
    "shape": SCALED + ODD,
    "dtype": DTYPES,
    "x_layout": tuple(LAYOUTS),
    "w_layout": tuple(LAYOUTS),
}


def label(case):
    return "-".join(str(value).removeprefix("torch.").replace(", ", "×") for value in case.values())


@pytest.mark.parametrize("case", covering(AXES), ids=label)
def test_matches_float64(case, kernel_device, canaries):
    M, (N, K), dtype, *layouts = case.values()
    x, w = random_matrices(M, N, K, dtype, kernel_device, *layouts)
    assert_matches(flat_gemm(x, w), x, w)
    assert canaries()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), SCALED + ODD)
def test_gemv_matches_float64(N, K, dtype, kernel_device):
    x, w = random_matrices(1, N, K, dtype, kernel_device)
    out = gemv(x[0], w)
    assert out.shape == (N,)
    assert_matches(out[None], x, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows(dtype, kernel_device):
    """Also each row has the bits that it has among fewer rows, by the same kernel."""
    x, w = random_matrices(64, 37, 200, dtype, kernel_device)
    whole = flat_gemm(x, w)
    assert_matches(whole, x, w)
    tiles = range(1, 9) if FULL or dtype == torch.float32 else (1, 2, 8)
    for M in (M for tile in tiles for M in range(8 * tile - 7, 8 * tile + 1)):
        out = flat_gemm(x[:M], w)
        if M <= module.GEMV_ROWS:
            assert_matches(out, x[:M], w)
        else:
            assert out.equal(whole[:M])


@pytest.mark.parametrize("num_stages", range(2, 9) if FULL else (2, 3, 8))
@pytest.mark.parametrize("K", [1, 64, 65, 256, 1000, 2048])
def test_the_length_of_the_ring_changes_no_bit(num_stages, K, kernel_device):
    x, w = random_matrices(5, 40, K, device=kernel_device)
    out = module.on_tensor_cores(x, w, num_stages=num_stages)
    assert_matches(out, x, w)
    assert out.equal(module.on_tensor_cores(x, w))


@pytest.mark.parametrize("M", [3, 8, 21])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_cores_take_any_number_of_rows(M, dtype, kernel_device):
    x, w = random_matrices(M, 37, 200, dtype, kernel_device)
    assert_matches(module.on_cuda_cores(x, w), x, w)


@pytest.mark.parametrize("wild", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("M", "dtype"), [(2, torch.float16), (11, torch.float16), (11, torch.float32)])
def test_what_is_not_finite_stays_in_its_row(M, dtype, wild, kernel_device):
    """NaN and ∞ in a row of x reach that row of out, in a row of w that column."""
    x, w = random_matrices(M, 37, 200, dtype, kernel_device)
    clean = flat_gemm(x, w)
    x[1, 77] = wild
    out = flat_gemm(x, w)
    assert not out[1].isfinite().any()
    out[1] = clean[1]
    assert out.equal(clean)
    x, w = random_matrices(M, 37, 200, dtype, kernel_device)
    w[20, 199] = wild
    out = flat_gemm(x, w)
    assert not out[:, 20].isfinite().any()
    out[:, 20] = clean[:, 20]
    assert out.equal(clean)


def test_x_with_columns_apart_is_read_right(kernel_device):
    x, w = random_matrices(11, 37, 200, device=kernel_device)
    columns_apart = x.mT.contiguous().mT
    assert flat_gemm(columns_apart, w).equal(flat_gemm(x, w))
    assert gemv(columns_apart[0], w).equal(gemv(x[0], w))
    assert flat_gemm(x[:1].expand(11, -1), w).equal(flat_gemm(x[:1].repeat(11, 1), w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N", "K"), [(0, 5, 8), (5, 0, 8), (5, 5, 0), (1, 5, 0)])
def test_nothing_to_do(M, N, K, dtype, kernel_device):
    x, w = (torch.ones(rows, K, dtype=dtype, device=kernel_device) for rows in (M, N))
    assert flat_gemm(x, w).equal(torch.zeros(M, N, dtype=dtype, device=kernel_device))


@pytest.mark.parametrize("M", [1, 11])
def test_offsets_are_64_bit(M, kernel_device):
    """Rows of w lie 2³⁰ elements apart; what is between is never touched and needs no memory."""
    x, w = random_matrices(M, 4, 64, device=kernel_device)
    far = torch.empty(3 * 2**30 + 64, dtype=w.dtype, device=kernel_device).as_strided(w.shape, (2**30, 1)).copy_(w)
    assert flat_gemm(x, far).equal(flat_gemm(x, w))


def test_inputs_are_left_alone(kernel_device):
    x, w = random_matrices(11, 37, 200, device=kernel_device)
    before = x.clone(), w.clone()
    flat_gemm(x, w)
    assert x.equal(before[0])
    assert w.equal(before[1])
