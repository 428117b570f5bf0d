"""Packed queries over a paged cache, in torch and Triton, against dense attention; and plans as an engine uses them."""

import pytest
import torch
from covering import covering, label
from paged_cases import changed, dense, paged_inputs

from conftest import DEVICES, assert_results, executed
from pagewise import paged_attention_varlen as varlen
from pagewise.flash_decoding import Splits
from pagewise.paged_attention import in_cuda, paged_attention_varlen
from pagewise.paged_attention.inputs import DECODING
from pagewise.paged_attention_varlen import in_torch as varlen_in_torch
from pagewise.paged_blocks.cache import to_vllm_layout

E4M3 = torch.float8_e4m3fn
MIXES = {  # (length, queries) of each sequence
    "decode": [(1, 1), (33, 1), (130, 1), (16, 1)],
    "prompts": [(33, 33), (1, 1), (17, 17)],
    "chunks": [(130, 20), (37, 5), (18, 17)],
    "far apart": [(700, 1), (3, 1), (1, 1), (90, 2), (260, 1), (2, 2)],
    "mixed": [(70, 1), (0, 0), (40, 0), (67, 9), (130, 1), (35, 35), (129, 4)],
}
AXES = {
    "mix": ["decode", "prompts", "chunks", "mixed"],
    "head_size": [32, 80, 256],
    "block_size": [1, 8, 16],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "cache": [None, E4M3],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "alibi": [False, True],
    "window": [None, 50],
    "softcap": [0.0, 3.0],
    "splits": [{}, {"num_splits": 3}, {"split_size": 40}],
    "backend": ["torch", "triton"],
}


def packed_inputs(seq_lens, num_queries, heads, kv_heads, head_size, *, shared=0, seed=0, **rest):
    """q, caches, tables, lengths and running sums. Slots that no query may see hold poison, as in `paged_inputs`.

    The first `shared` blocks of sequence 0 are also the first of all sequences that are long enough.
    """
    _, k_cache, v_cache, tables, lens = paged_inputs(seq_lens, heads, kv_heads, head_size, seed=seed, **rest)
    for b, length in enumerate(seq_lens):
        if length >= shared * k_cache.shape[1]:
            tables[b, :shared] = tables[0, :shared]
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(sum(num_queries), heads, head_size, generator=generator).to(rest["dtype"]).to(lens.device)
    ends = torch.tensor([0, *num_queries]).cumsum(0).to(lens)
    return q, k_cache, v_cache, tables, lens, ends


def assert_packed_matches_dense(path, inputs, **options):
    """By the one tolerance policy, every row."""
    out, lse = path(*inputs, **options)
    exact, naive = (dense(*inputs, dtype=dtype, **options) for dtype in (torch.float64, inputs[0].dtype))
    assert_results((out, naive[1] if lse is None else lse), exact, naive)


def in_torch(*inputs, **options):
    return paged_attention_varlen(*inputs, **options, return_lse=True, backend="torch")


def in_torch_without_lse(*inputs, **options):
    return paged_attention_varlen(*inputs, **options, backend="torch"), None


def in_triton(*inputs, **options):
    """Where Triton kernels run in this process; the result comes back."""
    device = inputs[0].device
    options = {name: t.to(DEVICES[-1]) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    inputs = [t.to(DEVICES[-1]) for t in inputs]
    out, lse = paged_attention_varlen(*inputs, **options, return_lse=True, backend="triton", check=True)
    return out.to(device), lse.to(device)


PATHS = {"torch": in_torch, "torch without lse": in_torch_without_lse, "triton": in_triton}


@pytest.fixture(params=PATHS)
def path(request):
    """Each returns (out, lse or None)."""
    return PATHS[request.param]


@pytest.mark.parametrize("case", covering(AXES), ids=label)
def test_every_pair_of_variants(case, kernel_device):
    heads, kv_heads = case["heads"]
    inputs = packed_inputs(
        *zip(*MIXES[case["mix"]], strict=True), heads, kv_heads, case["head_size"], block_size=case["block_size"],
        dtype=case["dtype"], device=kernel_device, cache_dtype=case["cache"],
    )  # fmt: skip
    options = {"window": case["window"], "softcap": case["softcap"]}
    if case["alibi"]:
        options["alibi_slopes"] = 2.0 ** -torch.arange(heads, device=kernel_device)
    if case["cache"] is not None:
        options |= {"k_scale": 0.5, "v_scale": 1.5}

    for path in [in_torch, in_torch_without_lse] if case["backend"] == "torch" else [in_triton]:
        assert_packed_matches_dense(lambda *a, path=path, **o: path(*a, **o, **case["splits"]), inputs, **options)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"scale": 0.3, "softcap": 2.0}], ids=["", "window", "softcap"])
