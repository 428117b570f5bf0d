"""Flash-Decoding: few queries over many keys, the keys cut into pieces that run side by side (lesson 7).

A decode step has one query per sequence, and FlashAttention one program for each: B · H of them leave most of a GPU
idle, however long the sequence is. So its keys are cut, each piece gives lesson 3's `Partial`, and an exact merge makes
one result of them:

    m = max mᵢ        l = Σ exp(mᵢ − m) · lᵢ        acc = Σ exp(mᵢ − m) · accᵢ        out = acc / l

The Triton kernel is the one of paged attention: dense keys are one block per sequence. How keys are cut is told in
`pagewise.paged_attention.splits`. Dao, Haziza, Massa & Sizov 2023.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_torch import in_pieces, in_turn
from pagewise.paged_attention.in_triton import DecodeInputs, decode, refuses
from pagewise.paged_attention.splits import Piece, Splits, checked_splits, equal_ranges, num_splits_heuristic
from pagewise.tools.checks import check_flag, check_qkv, check_same, check_shape, check_tensor
from pagewise.tools.device import choose_backend, wants_gradient

__all__ = ["Piece", "Splits", "equal_ranges", "flash_decoding", "num_splits_heuristic"]


def flash_decoding(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    seq_lens: Int32[Tensor, " B"] | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    return_lse: bool = False,
    check: bool | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Float[Tensor, "B H T D"] | tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """`naive_attention.attention` for few queries (T from 1 to about 16) and many keys, which are read in pieces.

    Args:
        seq_lens: sequence b has that many keys, from 0 to S, and `causal` aligns its queries to their end; what lies
            after them is not used (NaN there does no harm). Default: S each.
        num_splits: cut the keys of each sequence into that many pieces, or as many as it has (in Triton: tiles).
        split_size: cut them into pieces of that many keys (in Triton: of whole tiles). With this or with num_splits a
            row's bits do not depend on the batch around it. Default: one piece in torch and on the CPU; on a GPU what
            fills it: `num_splits_heuristic` pieces of each sequence, or with seq_lens as many programs, which share
            the keys of the whole batch in equal ranges. Every way equal inputs give equal bits.
        causal, scale, window, softcap, alibi_slopes: as in `attention`.
        return_lse: also return the natural log-sum-exp of the scores, float32 (float64 for float64).
        check: look at seq_lens before launching. Default: where that is free, on the CPU; on a GPU True waits for it
            once. Unchecked, a length that is not from 0 to S gives NaN. The torch backend always checks.
        backend: "triton" takes float32, float16 and bfloat16, D up to 256, tensors contiguous in D, and is forward
            only; "torch" anything. "auto": triton on a GPU where it can and no gradient is needed, else torch.

    Returns:
        out, in the dtype of q; with `return_lse` the pair (out, lse). A query that sees no key gets 0 and −inf.

    Raises:
        ValueError, TypeError: an argument does not fit, or the backend cannot take it; the message names it.
    """
    check_qkv(q, k, v)
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes).checked(q, k.shape[2])
    splits = checked_splits(num_splits, split_size)
    check_flag("return_lse", return_lse)
    if check is not None:
        check_flag("check", check)
    if seq_lens is not None:
        check_tensor("seq_lens", seq_lens, "B", dtypes=(torch.int32,))
        check_shape("seq_lens", seq_lens, (len(q),), "B")
        check_same("device", q=q, seq_lens=seq_lens)
    inputs = DecodeInputs(q, k, v, seq_lens=seq_lens)
    learns = wants_gradient(q, k, v, alibi_slopes)
    chosen = choose_backend(backend, q.device, refuses(inputs), learns=learns)
    if seq_lens is not None and (chosen == "torch" or check or (check is None and not q.is_cuda)):
        _check_lengths(seq_lens, k.shape[2])
    out, lse = (_in_torch if chosen == "torch" else decode)(inputs, options, splits)
    return (out, lse) if return_lse else out


def _check_lengths(seq_lens: Int32[Tensor, " B"], S: int) -> None:
    wrong = seq_lens[(seq_lens < 0) | (seq_lens > S)]
    if wrong.numel():
        raise ValueError(f"seq_lens must be from 0 to S = {S}, the keys there are, got {int(wrong[0])}")


def _in_torch(
    inputs: DecodeInputs, options: ScoreOptions, splits: Splits | None
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Sequence by sequence where they differ in length or must not depend on each other, else all at once."""
    q, k, v, lens = inputs.q, inputs.k, inputs.v, inputs.seq_lens
    whole = splits or Splits("num", 1)
    if not len(q) or (splits is None and lens is None):
        out, lse = in_pieces(q, k, v, options, whole)
    else:
        lens = [k.shape[2]] * len(q) if lens is None else lens.tolist()
        cut = ((q[b, None], k[b, None, :, :n], v[b, None, :, :n]) for b, n in enumerate(lens))
        out, lse = in_turn(cut, options, whole)
    return out.to(q.dtype), lse
