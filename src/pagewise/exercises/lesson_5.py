"""Exercises of lesson 5: a sum and a maximum in CUDA, two stages of the paged kernel, and a kernel of one warp."""

import torch

from pagewise.exercises.code import Gap, device_code, edited, with_gaps
from pagewise.exercises.cuda import CudaExercise, checked
from pagewise.exercises.exercise import Case
from pagewise.exercises.values import small_numbers

_WARP_SUM = device_code("warp_sum.cu")
_STEP = "sum += __shfl_down_sync(ALL_LANES, sum, distance);"


def _warp_sum(rows: int, x: torch.Tensor, what: str) -> Case:
    return checked(f"{rows} row{'s' * (rows > 1)}, {what}", rows, 32, x, torch.Size([rows]))


WARP_SUM = CudaExercise(
    "warp_sum",
    _WARP_SUM,
    with_gaps(
        _WARP_SUM,
        Gap(
            "for (int distance",
            "if (threadIdx.x == 0)",
            "add the 32 sums of the lanes with __shfl_down_sync(ALL_LANES, sum, distance), in five steps.\n"
            "Lane 0 writes the total. Use no shared memory and no atomics.",
        ),
    ),
    [
        _warp_sum(1, torch.ones(1, 32), "all ones"),
        _warp_sum(1, torch.arange(32.0)[None], "x = 0, 1, 2, … 31"),
        _warp_sum(2, small_numbers(2, 32), "mixed numbers"),
    ],
    [
        "nothing yet: The kernel writes nothing yet. Add the sums of lanes 16 apart first: sum += "
        "__shfl_down_sync(ALL_LANES, sum, 16). Then halve the distance.",
        ("if (threadIdx.x == 0) sums[blockIdx.x] = sum;", ""),
        "a step too few: The last step is missing. The distances are 16, 8, 4, 2 and 1, so the loop runs while "
        "`distance > 0`.",
        ("distance > 0", "distance > 1"),
        "a step too many: The sum is doubled. At distance 32 each lane gets its own number back, because the warp has "
        "only 32 lanes. Begin with 16.",
        ("distance = 16", "distance = 32"),
        "every lane writes: All lanes write to one address, and only lane 0 has the whole sum. Write under `if "
        "(threadIdx.x == 0)`.",
        ("if (threadIdx.x == 0) sums[blockIdx.x] = sum;", "sums[blockIdx.x] = sum;"),
        "from one lane: __shfl_sync gives every lane the number of *one* lane, lane `distance`. __shfl_down_sync gives "
        "each lane the number of the lane `distance` above it.",
        ("__shfl_down_sync", "__shfl_sync"),
        "shuffle in a branch: A shuffle needs both lanes: the lane that gives must take part, too. Move the shuffle "
        "out of the `if`.",
        (_STEP, f"if (threadIdx.x < distance) {_STEP}"),
        "the first number again: Each step must pass on the sum so far, not the number that the lane began with.",
        ("(ALL_LANES, sum, distance)", "(ALL_LANES, x[blockIdx.x * 32 + threadIdx.x], distance)"),
        "the last lane writes: The whole sum is in lane 0, because a shuffle down moves numbers to lower lanes.",
        ("threadIdx.x == 0", "threadIdx.x == 31"),
        "no shuffle: The result is lane 0's own number. Nothing came from the other lanes: the loop needs a shuffle.",
        (f"for (int distance = 16; distance > 0; distance /= 2) {_STEP}\n    ", ""),
    ],
    "32 numbers in five steps, without memory.",
)

_BLOCK_MAX = device_code("block_max.cu")
_TREE = (
    "        if (threadIdx.x < half) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);\n"
)
_BARRIER = "        __syncthreads();\n"


def _block_max(rows: int, x: torch.Tensor, what: str) -> Case:
    return checked(what, rows, 64, x, torch.Size([rows]), x.shape[1])


