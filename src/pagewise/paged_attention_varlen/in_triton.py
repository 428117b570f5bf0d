"""Attention of packed queries over a paged cache in Triton: how its kernel is launched (lesson 9).

One launch serves sequences that decode and chunks of prompts, driven by lesson 7's work plan. The sizes of the plan
depend on the numbers of queries and sequences only. The host waits for no length, and a CUDA graph can capture a decode
step. Where every sequence is known to have one query, lesson 7's kernel is launched.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pagewise.flash_decoding import in_triton as flash_decoding
from pagewise.flash_decoding.work_plan import Items, Splits, WorkPlan, work_plan
from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_triton import INT32_MAX, NO_WINDOW, as_kernels_read, partial_results
from pagewise.paged_attention_varlen.step import Step
from pagewise.tools.architecture import architecture
from pagewise.tools.launch import launch
from pagewise.tools.sizes import padded
from pagewise.tools.tuning import MIN_KEYS, PROGRAMS_PER_SM, Tiles, decode_tiles


class PlanInTriton:
    """The tensors and the work plan that all layers of a step share. Their numbers stay on the device."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._plans: dict[tuple, tuple | None] = {}  # by the shapes of q and of the cache: layers may differ

    def attend(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
    ) -> Float[Tensor, "total_q H D"]:
        """Return out of `paged_attention_varlen` for one layer. Nothing is checked."""
        return self.attend_with_lse(q, k_cache, v_cache)[0]

    def attend_with_lse(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
    ) -> tuple[Float[Tensor, "total_q H D"], Float[Tensor, "total_q H"]]:
        """Return (out, lse) of `paged_attention_varlen`. The first layer makes the plan."""
        tables, lens, _, _, decodes, options, v_scale, splits = self.step
        key = (q.shape, k_cache.shape[2], q.dtype, k_cache.dtype)
        if decodes:
            of_blocks = {"block_tables": tables, "seq_lens": lens}
            q, k, v = q[:, :, None], k_cache.transpose(1, 2), v_cache.transpose(1, 2)
            if key not in self._plans:
                self._plans[key] = flash_decoding.decode_plan(q, k, options, splits, **of_blocks)
            out, lse = flash_decoding.attend(q, k, v, options, **of_blocks, v_scale=v_scale, plan=self._plans[key])
            return out.squeeze(2), lse.squeeze(2)
        if q.numel() and key not in self._plans:
            self._plans[key] = varlen_plan(q, k_cache, self.step)
        return attend(q, k_cache, v_cache, self.step, self._plans.get(key))


def attend(
    q: Float[Tensor, "total_q H D"],
    k_cache: Shaped[Tensor, "N P Hkv D"],
    v_cache: Shaped[Tensor, "N P Hkv D"],
    step: Step,
    plan: tuple[Tensor, WorkPlan] | None = None,
) -> tuple[Float[Tensor, "total_q H D"], Float[Tensor, "total_q H"]]:
    """Return (out, lse) of `paged_attention_varlen`. The op makes the plan of the step if it is not given."""
    tables, lens, cu_seqlens_q, _, _, options, v_scale, splits = step
    tensors = (q, k_cache, v_cache, tables, lens, cu_seqlens_q, options.alibi_slopes)
    numbers = (options.scale_for(q.shape[-1]), options.window, options.softcap, v_scale, *(splits or (None, 0)))
    chunk_seqs, of_work = plan or (None, (None, None, None, 0))
    return torch.ops.pagewise.paged_attention_varlen(*tensors, *numbers, chunk_seqs, *of_work)


