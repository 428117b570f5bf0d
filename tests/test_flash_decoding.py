"""Flash-Decoding: its arguments, every way to cut the keys in torch and Triton, work plans, and the first rung."""

from functools import partial
from itertools import accumulate

import flash_cases
import pytest
import torch
import triton
import triton.language as tl
from attention_functions import in_programs
from covering import all_cases, covering, is_full, label
from decode_compile import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import DEVICES, assert_results
from pagewise.flash_decoding import Splits, equal_ranges, flash_decoding, num_splits_heuristic
from pagewise.flash_decoding.work_plan import pieces_of
from pagewise.kernels.arguments import DecodeSizes
from pagewise.kernels.flash_decoding import split_decode_kernel
from pagewise.kernels.paged_attention import merge_splits_kernel
from pagewise.kernels.work_plan import keys_of_item, rows_of_item
from pagewise.naive_attention import attention
from pagewise.options import ScoreOptions
from pagewise.paged_attention import in_triton
from pagewise.paged_attention.in_triton import FILLING, SHARING, DecodeInputs, partial_results, shared_plan
from pagewise.tools.architecture import CPU, Architecture
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv
from pagewise.tools.tuning import decode_tiles

BACKENDS = ["torch", "triton"]


def random_qkv(B, heads, T, S, D, dtype=torch.float32, device="cpu"):
    """Return q, k and v whose strides put tokens before heads, as in a model."""
    return flash_cases.as_tokens(*flash_cases.random_qkv(T, S, D, heads, B, dtype, device))


def assert_right(found, q, k, v, lens=None, **options):
    """Compare (out, lse) with the oracle, sequence by sequence."""
    expected = []
    for dtype in (torch.float64, q.dtype):
        parts = []
        for b, n in enumerate([k.shape[2]] * len(q) if lens is None else lens):
            own = (q[b, None], k[b, None, :, :n], v[b, None, :, :n])
            parts.append(attention(*(x.to(dtype) for x in own), return_lse=True, **options))
        expected.append([torch.cat(each) for each in zip(*parts, strict=True)])
    assert_results(found, *expected)


AXES = {
    "S": [1, 2, 63, 64, 65, 799, 2048, 8192],
    "T": [1, 3, 16],
    "splits": [1, 2, 3, 17, 128, 10**6, ("size", 1000), ("share", 1), ("share", 11), ("share", 45)],
    "group": [1, 4, 8],
    "D": [64, 80, 128, 256],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "options": ["none", "causal", "window", "softcap, alibi", "causal, alibi"],
}
QUICK = AXES | {
    "S": [1, 63, 64, 65, 799, 2048],
    "splits": [1, 3, 17, 10**6, ("size", 1000), ("share", 1), ("share", 11), ("share", 45)],
}


def matrix():
    """Return a covering selection of fast cases. With PAGEWISE_FULL=1, return all sizes, dtypes and splits."""

    def quick(case):
        rows = case["T"] * case["group"]
        tiles = decode_tiles(rows, case["D"], case["dtype"], case["dtype"])
        return cdiv(case["S"], tiles.keys) * cdiv(rows, tiles.rows) <= 70

    return all_cases(AXES | {"options": ["causal"]}) if is_full() else covering(QUICK, quick)


def options_of(kind, heads, device):
    options = {"causal": "causal" in kind or kind == "window"}
    if kind == "window":
        options["window"] = 70
    if "softcap" in kind:
        options["softcap"] = 3.0
    if "alibi" in kind:
        options["alibi_slopes"] = 2.0 ** -torch.arange(1.0, heads + 1, device=device)
    return options