BLOCK_MAX = CudaExercise(
    "block_max",
    _BLOCK_MAX,
    edited(
        _BLOCK_MAX,
        (_TREE + _BARRIER, _TREE),
        (" 1.\n", " 1.\n// A barrier is missing, and the result may still be right. Add the barrier.\n"),
    ),
    [
        _block_max(1, small_numbers(1, 64), "one row of 64"),
        _block_max(1, -torch.arange(1.0, 4.0)[None], "x = -1, -2, -3"),
        _block_max(2, small_numbers(2, 150), "two rows of 150"),
        _block_max(1, torch.arange(130.0)[None], "x = 0, 1, 2, … 129"),
    ],
    [
        "missing barrier in the loop: The kernel still has its race. Which round writes this number, which round reads "
        "it, and what makes the reader wait for the writer?",
        (_TREE + _BARRIER, _TREE),
        "missing first barrier: The loop reads numbers that other threads wrote above it. A barrier must separate the "
        "two.",
        ("    __syncthreads();\n    for (int half", "    for (int half"),
        "barrier in the branch: Only some of the threads reach this barrier. Move it out of the `if`, so that all "
        "threads do.",
        (
            _TREE + _BARRIER,
            "        if (threadIdx.x < half) {\n"
            "            largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);\n"
            "            __syncthreads();\n        }\n",
        ),
        "begun with 0: A row may hold only negative numbers. Begin with −INFINITY, not with 0.",
        ("mine = -INFINITY", "mine = 0"),
        "one number each: A row may be longer than the thread block. Let each thread take every 64th number.",
        (
            "for (int i = threadIdx.x; i < n; i += 64) mine = fmaxf(mine, x[blockIdx.x * n + i]);",
            "if (threadIdx.x < n) mine = x[blockIdx.x * n + threadIdx.x];",
        ),
    ],
    "every step waits for the one before, and every thread comes to every barrier.",
)


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
            "compute this thread's half of q·k, add the other half with __shfl_xor_sync, and let one thread\n"
            "of each group write the score.",
        ),
    ),
    [_qk(16, 1.0), _qk(16, 0.5), _qk(5, 0.5), _qk(5, 0.5, ", NaN in the unused slots", torch.nan)],
    [
        "nothing yet: The kernel writes no score yet. Start with the product of this thread's vecs: member, member + "
        "2, … of q and of its token's key.",
        ("if (member == 0) scores[token] = token < num_tokens ? scale * qk : -INFINITY;", ""),
        "half of the product: The score is half of the product. __shfl_xor_sync(0xffffffff, qk, 1) brings the half of "
        "the other thread.",
        ("    qk += __shfl_xor_sync(0xffffffff, qk, 1);\n", ""),
        "both read all: The score is twice the product, because both threads read all vecs. Thread `member` takes vecs "
        "member, member + 2, …",
        ("vec = member; vec < 8; vec += 2", "vec = 0; vec < 8; ++vec"),
        "unused slots return: Threads of slots from num_tokens on return before they write. Their score is −INFINITY.",
        ("    float qk = 0;\n", "    if (token >= num_tokens) return;\n    float qk = 0;\n"),
        "token by token: The keys are read in the layout [token][vec]. Here vec 0 of all tokens comes first, so the "
        "index is vec · 16 + token.",
        ("k[vec * 16 + token]", "k[token * 8 + vec]"),
        "no scale: The scores lack the scale.",
        ("scale * qk :", "qk :"),
        "NaN past the end: An unused slot holds NaN, and NaN + (−INFINITY) is NaN. Select the score with ?: instead of "
        "adding to it.",
        ("token < num_tokens ? scale * qk : -INFINITY", "scale * qk + (token < num_tokens ? 0 : -INFINITY)"),
        "not masked: Scores from num_tokens on must be −INFINITY, because no token is in these slots.",
        ("token < num_tokens ? scale * qk : -INFINITY", "scale * qk"),
        "scores of 0: A score of 0 gives the weight exp(0 − m). A slot without a token needs the score −INFINITY.",
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
    with_gaps(_MERGE_PARTITIONS, Gap("float m = ", "out[d] = ", "compute out[d].")),
    [
        _merge("[0], ls = [2]", [0.0], [2.0]),
        _merge("[0, 0], ls = [1, 3]", [0.0, 0.0], [1.0, 3.0]),
        _merge("[0, 2], ls = [1, 3]", [0.0, 2.0], [1.0, 3.0]),
        _merge("[200, 199, 150], ls = [2, 1, 3]", [200.0, 199.0, 150.0], [2.0, 1.0, 3.0]),
        _merge("[1, -inf], ls = [2, 0]", [1.0, -INF], [2.0, 0.0]),
        _merge("[-inf, -inf], ls = [0, 0]", [-INF, -INF], [0.0, 0.0]),
    ],
    [
        "nothing yet: The kernel writes nothing yet. Find the largest mᵢ first: every other line needs it.",
        ("out[d] = l > 0 ? acc / l : 0;", ""),
        "nothing rescaled: Each partition is relative to its own maximum. Multiply l and acc by exp(mᵢ − m) before you "
        "add them.",
        ("l += expf(ms[i] - m) * ls[i]", "l += ls[i]"),
        ("acc += expf(ms[i] - m) * accs", "acc += accs"),
        "only acc rescaled: acc is rescaled and l is not. Both are relative to mᵢ.",
        ("l += expf(ms[i] - m) * ls[i]", "l += ls[i]"),
        "the mean of the outputs: The result is the mean of the partitions' outputs. The weight of a partition is "
        "exp(mᵢ − m) · lᵢ.",
        ("l += expf(ms[i] - m) * ls[i]", "l += 1"),
        ("acc += expf(ms[i] - m) * accs[i * D + d]", "acc += accs[i * D + d] / ls[i]"),
        "not divided: The sum is not divided by l yet.",
        ("l > 0 ? acc / l : 0", "acc"),
        "no maximum: exp(200) overflows. Subtract the largest mᵢ of all partitions, not 0.",
        ("m = fmaxf(m, ms[i])", "m = 0"),
        "NaN without keys: No partition has a token, so m is −INFINITY and l is 0. (−inf) − (−inf) and 0 / 0 are both "
        "NaN. Write 0 in this case.",
        ("    if (m == -INFINITY) m = 0;\n", ""),
        ("l > 0 ? acc / l : 0", "acc / l"),
        "one row for all: Every partition used the acc of partition 0. Row i begins at i · D.",
        ("accs[i * D + d]", "accs[d]"),
    ],
    "lesson 3's merge, for any number of partitions.",
)


