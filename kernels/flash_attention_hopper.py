"""FlashAttention-2's forward as Hopper's hardware likes it: tiles moved by the tensor memory accelerator (lesson 6).

The same fold as in `flash_attention.py`, in one loop whose mask is always applied. Descriptors say once where a matrix
lies and how long it is; then a single thread asks for a tile by its coordinates, and what lies outside reads as 0. With
WARP_SPECIALIZE the compiler gives the copies to warps of their own (sm_90, 4 warps, and one loop only).

A variant is used where a recorded measurement says that it wins: `flash_attention.in_triton_hopper.WINS`.
"""

import triton
import triton.language as tl

from pagewise.kernels.flash_attention import key_tiles, store_rows, store_stats
from pagewise.kernels.partial import empty, fold_base_2, output
from pagewise.kernels.scores import LN_2, LOG2_E, biased, capped, visible


def tiles(rows, cols, num_warps, num_stages, warp_specialize):
    """How a program's work is cut, as a launch takes it."""
    sizes = {"ROWS": rows, "COLS": cols, "WARP_SPECIALIZE": warp_specialize}
    return sizes | {"num_warps": num_warps, "num_stages": num_stages}


def hopper_tiles(block_d, variant):
    """The tiles worth trying, the likeliest first; variant: "descriptors" or "warp_specialized"."""
    special = variant == "warp_specialized"
    cols = 128 if block_d <= 64 else 64
    if special:
        return (tiles(64, cols, 4, 2, True), tiles(128, cols, 4, 2, True))
    return (tiles(128, cols, 8, 2, False), tiles(128, 128, 8, 2, False))


@triton.jit(do_not_specialize=["num_heads", "group", "T", "S"])
def flash_attention_hopper_kernel(
    q_ptr,  # [B, H, T, D], at multiples of 16 bytes, as are rows, heads and sequences; k and v likewise
    k_ptr,  # [B, Hkv, S, D]
    v_ptr,  # [B, Hkv, S, D]
    slopes_ptr,  # [H] float32; read if ALIBI
    out_ptr,  # [B, H, T, D]
    lse_ptr,  # [B, H, T] float32
    rest_ptr,  # this, m and log₂ l as in the other kernel
    m_ptr,
    log_l_ptr,
    q_stride_batch,
    q_stride_head,
    q_stride_row,
    k_stride_batch,
    k_stride_head,
    k_stride_row,
    v_stride_batch,
    v_stride_head,
    v_stride_row,
    out_stride_batch,
    out_stride_head,
    out_stride_row,
    num_heads,
    group,  # query heads that share a KV head
    T,
    S,
    scale,  # · log₂ e; with SOFTCAP: of the tanh's argument
    softcap,  # · log₂ e
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of two from D on
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LEARNS: tl.constexpr,
    REST: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """out, lse = attention(q, k, v, causal, scale, softcap, alibi_slopes, return_lse=True).

    Grid (⌈T / ROWS⌉ · H · B). One program: ROWS queries of one head.
    """
    pid, num_tiles = tl.program_id(0), tl.cdiv(T, ROWS)
    tile, head, batch = pid % num_tiles, pid // num_tiles % num_heads, (pid // num_tiles // num_heads).to(tl.int64)
    if CAUSAL:
        tile = num_tiles - 1 - tile  # the longest first
    of_q = batch * q_stride_batch + head.to(tl.int64) * q_stride_head
    of_k = batch * k_stride_batch + (head // group).to(tl.int64) * k_stride_head
    of_v = batch * v_stride_batch + (head // group).to(tl.int64) * v_stride_head
    of_out = batch * out_stride_batch + head.to(tl.int64) * out_stride_head
    q_matrix = tl.make_tensor_descriptor(q_ptr + of_q, [T, D], [q_stride_row, 1], [ROWS, BLOCK_D])
    k_matrix = tl.make_tensor_descriptor(k_ptr + of_k, [S, D], [k_stride_row, 1], [COLS, BLOCK_D])
    v_matrix = tl.make_tensor_descriptor(v_ptr + of_v, [S, D], [v_stride_row, 1], [COLS, BLOCK_D])

    sizes, softcap = (T, S), softcap if SOFTCAP else None
    slope = tl.load(slopes_ptr + head) * LOG2_E if ALIBI else None
    rows = tile * ROWS + tl.arange(0, ROWS)
    q = q_matrix.load([tile * ROWS, 0])
    last_row = tl.minimum(tile * ROWS + ROWS, T) - 1
    first, _, _, behind, _, _ = key_tiles(tile * ROWS, last_row, sizes, None, CAUSAL, False, COLS)
    m, l, acc = empty(ROWS, BLOCK_D)
    for j in tl.range(first, behind, warp_specialize=WARP_SPECIALIZE):
        cols = j * COLS + tl.arange(0, COLS)
        k = k_matrix.load([j * COLS, 0])
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # S = Q Kᵀ
        scores = biased(capped(products, scale, softcap), rows[:, None], cols[None, :], sizes, slope)
        scores = tl.where(visible(rows[:, None], cols[None, :], sizes, None, None, CAUSAL), scores, float("-inf"))
        m, l, rescale, weights = fold_base_2(m, l, scores)
        v = v_matrix.load([j * COLS, 0])
        acc *= rescale[:, None]  # O' = exp(m − m') · O + P V
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")

    out, lse = output(m * LN_2, l, acc)
    store_rows((out_ptr + of_out, out_stride_row), rows.to(tl.int64), out, rows < T, D, BLOCK_D)
    first_row = (batch * num_heads + head) * T
    tl.store(lse_ptr + first_row + rows, lse, mask=rows < T)
    if LEARNS:
        store_stats(m_ptr + first_row, log_l_ptr + first_row, rows, m, l, rows < T)
    if REST:
        rest = out - out.to(out_ptr.dtype.element_ty).to(tl.float32)
        store_rows((rest_ptr + of_out, out_stride_row), rows.to(tl.int64), rest, rows < T, D, BLOCK_D)
