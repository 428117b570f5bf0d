"""Peers that need a GPU, called as their documents say: stand-ins that take the same arguments check ours."""

import importlib.machinery
import sys
import types
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from pagewise.experiments import decode_inputs, paged_attention_peers
from pagewise.experiments.paged_attention_peers import peers
from pagewise.experiments.paged_attention_speed import Shape, exact, random_batch
from pagewise.naive_attention import attention
from pagewise.tools.benchmark import fault

SHAPE = Shape(2, 64, 4, 2, head_size=32)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens):
    """q [B, T, H, D], caches [B, S, Hkv, D]."""
    assert cache_seqlens.tolist() == [SHAPE.seq_len] * SHAPE.num_seqs
    return attention(*(t.transpose(1, 2) for t in (q, k_cache, v_cache))).transpose(1, 2)


def memory_efficient_attention_forward(q, k, v):
    """All [B, tokens, groups, heads of a group, D]."""
    q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
    assert q.shape[1] == k.shape[1]
    return attention(q, k, v).transpose(1, 2).unflatten(2, (SHAPE.num_kv_heads, -1))


def flex_attention(q, k, v, *, enable_gqa):
    """All [B, heads, tokens, D]."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert k.is_contiguous()
    assert v.is_contiguous()
    return attention(q, k, v)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace, layout, *, use_tensor_cores):
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"

    def plan(self, indptr, indices, last_page_len, heads, kv_heads, head_size, page_size, *, q_data_type, kv_data_type):
        assert (heads, kv_heads, head_size, page_size) == SHAPE[2:]
        assert q_data_type == kv_data_type == torch.float32
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        self.sequences = [indices[a:b].long() for a, b in pairwise(indptr)]
        self.unused = (page_size - last_page_len).tolist()

    def run(self, q, kv_cache):
        out = []
        for query, blocks, unused in zip(q, self.sequences, self.unused, strict=True):
            length = blocks.numel() * SHAPE.block_size - unused
            k, v = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in kv_cache)
            out.append(attention(query[None, :, None], k, v)[0, :, 0])
        return torch.stack(out)


STANDINS = {
    "flash_attn": types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache),
    "xformers.ops": types.SimpleNamespace(memory_efficient_attention_forward=memory_efficient_attention_forward),
    "flashinfer": types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper),
}


@pytest.fixture
def on_a_gpu_with_everything(monkeypatch):
    """Every library can be imported; torch.compile hands its function back, and must be asked as users do."""
    for name, contents in STANDINS.items():
        for part in (name.partition(".")[0], name):
            module = types.ModuleType(part)
            module.__spec__ = importlib.machinery.ModuleSpec(part, None)
            module.__dict__.update(vars(contents))
            monkeypatch.setitem(sys.modules, part, module)
    compiled = []

    def compile(function, *, dynamic):
        assert function is flex_attention
        assert dynamic is False
        compiled.append("compile")
        return function

    monkeypatch.setattr(flex, "flex_attention", flex_attention)
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: compiled.append("reset"))
    return compiled


@pytest.mark.parametrize(
    "name", ["FlexAttention, not paged", "FlashInfer", "flash-attn, not paged", "xformers, not paged"]
)
def test_a_peer_gets_what_it_takes_and_gives_what_is_right(name, on_a_gpu_with_everything):
    batches = [random_batch(SHAPE, torch.float32, torch.device("cpu"), seed) for seed in range(2)]
    runs = peers(torch.device("cuda"))[name](batches)
    assert [fault(run, exact(batch)) for run, batch in zip(runs, batches, strict=True)] == [None, None]
    assert on_a_gpu_with_everything == (["reset", "compile"] if "Flex" in name else [])


def test_flashinfer_gets_the_blocks_and_the_last_tokens_of_sequences_of_different_lengths(on_a_gpu_with_everything):
    shape = decode_inputs.Shape(3, 7, 48, 0, 1, *SHAPE[2:])
    batch = decode_inputs.random_inputs(shape, torch.float32, torch.device("cpu"), seed=0)
    assert len({*shape.seq_lens}) == 3
    (run,) = peers(torch.device("cuda"))["FlashInfer"]([batch])
    assert fault(run, decode_inputs.exact(batch)) is None


def test_libraries_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(paged_attention_peers.importlib.util, "find_spec", lambda name: None)
    assert {name.split()[0] for name in peers(torch.device("cuda"))} == {"SDPA", "FlexAttention,"}
