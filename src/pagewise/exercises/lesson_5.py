"""Exercises of lesson 5: a sum in a warp, a coalesced kernel, a whole paged kernel of one warp, and a race."""

import torch

import cudascope
from cudascope import CudaKernel
from pagewise.exercises.code import Gap, device_code, edited, with_gaps
from pagewise.exercises.cuda import CudaExercise, checked, reads_of
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
            "add the 32 sums of the lanes in five steps, with\n"
            "__shfl_down_sync(ALL_LANES, sum, distance).\n"
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


_COALESCED = device_code("coalesced_scores.cu")
_TASK = """    // yours: the scores are right, but reading K is expensive. All bytes of K that move must be
    // used, in at most 48 requests for 90 tokens. A Vec can be read with one load:
    // *reinterpret_cast<const Vec*>(address).
"""
_TWO_THREADS = _COALESCED[_COALESCED.index("    const int member") :]
_ONE_THREAD = """    const int token = threadIdx.x;
    if (token >= length) return;
    const __half* key = k + (table[token / P] * P + token % P) * D;
    float qk = 0;
    for (int d = 0; d < D; ++d) {
        const __half element = key[d];
        qk += float(q[d]) * float(element);
    }
    scores[token] = qk;
}"""
MOST_REQUESTS = 48  # of K, for 96 slots: 16 bytes for each lane


def _keys(length: int) -> tuple[object, ...]:
    """Return the arguments of a launch on `length` tokens in blocks that lie in no order."""
    numbers = torch.arange(128 * 16 * 9)
    k = (numbers * 7 % 11 - 5).view(9, 16, 128).half() / 4
    table = torch.tensor([7, 1, 4, 0, 8, 3], dtype=torch.int32)
    return small_numbers(128).half() / 4, k, table, torch.Size([length]), length


def _reads(what: str, length: int) -> Case:
    """Return a case that counts the requests and the sectors of K."""

    def run(kernel: CudaKernel) -> object:
        q, k, table, shape, _ = _keys(length)
        with cudascope.observe() as report:
            kernel[1, 128](q, k, table, torch.zeros(shape), length)
        reads = reads_of(report.launches[0], "k", itemsize=2)
        used = round(100 * reads.bytes / (32 * reads.pieces)) if reads.pieces else 0
        return {"used % of the bytes that move:": used, "requests beyond 48:": max(reads.requests - MOST_REQUESTS, 0)}

    return Case(what, run)


COALESCED_SCORES = CudaExercise(
    "coalesced_scores",
    _COALESCED,
    edited(
        _COALESCED,
        (_TWO_THREADS, _TASK + _ONE_THREAD),
    ),
    [
        checked("16 tokens: the scores", 1, 128, *_keys(16)),
        checked("90 tokens: the scores", 1, 128, *_keys(90)),
        _reads("90 tokens: how K is read", 90),
    ],
    [
        "a thread for each key: Neighbouring lanes read addresses that are 256 bytes apart, 2 bytes at each. Let two "
        "threads share a key, and let each of them load 16 bytes at once.",
        (_TWO_THREADS, _ONE_THREAD),
        "half sectors: A group of two threads reads 16 neighbouring bytes, which is half of a sector. Let each thread "
        "load 16 bytes: 8 elements.",
        ("alignas(16) Vec { __half data[8]; }", "alignas(8) Vec { __half data[4]; }"),
        ("d = 8 * member; d < D; d += 16", "d = 4 * member; d < D; d += 8"),
        ("i < 8; ++i", "i < 4; ++i"),
        "halves of a key: Each thread reads its own half of the key, so its 16 bytes are alone in their sector. The "
        "two threads of a key must read neighbouring vecs in each turn.",
        ("d = 8 * member; d < D; d += 16", "d = 64 * member; d < 64 * member + 64; d += 8"),
        "element by element: Every sector is used whole, but a lane loads only 2 bytes, so K takes many requests. Load "
        "16 bytes with one instruction, as a Vec.",
        (
            _TWO_THREADS,
            """    const int lane = threadIdx.x % 32;
    for (int token = threadIdx.x / 32; token < length; token += blockDim.x / 32) {
        const __half* key = k + (table[token / P] * P + token % P) * D;
        float qk = 0;
        for (int d = lane; d < D; d += 32) {
            const __half element = key[d];
            qk += float(q[d]) * float(element);
        }
        for (int distance = 16; distance > 0; distance /= 2) qk += __shfl_xor_sync(0xffffffff, qk, distance);
        if (lane == 0) scores[token] = qk;
    }
}""",
        ),
        "half of the product: The score is the sum of one thread only. The other thread of the key has the rest, and "
        "__shfl_xor_sync(0xffffffff, qk, 1) brings it.",
        ("        qk += __shfl_xor_sync(0xffffffff, qk, 1);\n", ""),
        "both read all: The scores are too large, because both threads multiply all vecs. Thread `member` begins with "
        "vec `member`, and then takes every second one.",
        ("d = 8 * member; d < D; d += 16", "d = 0; d < D; d += 8"),
        "table ignored: Token j is in block j / 16 of its *sequence*. The table says which block of the cache this is.",
        ("table[token / P] * P", "token / P * P"),
        "the loop ends too early: 128 threads have 64 keys at a time. A loop must give them the next 64 keys.",
        ("token += blockDim.x / 2", "token += 4096"),
    ],
    "two neighbouring threads read a whole sector, 16 bytes each, and the cache stays as lesson 4 left it.",
)


