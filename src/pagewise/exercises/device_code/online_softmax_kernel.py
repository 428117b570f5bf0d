import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, num_cols, TILE: tl.constexpr):
    """out = softmax(x) of each row of x [rows, num_cols], contiguous; 0 in a row of −inf. One program per row.

    First pass: m and l of the columns so far, TILE at a time. Second pass: exp(x − m) / l.
    """
    x_ptr += tl.program_id(0) * num_cols
    out_ptr += tl.program_id(0) * num_cols
    cols = tl.arange(0, TILE)

    m = float("-inf")
    l = 0.0
    for start in range(0, num_cols, TILE):
        inside = start + cols < num_cols
        x = tl.load(x_ptr + start + cols, mask=inside, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(x, axis=0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp(m - m_safe) + tl.sum(tl.exp(x - m_safe), axis=0)
        m = m_new

    m_safe = tl.where(m == float("-inf"), 0.0, m)
    l_safe = tl.where(l == 0.0, 1.0, l)
    for start in range(0, num_cols, TILE):
        inside = start + cols < num_cols
        x = tl.load(x_ptr + start + cols, mask=inside, other=float("-inf"))
        tl.store(out_ptr + start + cols, tl.exp(x - m_safe) / l_safe, mask=inside)
