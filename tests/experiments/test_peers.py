"""Peers that need a GPU, called as their documents say: stand-ins that take the same arguments check ours."""

import importlib.machinery
import sys
import types
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from pagewise.experiments import flash_attention_speed, peers
from pagewise.experiments.decode_inputs import Shape, exact, paged, random_inputs
from pagewise.experiments.flash_attention_speed import gradients_fault, prepared
from pagewise.experiments.peers import peers_of_attention, peers_of_decode, peers_of_paged_decode
from pagewise.naive_attention import attention
from pagewise.tools.benchmark import fault

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIXED = Shape(3, 5, 40, 0, 0, 4, 2, 32)
PAGED = paged(2, 64, 4, 2, head_size=32)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens):
    """q [B, T, H, D], caches [B, S, Hkv, D]."""
    assert q.shape[1] == 1
    q, k, v = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
    mask = None if cache_seqlens is None else (torch.arange(k.shape[2]) < cache_seqlens[:, None])[:, None, None]
    return attention(q, k, v, attn_mask=mask).transpose(1, 2)


def create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, *, device):
    """Check the device: that of the tensors for decode, and that of the request for whole sequences."""
    assert H is None
    assert device == (CPU if Q_LEN == 1 else GPU)
    row, col = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)
    masks = [mask_mod(torch.tensor(b), torch.tensor(0), row, col).expand(Q_LEN, KV_LEN) for b in range(B or 1)]
    return torch.stack(masks)[:, None]


def flex_attention(q, k, v, *, block_mask, enable_gqa=False):
    """All [B, heads, tokens, D]."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert k.is_contiguous()
    assert v.is_contiguous()
    return attention(q, k, v, attn_mask=block_mask)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace, layout, *, use_tensor_cores):
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"

    def plan(self, indptr, indices, last_page_len, heads, kv_heads, head_size, page_size, *, q_data_type, kv_data_type):
        assert (heads, kv_heads, head_size, page_size) == (4, 2, 32, 16)
        assert q_data_type == kv_data_type == torch.float32
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        self.sequences = [indices[a:b].long() for a, b in pairwise(indptr)]
        self.unused = (page_size - last_page_len).tolist()

    def run(self, q, kv_cache):
        out = []
        for query, blocks, unused in zip(q, self.sequences, self.unused, strict=True):
            length = blocks.numel() * PAGED.block_size - unused
            k, v = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in kv_cache)
            out.append(attention(query[None, :, None], k, v)[0, :, 0])
        return torch.stack(out)


@pytest.fixture
def on_a_gpu_with_everything(monkeypatch):
    """Every library can be imported; torch.compile hands its function back, and must be asked as users do."""
    standins = {
        "flash_attn": flash_attn_with_kvcache,
        "flashinfer": BatchDecodeWithPagedKVCacheWrapper,
    }
    for name, content in standins.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        setattr(module, content.__name__, content)
        monkeypatch.setitem(sys.modules, name, module)
    compiled = []

    def compile(function, *, dynamic):
        assert function is flex_attention
        assert dynamic is False
        compiled.append("compile")
        return function

    monkeypatch.setattr(flex, "flex_attention", flex_attention)
    monkeypatch.setattr(flex, "create_block_mask", create_block_mask)
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: compiled.append("reset"))
    return compiled


@pytest.mark.parametrize("shape", [MIXED, MIXED.equal], ids=["mixed", "equal"])
@pytest.mark.parametrize("name", ["SDPA math", "FlexAttention", "flash-attn"])
def test_a_peer_gets_what_it_takes_and_gives_what_is_right(name, shape, on_a_gpu_with_everything):
    batches = [random_inputs(shape, torch.float32, CPU, seed) for seed in range(2)]
    runs = peers_of_decode(GPU)[name](batches)
    assert [fault(run, exact(batch)) for run, batch in zip(runs, batches, strict=True)] == [None, None]
    assert on_a_gpu_with_everything == (["reset", "compile"] if "Flex" in name else [])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("on_a_gpu_with_everything")
def test_flex_attention_over_whole_sequences_runs_its_backward_again(causal):
    shape = flash_attention_speed.Shape(24, 16, int(causal), 1, 1, 2)
    inputs = flash_attention_speed.random_inputs(shape, torch.float32, CPU)
    with torch._functorch.config.patch(donated_buffer=True):
        run = prepared(peers_of_attention(GPU)["FlexAttention"](24, causal), shape, inputs)
        assert torch._functorch.config.donated_buffer is False
    right = flash_attention_speed.exact(shape, inputs)
    assert [gradients_fault(run, right) for _ in range(2)] == [None, None]


def test_the_peers_of_a_gpu():
    names = {"SDPA flash", "SDPA cudnn", "SDPA math", "FlexAttention"}
    assert set(peers_of_attention(GPU)) == names


PEERS_OF_PAGED = ["FlexAttention, not paged", "flash-attn, not paged", "FlashInfer"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, PAGED) for name in PEERS_OF_PAGED), ("FlashInfer", PAGED._replace(num_seqs=3, shortest=7, longest=48))],
    ids=[*PEERS_OF_PAGED, "FlashInfer, mixed lengths"],
)
@pytest.mark.usefixtures("on_a_gpu_with_everything")
def test_a_peer_of_paged_decode_gets_what_it_takes(name, shape):
    batches = [random_inputs(shape, torch.float32, CPU, seed) for seed in range(2)]
    runs = peers_of_paged_decode(GPU)[name](batches)
    assert [fault(run, exact(batch)) for run, batch in zip(runs, batches, strict=True)] == [None, None]


def test_libraries_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert {name.split()[0] for name in peers_of_decode(GPU)} == {"SDPA", "FlexAttention"}
    assert {name.split()[0] for name in peers_of_paged_decode(GPU)} == {"SDPA", "FlexAttention,"}
