"""gemv and flat_gemm: held against float64, watched on the CPU, compiled for GPUs.

`make test` builds some of the instantiations; PAGEWISE_FULL=1 all. With PAGEWISE_RECORD=<file>, too, what each takes of
a GPU becomes a line of the table in RESOURCES.md.
"""

import importlib
import os
from functools import partial

import pytest
import torch
from covering import covering, in_turns, is_full, label, one_in_three
from planted import SCHEDULES

import cudascope
from conftest import assert_as_accurate_as_naive
from cudascope import CudaKernel
from pagewise.flash_decoding_plus_plus import flat_gemm, gemv
from pagewise.flash_decoding_plus_plus.dataflow import PRODUCTS
from pagewise.tools.architecture import SHARED_BYTES, Architecture

module = importlib.import_module("pagewise.flash_decoding_plus_plus.flat_gemm")

SOURCE = module.SOURCE.read_text()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LLAMA_2_7B = ((12288, 4096), (4096, 4096), (11008, 4096), (4096, 11008))  # [N, K]
SCALED = tuple((N // 32, K // 32) for N, K in LLAMA_2_7B)
ODD = ((1, 1), (5, 7), (33, 65), (31, 999), (40, 1024), (97, 130), (3, 2056))


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
    """Compare with sums in float32: with AMX, torch's own 16-bit product reads what lies beyond the rows of a view."""
    assert_as_accurate_as_naive(out, x.double() @ w.double().mT, (x.float() @ w.float().mT).to(x.dtype))


# ------------------------------------------------------------------------------------------ against float64

QUICK_ROWS = (1, 2, 3, 7, 8, 9, 15, 57, 64)
AXES = {
    "M": tuple(range(1, 65)) if is_full() else QUICK_ROWS,
    "shape": SCALED + ODD,
    "dtype": DTYPES,
    "x_layout": tuple(LAYOUTS),
    "w_layout": tuple(LAYOUTS),
}


def is_quick(case):
    """Each number of rows and dtype is another build, once for vecs and once for single elements.

    16-bit numbers in vecs are float16, others bfloat16. Single elements come with a few numbers of rows only.
    """
    whole = case["shape"][1] % 8 == 0 and case["w_layout"] in ("side by side", "rows apart")
    few = case["dtype"] != torch.float16 and case["M"] in (1, 15, 64)
    return is_full() or (case["dtype"] != torch.bfloat16 if whole else few)


@pytest.mark.parametrize("case", covering(AXES, is_quick), ids=label)
def test_matches_float64(case, kernel_device, canaries):
    M, (N, K), dtype, *layouts = case.values()
    x, w = random_matrices(M, N, K, dtype, kernel_device, *layouts)
    out = flat_gemm(x, w)
    assert_matches(out, x, w)
    assert M > 1 or gemv(x[0], w).equal(out[0])
    assert canaries()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows(dtype, kernel_device):
    """Also each row has the bits that it has among fewer rows, by the same kernel."""
    x, w = random_matrices(64, 13, 200, dtype, kernel_device)
    whole = flat_gemm(x, w)
    assert_matches(whole, x, w)
    tiles = range(1, 9) if is_full() or dtype == torch.float32 else (1, 2, 8) if dtype == torch.float16 else (5,)
    for M in (M for tile in tiles for M in range(8 * tile - 7, 8 * tile + 1)):
        out = flat_gemm(x[:M], w)
        if M <= module.GEMV_ROWS:
            assert_matches(out, x[:M], w)
        else:
            assert out.equal(whole[:M])


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_deep_as_llama_2_7b(dtype, kernel_device):
    x, w = random_matrices(9, 33, 11008, dtype, kernel_device)
    assert_matches(flat_gemm(x, w), x, w)
    assert_matches(gemv(x[0], w)[None], x[:1], w)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", range(2, 9) if is_full() else (2, 3, 8))
@pytest.mark.parametrize("K", [8, 64, 72, 256, 1000, 2048])
def test_the_length_of_the_ring_changes_no_bit(num_stages, K, kernel_device):
    x, w = random_matrices(5, 40, K, device=kernel_device)
    num_stages = min(num_stages, module.shared_bytes_limit(kernel_device) // module.stage_bytes(5))
    out = module.on_tensor_cores(x, w, num_stages=num_stages)
    assert_matches(out, x, w)
    assert out.equal(module.on_tensor_cores(x, w))


@pytest.mark.parametrize("M", [3, 8, 21])
@pytest.mark.parametrize("dtype", DTYPES if is_full() else DTYPES[:2])
def test_cuda_cores_take_any_number_of_rows(M, dtype, kernel_device):
    x, w = random_matrices(M, 37, 200, dtype, kernel_device)
    assert_matches(module.on_cuda_cores(x, w), x, w)


@pytest.mark.slow
@pytest.mark.parametrize("wild", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("M", "dtype"), [(2, torch.float16), (11, torch.float16), (11, torch.float32)])
def test_what_is_not_finite_stays_in_its_row(M, dtype, wild, kernel_device):
    """NaN and ∞ in a row of x reach that row of out, in a row of w that column."""
    x, w = random_matrices(M, 37, 200, dtype, kernel_device)
    clean = flat_gemm(x, w)
    x[1, 77] = w[20, 199] = wild
    out = flat_gemm(x, w)
    for reached in (out[1], out[:, 20]):
        assert not reached.isfinite().any()
    out[1], out[:, 20] = clean[1], clean[:, 20]
    assert out.equal(clean)


@pytest.mark.slow
@pytest.mark.parametrize("K", [200, 201], ids=["in vecs", "element by element"])
def test_x_with_columns_apart_is_read_right(K, kernel_device):
    x, w = random_matrices(11, 37, K, device=kernel_device)
    columns_apart = x.mT.contiguous().mT
    assert flat_gemm(columns_apart, w).equal(flat_gemm(x, w))
    assert gemv(columns_apart[0], w).equal(gemv(x[0], w))
    assert flat_gemm(x[:1].expand(11, -1), w).equal(flat_gemm(x[:1].repeat(11, 1), w))


@pytest.mark.parametrize("M", [1, 11])
def test_nothing_is_read_after_a_row_that_ends_within_a_vec(M, kernel_device):
    """Rows of 60 numbers begin at multiples of 16 bytes and end in the middle of 16 bytes, and NaN follows."""
    x, w = (in_a_room(rows, apart=4) for rows in random_matrices(M, 37, 60, device=kernel_device))
    assert_matches(flat_gemm(x, w), x, w)


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


# ------------------------------------------------------------------------------------------ watched

WATCHED = (9, 37, 3 * module.NUM_WARPS * module.TILE_K + module.TILE_K + 24)  # K is 4 turns for two warps, else 3


def multiply(kernel, x, w):
    """The product by the kernel of this name: on tensor cores with rings of three stages."""
    return module.on_tensor_cores(x, w, num_stages=3) if kernel == "flat_gemm_kernel" else module.on_cuda_cores(x, w)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype", "layouts"),
    [
        ("flat_gemm_kernel", torch.float16, {}),
        ("flat_gemm_kernel", torch.bfloat16, {"w_layout": "at an odd address"}),
        ("gemv_kernel", torch.float32, {}),
        ("gemv_kernel", torch.float16, {"w_layout": "at an odd address"}),
    ],
)
def test_no_findings_under_any_schedule(kernel, dtype, layouts):
    """Every access is within bounds. No race and no early or uninitialised read occurs. The bits stay the same."""
    x, w = random_matrices(*WATCHED, dtype, **layouts)
    expected = multiply(kernel, x, w)
    for seed in SCHEDULES if is_full() else SCHEDULES[:7]:
        with cudascope.check(schedule=seed):
            assert multiply(kernel, x, w).equal(expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", range(2, 9) if is_full() else (2, 8))
@pytest.mark.parametrize("K", [24, 1000])
def test_no_findings_in_rings_that_are_longer_than_k_or_not(num_stages, K):
    x, w = random_matrices(3, 40, K)
    for seed in (None, 1, 2):
        with cudascope.check(schedule=seed):
            module.on_tensor_cores(x, w, num_stages=num_stages)


@pytest.mark.parametrize(
    ("M", "dtype"), [(2, torch.float16), (9, torch.float16), (64, torch.float16), (13, torch.float32)]
)
def test_weights_are_read_once_per_turn_and_missing_rows_and_columns_never_on_tensor_cores(M, dtype):
    x, w = random_matrices(M, 37, 200, dtype)
    with cudascope.observe() as report:
        flat_gemm(x, w)
    rows, columns, depth = (M + 7) // 8 * 8, 64, 256  # padded: 2 tiles of columns, 4 tiles of K
    if M > 2 and dtype == torch.float16:
        assert report.count("mma").requests == rows // 8 * columns // 32 * depth // 16
        read = (37 + 2 * M) * 200  # each tile of columns reads all of x
    else:
        turns = -(-M // 8)
        read = 10 * turns * (4 + min(M, 8)) * 200  # each thread block reads 4 columns, and rows again that are missing
    assert report.count("read", "global").bytes == read * x.element_size()
    assert report.count("write", "global").bytes == M * 37 * x.element_size()


def test_weights_come_once_and_in_whole_sectors():
    """The kernel on tensor cores reads rows of 128 bytes per stage, without bank conflicts."""
    x, w = random_matrices(8, 64, 512)
    assert x.data_ptr() % 32 == w.data_ptr() % 32 == 0
    with cudascope.observe() as report:
        flat_gemm(x, w)
    (launch,) = report.launches
    assert int(launch.accesses("w")["bytes"].sum()) == w.nbytes
    assert launch.count("read", "global").sectors * 32 == w.nbytes + 2 * x.nbytes
    assert launch.bank_conflicts == 0
    assert launch.barriers == 2 * (1 + module.NUM_WARPS * (2 + 1))  # a thread block's; a warp's: per turn, and the last


# ------------------------------------------------------------------------------------------ planted mistakes


def with_source(monkeypatch, right, wrong):
    """Launch kernels in whose source `right` is `wrong` instead."""
    assert SOURCE.count(right) == 1, right
    source = SOURCE.replace(right, wrong)
    make = module.cuda_kernel
    monkeypatch.setattr(module, "cuda_kernel", lambda *sizes: CudaKernel(source, make(*sizes).name))
    return source.splitlines()


COPY, LOADS, STORE = "cp.async.cg", ("&stage.w[0][k]", "&stage.x[t * TILE_M][k]"), "wmma::store_matrix_sync("
SUM_OF_WARPS = "sum += of_warps[from][m][n]"
MISSING = {  # of waits and barriers; and the lines of which the race that is found names one
    "the wait": ("wait_for_copies<NUM_STAGES - 2>();  //", "//", LOADS),
    "one wait too few": ("wait_for_copies<NUM_STAGES - 2>", "wait_for_copies<NUM_STAGES - 1>", LOADS),
    "the commit": ("        commit_copies();  //", "        //", LOADS),
    "the commit of nothing": ("        commit_copies();  //", "        if (turn < turns) commit_copies();  //", LOADS),
    "the warp's barrier in the ring": ("        __syncwarp();   ", "        ", (*LOADS, COPY)),
    "the order of barrier and copy": (
        "        __syncwarp();                       // so have all lanes'; the last turn's stage has been read\n"
        "        load_stage(turn + NUM_STAGES - 1);  // overwrites the last turn's stage\n",
        "        load_stage(turn + NUM_STAGES - 1);\n        __syncwarp();\n",
        (*LOADS, COPY),
    ),
    "the warp's barrier before handing over": ("    __syncwarp();  // the last stages", "    //", (*LOADS, STORE)),
    "the barrier after handing over": ("    __syncthreads();  // all have", "    //", (STORE, "sums_of(warp)[m]")),
    "the end of K": ("if (turn < turns) {", "{", (STORE, COPY)),
    "the barrier before the sum": ("    __syncthreads();  // all warps'", "    //", (SUM_OF_WARPS, "= sum;")),
    "the barrier after the sum": ("    __syncthreads();  // they have", "    //", (SUM_OF_WARPS, "= sum;")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), in_turns(one_in_three([*MISSING]), [None, 0, 1]))
def test_a_missing_wait_or_barrier_is_found_on_its_line(name, seed, monkeypatch):
    right, wrong, texts = MISSING[name]
    lines = with_source(monkeypatch, right, wrong)
    with pytest.raises(cudascope.Finding) as caught, cudascope.check(schedule=seed):
        multiply("gemv_kernel" if "sum" in name else "flat_gemm_kernel", *random_matrices(*WATCHED))
    assert caught.value.what == "race", str(caught.value)
    assert any(text in lines[caught.value.line - 1] for text in texts), str(caught.value)


NEXT = "multiply(sums, ring[%s %% NUM_STAGES]);"
WRONG = {  # what comes out wrong, or is read that is not there
    "flat_gemm_kernel": {
        "a warp left out": ("warp < NUM_WARPS; ++warp) sum", "warp < NUM_WARPS - 1; ++warp) sum"),
        "the end of K not zeroed": ("first + row < rows ? K - k - column : 0", "first + row < rows"),
        "the same rows of x for all fragments": ("&stage.x[t * TILE_M][k]", "&stage.x[0][k]"),
        "the next stage for this one": (NEXT % "turn", NEXT % "(turn + 1)"),
        "columns that are not there": ("if (n < columns) out", "out"),
        "rows that are not there": ("first + row < rows ? K - k - column : 0", "K - k - column"),
        "the row stride of w for x": ("(stage.x, x, x_stride", "(stage.x, x, w_stride"),
        "the sums not transposed": ("sums[t], B_N + 4, wmma::mem_col_major", "sums[t], 8, wmma::mem_row_major"),
        "a column on": ("w + first * w_stride, M", "w + (first + (first > 0)) * w_stride, M"),
    },
    "gemv_kernel": {
        "a lane left out": ("distance > 0; distance /= 2", "distance > 1; distance /= 2"),
        "the first rows again": ("x + m * x_stride, w, M - m", "x, w, M - m"),
        "a warp for all": ("sum += of_warps[from][m][n]", "sum += of_warps[0][m][n]"),
        "a row twice": ("x + min(m, rows - 1) * x_stride", "x + min(m, rows - 2) * x_stride"),
        "columns that are not there": ("min(rows, ROWS) && n < columns", "min(rows, ROWS)"),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "mistake"), one_in_three([(kernel, mistake) for kernel in WRONG for mistake in WRONG[kernel]])
)
def test_planted_mistakes_are_caught(kernel, mistake, monkeypatch, canaries):
    with_source(monkeypatch, *WRONG[kernel][mistake])

    x, w = random_matrices(*WATCHED, x_layout="rows apart")

    def check():
        assert_matches(multiply(kernel, x, w), x, w)
        assert canaries()

    with pytest.raises((AssertionError, cudascope.Finding)):  # a read past a tensor's end stops the launch
        check()


# ------------------------------------------------------------------------------------------ compiled, without a GPU

ARCHITECTURES = ("sm_80", "sm_90")
kernel_of = partial(module.cuda_kernel, module.SOURCE)
ON_CUDA_CORES = [
    ("gemv_kernel", dtype, rows, vec)
    for dtype in DTYPES
    for rows in module.ROWS_AT_ONCE
    for vec in (16 // dtype.itemsize, 1)
    if is_full() or (dtype != torch.bfloat16 and rows == 8 and vec > 1)  # the most sums
]
ON_TENSOR_CORES = [
    ("flat_gemm_kernel", dtype, m_tiles, num_stages, vec)
    for dtype in DTYPES[1:]
    for m_tiles in range(1, 9)
    for num_stages in ((2, 3, 4) if m_tiles < 8 else (2, 4))
    for vec in (8, 1)
    if is_full() or (dtype == torch.float16 and vec == 8 and (m_tiles, num_stages) in ((1, 4), (8, 2)))
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", ON_CUDA_CORES + ON_TENSOR_CORES, ids=lambda kind: kernel_of(*kind).name)
def test_compiles_without_spills(kind, arch):
    kernel, (name, *sizes) = kernel_of(*kind), kind
    resources = kernel.resources(arch)
    assert resources.spilled_bytes == 0
    if name == "flat_gemm_kernel":
        assert resources.shared_bytes == 0  # all of it dynamic: see `stage_bytes`
        m_tiles = sizes[1]  # from 5 on shared memory holds two
        assert resources.thread_blocks_per_sm(module.NUM_THREADS) >= (3 if m_tiles <= 4 else 2)
    if path := os.environ.get("PAGEWISE_RECORD"):
        with open(path, "a") as file:
            file.write(f"| {kernel.name} | {arch} | {' | '.join(map(str, resources))} |\n")


@pytest.mark.slow
def test_shared_memory_is_what_the_launcher_reckons():
    """In the trace: how far the dynamic array reaches that a kernel touches."""
    for M, num_stages in ((9, 3), (8, 2)):
        x, w = random_matrices(M, 32, num_stages * module.NUM_WARPS * module.TILE_K)
        with cudascope.observe() as report:
            module.on_tensor_cores(x, w, num_stages=num_stages)
        shared = report.trace[report.trace["space"] == "shared"]
        touched = int((4 * shared["element"] + shared["bytes"]).max())
        assert num_stages * module.stage_bytes(M) - touched == 16  # the last row's padding


# ------------------------------------------------------------------------------------------ the length of the ring


def test_the_ring_is_as_long_as_memory_asks_and_shared_memory_allows():
    """For Llama-2-7B's shapes on an H200: 32 KB of weights are surely on their way, unless shared memory is full."""
    lengths = [[module.stages_for(M, N, 132) for M in (1, 8, 16, 64)] for N, _ in LLAMA_2_7B]
    assert lengths == [[3, 3, 2, 2], [4, 4, 4, 4], [3, 3, 2, 2], [4, 4, 4, 4]]
    assert module.stages_for(8, 32 * 132 * 9, 132) == 2


@pytest.mark.parametrize(
    ("gpu", "num_sms", "limit", "rows"), [("H200", 132, 227, 64), ("A100", 108, 163, 64), ("RTX 3090", 82, 99, 56)]
)
def test_the_ring_fits_into_a_thread_block(gpu, num_sms, limit, rows):
    for M in range(1, rows + 1):
        for N in (1, 2048, *(N for N, _ in LLAMA_2_7B)):
            num_stages = module.stages_for(M, N, num_sms, limit * 1024)
            assert num_stages >= 2
            assert num_stages * module.stage_bytes(M) <= limit * 1024


@pytest.mark.slow
def test_rows_whose_ring_does_not_fit_are_halved(monkeypatch, kernel_device):
    x, w = random_matrices(61, 37, 200, device=kernel_device)
    whole = flat_gemm(x, w)
    monkeypatch.setattr(module, "shared_bytes_limit", lambda device: 99 * 1024)
    assert flat_gemm(x, w).equal(whole)


def only(known, path, name, *sizes):
    assert name == known
    return kernel_of(name, *sizes)


def test_before_sm_80_cuda_cores_multiply(monkeypatch, kernel_device):
    """A T4 lacks asynchronous copies: flat_gemm and the dataflow take the other kernel, and tensor cores refuse."""
    x, w = random_matrices(9, 37, 200, device=kernel_device)
    expected = module.on_cuda_cores(x, w)
    monkeypatch.setattr(module, "architecture", lambda device: Architecture(75, SHARED_BYTES[75], num_sms=40))
    monkeypatch.setattr(module, "cuda_kernel", partial(only, "gemv_kernel"))
    assert flat_gemm(x, w).equal(expected)
    assert PRODUCTS["flat_gemm"](x, w).equal(expected)
    with pytest.raises(ValueError, match=r"needs .* a GPU from sm_80 on, got torch.float16 on sm_75: use flat_gemm"):
        module.on_tensor_cores(x, w)


# ------------------------------------------------------------------------------------------ interface

X, W = torch.zeros(3, 8), torch.zeros(5, 8)
REFUSED = {
    "no tensor": (flat_gemm, [1.0], W, TypeError, r"x must be a torch.Tensor \[M, K\], got list"),
    "one row": (flat_gemm, X[0], W, ValueError, r"x must have 2 dimensions \[M, K\], got shape \[8\]"),
    "dtype of x": (flat_gemm, X.double(), W.double(), TypeError, "x must be float32 or .* got float64"),
    "dtype of w": (flat_gemm, X, W.half(), TypeError, "w must have the dtype of x: float32, got float16"),
    "device": (flat_gemm, X, W.to("meta"), ValueError, "w must have the device of x: cpu, got meta"),
    "another K": (flat_gemm, X, W[:, :7], ValueError, r"w must be \[N, K\] = \[5, 8\], got \[5, 7\]"),
    "weights [K, N]": (flat_gemm, X, W.mT.contiguous().mT, ValueError, r"contiguous rows, .* keep w.contiguous\(\)"),
    "weights of a batch": (flat_gemm, X, W[None], ValueError, r"w must have 2 dimensions .* got shape \[1, 5, 8\]"),
    "too many rows": (flat_gemm, torch.zeros(65, 8), W, ValueError, "at most 64 rows, got 65: use x @ w.T"),
    "rows for gemv": (gemv, X, W, ValueError, r"x must have 1 dimensions \[K\], got shape \[3, 8\]"),
    "another K for gemv": (gemv, X[0, :7], W, ValueError, r"w must be \[N, K\] = \[5, 7\], got \[5, 8\]"),
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    multiply, x, w, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        multiply(x, w)
