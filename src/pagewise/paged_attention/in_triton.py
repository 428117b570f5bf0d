"""Attention over cached keys in Triton: how the kernels of `kernels/decode.py` are launched (lessons 5, 7 and 9).

One program attends with all query heads that share a KV head, so that keys and values are read once for all of them. A
decode step has few of these: B · Hkv programs may leave most of a GPU idle. The keys of each sequence are therefore cut
into splits, and a second kernel merges their (m, l, acc).

No batch size, length, number of blocks or width of a table is a constant of the kernels. They are compiled once per
dtype, head size, block size and group of heads, and the host never waits for a length.
"""

import functools
from typing import Any, NamedTuple

import torch
from jaxtyping import Int32, Shaped
from torch import Tensor

from pagewise.kernels.arguments import DecodeSizes, Results, Scoring
from pagewise.options import ScoreOptions
from pagewise.paged_attention.inputs import OutAndLse, PagedInputs, Queries, Splits
from pagewise.paged_blocks.write import EXPONENT_BITS
from pagewise.tools import tuning
from pagewise.tools.architecture import Architecture, architecture
from pagewise.tools.checks import FLOATS
from pagewise.tools.device import triton_mode, without_bfloat16
from pagewise.tools.launch import launch
from pagewise.tools.ops import custom_op
from pagewise.tools.sizes import cdiv, padded

INT32_MAX = 2**31 - 1  # keys and queries are counted in int32; a window of that many is none
MAX_HEAD_SIZE = 256


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


FILLING = Splits("num", 0)  # as many splits of each item as fill the GPU, as far as the shapes tell
SHARING = Splits("share", 0)  # as many programs as run at once share the work, for lengths that only the GPU knows


class DecodeInputs(NamedTuple):
    """Queries, dense keys or keys in the blocks that block_tables names, and how to attend to them."""

    q: Queries  # packed: [1, H, total_q, D]
    k: Shaped[Tensor, "..."]  # [N, P, Hkv, D]; dense keys: [B, Hkv, S, D]
    v: Shaped[Tensor, "..."]
    options: ScoreOptions
    splits: Splits  # or FILLING or SHARING
    block_tables: Int32[Tensor, "num_seqs M"] | None = None
    seq_lens: Int32[Tensor, " num_seqs"] | None = None
    cu_seqlens_q: Int32[Tensor, " ends"] | None = None  # queries cu[b] … cu[b + 1] − 1 are those of sequence b
    v_scale: float = 1.0
    plan: Int32[Tensor, "5 columns"] | None = None  # from `shared_plan`; None: the op makes it


def attend(inputs: DecodeInputs) -> OutAndLse:
    """Return (out, lse) of attention."""
    q, k, v, options, splits, *others = inputs
    return _decode_attention(q, k, v, options.scale_for(q.shape[-1]), *options[1:5], *splits, *others)


class Part(NamedTuple):
    """Items of one size: a launch of the attention kernel, and one of its merge."""

    tiles: tuning.Tiles
    sizes: DecodeSizes
    items: int
    rows: int  # that an item has, at most
    num_splits: int  # of an item, at most
    num_programs: int  # that share the work; 0: they do not
    num_slots: int  # how many (m, l, acc) of ROWS rows there may be
    of_items: dict[str, Any]  # arguments of all kernels: which rows an item has, and which keys they see
    of_splits: dict[str, Any]  # arguments of the two kernels that attend and merge: those, and how the keys are cut


def parts_of(inputs: DecodeInputs) -> list[Part]:
    """Return the launches for tensors of these shapes: one, or two for packed sequences.

    A sequence that decodes would fill few rows of a tile that suits a chunk of a prompt, and a chunk would read its
    keys often with a tile that suits decoding. Packed sequences are therefore two parts: those with one query, and
    those with more.
    """
    q, k, _, options, splits, tables, _, ends, *_ = inputs
    num_columns, num_ends = None if tables is None else tables.shape[1], None if ends is None else len(ends)
    sizes = (q.shape, k.shape, num_columns, num_ends, q.dtype, k.dtype)
    return _parts(sizes, splits, options.causal, options.window, architecture(q.device))