@pytest.mark.parametrize("case", matrix(), ids=label)
def test_every_pair_of_sizes_and_splits(case, kernel_device):
    heads = (case["group"], 1)
    qkv = random_qkv(1, heads, case["T"], case["S"], case["D"], case["dtype"], kernel_device)
    options = options_of(case["options"], case["group"], kernel_device)
    way, count = case["splits"] if isinstance(case["splits"], tuple) else ("num", case["splits"])
    attend = {
        "num": partial(flash_decoding, num_splits=count, backend="triton"),
        "size": partial(flash_decoding, split_size=count, backend="triton"),
        "share": partial(in_programs, count),
    }[way]
    assert_right(attend(*qkv, **options, return_lse=True), *qkv, **options)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [{"num_splits": 3}, {"split_size": 64}, {}], ids=str)
@pytest.mark.parametrize("window", [None, 60])
def test_several_kv_heads_with_several_chunks_of_rows(window, splits, kernel_device):
    """16 queries of 6 heads per KV head are two chunks of 64 rows, and both KV heads have two.

    With the window, the first query sees keys of tile 0, and the last query only keys of the tiles after it.
    """
    qkv = random_qkv(1, (12, 2), 16, 130, 32, torch.float16, kernel_device)
    options = {"causal": True, "window": window}
    found = flash_decoding(*qkv, **splits, **options, return_lse=True, backend="triton")
    assert_right(found, *qkv, **options)


