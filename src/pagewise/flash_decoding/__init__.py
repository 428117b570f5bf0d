"""Flash-Decoding: few queries over many keys, the keys cut into splits that run side by side (lesson 7).

A decode step has one query per sequence. FlashAttention gives each query one program, and B · H programs leave most of
a GPU idle, however long the sequences are. Flash-Decoding cuts the keys. Each split gives lesson 3's (m, l, acc), and
an exact merge makes one result of them:

    m = max mᵢ        l = Σ exp(mᵢ − m) · lᵢ        acc = Σ exp(mᵢ − m) · accᵢ        out = acc / l

`work_plan` decides which program computes which split. Dao, Haziza, Massa & Sizov 2023.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from pagewise.flash_decoding.work_plan import Piece, equal_ranges
from pagewise.options import ScoreOptions
from pagewise.paged_attention import in_triton
from pagewise.paged_attention.in_torch import attend_in_splits, attend_in_turn
from pagewise.paged_attention.in_triton import FILLING, INT32_MAX, SHARING, DecodeInputs
from pagewise.paged_attention.inputs import ONE_SPLIT, Keys, OutAndLse, Queries, Splits, checked_splits
from pagewise.tools.checks import check_qkv, check_same, check_shape, check_tensor
from pagewise.tools.device import choose_backend, looks
from pagewise.tools.remembered import remembers
from pagewise.tools.transforms import check_values, derivative_of, outside_graphs
from pagewise.tools.tuning import num_splits_heuristic

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
    """Return `naive_attention.attention` for few queries (T from 1 to about 16) over many keys, read in splits.

    Args:
        seq_lens: sequence b has that many keys, from 0 to S, and `causal` aligns its queries to their end. Keys and
            values after them are not used and may be NaN. Default: S each.
        num_splits: cut the keys of each sequence into that many splits, or into as many as it has keys (in Triton:
            tiles).
        split_size: cut them into splits of that many keys (in Triton: of whole tiles). With num_splits or split_size,
            the bits of a row do not depend on the batch around it. Default: one split in torch and on the CPU. On a
            GPU `num_splits_heuristic` splits of each sequence, or, with seq_lens, two programs per SM, which share the
            keys of the whole batch in equal ranges. Equal inputs always give equal bits.
        causal, scale, window, softcap, alibi_slopes: as in `attention`.
        return_lse: also return the natural log-sum-exp of the scores, float32 (float64 for float64).
        check: look at seq_lens before launching, as in `paged_attention`. Unchecked, a length that is not from 0 to S
            gives NaN.
        backend: as in `paged_attention`.

    Returns:
        out, in the dtype of q; with `return_lse` the pair (out, lse). A query that sees no key gets 0 and −inf.

    Raises:
        ValueError, TypeError: an argument does not fit, or the backend cannot take it. The message names it.
    """
    options = ScoreOptions(scale, causal, window, softcap)
    options, splits, refusal = checked(q, k, v, seq_lens, options, num_splits, split_size)
    if alibi_slopes is not None:
        options = options._replace(alibi_slopes=alibi_slopes).checked(q, k.shape[2])
    derivative = derivative_of(q, k, v, alibi_slopes)
    if choose_backend(backend, q.device, refusal, derivative=derivative) == "torch":
        if (splits is None and seq_lens is None) or not len(q):
            out, lse = attend_in_splits(q, k, v, options, splits or ONE_SPLIT)
        else:
            out, lse = _sequence_by_sequence(q, k, v, seq_lens, options, splits or ONE_SPLIT)
        out = out.to(q.dtype)
    else:
        if seq_lens is not None and looks(check, seq_lens):
            check_lengths(seq_lens, k.shape[2])
        splits = splits or (FILLING if seq_lens is None else SHARING)
        out, lse = in_triton.attend(DecodeInputs(q, k, v, options, splits, seq_lens=seq_lens))
    return (out, lse) if return_lse else out


@remembers
def checked(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor | None, options: ScoreOptions, *splits: int | None
) -> tuple[ScoreOptions, Splits | None, str | None]:
    """Return the checked options, the splits, and why Triton cannot take these tensors, or None; for lesson 8 too.

    splits: num_splits, and split_size.
    """
    check_qkv(q, k, v)
    S = k.shape[2]
    options = options.checked(q, S)
    if seq_lens is not None:
        check_tensor("seq_lens", seq_lens, "B", dtypes=(torch.int32,))
        check_shape("seq_lens", seq_lens, (q.shape[0],), "B")
        check_same("device", q=q, seq_lens=seq_lens)
    refusal = f"takes up to {INT32_MAX} keys, got {S}" if S > INT32_MAX else in_triton.refuses_tensors(q=q, k=k, v=v)
    return options, checked_splits(*splits), refusal


def check_lengths(seq_lens: Int32[Tensor, " B"], S: int) -> None:
    """Check that each length is from 0 to S. On a GPU the host waits for the values."""
    wrong = seq_lens[(seq_lens < 0) | (seq_lens > S)]
    if wrong.numel():
        raise ValueError(f"seq_lens must be from 0 to S = {S}, the number of keys, got {int(wrong[0])}")


@outside_graphs('flash_decoding(backend="torch") with seq_lens, num_splits or split_size', remedy='backend="triton"')
def _sequence_by_sequence(
    q: Queries, k: Keys, v: Keys, seq_lens: Int32[Tensor, " B"] | None, options: ScoreOptions, splits: Splits
) -> OutAndLse:
    """Attend in turn where lengths differ or bits must not depend on the batch. Return (out not yet rounded, lse)."""
    return attend_in_turn(each_sequence('flash_decoding(backend="torch")', q, k, v, seq_lens), options, splits)


def each_sequence(
    function: str, q: Queries, k: Keys, v: Keys, seq_lens: Int32[Tensor, " B"] | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return q [1,H,T,D], k and v [1,Hkv,n,D] of each sequence, for a `function` that reads the lengths n."""
    lens = [k.shape[2]] * len(q)
    if seq_lens is not None:
        check_values(function, remedy='backend="triton"', seq_lens=seq_lens)
        check_lengths(seq_lens, k.shape[2])
        lens = seq_lens.tolist()
    return [(q[b, None], k[b, None, :, :n], v[b, None, :, :n]) for b, n in enumerate(lens)]
