"""Flash-Decoding: which keys a program attends to, and the merge of what all of them found (lesson 7).

An item is what one program would do alone: a chunk of the query rows that share a KV head, over the tiles of all keys
of a sequence that one of them sees. `pagewise.paged_attention.splits` names the three ways in which items are cut; CUT
says which one, and `cut` is its number: pieces of an item ("num"), tiles of a piece ("size"), or programs ("share").
Nothing here is known on the host: a length may change between two launches of a CUDA graph.
"""

import triton
import triton.language as tl

from pagewise.kernels.partial import add_up, empty, left_the_band, merge, output


@triton.jit
def keys_seen(seq, lens_ptr, num_seqs, num_queries, capacity, window):
    """(first, stop, possible): keys first … stop − 1 of a sequence are those that some query sees. seq: one or many.

    The last query stands at the last key. possible: the length is one that there can be; if not, no key is seen.
    """
    if lens_ptr is None:
        length = tl.where(seq < num_seqs, capacity, 0)
    else:
        length = tl.load(lens_ptr + seq, mask=seq < num_seqs, other=0)
    possible = (length >= 0) & (length <= capacity)
    stop = tl.where(possible, length, 0)
    first = tl.maximum(stop - window, num_queries - 1) - (num_queries - 1)
    return tl.minimum(first, stop), stop, possible


