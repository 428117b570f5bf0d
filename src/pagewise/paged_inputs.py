"""What every way of paged decode asks of its arguments, checked before anything is launched (lessons 4 and 5)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from pagewise.cache_writing import FLOAT8
from pagewise.tools.checks import (
    FLOAT32_MAX,
    FLOATS,
    check_heads,
    check_number,
    check_same,
    check_score_options,
    check_shape,
    check_tensor,
)


class Options(NamedTuple):
    """What shapes the scores and scales the values (see `paged_attention`)."""

    scale: float | None = None
    alibi_slopes: Tensor | None = None
    window: int | None = None
    softcap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0

    def score_scale(self, head_size: int) -> float:
        """What q · (stored k) is multiplied by: the cache's scale is linear, so it joins the scale of the scores."""
        return (head_size**-0.5 if self.scale is None else float(self.scale)) * self.k_scale


class Used(NamedTuple):
    """What sequences use of their block tables."""

    entries: Bool[Tensor, "B M"]  # those that some query sees
    start: int  # no column before it is seen, nor one from `stop` on
    stop: int
    longest: int  # of the lengths


def check_nhd(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
    """Shapes, dtypes and devices of q [B,H,D] and a cache [N,P,Hkv,D] that belong together."""
    check_tensor("q", q, "B H D", dtypes=(*FLOATS, torch.float64))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, "N P Hkv D", dtypes=(q.dtype, *FLOAT8))
    check_same("dtype", k_cache=k_cache, v_cache=v_cache)
    (_, H, D), (N, P, Hkv, _) = q.shape, k_cache.shape
    check_shape("k_cache", k_cache, (N, P, Hkv, D), "N P Hkv D")
    check_shape("v_cache", v_cache, k_cache.shape, "N P Hkv D")
    check_heads(H, Hkv)
    if D == 0 or P == 0:
        raise ValueError(f"k_cache must have a block size P and a head size D of at least 1, got {list(k_cache.shape)}")
    check_sequences(q, k_cache, v_cache, block_tables, seq_lens)


