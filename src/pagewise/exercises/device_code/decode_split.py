import triton
import triton.language as tl


@triton.jit
def decode_split(
    q_ptr,  # [D]
    k_ptr,  # [S, D], as v
    v_ptr,
    m_ptr,  # [n] float32, as l
    l_ptr,
    acc_ptr,  # [n, D] float32
    S,
    scale,
    TILE: tl.constexpr,
    D: tl.constexpr,
):
    """(m, l, acc)[i] = Partial of the scores scale · q·k and the values of split i, for n programs.

    Of t = ⌈S / TILE⌉ tiles, split i has t · i // n … t · (i + 1) // n − 1. One without keys leaves (−inf, 0, 0).
    """
    split, n = tl.program_id(0), tl.num_programs(0)
    dim, token = tl.arange(0, D), tl.arange(0, TILE)
    q = tl.load(q_ptr + dim)
    m, l, acc = float("-inf"), 0.0, tl.zeros([D], tl.float32)
    t = (S + TILE - 1) // TILE

    # yours: the loop over this split's tiles. Load k and v [TILE, D], 0 behind key S − 1; score; bring m, l and acc up
    # to date
    for tile in range(t * split // n, t * (split + 1) // n):
        key = tile * TILE + token
        there = key < S
        offsets = key[:, None] * D + dim[None, :]
        k = tl.load(k_ptr + offsets, mask=there[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=there[:, None], other=0.0)
        scores = tl.where(there, scale * tl.sum(q[None, :] * k, axis=1), float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=0))
        p = tl.exp(scores - m_new)
        shrink = tl.exp(m - m_new)
        l = l * shrink + tl.sum(p, axis=0)
        acc = acc * shrink + tl.sum(p[:, None] * v, axis=0)
        m = m_new
    # end

    tl.store(m_ptr + split, m)
    tl.store(l_ptr + split, l)
    tl.store(acc_ptr + split * D + dim, acc)
