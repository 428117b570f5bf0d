"""Two other softmaxes for split decode over dense keys: the unified maximum and lazy rescaling (lesson 8).

    unified_max_kernel             first rung: one φ in place of every maximum, so nothing is ever rescaled
    unified_max_attention_kernel   last rung, with `add_splits_kernel`, which adds the splits and finds unsafe rows
    lazy_rescale_kernel            the maximum follows only if it grows by more than a threshold; 0: the online softmax

Hong et al. 2023 (FlashDecoding++). Lazy rescaling: FlashAttention-4, 2025.
"""

import triton
import triton.language as tl

from pagewise.kernels.decode import rows_at, store_partials
from pagewise.kernels.partial import empty, finite, output
from pagewise.kernels.work_plan import count_tiles, rows_of_item


@triton.jit
def unified_max_kernel(
    q,  # [B, H, D]
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    m_ptr,  # [B · H · num_splits] float32, as l
    l_ptr,
    acc_ptr,  # [B · H · num_splits · D] float32
    num_heads,
    S,
    scale,
    phi,
    D: tl.constexpr,  # a power of two, at least 16
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,  # a power of two from GROUP on, at least 16: tl.dot takes no fewer rows
    TILE: tl.constexpr,  # keys per step
):
    """Leave l = Σ exp(s − φ), acc = Σ exp(s − φ) · v and m = max s of split i of the keys. Grid (B, Hkv, num_splits).

    Splits share φ, so l and acc of a row are the sums over its splits. m is only watched: it tells whether φ was safe.
    """
    q_ptr, q_seq, q_head, _ = q
    k_ptr, k_seq, k_head, k_token, _ = k
    v_ptr, v_seq, v_head, v_token, _ = v
    seq, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    row, dim = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    head, is_head = kv_head * GROUP + row, row < GROUP

    query = tl.load(q_ptr + seq * q_seq + head[:, None] * q_head + dim, mask=is_head[:, None], other=0.0)
    # m and l of each column of a tile by itself: no thread waits for another
    m = tl.full([ROWS, TILE], float("-inf"), tl.float32)
    l = tl.zeros([ROWS, TILE], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    num_tiles = tl.cdiv(S, TILE)
    for tile in range(num_tiles * split // num_splits, num_tiles * (split + 1) // num_splits):
        key = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        is_key = key < S
        k_offset = seq * k_seq + kv_head * k_head + key[:, None] * k_token + dim
        v_offset = seq * v_seq + kv_head * v_head + key[:, None] * v_token + dim
        keys = tl.load(k_ptr + k_offset, mask=is_key[:, None], other=0.0)  # [TILE, D]
        values = tl.load(v_ptr + v_offset, mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale  # [ROWS, TILE]
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        weights = tl.exp(scores - phi)
        m = tl.maximum(m, scores)
        l += weights
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    part = (seq * num_heads + head) * num_splits + split
    tl.store(m_ptr + part, tl.max(m, axis=1), mask=is_head)
    tl.store(l_ptr + part, tl.sum(l, axis=1), mask=is_head)
    tl.store(acc_ptr + part[:, None] * D + dim, acc, mask=is_head[:, None])


@triton.jit
def exp_of_difference(s, phi):
    """Return exp(s − φ) to float32's last digits, as 2ⁿ · exp(s − φ − n · log 2): exp of a large x loses x · 2⁻²⁴.

    s − φ is the sum d + lost, exact for any φ (Knuth 1969), and n · log 2 is n · (355/512 − 0.000212…)."""
    is_zero = s - phi < -200.0
    s = tl.where(is_zero, phi, s)
    d = s - phi
    taken = s - d  # in place of φ, as d was rounded
    lost = (s - (d + taken)) + (taken - phi)
    n = tl.floor(d * 1.4426950408889634 + 0.5)
    rest = d - n * 0.693359375 + (n * 2.1219444005469057e-4 + lost)
    return tl.where(is_zero, 0.0, tl.exp2(n) * tl.exp(rest))


@triton.jit
def rounded(weights, DTYPE: tl.constexpr):
    """Return float32 weights rounded as a product with values of DTYPE takes them, with the exponents of float32.

    l then sums the same weights as acc. TF32 replaces float16, which ends at 65504. Tensor cores would truncate.
    """
    if tl.float16 == DTYPE:  # to the nearest number whose last 13 bits are 0; a GPU's NaN, 0x7fffffff, would become −0
        nearest = ((weights.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        weights = tl.where(weights == weights, nearest, weights)
    return weights.to(tl.bfloat16).to(tl.float32) if tl.bfloat16 == DTYPE else weights


@triton.jit
def add_weighted(acc, weights, values, WIDE: tl.constexpr):
    """Return acc + weights @ values. WIDE: weights may be larger than float16 holds, so the product is in TF32."""
    if WIDE:
        return tl.dot(weights, values.to(tl.float32), acc, input_precision="tf32")
    return tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")


@triton.jit
def part_of_program(q, k, v, seq_lens_ptr, T, S, SIZES: tl.constexpr, HKV: tl.constexpr):
    """Return (queries, keys, first tile, end tile) of a program.

    queries: of each row of program_id(0), its index in [B, H, T], whether it exists, its position and q [ROWS,
    BLOCK_D]. keys: (pointer, stride of tokens) of keys and of values, and how many there are, at most S; below 0 is
    none. The tiles are those of split program_id(1).
    """
    q_ptr, q_seq, q_head, q_query, _ = q
    k_ptr, k_seq, k_head, k_token, _ = k
    v_ptr, v_seq, v_head, v_token, _ = v
    seq, kv_head, first_row, num_rows, _ = rows_of_item(tl.program_id(0), None, None, T, HKV, SIZES)
    seq, kv_head, row = seq.to(tl.int64), kv_head.to(tl.int64), first_row + tl.arange(0, SIZES.ROWS)
    head, query, is_row = kv_head * SIZES.GROUP + row % SIZES.GROUP, (row // SIZES.GROUP).to(tl.int64), row < num_rows
    if seq_lens_ptr is not None:
        S = tl.minimum(tl.load(seq_lens_ptr + seq), S)
    q_rows = q_ptr + seq * q_seq + head * q_head + query * q_query
    keys = (k_ptr + seq * k_seq + kv_head * k_head, k_token, v_ptr + seq * v_seq + kv_head * v_head, v_token, S)
    split, num_splits, num_tiles = tl.program_id(1), tl.num_programs(1), count_tiles(0, S, SIZES.TILE).to(tl.int64)
    first_tile, end_tile = num_tiles * split // num_splits, num_tiles * (split + 1) // num_splits
    q_tile = rows_at(q_rows, is_row, SIZES.D, SIZES.BLOCK_D)
    queries = ((seq * HKV * SIZES.GROUP + head) * T + query, is_row, S - T + query, q_tile)
    return queries, keys, first_tile, end_tile


@triton.jit
def score_tile(q, position, keys, tile, scale, SIZES: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the scores of a tile of keys [ROWS, TILE], −∞ where hidden, and its values [TILE, BLOCK_D]."""
    k_ptr, k_token, v_ptr, v_token, S = keys
    key = (tile * SIZES.TILE + tl.arange(0, SIZES.TILE)).to(tl.int64)
    k = rows_at(k_ptr + key * k_token, key < S, SIZES.D, SIZES.BLOCK_D)
    v = rows_at(v_ptr + key * v_token, key < S, SIZES.D, SIZES.BLOCK_D)
    visible = (key < S)[None, :]
    if CAUSAL:
        visible = visible & (key[None, :] <= position[:, None])
    return tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf")), v


@triton.jit(do_not_specialize=["num_queries", "S"])
def unified_max_attention_kernel(
    q,  # [B, H, T, D]
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    seq_lens_ptr,  # [B] int32, or None: every sequence has S keys
    partials,  # float32: m and l [B · H · T · num_splits], acc [B · H · T · num_splits · D]
    num_queries,  # T
    S,
    scale,
    phi,
    SIZES: tl.constexpr,  # `DecodeSizes`
    HKV: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Leave (m, l, acc) of the unified maximum. Grid (B · Hkv · chunks of rows, num_splits).

    From `unified_max_kernel` to this kernel:

    1. Any head size and group, T queries per sequence, causal.
    2. Weights keep float32's exponents, since exp(s − φ) exceeds float16 from s − φ = 11.09 on.
    3. exp(s − φ) keeps float32's last digits whatever φ is, and l sums the weights as the product rounds them.
    """
    queries, keys, first_tile, end_tile = part_of_program(q, k, v, seq_lens_ptr, num_queries, S, SIZES, HKV)
    result, is_row, position, q_tile = queries
    ROWS: tl.constexpr = SIZES.ROWS
    TILE: tl.constexpr = SIZES.TILE
    _, _, acc = empty(ROWS, SIZES.BLOCK_D)
    m, l = tl.full([ROWS, TILE], float("-inf"), tl.float32), tl.zeros([ROWS, TILE], tl.float32)
    for tile in range(first_tile, end_tile):
        scores, v_tile = score_tile(q_tile, position, keys, tile, scale, SIZES, CAUSAL)
        weights = exp_of_difference(scores, phi) if q_tile.dtype == tl.float32 else tl.exp(scores - phi)
        weights = rounded(weights, q_tile.dtype)
        m = tl.maximum(m, scores)
        l += weights
        acc = add_weighted(acc, weights, v_tile, WIDE=q_tile.dtype == tl.float16)
    slots = result * tl.num_programs(1) + tl.program_id(1)
    store_partials(partials, slots, is_row, tl.max(m, axis=1), tl.sum(l, axis=1), acc, SIZES.D)


@triton.jit(do_not_specialize=["num_splits"])
def add_splits_kernel(
    partials,  # float32: m and l [rows · num_splits], acc [rows · num_splits · D]
    out_ptr,  # [rows · D]
    lse_ptr,  # [rows] float32
    unsafe_ptr,  # [rows] uint8: 1 where φ was not safe, and out is to be computed again
    num_splits,
    phi,
    low,
    high,
    smallest,  # that a sum of weights below 1 times values may be: `unified_max.limits`
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOADS: tl.constexpr,  # splits that are read at once
):
    """Add the splits of a row up, and check that φ was safe for it: low < m − φ < high, and no sum left the floats.

    Grid (rows). A row that sees no key is safe.
    """
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)[None, :]
    m_ptr, l_ptr, acc_ptr = partials
    m, l, acc = empty(1, BLOCK_D)
    for start in range(0, num_splits, LOADS):
        split = start + tl.arange(0, LOADS)
        slots, mask = row * num_splits + split, split < num_splits
        acc_parts = tl.load(acc_ptr + slots[:, None] * D + dim, mask=mask[:, None] & (dim < D), other=0.0)
        m = tl.maximum(m, tl.max(tl.load(m_ptr + slots, mask=mask, other=float("-inf")), axis=0))
        l += tl.sum(tl.load(l_ptr + slots, mask=mask, other=0.0), axis=0)
        acc += tl.sum(acc_parts, axis=0)[None, :]

    exponent, size, only = m - phi, tl.abs(acc), row + tl.arange(0, 1)
    largest = tl.max(tl.where(size < float("inf"), size, float("inf")), axis=1)  # NaN counts as ∞
    is_safe = (exponent > low) & (exponent < high) & (l < float("inf")) & (largest < float("inf"))
    is_safe = is_safe & ((exponent >= 0) | (largest >= smallest))
    sees_nothing = (m == float("-inf")) & (l == 0.0)
    tl.store(unsafe_ptr + only, ((is_safe == 0) & (sees_nothing == 0)).to(tl.uint8))
    out, lse = output(tl.zeros_like(m) + phi, l, acc)
    tl.store(out_ptr + row * D + dim, out.to(out_ptr.dtype.element_ty), mask=dim < D)
    tl.store(lse_ptr + only, lse)


@triton.jit(do_not_specialize=["num_queries", "S"])
def lazy_rescale_kernel(
    q,  # [B, H, T, D]
    k,  # [B, Hkv, S, D]
    v,  # [B, Hkv, S, D]
    seq_lens_ptr,  # as in `unified_max_attention_kernel`
    chosen_ptr,  # [B · H · T] uint8, or None: a program whose rows are all 0 here reads no key
    partials,  # float32: m and l [B · H · T · num_splits], acc [B · H · T · num_splits · D]
    num_queries,  # T
    S,
    scale,
    threshold,  # in natural units; 0: the plain online softmax
    SIZES: tl.constexpr,  # `DecodeSizes`
    HKV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,  # weights may be larger than float16 holds
):
    """Leave (m, l, acc), where m follows the largest score only if that exceeds m by more than `threshold`.

    Grid (B · Hkv · chunks of rows, num_splits). (m, l, acc) are right for any finite m, so m need not be the largest
    score. Most tiles then rescale nothing. Lesson 5's `merge_splits_kernel` merges the splits.
    """
    queries, keys, first_tile, end_tile = part_of_program(q, k, v, seq_lens_ptr, num_queries, S, SIZES, HKV)
    result, is_row, position, q_tile = queries
    if chosen_ptr is not None:
        is_chosen = tl.load(chosen_ptr + result, mask=is_row, other=0).to(tl.int32)
        end_tile = tl.where(tl.max(is_chosen, axis=0) > 0, end_tile, first_tile)
    m, l, acc = empty(SIZES.ROWS, SIZES.BLOCK_D)
    for tile in range(first_tile, end_tile):
        scores, v_tile = score_tile(q_tile, position, keys, tile, scale, SIZES, CAUSAL)
        largest = tl.max(scores, axis=1)
        m_new = tl.where(largest > m + threshold, largest, m)  # m' = max s if max s > m + τ else m
        alpha = tl.exp(m - finite(m_new))  # exp(m − m'): 1 for most tiles
        weights = tl.exp(scores - finite(m_new)[:, None])  # p = exp(s − m') ≤ exp τ
        if WIDE:
            weights = rounded(weights, q_tile.dtype)
        l = alpha * l + tl.sum(weights, axis=1)
        if tl.min(alpha, axis=0) < 1.0:
            acc *= alpha[:, None]
        acc = add_weighted(acc, weights, v_tile, WIDE)
        m = m_new
    store_partials(partials, result * tl.num_programs(1) + tl.program_id(1), is_row, m, l, acc, SIZES.D)
