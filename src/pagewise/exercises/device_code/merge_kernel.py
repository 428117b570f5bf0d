import triton
import triton.language as tl


@triton.jit
def merge_kernel(m_ptr, l_ptr, acc_ptr, out_ptr, num_splits, D: tl.constexpr):
    """out[row] = attention of a row over all keys, from the (m, l, acc) of its splits. Grid (rows).

    m and l [rows, num_splits], acc [rows, num_splits, D] and out [rows, D], float32, contiguous. D is a power of two.
    A split without keys left (−∞, 0, 0). A row without keys gets 0.
    """
    row, dim = tl.program_id(0), tl.arange(0, D)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([D], tl.float32)
    for split in range(0, num_splits):
        part = row * num_splits + split
        m_i = tl.load(m_ptr + part)
        l_i = tl.load(l_ptr + part)
        acc_i = tl.load(acc_ptr + part * D + dim)
        m_new = tl.maximum(m, m_i)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        ours, theirs = tl.exp(m - m_safe), tl.exp(m_i - m_safe)
        l = l * ours + l_i * theirs
        acc = acc * ours + acc_i * theirs
        m = m_new
    tl.store(out_ptr + row * D + dim, acc / tl.where(l == 0.0, 1.0, l))
