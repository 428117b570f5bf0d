"""Exercise of lesson 5: paged decode as a Triton kernel, the first rung of `kernels/paged_attention.py`."""

import torch

from pagewise.exercises.code import Gap
from pagewise.exercises.exercise import Case
from pagewise.exercises.triton import first_rung, launching
from pagewise.exercises.values import small_numbers
from pagewise.tools.launch import launch


def _decode(what: str, lengths: list[int], tables: list[list[int]], heads: int = 1, **unused: float) -> Case:
    """Blocks of 8 tokens, tiles of 16 keys, head size 16, scale 1/4, 2 query heads per KV head if there are several.

    K and V have different strides. `unused` may give the number `k` or `v` for the slots that no sequence may read.
    """
    kv_heads = max(1, heads // 2)

    def run(kernel: object, device: torch.device) -> object:
        q = small_numbers(len(lengths), heads, 16) / 4
        k_cache = small_numbers(8, 8, kv_heads, 16) + 0.5
        v_cache = (small_numbers(8, 8, kv_heads, 20) - 0.5)[..., :16]
        for cache, name in ((k_cache, "k"), (v_cache, "v")):
            if name in unused:
                cache.fill_(unused[name])
        for b, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            tokens = torch.arange(length)
            slots = torch.tensor(table)[tokens // 8], tokens % 8
            rising = 1 + tokens[:, None, None] / 8
            k_cache[slots] = small_numbers(length + b, kv_heads, 16)[b:] * rising
            v_cache[slots] = small_numbers(length + 3 * b, kv_heads, 16)[3 * b :]
        block_tables, seq_lens = (torch.tensor(x, dtype=torch.int32) for x in (tables, lengths))
        out = torch.full_like(q, torch.nan)
        q, k_cache, v_cache, block_tables, seq_lens, out = (
            x.to(device) for x in (q, k_cache, v_cache, block_tables, seq_lens, out)
        )
        arguments = (q, k_cache, v_cache, block_tables, seq_lens, out, 0.25)
        sizes = {"P": 8, "D": 16, "GROUP": heads // kv_heads, "ROWS": 16, "TILE": 16}
        launch(kernel, (len(lengths), kv_heads), *arguments, outputs=(out,), **sizes)
        return {"the first two columns of out": out[..., :2], "the rest": out[..., 2:]}

    of = f"{heads} query heads, {kv_heads} KV heads" if heads > 1 else "one head"
    return launching(f"seq_lens = {lengths}, block_tables = {tables}, {of}, P = 8, D = TILE = 16: {what}", run)


_HEAD = "head, is_head = (kv_head * GROUP + row)[:, None], (row < GROUP)[:, None]"
_BLOCK = "tl.load(tables_ptr + seq * tables_row + key // P * tables_column, mask=is_key, other=0).to(tl.int64)"
_MASK = "mask=is_key[:, None], other=0.0"
_MASKED = 'scores = tl.where(is_key[None, :], scores, float("-inf"))'

PAGED_DECODE_KERNEL = first_rung(
    "paged_attention",
    "paged_decode_kernel",
    [
        Gap(
            "head, is_head = ",
            "head, is_head = ",
            "the query heads [ROWS, 1] that share this program's KV head, and which of the ROWS exist",
            "head, is_head = row[:, None], (row < 1)[:, None]",
        ),
        Gap(
            "block = tl.load(",
            "m = m_new",
            "find the block of each key in the block table, and load k and v [TILE, D].\n"
            "Compute the scores [ROWS, TILE], then update m, l and acc. A weight of 0 does not hide NaN.",
        ),
        Gap("result = ", "result = ", "the output; an empty sequence gives 0", "result = acc"),
    ],
    [
        _decode("one block, full", [8], [[0]]),
        _decode("the block table names block 2", [8], [[2]]),
        _decode("3 slots of the block are unused, their values are NaN", [5], [[2]], v=torch.nan),
        _decode("3 slots of the block are unused, their keys and values are NaN", [5], [[2]], k=torch.nan, v=torch.nan),
        _decode("two tiles, three blocks", [20], [[3, 4, 1]]),
        _decode("no key at all", [0], [[0]]),
        _decode("two sequences", [8, 12], [[3, 0], [1, 4]]),
        _decode("one KV head for two query heads", [9], [[2, 1]], heads=2),
        _decode("two KV heads", [20, 3], [[3, 4, 1], [2, 0, 0]], heads=4),
    ],
    {
        "the gap is empty": (
            "acc is still 0: the loop must add the values of each tile, weighted, to acc.",
            ("        acc = alpha[:, None] * acc + tl.dot(weights.to(v.dtype), v", "        0 * tl.dot(weights, v"),
        ),
        "block table ignored": (
            "Key j is in block j // P of its *sequence*. The block table says which block of the cache that is.",
            (_BLOCK, "(key // P).to(tl.int64)"),
        ),
        "table of the first sequence": (
            "Every sequence has its own row of the block table: row `seq` begins at seq · tables_row.",
            ("tables_ptr + seq * tables_row + ", "tables_ptr + "),
        ),
        "blocks of one token": (
            "A block begins P tokens after the block before it: multiply `block` by the stride of blocks, "
            "not by the stride of tokens.",
            ("block * k_block", "block * k_token"),
            ("block * v_block", "block * v_token"),
        ),
        "position in the sequence": (
            "Inside its block, a key is token key % P. You used its position in the whole sequence.",
            ("key % P * k_token", "key * k_token"),
            ("key % P * v_token", "key * v_token"),
        ),
        "strides swapped": (
            "The caches are [N, P, Hkv, D]: tokens have the stride k_token, and KV heads the stride k_head.",
            ("key % P * k_token + kv_head * k_head", "key % P * k_head + kv_head * k_token"),
            ("key % P * v_token + kv_head * v_head", "key % P * v_head + kv_head * v_token"),
        ),
        "strides of K for V": (
            "V has strides of its own: v_block, v_token and v_head. In a padded cache they differ from those of K.",
            ("v_ptr + v_offset", "v_ptr + k_offset"),
        ),
        "the first KV head": (
            "Every program read the keys and values of KV head 0: add kv_head times the stride of heads.",
            (" + kv_head * k_head", ""),
            (" + kv_head * v_head", ""),
        ),
        "the first query heads": (
            "Every program computed the same query heads: those of KV head g are g · GROUP … g · GROUP + GROUP − 1.",
            (_HEAD, "head, is_head = row[:, None], (row < GROUP)[:, None]"),
        ),
        "query heads interleaved": (
            "Query heads that share a KV head are neighbours: g · GROUP + row, not row · (number of KV heads) + g.",
            ("kv_head * GROUP + row", "row * tl.num_programs(1) + kv_head"),
        ),
        "no scale": (
            "The scores lack the factor `scale`.",
            ('input_precision="ieee") * scale', 'input_precision="ieee")'),
        ),
        "not divided": (
            "The weights do not sum to 1: divide acc by l.",
            ("acc / tl.where(l == 0.0, 1.0, l)[:, None]", "acc"),
        ),
        "0 divided by 0": (
            "A sequence without keys has l = 0, and 0 / 0 is NaN: divide by 1 there.",
            ("acc / tl.where(l == 0.0, 1.0, l)[:, None]", "acc / l[:, None]"),
        ),
        "scores of 0": (
            "Slots after the last key got weight: loaded as 0 they have a score of 0, and exp(0 − m) is a weight. "
            "Their score must be −inf.",
            (f"        {_MASKED}\n", ""),
        ),
        "NaN times 0": (
            "The weight of an unused slot is 0, and 0 · NaN is NaN: load its values as 0, too (`mask`, `other`).",
            (f"tl.load(v_ptr + v_offset, {_MASK})", "tl.load(v_ptr + v_offset)"),
        ),
        "NaN scores": (
            "An unused slot holds NaN, and a sum with NaN is NaN: select with `tl.where`, do not add −inf.",
            (f"tl.load(k_ptr + k_offset, {_MASK})", "tl.load(k_ptr + k_offset)"),
            (_MASKED, 'scores += tl.where(is_key[None, :], 0.0, float("-inf"))'),
        ),
        "acc keeps the old maximum": (
            "The maximum rose with a later tile. l was multiplied by alpha and acc was not: both are relative to m.",
            ("acc = alpha[:, None] * acc + ", "acc = acc + "),
        ),
        "l keeps the old maximum": (
            "The maximum rose with a later tile. acc was multiplied by alpha and l was not: both are relative to m.",
            ("l = alpha * l + ", "l = l + "),
        ),
    },
    "the compiler does what the CUDA kernel does with thread groups, shuffles and barriers.",
)

EXERCISES = [PAGED_DECODE_KERNEL]
