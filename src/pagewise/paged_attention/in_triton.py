"""Attention over cached keys in Triton: how the kernels of `kernels/decode.py` are launched (lessons 5, 7 and 9).

One program attends with all query heads that share a KV head, so that keys and values are read once for all of them. A
decode step has few of these: B · Hkv programs may leave most of a GPU idle. The keys of each sequence are therefore cut
into splits, and a second kernel merges their (m, l, acc).

No batch size, length, number of blocks or width of a table is a constant of the kernels. They are compiled once per
dtype, head size, block size and group of heads, and the host never waits for a length.
"""

import functools
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.kernels.arguments import DecodeSizes, Results, Scoring
from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.paged_blocks.write import EXPONENT_BITS
from pagewise.tools.architecture import Architecture, architecture
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import triton_mode, without_bfloat16
from pagewise.tools.launch import launch
from pagewise.tools.ops import custom_op
from pagewise.tools.sizes import cdiv, padded
from pagewise.tools.tuning import (
    CHUNK_KEYS,
    LOADS,
    MIN_KEYS,
    PROGRAMS_PER_SM,
    Tiles,
    decode_tiles,
    splits_that_fill,
)

INT32_MAX = NO_WINDOW = 2**31 - 1  # keys and queries are counted in int32
MAX_HEAD_SIZE = 256
OutAndLse = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]


def refuses(inputs: PagedInputs) -> str | None:
    """Return why the Triton kernels cannot take these tensors, or None."""
    P = inputs.k_cache.shape[1]
    if P > 256 or P & (P - 1):
        return f"needs a block size that is a power of two from 1 to 256, got {P}"
    return refuses_tensors(q=inputs.q, k_cache=inputs.k_cache, v_cache=inputs.v_cache)


def refuses_tensors(q: Tensor, **keys_and_values: Tensor) -> str | None:
    """Return why no decode kernel of lessons 5 to 9 can take these tensors, or None."""
    D = q.shape[-1]
    if q.dtype not in FLOATS:
        return f"takes q in float32, float16 or bfloat16, got {q.dtype}"
    if D > MAX_HEAD_SIZE:
        return f"takes head sizes up to {MAX_HEAD_SIZE}, got {D}"
    for name, tensor in {"q": q, **keys_and_values}.items():
        if D > 1 and tensor.numel() and tensor.stride(-1) != 1:
            return f"needs {name} contiguous in its last dimension, got stride {tensor.stride(-1)}"
    return without_bfloat16(q.dtype, architecture(q.device))


FILLING = ("num", 0)  # as many splits of each item as fill the GPU, as far as the shapes tell
SHARING = ("share", 0)  # as many programs as run at once share the work, for lengths that only the GPU knows


def attend(
    q: Float[Tensor, "B H T D"],
    k: Shaped[Tensor, "..."],  # [N, P, Hkv, D]; dense keys: [B, Hkv, S, D]
    v: Shaped[Tensor, "..."],
    options: ScoreOptions,
    splits: tuple[str, int],
    *,
    block_tables: Int32[Tensor, "num_seqs M"] | None = None,
    seq_lens: Int32[Tensor, " num_seqs"] | None = None,
    cu_seqlens_q: Int32[Tensor, " ends"] | None = None,
    v_scale: float = 1.0,
    plan: Int32[Tensor, "5 columns"] | None = None,
) -> OutAndLse:
    """Return (out, lse) of attention over dense keys, or over keys in the blocks that block_tables names.

    Args:
        splits: `flash_decoding.Splits`, or FILLING or SHARING.
        cu_seqlens_q: q is [1, H, total_q, D], and queries cu[b] … cu[b + 1] − 1 are those of sequence b.
        plan: from `shared_plan`, for tensors of these shapes. Default: the op makes it.
    """
    _, causal, window, softcap, slopes, _ = options
    scale = options.scale_for(q.shape[-1])
    tensors = (q, k, v, block_tables, seq_lens, cu_seqlens_q, slopes, plan)
    return _decode_attention(*tensors, scale, causal, window, softcap, v_scale, *splits)


class Part(NamedTuple):
    """Items of one size and how their keys are cut: a launch of the attention kernel, and one of its merge."""

    tiles: Tiles
    items: int
    num_queries: int  # of each sequence; 1 for packed sequences
    num_seqs: int | None  # of packed sequences, for the part of those with more queries than one
    num_splits: int  # of an item, at most
    split_tiles: int  # tiles of a split; 0: an item has num_splits
    num_programs: int  # that share the work; 0: they do not
    capacity: int  # the most keys that a sequence can have
    num_slots: int  # how many (m, l, acc) of ROWS rows there may be
    sizes: DecodeSizes
    num_kv_heads: int


