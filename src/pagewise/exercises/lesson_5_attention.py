"""Exercises of lesson 5, paged attention: two stages of the CUDA kernel, and paged decode as a Triton kernel."""

import torch

from pagewise.exercises.code import Gap, device_code, with_gaps
from pagewise.exercises.cuda import CudaExercise, checked
from pagewise.exercises.exercise import Case
from pagewise.exercises.triton import RESCALING, TritonExercise, kernel_text, launching
from pagewise.exercises.values import small_numbers
from pagewise.tools.launch import launch

INF = float("inf")


def _qk(num_tokens: int, scale: float, what: str = "", unused: float = 9.0) -> Case:
    keys = small_numbers(16, 32)
    keys[num_tokens:] = unused
    in_vllm_layout = keys.view(16, 8, 4).transpose(0, 1).contiguous()
    args = (small_numbers(32), in_vllm_layout, torch.Size([16]), num_tokens, scale)
    return checked(f"num_tokens = {num_tokens}, scale = {scale:g}{what}", 1, 32, *args)


_QK_BLOCK = device_code("qk_block.cu")

QK_BLOCK = CudaExercise(
    "qk_block",
    _QK_BLOCK,
    with_gaps(
        _QK_BLOCK,
        Gap(
            "float qk = 0",
            "if (member == 0)",
            "this thread's half of q·k; the whole of it (__shfl_xor_sync finds the other thread of the group); the\n"
            "score. One thread of each group writes it.",
        ),
    ),
    [_qk(16, 1.0), _qk(16, 0.5), _qk(5, 0.5), _qk(5, 0.5, ", NaN in the unused slots", torch.nan)],
    [
        "half of the product: Each thread of the group has half of the product: __shfl_xor_sync(…, qk, 1) brings the "
        "other half.",
        ("    qk += __shfl_xor_sync(0xffffffff, qk, 1);\n", ""),
        "both read all: Twice the product: both threads read all vecs. Thread `member` takes vecs member, member + 2, "
        "…",
        ("vec = member; vec < 8; vec += 2", "vec = 0; vec < 8; ++vec"),
        "token by token: That is the layout [token][vec]: here all tokens' vec 0 come first, so vec · 16 + token.",
        ("k[vec * 16 + token]", "k[token * 8 + vec]"),
        "no scale: The scores lack the scale.",
        ("scale * qk :", "qk :"),
        "NaN past the end: An unused slot holds NaN, and NaN + (−INFINITY) is NaN: select the score, do not add to it.",
        ("token < num_tokens ? scale * qk : -INFINITY", "scale * qk + (token < num_tokens ? 0 : -INFINITY)"),
        "not masked: Scores from num_tokens on must be −INFINITY: nobody has written these slots.",
        ("token < num_tokens ? scale * qk : -INFINITY", "scale * qk"),
        "scores of 0: A score of 0 is a weight of exp(0 − m): a token that is not there has −INFINITY.",
        ("scale * qk : -INFINITY", "scale * qk : 0"),
    ],
    "a thread group of two, a vec each in turn, one shuffle.",
)


def _merge(what: str, ms: list[float], ls: list[float]) -> Case:
    n, D = len(ms), 4
    visible = torch.tensor(ls)[:, None] > 0
    accs = torch.where(visible, small_numbers(n, D), 0.0)
    return checked(f"ms = {what}", 1, D, torch.tensor(ms), torch.tensor(ls), accs, torch.Size([D]), n)


_MERGE_PARTITIONS = device_code("merge_partitions.cu")

MERGE_PARTITIONS = CudaExercise(
    "merge_partitions",
    _MERGE_PARTITIONS,
    with_gaps(_MERGE_PARTITIONS, Gap("float m = ", "out[d] = ", "out[d]")),
    [
        _merge("[0], ls = [2]", [0.0], [2.0]),
        _merge("[0, 0], ls = [1, 3]", [0.0, 0.0], [1.0, 3.0]),
        _merge("[0, 2], ls = [1, 3]", [0.0, 2.0], [1.0, 3.0]),
        _merge("[200, 199, 150], ls = [2, 1, 3]", [200.0, 199.0, 150.0], [2.0, 1.0, 3.0]),
        _merge("[1, -inf], ls = [2, 0]", [1.0, -INF], [2.0, 0.0]),
        _merge("[-inf, -inf], ls = [0, 0]", [-INF, -INF], [0.0, 0.0]),
    ],
    [
        "nothing rescaled: Each partition is relative to its own maximum: l and acc shrink by exp(mᵢ − m) before they "
        "are added.",
        ("l += expf(ms[i] - m) * ls[i]", "l += ls[i]"),
        ("acc += expf(ms[i] - m) * accs", "acc += accs"),
        "only acc rescaled: acc shrank, l did not: both are relative to mᵢ.",
        ("l += expf(ms[i] - m) * ls[i]", "l += ls[i]"),
        "the mean of the outputs: That is the mean of the partitions' outputs: a partition counts by its weight, "
        "exp(mᵢ − m) · lᵢ.",
        ("l += expf(ms[i] - m) * ls[i]", "l += 1"),
        ("acc += expf(ms[i] - m) * accs[i * D + d]", "acc += accs[i * D + d] / ls[i]"),
        "not divided: The sum is not divided by l yet.",
        ("l > 0 ? acc / l : 0", "acc"),
        "no maximum: exp(200) overflows: shrink relative to the largest mᵢ of all, not to 0.",
        ("m = fmaxf(m, ms[i])", "m = 0"),
        "NaN without keys: No partition saw a token: m is −INFINITY, and (−inf) − (−inf) is NaN; and l is 0. The "
        "output is 0 then.",
        ("    if (m == -INFINITY) m = 0;\n", ""),
        ("l > 0 ? acc / l : 0", "acc / l"),
        "one row for all: Every partition read the first one's acc: row i begins at i · D.",
        ("accs[i * D + d]", "accs[d]"),
    ],
    "lesson 3's merge, for any number of partitions.",
)


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

