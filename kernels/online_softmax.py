"""Online softmax over the rows of a matrix (lesson 3)."""

import triton
import triton.language as tl

from pagewise.kernels.partial import finite, fold, output


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
    cols = tl.arange(0, TILE)[None, :]

    m, l = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, num_cols, TILE):
        x = tl.load(x_ptr + start + cols, mask=start + cols < num_cols, other=float("-inf")).to(tl.float32)
        m, l, _, _ = fold(m, l, x)

    for start in range(0, num_cols, TILE):
        inside = start + cols < num_cols
        x = tl.load(x_ptr + start + cols, mask=inside, other=float("-inf")).to(tl.float32)
        out, _ = output(m, l, tl.exp(x - finite(m)[:, None]))
        tl.store(out_ptr + start + cols, out.to(out_ptr.dtype.element_ty), mask=inside)