def _tiles(q: Tensor, k_cache: Tensor) -> Tiles:
    """Return tiles for chunks of rows, as if all queries were of one sequence."""
    total_q, H, D = q.shape
    return decode_tiles(total_q * H // k_cache.shape[2], D, q.dtype, k_cache.dtype)


def varlen_plan(q: Tensor, k_cache: Tensor, step: Step) -> tuple[Tensor, WorkPlan]:
    """Return the sequence of each chunk of rows [chunks] int32, and the plan. Item i is chunk, then KV head.

    The first chunk of sequence b is cu_seqlens_q[b] · group // rows + b, which leaves enough for each sequence before
    it. Some chunks have no rows.
    """
    (total_q, H, _), Hkv, tiles = q.shape, k_cache.shape[2], _tiles(q, k_cache)
    group, num_seqs, capacity = H // Hkv, len(step.seq_lens), _capacity(step.block_tables, step.block_size)
    cu = step.cu_seqlens_q.long()
    chunk = torch.arange(total_q * group // tiles.rows + num_seqs, device=q.device)
    first_chunk = cu[:-1] * group // tiles.rows + chunk[:num_seqs]
    seq = torch.searchsorted(first_chunk, chunk, right=True) - 1

    lens, queries = step.seq_lens.long()[seq], cu.diff()[seq]
    is_possible = (lens >= 0) & (lens <= capacity)
    lens = torch.where(is_possible, lens, 0)
    first_row, num_rows = (chunk - first_chunk[seq]) * tiles.rows, queries * group
    last_query = torch.minimum((first_row + tiles.rows - 1) // group, queries - 1)
    end = torch.where(first_row < num_rows, lens - queries + last_query + 1, 0).clamp(min=0)
    first = (lens - queries + first_row // group + 1 - (step.options.window or NO_WINDOW)).clamp(min=0)
    first_tile = torch.minimum(first, end) // tiles.keys
    num_tiles = torch.where(first < end, (end - 1) // tiles.keys - first_tile + 1, 0)

    kv_head = torch.arange(Hkv, device=q.device).repeat(len(chunk))
    of_chunks = torch.stack([cu[seq] * H, first_row, num_rows], dim=1)
    base, first_row, num_rows = of_chunks.repeat_interleave(Hkv, dim=0).unbind(dim=1)
    rows = torch.stack([base, kv_head, first_row, num_rows], dim=1)
    items = Items(*(x.repeat_interleave(Hkv) for x in (first_tile, num_tiles, is_possible)), rows)
    gpu = architecture(q.device)
    filling = Splits("share", PROGRAMS_PER_SM * gpu.num_sms) if gpu.sm else Splits("num", 1)
    sizes = {"tile": tiles.keys, "max_keys": capacity, "min_keys": MIN_KEYS}
    return seq.int(), work_plan(items, step.splits or filling, **sizes)


def _capacity(block_tables: Tensor, block_size: int) -> int:
    return min(block_tables.shape[1] * block_size, INT32_MAX)


@torch.library.custom_op("pagewise::paged_attention_varlen", mutates_args=())
def _paged_attention_varlen(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    alibi_slopes: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float,
    v_scale: float,
    way: str | None,
    count: int,
    chunk_seqs: Tensor | None,
    programs: Tensor | None,
    splits: Tensor | None,
    items: Tensor | None,
    num_slots: int,
) -> tuple[Tensor, Tensor]:
    from pagewise.kernels.paged_attention_varlen import paged_attention_varlen_kernel

    (_, H, D), (_, P, Hkv, _) = q.shape, k_cache.shape
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not q.numel():
        return out, lse
    if programs is None:
        options, asked = ScoreOptions(window=window), None if way is None else Splits(way, count)
        step = Step(block_tables, seq_lens, cu_seqlens_q, P, False, options, v_scale, asked)
        chunk_seqs, (programs, splits, items, num_slots) = varlen_plan(q, k_cache, step)
    tiles = _tiles(q, k_cache)
    k_cache, v_cache, float8_bits = as_kernels_read(k_cache, v_cache)
    partials = partial_results(num_slots * tiles.rows, D, q.device) if num_slots else None
    tensors = (q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, chunk_seqs, alibi_slopes, out, lse, partials)
    plan = (programs, splits.view(-1), items.view(-1))
    numbers = (_capacity(block_tables, P), min(window or NO_WINDOW, NO_WINDOW), scale, softcap or None, v_scale)
    sizes = {"P": P, "D": D, "BLOCK_D": padded(D), "HKV": Hkv, "GROUP": H // Hkv}
    sizes |= {"ROWS": tiles.rows, "TILE": tiles.keys, "FLOAT8_BITS": float8_bits, **tiles.launch_options}
    grid, memory = (len(programs) - 1,), {"outputs": (out, lse), "stored": (k_cache, v_cache)}
    launch(paged_attention_varlen_kernel, grid, *tensors, *plan, *numbers, **sizes, **memory)
    if num_slots:
        flash_decoding.merge_plan(partials, items, out, lse, (1, H), v_scale, group=H // Hkv, rows=tiles.rows)
    return out, lse


@_paged_attention_varlen.register_fake
def _(q, *_):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
