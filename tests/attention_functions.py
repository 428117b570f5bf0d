"""Every attention function of the package under one signature: attend(q, k, v, *, causal, scale, return_lse).

q is [B, H, T, D], k and v are [B, Hkv, S, D]. The result is out, or (out, lse) if lse is asked for. Where a function
reads a paged cache, its keys and values are in shuffled blocks, and every other slot holds NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from pagewise.flash_attention import (
    flash_attention,
    flash_attention_1,
    flash_attention_2,
    flash_attention_varlen,
)
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus import UnifiedMax, lazy_rescale_attention, unified_max_attention
from pagewise.naive_attention import attention
from pagewise.online_softmax import online_attention
from pagewise.options import ScoreOptions
from pagewise.paged_attention import (
    paged_attention,
    paged_attention_grouped,
    paged_attention_v1,
    paged_attention_v2,
    paged_attention_varlen,
)
from pagewise.paged_attention.in_triton import DecodeInputs, attend
from pagewise.paged_attention.inputs import Splits
from pagewise.paged_blocks.cache import to_vllm_layout

BLOCK_SIZE = 16


class Function(NamedTuple):
    """An attention function, and the arguments that it takes."""

    attend: Callable
    has_lse: bool = True
    one_query: bool = False  # T must be 1
    causal_only: bool = False  # and T at most S
    cuda: bool = False  # each dtype is a build of its own
    differentiable: bool = False

    def takes(self, T, S, causal):
        return T == 1 if self.one_query else (T <= S and (causal or T == 1)) if self.causal_only else True


def packed(q, k, v, **options):
    """`flash_attention_varlen` of sequences of equal lengths."""
    (B, H, T, D), S = q.shape, k.shape[2]
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    sums = [torch.arange(B + 1, dtype=torch.int32, device=q.device) * n for n in (T, S)]
    found = flash_attention_varlen(*rows, *sums, **options)
    return in_batches(found, (B, T, H, D))


def in_batches(found, sizes):
    """Return packed results as [B, H, T, D] and [B, H, T]."""
    if isinstance(found, tuple):
        return tuple(x.view(*sizes[:3], *x.shape[2:]).transpose(1, 2) for x in found)
    return found.view(sizes).transpose(1, 2)


def in_programs(num_programs, q, k, v, *, seq_lens=None, return_lse=False, check=True, **options):
    """`flash_decoding` by a number of programs that share all tiles, as it runs on a GPU. `check` has no effect."""
    options = ScoreOptions(**options).checked(q, k.shape[2])
    found = attend(DecodeInputs(q, k, v, options, Splits("share", num_programs), seq_lens=seq_lens))
    return found if return_lse else found[0]


def paged(call, q, k, v, *, seq_lens=None, causal=False, vllm=False, packed=False, **options):
    (B, H, T, D), (_, Hkv, S, _), device = q.shape, k.shape, q.device
    num_blocks = -(-S // BLOCK_SIZE)
    order = torch.randperm(B * num_blocks + 2, generator=torch.Generator().manual_seed(0)).to(device)
    tables = torch.full((B, num_blocks + 1), -1, dtype=torch.int32, device=device)
    tables[:, :num_blocks] = order[: B * num_blocks].view(B, num_blocks)
    caches = torch.full((2, len(order), BLOCK_SIZE, Hkv, D), torch.nan, dtype=q.dtype, device=device)
    tokens = torch.arange(S, device=device)
    caches[:, tables[:, tokens // BLOCK_SIZE].long(), tokens % BLOCK_SIZE] = torch.stack((k, v)).transpose(2, 3)
    caches = to_vllm_layout(*caches) if vllm else caches
    lens = torch.full((B,), S, dtype=torch.int32, device=device) if seq_lens is None else seq_lens
    sequences = [*caches, tables, lens]
    before = [x.clone() for x in sequences]
    if packed:
        ends = torch.arange(B + 1, dtype=torch.int32, device=device) * T
        found = call(q.transpose(1, 2).flatten(0, 1), *sequences, ends, **options)
    else:
        found = call(q[:, :, 0], *sequences, **options)
    for x, old in zip(sequences, before, strict=True):
        assert x.nan_to_num().equal(old.nan_to_num()), "the cache, a table or a length was written"
    if packed:
        return in_batches(found, (B, T, H, D))
    return tuple(x[:, :, None] for x in found) if isinstance(found, tuple) else found[:, :, None]


def out_alone(call, q, k, v, *, return_lse=False, **options):
    found = call(q, k, v, **options)
    out = found[0] if isinstance(found, tuple) else found
    return (out, None) if return_lse else out


BAND = UnifiedMax(0.0, -57, 63)
FUNCTIONS = {
    "naive": Function(attention, differentiable=True),
    "online": Function(partial(online_attention, tile_size=7), differentiable=True),
    "FlashAttention": Function(partial(flash_attention_1, tile_rows=4, tile_cols=9), differentiable=True),
    "FlashAttention-2": Function(partial(flash_attention_2, tile_rows=4, tile_cols=9), differentiable=True),
    "flash cuda": Function(partial(flash_attention, backend="cuda"), cuda=True),
    "paged v1": Function(partial(paged, paged_attention_v1, vllm=True), one_query=True, cuda=True),
    "paged v2": Function(partial(paged, paged_attention_v2, vllm=True), one_query=True, cuda=True),
    "paged grouped": Function(partial(paged, paged_attention_grouped, vllm=True), one_query=True, cuda=True),
}
for backend in ("torch", "triton"):
    of = partial(partial, backend=backend)
    FUNCTIONS |= {
        f"flash {backend}": Function(of(flash_attention), differentiable=True),
        f"flash packed {backend}": Function(of(packed), differentiable=True),
        f"decode {backend}": Function(of(flash_decoding)),
        f"decode split {backend}": Function(of(flash_decoding, num_splits=3)),
        f"decode sized {backend}": Function(of(flash_decoding, split_size=20)),
        f"paged {backend}": Function(of(paged, paged_attention), one_query=True),
        f"paged split {backend}": Function(of(paged, paged_attention, num_splits=3), one_query=True),
        f"varlen {backend}": Function(of(paged, paged_attention_varlen, packed=True), causal_only=True),
        f"unified {backend}": Function(of(out_alone, unified_max_attention, unified_max=BAND), has_lse=False),
        f"lazy {backend}": Function(of(out_alone, lazy_rescale_attention), has_lse=False),
    }
FUNCTIONS["decode shared triton"] = Function(partial(in_programs, 3))
