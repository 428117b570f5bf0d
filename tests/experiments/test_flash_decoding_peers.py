"""Peers that need a GPU, called as their documents say: stand-ins that take the same arguments check ours."""

import importlib.machinery
import sys
import types

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from pagewise.experiments import flash_decoding_peers
from pagewise.experiments.decode_inputs import Shape, exact, random_inputs
from pagewise.experiments.flash_decoding_peers import peers
from pagewise.naive_attention import attention
from pagewise.tools.benchmark import fault

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIXED = Shape(3, 5, 40, 0, 0, 4, 2, 32)
SHAPES = [MIXED, MIXED.equal]


def visible(S, lens):
    return None if lens is None else (torch.arange(S) < lens[:, None])[:, None, None]


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens):
    """q [B, T, H, D], caches [B, S, Hkv, D]."""
    assert q.shape[1] == 1
    q, k, v = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
    return attention(q, k, v, attn_mask=visible(k.shape[2], cache_seqlens)).transpose(1, 2)


def create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, *, device):
    assert (B, H, Q_LEN, KV_LEN, device) == (MIXED.num_seqs, None, 1, MIXED.longest, CPU)
    rows = [mask_mod(torch.tensor(b), torch.tensor(0), torch.tensor(0), torch.arange(KV_LEN)) for b in range(B)]
    return torch.stack(rows)[:, None, None]


def flex_attention(q, k, v, *, block_mask, enable_gqa):
    """All [B, heads, tokens, D]."""
    assert enable_gqa
    return attention(q, k, v, attn_mask=block_mask)


@pytest.fixture
def with_everything(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(flex, "flex_attention", flex_attention)
    monkeypatch.setattr(flex, "create_block_mask", create_block_mask)
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)


@pytest.mark.parametrize("shape", SHAPES, ids=["mixed", "equal"])
@pytest.mark.parametrize("name", ["FlexAttention", "flash-attn"])
def test_a_peer_gets_what_it_takes_and_gives_what_is_right(name, shape, with_everything):
    batches = [random_inputs(shape, torch.float32, CPU, seed) for seed in range(2)]
    runs = peers(GPU)[name](batches)
    assert [fault(run, exact(batch)) for run, batch in zip(runs, batches, strict=True)] == [None, None]


@pytest.mark.parametrize("shape", SHAPES, ids=["mixed", "equal"])
def test_sdpa_gets_a_mask_where_lengths_differ(shape):
    batch = random_inputs(shape, torch.float32, CPU, seed=0)
    (run,) = peers(CPU)["SDPA math"]([batch])
    assert fault(run, exact(batch)) is None


def test_what_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr(flash_decoding_peers.importlib.util, "find_spec", lambda name: None)
    assert {name.split()[0] for name in peers(GPU)} == {"SDPA", "FlexAttention"}