@pytest.mark.parametrize("splits", [{}, {"num_splits": 5}, {"num_splits": 2**62}, {"split_size": 7}])
@pytest.mark.parametrize("kind", ["none", "causal", "window", "softcap, alibi"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_torch_backend(dtype, kind, splits, device):
    q, k, v = random_qkv(2, (4, 2), 3, 37, 16, dtype, device)
    options = options_of(kind, 4, device)
    for lens in (None, [37, 2]):
        seq_lens = None if lens is None else torch.tensor(lens, dtype=torch.int32, device=device)
        same = {"seq_lens": seq_lens, "return_lse": True, "backend": "torch"}
        assert_right(flash_decoding(q, k, v, **options, **splits, **same), q, k, v, lens, **options)


ATTEND = {f"{n} programs": partial(in_programs, n) for n in (1, 7, 99)} | {
    f"{n} splits, {backend}": partial(flash_decoding, num_splits=n, backend=backend)
    for n in (1, 3, 40)
    for backend in BACKENDS
}


@pytest.mark.parametrize("attend", ATTEND)
def test_ragged_batches_with_empty_sequences_and_rows_that_see_nothing(attend, kernel_device):
    """With causal, the first of 3 queries over 2 keys sees no key. Keys past a length are NaN and must not be seen."""
    lens = [0, 130, 2, 0, 0, 257, 1, 64, 0]
    q, k, v = random_qkv(len(lens), (4, 2), 3, 257, 32, device=kernel_device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=kernel_device)
    for b, n in enumerate(lens):
        k[b, :, n:], v[b, :, n:] = torch.nan, torch.nan
    found = ATTEND[attend](q, k, v, seq_lens=seq_lens, causal=True, return_lse=True)
    assert_right(found, q, k, v, lens, causal=True)


@pytest.mark.parametrize("splits", [{"num_splits": 2}, {"split_size": 2**31 - 1}])
def test_as_many_keys_as_int32_counts(splits, kernel_device):
    """The window sees the last keys. One key is repeated with stride 0, so that the keys fit in memory."""
    q, k, v = random_qkv(1, (2, 1), 1, 1, 16, device=kernel_device)
    k, v = (x.expand(1, 1, 2**31 - 1, 16) for x in (k, v))
    found = flash_decoding(q, k, v, causal=True, window=100, return_lse=True, backend="triton", **splits)
    assert_right(found, q, k[:, :, :100], v[:, :, :100])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("which", "kv_heads"), [(0, 3), (0, 1), (1, 3), (2, 3)])
def test_offsets_are_64_bit(which, kv_heads, dim, kernel_device):
    """The last sequence, head or token of q, k or v is 2³¹ elements after the first. The gap is never touched."""
    qkv = random_qkv(3, (3, kv_heads), 3, 3, 16, torch.float16, kernel_device)
    x = qkv[which]
    strides = [*torch.empty(x.shape).stride()]
    strides[dim] = 2**30
    room = torch.empty(2**31 + x.numel(), dtype=x.dtype, device=kernel_device)
    qkv[which] = room.as_strided(x.shape, strides).copy_(x)
    assert_right(flash_decoding(*qkv, causal=True, return_lse=True, backend="triton"), *qkv, causal=True)


# ------------------------------------------------------------------------------------------ equal bits


@pytest.mark.parametrize("splits", [{"num_splits": 3}, {"num_splits": 99}, {"split_size": 64}, {"split_size": 50}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_given_splits_make_a_rows_bits_independent_of_the_batch(backend, splits, kernel_device):
    """Run a sequence alone, in a batch with shorter and longer ones, and with more capacity after its keys."""
    lens = [37, 130, 0, 200]
    q, k, v = random_qkv(4, (4, 2), 1, 260, 32, torch.float16, kernel_device)
    same = {"return_lse": True, "backend": backend, **splits}
    together = flash_decoding(q, k, v, seq_lens=torch.tensor(lens, dtype=torch.int32, device=q.device), **same)
    for b, n in enumerate(lens):
        for S in (n, 260):
            length = torch.tensor([n], dtype=torch.int32, device=q.device)
            alone = flash_decoding(q[b, None], k[b, None, :, :S], v[b, None, :, :S], seq_lens=length, **same)
            for mine, theirs in zip(alone, together, strict=True):
                assert mine[0].equal(theirs[b])


def test_equal_inputs_give_equal_bits_when_programs_share(kernel_device):
    q, k, v = random_qkv(3, (4, 2), 1, 300, 32, torch.float16, kernel_device)
    seq_lens = torch.tensor([300, 7, 150], dtype=torch.int32, device=kernel_device)
    first, second = (in_programs(5, q, k, v, seq_lens=seq_lens, return_lse=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


# ------------------------------------------------------------------------------------------ the schedule


@given(
    tiles=st.lists(st.integers(0, 1000), min_size=1, max_size=64),
    num_programs=st.integers(1, 300),
    min_tiles=st.integers(1, 9),
    start=st.integers(0, 1),
)
def test_equal_ranges_hold_every_tile_once_in_slots_side_by_side(tiles, num_programs, min_tiles, start):
    programs = equal_ranges(tiles, num_programs, min_tiles=min_tiles, start=start)
    assert len(programs) == num_programs
    work = [sum(piece.stop - piece.start for piece in pieces) for pieces in programs]
    work = [n + sum(start for piece in pieces if piece.start == 0) for n, pieces in zip(work, programs, strict=True)]
    empty = start * tiles.count(0)  # an item without tiles is work too, and has no piece
    total = sum(n + start for n in tiles)
    sharing = min(num_programs, max(1, total // min_tiles))
    for n in work[:sharing]:  # except for a start whose item's first tile belongs to the next program
        assert total // sharing - start - empty <= n <= cdiv(total, sharing) + start
    assert not any(work[sharing:])
    pieces = [piece for of_program in programs for piece in of_program]
    for item, n in enumerate(tiles):
        own = [piece for piece in pieces if piece.item == item]
        assert [i for piece in own for i in range(piece.start, piece.stop)] == list(range(n))
        assert [piece.slot for piece in own] == list(range(own[0].slot, own[0].slot + len(own))) if own else True
    assert len({piece.slot for piece in pieces}) == len(pieces)
    assert all(piece.slot < num_programs + len(tiles) for piece in pieces)


@pytest.mark.slow
@given(
    tiles=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    cut=st.integers(0, 63),
    num_programs=st.integers(1, 200),
    queries=st.none() | st.lists(st.integers(0, 2), min_size=20, max_size=20),
)
@settings(deadline=None, max_examples=300 if is_full() else 40)
def test_a_plan_of_the_device_is_equal_ranges(tiles, cut, num_programs, queries):
    """An item has neighbouring slots, which the merge finds. Of packed sequences, those of one query have work."""
    device = DEVICES[-1]
    lens = torch.tensor([max(0, 64 * n - cut) for n in tiles], dtype=torch.int32, device=device)
    q, k = (torch.empty(n, 1, 1, 16, dtype=torch.float16, device=device) for n in (len(tiles), 1))
    k, cu_seqlens_q = k.expand(len(tiles), 1, 64 * 300, 16), None
    if queries is not None:
        queries = queries[: len(tiles)]
        cu_seqlens_q = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device)
        q = torch.empty(1, 1, sum(queries), 16, dtype=torch.float16, device=device)
    if not q.numel():
        return
    options, splits = ScoreOptions(causal=True), Splits("share", num_programs)
    inputs = DecodeInputs(q, k, k, options, splits, seq_lens=lens, cu_seqlens_q=cu_seqlens_q)
    [part, *_] = in_triton.parts_of(inputs)
    plan = shared_plan(inputs)
    works = [n for n, own in zip(tiles, queries or [1] * len(tiles), strict=True) if own == 1]
    items = [i for i, own in enumerate(queries or [1] * len(tiles)) if own == 1]
    found = pieces_of(plan, tiles, part.num_programs)
    expected = equal_ranges(works, part.num_programs, min_tiles=2)
    assert [[piece[1:3] for piece in own] for own in found] == [[piece[1:3] for piece in own] for own in expected]
    assert [[piece.item for piece in own] for own in found] == [
        [items[piece.item] for piece in own] for own in expected
    ]
    first_slots, counts = plan[3].tolist(), plan[4].tolist()
    for item in items:
        slots = [piece.slot for own in found for piece in own if piece.item == item]
        assert slots == list(range(first_slots[item], first_slots[item] + counts[item])) or not tiles[item]
        assert not slots or slots[-1] < part.num_slots
    assert all(counts[item] == 0 for item in range(len(tiles)) if item not in items)


@pytest.mark.slow
def test_lengths_may_change_between_two_replays_of_one_launch(kernel_device):
    """The grid and the partial results depend on the capacity, so that only the values of the lengths change."""
    q, k, v = random_qkv(3, (4, 2), 1, 300, 32, torch.float16, kernel_device)
    seq_lens = torch.tensor([300, 7, 150], dtype=torch.int32, device=kernel_device)

    def attend():
        return in_programs(5, q, k, v, seq_lens=seq_lens, return_lse=True)

    assert_right(attend(), q, k, v, seq_lens.tolist())
    replay = attend
    if kernel_device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attend()

        def replay():
            graph.replay()
            return found

    for lens in ([1, 300, 0], [299, 299, 299], [0, 0, 64], [0, 0, 0]):
        seq_lens.copy_(torch.tensor(lens))
        assert_right(replay(), q, k, v, lens)


# ------------------------------------------------------------------------------------------ how many splits


@given(st.integers(0, 3000), st.integers(1, 300), st.integers(0, 2000), st.integers(1, 200))
def test_heuristic_keeps_its_bounds_and_its_promise(num_tiles, num_sms, num_key_tiles, max_splits):
    def efficiency(s):
        return num_tiles * s / num_sms / max(1, cdiv(num_tiles * s, num_sms))

    s = num_splits_heuristic(num_tiles, num_sms, num_key_tiles, max_splits)
    limit = max(1, min(max_splits, num_key_tiles))
    assert 1 <= s <= limit
    longest = [cdiv(num_key_tiles, i) for i in range(1, limit + 1)]
    shorter = [i for i in range(1, limit + 1) if i == 1 or longest[i - 1] < longest[i - 2]]
    if num_tiles and limit > 1 and efficiency(1) < 0.8:
        assert s in shorter
        assert efficiency(s) >= 0.85 * max(map(efficiency, shorter))
        assert all(efficiency(i) < 0.85 * max(map(efficiency, shorter)) for i in shorter if i < s)
    else:
        assert s == 1


def test_splits_fill_a_gpu(kernel_device, monkeypatch):
    """Equal lengths are cut by number. For other lengths only the capacity is known. A CPU needs one split."""
    q, k, _ = random_qkv(1, (32, 8), 1, 1, 128, torch.float16, kernel_device)
    k = k.expand(1, 8, 65536, 128)
    for gpu, equal, other in ((Architecture(90, 232448, 132), (29, 0), (1, 264)), (CPU, (1, 0), (1, 0))):
        monkeypatch.setattr(in_triton, "architecture", lambda device, gpu=gpu: gpu)
        for splits, expected in ((FILLING, equal), (SHARING, other)):
            [part] = in_triton.parts_of(DecodeInputs(q, k, k, ScoreOptions(), splits))
            assert (part.num_splits, part.num_programs) == expected


def test_packed_sequences_are_two_parts(kernel_device, monkeypatch):
    """Decoding rows take the smallest tile, and chunks the largest. A chunk is cut only if it has very many keys."""
    gpu = Architecture(90, 232448, 132)
    monkeypatch.setattr(in_triton, "architecture", lambda device: gpu)
    q, k = torch.empty(1, 8, 271, 128).half(), torch.empty(1, 16, 2, 128).half()
    ends = torch.empty(17, dtype=torch.int32)
    for capacity, splits in ((1024, 1), (100_000, 25)):
        tables = torch.empty(16, capacity // 16, dtype=torch.int32)
        inputs = DecodeInputs(q, k, k, ScoreOptions(), SHARING, tables, cu_seqlens_q=ends)
        decoding, chunks = in_triton.parts_of(inputs)
        assert (decoding.tiles.rows, decoding.num_programs, decoding.items) == (16, 264, 32)
        assert (chunks.tiles.rows, chunks.num_splits, chunks.items) == (128, splits, 2 * (271 * 4 // 128 + 16))
    assert len(in_triton.parts_of(inputs._replace(q=q[:, :, :1]))) == 1


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_rows_of_a_kv_head_may_fill_several_tiles(kv_heads, kernel_device):
    """In float32 a tile has 16 rows. The 32 rows of a KV head are two chunks, which no other KV head may take."""
    qkv = random_qkv(1, (8 * kv_heads, kv_heads), 4, 40, 16, device=kernel_device)
    out = flash_decoding(*qkv, causal=True, return_lse=True, backend="triton")
    exact, naive = (
        attention(*(x.to(t) for x in qkv), causal=True, return_lse=True) for t in (torch.float64, qkv[0].dtype)
    )
    assert_results(out, exact, naive)


# ------------------------------------------------------------------------------------------ the first rung


def first_rung(q, k, v, num_splits, D):
    """`split_decode_kernel` and lesson 5's merge, as lesson 7 launches them."""
    (B, H, _), Hkv, S = q.shape, k.shape[1], k.shape[2]
    out, lse = q.new_empty(B * H * D), q.new_empty(B * H, dtype=torch.float32)
    partials = partial_results(B * H * num_splits, D, q.device)
    sizes = {"D": D, "GROUP": H // Hkv, "ROWS": 16, "TILE": 32}
    launch(split_decode_kernel, (B, Hkv, num_splits), q, k, v, *partials, H, S, D**-0.5, **sizes)
    sizes = {"D": D, "BLOCK_D": D, "LOADS": 16}
    launch(merge_splits_kernel, (B * H,), partials, out, lse, num_splits, **sizes, outputs=(out, lse))
    return out.view(B, H, 1, D), lse.view(B, H, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "S", "num_splits"), [((4, 4), 65, 1), ((6, 2), 333, 5), ((8, 1), 31, 20)])
def test_the_first_rung_matches_dense_attention(heads, S, num_splits, dtype, kernel_device):
    q, k, v = random_qkv(2, heads, 1, S, 64, dtype, kernel_device)
    assert_right(first_rung(q[:, :, 0], k, v, num_splits, 64), q, k, v)


# ------------------------------------------------------------------------------------------ bad arguments


def lens(*numbers):
    return {"seq_lens": torch.tensor(numbers, dtype=torch.int32, device=DEVICES[-1])}


WIDE_Q, WIDE_K = (torch.zeros(2, *sizes, 320, device=DEVICES[-1]) for sizes in ((4, 1), (2, 9)))
Q, K = WIDE_Q[..., :16], WIDE_K[..., :16]
REFUSED = [  # by both backends
    ({"num_splits": 2, "split_size": 64}, ValueError, "num_splits = 2 and split_size = 64 exclude each other"),
    ({"num_splits": 0}, ValueError, "num_splits"),
    ({"split_size": 2.5}, TypeError, "split_size"),
    ({"seq_lens": lens(5, 9)["seq_lens"].long()}, TypeError, "seq_lens"),
    (lens(5), ValueError, "seq_lens"),
    (lens(5, 10), ValueError, "seq_lens must be from 0 to S = 9.* got 10"),
    (lens(-1, 9), ValueError, "seq_lens must be from 0 to S = 9.* got -1"),
    ({"backend": "cuda"}, ValueError, "backend must be"),
]
REFUSED_BY_TRITON = [
    ({"q": Q.double(), "k": K.double()}, ValueError, 'float64.*backend="torch"'),
    ({"k": WIDE_K[..., ::20]}, ValueError, 'k contiguous in its last dimension.*backend="torch"'),
    ({"q": WIDE_Q, "k": WIDE_K}, ValueError, 'head sizes up to 256, got 320.*backend="torch"'),
    ({"k": K[:, :, :1].expand(2, 2, 2**31, 16)}, ValueError, 'up to 2147483647 keys, got 2147483648.*backend="torch"'),
]


@pytest.mark.parametrize(
    ("backend", "change", "error", "match"),
    [*(("torch", *each) for each in REFUSED), *(("triton", *each) for each in REFUSED + REFUSED_BY_TRITON)],
)
def test_what_does_not_fit_is_named(backend, change, error, match, shapes_unchecked):
    arguments = {"backend": backend, "q": Q, "k": K, "check": True} | change
    with pytest.raises(error, match=match):
        flash_decoding(v=arguments["k"], **arguments)


def test_programs_that_share_all_work_have_no_bounds_for_one_sequence():
    with pytest.raises(ValueError, match="share all work"):
        Splits("share", 3).bounds(0, 100)


@pytest.mark.parametrize(
    ("way", "count", "bounds"),
    [
        ("num", 3, [(2, 4), (4, 7), (7, 10)]),
        ("num", 100, [(i, i + 1) for i in range(2, 10)]),
        ("size", 3, [(2, 5), (5, 8), (8, 10)]),
        ("size", 100, [(2, 10)]),
    ],
)
def test_splits_cut_the_keys_of_a_sequence(way, count, bounds):
    assert Splits(way, count).bounds(2, 10) == bounds
    assert Splits(way, count).bounds(5, 5) == [(5, 5)]


@pytest.mark.parametrize("options", [{}, {"num_splits": 2}, {"seq_lens": torch.zeros(0, dtype=torch.int32)}], ids=str)
def test_a_batch_without_sequences_has_empty_results(options):
    q, k = torch.zeros(0, 4, 1, 16), torch.zeros(0, 2, 9, 16)
    out, lse = flash_decoding(q, k, k, **options, return_lse=True, backend="torch")
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])


def test_gradients_come_from_torch(device):
    qkv = [x.detach().requires_grad_() for x in random_qkv(1, (4, 2), 2, 30, 16, torch.float64, device)]
    slopes = torch.rand(4, device=device).requires_grad_()
    options = {"causal": True, "alibi_slopes": slopes}
    mine = torch.autograd.grad(flash_decoding(*qkv, num_splits=3, **options).sum(), [*qkv, slopes])
    theirs = torch.autograd.grad(attention(*qkv, **options).sum(), [*qkv, slopes])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------------ slots, impossible lengths


@pytest.mark.slow
@pytest.mark.parametrize("splits", [("num", 12), ("size", 32), ("share", 30)], ids=str)
@pytest.mark.parametrize("head_size", [16, 20])
def test_a_slot_is_read_only_after_it_was_written(splits, head_size, kernel_device, monkeypatch):
    """The memory of the slots holds NaN. A last row with a whole group of heads writes no number after its slot."""
    made = []

    def with_nan(slots, D, device):
        room = [torch.full((slots * n + 4,), torch.nan, device=device) for n in (1, 1, D)]
        made.extend(room)
        return tuple(x[:-4] for x in room)

    monkeypatch.setattr(in_triton, "partial_results", with_nan)
    q, k, v = (torch.randn(3, heads, n, head_size, device=kernel_device) for heads, n in ((16, 1), (1, 700), (1, 700)))
    lens = torch.tensor([700, 40, 640], dtype=torch.int32, device=kernel_device)
    out, lse = in_triton.attend(DecodeInputs(q, k, v, ScoreOptions(), splits, seq_lens=lens))
    for b, n in enumerate(lens.tolist()):
        right, right_lse = attention(q[b, None], k[b, None, :, :n], v[b, None, :, :n], return_lse=True)
        torch.testing.assert_close(out[b, None], right, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[b, None], right_lse, rtol=1e-4, atol=1e-5)
    assert all(x[-4:].isnan().all() for x in made)


@triton.jit
def keys_kernel(seq_lens, found, capacity, SIZES: tl.constexpr):
    seq = tl.program_id(0)
    first_key, end_key, length, _ = keys_of_item(seq, 0, SIZES.GROUP, seq_lens, capacity, 2**31 - 1, SIZES, False)
    tl.store(found + 3 * seq, first_key)
    tl.store(found + 3 * seq + 1, end_key)
    tl.store(found + 3 * seq + 2, length)


def test_a_sequence_of_an_impossible_length_has_no_keys(kernel_device):
    lens = torch.tensor([-1, 0, 5, 6, 2**31 - 1], dtype=torch.int32, device=kernel_device)
    found, sizes = torch.full((15,), -1, dtype=torch.int32, device=kernel_device), DecodeSizes(None, 16, 16, 1, 16, 32)
    launch(keys_kernel, (5,), seq_lens=lens, found=found, capacity=5, SIZES=sizes, outputs=(found,))
    assert found.view(5, 3).tolist() == [[0, 0, 0], [0, 0, 0], [0, 5, 5], [0, 0, 0], [0, 0, 0]]


@triton.jit
def rows_kernel(cu_seqlens_q, num_seqs, found, SIZES: tl.constexpr):
    _, _, _, num_rows, _ = rows_of_item(tl.program_id(0), cu_seqlens_q, num_seqs, 1, 1, SIZES)
    tl.store(found + tl.program_id(0), num_rows)


def test_a_packed_sequence_has_rows_in_one_of_two_launches(kernel_device):
    ends = torch.tensor([0, 1, 4, 4, 5], dtype=torch.int32, device=kernel_device)  # 1, 3, 0 and 1 queries
    sizes, rows = DecodeSizes(None, 16, 16, 1, 16, 32), []
    for num_seqs in (None, 4):
        found = torch.full((4,), -1, dtype=torch.int32, device=kernel_device)
        launch(rows_kernel, (4,), cu_seqlens_q=ends, num_seqs=num_seqs, found=found, SIZES=sizes, outputs=(found,))
        rows.append(found.tolist())
    assert rows == [[1, 0, 0, 1], [0, 3, 0, 0]]
