"""The CUDA paged-attention kernels: the whole range that vLLM's launcher took, watched on the CPU, compiled for GPUs.

Each set of template arguments is a build of its own, which takes a third of a second. On the CPU, `make test` therefore
checks four head sizes with every pair of the other arguments, and runs each other head size once or twice, one that was
just added to `HEAD_SIZES` too. PAGEWISE_FULL=1 runs the product.
"""

import itertools
import re

import pytest
import torch
from covering import all_cases, covering, in_turns, is_full, label, one_in_three
from paged_cases import ARGUMENTS, changed, dense, in_other_blocks, paged_inputs
from torch.fx.experimental.proxy_tensor import make_fx

import cudascope
from conftest import assert_results
from cudascope import CudaKernel
from pagewise.paged_attention import (
    choose_version,
    paged_attention_grouped,
    paged_attention_v1,
    paged_attention_v2,
)
from pagewise.paged_attention import in_cuda as paged_cuda
from pagewise.paged_attention.in_cuda import cuda_kernel
from pagewise.paged_attention.vllm import query_heads_per_thread_block
from pagewise.paged_blocks.cache import to_vllm_layout
from pagewise.tools.work import count_work

VERSIONS = {"v1": paged_attention_v1, "v2": paged_attention_v2, "grouped": paged_attention_grouped}
AXES = {
    "head_size": paged_cuda.HEAD_SIZES,
    "block_size": (8, 16, 32),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "cache": (None, torch.float8_e4m3fn, torch.float8_e5m2),
    "version": tuple(VERSIONS),
    "alibi": (False, True),
    "heads": ((4, 4), (8, 2), (8, 1)),
}
# In this order sm_90 gets the float8 kernels with large blocks. For sm_80, ptxas takes ten seconds for each of them.
ARCHITECTURES = ("sm_90", "sm_80")


def is_supported(case):
    return case["cache"] is None or case["head_size"] % 16 == 0


SELECTION = covering(AXES, is_supported)
QUICK = [
    (32, 8, torch.float16, torch.float8_e4m3fn, "v2", True, (8, 2)),
    (32, 32, torch.float16, torch.float8_e5m2, "grouped", False, (4, 4)),
    (64, 16, torch.bfloat16, torch.float8_e5m2, "v1", False, (8, 1)),
    (96, 32, torch.float32, None, "grouped", True, (8, 2)),
    (112, 8, torch.bfloat16, None, "grouped", False, (8, 1)),
    (192, 16, torch.float32, torch.float8_e4m3fn, "v2", True, (4, 4)),
]
QUICK = [dict(zip(AXES, values, strict=True)) for values in QUICK]


def nine_cases():
    """A Latin square: every pair of block size, dtype, cache and version. The head size goes with the dtype.

    The head sizes are the largest, the largest that must not spill, and a multiple of 16.
    """
    for a, b in itertools.product(range(3), repeat=2):
        places = {"block_size": a, "dtype": b, "cache": (a + b) % 3, "version": (a + 2 * b) % 3, "heads": a}
        chosen = {name: AXES[name][place] for name, place in places.items()}
        yield {"head_size": (256, 128, 80)[b]} | chosen | {"alibi": (a + b) % 2 == 0}


# In blocks of 8 halves a warp reads 32 rows of V at once, and 120 rows leave some of its lanes without one. v2 has the
# stages of v1.
LANES_LEFT = {"head_size": 120, "block_size": 8, "dtype": torch.float16, "cache": None, "alibi": False, "heads": (8, 2)}
FEW = SELECTION if is_full() else [*nine_cases(), *(LANES_LEFT | {"version": version} for version in ("v1", "grouped"))]


TRIED = {case["head_size"] for case in QUICK + FEW}
QUICK += [QUICK[-1] | {"cache": None, "head_size": size} for size in AXES["head_size"] if size not in TRIED]
CASES = all_cases(AXES, is_supported) if is_full() else SELECTION if torch.cuda.is_available() else QUICK


def lengths(block_size):
    return [0, 1, block_size - 1, block_size, block_size + 1, 511, 512, 513, 700]