def test_matches_dense_attention_in_float32_and_float64(mix, options, path):
    for dtype in (torch.float32, torch.float64) if path is not in_triton else (torch.float32,):
        inputs = packed_inputs(*zip(*MIXES[mix], strict=True), 4, 2, 32, dtype=dtype, device="cpu")
        assert_packed_matches_dense(path, inputs, **options)


def test_there_may_be_no_queries(path, device):
    inputs = packed_inputs([0, 5], [0, 0], 4, 2, 32, dtype=torch.float32, device=device)
    assert path(*inputs)[0].shape == (0, 4, 32)


def test_a_sequence_may_fill_its_table(path, device):
    q, k_cache, v_cache, tables, *rest = packed_inputs([32, 20], [1, 3], 4, 2, 32, dtype=torch.float32, device=device)
    assert_packed_matches_dense(path, (q, k_cache, v_cache, tables[:, :2], *rest))


@pytest.mark.slow
@pytest.mark.parametrize("splits", [{"num_splits": 30}, {"split_size": 16}], ids=str)
def test_many_pieces_are_merged(splits, kernel_device):
    """More than the kernel reads at once."""
    inputs = packed_inputs([2200], [2], 2, 1, 32, dtype=torch.float32, device=kernel_device)
    assert_packed_matches_dense(lambda *a, **o: in_triton(*a, **o, **splits), inputs)


@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 9, 2)])
def test_values_are_scaled_wherever_torch_reads_them(queries, device):
    inputs = packed_inputs([540, 520, 530], queries, 4, 2, 32, dtype=torch.float32, device=device)
    for path in (in_torch, in_torch_without_lse):
        assert_packed_matches_dense(path, inputs, k_scale=0.5, v_scale=1.5)


