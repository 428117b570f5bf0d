"""Online softmax over the rows of a matrix (lesson 3)."""

import triton
import triton.language as tl


@triton.jit
def online_softmax_kernel(
    x_ptr,  # [rows, num_cols], contiguous
    out_ptr,  # [rows, num_cols], contiguous
    num_cols,
    TILE: tl.constexpr,
):
    """out = torch.softmax(x.float(), dim=-1).to(x.dtype), and 0 in a row of −inf.

    One program per row, TILE columns at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * num_cols
    out_ptr += row * num_cols
    cols = tl.arange(0, TILE)

    m = float("-inf")
    l = 0.0
    for start in range(0, num_cols, TILE):
        x = tl.load(x_ptr + start + cols, mask=start + cols < num_cols, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # (−∞) − (−∞) would be NaN
        l = l * tl.exp(m - m_safe) + tl.sum(tl.exp(x - m_safe), axis=0)
        m = m_new

    m_safe = tl.where(m == float("-inf"), 0.0, m)
    l_safe = tl.where(l == 0.0, 1.0, l)
    for start in range(0, num_cols, TILE):
        inside = start + cols < num_cols
        x = tl.load(x_ptr + start + cols, mask=inside, other=float("-inf")).to(tl.float32)
        tl.store(out_ptr + start + cols, (tl.exp(x - m_safe) / l_safe).to(out_ptr.dtype.element_ty), mask=inside)
