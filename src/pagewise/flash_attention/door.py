"""`flash_attention`: what is given is checked here, once, and one of three ways to compute it is chosen (lesson 6)."""

from typing import Literal

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from pagewise.flash_attention import in_cuda, in_triton, ops
from pagewise.flash_attention.dropout import Dropout
from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_flag, check_qkv
from pagewise.tools.device import choose_backend, wants_gradient


def flash_attention(
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
    dropout_seed: int | Int64[Tensor, ""] | None = None,
    return_lse: bool = False,
    backend: Literal["auto", "torch", "triton", "cuda"] = "auto",
) -> Float[Tensor, "B H T D"] | tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """`naive_attention.attention` in memory that grows with T + S, not T · S; differentiable in q, k and v, once.

    Any T, S and strides: a view of [B, T, H, D] is read as it lies, and out lies as q does. Equal inputs give equal
    bits, in the backward too. Autocast changes nothing: out has the dtype of q. Dao et al. 2022; Dao 2023.

    Args:
        causal, window, scale, softcap, alibi_slopes, attn_mask: as in `attention`.
        dropout_p: probability in [0, 1) that a weight is dropped, rounded to a multiple of 2⁻¹⁶; the others grow by
            1 / (1 − p).
        dropout_seed: the weights kept are those of `dropout_mask`, in the backward too. None: torch's generator gives
            a seed. An int, or one int64 in a tensor.
        return_lse: also return the natural log-sum-exp of each row of scores, float32 (float64 for float64),
            differentiable.
        backend: "triton" takes head sizes up to 256; "torch" anything, float64 too; "cuda", a kernel to be read, has
            only causal and no backward. "auto": triton on a GPU where it can, else torch.

    Returns:
        out, in the dtype of q; with `return_lse` the pair (out, lse). A query that sees no key gets 0 and −inf, and no
        gradient.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: differentiated twice.
    """
    check_qkv(q, k, v)
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask)
    options = options.checked(q, k.shape[2]).without_gradient()
    dropout = Dropout.checked(dropout_p, dropout_seed, q.device)
    check_flag("return_lse", return_lse)
    if backend == "cuda":
        learns = wants_gradient(q, k, v)
        if refusal := "has no backward" if learns else in_cuda.refuses(q, options, dropout):
            takers = '"torch"' if in_triton.refuses(q) else '"triton" or "torch"'
            raise ValueError(f'backend="cuda" {refusal}; backend={takers} takes it')
        out, lse = in_cuda.forward(q, k, v, options)
    else:
        backend = choose_backend(backend, q.device, in_triton.refuses(q), others=("cuda",))
        out, lse = ops.attend(q, k, v, options, dropout, None, backend)
    return (out, lse) if return_lse else out