def parts_of(
    q: Tensor, k: Tensor, splits: tuple[str, int], block_tables: Tensor | None, cu_seqlens_q: Tensor | None
) -> list[Part]:
    """Return the launches for tensors of these shapes: one, or two for packed sequences.

    A sequence that decodes would fill few rows of a tile that suits a chunk of a prompt, and a chunk would read its
    keys often with a tile that suits decoding. Packed sequences are therefore two parts: those with one query, and
    those with more.
    """
    num_blocks = None if block_tables is None else block_tables.shape[1]
    num_seqs = None if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    return _parts(q.shape, k.shape, q.dtype, k.dtype, splits, num_blocks, num_seqs, architecture(q.device))


@functools.lru_cache(maxsize=512)  # of numbers only
def _parts(
    q_shape: torch.Size,
    k_shape: torch.Size,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    splits: tuple[str, int],
    num_blocks: int | None,  # of a row of the block tables
    num_packed: int | None,  # sequences
    gpu: Architecture,
) -> list[Part]:
    (B, H, T, D), (_, S, Hkv, _) = q_shape, k_shape
    if num_blocks is None:
        S, Hkv = Hkv, S
    group, capacity = H // Hkv, min(S * (1 if num_blocks is None else num_blocks), INT32_MAX)

    def part(rows: int, num_seqs: int, num_queries: int, *, packed: bool = False) -> Part:
        rows = min(rows, 64) if 0 < gpu.sm < 80 else rows  # sm_75 has 64 KB of shared memory
        tiles = decode_tiles(rows, D, dtype, cache_dtype)
        chunks = T * group // tiles.rows + num_seqs if packed else num_seqs * cdiv(num_queries * group, tiles.rows)
        items, most, (way, count) = chunks * Hkv, max(1, cdiv(capacity, tiles.keys)), splits
        split_tiles = num_programs = 0
        if way == "share" and not gpu.sm and not count:
            way, count = "num", 1
        elif way == "share" and packed:  # these items are work enough for a program, unless they have very many keys
            way, count = "size", CHUNK_KEYS
        if way == "share":
            count = count or PROGRAMS_PER_SM * gpu.num_sms
            num_programs = min(count, max(1, items * (most + 1) // max(1, MIN_KEYS // tiles.keys)))
        elif way == "size":
            split_tiles = min(cdiv(count, tiles.keys), most)
            count = cdiv(most, split_tiles)
        elif not count:
            count = splits_that_fill(items, capacity, tiles.keys, gpu.num_sms) if gpu.sm else 1
        num_splits = 1 if num_programs else min(count, most)
        slots = items + num_programs if num_programs else items * num_splits if num_splits > 1 else 0
        sizes = DecodeSizes(None if num_blocks is None else S, D, padded(D), group, tiles.rows, tiles.keys)
        cut = (num_splits, split_tiles, num_programs)
        return Part(tiles, items, num_queries, num_seqs if packed else None, *cut, capacity, slots, sizes, Hkv)

    if num_packed is None:
        return [part(T * group, B, T)]
    parts = [part(group, num_packed, 1)]
    return parts if T == 1 else [*parts, part(T * group, num_packed, 1, packed=True)]


def shared_plan(
    q: Float[Tensor, "B H T D"],
    k: Shaped[Tensor, "..."],
    options: ScoreOptions,
    splits: tuple[str, int],
    *,
    block_tables: Int32[Tensor, "num_seqs M"] | None = None,
    seq_lens: Int32[Tensor, " num_seqs"] | None = None,
    cu_seqlens_q: Int32[Tensor, " ends"] | None = None,
) -> Int32[Tensor, "5 columns"] | None:
    """Return the work plan of `attend` for tensors of these shapes, or None if programs do not share the work.

    One launch makes the plan on the device. `kernels.work_plan.sections` tells what its rows are.
    """
    from pagewise.kernels.work_plan import work_plan_kernel

    part = parts_of(q, k, splits, block_tables, cu_seqlens_q)[0]
    if not part.num_programs or not q.numel():
        return None
    columns = cdiv(max(part.items, part.num_programs) + 1, 16) * 16  # a multiple of 16 is compiled for once
    plan = torch.empty(5, columns, dtype=torch.int32, device=q.device)
    launch(
        work_plan_kernel,
        (1,),
        plan=plan,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        num_items=part.items,
        num_programs=part.num_programs,
        min_tiles=max(1, MIN_KEYS // part.tiles.keys),
        num_queries=part.num_queries,
        capacity=part.capacity,
        window=width_of(options.window),
        SIZES=part.sizes,
        HKV=part.num_kv_heads,
        CAUSAL=options.causal and part.num_queries > 1,
        LANES=256,
    )
    return plan


def width_of(window: int | None) -> int:
    """Return the kernels' argument window."""
    return NO_WINDOW if window is None else min(window, NO_WINDOW)


@custom_op(
    "decode_attention", fake=lambda q, k, v, block_tables, seq_lens, cu_seqlens_q, *_: _empty_results(q, cu_seqlens_q)
)
def _decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor | None,
    seq_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    alibi_slopes: Tensor | None,
    plan: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
    v_scale: float,
    way: str,
    count: int,
) -> tuple[Tensor, Tensor]:
    from pagewise.kernels.decode import decode_attention_kernel, merge_items_kernel

    out, lse = _empty_results(q, cu_seqlens_q)
    if not q.numel():
        return out, lse
    T, D = q.shape[2:]
    if plan is None and way == "share":  # made here, because in a graph its size would be a constant
        tables = {"block_tables": block_tables, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        plan = shared_plan(q, k, ScoreOptions(causal=causal, window=window), (way, count), **tables)
    table, table_stride = flat_table(block_tables)
    stored_k, stored_v, float8_bits = as_kernels_read(k, v)
    for part in parts_of(q, k, (way, count), block_tables, cu_seqlens_q):
        partials = partial_results(part.num_slots * part.tiles.rows, D, q.device)
        of_items = {
            "results": Results(out, lse, v_scale, *partials),
            "plan": plan if part.num_programs else None,
            "seq_lens": seq_lens,
            "cu_seqlens_q": cu_seqlens_q,
            "num_seqs": part.num_seqs,
            "num_queries": part.num_queries,
            "capacity": part.capacity,
            "window": width_of(window),
            "num_splits": part.num_splits,
            "split_tiles": part.split_tiles,
            "SIZES": part.sizes,
            "HKV": part.num_kv_heads,
            "CAUSAL": causal and (part.num_queries > 1 or part.num_seqs is not None),
        }
        launch(
            decode_attention_kernel,
            (part.num_programs or part.items * part.num_splits,),
            q=q,
            k=stored_k,
            v=stored_v,
            block_tables=table,
            table_stride=table_stride,
            scoring=Scoring.of(scale, softcap, alibi_slopes),
            FLOAT8_BITS=float8_bits,
            outputs=(out, lse),
            stored=(stored_k, stored_v),
            num_warps=part.tiles.num_warps,
            num_stages=part.tiles.num_stages,
            **of_items,
        )
        if part.num_slots:
            launch(
                merge_items_kernel,
                (part.items, min(part.tiles.rows, (T if part.num_seqs else part.num_queries) * part.sizes.GROUP)),
                LOADS=LOADS,
                outputs=(out, lse),
                num_warps=1,
                **of_items,
            )
    return out, lse


def _empty_results(q: Tensor, cu_seqlens_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return empty out [B,H,T,D] and lse [B,H,T]. The results of packed queries are contiguous query by query."""
    B, H, T, D = q.shape
    if cu_seqlens_q is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        return out, torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    out, lse = q.new_empty(T, H, D), q.new_empty(T, H, dtype=torch.float32)
    return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]


def flat_table(block_tables: Int32[Tensor, "B M"] | None) -> tuple[Int32[Tensor, " numbers"] | None, int]:
    """Return the memory of the block tables, and the step from row to row."""
    if block_tables is None:
        return None, 0
    if block_tables.is_contiguous():
        return block_tables.view(-1), block_tables.shape[1]
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    (B, M), stride = block_tables.shape, block_tables.stride(0)
    return block_tables.as_strided(((B - 1) * stride + M if B and M else 0,), (1,)), stride


def partial_results(
    slots: int, head_size: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return float32 memory for m [slots], l [slots] and acc [slots · D], or three times None for no slot."""
    if not slots:
        return None, None, None
    of_rows = {"dtype": torch.float32, "device": device}
    return torch.empty(slots, **of_rows), torch.empty(slots, **of_rows), torch.empty(slots * head_size, **of_rows)


def as_kernels_read(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return keys and values as the kernels read them, and FLOAT8_BITS.

    A GPU below sm_89 and the interpreter do not convert float8. They read bytes, and the kernel converts them:
    FLOAT8_BITS is then the number of exponent bits, 4 or 5.
    """
    bits = EXPONENT_BITS.get(k.dtype, 0)
    if not bits or (architecture(k.device).sm >= 89 and triton_mode() == "compiled"):
        return k, v, 0
    return k.view(torch.uint8), v.view(torch.uint8), bits
