"""The CUDA FlashAttention kernels: held against the oracle, watched on the CPU, compiled for GPUs.

`make test` runs a selection in which every two values of two axes meet, but for dtypes: each head size has one. With
PAGEWISE_FULL=1 those meet too, and on a GPU all values.
"""

import itertools
import re

import numpy as np
import pytest
import torch
from covering import all_cases, covering, in_turns, is_full, label, one_in_three

import cudascope
from conftest import assert_results
from cudascope import CudaKernel
from pagewise.flash_attention import in_cuda
from pagewise.flash_attention.dropout import Dropout
from pagewise.naive_attention import attention
from pagewise.options import ScoreOptions

SOURCE = in_cuda.SOURCE.read_text()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
AXES = {
    "lengths": ((1, 1), (1, 147), (3, 799), (64, 128), (113, 203), (127, 512), (128, 217), (239, 1), (257, 129)),
    "head_size": in_cuda.HEAD_SIZES,
    "heads": ((6, 6), (6, 2), (6, 1)),
    "causal": (False, True),
    "dtype": DTYPES,
}
# A build of its own for each pair. A new head size is tried in float32.
DTYPE_OF = dict(zip(in_cuda.HEAD_SIZES, itertools.chain((0, 1, 1, 0, 2, 1), itertools.repeat(0)), strict=False))
SIZES = ", ".join(map(str, in_cuda.HEAD_SIZES))
ARCHITECTURES = ("sm_80", "sm_90")


def is_quick(case):
    return is_full() or case["dtype"] == DTYPES[DTYPE_OF[case["head_size"]]]


CASES = all_cases(AXES) if is_full() and torch.cuda.is_available() else covering(AXES, is_quick)


def random_qkv(T, S, H, Hkv, D, dtype=torch.float32, device="cpu", B=1):
    """As they come from a model, each with strides of its own; the memory between and behind them is NaN."""
    generator = torch.Generator().manual_seed(0)

    def view(heads, tokens, more_tokens, more_columns):
        room = torch.full((B, tokens + more_tokens, heads, D + more_columns), torch.nan, dtype=dtype, device=device)
        x = room[:, :tokens, :, :D].transpose(1, 2)
        return x.copy_(torch.randn(x.shape, generator=generator).to(dtype))

    return view(H, T, 1, 8), view(Hkv, S, 2, 16), view(Hkv, S, 3, 24)


def assert_matches(out, lse, q, k, v, **options):
    exact = attention(q.double(), k.double(), v.double(), **options, return_lse=True)
    assert_results((out, lse), exact, attention(q, k, v, **options, return_lse=True))


@pytest.mark.parametrize("case", CASES, ids=label)
def test_matches_the_oracle(case, kernel_device, canaries):
    (T, S), (H, Hkv) = case["lengths"], case["heads"]
    q, k, v = random_qkv(T, S, H, Hkv, case["head_size"], case["dtype"], kernel_device)
    out, lse = in_cuda.forward(q, k, v, ScoreOptions(causal=case["causal"]))
    assert_matches(out, lse, q, k, v, causal=case["causal"])
    assert canaries()


# ------------------------------------------------------------------------------------------ watched