@pytest.mark.parametrize(("option", "splits"), [("num_splits", Splits("num", 3)), ("split_size", Splits("size", 40))])
def test_all_sequences_are_cut_as_asked_for(option, splits, monkeypatch):
    seen, usual = [], varlen_in_torch.attend_in_splits
    monkeypatch.setattr(varlen_in_torch, "attend_in_splits", lambda *args: (seen.append(args[-1]), usual(*args))[1])
    inputs = packed_inputs([70, 75, 67], [1, 3, 40], 4, 2, 32, dtype=torch.float32, device="cpu")
    assert_packed_matches_dense(lambda *a, **o: in_torch(*a, **o, **{option: splits.count}), inputs)
    assert seen == [splits] * 3


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("splits", [{"num_splits": 2}, {"split_size": 32}], ids=str)
def test_split_rows_do_not_depend_on_the_other_sequences(splits, backend, kernel_device):
    q, k, v, tables, lens, ends = packed_inputs(
        [100, 33, 64, 40], [1, 9, 64, 9], 4, 2, 32, dtype=torch.float16, device=kernel_device
    )
    run = lambda *inputs: paged_attention_varlen(*inputs, **splits, return_lse=True, backend=backend)  # noqa: E731
    out, lse = run(q, k, v, tables, lens, ends)
    alone, lse_alone = run(q[1:10], k, v, tables[1:2], lens[1:2], ends[1:3] - 1)
    assert alone.equal(out[1:10])
    assert lse_alone.equal(lse[1:10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_flows_through_the_torch_backend(dtype, device):
    q, k_cache, v_cache, *rest = packed_inputs([5, 20], [1, 7], 4, 2, 8, dtype=dtype, device=device)
    caches = [cache.nan_to_num().requires_grad_() for cache in (k_cache, v_cache)]
    ours = torch.autograd.grad(paged_attention_varlen(q.requires_grad_(), *caches, *rest).square().sum(), [q, *caches])
    theirs = torch.autograd.grad(dense(q, *caches, *rest, dtype=q.dtype)[0].square().sum(), [q, *caches])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------------ the Triton backend


@pytest.mark.parametrize("sizes", [{"block_size": 12}, {"head_size": 320}, {"dtype": torch.float64}], ids=str)
def test_refusals_name_torch(sizes, kernel_device):
    inputs = packed_inputs(
        [5, 40], [1, 5], 4, 2, **{"head_size": 32, "dtype": torch.float16} | sizes, device=kernel_device
    )
    with pytest.raises(ValueError, match=r'backend="triton".*backend="torch"'):
        paged_attention_varlen(*inputs, backend="triton")
    assert paged_attention_varlen(*inputs, backend="torch").isfinite().all()


def test_any_number_of_heads_may_share_a_kv_head(kernel_device):
    """More than a chunk has rows, so that one query's heads are in several."""
    for group in (1, 3, 40):
        inputs = packed_inputs([20, 35], [1, 3], 2 * group, 2, 16, dtype=torch.float16, device=kernel_device)
        assert_packed_matches_dense(in_triton, inputs)


def test_keys_are_cut_where_it_is_asked_for(kernel_device):
    inputs = packed_inputs([130, 40], [2, 5], 4, 2, 32, dtype=torch.float16, device=kernel_device)
    for splits, merges in (({"num_splits": 1}, 0), ({"num_splits": 3}, 2), ({"split_size": 64}, 2)):
        before = executed["merge_items_kernel"]
        paged_attention_varlen(*inputs, **splits, backend="triton")
        assert executed["merge_items_kernel"] - before == merges, splits  # one for each part of the step


# ------------------------------------------------------------------------------------------ groups of the torch backend


def groups_of(inputs):
    return varlen.plan(varlen.Step(*inputs[3:], inputs[1].shape[1]), "torch").groups


def test_sequences_are_padded_to_less_than_twice_their_length():
    lens, queries = [1, 2, 3, 900, 1000, 40, 30, 70, 0, 70], [1] * 8 + [0, 2]
    inputs = packed_inputs(lens, queries, 4, 2, 32, dtype=torch.float32, device="cpu")
    groups = [group.rows.tolist() for group in groups_of(inputs)]
    assert groups == [[[0]], [[1], [2]], [[3], [4]], [[5]], [[6]], [[7]], [[8, 9]]]
    for path in (in_torch, in_torch_without_lse):
        assert_packed_matches_dense(path, inputs)


@pytest.mark.parametrize("queries", [(1, 1, 1, 1), (40, 9, 9, 9)], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 30}], ids=["", "window"])
def test_what_follows_the_last_key_of_a_shorter_sequence_is_not_read(queries, options):
    """The sequences of a group differ in length. The slots after their last keys hold NaN."""
    inputs = packed_inputs([40, 33, 47, 63], queries, 4, 2, 32, dtype=torch.float32, device="cpu")
    assert max(len(group.rows) for group in groups_of(inputs)) > 2
    for path in (in_torch, in_torch_without_lse):
        assert_packed_matches_dense(path, inputs, **options)


@pytest.mark.parametrize("attend", [in_torch, in_torch_without_lse])
def test_the_last_key_of_a_shorter_sequence_is_read_once(attend):
    """In a group with longer sequences it is repeated. An infinite value times a weight of 0 would be NaN."""
    q, k_cache, v_cache, tables, lens, cu_seqlens = packed_inputs(
        [5, 7], [2, 2], 2, 1, 32, dtype=torch.float32, device="cpu"
    )
    block, offset = divmod(4, v_cache.shape[1])
    v_cache[tables[0, block], offset] = torch.inf
    out = attend(q, k_cache, v_cache, tables, lens, cu_seqlens)
    out = out[0] if isinstance(out, tuple) else out
    assert (out[1] == torch.inf).all()
    assert out[2:].isfinite().all()


ALIBI = {"alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.004])}


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": 0.4}, ALIBI], ids=["", "softcap", "ALiBi"])
def test_sequences_may_share_blocks(options, path):
    lens, queries = [176, 216, 144, 129, 90, 316], [1, 1, 2, 1, 1, 30]
    inputs = packed_inputs(lens, queries, 4, 2, 32, shared=8, dtype=torch.float32, device="cpu")
    assert_packed_matches_dense(path, inputs, **options)


def test_keys_before_the_window_are_not_read(path):
    """Keys that not even the first query of a sequence sees hold NaN."""
    lens, queries, window = [130, 70, 33], [1, 20, 5], 25
    inputs = packed_inputs(lens, queries, 4, 2, 32, dtype=torch.float32, device="cpu")
    _, k_cache, v_cache, tables, *_ = inputs
    expected, _ = path(*inputs, window=window)
    for b, (length, num_queries) in enumerate(zip(lens, queries, strict=True)):
        for key in range(max(0, length - num_queries + 1 - window)):
            block, offset = divmod(key, k_cache.shape[1])
            k_cache[tables[b, block], offset] = v_cache[tables[b, block], offset] = torch.nan
    assert path(*inputs, window=window)[0].equal(expected)


def test_sequences_may_share_the_blocks_of_their_queries(path):
    """Three sequences with one block table. Keys with which all begin may be hidden from their first queries."""
    q, k_cache, v_cache, tables, lens, ends = packed_inputs(
        [130, 130, 130], [60, 60, 60], 4, 2, 32, dtype=torch.float32, device="cpu"
    )
    tables = tables[:1].repeat(3, 1)
    assert_packed_matches_dense(path, (q, k_cache, v_cache, tables, lens, ends))


def test_a_cache_may_have_any_strides(path):
    """In memory, the heads come before the tokens of a block, as kernels of other projects need it."""
    q, k_cache, v_cache, *rest = packed_inputs([70, 33], [1, 5], 4, 2, 32, dtype=torch.float32, device="cpu")
    k_cache, v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache))
    assert_packed_matches_dense(path, (q, k_cache, v_cache, *rest))


