"""Exercises of lesson 7: the merge of splits, the kernel that merges, their number, and equal ranges of a batch."""

import math

import torch
from torch import Tensor

from pagewise.exercises.code import Gap, device_code, with_gaps
from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.triton import TritonExercise, launching
from pagewise.exercises.values import small_numbers, text
from pagewise.tools.launch import launch


def merge_splits(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [D], lse) over all keys from the results of n splits: outs [n, D], each normalised, and lses [n].

    A split that saw no key has lse −inf. Do not read its `out`: it may hold NaN. If no split saw a key, out is 0 and
    lse is −inf. Scores may be large: lse = 200 is an ordinary number.
    """
    m = lses.max()
    weights = torch.exp(lses - torch.where(m == -torch.inf, 0.0, m))  # (−inf) − (−inf) would be NaN
    l = weights.sum()
    seen = torch.where(weights[:, None] > 0, outs, 0.0)
    return weights @ seen / torch.where(l == 0, 1.0, l), m + torch.log(l)


def _lses(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


_WEIGHTS = "torch.exp(lses - torch.where(m == -torch.inf, 0.0, m))"

MERGE_SPLITS = python_exercise(
    merge_splits,
    [
        call(torch.tensor([[5.0]]), _lses(2.0)),
        call(torch.tensor([[4.0], [8.0]]), _lses(0.0, math.log(3.0))),
        call(torch.tensor([[4.0, 1.0], [8.0, 3.0]]), _lses(1.0, 1.0 + math.log(3.0))),
        call(small_numbers(3, 2), _lses(2.0, 1.0, 0.5)),
        call(torch.tensor([[4.0], [0.0]]), _lses(1.0, -math.inf)),
        call(torch.tensor([[4.0], [8.0]]), _lses(200.0, 199.0)),
        call(torch.tensor([[4.0], [math.nan]]), _lses(1.0, -math.inf)),
        call(torch.zeros(2, 1), _lses(-math.inf, -math.inf)),
    ],
    [
        "the mean: That is the mean of the splits. The weight of a split is exp(its lse).",
        (_WEIGHTS, "(lses > -torch.inf).float()"),
        ("m + torch.log(l)", "torch.logsumexp(lses, 0)"),
        "lse as a weight: lse is a logarithm. The weight of a split is exp(lse), not lse.",
        (_WEIGHTS, "torch.where(lses > -torch.inf, lses, 0.0)"),
        ("m + torch.log(l)", "torch.logsumexp(lses, 0)"),
        "not divided: Divide the weighted sum by the sum of the weights.",
        (" / torch.where(l == 0, 1.0, l)", ""),
        "no maximum: exp(200) overflows. First subtract the largest lse, as softmax does.",
        ("lses.max()", "torch.zeros(())"),
        "the lse without m: Your logarithm is relative to m. The lse of all keys is m + log l.",
        ("m + torch.log(l)", "torch.log(l)"),
        "the largest lse: That is the lse of the heaviest split alone. All splits together have m + log l.",
        ("m + torch.log(l)", "m"),
        "the sum of the lses: Do not add logarithms. Add exp(lse), then take the logarithm.",
        ("m + torch.log(l)", "lses.sum()"),
        "exp overflows: exp(200) is infinite in float32, and infinite / infinite is NaN. Subtract the largest lse "
        "before you call exp.",
        ("torch.exp(lses - torch.where(m == -torch.inf, 0.0, m))", "torch.exp(lses)"),
        ("m + torch.log(l)", "lses.logsumexp(dim=0)"),
        "NaN times 0: The empty split has weight 0, and 0 · NaN is NaN. Do not read its output.",
        ("torch.where(weights[:, None] > 0, outs, 0.0)", "outs"),
        "NaN without keys: No split saw a key, so m is −inf, and (−inf) − (−inf) is NaN. Subtract 0 there.",
        ("torch.where(m == -torch.inf, 0.0, m)", "m"),
        ("torch.where(l == 0, 1.0, l)", "l"),
        "0 / 0: No split saw a key, and 0 / 0 is NaN. The output must be 0.",
        ("torch.where(l == 0, 1.0, l)", "l"),
    ],
    "one output and one number per split are enough to merge exactly.",
    imports="import torch\nfrom torch import Tensor",
    start="return outs.mean(dim=0), lses.logsumexp(dim=0)  # yours",
)


def _partials(what: str, m: list[list[float]], l: list[list[float]], acc: list[list[float]], D: int = 2) -> Case:
    """Rows of splits, whose acc repeats a number and its negative. A kernel must not write past the outputs."""
    shown = [[[a, -a] * (D // 2) for a in row] for row in acc]

    def run(kernel: object, device: torch.device) -> object:
        m_, l_, first = (torch.tensor(each, device=device) for each in (m, l, acc))
        signs = torch.tensor([1.0, -1.0], device=device).repeat(D // 2)
        written = m_.new_full((len(m) + 1, D), -7.0)  # its flat view shares its memory
        parts = (each.flatten() for each in (m_, l_, first[..., None] * signs, written))
        launch(kernel, (len(m),), *parts, m_.shape[1], outputs=(written,), D=D)
        return {"out": written[: len(m)], "behind out, untouched": written[len(m) :]}

    return launching(f"m = {text(m)}, l = {text(l)}, acc = {text(shown)}{what}", run)


_KERNEL = device_code("merge_kernel.py")

MERGE_KERNEL = TritonExercise(
    "merge_kernel",
    _KERNEL,
    with_gaps(
        _KERNEL,
        Gap(
            "m_new = tl",
            "m = m_new",
            "each split has a maximum of its own",
            "l = l + l_i\nacc = acc + acc_i\nm = m_i",
        ),
    ),
    [
        _partials("", [[1.0]], [[2.0]], [[6.0]]),
        _partials("", [[0.0, 1.0]], [[1.0, 1.0]], [[4.0, 8.0]]),
        _partials("", [[1.0, 0.0]], [[1.0, 2.0]], [[4.0, 8.0]]),
        _partials("", [[0.0, 2.0, 1.0]], [[1.0, 1.5, 2.0]], [[4.0, 8.0, 1.0]]),
        _partials("", [[200.0, 199.0]], [[1.0, 2.0]], [[4.0, 8.0]]),
        _partials(" (the first split is empty)", [[-math.inf, 1.0]], [[0.0, 2.0]], [[0.0, 6.0]]),
        _partials(" (the last split is empty)", [[1.0, -math.inf]], [[2.0, 0.0]], [[6.0, 0.0]]),
        _partials(" (all splits are empty)", [[-math.inf, -math.inf]], [[0.0, 0.0]], [[0.0, 0.0]]),
        _partials(", D = 4", [[0.0, 1.0], [3.0, 2.0]], [[1.0, 1.0], [2.0, 1.0]], [[4.0, 8.0], [2.0, 6.0]], D=4),
    ],
    [
        "one maximum for all: The splits have different maxima, so their l and acc are on different scales. Before you "
        "add, multiply by exp(m of the part − the larger m).",
        ("l = l * ours + l_i * theirs", "l = l + l_i"),
        ("acc = acc * ours + acc_i * theirs", "acc = acc + acc_i"),
        "l keeps its scale: acc is on the new scale and l is not. Both need the same two factors.",
        ("l = l * ours + l_i * theirs", "l = l + l_i"),
        "acc keeps its scale: l is on the new scale and acc is not. Both need the same two factors.",
        ("acc = acc * ours + acc_i * theirs", "acc = acc + acc_i"),
        "the new split keeps its scale: What you have so far shrinks, but the split that arrives may be the smaller "
        "one. It needs a factor too: exp(m_i − m_new).",
        ("l_i * theirs", "l_i"),
        ("acc_i * theirs", "acc_i"),
        "the sum so far keeps its scale: The split that arrives shrinks, but the sum so far may be the smaller one. It "
        "needs a factor too: exp(m − m_new).",
        ("l * ours", "l"),
        ("acc * ours", "acc"),
        "the other way round: Your factors grow. The factor of a part is exp(its m − the larger m), at most 1.",
        ("tl.exp(m - m_safe), tl.exp(m_i - m_safe)", "tl.exp(m_safe - m), tl.exp(m_safe - m_i)"),
        "no maximum: exp(200) is infinite, and infinite / infinite is NaN. Subtract the larger of the two maxima.",
        ('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_safe = 0.0"),
        ("l = l * ours + l_i * theirs", "l = l + l_i * theirs"),
        ("acc = acc * ours + acc_i * theirs", "acc = acc + acc_i * theirs"),
        "NaN between empty splits: No split has had a key so far. Then m_new is −inf, and (−inf) − (−inf) is NaN: "
        "subtract 0 in place of such a maximum.",
        ('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_safe = m_new"),
        "not divided: acc is a sum of weighted values. The output is acc / l, and 0 where l is 0.",
        ("acc / tl.where(l == 0.0, 1.0, l)", "acc"),
        "0 / 0: A row without keys has l = 0, and 0 / 0 is NaN. Divide by 1 there.",
        ("acc / tl.where(l == 0.0, 1.0, l)", "acc / l"),
    ],
    "this is the second kernel of Flash-Decoding. It reads each partial result once, in the order of the keys.",
)


def enough_splits(num_programs: int, bandwidth: int, latency: float, in_flight: int, max_splits: int) -> int:
    """Return the smallest number of splits, from 1 to max_splits, with which the memory is never idle.

    Cut in s, each of `num_programs` programs becomes s programs. All of them run at the same time, and each has
    `in_flight` bytes on the way. The memory delivers `bandwidth` bytes per µs, `latency` µs after a request. Return
    max_splits if no number up to it is enough.
    """
    needed = bandwidth * latency  # bytes that must be on the way: Little's law
    return min(max_splits, max(1, math.ceil(needed / (num_programs * in_flight))))


_ENOUGH = "math.ceil(needed / (num_programs * in_flight))"

ENOUGH_SPLITS = python_exercise(
    enough_splits,
    [
        call(1, 8, 1.0, 2, 16),
        call(1, 8, 2.0, 2, 16),
        call(2, 8, 1.0, 2, 16),
        call(2, 10, 1.0, 2, 16),
        call(4, 8, 0.5, 4, 16),
        call(64, 8, 1.0, 2, 16),
        call(1, 64, 1.0, 2, 16),
        call(2, 2_039_000, 0.8, 65_536, 1024),
    ],
    [
        "until all SMs are taken: The number of splits that you may use is not the number that you need. Count the "
        "bytes on the way: how many does the memory need, and how many does one split of all programs bring?",
        (f"max(1, {_ENOUGH})", "max_splits"),
        "latency left out: The bandwidth says how many bytes arrive in one µs. A byte is on the way for `latency` µs.",
        ("bandwidth * latency", "bandwidth"),
        "latency divides: The longer a byte is on the way, the more bytes must be on the way: multiply by the latency.",
        ("bandwidth * latency", "bandwidth / latency"),
        "one program: All programs request at the same time. Count the bytes of num_programs · s programs.",
        ("num_programs * in_flight", "in_flight"),
        "rounded down: A part of a split is still needed: round up.",
        (_ENOUGH, "int(needed / (num_programs * in_flight))"),
        "no split at all: If the programs are enough uncut, the number of splits is 1.",
        (f"max(1, {_ENOUGH})", f"(0 if num_programs * in_flight > needed else {_ENOUGH})"),
        "more than there are: There are at most max_splits tiles to share out.",
        (f"min(max_splits, max(1, {_ENOUGH}))", f"max(1, {_ENOUGH})"),
    ],
    "two KV heads on an A100 need 13 splits: 26 programs on 108 SMs. More splits only leave more to merge.",
    imports="import math",
    start="return max_splits  # yours",
)


def pieces_of_program(p: int, num_programs: int, tiles: list[int]) -> list[tuple[int, int, int]]:
    """Return the work of program p of a ragged batch: a list of (item, first tile, one past the last tile).

    Item i has tiles[i] tiles, and tiles count from 0 in each item. All items laid end to end have W tiles. Program p
    takes the tiles from W · p // num_programs up to W · (p + 1) // num_programs, from one item or several. No piece is
    empty.
    """
    W, begin, pieces = sum(tiles), 0, []
    start, stop = W * p // num_programs, W * (p + 1) // num_programs
    for item, count in enumerate(tiles):
        first, last = max(start, begin), min(stop, begin + count)
        if first < last:
            pieces.append((item, first - begin, last - begin))
        begin += count
    return pieces


_RANGE = "max(start, begin), min(stop, begin + count)"

PIECES_OF_PROGRAM = python_exercise(
    pieces_of_program,
    [
        call(0, 1, [4]),
        call(1, 2, [4]),
        call(1, 2, [2, 2]),
        call(0, 3, [8]),
        call(1, 3, [8]),
        call(0, 2, [1, 5]),
        call(1, 4, [3, 1, 8]),
        call(0, 2, [2, 0, 4]),
        call(3, 8, [2, 1]),
        call(0, 1, [1, 2, 1]),
    ],
    [
        "each item by itself: You cut every item into num_programs pieces. Lay all items end to end, and cut the "
        "whole once.",
        (_RANGE, "begin + count * p // num_programs, begin + count * (p + 1) // num_programs"),
        "the first item: That is all of item 0, for every p. Lay all items end to end, and give each program its range "
        "of the tiles.",
        ("return pieces", "return [(0, 0, tiles[0])]"),
        "one item only: A range may continue into the next item, and into several more.",
        ("return pieces", "return pieces[:1]"),
        "empty pieces: An item without a tile for this program is not in the list. Append a piece only if its first "
        "tile comes before its end.",
        (
            "        if first < last:\n            pieces.append((item, first - begin, last - begin))",
            "        pieces.append((item, first - begin, last - begin))",
        ),
        "tiles of the batch: You count tiles from the start of the batch. Count them from the start of their item.",
        ("first - begin, last - begin", "first, last"),
        "rounded up: With ⌈W / n⌉ tiles for each, the last programs have fewer tiles or none. Use W · p // n.",
        ("W * p // num_programs", "-(-W // num_programs) * p"),
        ("W * (p + 1) // num_programs", "-(-W // num_programs) * (p + 1)"),
        "rounded down: With ⌊W / n⌋ tiles for each, no program has the batch's last tiles. Use W · p // n.",
        ("W * p // num_programs", "W // num_programs * p"),
        ("W * (p + 1) // num_programs", "W // num_programs * (p + 1)"),
        "empty pieces: An item without tiles has no piece. Leave it out.",
        ("if first < last", "if first < last or count == 0 and start <= begin < stop"),
        "the last tile, not one past it: The third number is one past the last tile, as in a range.",
        ("last - begin)", "last - begin - 1)"),
    ],
    "every program has the same work, up to one tile, for any lengths.",
    start="return [(0, 0, tiles[0])]  # yours",
)

EXERCISES = [MERGE_SPLITS, MERGE_KERNEL, ENOUGH_SPLITS, PIECES_OF_PROGRAM]
