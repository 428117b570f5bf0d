"""Flash-Decoding: its arguments, every way to cut the keys in torch and Triton, work plans, and the first rung."""

from functools import partial
from itertools import pairwise

import flash_cases
import pytest
import torch
from attention_functions import in_programs
from covering import all_cases, covering, is_full, label
from decode_compile import POINTERS
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import DEVICES, assert_results
from pagewise.flash_decoding import Piece, Splits, equal_ranges, flash_decoding, in_triton, num_splits_heuristic
from pagewise.flash_decoding.work_plan import Items, work_plan
from pagewise.kernels.flash_decoding import split_decode_kernel
from pagewise.kernels.paged_attention import merge_splits_kernel
from pagewise.naive_attention import attention
from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_triton import partial_results
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
@pytest.mark.parametrize("which", [0, 1, 2])
def test_offsets_are_64_bit(which, dim, kernel_device):
    """The last sequence, head or token of q, k or v is 2³¹ elements after the first. The gap is never touched."""
    qkv = random_qkv(3, (3, 3), 3, 3, 16, torch.float16, kernel_device)
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
    total = sum(n + start for n in tiles if n)
    sharing = min(num_programs, max(1, total // min_tiles))
    for n in work[:sharing]:  # except for a start whose item's first tile belongs to the next program
        assert total // sharing - start <= n <= cdiv(total, sharing) + start
    assert not any(work[sharing:])
    pieces = [piece for of_program in programs for piece in of_program]
    for item, n in enumerate(tiles):
        own = [piece for piece in pieces if piece.item == item]
        assert [i for piece in own for i in range(piece.start, piece.stop)] == list(range(n))
        assert [piece.slot for piece in own] == list(range(own[0].slot, own[0].slot + len(own))) if own else True
    assert len({piece.slot for piece in pieces}) == len(pieces)
    assert all(piece.slot < num_programs + len(tiles) for piece in pieces)


@given(
    tiles=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    splits=st.one_of(
        st.tuples(st.just("num"), st.integers(1, 400)),
        st.tuples(st.just("size"), st.integers(1, 20000)),
        st.tuples(st.just("share"), st.integers(1, 200)),
    ),
)
@settings(deadline=None)
def test_a_plan_holds_every_tile_once_and_stores_every_result_once(tiles, splits):
    """Splits of one item have neighbouring slots in the order of its keys, and only an item that is split has slots."""
    splits = Splits(*splits)
    plan = plan_of(tiles, splits)
    if splits.way == "share":
        assert pieces_of(plan) == equal_ranges(tiles, plan.num_programs, min_tiles=2)
    table = plan.splits.tolist()
    ends = plan.programs.tolist()
    assert ends == sorted(ends)
    assert ends[-1] <= len(table)
    visited = {index for program in range(plan.num_programs) for index in range(ends[program], ends[program + 1])}
    assert all(table[index][3] == -2 for index in range(len(table)) if index not in visited)
    for item, n in enumerate(tiles):
        own = [(start - item, end - item, slot) for i, start, end, slot in table if i == item and slot != -2]
        assert [tile for start, end, _ in own for tile in range(start, end)] == list(range(n))
        first_slot, num_splits = plan.items[item, :2].tolist()
        stored = [slot for *_, slot in own]
        if num_splits == 1:
            assert stored == [-1]
        else:
            assert stored == list(range(first_slot, first_slot + num_splits))
            assert not stored or stored[-1] < plan.num_slots
        if splits.way != "share":
            assert num_splits == max(
                1, min(n, splits.count) if splits.way == "num" else cdiv(n, cdiv(splits.count, 64))
            )


def plan_of(tiles, splits):
    """Return the plan of items with these numbers of tiles of 64 keys. An item's first tile is its own number."""
    num_tiles, item = torch.tensor(tiles), torch.arange(len(tiles))
    items = Items(item, num_tiles, item >= 0, item[:, None].expand(-1, 4))
    return work_plan(items, splits, tile=64, max_keys=64 * max(tiles), min_keys=128)


def pieces_of(plan):
    """Return the pieces of each program, with the slots that `equal_ranges` gives them."""
    programs = []
    for first, last in pairwise(plan.programs.tolist()):
        pieces = []
        for index in range(first, last):
            item, start, end, slot = plan.splits[index].tolist()
            if slot != -2:
                assert slot in (-1, index)
                pieces.append(Piece(item, start - item, end - item, index))
        programs.append(pieces)
    return programs


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
    k, lens = k.expand(1, 8, 65536, 128), torch.tensor([65536], dtype=torch.int32, device=kernel_device)
    for gpu, equal, other in (
        (Architecture(90, 232448, 132), ("num", 29), ("share", 264)),
        (CPU, ("num", 1), ("num", 1)),
    ):
        monkeypatch.setattr(in_triton, "architecture", lambda device, gpu=gpu: gpu)
        for seq_lens, splits in ((None, Splits(*equal)), (lens, Splits(*other))):
            chosen, expected = (
                in_triton.decode_plan(q, k, ScoreOptions(), given, seq_lens=seq_lens) for given in (None, splits)
            )
            assert chosen.num_programs == expected.num_programs
            assert chosen.splits.equal(expected.splits)


def test_a_plan_of_equal_lengths_is_made_once(kernel_device):
    qkv = random_qkv(2, (4, 2), 1, 77, 32, device=kernel_device)
    first, second = (in_triton.decode_plan(*qkv[:2], ScoreOptions(), Splits("num", 3)) for _ in range(2))
    assert first is second
    lens = torch.tensor([77, 5], dtype=torch.int32, device=kernel_device)
    other = in_triton.decode_plan(*qkv[:2], ScoreOptions(), Splits("num", 3), seq_lens=lens)
    assert not other.splits.equal(first.splits)


# ------------------------------------------------------------------------------------------ the first rung


def first_rung(q, k, v, num_splits, D):
    """`split_decode_kernel` and lesson 5's merge, as lesson 7 launches them."""
    (B, H, _), Hkv, S = q.shape, k.shape[1], k.shape[2]
    out, lse = q.new_empty(B * H * D), q.new_empty(B * H, dtype=torch.float32)
    partials = partial_results(B * H * num_splits, D, q.device)
    sizes = {"D": D, "GROUP": H // Hkv, "ROWS": 16, "TILE": 32}
    launch(split_decode_kernel, (B, Hkv, num_splits), q, k, v, *partials, H, S, D**-0.5, **sizes)
    sizes = {"D": D, "BLOCK_D": D, "LOADS": 16}
    launch(merge_splits_kernel, (B * H,), partials, out, lse, num_splits, 1.0, **sizes, outputs=(out, lse))
    return out.view(B, H, 1, D), lse.view(B, H, 1)


@pytest.mark.parametrize("dtype", list(POINTERS))
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


def test_gradients_come_from_torch(device):
    qkv = [x.detach().requires_grad_() for x in random_qkv(1, (4, 2), 2, 30, 16, torch.float64, device)]
    slopes = torch.rand(4, device=device).requires_grad_()
    options = {"causal": True, "alibi_slopes": slopes}
    mine = torch.autograd.grad(flash_decoding(*qkv, num_splits=3, **options).sum(), [*qkv, slopes])
    theirs = torch.autograd.grad(attention(*qkv, **options).sum(), [*qkv, slopes])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
