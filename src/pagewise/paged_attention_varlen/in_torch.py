"""Attention of packed queries over a paged cache in plain torch (lesson 9).

A plan is made once per step and serves all layers. It collects the sequences that have equally many queries and
similar numbers of keys. Each such group is one padded batch of dense attention, whose keys and values are gathered:

    k[b, j], v[b, j] = cache[block_tables[b, j // P], j % P]

A sequence with fewer keys than the longest of its group repeats its last key. A mask hides the repetitions, and their
values are 0, because a weight of 0 does not hide an infinite value.
"""

import functools
from collections import defaultdict
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pagewise.naive_attention import grouped_matmul, masked_scores, safe_softmax, visibility
from pagewise.paged_attention.in_torch import attend_in_splits
from pagewise.paged_attention.inputs import Keys, Queries
from pagewise.paged_attention_varlen.fused import fused_attention
from pagewise.paged_attention_varlen.in_cpp import DecodeInCpp
from pagewise.paged_attention_varlen.step import Cache, Packed, Step
from pagewise.tools.checks import FLOAT8

Member = tuple[int, int, int, int]  # a sequence: its number, the row of its first query, its first key, how many keys


class Group(NamedTuple):
    """A padded batch: B sequences with T queries each and at most S keys that a query can see."""

    rows: Int[Tensor, "B T"]  # the indices of the queries among all packed queries
    slots: Int[Tensor, "B S"]  # where the keys are stored in the cache
    positions: Int[Tensor, "B 1 T"]  # the positions of the queries, where the first key has position 0
    is_causal: bool  # T = S, and a query sees all keys up to its own
    mask: Float[Tensor, "B 1 T S"] | None  # else: −∞ where a query does not see a key; None: it sees all
    padding: Int[Tensor, " repeated"]  # where in the flattened slots a key is repeated


class PlanInTorch:
    """How to attend in each layer of a step. The step's tensors are read once, here."""

    def __init__(self, step: Step) -> None:
        self.step = step
        groups: dict[tuple[int, int], list[Member]] = defaultdict(list)
        ends, lens, window = step.cu_seqlens_q.tolist(), step.seq_lens.tolist(), step.options.window
        for b, ((start, stop), length) in enumerate(zip(pairwise(ends), lens, strict=True)):
            if (T := stop - start) and length:
                first = 0 if window is None else max(0, length - T + 1 - window)
                num_keys = length - first
                # In a group the longest has less than twice the keys of the shortest, so little is padded. With splits
                # a sequence is alone in its group, because its bits must not depend on other sequences.
                groups[T, num_keys.bit_length() if step.splits is None else b].append((b, start, first, num_keys))
        decoding = [key for key in groups if key[0] == 1] if DecodeInCpp.takes(step) else []
        self._decoding = [groups.pop(key) for key in decoding]
        self._in_cpp = DecodeInCpp(step, [*chain(*self._decoding)]) if decoding else None
        self.groups = [self._group(T, members) for (T, _), members in groups.items()]

    def _group(self, T: int, members: list[Member]) -> Group:
        tables, P, device = self.step.block_tables, self.step.block_size, self.step.block_tables.device
        b, start, first, num_keys = torch.tensor(members, device=device).T[:, :, None]  # each [B, 1]
        queries, S = torch.arange(T, device=device), int(num_keys.max())
        columns = torch.arange(S, device=device)
        keys = first + columns.minimum(num_keys - 1)
        positions = (num_keys - T + queries)[:, None]
        is_causal, mask = S == T and self.step.options.window is None, None
        if not is_causal:
            hidden = ~visibility(positions[..., None] - columns, self.step.options)
            zeros = torch.zeros(hidden.shape, device=device)
            mask = zeros.masked_fill(hidden, -torch.inf) if hidden.any() else None
        padding = (columns >= num_keys).flatten().nonzero()[:, 0]
        slots = tables[b, keys // P].long() * P + keys % P
        return Group(start + queries, slots, positions, is_causal, mask, padding)

    @functools.cached_property
    def _decoding_groups(self) -> list[Group]:
        return [self._group(1, members) for members in self._decoding]

    def attend(
        self, q: Packed, k_cache: Cache, v_cache: Cache, *, return_lse: bool = False
    ) -> Packed | tuple[Packed, Float[Tensor, "total_q H"]]:
        """Return out, or (out, lse), of `paged_attention_varlen` for one layer. Nothing is checked."""
        out, lse, groups = torch.zeros_like(q), None, self.groups
        if return_lse:
            lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        if self._in_cpp is not None and (return_lse or not self._in_cpp.attend(q, k_cache, v_cache, out)):
            groups = [*groups, *self._decoding_groups]
        for group in groups:
            queries = q[group.rows].transpose(1, 2)
            k, v = _gathered(k_cache, group.slots), _gathered(v_cache, group.slots, group.padding)
            outs, lses = self._dense(group, queries, k, v, return_lse)
            outs = outs if self.step.v_scale == 1.0 else outs * self.step.v_scale
            outs = outs.transpose(1, 2).to(q.dtype)
            # a derivative, and a transform, needs a new tensor
            out = out.index_put_((group.rows,), outs) if self.step.plain else out.index_put((group.rows,), outs)
            if return_lse:
                lse = lse.index_put((group.rows,), lses.transpose(1, 2))
        return (out, lse) if return_lse else out

    def _dense(
        self, group: Group, q: Queries, k: Keys, v: Keys, wants_lse: bool
    ) -> tuple[Queries, Float[Tensor, "B H T"] | None]:
        """Return (out, lse) of a padded batch. lse may be None if the caller does not want it."""
        options, (B, H, T, D), Hkv = self.step.options, q.shape, k.shape[1]
        if self.step.splits is not None:
            return attend_in_splits(q, k, v, options, self.step.splits)
        if wants_lse or options.softcap > 0 or options.alibi_slopes is not None or self.step.v_scale != 1.0:
            return self._from_scores(group.positions, q, k, v)
        mask = None if group.mask is None else group.mask.to(q.dtype)
        how = {"mask": mask, "is_causal": group.is_causal, "scale": options.scale_for(D), "plain": self.step.plain}
        # with T = 1 the query heads of a KV head become rows of one product, which reads that head's keys once
        rows = q.reshape(B, Hkv, H // Hkv, D) if T == 1 else q

        def from_scores(which: Tensor | slice) -> Tensor:
            positions = group.positions.expand(-1, -1, rows.shape[2])[:, :, which]
            return self._from_scores(positions, rows[:, :, which], k, v)[0].to(q.dtype)

        out = fused_attention(rows, k.to(q.dtype), v.to(q.dtype), **how, otherwise=from_scores)
        return out.view(B, H, T, D), None

    def _from_scores(self, positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.arange(k.shape[2], device=q.device)
        weights, lse = safe_softmax(masked_scores(q, k, positions, keys, self.step.options))
        return grouped_matmul(weights, v.to(weights.dtype)), lse


def _gathered(cache: Cache, slots: Int[Tensor, "B S"], zeros: Int[Tensor, " padding"] | None = None) -> Keys:
    # index_select takes a third of the time of cache[blocks, offsets]
    found = cache.flatten(0, 1).index_select(0, slots.flatten())
    if zeros is not None and zeros.numel():
        found = (found.to(torch.float32) if found.dtype in FLOAT8 else found).index_fill_(0, zeros, 0)
    return found.unflatten(0, slots.shape).transpose(1, 2)