def inputs_of(case, device, seq_lens=None):
    """Arguments in the nhd layout, which `dense` reads, and options."""
    H, Hkv = case["heads"]
    inputs = paged_inputs(
        seq_lens or lengths(case["block_size"]), H, Hkv, case["head_size"], block_size=case["block_size"],
        dtype=case["dtype"], device=device, cache_dtype=case["cache"],
    )  # fmt: skip
    tables = inputs[3]
    tables[-1, 1] = tables[-2, 0]  # a block of another sequence
    tables[-1, 2] = tables[-1, 3]  # a block twice in one table
    options = {"k_scale": 0.5, "v_scale": 0.25} if case["cache"] else {}
    if case["alibi"]:
        options["alibi_slopes"] = torch.tensor([0.5, -0.01, 0.25, 0.03] * (H // 4), device=device)
    return inputs, options


def in_vllm_layout(inputs):
    q, k_cache, v_cache, tables, seq_lens = inputs
    return q, *to_vllm_layout(k_cache, v_cache), tables, seq_lens


def assert_matches(out, lse, inputs, options):
    exact, naive = (dense(*inputs, dtype=dtype, **options) for dtype in (torch.float64, inputs[0].dtype))
    assert_results((out, lse), exact, naive)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=label)
def test_matches_dense_attention(case, kernel_device, canaries):
    inputs, options = inputs_of(case, kernel_device)
    out, lse = VERSIONS[case["version"]](*in_vllm_layout(inputs), **options, return_lse=True)
    assert_matches(out, lse, inputs, options)
    assert canaries()


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW, ids=label)
def test_no_findings_under_any_schedule(case):
    """All accesses are within bounds. There is no race, no missed barrier and no read of uninitialised memory."""
    block_size = case["block_size"]
    inputs, options = inputs_of(case, torch.device("cpu"), [0, block_size - 1, block_size + 1, 513])
    results = []
    for seed in (None, 1, 2) if is_full() else (None, 1):
        with cudascope.check(schedule=seed):
            results.append(VERSIONS[case["version"]](*in_vllm_layout(inputs), **options, return_lse=True))
    (out, lse), *others = results
    assert_matches(out, lse, inputs, options)
    assert all(other.equal(out) and other_lse.equal(lse) for other, other_lse in others)


def test_the_selections_have_every_pair():
    for cases in (SELECTION, FEW):
        for first, second in itertools.combinations(("block_size", "dtype", "cache", "version"), 2):
            assert {(case[first], case[second]) for case in cases} == {*itertools.product(AXES[first], AXES[second])}
    assert {case["head_size"] for case in QUICK + FEW} == set(AXES["head_size"])
    assert len({(case["version"], case["heads"]) for case in FEW}) == 9


# ------------------------------------------------------------------------------------------ planted mistakes

