import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    q_ptr,  # [D]
    k_ptr,  # [N, P, D], as v
    v_ptr,
    out_ptr,  # [D]
    block,  # which of the N blocks to read
    num_tokens,  # so many of its P slots are written, at least 1; the others hold anything, NaN too
    scale,
    P: tl.constexpr,
    D: tl.constexpr,
):
    """out = softmax(scale · k q) v, for the keys and values of one block of the cache. One program."""
    token, dim = tl.arange(0, P), tl.arange(0, D)
    q = tl.load(q_ptr + dim)
    # yours: offsets [P, D] of the block's elements; the scores [P] of its tokens, −inf from num_tokens on; their
    # weights; the weighted sum of the values. A weight of 0 does not hide NaN.
    visible = token < num_tokens
    offsets = (block * P + token)[:, None] * D + dim[None, :]
    k = tl.load(k_ptr + offsets, mask=visible[:, None], other=0.0)
    v = tl.load(v_ptr + offsets, mask=visible[:, None], other=0.0)
    scores = tl.where(visible, scale * tl.sum(q[None, :] * k, axis=1), float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0))
    out = tl.sum(weights[:, None] * v, axis=0) / tl.sum(weights, axis=0)
    # end
    tl.store(out_ptr + dim, out)