@triton.jit
def tiles_of(first, stop, TILE: tl.constexpr):
    """How many tiles hold keys first … stop − 1: those from first // TILE on. stop may be int32's largest number."""
    return tl.where(first < stop, (stop - 1) // TILE - first // TILE + 1, 0).to(tl.int64)


# ------------------------------------------------------------------------------- every item by itself


@triton.jit
def num_pieces(tiles, cut, CUT: tl.constexpr):
    """Into how many pieces an item of so many tiles is cut; 1 if it has none, so that somebody writes its result."""
    pieces = (tiles + cut - 1) // cut if CUT == "size" else tl.minimum(tiles, cut)
    return tl.maximum(pieces, 1)


@triton.jit
def piece_of(tiles, split, cut, CUT: tl.constexpr):
    """(start, stop): the tiles of piece `split`."""
    if CUT == "size":
        start, stop = split * cut, (split + 1) * cut
    else:
        pieces = num_pieces(tiles, cut, CUT)
        start, stop = tiles * split // pieces, tiles * (split + 1) // pieces
    return tl.minimum(start, tiles), tl.minimum(stop, tiles)


# ------------------------------------------------------------------------------- equal ranges of all items


@triton.jit
def work_of(tiles):
    """What an item of so many tiles counts in the ranges: to start it takes a program about as long as a tile."""
    return tl.where(tiles > 0, tiles + 1, 0)


@triton.jit
def work_before(seq, lens_ptr, num_seqs, num_queries, capacity, window, TILE: tl.constexpr):
    """The work of the sequences before `seq`, one item of each; of all sequences, if it is num_seqs."""
    lane, work = tl.arange(0, 64), tl.zeros([64], tl.int64)
    for start in range(0, num_seqs, 64):
        first, stop, _ = keys_seen(start + lane, lens_ptr, num_seqs, num_queries, capacity, window)
        work += tl.where(start + lane < seq, work_of(tiles_of(first, stop, TILE)), 0)
    return tl.sum(work, axis=0)


@triton.jit
def sequence_at(unit, lens_ptr, num_seqs, num_queries, capacity, window, TILE: tl.constexpr):
    """The sequence in which a unit of work lies when an item of each sequence lies end to end."""
    lane, seq, end = tl.arange(0, 64), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for start in range(0, num_seqs, 64):
        first, stop, _ = keys_seen(start + lane, lens_ptr, num_seqs, num_queries, capacity, window)
        work = work_of(tiles_of(first, stop, TILE))
        seq += tl.sum((end + tl.cumsum(work, axis=0) <= unit).to(tl.int64), axis=0)
        end += tl.sum(work, axis=0)
    return seq


@triton.jit
def item_at(unit, chunks, lens_ptr, num_seqs, num_queries, capacity, window, TILE: tl.constexpr):
    """(item, begin): the item in which a unit of work lies, and its first. A sequence has `chunks` of them."""
    seq = sequence_at(unit // chunks, lens_ptr, num_seqs, num_queries, capacity, window, TILE)
    begin = chunks * work_before(seq, lens_ptr, num_seqs, num_queries, capacity, window, TILE)
    first, stop, _ = keys_seen(seq, lens_ptr, num_seqs, num_queries, capacity, window)
    work = work_of(tiles_of(first, stop, TILE))
    chunk = (unit - begin) // tl.maximum(work, 1)
    return seq * chunks + chunk, begin + chunk * work


@triton.jit
def piece_within(low, high, begin, tiles):
    """(start, stop): the tiles of an item in a range of work; its first unit is its start, and no tile."""
    return tl.maximum(low - begin - 1, 0), tl.minimum(high - begin - 1, tiles)


@triton.jit
def programs_sharing(total, num_programs, MIN_TILES: tl.constexpr):
    """How many programs get work: each at least a unit, and MIN_TILES if there are so many."""
    return tl.maximum(tl.minimum(total // MIN_TILES, num_programs), 1)


@triton.jit
def range_of(program, total, sharing):
    """(low, high): the work of a program; none, if it is not one of those that share."""
    return tl.minimum(total * program // sharing, total), tl.minimum(total * (program + 1) // sharing, total)


@triton.jit
def program_at(unit, total, sharing):
    """The program in whose range a unit of work lies: the last that begins at it or before."""
    return ((unit + 1) * sharing - 1) // total


# ------------------------------------------------------------------------------- the merge


@triton.jit
def result_of(seq, head, query, num_heads, num_queries):
    """Which row of [B · H · T] is a query's."""
    return (seq * num_heads + head) * num_queries + query


@triton.jit
def store_rows(
    out_ptr, lse_ptr, flags_ptr, at, mask, m, l, acc, v_scale, reference, band_low, band_high, smallest,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """out and lse of rows `at` of [B · H · T] where `mask` allows; with a unified max also which must be recomputed."""
    if SOFTMAX == "unified":
        left = left_the_band(m, l, acc, reference, band_low, band_high, smallest)
        tl.store(flags_ptr + at, left.to(tl.uint8), mask=mask)
        m = tl.zeros_like(m) + reference
    out, lse = output(m, l, acc)
    out = (out * v_scale).to(out_ptr.dtype.element_ty)
    dim = tl.arange(0, BLOCK_D)
    tl.store(out_ptr + at[:, None] * D + dim[None, :], out, mask=mask[:, None] & (dim < D)[None, :])
    tl.store(lse_ptr + at, lse, mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "capacity", "window", "cut", "slots"])
def merge_splits_kernel(
    m_ptr,  # [slots, BLOCK_R] float32
    l_ptr,  # [slots, BLOCK_R] float32
    acc_ptr,  # [slots, BLOCK_R, D] float32
    lens_ptr,  # [B] int32, or None: all have `capacity` keys
    out_ptr,  # [B, H, T, D]
    lse_ptr,  # [B, H, T] float32
    flags_ptr,  # [B, H, T] uint8, or None: as in `decode_kernel`
    num_seqs,
    num_heads,
    num_queries,
    capacity,
    window,
    cut,
    slots,  # for each item, if it is cut by itself
    v_scale,
    reference,
    band_low,
    band_high,
    smallest,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CUT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    """Partial.merge of all pieces of a row in the order of their keys, then .output() · v_scale and .lse().

    Grid (items, BLOCK_R). AT_ONCE of them are read at once: one by one each would wait for the last. The rows of an
    item that is one piece are written already.
    """
    item, in_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_chunks = (num_queries * GROUP + BLOCK_R - 1) // BLOCK_R
    chunks = num_heads // GROUP * row_chunks
    seq, row = item // chunks, item % row_chunks * BLOCK_R + in_chunk
    if row >= num_queries * GROUP:
        return
    head = item % chunks // row_chunks * GROUP + row % GROUP
    result = result_of(seq, head, row // GROUP, num_heads, num_queries)
    if SOFTMAX != "unified" and flags_ptr is not None:  # noqa: SIM102 (`and` of a constant and a number it is not)
        if tl.load(flags_ptr + result) == 0:
            return

    # where its pieces lie
    first, stop, possible = keys_seen(seq, lens_ptr, num_seqs, num_queries, capacity, window)
    tiles = tiles_of(first, stop, TILE)
    if CUT == "share":
        total = chunks * work_before(num_seqs, lens_ptr, num_seqs, num_queries, capacity, window, TILE)
        sharing = programs_sharing(total, cut, MIN_TILES)
        begin = chunks * work_before(seq, lens_ptr, num_seqs, num_queries, capacity, window, TILE)
        begin += item % chunks * work_of(tiles)
        total = tl.maximum(total, 1)
        from_program = program_at(begin + 1, total, sharing)  # that of its first tile
        pieces = tl.where(tiles > 0, program_at(begin + tiles, total, sharing) - from_program + 1, 0)
        slot = from_program + item
    else:
        pieces, slot = num_pieces(tiles, cut, CUT), item * slots
    if pieces == 1:
        return

    dim, part = tl.arange(0, BLOCK_D), tl.arange(0, AT_ONCE)
    m, l, acc = empty(1, BLOCK_D)
    for start in range(0, pieces, AT_ONCE):
        there = start + part < pieces
        at = (slot + start + part) * BLOCK_R + in_chunk
        m_parts = tl.load(m_ptr + at, mask=there, other=float("-inf"))
        l_parts = tl.load(l_ptr + at, mask=there, other=0.0)
        acc_mask = there[:, None] & (dim < D)[None, :]
        acc_parts = tl.load(acc_ptr + at[:, None] * D + dim[None, :], mask=acc_mask, other=0.0)
        if SOFTMAX == "unified":
            m, l, acc = add_up(m, l, acc, m_parts, l_parts, acc_parts)
        else:
            m, l, acc = merge(m, l, acc, m_parts, l_parts, acc_parts)
    l = tl.where(possible, l, float("nan"))
    only = tl.arange(0, 1)
    store_rows(
        out_ptr, lse_ptr, flags_ptr, result + only, only == 0, m, l, acc, v_scale,
        reference, band_low, band_high, smallest, D, BLOCK_D, SOFTMAX,
    )  # fmt: skip
