import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q_ptr,  # [T, D]
    k_ptr,  # [S, D], as v
    v_ptr,
    out_ptr,  # [T, D]
    T,
    S,
    scale,
    BR: tl.constexpr,
    BC: tl.constexpr,
    D: tl.constexpr,
):
    """out = softmax(scale · q kᵀ) v, causal: query t sees key s iff s ≤ t + S − T; 0 if it sees none.

    FlashAttention-2: a program owns BR queries and takes BC keys at a time.
    """
    row, dim = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, D)
    q = tl.load(q_ptr + row[:, None] * D + dim[None, :], mask=row[:, None] < T, other=0.0)
    m = tl.full([BR], float("-inf"), tl.float32)
    l = tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, D], tl.float32)
    scale_2 = scale * 1.4426950408889634  # · log₂ e: exp(scale · x) is exp2(scale_2 · x), and exp2 is one instruction

    for start in range(0, S, BC):
        col = start + tl.arange(0, BC)
        k = tl.load(k_ptr + col[:, None] * D + dim[None, :], mask=col[:, None] < S, other=0.0)
        v = tl.load(v_ptr + col[:, None] * D + dim[None, :], mask=col[:, None] < S, other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BR, BC]
        # yours: mask and scale the products, then bring m, l and acc up to date. tl.dot(…, input_precision="ieee")
        # multiplies; scores, m and exponents are all in base 2
        visible = col[None, :] <= row[:, None] + S - T
        scores = tl.where(visible, products * scale_2, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - m_safe[:, None])
        shrink = tl.exp2(m - m_safe)
        l = l * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
        m = m_new
        # end

    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(out_ptr + row[:, None] * D + dim[None, :], out, mask=row[:, None] < T)
