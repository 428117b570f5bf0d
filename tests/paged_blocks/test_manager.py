"""Block manager, prefix cache and paged K/V tensors: every promise of their docstrings, one behaviour per test."""

import copy
import pickle
import random
import sys

import pytest
import torch
from block_cases import bits, check_invariants, snapshot

from pagewise.paged_blocks import (
    BlockManager,
    OutOfBlocks,
    PagedKVCache,
    from_vllm_layout,
    prefix_cache,
    to_vllm_layout,
)
from pagewise.paged_blocks.prefix_cache import ROOT, PrefixCache, TokenBlocks

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
LAYOUTS = ["nhd", "vllm"]


def allocate(manager: BlockManager, seq_id, tokens) -> int:
    """Allocate, and commit the whole prompt as computed."""
    tokens = list(tokens)
    cached = manager.allocate(seq_id, tokens)
    manager.commit(seq_id, len(tokens))
    return cached


# ------------------------------------------------------------------------------------------ tables and slots


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_slots_follow_the_block_table(block_size):
    manager = BlockManager(40, block_size)
    manager.allocate("other", range(block_size + 1))
    manager.allocate("a", range(3))
    slots = manager.slots("a", 0, 3)
    for token in range(2 * block_size + 1):
        manager.allocate(token, [token])  # keeps the blocks of "a" from being neighbours
        slots.append(manager.append("a", token))
        manager.free(token)
    table = manager.block_table("a")
    assert manager.num_tokens("a") == 2 * block_size + 4
    assert slots == manager.slots("a", 0, len(slots)) == [
        table[i // block_size] * block_size + i % block_size for i in range(len(slots))
    ]  # fmt: skip
    assert len(table) == -(-len(slots) // block_size)
    check_invariants(manager)


def test_any_hashable_is_a_sequence_id():
    manager = BlockManager(8, 4)
    for seq_id in (0, "0", ("beam", 0), None, frozenset({1})):
        manager.allocate(seq_id, [1])
    assert manager.sequences == [0, "0", ("beam", 0), None, frozenset({1})]


# ------------------------------------------------------------------------------------------ sharing


def test_three_way_fork_then_append_in_one_batch():
    manager = BlockManager(8, 4)
    manager.allocate("a", range(6))
    manager.fork("a", "b")
    manager.fork("b", "c")
    shared = manager.block_table("a")
    assert manager.block_table("b") == manager.block_table("c") == shared
    assert [manager.ref_count(b) for b in shared] == [3, 3]
    assert manager.num_free_blocks == 6
    slots = [manager.append(seq_id, 10 + i) for i, seq_id in enumerate("abc")]
    last = [manager.block_table(seq_id)[1] for seq_id in "abc"]
    assert len(set(last)) == 3
    assert last[2] == shared[1]  # two moved away, the last one keeps the block
    assert slots == [block * 4 + 2 for block in last]
    assert sorted(manager.take_copies()) == sorted([(shared[1], last[0]), (shared[1], last[1])])
    assert manager.take_copies() == []
    assert manager.ref_count(shared[0]) == 3
    assert manager.stats().copies == 2
    check_invariants(manager)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_fork_of_an_exactly_full_last_block_copies_nothing(block_size):
    manager = BlockManager(8, block_size)
    manager.allocate("a", range(2 * block_size))
    manager.fork("a", "b")
    shared = manager.block_table("a")
    manager.append("b", 1)
    manager.append("a", 2)
    assert manager.take_copies() == []
    assert manager.block_table("a")[:2] == manager.block_table("b")[:2] == shared
    assert manager.block_table("a")[2] != manager.block_table("b")[2]
    check_invariants(manager)


def test_copy_into_a_freed_block_is_dropped():
    manager = BlockManager(3, 4)
    manager.allocate("a", range(3))
    manager.fork("a", "b")
    manager.append("b", 3)
    dst = manager.block_table("b")[0]
    manager.free("b")
    manager.allocate("c", range(4))
    assert manager.block_table("c") == [dst]  # handed out anew: the old copy would clobber c
    assert manager.take_copies() == []


def test_copy_into_a_freed_block_that_can_still_be_found_is_kept():
    manager = BlockManager(4, 2, prefix_cache=True)
    manager.allocate("a", [1])
    manager.fork("a", "b")
    manager.append("b", 2)
    manager.commit("b", 2)
    manager.free("b")
    assert manager.take_copies() == [(0, 1)]
    assert manager.allocate("c", [1, 2, 3]) == 2


def test_a_source_freed_and_reused_before_the_copy_still_gives_its_content():
    """a's block is freed and becomes the destination of another copy: all sources are read first."""
    manager, cache = BlockManager(4, 4), PagedKVCache(1, 4, 4, 1, 1, dtype=torch.float32, device="cpu")

    def write(seq_id, start, values):
        slots = torch.tensor(manager.slots(seq_id, start, start + len(values)))
        cache.write(0, slots, torch.tensor(values).view(-1, 1, 1), torch.tensor(values).view(-1, 1, 1))

    manager.allocate("a", [1, 2])
    manager.allocate("x", [3, 4])
    write("a", 0, [1.0, 2.0])
    write("x", 0, [3.0, 4.0])
    source = manager.block_table("a")[0]
    manager.fork("a", "b")
    manager.append("b", 5)
    manager.free("a")
    manager.fork("x", "y")
    manager.append("y", 6)
    assert manager.block_table("y") == [source]
    manager.fork("b", "c")
    manager.append("c", 7)  # its content is still where a's was
    cache.copy_blocks(manager.take_copies())
    for seq_id, values in {"b": [1.0, 2.0], "y": [3.0, 4.0], "c": [1.0, 2.0], "x": [3.0, 4.0]}.items():
        assert cache.gather(0, manager.block_table(seq_id), 2)[0].flatten().tolist() == values


# ------------------------------------------------------------------------------------------ prefix cache


def test_committed_prefix_is_found_by_another_prompt():
    manager = BlockManager(16, 4, prefix_cache=True)
    assert allocate(manager, "a", range(10)) == 0
    assert manager.allocate("b", [*range(8), 99]) == 8
    assert manager.block_table("b")[:2] == manager.block_table("a")[:2]
    assert manager.allocate("c", [*range(4), 99, *range(5, 10)]) == 4  # one token differs in the second block
    assert manager.allocate("d", [99, *range(1, 10)]) == 0
    check_invariants(manager)


def test_without_the_prefix_cache_nothing_is_found():
    manager = BlockManager(8, 4)
    assert allocate(manager, "a", range(10)) == allocate(manager, "b", range(10)) == 0
    assert manager.stats()[2:] == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_fully_cached_prompt_of_whole_blocks_leaves_its_last_block_to_compute(block_size, num_blocks):
    manager = BlockManager(8, block_size, prefix_cache=True)
    tokens = list(range(num_blocks * block_size))
    allocate(manager, "a", tokens)
    assert manager.allocate("b", tokens) == (num_blocks - 1) * block_size < len(tokens)
    assert manager.block_table("b")[-1] != manager.block_table("a")[-1]
    assert manager.slots("b", (num_blocks - 1) * block_size, len(tokens))


def test_two_equal_prompts_in_one_batch_do_not_read_each_others_unwritten_blocks():
    manager = BlockManager(8, 4, prefix_cache=True)
    assert manager.allocate("a", range(9)) == manager.allocate("b", range(9)) == 0
    assert not set(manager.block_table("a")) & set(manager.block_table("b"))
    manager.commit("a", 9)
    manager.commit("b", 9)  # the same content twice: both stay, both are found as one
    manager.free("a")
    assert manager.allocate("c", range(9)) == 8
    assert manager.block_table("c")[:2] == manager.block_table("b")[:2]
    check_invariants(manager)


def test_only_whole_computed_blocks_become_shareable():
    manager = BlockManager(12, 4, prefix_cache=True)
    manager.allocate("a", range(12))
    found = []
    for computed in (0, 3, 4, 7, 8, 11):
        manager.commit("a", computed)
        found.append(manager.allocate("probe", range(13)))
        manager.free("probe")
    assert found == [0, 0, 4, 4, 8, 8]


def test_eviction_order_is_the_docstring_example():
    manager = BlockManager(4, 4, prefix_cache=True)
    a = list(range(12))
    allocate(manager, "A", a)
    assert allocate(manager, "B", [*a[:4], 99, 99, 99, 99]) == 4
    assert manager.block_table("A") == [0, 1, 2]
    assert manager.block_table("B") == [0, 3]
    manager.free("A")
    manager.free("B")
    assert manager.free_blocks == [2, 1, 3, 0]
    assert manager.allocate("A", a) == 8
    assert manager.block_table("A") == [0, 1, 2]  # two hits, and the first victim for the block that must be computed
    assert manager.free_blocks == [3]


def test_least_recently_used_chain_is_evicted_first_from_its_end():
    manager = BlockManager(6, 4, prefix_cache=True)
    for i in range(3):
        allocate(manager, i, [i] * 8)
    chains = [manager.block_table(i) for i in range(3)]
    for i in (0, 1, 2):
        manager.free(i)
    assert manager.allocate("touch", [0] * 8 + [9]) == 8  # evicts 1's deepest block, makes 0 the most recent
    manager.free("touch")
    assert manager.free_blocks == [chains[1][1], chains[1][0], chains[2][1], chains[2][0], chains[0][1], chains[0][0]]
    assert manager.allocate("rest of 1", [1] * 8 + [9]) == 4


def test_a_second_copy_of_cached_content_is_worth_nothing_once_free():
    manager = BlockManager(4, 4, prefix_cache=True)
    manager.allocate("a", range(4))
    manager.allocate("b", range(4))
    manager.commit("a", 4)
    manager.commit("b", 4)
    manager.free("b")
    manager.free("a")
    manager.allocate("c", [9] * 12)  # three blocks, one of them b's: a's content survives
    assert manager.stats().evictions == 0
    manager.free("c")
    assert manager.allocate("d", range(5)) == 4


def test_eviction_under_pressure_never_takes_a_block_in_use():
    manager = BlockManager(8, 4, prefix_cache=True)
    allocate(manager, "keep", range(12))
    kept = manager.block_table("keep")
    for i in range(40):
        allocate(manager, i, [i] * 17)
        with pytest.raises(OutOfBlocks):
            manager.allocate("more", [77])
        manager.free(i)
        assert manager.block_table("keep") == kept
        check_invariants(manager)
    assert manager.stats().evictions == 39 * 4  # each prompt evicts the four full blocks of the prompt before it
    assert manager.allocate("twin", range(13)) == 12
    assert manager.block_table("twin")[:3] == kept


def test_hits_are_not_counted_as_free_for_the_rest_of_the_prompt():
    manager = BlockManager(3, 4, prefix_cache=True)
    allocate(manager, "a", range(8))
    manager.free("a")
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks):
        manager.allocate("b", range(16))  # 2 hits on free blocks, 2 new ones, 3 blocks in all
    assert snapshot(manager) == before
    assert manager.allocate("b", range(12)) == 8


def test_preempted_sequence_comes_back_to_its_own_blocks():
    manager = BlockManager(4, 4, prefix_cache=True)
    allocate(manager, "a", range(6))
    for token in range(6, 9):
        manager.append("a", token)
    manager.commit("a", 8)  # the ninth token was appended but not computed
    tokens, table = manager.tokens("a"), manager.block_table("a")
    manager.free("a")
    assert manager.allocate("a", tokens) == 8
    assert manager.block_table("a")[:2] == table[:2]
    manager.free("a")
    manager.allocate("b", [99] * 12)  # takes the two blank blocks and evicts the deepest of a's
    assert manager.num_free_blocks == 1
    manager.free("b")
    assert manager.allocate("a", tokens) == 4


def test_commit_after_fork_registers_a_shared_block_once():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.allocate("a", range(6))
    manager.fork("a", "b")
    manager.commit("b", 6)
    manager.commit("a", 6)
    assert manager.stats().cached == 1
    manager.append("a", 6)
    manager.append("a", 7)
    manager.append("b", 60)
    manager.append("b", 70)
    manager.commit("a", 8)
    manager.commit("b", 8)
    assert manager.allocate("c", range(9)) == 8
    assert manager.allocate("d", [0, 1, 2, 3, 4, 5, 60, 70, 8]) == 8
    assert manager.block_table("c")[1] != manager.block_table("d")[1]


@pytest.mark.parametrize(
    ("digest", "found"),
    [(lambda parent, tokens: b"same", [0, 0, 2]), (lambda parent, tokens: bytes(tokens), [2, 0, 4])],
    ids=["all equal", "without the parent"],
)
def test_equal_digests_never_give_the_wrong_block(digest, found, monkeypatch):
    """Both the tokens and the parent are compared. Otherwise [3 3 2 2] would find the second block of [1 1 2 2]."""
    monkeypatch.setattr(prefix_cache, "block_digest", digest)
    manager = BlockManager(20, 2, prefix_cache=True)
    allocate(manager, "a", [1, 1, 2, 2, 0])
    allocate(manager, "b", [3, 3, 4, 4, 0])
    prompts = {"c": [3, 3, 2, 2, 0], "d": [2, 2, 0], "e": [1, 1, 2, 2, 0]}  # of "e", the first owner is found
    assert [manager.allocate(seq_id, prompt) for seq_id, prompt in prompts.items()] == found
    manager.free("a")
    check_invariants(manager)


def test_digests_are_strong_and_depend_on_every_token_before():
    digest = prefix_cache.block_digest
    assert len(digest(b"", [1, 2])) == 32
    assert digest(b"", [1, 2]) == digest(b"", (1, 2))
    assert len({digest(*args) for args in [(b"", [1, 2]), (b"", [2, 1]), (b"", [12]), (b"x", [1, 2])]}) == 4
    assert digest(b"", [-1]) != digest(b"", [2**32 - 1])


# ------------------------------------------------------------------------------------------ all or nothing

UNKNOWN = "no sequence 'nobody': allocate or fork it first"
REFUSED = [
    (lambda m: BlockManager(0, 4), ValueError, "num_blocks must be at least 1, got 0"),
    (lambda m: BlockManager(4, 0), ValueError, "block_size must be at least 1, got 0"),
    (lambda m: BlockManager(-1, 4), ValueError, "num_blocks must be at least 1, got -1"),
    (lambda m: BlockManager(2.0, 4), TypeError, "num_blocks must be an int, got float"),
    (lambda m: m.allocate("new", range(40)), OutOfBlocks, "40 tokens needs 8 more blocks and 3 are free"),  # with hits
    (lambda m: m.allocate("new", [*range(8), *[99] * 20]), OutOfBlocks, "needs 5 more blocks and 3 are free"),
    (lambda m: m.allocate("new", [99] * 13), OutOfBlocks, "needs 4 more blocks and 3 are free"),
    (lambda m: m.allocate("a", [1]), ValueError, "seq_id 'a' is in use"),
    (lambda m: m.allocate("new", []), ValueError, "tokens must hold at least 1 token"),
    (lambda m: m.allocate("new", [1, 2.0]), TypeError, "tokens must be ints, got 2.0"),
    (lambda m: m.allocate("new", "text"), TypeError, "tokens must be ints, got 't'"),
    (lambda m: m.allocate("new", [True]), TypeError, "tokens must be ints, got True"),
    (lambda m: m.allocate("new", [2**63]), ValueError, "tokens must fit in 64 bits"),
    (lambda m: m.allocate(["new"], [1]), TypeError, "unhashable type: 'list'"),
    (lambda m: m.append("nobody", 1), ValueError, UNKNOWN),
    (lambda m: m.append("a", None), TypeError, "tokens must be ints, got None"),
    (lambda m: m.commit("nobody", 1), ValueError, UNKNOWN),
    (lambda m: m.commit("a", 11), ValueError, "from 9, the tokens computed before, to 10, the tokens of 'a'; got 11"),
    (lambda m: m.commit("a", 8), ValueError, "from 9, the tokens computed before, to 10"),
    (lambda m: m.commit("b", 8), ValueError, "from 9, the tokens computed before, to 15"),  # computed by the parent
    (lambda m: m.commit("a", -1), ValueError, "num_computed must be at least 0, got -1"),
    (lambda m: m.commit("a", 9.0), TypeError, "num_computed must be an int, got float"),
    (lambda m: m.fork("nobody", "new"), ValueError, UNKNOWN),
    (lambda m: m.fork("a", "b"), ValueError, "child_id 'b' is in use"),
    (lambda m: m.fork("a", "a"), ValueError, "child_id 'a' is in use"),
    (lambda m: m.free("nobody"), ValueError, UNKNOWN),
    (lambda m: m.block_table("nobody"), ValueError, UNKNOWN),
    (lambda m: m.num_tokens("nobody"), ValueError, UNKNOWN),
    (lambda m: m.slots("a", 0, 11), ValueError, "stop must be at most 10, the tokens of sequence 'a', got 11"),
    (lambda m: m.slots("a", 3, 2), ValueError, "stop must be at least 3, got 2"),
    (lambda m: m.slots("a", -1, 2), ValueError, "start must be at least 0, got -1"),
    (lambda m: m.ref_count(8), ValueError, "block must be below num_blocks = 8, got 8"),
    (lambda m: m.ref_count(-1), ValueError, "block must be at least 0, got -1"),
]


@pytest.mark.parametrize(("call", "error", "says"), REFUSED)
def test_a_refused_call_changes_nothing(call, error, says, shapes_unchecked):
    manager = BlockManager(8, 4, prefix_cache=True)
    allocate(manager, "gone", [7] * 8)
    manager.free("gone")
    allocate(manager, "a", range(9))
    manager.append("a", 9)
    manager.fork("a", "b")
    for token in range(10, 15):
        manager.append("b", token)
    manager.fork("b", "c")
    before = snapshot(manager)
    with pytest.raises(error, match=says):
        call(manager)
    assert snapshot(manager) == before


@pytest.mark.parametrize("last", ["full", "shared"])
def test_append_without_a_free_block_changes_nothing(last):
    manager = BlockManager(2, 4)
    manager.allocate("a", range(4 if last == "full" else 3))
    manager.fork("a", "b")
    manager.allocate("c", [1])
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks, match="needs 1 more"):
        manager.append("a", 4)
    assert snapshot(manager) == before
    manager.free("c")
    manager.append("a", 4)


