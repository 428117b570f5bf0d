import triton
import triton.language as tl


@triton.jit
def one_pass_kernel(s_ptr, v_ptr, out_ptr, num_keys, TILE: tl.constexpr):
    """Attention of one query per program: out[row] = softmax(s[row]) @ v, or 0 if all scores of the row are −∞.

    s [rows, num_keys] and v [num_keys], float32, contiguous. The program reads each score and each value once.
    """
    s_ptr += tl.program_id(0) * num_keys
    cols = tl.arange(0, TILE)

    m = float("-inf")
    l = 0.0
    acc = 0.0
    for start in range(0, num_keys, TILE):
        inside = start + cols < num_keys
        s = tl.load(s_ptr + start + cols, mask=inside, other=float("-inf"))
        v = tl.load(v_ptr + start + cols, mask=inside, other=0.0)
        m_new = tl.maximum(m, tl.max(s, axis=0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        shrink = tl.exp(m - m_safe)
        weights = tl.exp(s - m_safe)
        l = l * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink + tl.sum(weights * v, axis=0)
        m = m_new

    tl.store(out_ptr + tl.program_id(0), acc / tl.where(l == 0.0, 1.0, l))
