"""Attention of packed queries over a paged cache in Triton: how its kernel is launched (lesson 9).

One launch serves sequences that decode and chunks of prompts. The grid is the largest that the number of queries and
of sequences may need, so the host never waits for a length, and a decode step can be captured in a CUDA graph. Where it
is known that every sequence has one query, lesson 7's kernel is launched, whose programs share all keys equally.
"""

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.paged_attention.in_triton import (
    INT32_MAX,
    NO_WINDOW,
    PROGRAMS_PER_SM,
    DecodeInputs,
    Tiles,
    decode,
    float8_bits,
    tiles_for,
)
from pagewise.paged_attention.inputs import PagedInputs, Step
from pagewise.paged_attention.splits import MAX_SPLITS, MIN_KEYS, Splits, num_splits_heuristic
from pagewise.tools.device import num_sms, triton_launch
from pagewise.tools.sizes import cdiv, padded


class PlanInTriton:
    """What all layers of a step share: nothing but the tensors, whose numbers stay on the device."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._sequences: dict[tuple[int, int], Tensor] = {}

    def attend(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
    ) -> Float[Tensor, "total_q H D"]:
        """out of `paged_attention_varlen` for one layer; nothing is checked."""
        return self.attend_with_lse(q, k_cache, v_cache)[0]

    def attend_with_lse(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
    ) -> tuple[Float[Tensor, "total_q H D"], Float[Tensor, "total_q H"]]:
        """(out, lse) of `paged_attention_varlen`."""
        tables, lens, ends, _, decodes, options, v_scale, splits = self.step
        if decodes:
            inputs = PagedInputs(q, k_cache, v_cache, tables, lens, v_scale)
            out, lse = decode(DecodeInputs.paged(inputs), options, splits)
            return out.squeeze(2), lse.squeeze(2)
        numbers = (options.scale_for(q.shape[-1]), options.window, options.softcap, v_scale)
        tensors = (q, k_cache, v_cache, tables, lens, ends, self.chunks(q, k_cache))
        splits = splits or filling(q, k_cache, tables)
        return torch.ops.pagewise.paged_attention_varlen(*tensors, options.alibi_slopes, *numbers, *splits)

    def chunks(self, q: Tensor, k_cache: Tensor) -> Int32[Tensor, " chunks"]:
        """The sequence of each chunk of rows: the last whose first chunk is it or before it. Made once."""
        group, rows = q.shape[1] // k_cache.shape[2], chunk_tiles(q, k_cache).rows
        if (group, rows) not in self._sequences:
            ends, num_seqs = self.step.cu_seqlens_q, len(self.step.seq_lens)
            counted = torch.arange(num_chunks(len(q), num_seqs, group, rows), device=q.device)
            first = ends[:-1].long() * group // rows + counted[:num_seqs]
            self._sequences[group, rows] = torch.searchsorted(first, counted, right=True, out_int32=True) - 1
        return self._sequences[group, rows]


def chunk_tiles(q: Tensor, k_cache: Tensor) -> Tiles:
    """For chunks of rows, as many as there would be if all queries were of one sequence."""
    total_q, H, D = q.shape
    return tiles_for(max(2, total_q * H // k_cache.shape[2]), D, q.dtype, k_cache.dtype)


def num_chunks(total_q: int, num_seqs: int, group: int, rows: int) -> int:
    """Chunks of rows that there may be, whatever the sequences' queries: one at most of each is not full."""
    return total_q * group // rows + num_seqs


def filling(q: Tensor, k_cache: Tensor, block_tables: Tensor) -> Splits:
    """Splits that fill the GPU, as far as shapes tell. One piece on a CPU."""
    if q.device.type == "cpu" or not q.numel():
        return Splits("num", 1)
    (total_q, H, _), (_, P, Hkv, _), (B, M) = q.shape, k_cache.shape, block_tables.shape
    tiles = chunk_tiles(q, k_cache)
    items = num_chunks(total_q, B, H // Hkv, tiles.rows) * Hkv
    key_tiles = cdiv(M * P, max(tiles.keys, MIN_KEYS))
    at_once = PROGRAMS_PER_SM * num_sms(q.device, on_cpu=1)
    return Splits("num", num_splits_heuristic(items, at_once, key_tiles, MAX_SPLITS))


@torch.library.custom_op("pagewise::paged_attention_varlen", mutates_args=())
def _varlen_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    sequences: Tensor,
    alibi_slopes: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float,
    v_scale: float,
    way: str,
    count: int,
) -> tuple[Tensor, Tensor]:
    from pagewise.kernels.paged_attention_varlen import merge_varlen_kernel, varlen_kernel

    out, lse = _outputs(q)
    if not q.numel():
        return out, lse
    (_, H, D), (_, P, Hkv, _), M = q.shape, k_cache.shape, block_tables.shape[1]
    group, bits = H // Hkv, float8_bits(k_cache)
    tiles = chunk_tiles(q, k_cache)
    if bits:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    items = len(sequences) * Hkv
    key_tiles = max(1, cdiv(M * P, tiles.keys))
    cut = min(cdiv(count, tiles.keys) if way == "size" else count, key_tiles)
    slots = cut if way == "num" else cdiv(key_tiles, cut)
    sizes = {"D": D, "BLOCK_D": padded(D), "GROUP": group, "BLOCK_R": tiles.rows, "TILE": tiles.keys, "CUT": way}
    variant = {"P": P, "FLOAT8_BITS": bits, "SOFTCAP": softcap > 0, "SPLIT": slots > 1}
    with triton_launch(q.device) as readable:
        q, written = readable(q), readable(out)
        partials = [out] * 3
        if slots > 1:
            rows = (items * slots, tiles.rows)
            partials = [*lse.new_empty(2, *rows), lse.new_empty(*rows, D)]
        lens, ends = seq_lens.contiguous(), cu_seqlens_q.contiguous()
        slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
        strides = (*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *block_tables.stride())
        lengths = (H, min(M * P, INT32_MAX), min(window or NO_WINDOW, NO_WINDOW))
        varlen_kernel[(items * slots,)](
            q, k_cache, v_cache, block_tables, lens, ends, sequences, slopes, written, lse, *partials,
            *strides, *lengths, scale, softcap, v_scale, cut, slots,
            **sizes, **variant, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if slots > 1:
            merge_varlen_kernel[(items, tiles.rows)](
                *partials, lens, ends, sequences, written, lse, *lengths, cut, slots, v_scale, **sizes, AT_ONCE=16
            )
        if written is not out:
            out.copy_(written)
    return out, lse


@_varlen_op.register_fake
def _(q, *_):
    return _outputs(q)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
