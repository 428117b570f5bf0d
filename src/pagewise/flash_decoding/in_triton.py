"""Flash-Decoding in Triton: how the kernels of `kernels/flash_decoding.py` are launched (lesson 7)."""

import functools

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.flash_decoding.work_plan import Items, Splits, WorkPlan, work_plan
from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_triton import INT32_MAX, NO_WINDOW, as_kernels_read, partial_results, refuses_tensors
from pagewise.tools.architecture import architecture
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv, padded
from pagewise.tools.transforms import is_traced
from pagewise.tools.tuning import LOADS, MIN_KEYS, PROGRAMS_PER_SM, Tiles, decode_tiles, splits_that_fill

OutAndLse = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]


def refuses(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the Triton kernels cannot take dense q, k and v, or None."""
    if k.shape[2] > INT32_MAX:
        return f"takes up to {INT32_MAX} keys, got {k.shape[2]}"
    return refuses_tensors(q=q, k=k, v=v)


def attend(
    q: Float[Tensor, "B H T D"],
    k: Shaped[Tensor, "N Hkv P D"],  # dense keys: [B, Hkv, S, D]
    v: Shaped[Tensor, "N Hkv P D"],
    options: ScoreOptions,
    *,
    block_tables: Int32[Tensor, "B M"] | None = None,
    seq_lens: Int32[Tensor, " B"] | None = None,
    v_scale: float = 1.0,
    splits: Splits | None = None,
    plan: WorkPlan | None = None,
) -> OutAndLse:
    """Return (out, lse) of attention over dense keys, or over keys in the blocks that block_tables names.

    plan: from `decode_plan`, for tensors of these shapes. Default: the op makes the plan of these splits.
    """
    tensors = (q, k, v, block_tables, seq_lens, options.alibi_slopes)
    numbers = (options.scale_for(q.shape[-1]), options.causal, options.window, options.softcap, v_scale)
    way, count = splits or (None, 0)
    return torch.ops.pagewise.flash_decoding(*tensors, *numbers, way, count, *(plan or (None, None, None, 0)))


def decode_plan(
    q: Float[Tensor, "B H T D"],
    k: Shaped[Tensor, "N Hkv P D"],
    options: ScoreOptions,
    splits: Splits | None,
    *,
    block_tables: Int32[Tensor, "B M"] | None = None,
    seq_lens: Int32[Tensor, " B"] | None = None,
) -> WorkPlan | None:
    """Return the work plan of `attend`, or None where there is nothing to do.

    Where every sequence has all keys (seq_lens is None), the plan depends on shapes only, and is kept for the next
    call. splits: None for a choice that fills the GPU.
    """
    if not q.numel():
        return None
    B, H, T, _ = q.shape
    Hkv, capacity = k.shape[1], _capacity(k, block_tables)
    tiles = _tiles(q, k)
    splits = splits or _filling(q, k, capacity, tiles, equal_lengths=seq_lens is None)
    window = min(options.window or NO_WINDOW, NO_WINDOW)
    sizes = (B, Hkv, T, H // Hkv, capacity, window, tiles, splits)
    keeps = seq_lens is None and not is_traced()  # no other call can use a traced plan
    if keeps and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _plan_of_equal_lengths(*sizes, q.device)
    return _plan(*sizes, q.device, seq_lens)


def _capacity(k: Tensor, block_tables: Tensor | None) -> int:
    """Return the most keys that a sequence can have."""
    return min(k.shape[2] * (1 if block_tables is None else block_tables.shape[1]), INT32_MAX)


def _tiles(q: Tensor, k: Tensor) -> Tiles:
    return decode_tiles(q.shape[1] // k.shape[1] * q.shape[2], q.shape[3], q.dtype, k.dtype)


def _filling(q: Tensor, k: Tensor, capacity: int, tiles: Tiles, *, equal_lengths: bool) -> Splits:
    """Return splits that fill the GPU, chosen without a look at lengths on it, for which the host would wait.

    Equal lengths are cut by number. For other lengths, as many programs as run at once share the work. On a CPU every
    item is one split.
    """
    gpu = architecture(q.device)
    if not gpu.sm:
        return Splits("num", 1)
    if not equal_lengths:
        return Splits("share", PROGRAMS_PER_SM * gpu.num_sms)
    items = len(q) * k.shape[1] * cdiv(q.shape[1] // k.shape[1] * q.shape[2], tiles.rows)
    return Splits("num", splits_that_fill(items, capacity, tiles.keys, gpu.num_sms))


def _plan(
    B: int,
    Hkv: int,
    T: int,
    group: int,
    capacity: int,
    window: int,
    tiles: Tiles,
    splits: Splits,
    device: torch.device,
    seq_lens: Int32[Tensor, " B"] | None = None,
) -> WorkPlan:
    """Return the plan for B sequences of T queries each. Item i is sequence, then KV head, then chunk of rows."""
    chunks = cdiv(T * group, tiles.rows)
    item = torch.arange(B * Hkv * chunks, device=device)
    seq, kv_head, chunk = item // (Hkv * chunks), item // chunks % Hkv, item % chunks
    lens = torch.full_like(item, capacity) if seq_lens is None else seq_lens.long()[seq]
    is_possible = (lens >= 0) & (lens <= capacity)
    end = torch.where(is_possible, lens, 0)
    first = (end - window - (T - 1)).clamp(min=0)  # the first key that the first query sees
    first_tile = first // tiles.keys
    num_tiles = torch.where(first < end, (end - 1) // tiles.keys - first_tile + 1, 0)
    first_row = chunk * tiles.rows
    rows = torch.stack([seq * (Hkv * group * T), kv_head, first_row, torch.full_like(item, T * group)], dim=1)
    items = Items(first_tile, num_tiles, is_possible, rows)
    return work_plan(items, splits, tile=tiles.keys, max_keys=capacity, min_keys=MIN_KEYS)


_plan_of_equal_lengths = functools.lru_cache(maxsize=64)(_plan)


@torch.library.custom_op("pagewise::flash_decoding", mutates_args=())
def _flash_decoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor | None,
    seq_lens: Tensor | None,
    alibi_slopes: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
    v_scale: float,
    way: str | None,
    count: int,
    programs: Tensor | None,
    splits: Tensor | None,
    items: Tensor | None,
    num_slots: int,
) -> tuple[Tensor, Tensor]:
    from pagewise.kernels.flash_decoding import flash_decoding_kernel

    (B, H, T, D), (_, Hkv, P, _) = q.shape, k.shape
    out, lse = q.new_empty(B, H, T, D), q.new_empty(B, H, T, dtype=torch.float32)
    if not q.numel():
        return out, lse
    if programs is None:  # made here, because in a graph the number of splits would be a constant
        options, asked = ScoreOptions(window=window), None if way is None else Splits(way, count)
        plan = decode_plan(q, k, options, asked, block_tables=block_tables, seq_lens=seq_lens)
        programs, splits, items, num_slots = plan
    tiles, capacity = _tiles(q, k), _capacity(k, block_tables)
    k, v, float8_bits = as_kernels_read(k, v)
    partials = partial_results(num_slots * tiles.rows, D, q.device) if num_slots else None
    tensors = (q, k, v, block_tables, seq_lens, alibi_slopes, out, lse, partials, programs, splits.view(-1))
    numbers = (T, capacity, min(window or NO_WINDOW, NO_WINDOW), scale, softcap or None, v_scale)
    sizes = {"P": None if block_tables is None else P, "D": D, "BLOCK_D": padded(D), "HKV": Hkv, "GROUP": H // Hkv}
    sizes |= {"ROWS": tiles.rows, "TILE": tiles.keys, "FLOAT8_BITS": float8_bits, "CAUSAL": causal and T > 1}
    sizes |= tiles.launch_options
    grid, memory = (len(programs) - 1,), {"outputs": (out, lse), "stored": (k, v)}
    launch(flash_decoding_kernel, grid, *tensors, *numbers, **sizes, **memory)
    if num_slots:
        merge_plan(partials, items, out, lse, (T, 1), v_scale, group=H // Hkv, rows=tiles.rows)
    return out, lse


@_flash_decoding.register_fake
def _(q, *_):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def merge_plan(
    partials: tuple[Tensor, Tensor, Tensor],
    items: Int32[Tensor, "items 6"],
    out: Float[Tensor, "*rows D"],
    lse: Float[Tensor, "*rows"],
    row_strides: tuple[int, int],
    v_scale: float,
    *,
    group: int,
    rows: int,
) -> None:
    """Merge the splits of a plan into out and lse, contiguous. row_strides: rows of lse from head to head, query to
    query."""
    from pagewise.kernels.flash_decoding import merge_plan_kernel

    D, flat = out.shape[-1], (out.view(-1), lse.view(-1))
    sizes = {"D": D, "BLOCK_D": padded(D), "GROUP": group, "ROWS": rows, "LOADS": LOADS}
    grid, arguments = (len(items), rows), (partials, items.view(-1), *flat, *row_strides, v_scale)
    launch(merge_plan_kernel, grid, *arguments, **sizes, outputs=flat)
