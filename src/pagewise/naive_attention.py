r"""Naive attention: softmax(Q Kᵀ) V, written down as the formula says (lesson 1). The oracle of every test.

    scores[i, j] = q_i · k_j · scale,  then softcap, ALiBi and the mask, in this order
    out[i]       = Σ_j softmax(scores[i])_j · v_j
    lse[i]       = log Σ_j exp(scores[i, j])

Vaswani et al. 2017. ALiBi: Press et al. 2022. Softcap: Gemma 2, 2024. GQA: Ainslie et al. 2023.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_mask, check_number, check_qkv
from pagewise.tools.products import product


def attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Bool[Tensor, "..."] | None = None,
    return_lse: bool = False,
) -> Float[Tensor, "B H T D"] | tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Attention of T queries over S keys; query head h reads KV head h // (H / Hkv).

    Scores and softmax are computed in float32 (float64 for float64 inputs); the weights are rounded to the
    dtype of v before they meet it, as on tensor cores. All S scores of all T queries exist at once. A NaN in v
    reaches every query, also one that may not look at it: 0 · NaN is NaN.

    Args:
        causal: key j is visible to query i iff j ≤ i + S − T (bottom-right aligned: the last query sees all).
        window: only the `window` most recent visible keys, the query's own included. Needs causal.
        scale: multiplies q·k. Default D^-½.
        softcap: if > 0, scores become softcap · tanh(score / softcap).
        alibi_slopes: [H] float32; adds slope · −|j − (i + S − T)|.
        attn_mask: bool, broadcasts to [B, H, T, S]; True = may look. Combined with causal by "and".
        dropout_p: probability, in [0, 1), that a weight is dropped; the others grow by 1 / (1 − dropout_p).
        dropout_mask: bool, broadcasts to [B, H, T, S]; True = keep. Drawn from torch's generator if not given.
        return_lse: also return the natural log-sum-exp of each row of scores, float32 (float64 for float64).

    Returns:
        out, in the dtype of q; with `return_lse` the pair (out, lse). A query that sees no key gets 0 and −inf.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    check_qkv(q, k, v)
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask).checked(q, k.shape[2])
    _check_dropout(q, k, dropout_p, dropout_mask)
    T, S = q.shape[2], k.shape[2]
    queries, keys = query_positions(T, S, q.device), torch.arange(S, device=q.device)
    weights, lse = safe_softmax(masked_scores(q, k, queries, keys, options))
    if dropout_p > 0:
        if dropout_mask is None:
            dropout_mask = torch.rand_like(weights) >= dropout_p
        weights = torch.where(dropout_mask, weights / (1 - dropout_p), 0.0)
    out = grouped_matmul(weights.to(v.dtype), v)
    return (out, lse) if return_lse else out


def masked_scores(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    queries: Int[Tensor, "*batch T"],
    keys: Int[Tensor, " S"],
    options: ScoreOptions,
) -> Float[Tensor, "B H T S"]:
    """The scores that enter the softmax, −inf where a query may not look; in float32, float64 for float64.

    `queries` and `keys` are positions in the whole sequence (see `query_positions`), so that the same function
    serves whole matrices and tiles of them, and queries [B, 1, T] sequences of different lengths. Input checks are
    the caller's.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = grouped_matmul(q.to(wide), k.to(wide).mT) * options.scale_for(q.shape[-1])
    if options.softcap > 0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = queries[..., None] - keys  # [..., T, S]; 0 on the diagonal, positive towards the past
    if options.alibi_slopes is not None:
        scores = scores - options.alibi_slopes.to(wide)[:, None, None] * distance.abs()
    visible = visibility(distance, options)
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def query_positions(T: int, S: int, device: torch.device | str | None = None) -> Int[Tensor, " T"]:
    """Positions of T queries that end where S keys end: query i stands at i + S − T."""
    return torch.arange(S - T, S, device=device)


def visibility(distance: Int[Tensor, "*batch T S"], options: ScoreOptions) -> Bool[Tensor, "..."] | None:
    """Which keys may be looked at, from distance = query position − key position; None means all of them."""
    if not options.causal:
        return options.attn_mask
    visible = distance >= 0
    if options.window is not None:
        visible = visible & (distance < options.window)
    return visible if options.attn_mask is None else options.attn_mask & visible


def safe_softmax(scores: Float[Tensor, "*rows S"]) -> tuple[Float[Tensor, "*rows S"], Float[Tensor, "*rows"]]:
    """(softmax, log-sum-exp) of each row. A row of −inf gives weights 0 and −inf, and zero gradients."""
    m = row_max(scores.detach())
    weights = torch.exp(scores - finite(m)[..., None])
    l = weights.sum(dim=-1)
    nothing = l == 0
    l = l.masked_fill(nothing, 1.0)
    lse = (finite(m) + torch.log(l)).masked_fill(nothing, -torch.inf)
    return weights / l[..., None], lse


def row_max(scores: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
    """The largest score of each row; −inf for a row without keys."""
    return scores.amax(dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)


def finite(m: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """m, with 0 where no key is visible yet: (−∞) − (−∞) would be NaN."""
    return m.masked_fill(m == -torch.inf, 0.0)


def grouped_matmul(a: Float[Tensor, "B H M K"], b: Float[Tensor, "B Hkv K N"]) -> Float[Tensor, "B H M N"]:
    """a @ b, where each of b's Hkv heads serves H / Hkv heads of a.

    The rows of such a group stand below each other in one product, so b is not copied.
    """
    B, H, M, K = a.shape
    Hkv = b.shape[1]
    return product(a.reshape(B, Hkv, H // Hkv * M, K), b).reshape(B, H, M, b.shape[-1])


def _check_dropout(q: Tensor, k: Tensor, dropout_p: float, dropout_mask: Tensor | None) -> None:
    check_number("dropout_p", dropout_p, low=0.0, below=1.0)
    if dropout_mask is None:
        return
    if dropout_p == 0:
        raise ValueError("dropout_mask is given but dropout_p is 0: pass the probability it was drawn with")
    check_mask("dropout_mask", dropout_mask, (*q.shape[:3], k.shape[2]), like=q, true_means="keep")