# ------------------------------------------------------------------------------------------ plans


BACKENDS = ["torch", "triton", "cuda"]


def attend(backend, inputs, *, decodes=False):
    q, k_cache, v_cache, *step = inputs
    caches = to_vllm_layout(k_cache, v_cache) if backend == "cuda" else (k_cache, v_cache)
    plan = varlen.plan(varlen.Step(*step, k_cache.shape[1], decodes), backend)
    return plan, plan.attend(q, *caches)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_a_plan_attends_as_the_function_does(mix, backend, kernel_device):
    inputs = packed_inputs(*zip(*MIXES[mix], strict=True), 4, 2, 32, dtype=torch.float16, device=kernel_device)
    out = attend(backend, inputs)[1]
    assert_packed_matches_dense(lambda *_: (out, None), inputs)
    if mix == "decode":
        again = attend(backend, inputs, decodes=True)[1]
        assert_packed_matches_dense(lambda *_: (again, None), inputs)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_serves_all_layers_and_a_nan_in_one_stays_there(backend, kernel_device):
    step = [(33, 1), (70, 1), (20, 6)]
    first = packed_inputs(*zip(*step, strict=True), 4, 2, 32, dtype=torch.float32, device=kernel_device)
    q, k_cache, v_cache, *tables = first
    plan, _ = attend(backend, first)
    layout = to_vllm_layout if backend == "cuda" else lambda *caches: caches
    plan.attend(torch.full_like(q, torch.nan), *layout(k_cache, v_cache))
    second = (q.flip(0), v_cache, k_cache, *tables)
    out = plan.attend(second[0], *layout(*second[1:3]))
    assert_packed_matches_dense(lambda *_: (out, None), second)


