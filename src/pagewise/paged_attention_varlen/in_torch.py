"""Attention of packed queries over a paged cache in plain torch, fast on a CPU (lesson 9).

    many queries of a sequence    dense attention over its blocks: a view where they are neighbours, else gathered
    few                           with those of other sequences, as a sparse product (`sparse`)

A plan is what all layers of a step share.
"""

import functools
from itertools import pairwise

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagewise.flash_decoding import Splits
from pagewise.naive_attention import query_positions, visibility
from pagewise.online_softmax import Partial
from pagewise.paged_attention.in_torch import attend_in_splits
from pagewise.paged_attention_varlen.sparse import Queries, SharedKeys, SparseRows, indices, parts_of
from pagewise.paged_attention_varlen.step import Step
from pagewise.tools.device import wants_gradient
from pagewise.tools.sizes import cdiv

FEW = 4  # queries of a sequence: to read its keys for each of them costs less than to gather them
OutAndLse = tuple[Float[Tensor, "total_q H D"], Float[Tensor, "total_q H"]]


class PlanInTorch:
    """What all layers of a step share."""

    def __init__(self, step: Step) -> None:
        self.step, self.options, self.v_scale, self.splits = step, step.options, step.v_scale, step.splits
        lists = (pairwise(step.cu_seqlens_q.tolist()), step.seq_lens.tolist(), step.block_tables.tolist())
        self.sequences = [
            Queries(b, start, stop, length, table[: cdiv(length, step.block_size)])
            for b, ((start, stop), length, table) in enumerate(zip(*lists, strict=True))
            if stop > start and length
        ]
        self.few = [queries for queries in self.sequences if queries.number <= FEW]
        self._masks: dict[tuple, Tensor] = {}

    @functools.cached_property
    def parts(self) -> list[SharedKeys | SparseRows]:
        """What sequences with few queries are computed from where the sparse product takes the tensors."""
        return parts_of(self.few, self.step.block_tables, self.step.block_size, self.options.window)

    def attend(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
    ) -> Float[Tensor, "total_q H D"]:
        """out of `paged_attention_varlen` for one layer; nothing is checked."""
        return self._attend(q, k_cache, v_cache, wants_lse=False)[0]

    def attend_with_lse(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
    ) -> OutAndLse:
        """(out, lse) of `paged_attention_varlen`."""
        return self._attend(q, k_cache, v_cache, wants_lse=True)

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, wants_lse: bool) -> OutAndLse:
        """Without wants_lse, lse is anything."""
        caches = (k_cache, v_cache)
        sparse = self.splits is None and takes_sparse(q, *caches)
        out, lse = self._sparse(q, *caches, self.parts if sparse else [], wants_lse)
        for queries in self.sequences:
            if queries.number > (FEW if sparse else 0):
                rows = slice(queries.start, queries.stop)
                out[rows], lse[rows] = self._dense(queries, q[rows], *caches, wants_lse)
        return out.to(q.dtype), lse

    def _sparse(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, parts: list, wants_lse: bool) -> OutAndLse:
        """(out, lse) from the parts; out is 0 and lse −∞ where they have no row."""
        wide = torch.promote_types(q.dtype, torch.float32)
        only = parts[0] if len(parts) == 1 else None
        if isinstance(only, SparseRows) and len(only.queries) == len(q) and not wants_lse:
            return only.output(q, k_cache, v_cache, self.options) * self.v_scale, q.new_empty(q.shape[:2], dtype=wide)
        seen = Partial.empty(*q.shape[:2], head_size=q.shape[2], dtype=wide, device=q.device)
        for part in parts:
            merged = Partial(*(x[part.queries] for x in seen)).merge(part.attend(q, k_cache, v_cache, self.options))
            for whole, rows in zip(seen, merged, strict=True):
                whole[part.queries] = rows
        return seen.output() * self.v_scale, seen.lse()

    def _dense(
        self, queries: Queries, q: Float[Tensor, "T H D"], k_cache: Tensor, v_cache: Tensor, wants_lse: bool
    ) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T H"] | float]:
        """(out, lse) of a sequence by itself."""
        blocks = indices(queries.blocks, q.device)
        k, v = (cache[blocks].flatten(0, 1)[: queries.length].transpose(0, 1) for cache in (k_cache, v_cache))
        q, options = q.transpose(0, 1), self.options
        if wants_lse or self.splits or self.v_scale != 1.0 or options.softcap > 0 or options.alibi_slopes is not None:
            out, lse = attend_in_splits(q[None], k[None], v[None], options, (self.splits or Splits("num", 1)).bounds)
            return out[0].transpose(0, 1) * self.v_scale, lse[0].transpose(0, 1)
        (H, T, D), (Hkv, S, _) = q.shape, k.shape
        square = T == S and options.window is None  # then all tiles above the diagonal are left out
        # the query heads of a KV head, as heads of a sequence of its own: keys and values are not copied for them
        q, k, v = q.reshape(Hkv, H // Hkv, T, D), k[:, None].to(q.dtype), v[:, None].to(q.dtype)
        k, v = (x.expand(-1, H // Hkv, -1, -1) for x in (k, v))
        mask = {"is_causal": True} if square else {"attn_mask": self._mask(T, S, q.dtype, q.device)}
        out = scaled_dot_product_attention(q, k, v, **mask, scale=options.scale_for(D))
        return out.view(H, T, D).transpose(0, 1), -torch.inf

    def _mask(self, T: int, S: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "T S"]:
        """0 where T queries at the end of S keys may look, else −∞; made once."""
        if (T, S, dtype) not in self._masks:
            distance = query_positions(T, S, device)[:, None] - torch.arange(S, device=device)
            hidden = ~visibility(distance, self.options)
            self._masks[T, S, dtype] = torch.zeros(T, S, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)
        return self._masks[T, S, dtype]


def takes_sparse(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the sparse product takes these: in float32 on a CPU, without a gradient."""
    caches = (k_cache, v_cache)
    same = q.device.type == "cpu" and all(x.dtype == torch.float32 for x in (q, *caches))
    return same and all(x.is_contiguous() for x in caches) and not wants_gradient(q, *caches)