@functools.lru_cache(maxsize=512)  # of numbers only
def _parts(sizes: tuple, splits: Splits, causal: bool, window: int | None, gpu: Architecture) -> list[Part]:
    (B, H, T, D), k_shape, num_columns, num_ends, dtype, cache_dtype = sizes
    if num_columns is None:
        block_size, (_, Hkv, capacity, _) = None, k_shape
    else:
        _, block_size, Hkv, _ = k_shape
        capacity = block_size * num_columns
    capacity, group = min(capacity, INT32_MAX), H // Hkv

    def part(rows: int, num_seqs: int, num_queries: int, *, packed: bool = False) -> Part:
        rows = min(rows, 64) if 0 < gpu.sm < 80 else rows  # sm_75 has 64 KB of shared memory
        tiles = tuning.decode_tiles(rows, D, dtype, cache_dtype)
        chunks = T * group // tiles.rows + num_seqs if packed else num_seqs * cdiv(num_queries * group, tiles.rows)
        items, most, (way, count) = chunks * Hkv, max(1, cdiv(capacity, tiles.keys)), splits
        split_tiles = num_programs = 0
        if way == "share" and not gpu.sm and not count:
            way = "num"
        elif way == "share" and packed:  # these items are work enough for a program, unless they have very many keys
            way, count = "size", tuning.CHUNK_KEYS
        if way == "share":
            count = count or tuning.PROGRAMS_PER_SM * gpu.num_sms
            num_programs = min(count, max(1, items * (most + 1) // max(1, tuning.MIN_KEYS // tiles.keys)))
        elif way == "size":
            split_tiles = min(cdiv(count, tiles.keys), most)
            count = cdiv(most, split_tiles)
        elif not count:
            count = tuning.splits_that_fill(items, capacity, tiles.keys, gpu.num_sms) if gpu.sm else 1
        num_splits = 1 if num_programs else min(count, most)
        slots = items + num_programs if num_programs else items * num_splits if num_splits > 1 else 0
        sizes = DecodeSizes(block_size, D, padded(D), group, tiles.rows, tiles.keys)
        of_items = {"num_queries": num_queries, "capacity": capacity, "window": min(window or INT32_MAX, INT32_MAX)}
        of_items |= {"SIZES": sizes, "HKV": Hkv, "CAUSAL": causal and (num_queries > 1 or packed)}
        cut = {"num_seqs": num_seqs if packed else None, "num_splits": num_splits, "split_tiles": split_tiles}
        numbers = (items, min(rows, tiles.rows), num_splits, num_programs, slots)
        return Part(tiles, sizes, *numbers, of_items, of_items | cut)

    if num_ends is None:
        return [part(T * group, B, T)]
    parts = [part(group, num_ends - 1, 1)]
    return parts if T == 1 else [*parts, part(T * group, num_ends - 1, 1, packed=True)]


def shared_plan(inputs: DecodeInputs) -> Int32[Tensor, "5 columns"] | None:
    """Return the plan that `attend` takes, made by one launch, or None if programs do not share the work.

    `kernels.work_plan.sections` tells what the rows of the plan are.
    """
    from pagewise.kernels.work_plan import work_plan_kernel

    part = parts_of(inputs)[0]
    if not part.num_programs or not inputs.q.numel():
        return None
    columns = cdiv(max(part.items, part.num_programs) + 1, 16) * 16  # a multiple of 16 is compiled for once
    plan = torch.empty(5, columns, dtype=torch.int32, device=inputs.q.device)
    launch(
        work_plan_kernel,
        (1,),
        plan=plan,
        seq_lens=inputs.seq_lens,
        cu_seqlens_q=inputs.cu_seqlens_q,
        num_items=part.items,
        num_programs=part.num_programs,
        min_tiles=max(1, tuning.MIN_KEYS // part.tiles.keys),
        LANES=256,
        **part.of_items,
    )
    return plan


@custom_op(
    "decode_attention",
    schema="(Tensor q, Tensor k, Tensor v, float scale, bool causal, SymInt? window, float softcap, "
    "Tensor? alibi_slopes, str way, SymInt count, Tensor? block_tables, Tensor? seq_lens, Tensor? cu_seqlens_q, "
    "float v_scale, Tensor? plan) -> (Tensor, Tensor)",
    fake=lambda q, *others: _empty_results(q, others[-3]),
)
def _decode_attention(q, k, v, *others):
    from pagewise.kernels.decode import decode_attention_kernel, merge_items_kernel

    inputs = DecodeInputs(q, k, v, ScoreOptions(*others[:5]), Splits(*others[5:7]), *others[7:])
    out, lse = _empty_results(q, inputs.cu_seqlens_q)
    if not q.numel():
        return out, lse
    if inputs.plan is None and inputs.splits.way == "share":  # here, because in a graph its size would be a constant
        inputs = inputs._replace(plan=shared_plan(inputs))
    table, table_stride = flat_table(inputs.block_tables)
    stored_k, stored_v, float8_bits = as_kernels_read(k, v)
    for part in parts_of(inputs):
        partials = partial_results(part.num_slots * part.tiles.rows, q.shape[-1], q.device)
        of_splits = {
            "results": Results(out, lse, inputs.v_scale, *partials),
            "plan": inputs.plan if part.num_programs else None,
            "seq_lens": inputs.seq_lens,
            "cu_seqlens_q": inputs.cu_seqlens_q,
            "outputs": (out, lse),
            **part.of_splits,
        }
        launch(
            decode_attention_kernel,
            (part.num_programs or part.items * part.num_splits,),
            q=q,
            k=stored_k,
            v=stored_v,
            block_tables=table,
            table_stride=table_stride,
            scoring=Scoring.of(inputs.options.scale, inputs.options.softcap, inputs.options.alibi_slopes),
            FLOAT8_BITS=float8_bits,
            stored=("k", "v"),
            **part.tiles.launch_options,
            **of_splits,
        )
        if part.num_slots:
            launch(merge_items_kernel, (part.items, part.rows), LOADS=tuning.LOADS, num_warps=1, **of_splits)
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
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    (B, M), step = block_tables.shape, block_tables.stride(0)
    return block_tables.as_strided(((B - 1) * step + M if B and M else 0,), (1,)), step


def partial_results(slots: int, head_size: int, device: torch.device) -> tuple[Tensor | None, ...]:
    """Return float32 memory for m [slots], l [slots] and acc [slots · D], or three times None for no slot."""
    if not slots:
        return None, None, None
    return tuple(torch.empty(slots * size, dtype=torch.float32, device=device) for size in (1, 1, head_size))


def as_kernels_read(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return keys and values as the kernels read them, and FLOAT8_BITS.

    A GPU below sm_89 and the interpreter do not convert float8. They read bytes, and the kernel converts them:
    FLOAT8_BITS is then the number of exponent bits, 4 or 5.
    """
    bits = EXPONENT_BITS.get(k.dtype, 0)
    if not bits or (architecture(k.device).sm >= 89 and triton_mode() == "compiled"):
        return k, v, 0
    return k.view(torch.uint8), v.view(torch.uint8), bits
