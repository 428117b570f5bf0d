"""What one call of the ops in `ops.py` does, for `tools.work.count_work` (lesson 6).

The torch loops are counted as they run. Of the Triton kernels it follows from what each program visits: a tile of
queries reads the keys it may see, and in the backward a tile of keys reads the queries that may see it. So S and dP are
computed twice there, once for dQ and once for dK and dV: seven products instead of the paper's five, and no sum that
two programs share.
"""

from torch import Tensor

from pagewise.flash_attention import in_torch
from pagewise.flash_attention.dropout import Dropout
from pagewise.flash_attention.launching import kind
from pagewise.flash_attention.packed import Packed
from pagewise.options import ScoreOptions
from pagewise.tools.work import count_work, counts_as

PER_SCORE = 5  # scale, max, subtract, exp, sum
PER_GRADIENT = 4  # scale, subtract, exp, and dS = P ∘ (dP − D): counted in each of the two sums
Counts = tuple[int, int, int, int]


@counts_as("pagewise::flash_attention")
def _forward(q, k, v, slopes, mask, seed, cu_q, cu_k, scale, causal, window, softcap, p, backend, learns) -> Counts:
    if backend == "torch":
        options, dropout = ScoreOptions(scale, causal, window, softcap, slopes, mask), Dropout(p, seed)
        return _sum(
            count_work(lambda qkv=qkv: in_torch.forward(*qkv, options, dropout))
            for qkv in _sequences(cu_q, cu_k, q, k, v)
        )
    from pagewise.kernels.flash_attention import forward_tiles

    B, H, _, D = q.shape
    tile = forward_tiles(*kind(q), heavy=mask is not None or p > 0)[0]["ROWS"]
    seen = [n for T, S in _lengths(cu_q, cu_k, q, k) for n in _seen(T, S, causal, window, tile)]
    scores, keys = sum(rows * keys for rows, keys in seen), sum(keys for _, keys in seen)
    written = q.numel() * q.element_size() + 4 * B * H * q.shape[2]
    if learns:
        written += 8 * B * H * q.shape[2] + (q.numel() * 2 if q.element_size() == 2 else 0)
    return (
        4 * B * H * scores * D,
        B * H * scores * PER_SCORE,
        (q.numel() + 2 * B * H * keys * D) * q.element_size() + (0 if mask is None else B * H * scores),
        written,
    )


@counts_as("pagewise::flash_attention_backward")
def _backward(
    d_out, d_lse, q, k, v, out, lse, rest, stats,
    slopes, mask, seed, cu_q, cu_k, scale, causal, window, softcap, p, backend,
) -> Counts:  # fmt: skip
    if backend == "torch":
        options, dropout = ScoreOptions(scale, causal, window, softcap, slopes, mask), Dropout(p, seed)
        given = (d_out, d_lse, q, k, v, out, lse)
        return _sum(
            count_work(lambda given=given: in_torch.backward(*given, options, dropout))
            for given in _sequences(cu_q, cu_k, *given, keys=(3, 4))
        )
    from pagewise.kernels.flash_attention_backward import backward_tiles

    (B, H, T, D), Hkv = q.shape, k.shape[1]
    tiles, lengths = backward_tiles(*kind(q), heavy=mask is not None or p > 0)[0], _lengths(cu_q, cu_k, q, k)
    by_rows = [n for T, S in lengths for n in _seen(T, S, causal, window, tiles["QUERY_ROWS"])]
    by_cols = [n for T, S in lengths for n in _seeing(T, S, causal, window, tiles["KEY_COLS"])]
    scores = sum(rows * keys for rows, keys in by_rows)
    again = sum(keys * rows for keys, rows in by_cols)
    vectors = 2 * B * H * (T + sum(keys for _, keys in by_rows) + sum(rows for _, rows in by_cols))
    vectors += 2 * k.numel() // D + 2 * B * H * T  # K and V of the tiles of keys; out and d_out of D
    of_rows = 12 * B * H * (T + sum(rows for _, rows in by_cols)) + 8 * B * H * T  # m, l, D; lse and its gradient
    return (
        2 * B * H * D * (3 * scores + 4 * again),
        B * H * (scores + again) * PER_GRADIENT + 2 * B * H * T * D,
        vectors * D * q.element_size() + of_rows + rest.numel() * 2,
        (q.numel() + 2 * B * Hkv * k.shape[2] * D) * q.element_size() + 4 * B * H * T,
    )


def _seen(T: int, S: int, causal: bool, window: int | None, tile: int) -> list[tuple[int, int]]:
    """(queries, keys that they may see) of each tile of queries."""
    tiles = []
    for first in range(0, T, tile):
        last = min(first + tile, T) - 1
        stop = min(S, max(0, last + 1 + S - T)) if causal else S
        start = 0 if window is None else min(stop, max(0, first + 1 + S - T - window))
        tiles.append((last + 1 - first, stop - start))
    return tiles


def _seeing(T: int, S: int, causal: bool, window: int | None, tile: int) -> list[tuple[int, int]]:
    """(keys, queries that may see them) of each tile of keys."""
    tiles = []
    for first in range(0, S, tile):
        last = min(first + tile, S) - 1
        start = min(T, max(0, first - (S - T))) if causal else 0
        stop = T if window is None else max(start, min(T, last + window - (S - T)))
        tiles.append((last + 1 - first, stop - start))
    return tiles


def _lengths(cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    if cu_q is None:
        return [(q.shape[2], k.shape[2])]
    return [(rows.stop - rows.start, cols.stop - cols.start) for rows, cols in Packed(cu_q, cu_k).sequences()]


def _sequences(cu_q: Tensor | None, cu_k: Tensor | None, *tensors: Tensor, keys: tuple[int, ...] = (1, 2)) -> list:
    """The tensors of each sequence; those at `keys` hold keys or values."""
    if cu_q is None:
        return [tensors]
    return [[x[:, :, of[i in keys]] for i, x in enumerate(tensors)] for of in Packed(cu_q, cu_k).sequences()]


def _sum(works) -> Counts:
    works = list(works)
    names = ("matmul_flops", "other_flops", "bytes_read", "bytes_written")
    return tuple(sum(getattr(work, name) for work in works) for name in names)