SHARED_MISTAKES = {  # in the stages of paged_attention.cu, which v1, v2 and the grouped kernel go through
    "masked scores 0, and counted": ("scale * qk + bias : -INFINITY", "scale * qk + bias : 0.0f"),
    "values past the end not zeroed": ("if (i >= live) v_vec.data[i] = cache_t(0.0f);", ";"),
    "one value too many zeroed": ("if (i >= live)", "if (i + 1 >= live)"),
    "the next KV head's values": ("v_cache + kv_head *", "v_cache + (kv_head ^ 1) *"),
    "the next KV head": ("k_cache + kv_head *", "k_cache + (kv_head ^ 1) *"),
    "scale after the bias": ("scale * qk + bias", "scale * (qk + bias)"),
    "bias off by one": ("(token - (seq_len - 1))", "(token - seq_len)"),
    "x taken for the thread group's": ("X = 16 / sizeof(cache_t)", "X = 16 / sizeof(scalar_t)"),
    "rows of a key too close": ("element / W::X * W::BLOCK_SIZE * W::X", "element / W::X * W::X"),
    "every member takes the first's vecs": ("(j * W::THREAD_GROUP_SIZE + W::member()) * W::VEC_SIZE",
                                            "(j * W::THREAD_GROUP_SIZE) * W::VEC_SIZE"),
    "lanes left out of the sum": ("<1, W::THREAD_GROUP_SIZE / 2>(qk", "<2, W::THREAD_GROUP_SIZE / 2>(qk"),
}  # fmt: skip
MISTAKES_OF_V1_AND_V2 = {
    "sums of half the warps": ("int half = NUM_WARPS / 2;", "int half = NUM_WARPS / 4;"),
}
MISTAKES_OF_V1 = {
    "no tokens, but divided by l": ("l == 0 ? v_scale : v_scale / l", "v_scale / l"),
    "never divided by l": ("l == 0 ? v_scale : v_scale / l", "v_scale"),
    "v_scale forgotten": ("l == 0 ? v_scale : v_scale / l", "l == 0 ? 1 : 1 / l"),
    "lse without m": ("lse[row] = m + logf(l);", "lse[row] = logf(l);"),
    "the last block forgotten": ("divide_up(max_seq_len, BLOCK_SIZE)", "max_seq_len / BLOCK_SIZE"),
}
MISTAKES_OF_V2 = {
    "partitions overlap": ("blockIdx.z * partition_blocks;", "blockIdx.z * (partition_blocks - 1);"),
    "a partition's last block forgotten": ("min(first_block + partition_blocks,",
                                           "min(first_block + partition_blocks - 1,"),
    "l written as m": ("m[index] = partial.m;", "m[index] = partial.l;"),
}  # fmt: skip
MISTAKES_OF_MERGE = {
    "no tokens, but divided by l": ("(l_all == 0 ? 1 : l_all)", "l_all"),
    "partitions merged without alpha": ("acc_all += expf(m[i] - finite(m_all)) *", "acc_all += "),
    "the last partition forgotten": ("divide_up(seq_len, partition_size)", "seq_len / partition_size"),
    "v_scale forgotten": ("scalar_t(v_scale * acc_all", "scalar_t(acc_all"),
}
MISTAKES_OF_GROUPED = {
    "the KV head of a grid with all heads": ("num_heads = gridDim.x * QUERY_HEADS,", "num_heads = gridDim.x,"),
    "the first head's slope for all": ("alibi_slopes[first_head + h]", "alibi_slopes[first_head]"),
    "the first group's queries for all": ("q + seq * q_stride + first_head * HEAD_SIZE", "q + seq * q_stride"),
    "the first head's query for all": ("q_vecs + h * W::NUM_VECS", "q_vecs"),
    "queries a vec apart": ("q_vecs + h * W::NUM_VECS", "q_vecs + h"),
    "m starts at 0": ("float m = -INFINITY, l = 0,", "float m = 100.0f, l = 0,"),
    "the first head's scores for all": ("scores[h * span.num_slots() + token", "scores[token"),
    "heads' scores overlap": ("scores[h * span.num_slots() + token", "scores[h * (span.num_slots() - 1) + token"),
    "the first head's m for all": ("(m, maxima, fmaxf);", "(partials[0].m, maxima, fmaxf);"),
    "the first head's scores exponentiated for all": ("exponentiate<W>(scores + h * span.num_slots()",
                                                      "exponentiate<W>(scores"),
    "l of one warp": ("l = reduce_thread_block<1>(l, sums, add)", "l = reduce_lanes<1>(l, add)"),
    "the first head's weights for all": ("weights[h * span.num_slots() + token", "weights[token"),
    "each warp reads its own blocks": ("block = span.first_block; block < span.end_block; ++block",
                                       "block = span.first_block + threadIdx.x / WARP_SIZE; block < span.end_block; "
                                       "block += NUM_WARPS"),
    "the last block forgotten": ("block < span.end_block; ++block", "block < span.end_block - 1; ++block"),
    "warps own the same rows": ("threadIdx.x / Base::VECS_PER_ROW", "threadIdx.x % WARP_SIZE / Base::VECS_PER_ROW"),
    "rows of one warp per step": ("r * ROWS_PER_STEP + threadIdx.x", "r * Base::ROWS_PER_STEP + threadIdx.x"),
    "one live value too many": ("live = span.seq_len - token;", "live = span.seq_len - token + 1;"),
    "lanes left out of a row's sum": ("sum = reduce_lanes<1, W::VECS_PER_ROW / 2>", "sum = reduce_lanes<2, 1>"),
    "partitions overlap": ("blockIdx.z * partition_blocks;", "blockIdx.z * (partition_blocks - 1);"),
    "the first head's m written for all": ("m[index] = partials[h].m;", "m[index] = partials[0].m;"),
    "every head written as the first": ("num_heads + first_head + h;", "num_heads + first_head;"),
    "only warp 0 writes": ("        write_rows<W>(acc", "        if (threadIdx.x < WARP_SIZE) write_rows<W>(acc"),
}  # fmt: skip
PLANTED = [  # the kernels run the same shared stages, so the mistakes in these stages take turns
    *((name, *each) for each, name in in_turns([*SHARED_MISTAKES.items()], ("v1", "v2", "grouped"))),
    *((name, *each) for each, name in in_turns([*MISTAKES_OF_V1_AND_V2.items()], ("v1", "v2"))),
    *(("v1", *each) for each in MISTAKES_OF_V1.items()),
    *(("v2", *each) for each in MISTAKES_OF_V2.items()),
    *(("merge", *each) for each in MISTAKES_OF_MERGE.items()),
    *(("grouped", *each) for each in MISTAKES_OF_GROUPED.items()),
]
MISTAKEN = {"head_size": 64, "block_size": 8, "dtype": torch.float16, "cache": torch.float8_e4m3fn, "alibi": True,
            "heads": (8, 2)}  # fmt: skip
# A thread has several rows in the grouped kernel, and several lanes share a row.
MISTAKEN_GROUPED = MISTAKEN | {"head_size": 128, "block_size": 16}


