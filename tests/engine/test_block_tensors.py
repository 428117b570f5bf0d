"""Blocks that are tensors of their own hold what a paged cache holds."""

import pytest
import torch

from pagewise.engine import LLM, SamplingParams
from pagewise.experiments.block_tensors import BlockTensors
from pagewise.models import tiny_model
from pagewise.paged_blocks import PagedKVCache

CPU = torch.device("cpu")
LAYERS, BLOCKS, P, HKV, D = 2, 6, 4, 3, 2


def caches():
    blocks = BlockTensors(LAYERS, BLOCKS, P, HKV, D, dtype=torch.float32, device=CPU)
    return blocks, PagedKVCache(LAYERS, BLOCKS, P, HKV, D)


def write_both(blocks, paged, layer, table, start, num_tokens):
    k, v = torch.randn(2, HKV, num_tokens, D)
    blocks.write(layer, table, start, k, v)
    slots = torch.tensor([table[i // P] * P + i % P for i in range(start, start + num_tokens)])
    paged.write(layer, slots, k.transpose(0, 1), v.transpose(0, 1))


def assert_same(blocks, paged, layer, table, length):
    wanted = torch.stack(paged.gather(layer, table, length)).transpose(1, 2)
    torch.testing.assert_close(blocks.gather(layer, table, length), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("pieces", [[1], [4], [5, 1, 1, 1, 2], [3, 6], [9, 1]])
def test_tokens_written_in_pieces_are_gathered_in_order(pieces):
    torch.manual_seed(0)
    blocks, paged = caches()
    table, start = [5, 0, 3], 0
    for num_tokens in pieces:
        write_both(blocks, paged, 1, table, start, num_tokens)
        start += num_tokens
        assert_same(blocks, paged, 1, table, start)


def test_a_copied_block_changes_alone():
    torch.manual_seed(0)
    blocks, paged = caches()
    for layer in range(LAYERS):
        write_both(blocks, paged, layer, [4], 0, 3)
    for cache in (blocks, paged):
        cache.copy_blocks([(4, 1), (0, 2)])  # nothing was ever written to block 0
    for layer in range(LAYERS):
        for block in (1, 4):
            write_both(blocks, paged, layer, [block], 3, 1)
        for block in (1, 4):
            assert_same(blocks, paged, layer, [block], 4)


def test_copies_read_every_source_before_they_write():
    torch.manual_seed(0)
    blocks, paged = caches()
    for block in (0, 1):
        write_both(blocks, paged, 0, [block], 0, 4)
    for cache in (blocks, paged):
        cache.copy_blocks([(0, 1), (1, 0)])
    for block in (0, 1):
        assert_same(blocks, paged, 0, [block], 4)


def test_the_memory_counts_blocks_as_the_paged_memory_does():
    model, tokenizer = tiny_model()
    engines = [LLM(model, tokenizer=tokenizer, num_blocks=20, attention=kind) for kind in ("block_tensors", "paged")]
    for llm in engines:
        llm.add_request("The keys and values of " * 3, SamplingParams(max_tokens=4))
        llm.step()
    first, second = (llm.memory for llm in engines)
    assert first.nbytes == second.nbytes
    assert first.used_nbytes == second.used_nbytes > 0