def _decode(
    what: str,
    lengths: list[int],
    tables: list[list[int]],
    scale: float = 0.25,
    unused: float = torch.nan,
    compared: tuple[str, ...] = ("m", "l", "out"),
) -> Case:
    """Return a checked launch on blocks of 16 tokens. The slots without a token hold `unused`."""
    keys, values = torch.full((2, 6, 16, 32), unused)
    for b, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        tokens = torch.arange(length)
        slots = torch.tensor(table)[tokens // 16], tokens % 16
        keys[slots] = small_numbers(length + b, 32)[b:] / 4 * (1 + tokens[:, None] / 16)
        values[slots] = small_numbers(length + 3 * b, 32)[3 * b :]
    n = len(lengths)
    q = small_numbers(n, 32) / 4
    block_tables, seq_lens = (torch.tensor(x, dtype=torch.int32) for x in (tables, lengths))

    def run(kernel: CudaKernel) -> object:
        results = {"m": torch.full((n,), torch.nan), "l": torch.full((n,), torch.nan)}
        results["out"] = torch.full((n, 32), torch.nan)
        inputs = (x.clone() for x in (q, keys, values, block_tables, seq_lens))
        with cudascope.check(outputs=[results[name] for name in compared]):
            kernel[n, 32](*inputs, *results.values(), len(tables[0]), scale)
        return {name: results[name] for name in compared}

    return Case(f"seq_lens = {lengths}, tables = {tables}, scale = {scale:g}: {what}", run)


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
            "const int token = ",
            "out[seq * 32",
            "1. For each block: the score of each of its 16 tokens, to `weights`. Two lanes share a\n"
            "   token and read neighbouring vecs. m: the largest score, for all lanes.\n"
            "2. weights[j] becomes exp(score − m). l: the sum of all weights, for all lanes. Write m and l.\n"
            "3. acc: the sum of weight · value, for element `lane` of the head. Write out.\n"
            "__syncwarp() must separate a write to `weights` from another lane's read.",
        ),
    ),
    [
        _decode("m and l of one full block", [16], [[0]], compared=("m", "l")),
        _decode("one full block", [16], [[0]]),
        _decode("the table names block 2", [16], [[2]]),
        _decode("the same with another scale", [16], [[2]], 0.5),
        _decode("11 slots of the block are unused and hold NaN", [5], [[2]]),
        _decode("11 slots of the block are unused and hold 1e30", [5], [[2]], unused=1e30),
        _decode("three blocks, the last one not full", [40], [[3, 4, 1]]),
        _decode("no token at all", [0], [[0]]),
        _decode("two sequences", [16, 23], [[3, 0], [1, 4]]),
    ],
    [
        "nothing yet: Nothing is written yet. Start with step 1, and let the block table choose the block: m alone can "
        "be right before the rest is there.",
        ("    if (lane == 0) m_out[seq] = m, l_out[seq] = l;\n", ""),
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
        "half of the product: The scores are half of q·k. __shfl_xor_sync(ALL_LANES, qk, 1) brings the half of the "
        "other lane of the token.",
        ("        qk += __shfl_xor_sync(ALL_LANES, qk, 1);\n", ""),
        "no scale: The scores lack the factor `scale`.",
        ("? scale * qk", "? qk"),
        "not masked: An unused slot may hold anything, and its score became the maximum. Give it the score −INFINITY "
        "with ?:, before you take the maximum.",
        ("first + token < length ? scale * qk : -INFINITY", "scale * qk"),
        "a maximum per lane: Each lane used its own maximum, so the weights do not fit together. Take the maximum of "
        "all lanes with shuffles.",
        (f"    for (int distance = 16; distance > 0; distance /= 2) {_MAXIMUM}\n", ""),
        "a sum per lane: Each lane has the sum of its own weights. Add the sums of all lanes with shuffles.",
        (f"    for (int distance = 16; distance > 0; distance /= 2) {_SUM}\n", ""),
        "sum in lane 0: __shfl_down_sync leaves the whole sum in lane 0 only, and every lane divides by it. Use "
        "__shfl_xor_sync.",
        (_SUM, "l += __shfl_down_sync(ALL_LANES, l, distance);"),
        "not divided: m and l are right, but the weights do not sum to 1. Divide acc by l.",
        ("acc / l : 0", "acc : 0"),
        "0 divided by 0: A sequence without tokens has l = 0, and 0 / 0 is NaN. Write 0 in this case.",
        ("length > 0 ? acc / l : 0", "acc / l"),
        "NaN times 0: The weight of an unused slot is 0, but 0 · NaN is NaN. End the loop over values at `length`.",
        (_VALUES, "for (int j = 0; j < (length + 15) / 16 * 16; ++j) acc"),
        ("for (int j = lane; j < length; j += 32) {", "for (int j = lane; j < (length + 15) / 16 * 16; j += 32) {"),
        "values of another layout: The values are read as [element][token]. Here the elements of a token are side by "
        "side, so the index in a block is j % 16 · 32 + lane.",
        ("(table[j / 16] * 16 + j % 16) * 32 + lane", "(table[j / 16] * 32 + lane) * 16 + j % 16"),
    ],
    "one warp reads each key and value once, in whole sectors, from the cache as lesson 4 left it.",
)

EXERCISES = [WARP_SUM, COALESCED_SCORES, PAGED_DECODE, BLOCK_MAX]