def plant(monkeypatch, name, right, wrong):
    """Change the source of this kernel, or else the stages that it includes, and launch the changed kernel."""
    stages, grouped = paged_cuda.SOURCE.read_text(), paged_cuda.GROUPED_SOURCE.read_text()
    if name == "grouped" and right in grouped:
        assert grouped.count(right) == 1
        grouped = grouped.replace(right, wrong)
    else:
        assert stages.count(right) == 1
        stages = stages.replace(right, wrong)
    changed = grouped.replace('#include "paged_attention.cu"', stages) if name == "grouped" else stages

    def make(path, function, *sizes):
        kernel = cuda_kernel(path, function, *sizes)
        return CudaKernel(changed, kernel.name) if function == f"paged_attention_{name}_kernel" else kernel

    monkeypatch.setattr(paged_cuda, "cuda_kernel", make)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, _, change in one_in_three(PLANTED)],
    ids=[f"{name}-{mistake}" for name, mistake, _ in one_in_three(PLANTED)],
)
def test_planted_mistakes_are_caught(name, change, monkeypatch):
    plant(monkeypatch, name, *change)
    case = MISTAKEN_GROUPED if name == "grouped" else MISTAKEN
    inputs, options = inputs_of(case, torch.device("cpu"))
    version = VERSIONS["v2" if name == "merge" else name]
    out, lse = version(*in_vllm_layout(inputs), **options, return_lse=True)
    with pytest.raises(AssertionError):
        assert_matches(out, lse, inputs, options)


OFFSETS = [("v", "v1"), ("k", "v1"), ("k", "grouped"), ("v", "grouped")]


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "name"), one_in_three(OFFSETS))
def test_32_bit_offsets_are_caught(cache, name, monkeypatch):
    plant(monkeypatch, name, f"{cache}_cache + offset(block)", f"{cache}_cache + int(offset(block))")
    far, near = far_blocks(VERSIONS[name], "block", torch.device("cpu"))
    assert not far.equal(near)


BARRIERS = {
    "before the keys": ("head * W::HEAD_SIZE);\n    __syncthreads();\n", "head * W::HEAD_SIZE);\n"),
    "in a reduction": ("    __syncthreads();\n    value = scratch[0];", "    value = scratch[0];"),
    "before the tree": ("        __syncthreads();  // all warps have read what is overwritten now\n", ""),
    "in the tree": ("        __syncthreads();\n        if (warp < half)", "        if (warp < half)"),
}
BARRIERS_OF_GROUPED = {
    "before the keys": ("head * HEAD_SIZE);\n    __syncthreads();\n", "head * HEAD_SIZE);\n"),
    "in a reduction": BARRIERS["in a reduction"],
    "m and l in one scratch": ("(l, sums, add);", "(l, maxima, add);"),
}
RACES = one_in_three(
    [
        *((name, *change) for change, name in in_turns([*BARRIERS.items()], ["v1", "v2"])),
        *(("grouped", *change) for change in BARRIERS_OF_GROUPED.items()),
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "barrier", "change"), RACES, ids=[f"{name}-{barrier}" for name, barrier, _ in RACES])
def test_a_missing_barrier_is_a_race(name, barrier, change, monkeypatch):
    plant(monkeypatch, name, *change)
    inputs, options = inputs_of(MISTAKEN, torch.device("cpu"))
    with pytest.raises(cudascope.Finding) as caught, cudascope.check():
        VERSIONS[name](*in_vllm_layout(inputs), **options)
    assert caught.value.what in ("race", "uninitialised")


# ------------------------------------------------------------------------------------------ lengths and partitions


@pytest.fixture(params=VERSIONS)
def version(request):
    return VERSIONS[request.param]