def test_tables_given_out_are_copies():
    manager = BlockManager(4, 4)
    manager.allocate("a", [1])
    manager.block_table("a").append(99)
    manager.tokens("a").append(99)
    assert manager.block_table("a") == [0]
    assert manager.num_tokens("a") == 1


# ------------------------------------------------------------------------------------------ cost


class Ends(list):
    """A list that may be read and changed at single places and at its end, not walked and not changed at its front."""

    def pop(self, *where):
        assert where == (), "pop(0) moves all others"
        return super().pop()

    def walks(self, *args):
        raise AssertionError("this looks at every item")

    __iter__ = __contains__ = __reversed__ = insert = remove = index = count = walks


def work_of_appending(num_sequences, num_blocks):
    """Return the executed lines of 64 appends to a sequence in a full house, and see that no list is walked."""
    manager = BlockManager(num_blocks, 16, prefix_cache=True)
    for i in range(num_sequences):
        manager.allocate(i, [i] * (1 + i % 16))
    manager._blank, manager._ref_counts = Ends(manager._blank), Ends(manager._ref_counts)
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        for _ in range(64):
            manager.append(0, 0)
    finally:
        sys.settrace(before)
    return lines


def test_append_costs_the_same_in_a_hundred_times_larger_pool(shapes_unchecked):
    """1000 against 100 000 blocks, 10 against 1000 sequences: counted, not timed."""
    assert work_of_appending(10, 1000) == work_of_appending(1000, 100_000) > 64


