"""FlashAttention-2: queries in the outer loop, keys in the inner one (Dao 2023, Algorithms 1 and 2).

O_i stays on chip until it is done, is divided by l once, and only the log-sum-exp is kept for the backward. There the
loops are the other way round, because dK_j and dV_j stay on chip; dQ goes to main memory and back for every column
tile. Line numbers are the paper's.
"""

import torch

from pagewise.flash_attention.inputs import Gradients, Keys, Queries
from pagewise.flash_attention.tiles import Rows, Tiles, grouped_sum, load, nothing_seen, positive, store, zeros
from pagewise.naive_attention import finite, grouped_matmul
from pagewise.tools.work import on_chip


def forward(q: Queries, k: Keys, v: Keys, tiles: Tiles, dtype: torch.dtype) -> tuple[Queries, Rows]:
    """(O, L), O in `dtype`, and L the log-sum-exp of each row of scores."""
    O, L = q.new_empty(q.shape, dtype=dtype), rows_like(q)
    with on_chip():
        for i in tiles.rows():  # line 3
            Q_i = load(q, i)  # line 4
            m_i, l_i, O_i = nothing_seen(Q_i)  # line 5
            for j in tiles.columns(i):  # line 6
                K_j, V_j = load(k, j), load(v, j)  # line 7
                tile = tiles.at(i, j)
                S_ij = tile.scores(Q_i, K_j)  # line 8: Q_i K_jᵀ · scale
                m_new = torch.maximum(m_i, S_ij.amax(dim=-1, keepdim=True))  # line 9
                P_ij = torch.exp(S_ij - finite(m_new))
                alpha = torch.exp(m_i - finite(m_new))
                l_i = alpha * l_i + P_ij.sum(dim=-1, keepdim=True)
                O_i = alpha * O_i + grouped_matmul(tile.drop(P_ij), tile.seen(V_j))  # line 10
                m_i = m_new
            store(O, i, O_i / positive(l_i))  # lines 12, 14
            store(L, i, m_i + torch.log(l_i))  # lines 13, 15
    return O, L


def backward(
    dO: Queries, d_lse: Rows | None, q: Queries, k: Keys, v: Keys, O: Queries, L: Rows, tiles: Tiles
) -> Gradients:
    """(dQ, dK, dV)."""
    D, dQ = rows_like(q), zeros(q)
    dK, dV = k.new_empty(k.shape), v.new_empty(v.shape)
    with on_chip():
        for i in tiles.rows():  # line 4: D = rowsum(dO ∘ O). The gradient of lse adds to dS as −D does
            D_i = (load(dO, i) * load(O, i)).sum(dim=-1, keepdim=True)
            store(D, i, D_i if d_lse is None else D_i - load(d_lse, i))
        for j in tiles.columns():  # line 5
            K_j, V_j = load(k, j), load(v, j)  # line 6
            dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)  # line 7
            for i in tiles.rows(j):  # line 8
                Q_i, dO_i, dQ_i, L_i, D_i = (load(x, i) for x in (q, dO, dQ, L, D))  # line 9
                tile = tiles.at(i, j)
                K_ij, V_ij = tile.seen(K_j), tile.seen(V_j)
                S_ij, slope = tile.scores_and_slope(Q_i, K_ij)  # line 10
                P_ij = torch.exp(S_ij - finite(L_i))  # line 11: the forward's P, normalised
                dV_j += grouped_sum(tile.drop(P_ij), dO_i, tiles.Hkv)  # line 12: P_ijᵀ dO_i
                dP_ij = tile.drop(grouped_matmul(dO_i, V_ij.mT))  # line 13: dO_i V_jᵀ
                dS_ij = P_ij * (dP_ij - D_i) * slope  # line 14
                store(dQ, i, dQ_i + grouped_matmul(dS_ij, K_ij))  # line 15: dQ_i += dS_ij K_j
                dK_j += grouped_sum(dS_ij, Q_i, tiles.Hkv)  # line 16: dS_ijᵀ Q_i
            store(dK, j, dK_j)  # line 18
            store(dV, j, dV_j)
    return dQ.to(q.dtype), dK, dV


def rows_like(q: Queries) -> Rows:
    """An empty number per query in main memory, in float32 (float64 for float64)."""
    return q.new_empty(*q.shape[:-1], 1, dtype=torch.promote_types(q.dtype, torch.float32))