PLAIN = {"head_size": 32, "block_size": 16, "dtype": torch.float32, "cache": None, "alibi": False, "heads": (8, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(("call", "partition_size"), [(paged_attention_v2, 48), (paged_attention_grouped, 16)])
def test_partitions_change_only_rounding(call, partition_size, kernel_device):
    inputs, options = inputs_of(PLAIN, kernel_device)
    out, lse = call(*in_vllm_layout(inputs), partition_size=partition_size, return_lse=True)
    assert_matches(out, lse, inputs, options)


@pytest.mark.slow
def test_a_long_context(version, kernel_device):
    inputs = paged_inputs([9000, 3], 8, 2, 32, dtype=torch.float32, device=kernel_device)
    out, lse = version(*in_vllm_layout(inputs), return_lse=True)
    assert_matches(out, lse, inputs, {})


@pytest.mark.slow
def test_groups_of_any_size(kernel_device):
    groups = {1: 1, 3: 3, 7: 7, 11: 1, 12: 6, 16: 8}
    assert {group: query_heads_per_thread_block(group) for group in groups} == groups
    for H, Hkv in ((14, 2), (11, 1), (32, 2)) if is_full() else ((14, 2), (11, 1)):
        inputs = paged_inputs([0, 17, 70], H, Hkv, 32, dtype=torch.float32, device=kernel_device)
        out, lse = paged_attention_grouped(*in_vllm_layout(inputs), return_lse=True)
        assert_matches(out, lse, inputs, {})


def test_no_columns_and_no_blocks(version, kernel_device):
    q, *rest = paged_inputs([0, 0], 8, 2, 32, dtype=torch.float32, device=kernel_device)
    q, k_cache, v_cache, tables, lens = in_vllm_layout((q, *rest))
    out = version(q, k_cache[:0], v_cache[:0], tables[:, :0], lens)
    assert out.equal(torch.zeros_like(q))


def test_an_unchecked_length_that_is_not_allowed_gives_nan(version, kernel_device):
    """Longer than max_seq_len, or negative. The other sequences of the batch keep their results."""
    q, k_cache, v_cache, tables, lens = in_vllm_layout(inputs_of(PLAIN, kernel_device, [33, 34, 0, 7])[0])
    expected = version(q, k_cache, v_cache, tables, lens, return_lse=True)
    lens = torch.tensor([33, 34, 0, -7], dtype=torch.int32, device=kernel_device)
    found = version(q, k_cache, v_cache, tables, lens, max_seq_len=33, check=False, return_lse=True)
    for right, each in zip(expected, found, strict=True):
        assert each[[1, 3]].isnan().all()
        assert each[[0, 2]].equal(right[[0, 2]])


@pytest.mark.slow
def test_the_sums_of_warps_fit_where_the_scores_of_a_short_sequence_lay(version):
    """Half of the warps store 2 · 128 sums in the memory of at most 16 scores."""
    inputs = paged_inputs([7, 0, 16, 1], 8, 2, 128, dtype=torch.float32, device="cpu")
    partition = {} if version is paged_attention_v1 else {"partition_size": 16}
    with cudascope.check():
        out, lse = version(*in_vllm_layout(inputs), **partition, return_lse=True)
    assert_matches(out, lse, inputs, {})


def test_a_graph_of_a_call_holds_for_the_longest_that_the_tables_can_name(version):
    """While torch records, the lengths have no values: the kernels are launched for the capacity of a table row."""
    tensors = in_vllm_layout(inputs_of(PLAIN, torch.device("cpu"))[0])
    graph = make_fx(lambda *each: version(*each))(*tensors)
    assert graph(*tensors).equal(version(*tensors))


def test_where_a_block_lies_does_not_matter(version, kernel_device):
    """The same tokens in other blocks give the same bits, and so does a second run."""
    inputs = inputs_of(PLAIN, kernel_device)[0]
    out = version(*in_vllm_layout(inputs))
    for _ in range(2):
        assert version(*in_vllm_layout(in_other_blocks(*inputs))).equal(out)


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["at an odd address", "apart by an odd number"])
def test_queries_that_do_not_lie_in_vecs_are_copied(version, lie, kernel_device):
    """A check finds reads that are misaligned, which a CPU would carry out. On a GPU they are errors."""
    q, *others = in_vllm_layout(inputs_of(PLAIN, kernel_device)[0])
    if lie == "at an odd address":
        other = q.new_zeros(q.numel() + 1)[1:].view(q.shape)
    else:
        other = q.new_zeros(len(q), q[0].numel() + 1)[:, :-1].unflatten(1, q.shape[1:])
    with cudascope.check():
        found = version(other.copy_(q), *others)
    assert found.equal(version(q, *others))


# ------------------------------------------------------------------------------------------ memory


def far_blocks(version, by, device):
    """A KV head of a block more than 2³² elements into the cache: (out, the same with a small cache).

    The elements between are never touched, so they need no memory. In 32 bits the offset is 4096: still in the cache.
    """
    D, P, far = 32, 8, 2**32 + 4096
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 2, P, 2, D, generator=generator).to(torch.float8_e5m2).to(device)
    near = to_vllm_layout(*kv)
    caches = []
    for cache in near:
        memory = torch.empty(far + 4 * D * P, dtype=torch.uint8, device=device).view(cache.dtype)
        block, head, *inner = cache.stride()
        strides = (far, head) if by == "block" else (block, far)
        caches.append(memory.as_strided(cache.shape, (*strides, *inner)).copy_(cache))
    q = torch.randn(1, 4, D, generator=generator).to(device)
    tables = torch.tensor([[1]], dtype=torch.int32, device=device)
    lens = torch.tensor([P], dtype=torch.int32, device=device)
    return version(q, *caches, tables, lens), version(q, *near, tables, lens)