# ------------------------------------------------------------------------------------------ tensors


def numbered(*shape, dtype=torch.float32, device="cpu", start=0):
    """Distinct numbers where the dtype has enough of them; float8 repeats after 96, a prime keeps rows apart."""
    n = torch.arange(start, start + torch.Size(shape).numel(), device=device)
    return ((n % 97) / 8 if dtype.itemsize == 1 else n % 251 if dtype == torch.bfloat16 else n).view(shape).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_vllm_layout_is_an_exact_inverse(block_size, dtype, device):
    k = numbered(5, block_size, 2, 48, dtype=dtype, device=device)
    v = numbered(5, block_size, 2, 48, dtype=dtype, device=device, start=13)
    k[0, 0, 0, 0], v[0, 0, 0, 1] = torch.nan, -0.0
    x = 16 // dtype.itemsize
    k_vllm, v_vllm = to_vllm_layout(k, v)
    assert k_vllm.shape == (5, 2, 48 // x, block_size, x)
    assert v_vllm.shape == (5, 2, 48, block_size)
    assert k_vllm.is_contiguous()
    assert v_vllm.is_contiguous()
    for n, p, h, d in [(0, 0, 0, 0), (4, block_size - 1, 1, 47), (2, block_size // 2, 0, 17)]:
        assert bits(k_vllm[n, h, d // x, p, d % x, None]).equal(bits(k[n, p, h, d, None]))
        assert bits(v_vllm[n, h, d, p, None]).equal(bits(v[n, p, h, d, None]))
    back = from_vllm_layout(k_vllm, v_vllm)
    assert bits(back[0]).equal(bits(k))
    assert bits(back[1]).equal(bits(v))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_written_tokens_are_gathered(block_size, layout, dtype, device):
    cache = PagedKVCache(2, 9, block_size, 2, 16, dtype=dtype, device=device, layout=layout)
    length = 3 * block_size + max(block_size // 2, 1)
    table = torch.tensor([7, 2, 5, 0])
    slots = (table[:, None] * block_size + torch.arange(block_size)).flatten()[:length].to(device)
    k = numbered(length, 2, 16, dtype=dtype, device=device)
    v = numbered(length, 2, 16, dtype=dtype, device=device, start=29)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0)).to(device)
    cache.write(1, slots[order], k[order], v[order])
    for block_table in (table, table.tolist(), [*table.tolist(), -1, 10**9]):
        k_out, v_out = cache.gather(1, block_table, length)
        assert bits(k_out).equal(bits(k))
        assert bits(v_out).equal(bits(v))
    assert not bits(cache.k[0]).any()  # the other layer, and all other blocks, are untouched
    untouched = [1, 3, 4, 6, 8]
    assert not bits(cache.k[1][untouched]).any()
    assert not bits(cache.v[1][untouched]).any()
    if layout == "vllm":
        k_nhd, v_nhd = from_vllm_layout(cache.k[1], cache.v[1])
        assert bits(k_nhd.flatten(0, 1)[slots]).equal(bits(k))
        assert bits(v_nhd.flatten(0, 1)[slots]).equal(bits(v))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_reads_all_sources_first(layout, dtype, device):
    cache = PagedKVCache(3, 6, 4, 2, 16, dtype=dtype, device=device, layout=layout)
    cache.k.copy_(numbered(*cache.k.shape, dtype=dtype, device=device))
    cache.v.copy_(numbered(*cache.v.shape, dtype=dtype, device=device, start=31))
    k, v = cache.k.clone(), cache.v.clone()
    cache.copy_blocks([(0, 1), (1, 2), (2, 0), (1, 4)])  # a chain, a cycle and one source twice
    for new, old in ((cache.k, k), (cache.v, v)):
        assert bits(new).equal(bits(old[:, [2, 0, 1, 3, 1, 5]]))
    cache.copy_blocks([])
    assert bits(cache.k).equal(bits(k[:, [2, 0, 1, 3, 1, 5]]))


def test_cache_counts_its_bytes():
    for layout in LAYOUTS:
        cache = PagedKVCache(3, 5, 16, 2, 64, dtype=torch.bfloat16, layout=layout)
        assert cache.nbytes == 2 * 3 * 5 * 16 * 2 * 64 * 2


def test_nothing_is_gathered_from_an_empty_sequence():
    k, v = PagedKVCache(1, 4, 4, 2, 8).gather(0, [], 0)
    assert k.shape == v.shape == (0, 2, 8)


def filled():
    cache = PagedKVCache(1, 4, 4, 2, 8)
    cache.k.copy_(numbered(*cache.k.shape))
    return cache


BLOCKS = "block_table must hold blocks from 0 to 3, got"
REFUSED_OF_A_CACHE = [
    (lambda c: c.copy_blocks([(0, 4)]), ValueError, "dst must hold blocks from 0 to 3, got 4"),
    (lambda c: c.copy_blocks([(-1, 0)]), ValueError, "src must hold blocks from 0 to 3, got -1"),
    (lambda c: c.copy_blocks([(0, 1), (2, 1)]), ValueError, "pairs must have distinct destinations"),
    (lambda c: c.gather(0, [0], 5), ValueError, "length = 5 needs 2 blocks, block_table has 1"),
    (lambda c: c.gather(0, [0, 4], 5), ValueError, f"{BLOCKS} 4"),
    (lambda c: c.gather(0, [0, -1], 5), ValueError, f"{BLOCKS} -1"),
    (lambda c: c.gather(0, [0], -1), ValueError, "length must be at least 0, got -1"),
    (lambda c: PagedKVCache(0, 4, 4, 2, 8), ValueError, "num_layers"),
    (lambda c: PagedKVCache(1, 4, 4, 2, 8, layout="hnd"), ValueError, "layout"),
    (lambda c: PagedKVCache(1, 4, 4, 2, 8, dtype=torch.int8), TypeError, "dtype"),
    (lambda c: PagedKVCache(1, 4, 4, 2, 6, layout="vllm"), ValueError, r'multiple of x = 4.*"nhd"'),
    (lambda c: to_vllm_layout(*torch.zeros(2, 1, 4, 2, 120).to(DTYPES[-1])), ValueError, "multiple of x = 16"),
    (lambda c: to_vllm_layout(c.k[0], c.v[0, :, :, :1]), ValueError, "v_cache"),
    (lambda c: from_vllm_layout(torch.zeros(1, 2, 2, 4, 4), torch.zeros(1, 2, 9, 4)), ValueError, "v_cache"),
]


@pytest.mark.parametrize(("call", "error", "says"), REFUSED_OF_A_CACHE)
def test_a_refused_call_changes_no_cache(call, error, says, shapes_unchecked):
    cache, before = filled(), filled()
    with pytest.raises(error, match=says):
        call(cache)
    assert cache.k.equal(before.k)
    assert cache.v.equal(before.v)


# ------------------------------------------------------------------------------------------ copies

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


def content(manager):
    """`snapshot`, with prefixes by what they are and not by which objects they are."""
    return {name: str(value) for name, value in snapshot(manager).items()}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("num_tokens", [4, 600, 20_000])
def test_a_copied_manager_finds_and_shares_what_the_original_does(way, num_tokens):
    """Chains of any length, free and in use. A prefix that both know gets no second entry."""
    manager = BlockManager(num_tokens + 4, 1, prefix_cache=True)
    prompt = list(range(num_tokens))
    manager.allocate("a", prompt)
    manager.commit("a", num_tokens)
    manager.free("a")
    manager.allocate("b", prompt[:3])
    twin = COPIES[way](manager)
    for each in (manager, twin):
        assert each.num_cached(TokenBlocks([*prompt, 0], 1)) == num_tokens
        assert each.allocate("c", [*prompt, 0]) == num_tokens
        each.commit("c", num_tokens + 1)
    assert content(twin) == content(manager)
    check_invariants(twin)


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_manager_goes_on_like_the_original_and_apart_from_it(way):
    generator, manager = random.Random(0), BlockManager(12, 2, prefix_cache=True)
    twin = None
    for step in range(400):
        if step % 50 == 25:
            twin = COPIES[way](manager)
        name, tokens = generator.randrange(4), [generator.randrange(2) for _ in range(generator.randrange(1, 9))]
        call = generator.choice(["allocate", "append", "commit", "free"])
        results = []
        for each in (manager, twin) if twin else (manager,):
            try:
                if call == "allocate":
                    results.append(each.allocate(name, tokens))
                elif call == "append":
                    results.append(each.append(name, tokens[0]))
                elif call == "commit":
                    results.append(each.commit(name, each.num_tokens(name)))
                else:
                    results.append(each.free(name))
            except (ValueError, OutOfBlocks) as error:
                results.append(str(error))
        assert len(set(map(str, results))) == 1
        assert twin is None or content(twin) == content(manager)
    before = content(manager)
    for name in twin.sequences:
        twin.free(name)
    twin.allocate("more", [1])
    assert content(manager) == before


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_cache_keeps_its_prefixes_apart_by_their_parents(way):
    """Equal tokens after different parents are different prefixes, in a copy too."""
    cache = PrefixCache()
    first, other = cache.register(0, ROOT, [1]), cache.register(1, ROOT, [2])
    after = cache.register(2, first, [3])
    twin = COPIES[way](cache)
    assert twin.find(twin.by_block[0], [3]).blocks == after.blocks
    assert twin.find(twin.by_block[1], [3]) is None
    assert not after.continues(other, (3,))
    assert twin.register(3, twin.by_block[1], [3]).number not in {prefix.number for prefix in (first, other, after)}