@pytest.mark.slow
def test_programs_share_the_decoding_rows_beside_chunks(kernel_device):
    """Five programs share the work of the sequences that have one query. The chunks are cut by size, without a plan.

    A layer with fewer KV heads has less work, so it has another plan.
    """
    q, k_cache, v_cache, *rest = packed_inputs(
        *zip(*MIXES["mixed"], strict=True), 4, 2, 32, dtype=torch.float16, device=kernel_device
    )
    plan = varlen.plan(varlen.Step(*rest, k_cache.shape[1], splits=Splits("share", 5)), "triton")
    for kv_heads in (2, 1, 2):
        layer = (q, k_cache[:, :, :kv_heads], v_cache[:, :, :kv_heads])
        out_and_lse = plan.attend(*layer, return_lse=True)
        assert_packed_matches_dense(lambda *_, found=out_and_lse: found, (*layer, *rest))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_of_length_0_may_have_queries(backend, decodes, queries, kernel_device):
    """A CUDA graph fills its batch with such sequences. Their queries see nothing, so their output is 0."""
    if decodes and queries > 1:
        return  # not a step that decodes
    each = [1, queries, 1]
    q, k, v, tables, lens, ends = packed_inputs(
        [33, queries, 70], each, 4, 2, 32, dtype=torch.float32, device=kernel_device
    )
    lens[1] = 0
    out = attend(backend, (q, k, v, tables, lens, ends), decodes=decodes)[1]
    assert (out[1:-1] == 0).all()
    exact = dense(q, k, v, tables, lens, ends, dtype=torch.float64)[0]
    torch.testing.assert_close(out[[0, -1]].double(), exact[[0, -1]], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------ bad input


def ends(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICES[-1])


THREE_HEADS = torch.zeros(7, 16, 3, 32, device=DEVICES[-1])
BAD = {
    "more queries than tokens": ({"seq_lens": ends(5, 8)}, ValueError, "seq_lens .* got 8 for sequence 1, which has 9"),
    "sums that begin later": ({"cu_seqlens_q": ends(1, 1, 10)}, ValueError, "cu_seqlens_q must rise from 0 to the 10"),
    "sums that end earlier": ({"cu_seqlens_q": ends(0, 1, 9)}, ValueError, "cu_seqlens_q must rise"),
    "sums that fall": ({"cu_seqlens_q": ends(0, 11, 10)}, ValueError, "cu_seqlens_q must rise"),
    "sums in int64": ({"cu_seqlens_q": ends(0, 1, 10).long()}, TypeError, "cu_seqlens_q must be int32"),
    "a number": ({"cu_seqlens_q": 10}, TypeError, "cu_seqlens_q must be a torch.Tensor"),
    "no sums": ({"cu_seqlens_q": ends()}, ValueError, "cu_seqlens_q must have B"),
    "no sequences for queries": ({"cu_seqlens_q": ends(0)}, ValueError, "cu_seqlens_q must have B"),
    "sums of other sequences": ({"cu_seqlens_q": ends(0, 10)}, ValueError, "block_tables must be .* = .1,"),
    "lengths of other sequences": ({"seq_lens": ends(10)}, ValueError, "seq_lens must be"),
    "a length beyond the table": ({"seq_lens": ends(5, 81)}, ValueError, r"M · P = 5 · 16 = 80.* got 81"),
    "a block that is none": ({"block_tables": ends(*[99] * 10).view(2, 5)}, ValueError, "block_tables must hold"),
    "a cache of other heads": ({"k_cache": THREE_HEADS, "v_cache": THREE_HEADS}, ValueError, "multiple of Hkv"),
    "another device": ({"cu_seqlens_q": ends(0, 1, 10).to("meta")}, ValueError, "cu_seqlens_q must have the device"),
    "a window of nothing": ({"window": 0}, ValueError, "window"),
    "two ways to split": ({"num_splits": 2, "split_size": 16}, ValueError, "exclude each other"),
    "another backend": ({"backend": "cuda"}, ValueError, "backend must be"),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case, backend, shapes_unchecked):
    changes, error, message = BAD[case]
    *inputs, sums = packed_inputs([5, 40], [1, 9], 4, 2, 32, dtype=torch.float32, device=DEVICES[-1])
    arguments = {"cu_seqlens_q": sums, "backend": backend, "check": True}
    with pytest.raises(error, match=message):
        paged_attention_varlen(**arguments | changed(inputs, changes))


@pytest.mark.parametrize("many", [3, 9])
def test_table_entries_that_no_query_sees_may_be_anything(many, path):
    """Entries before the window of the earliest query, and entries of sequences without queries."""
    queries = [many, 0, 1]
    q, k, v, tables, lens, ends = packed_inputs([100, 40, 50], queries, 4, 2, 32, dtype=torch.float32, device="cpu")
    expected = path(q, k, v, tables, lens, ends, window=20)[0]
    tables[0, : (100 - many + 1 - 20) // 16] = 10**6
    tables[1] = -7
    assert path(q, k, v, tables, lens, ends, window=20)[0].equal(expected)
    tables[0, (100 - many + 1 - 20) // 16] = 10**6
    with pytest.raises(ValueError, match="block_tables must hold blocks"):
        path(q, k, v, tables, lens, ends, window=20)


# ------------------------------------------------------------------------------------------ the CUDA backend


def test_more_queries_than_a_grid_has_places_take_several_launches(kernel_device, monkeypatch):
    monkeypatch.setattr(in_cuda, "MAX_NUM_SEQS", 4)
    inputs = packed_inputs([20, 35, 9], [5, 1, 4], 4, 2, 32, dtype=torch.float16, device=kernel_device)
    q, k_cache, v_cache, *rest = inputs
    caches = to_vllm_layout(k_cache.nan_to_num(), v_cache.nan_to_num())
    of_step = {"options": DECODING._replace(scale=0.3), "v_scale": 1.5}
    out = varlen.plan(varlen.Step(*rest, k_cache.shape[1], **of_step), "cuda").attend(q, *caches)
    expected = paged_attention_varlen(q, k_cache, v_cache, *rest, scale=0.3, v_scale=1.5, backend="torch")
    torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-3)