@pytest.mark.parametrize("by", ["block", "head"])
def test_offsets_are_64_bit(version, by, kernel_device):
    far, near = far_blocks(version, by, kernel_device)
    assert far.equal(near)
    assert far.any()


def kv_bytes(report):
    """Bytes of K and of V that the first launch read."""
    return [int(report.launches[0].accesses(name)["bytes"].sum()) for name in ("k_cache", "v_cache")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "query_heads"), [((8, 2), 4), ((4, 4), 1), ((8, 1), 8), ((12, 2), 6)][: None if is_full() else 2]
)
def test_the_grouped_variant_reads_keys_and_values_once_per_kv_head(heads, query_heads):
    """Counted, not timed: v2 reads them once per query head."""
    H, Hkv = heads
    lens, D = [96, 33], 64
    inputs = in_vllm_layout(paged_inputs(lens, H, Hkv, D, dtype=torch.float16, device="cpu"))
    bytes_read = {}
    for name, call in VERSIONS.items():
        with cudascope.observe() as report:
            call(*inputs)
        bytes_read[name] = kv_bytes(report)
    whole_blocks = (6 + 3) * 16 * D * 2  # bytes of K (or V) of one head; V's last block has rows for all its tokens
    assert bytes_read["v1"] == bytes_read["v2"] == [H * whole_blocks] * 2
    assert bytes_read["grouped"] == [H // query_heads * whole_blocks] * 2


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1", "v2", "grouped"])
def test_counted_work_is_what_the_launches_do(version):
    """The bytes of `counts_as` against those that the CPU runner sees; a table's entry is read by a whole warp."""
    q, k_cache, v_cache, tables, lens = in_vllm_layout(
        paged_inputs([96, 600], 8, 2, 64, dtype=torch.float16, device="cpu")
    )
    with cudascope.observe() as report:
        VERSIONS[version](q, k_cache, v_cache, tables, lens, check=False)
    work = count_work(lambda: VERSIONS[version](q, k_cache, v_cache, tables, lens, max_seq_len=600, check=False))
    kv = kv_bytes(report)
    partials = sum(launch.count("write", "global").bytes for launch in report.launches[:-1])
    assert sum(kv) + q.nbytes + partials < work.bytes_read < sum(kv) + q.nbytes + partials + 4 * 1000
    assert work.bytes_written == report.count("write", "global").bytes
    assert work.matmul_flops == 4 * (96 + 608) * 8 * 64


def test_arguments_that_lie_otherwise_are_read_right(version, kernel_device):
    """Heads of q apart, q at an odd address, every second column of a table and length, caches interleaved."""
    inputs, options = inputs_of(PLAIN | {"alibi": True}, kernel_device)
    q, k_cache, v_cache, tables, lens = in_vllm_layout(inputs)
    out = version(q, k_cache, v_cache, tables, lens, **options)
    padded = torch.zeros(*q.shape[:2], 72, device=kernel_device)[..., :32].copy_(q)
    odd = torch.zeros(q.numel() + 1, device=kernel_device)[1:].view(q.shape).copy_(q)
    wide = tables.repeat_interleave(2, dim=1)[:, ::2]
    kv = torch.stack([k_cache.flatten(1), v_cache.flatten(1)], dim=1)
    k_cache, v_cache = kv[:, 0].view(k_cache.shape), kv[:, 1].view(v_cache.shape)
    slopes, lens = (x.repeat_interleave(2)[::2] for x in (options["alibi_slopes"], lens))
    for other in (padded, odd):
        assert version(other, k_cache, v_cache, wide, lens, alibi_slopes=slopes).equal(out)


# ------------------------------------------------------------------------------------------ compiled, without a GPU


def kernel(name, *sizes):
    return cuda_kernel(paged_cuda.SOURCE, f"paged_attention_{name}_kernel", *sizes)


def grouped_kernel(*sizes):
    return cuda_kernel(paged_cuda.GROUPED_SOURCE, "paged_attention_grouped_kernel", *sizes)


def instantiation(case):
    H, Hkv = case["heads"]
    sizes = case["dtype"], case["cache"] or case["dtype"], case["head_size"], case["block_size"]
    heads = query_heads_per_thread_block(H // Hkv) if case["version"] == "grouped" else 1
    return grouped_kernel(*sizes, heads) if heads > 1 else kernel("v1" if case["version"] == "v1" else "v2", *sizes)


# of the largest head size that must not spill, and of the largest that is no multiple of 16
LARGE = [case for case in FEW if case["head_size"] in (120, 128)]
INSTANTIATIONS = sorted({instantiation(case) for case in (CASES if is_full() else LARGE)}, key=lambda k: k.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "arch"), in_turns(INSTANTIATIONS, ARCHITECTURES), ids=lambda x: getattr(x, "name", x)
)
def test_compiles_without_spills(kernel, arch):
    resources = kernel.resources(arch)
    head_size = int(re.search(r", (\d+),", kernel.name)[1])
    assert resources.spilled_bytes == 0 or head_size > 128


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_merge_compiles_without_spills(arch):
    sizes = [(dtype, head_size) for head_size, dtype in in_turns(AXES["head_size"], AXES["dtype"])]
    for (dtype, head_size), turn in in_turns(sizes, ARCHITECTURES):
        if turn == arch:
            assert kernel("merge", dtype, head_size).resources(arch).spilled_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("query_heads", [1, 8])
def test_shared_memory_is_what_the_launcher_reckons(query_heads):
    """The static part, as the compiler reports it; the dynamic part is what it is launched with."""
    q = torch.empty(1, 8, 128, dtype=torch.float16)
    sizes = (q.dtype, q.dtype, 128, 16)
    launched = kernel("v2", *sizes) if query_heads == 1 else grouped_kernel(*sizes, query_heads)
    assert launched.resources("sm_90").shared_bytes == paged_cuda.static_bytes(q, query_heads)


# ------------------------------------------------------------------------------------------ interface


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "max_seq_len", "chosen"),
    [
        (1, 1, 512, "v1"), (1, 1, 513, "v2"), (8, 64, 8192, "v2"), (9, 64, 8192, "v1"), (9, 64, 8193, "v2"),
        (1000, 64, 8193, "v2"), (513, 1, 600, "v1"), (512, 1, 600, "v2"), (0, 1, 0, "v1"),
    ],
)  # fmt: skip
def test_v1_or_v2_is_chosen_as_vllm_chose(num_seqs, num_heads, max_seq_len, chosen):
    assert choose_version(num_seqs, num_heads, max_seq_len) == chosen
    num_partitions = -(-max_seq_len // 512)
    assert (chosen == "v1") == (max_seq_len <= 8192 and (num_partitions <= 1 or num_seqs * num_heads > 512))


@pytest.mark.slow
def test_an_unchecked_block_outside_the_cache_is_found_by_simt_check(version):
    inputs, _ = inputs_of(PLAIN | {"dtype": torch.float16, "head_size": 64}, torch.device("cpu"))
    q, k_cache, v_cache, tables, lens = in_vllm_layout(inputs)
    tables[5, 0] = len(k_cache)
    with pytest.raises(ValueError, match=r"block_tables must hold blocks .* at \[5, 0\]"):
        version(q, k_cache, v_cache, tables, lens)
    with cudascope.check(), pytest.raises(cudascope.Finding, match=r"reads k_cache\[\d+\], past its end"):
        version(q, k_cache, v_cache, tables, lens, check=False)


def cache_like(shape, dtype=torch.float32):
    N, Hkv, D, P = shape
    x = 16 // dtype.itemsize
    return {
        "k_cache": torch.zeros(N, Hkv, -(-D // x), P, x, dtype=dtype),
        "v_cache": torch.zeros(N, Hkv, D, P, dtype=dtype),
    }


def turned(x):
    return x.mT.contiguous().mT


SCALE = "must be a finite number in"
BAD = {  # changes of arguments, as `changed` takes them
    "head size": ({"q": torch.zeros(9, 8, 40), **cache_like((2, 2, 40, 16))}, ValueError,
                  "head size D of 32, 64, .* got 40: paged_attention"),
    "block size": (cache_like((2, 2, 32, 64)), ValueError, "block size P of 8, 16, 32, got 64"),
    "float8 and head size": ({"q": torch.zeros(9, 8, 120), **cache_like((2, 2, 120, 16), torch.float8_e5m2)},
                             ValueError, "multiple of 16 .* got 120"),
    "layout": ({"k_cache": lambda x: x.reshape(-1, 2, 4, 16, 8)}, ValueError, "k_cache must be"),
    "float64": ({"q": torch.Tensor.double}, TypeError, "q must be float32 or float16 or bfloat16"),
    "cache dtype": ({"k_cache": torch.Tensor.half}, TypeError, "k_cache must be float32"),
    "one cache float8": ({"v_cache": lambda x: x.to(torch.float8_e5m2)}, TypeError, "v_cache must have"),
    "device": ({"q": lambda x: x.to("meta")}, ValueError, "device"),
    "heads": ({"q": lambda x: x[:, :3]}, ValueError, "multiple of Hkv"),
    "last dimension of q": ({"q": turned}, ValueError, "q must be contiguous in its last"),
    "last dimension of k_cache": ({"k_cache": turned}, ValueError, "k_cache must be contiguous within"),
    "last dimension of v_cache": ({"v_cache": turned}, ValueError, "v_cache must be contiguous within"),
    "strides that differ": ({"v_cache": lambda x: x.repeat(1, 2, 1, 1)[:, :2]}, ValueError, "k_cache's strides"),
    "misaligned": ({"k_cache": lambda x: torch.zeros(x.numel() + 1)[1:].view(x.shape)}, ValueError,
                   "multiple of 16 bytes"),
    "tables dtype": ({"block_tables": torch.Tensor.long}, TypeError, "block_tables must be int32"),
    "tables rows": ({"block_tables": lambda x: x[:3]}, ValueError, "block_tables must be"),
    "tables too narrow": ({"block_tables": lambda x: x[:, :43]}, ValueError, "43 · 16 = 688.* got 700"),
    "lens dtype": ({"seq_lens": torch.Tensor.long}, TypeError, "seq_lens must be int32"),
    "negative block": ({"block_tables": lambda x: x.masked_fill(x == 0, -3)}, ValueError, "got -3"),
    "max_seq_len too small": ({"max_seq_len": 699}, ValueError, "longest of seq_lens, 700, got 699"),
    "max_seq_len no int": ({"max_seq_len": 700.0}, TypeError, "max_seq_len must be an int"),
    "scale": ({"scale": float("inf")}, ValueError, "scale"),
    "k_scale": ({"k_scale": float("nan")}, ValueError, "k_scale"),
    "alibi": ({"alibi_slopes": torch.zeros(3)}, ValueError, "alibi_slopes must be"),
    "k_scale beyond float32": ({"k_scale": 1e39}, ValueError, f"k_scale {SCALE}"),
    "v_scale beyond float": ({"v_scale": 10**400}, ValueError, f"v_scale {SCALE}"),
    "scales together": ({"k_scale": 1e30, "scale": 1e30}, ValueError, "k_scale = 1e[+]30 times scale"),
    "meta": (dict.fromkeys(ARGUMENTS, lambda x: x.to("meta")), ValueError, "a meta tensor"),
    "no blocks": (dict.fromkeys(("k_cache", "v_cache"), lambda x: x[:0]), ValueError, "the cache has no blocks"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case, version, shapes_unchecked):
    changes, error, message = BAD[case]
    arguments = changed(in_vllm_layout(inputs_of(PLAIN, torch.device("cpu"))[0]), changes)
    with pytest.raises(error, match=message):
        version(**arguments)


@pytest.mark.slow
def test_a_context_beyond_v1s_shared_memory_names_v2(shapes_unchecked):
    q = torch.zeros(1, 1, 32)
    tables, lens = torch.zeros(1, 4000, dtype=torch.int32), torch.full((1,), 60000, dtype=torch.int32)
    arguments = {"q": q, "block_tables": tables, "seq_lens": lens, **cache_like((1, 1, 32, 16))}
    with pytest.raises(ValueError, match=r"max_seq_len = 60000 needs 240160 bytes .* enough for 58064 tokens: .*_v2"):
        paged_attention_v1(**arguments)
    assert paged_attention_v2(**arguments).equal(torch.zeros_like(q))


@pytest.mark.parametrize("call", [paged_attention_v2, paged_attention_grouped])
@pytest.mark.parametrize(
    ("partition_size", "message"),
    [(0, "at least 1"), (24, "multiple of the block size 16"), (2**20, "shared memory .* choose a smaller one")],
)
def test_partition_sizes_that_cannot_be_are_refused(call, partition_size, message):
    inputs = in_vllm_layout(inputs_of(PLAIN, torch.device("cpu"))[0])
    with pytest.raises(ValueError, match=message):
        call(*inputs, partition_size=partition_size)


def test_limits_of_the_grid_are_named(shapes_unchecked):
    inputs, _ = inputs_of(PLAIN, torch.device("cpu"), [33, 33])
    q, k_cache, v_cache, tables, lens = in_vllm_layout([inputs[0][:1], *inputs[1:3], *(t[:1] for t in inputs[3:])])
    many = [t.expand(65536, *t.shape[1:]) for t in (q, tables, lens)]
    with pytest.raises(ValueError, match="at most 65535 sequences, got 65536"):
        paged_attention_v1(many[0], k_cache, v_cache, *many[1:])
    tables, lens = tables[:, :1].expand(1, 65536), torch.full_like(lens, 16 * 65536)
    with pytest.raises(ValueError, match="more than 65535 partitions of 16"):
        paged_attention_v2(q, k_cache, v_cache, tables, lens, partition_size=16)