def check_vllm(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, head_sizes: Sequence[int], block_sizes: Sequence[int]
) -> None:
    """The same for a cache in vLLM's layout, read 16 bytes at a time: sizes the kernels have, vecs in one piece."""
    check_tensor("q", q, "B H D", dtypes=FLOATS)
    check_tensor("k_cache", k_cache, "N Hkv D/x P x", dtypes=(q.dtype, *FLOAT8))
    check_tensor("v_cache", v_cache, "N Hkv D P", dtypes=(q.dtype, *FLOAT8))
    check_same("dtype", k_cache=k_cache, v_cache=v_cache)
    (_, H, D), (N, Hkv, _, P), x = q.shape, v_cache.shape, 16 // k_cache.dtype.itemsize
    for name, size, sizes in (
        ("q must have a head size D", D, head_sizes),
        ("v_cache: a block size P", P, block_sizes),
    ):
        if size not in sizes:
            supported = ", ".join(map(str, sizes))
            raise ValueError(
                f"{name} of {supported}, got {size}: paged_attention takes any, with a cache [N, P, Hkv, D]"
            )
    if D % x:
        raise ValueError(
            f"q must have a head size D that is a multiple of {x} (16 bytes) for a cache of {k_cache.dtype}, got {D}: "
            f"paged_attention takes it (layout nhd)"
        )
    check_shape("k_cache", k_cache, (N, Hkv, D // x, P, x), "N Hkv D/x P x")
    check_shape("v_cache", v_cache, (N, Hkv, D, P), "N Hkv D P")
    check_heads(H, Hkv)
    if D > 1 and q.stride(-1) != 1:
        raise ValueError(f"q must be contiguous in its last dimension, got strides {q.stride()}: pass q.contiguous()")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not cache[:1, :1].is_contiguous():
            raise ValueError(
                f"{name} must be contiguous within a block's KV head, got shape {list(cache.shape)} and strides "
                f"{cache.stride()}"
            )
        outer = [stride for stride, size in zip(cache.stride()[:2], (N, Hkv), strict=True) if size > 1]
        if cache.data_ptr() % 16 or any(stride * cache.element_size() % 16 for stride in outer):
            raise ValueError(f"{name} must begin, block by block and head by head, at a multiple of 16 bytes")
        if any(a != b for a, b, size in zip(cache.stride(), k_cache.stride(), (N, Hkv), strict=False) if size > 1):
            raise ValueError(
                f"v_cache must have k_cache's strides of blocks and KV heads, {k_cache.stride()[:2]}, "
                f"got {cache.stride()[:2]}"
            )


def check_sequences(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
    """block_tables [B,M] and seq_lens [B], int32, for the B sequences of q, everything on one device."""
    check_tensor("block_tables", block_tables, "B M", dtypes=(torch.int32,))
    check_tensor("seq_lens", seq_lens, "B", dtypes=(torch.int32,))
    check_same("device", q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, seq_lens=seq_lens)
    if q.device.type == "meta":
        raise ValueError("q must be on the CPU or a GPU, got a meta tensor, which has no numbers")
    check_shape("block_tables", block_tables, (len(q), block_tables.shape[1]), "B M")
    check_shape("seq_lens", seq_lens, (len(q),), "B")


def check_options(q: Tensor, max_tokens: int, options: Options) -> Options:
    """`options` for q [B,H,D] over at most `max_tokens` keys; returned with its numbers as floats."""
    check_score_options(
        q[:, :, None], max_tokens, causal=True, window=options.window, scale=options.scale, softcap=options.softcap,
        alibi_slopes=options.alibi_slopes, attn_mask=None,
    )  # fmt: skip
    check_number("k_scale", options.k_scale, low=-FLOAT32_MAX, below=FLOAT32_MAX)
    check_number("v_scale", options.v_scale, low=-FLOAT32_MAX, below=FLOAT32_MAX)
    options = options._replace(
        softcap=float(options.softcap), k_scale=float(options.k_scale), v_scale=float(options.v_scale)
    )
    if not abs(options.score_scale(q.shape[-1])) <= FLOAT32_MAX:
        raise ValueError(f"k_scale = {options.k_scale} times scale must fit float32, got scale = {options.scale}")
    return options


def check_tables(
    block_tables: Int[Tensor, "B M"], seq_lens: Int[Tensor, " B"], num_blocks: int, block_size: int,
    window: int | None = None,
) -> Used:  # fmt: skip
    """Lengths must fit the tables, and entries in use must be blocks of the cache. On a GPU this waits for it once."""
    (B, M), lens, P = block_tables.shape, seq_lens.long(), block_size
    first_key = torch.zeros_like(lens) if window is None else (lens - window).clamp(min=0)
    columns = torch.arange(M, device=lens.device)
    used = (columns * P < lens[:, None]) & ((columns + 1) * P > first_key[:, None])
    wrong = used & ((block_tables < 0) | (block_tables >= num_blocks))
    # one look at the device for all that must be known on the host
    first = torch.where(lens > 0, first_key, M * P)
    facts = torch.stack([lens, -lens, -first, wrong.any(dim=1).long()]).amax(dim=1).tolist() if B else [0, 0, 0, 0]
    longest, shortest, start, any_wrong = facts[0], -facts[1], -facts[2] // P, facts[3]
    if shortest < 0 or longest > M * P:
        raise ValueError(
            f"seq_lens must be from 0 to M · P = {M} · {P} = {M * P}, what a row of block_tables can hold, "
            f"got {shortest if shortest < 0 else longest}"
        )
    if any_wrong and num_blocks == 0:
        raise ValueError(f"the cache has no blocks (N = 0), but seq_lens has {longest} tokens")
    if any_wrong:
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables must hold blocks from 0 to {num_blocks - 1} where a sequence has tokens, got "
            f"{int(block_tables[b, i])} at [{b}, {i}]; sequence {b} has {int(seq_lens[b])} tokens"
        )
    stop = -(-longest // P)
    return Used(used, min(start, stop), stop, longest)