WATCHED = (35, 71, 2, 1)  # a tile of queries, in which a warp has 3 and two have none, and three tiles of keys


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_size"),
    [(torch.float32, 32), (torch.float16, 64)],
)
def test_no_findings_under_any_schedule(dtype, head_size):
    """Every access is within bounds. No race, no divergent barrier and no uninitialised read occurs."""
    q, k, v = random_qkv(*WATCHED, head_size, dtype)
    expected = in_cuda.forward(q, k, v, ScoreOptions(causal=True))
    for seed in (None, 1, 2):
        with cudascope.check(schedule=seed):
            found = in_cuda.forward(q, k, v, ScoreOptions(causal=True))
        assert found[0].equal(expected[0])
        assert found[1].equal(expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_q_comes_once_and_k_and_v_once_per_tile_of_queries(causal):
    """The traffic with main memory, against the formula."""
    T, S, H, Hkv, D = 144, 71, 2, 1, 32
    q, k, v = random_qkv(T, S, H, Hkv, D)
    with cudascope.observe() as report:
        in_cuda.forward(q, k, v, ScoreOptions(causal=causal))
    (launch,) = report.launches
    assert len(launch.trace) < 10**6  # whole
    tiles = [127 + S - T + 1, S] if causal else [S, S]  # keys that query 127 sees, and query 143
    in_bytes = {name: int(launch.accesses(name)["bytes"].sum()) for name in ("q", "k", "v", "out", "lse")}
    row = H * D * 4
    assert in_bytes == {"q": T * row, "k": sum(tiles) * row, "v": sum(tiles) * row, "out": T * row, "lse": T * H * 4}
    assert launch.count(space="global").sectors * 32 == sum(in_bytes.values())  # no sector is moved for a part of it


def words_moved(launch):
    """Words of shared memory, one that several lanes of a request want counted once. For one thread block."""
    shared = launch.trace[launch.trace["space"] == "shared"]
    line, warp, execution, element = (
        shared[name].astype(np.int64) for name in ("line", "warp", "execution", "element")
    )
    _, once = np.unique((line * 32 + warp << 44) + (execution << 22) + element, return_index=True)
    return int(shared["bytes"][once].sum()) // 4


def test_what_moves_through_shared_memory():
    """Q, K and V on their way in, O on its way out. No warp hands a result to another."""
    Br, Bc, D, warps = in_cuda.TILE_ROWS, in_cuda.TILE_KEYS, 32, in_cuda.NUM_WARPS
    q, k, v = random_qkv(Br, 2 * Bc, 1, 1, D)
    with cudascope.observe() as report:
        in_cuda.forward(q, k, v, ScoreOptions())
    (launch,) = report.launches
    assert len(launch.trace) < 10**6  # whole
    tiles_in = Br * D + 2 * 2 * Bc * D
    assert launch.count("write", "shared").bytes == 4 * (tiles_in + Br * D)  # and O on its way out
    assert launch.barriers - warps == 1 + 2 * 2
    q_reads, kv_reads = 2 * Bc // 8 * Br * D, warps * 2 * 2 * Bc * D  # Q for 8 keys, K and V for 32 rows
    assert words_moved(launch) == tiles_in + q_reads + kv_reads + 2 * Br * D
    assert launch.count("shuffle").requests == 0


@pytest.mark.parametrize(("dtype", "head_size"), [(torch.float32, 32), (torch.float16, 64)])
def test_threads_that_read_the_same_column_of_q_meet_no_bank_twice(dtype, head_size):
    q, k, v = random_qkv(*WATCHED, head_size, dtype)
    with cudascope.observe() as report:
        in_cuda.forward(q, k, v, ScoreOptions())
    (line,) = [n for n, text in enumerate(SOURCE.splitlines(), 1) if "q = Q[c];" in text]
    assert report.count("read", "shared", line).requests
    assert report.count("read", "shared", line).bank_conflicts == 0


# ------------------------------------------------------------------------------------------ planted mistakes

MISTAKES = {
    "l not rescaled": ("    l *= alpha;\n", ""),
    "mask off by one": ("max(row + S - T + 1, 0)", "max(row + S - T, 0)"),
    "the last tile forgotten": ("j < keys; j += Bc", "j + Bc <= keys; j += Bc"),
    "what nobody sees not zeroed": ("if (row < rows) vec =", "vec ="),
    "the row stride of k for v": ("v + j * v_row", "v + j * k_row"),
    "KV heads dealt in turn": ("kv_head = head / (gridDim.y / num_kv_heads)", "kv_head = head % num_kv_heads"),
    "lse without m": ("= row.m + logf(row.l)", "= logf(row.l)"),
    "O not rescaled": ("O[d] *= alpha;", ";"),
    "mask from the top left": ("max(row + S - T + 1, 0)", "min(row + 1, S)"),
    "scale forgotten": ("? scale * S[k] :", "? S[k] :"),
    "l not divided by": ("row.l > 0 ? 1 / row.l : row.l", "1"),
}


def with_source(monkeypatch, source):
    """Launch the kernel of this source instead."""
    make = in_cuda.cuda_kernel
    monkeypatch.setattr(in_cuda, "cuda_kernel", lambda *sizes: CudaKernel(source, make(*sizes).name))


@pytest.mark.parametrize("mistake", one_in_three([*MISTAKES]))
def test_planted_mistakes_are_caught(mistake, monkeypatch):
    right, wrong = MISTAKES[mistake]
    assert right in SOURCE
    with_source(monkeypatch, SOURCE.replace(right, wrong))
    q, k, v = random_qkv(150, 201, 4, 2, 32, B=2)

    def matches():
        out, lse = in_cuda.forward(q, k, v, ScoreOptions(causal=True))
        assert_matches(out, lse, q, k, v, causal=True)

    with pytest.raises((AssertionError, cudascope.Finding)):  # a read past a tensor's end stops the launch
        matches()


BARRIERS = {
    "before a tile": "        __syncthreads();                  // K_j and V_j have been read\n",
    "after a tile": "        __syncthreads();  // Q_i, K_j and V_j have been loaded\n",
    "of a warp": "    __syncwarp();  // a warp writes its own 32 rows\n",
}


@pytest.mark.parametrize("barrier", one_in_three([*BARRIERS]))
def test_a_missing_barrier_is_a_race(barrier, monkeypatch):
    assert SOURCE.count(BARRIERS[barrier]) == 1
    with_source(monkeypatch, SOURCE.replace(BARRIERS[barrier], ""))
    q, k, v = random_qkv(*WATCHED, 32)
    with pytest.raises(cudascope.Finding) as caught, cudascope.check():
        in_cuda.forward(q, k, v, ScoreOptions())
    assert caught.value.what in ("race", "uninitialised")


# ------------------------------------------------------------------------------------------ what is at the edges


def test_what_no_query_of_a_tile_sees_does_no_harm(kernel_device):
    """NaN in the last key and value: causally, only the last query looks at them."""
    q, k, v = random_qkv(200, 200, 2, 1, 32, device=kernel_device)
    out, lse = in_cuda.forward(q, k, v, ScoreOptions(causal=True))
    k[..., -1, :] = v[..., -1, :] = torch.nan
    again, lse_again = in_cuda.forward(q, k, v, ScoreOptions(causal=True))
    assert again[..., : in_cuda.TILE_ROWS, :].equal(out[..., : in_cuda.TILE_ROWS, :])
    assert lse_again[..., :-1].equal(lse[..., :-1])
    assert again[..., -1, :].isnan().all()
    assert lse_again[..., -1].isnan().all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_that_do_not_lie_in_vecs_are_read_right(name, kernel_device, monkeypatch):
    """At an odd address, rows apart by an odd number, columns apart: copied, all else is read in place."""
    inputs = dict(zip("qkv", random_qkv(20, 30, 2, 1, 32, device=kernel_device), strict=True))
    with monkeypatch.context() as without_copies:
        without_copies.setattr(torch.Tensor, "clone", None)
        expected = in_cuda.forward(*inputs.values(), ScoreOptions())[0]
    x = inputs[name]
    odd = torch.zeros(x.numel() + 1, device=kernel_device)[1:].view(x.shape)
    rows = torch.zeros(*x.shape[:-1], 33, device=kernel_device)[..., :32]
    columns = torch.zeros(*x.shape[:-1], 64, device=kernel_device)[..., ::2]
    for other in (odd, rows, columns):
        assert in_cuda.forward(*(inputs | {name: other.copy_(x)}).values(), ScoreOptions())[0].equal(expected)


@pytest.mark.parametrize(("name", "dim"), [("q", 0), ("k", 1), ("v", 2), ("k", 2)])
def test_offsets_are_64_bit(name, dim, kernel_device, monkeypatch):
    """The second batch, head or row lies 2³¹ elements on; what is between is never touched and needs no memory."""
    inputs = dict(zip("qkv", random_qkv(2, 2, 2, 2, 64, torch.float16, kernel_device, B=2), strict=True))
    expected = in_cuda.forward(*inputs.values(), ScoreOptions())[0]
    x = inputs[name].contiguous()
    strides = list(x.stride())
    strides[dim] = 2**31
    far = torch.empty(2**31 + x.numel(), dtype=x.dtype, device=kernel_device).as_strided(x.shape, strides).copy_(x)
    monkeypatch.setattr(torch.Tensor, "clone", None)  # it is not copied
    assert in_cuda.forward(*(inputs | {name: far}).values(), ScoreOptions())[0].equal(expected)


def test_out_lies_as_q_does(kernel_device):
    """Without a copy where heads come after tokens; always with whole rows."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_qkv(9, 9, 4, 2, 32, device=kernel_device))
    out, _ = in_cuda.forward(q, k, v, ScoreOptions())
    assert out.stride() == q.stride()
    columns_apart = q.mT.contiguous().mT
    for other in (q.contiguous(), columns_apart, q[:, :1].expand(-1, 4, -1, -1)):
        expected = in_cuda.forward(other.clone(), k, v, ScoreOptions())[0]
        assert in_cuda.forward(other, k, v, ScoreOptions())[0].equal(expected)
    assert in_cuda.forward(columns_apart, k, v, ScoreOptions())[0].equal(out)


# ------------------------------------------------------------------------------------------ compiled, without a GPU

COMPILED = [
    (dtype, head_size)
    for head_size in in_cuda.HEAD_SIZES
    for dtype in DTYPES
    if is_full() or (head_size == 128 and dtype != torch.bfloat16)  # the largest hold most
]


@pytest.mark.slow
@pytest.mark.parametrize(("instantiation", "arch"), in_turns(COMPILED, ARCHITECTURES))
def test_compiles_without_spills(instantiation, arch):
    resources = in_cuda.cuda_kernel(in_cuda.SOURCE, "flash_attention_kernel", *instantiation).resources(arch)
    assert resources.spilled_bytes == 0
    assert resources.shared_bytes == 0  # all of it dynamic: see `tile_bytes`


def test_shared_memory_is_what_the_launcher_reckons():
    """In the trace: how far the dynamic array reaches that a kernel touches."""
    q, k, v = random_qkv(128, 32, 1, 1, 32)
    with cudascope.observe() as report:
        in_cuda.forward(q, k, v, ScoreOptions())
    shared = report.trace[report.trace["space"] == "shared"]
    assert int((4 * shared["element"] + shared["bytes"]).max()) == in_cuda.tile_bytes(q.dtype, 32)


# ------------------------------------------------------------------------------------------ interface

REFUSED = {
    "dtype": ({"q": torch.zeros(1, 1, 1, 64, dtype=torch.float64)}, "takes float32.* got torch.float64"),
    "head size": ({"q": torch.zeros(1, 1, 1, 40)}, f"takes head sizes {SIZES}, got 40"),
    "grid": ({"q": torch.zeros(1, 1, 1, 64).expand(70000, 1, 1, 64)}, "takes at most 65535 .* got 70000 and 1"),
    "window": ({"options": ScoreOptions(causal=True, window=3)}, "takes no window"),
    "softcap": ({"options": ScoreOptions(softcap=3.0)}, "takes no softcap"),
    "ALiBi": ({"options": ScoreOptions(alibi_slopes=torch.zeros(1))}, "takes no alibi_slopes"),
    "mask": ({"options": ScoreOptions(attn_mask=torch.ones(1, 1, dtype=torch.bool))}, "takes no attn_mask"),
    "dropout": ({"dropout": Dropout(0.5, torch.tensor(1))}, "takes no dropout_p"),
}  # fmt: skip
TAKEN = {"q": torch.zeros(1, 1, 1, 64), "options": ScoreOptions(0.5, causal=True), "dropout": Dropout()}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_cannot_do_is_refused_with_the_reason(case):
    change, reason = REFUSED[case]
    assert re.fullmatch(reason, in_cuda.refuses(**(TAKEN | change)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_else_is_taken(dtype):
    for head_size in in_cuda.HEAD_SIZES:
        assert in_cuda.refuses(**(TAKEN | {"q": torch.zeros(2, 3, 5, head_size, dtype=dtype)})) is None