def _decode(
    what: str, lengths: list[int], tables: list[list[int]], scale: float = 0.25, unused: float = torch.nan
) -> Case:
    """A launch on blocks of 16 tokens. The slots without a token hold `unused`."""
    keys, values = torch.full((2, 6, 16, 32), unused)
    for b, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        tokens = torch.arange(length)
        slots = torch.tensor(table)[tokens // 16], tokens % 16
        keys[slots] = small_numbers(length + b, 32)[b:] / 4 * (1 + tokens[:, None] / 16)
        values[slots] = small_numbers(length + 3 * b, 32)[3 * b :]
    k = keys.view(6, 16, 8, 4).transpose(1, 2).contiguous()
    q, v = small_numbers(len(lengths), 32) / 4, values.transpose(1, 2).contiguous()
    block_tables, seq_lens = (torch.tensor(x, dtype=torch.int32) for x in (tables, lengths))
    shown = f"seq_lens = {lengths}, tables = {tables}, scale = {scale:g}: {what}"
    args = (q, k, v, block_tables, seq_lens, torch.Size([len(lengths), 32]), len(tables[0]), scale)
    return checked(shown, len(lengths), 32, *args)


_PAGED_DECODE = device_code("paged_decode.cu")
_MAXIMUM = "m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, distance));"
_SUM = "l += __shfl_xor_sync(ALL_LANES, l, distance);"
_VALUES = "for (int j = 0; j < length; ++j) acc"

PAGED_DECODE = CudaExercise(
    "paged_decode",
    _PAGED_DECODE,
    with_gaps(
        _PAGED_DECODE,
        Gap(
            "const int* table = ",
            "out[seq * 32",
            "1. For each block: the 16 scores, as in qk_block, to `weights`. m: the largest score, for all lanes.\n"
            "2. weights[j] becomes exp(score − m). l: the sum of all weights, for all lanes.\n"
            "3. acc: the sum of weight · value, for element `lane` of the head. Write out.\n"
            "__syncwarp() must separate a write to `weights` from another lane's read.",
        ),
    ),
    [
        _decode("one block, full", [16], [[0]]),
        _decode("the table names block 2", [16], [[2]]),
        _decode("the same with another scale", [16], [[2]], 0.5),
        _decode("11 slots of the block are unused and hold NaN", [5], [[2]]),
        _decode("11 slots of the block are unused and hold 1e30", [5], [[2]], unused=1e30),
        _decode("three blocks, the last one not full", [40], [[3, 4, 1]]),
        _decode("no token at all", [0], [[0]]),
        _decode("two sequences", [16, 23], [[3, 0], [1, 4]]),
    ],
    [
        "nothing yet: out is not written yet. Start with step 1: copy your qk_block, and let the block table choose "
        "the block.",
        ("out[seq * 32 + lane] = length > 0 ? acc / l : 0;", ""),
        "block table ignored: Token j is in block j / 16 of its *sequence*. table[j / 16] says which block of the "
        "cache that is.",
        ("table[first / 16]", "first / 16"),
        ("table[j / 16]", "j / 16"),
        "table of the first sequence: Every sequence has its own row of the block table. Row `seq` begins at seq · "
        "max_blocks.",
        ("tables + seq * max_blocks", "tables"),
        "the first query: Every sequence used the query of sequence 0. The vecs of query `seq` begin at seq · 8.",
        ("q[seq * 8 + vec]", "q[vec]"),
        "half of the product: The scores are half of q·k. Add the half of the other thread of the group, as in "
        "qk_block.",
        ("        qk += __shfl_xor_sync(ALL_LANES, qk, 1);\n", ""),
        "no scale: The scores lack the factor `scale`.",
        ("? scale * qk", "? qk"),
        "not masked: An unused slot may hold anything, and its score became the maximum. Give it the score −INFINITY "
        "with ?:, before you take the maximum.",
        ("first + token < length ? scale * qk : -INFINITY", "scale * qk"),
        "a maximum per lane: Each lane used its own maximum, so the weights do not fit together. Take the maximum of "
        "all lanes with shuffles.",
        (f"    for (int distance = 16; distance > 0; distance /= 2) {_MAXIMUM}\n", ""),
        "a sum per lane: Each lane divided by the sum of its own weights. Add the sums of all lanes with shuffles.",
        (f"    for (int distance = 16; distance > 0; distance /= 2) {_SUM}\n", ""),
        "sum in lane 0: __shfl_down_sync leaves the whole sum in lane 0 only, and every lane divides by it. Use "
        "__shfl_xor_sync.",
        (_SUM, "l += __shfl_down_sync(ALL_LANES, l, distance);"),
        "not divided: The weights do not sum to 1. Divide acc by l.",
        ("acc / l : 0", "acc : 0"),
        "0 divided by 0: A sequence without tokens has l = 0, and 0 / 0 is NaN. Write 0 in this case.",
        ("length > 0 ? acc / l : 0", "acc / l"),
        "NaN times 0: The weight of an unused slot is 0, but 0 · NaN is NaN. End the loop over values at `length`.",
        (_VALUES, "for (int j = 0; j < (length + 15) / 16 * 16; ++j) acc"),
        ("for (int j = lane; j < length; j += 32) {", "for (int j = lane; j < (length + 15) / 16 * 16; j += 32) {"),
        "values of a key layout: The values are read as [token][element]. Here a row holds one element for 16 tokens, "
        "so the index in a block is lane · 16 + j % 16.",
        ("(table[j / 16] * 32 + lane) * 16 + j % 16", "(table[j / 16] * 16 + j % 16) * 32 + lane"),
    ],
    "the scores, the sums of a warp and the block table make a whole kernel: one warp reads each key and value once.",
)

EXERCISES = [WARP_SUM, BLOCK_MAX, QK_BLOCK, MERGE_PARTITIONS, PAGED_DECODE]
