"""FlashAttention: keys in the outer loop, queries in the inner one (Dao et al. 2022, Algorithms 1 and 4).

Each K_j and V_j is read once. O goes to main memory and back for every column tile, normalised every time, with m and l
beside it; the backward makes P again from these two. Line numbers are Algorithm 1's.
"""

import torch

from pagewise.flash_attention.inputs import Gradients, Keys, Queries
from pagewise.flash_attention.tiles import Rows, Tiles, grouped_sum, load, nothing_seen, positive, store, zeros
from pagewise.naive_attention import finite, grouped_matmul
from pagewise.tools.work import on_chip


def forward(q: Queries, k: Keys, v: Keys, tiles: Tiles, dtype: torch.dtype) -> tuple[Queries, Rows, Rows]:
    """(O, m, l), O in `dtype`; until it is done it is in float32 at least."""
    m, l, O = nothing_seen(q)  # line 2
    with on_chip():
        for j in tiles.columns():  # line 5
            K_j, V_j = load(k, j), load(v, j)  # line 6
            for i in tiles.rows(j):  # line 7
                Q_i, O_i, l_i, m_i = (load(x, i) for x in (q, O, l, m))  # line 8
                tile = tiles.at(i, j)
                S_ij = tile.scores(Q_i, K_j)  # line 9: Q_i K_jᵀ · scale
                m_ij = S_ij.amax(dim=-1, keepdim=True)  # line 10
                P_ij = torch.exp(S_ij - finite(m_ij))
                l_ij = P_ij.sum(dim=-1, keepdim=True)
                m_new = torch.maximum(m_i, m_ij)  # line 11
                alpha, alpha_ij = torch.exp(m_i - finite(m_new)), torch.exp(m_ij - finite(m_new))
                l_new = alpha * l_i + alpha_ij * l_ij
                PV = grouped_matmul(tile.drop(P_ij), tile.seen(V_j))
                store(O, i, (l_i * alpha * O_i + alpha_ij * PV) / positive(l_new))  # line 12
                store(l, i, l_new)  # line 13
                store(m, i, m_new)
    return O.to(dtype), m, l


def backward(
    dO: Queries, d_lse: Rows | None, q: Queries, k: Keys, v: Keys, O: Queries, m: Rows, l: Rows, tiles: Tiles
) -> Gradients:
    """(dQ, dK, dV)."""
    dQ = zeros(q)
    dK, dV = k.new_empty(k.shape), v.new_empty(v.shape)
    with on_chip():
        for j in tiles.columns():
            K_j, V_j = load(k, j), load(v, j)
            dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
            for i in tiles.rows(j):
                Q_i, O_i, dO_i, dQ_i, l_i, m_i = (load(x, i) for x in (q, O, dO, dQ, l, m))
                tile = tiles.at(i, j)
                K_ij, V_ij = tile.seen(K_j), tile.seen(V_j)
                S_ij, slope = tile.scores_and_slope(Q_i, K_ij)
                P_ij = torch.exp(S_ij - finite(m_i)) / positive(l_i)  # the forward's P, made again
                dV_j += grouped_sum(tile.drop(P_ij), dO_i, tiles.Hkv)  # dV_j += P_ijᵀ dO_i
                dP_ij = tile.drop(grouped_matmul(dO_i, V_ij.mT))  # dP_ij = dO_i V_jᵀ
                D_i = (dO_i * O_i).sum(dim=-1, keepdim=True)  # D_i = rowsum(dO_i ∘ O_i)
                if d_lse is not None:
                    D_i = D_i - load(d_lse, i)
                dS_ij = P_ij * (dP_ij - D_i) * slope  # dS_ij = P_ij ∘ (dP_ij − D_i) · scale
                store(dQ, i, dQ_i + grouped_matmul(dS_ij, K_ij))  # dQ_i += dS_ij K_j
                dK_j += grouped_sum(dS_ij, Q_i, tiles.Hkv)  # dK_j += dS_ijᵀ Q_i
            store(dK, j, dK_j)
            store(dV, j, dV_j)
    return dQ.to(q.dtype), dK, dV