_KERNEL = kernel_text("paged_attention", "paged_decode_kernel")

PAGED_DECODE_KERNEL = TritonExercise(
    "paged_decode_kernel",
    _KERNEL,
    with_gaps(
        _KERNEL,
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
    ),
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
    [
        "the gap is empty: acc is still 0: the loop must add the values of each tile, weighted, to acc.",
        ("        acc = alpha[:, None] * acc + tl.dot(weights.to(v.dtype), v", "        0 * tl.dot(weights, v"),
        "block table ignored: Key j is in block j // P of its *sequence*. The block table says which block of the "
        "cache that is.",
        (_BLOCK, "(key // P).to(tl.int64)"),
        "table of the first sequence: Every sequence has its own row of the block table: row `seq` begins at seq · "
        "tables_row.",
        ("tables_ptr + seq * tables_row + ", "tables_ptr + "),
        "blocks of one token: A block begins P tokens after the block before it: multiply `block` by the stride of "
        "blocks, not by the stride of tokens.",
        ("block * k_block", "block * k_token"),
        ("block * v_block", "block * v_token"),
        "position in the sequence: Inside its block, a key is token key % P. You used its position in the whole "
        "sequence.",
        ("key % P * k_token", "key * k_token"),
        ("key % P * v_token", "key * v_token"),
        "strides swapped: The caches are [N, P, Hkv, D]: tokens have the stride k_token, and KV heads the stride "
        "k_head.",
        ("key % P * k_token + kv_head * k_head", "key % P * k_head + kv_head * k_token"),
        ("key % P * v_token + kv_head * v_head", "key % P * v_head + kv_head * v_token"),
        "strides of K for V: V has strides of its own: v_block, v_token and v_head. In a padded cache they differ "
        "from those of K.",
        ("v_ptr + v_offset", "v_ptr + k_offset"),
        "the first KV head: Every program read the keys and values of KV head 0: add kv_head times the stride of "
        "heads.",
        (" + kv_head * k_head", ""),
        (" + kv_head * v_head", ""),
        "the first query heads: Every program computed the same query heads: those of KV head g are g · GROUP … g · "
        "GROUP + GROUP − 1.",
        (_HEAD, "head, is_head = row[:, None], (row < GROUP)[:, None]"),
        "query heads interleaved: Query heads that share a KV head are neighbours: g · GROUP + row, not row · (number "
        "of KV heads) + g.",
        ("kv_head * GROUP + row", "row * tl.num_programs(1) + kv_head"),
        "no scale: The scores lack the factor `scale`.",
        ('input_precision="ieee") * scale', 'input_precision="ieee")'),
        "not divided: The weights do not sum to 1: divide acc by l.",
        ("acc / tl.where(l == 0.0, 1.0, l)[:, None]", "acc"),
        "0 divided by 0: A sequence without keys has l = 0, and 0 / 0 is NaN: divide by 1 there.",
        ("acc / tl.where(l == 0.0, 1.0, l)[:, None]", "acc / l[:, None]"),
        "scores of 0: Slots after the last key got weight: loaded as 0 they have a score of 0, and exp(0 − m) is a "
        "weight. Their score must be −inf.",
        (f"        {_MASKED}\n", ""),
        "NaN times 0: The weight of an unused slot is 0, and 0 · NaN is NaN: load its values as 0, too (`mask`, "
        "`other`).",
        (f"tl.load(v_ptr + v_offset, {_MASK})", "tl.load(v_ptr + v_offset)"),
        "NaN scores: An unused slot holds NaN, and a sum with NaN is NaN: select with `tl.where`, do not add −inf.",
        (f"tl.load(k_ptr + k_offset, {_MASK})", "tl.load(k_ptr + k_offset)"),
        (_MASKED, 'scores += tl.where(is_key[None, :], 0.0, float("-inf"))'),
        *RESCALING,
    ],
    "the compiler does what the CUDA kernel does with thread groups, shuffles and barriers.",
)

EXERCISES = [QK_BLOCK, MERGE_PARTITIONS, PAGED_DECODE_KERNEL]
