"""Exercises of lesson 8: unsafe rows, a safe φ, a maximum that rises lazily, and rings of buffers."""

import math

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise

INF, NAN = math.inf, math.nan


def rows_to_recompute(scores: Tensor, phi: float, low: float, high: float) -> Tensor:
    """Return the rows of scores [rows, S] for which the unified maximum φ is unsafe: [rows] of bool.

    The largest score m of a row decides. A row is safe if low < m − φ < high. A score of −inf is a masked key. A row
    that sees no key is safe. A row with NaN is unsafe.
    """
    m = scores.amax(dim=1)
    inside = (low < m - phi) & (m - phi < high)
    return ~inside & (m != -torch.inf)


_INSIDE = "(low < m - phi) & (m - phi < high)"

ROWS_TO_RECOMPUTE = python_exercise(
    rows_to_recompute,
    [
        call(torch.tensor([[0.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[4.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[6.0], [9.0]]), 6.0, -3.0, 3.0),
        call(torch.tensor([[-4.0], [2.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[-4.0], [2.5]]), 0.0, -5.0, 2.0),
        call(torch.tensor([[-9.0, 1.0], [5.0, 1.0]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[-INF, 1.0], [-INF, 9.0], [-INF, -INF]]), 0.0, -3.0, 3.0),
        call(torch.tensor([[7.0, 6.0], [NAN, 6.0]]), 6.0, -3.0, 3.0),
    ],
    [
        "every score must stay: A score far below the largest score of its row has no visible weight, for any φ. "
        "Compare only the largest score of each row.",
        (_INSIDE, "((scores == -INF) | (low < scores - phi) & (scores - phi < high)).all(dim=1)"),
        "one verdict for all rows: Each row has its own largest score. Take the maximum over dim=1.",
        (_INSIDE, "(low < scores.max() - phi) & (scores.max() - phi < high)"),
        "NaN passes: NaN is neither ≤ low nor ≥ high, so this row counts as safe. Test whether the row is inside the "
        "band, and negate the result.",
        (_INSIDE, "~((m - phi <= low) | (m - phi >= high))"),
        "the edges pass: The ends of the band are not safe: low < m − φ < high. Look at the comparisons.",
        (_INSIDE, "(low <= m - phi) & (m - phi <= high)"),
        "only the upper edge: If all scores of a row are far below φ, all its weights underflow. Compare with the "
        "lower end of the band too.",
        (_INSIDE, "m - phi < high"),
        "a band like a radius: The ends of the band may have different distances from φ. Compare with both.",
        (_INSIDE, "(m - phi).abs() < high"),
        "a row without keys: A row that sees no key has m = −∞, and its output is 0 anyway. Exclude this row.",
        (" & (m != -torch.inf)", ""),
        "rows with a masked key: One masked key does not make a row safe. Exclude only rows without a key.",
        ("(m != -torch.inf)", "(scores != -torch.inf).all(dim=1)"),
        "φ forgotten: The band limits m − φ, and this answer compares m. Subtract φ.",
        (" - phi", ""),
        "the other way round: The result marks the rows that are safe. Negate it.",
        ("~inside & (m != -torch.inf)", "inside | (m == -torch.inf)"),
    ],
    "one number per row decides, so the kernel need not compare every score.",
    imports="import torch\nfrom torch import Tensor",
    start="return (scores - phi >= high).any(dim=1)  # yours",
)


def safe_phi(softcap: float, low: float, high: float) -> float | None:
    """Return a φ for all scores of a model with this softcap, or None if every φ is unsafe.

    All scores are between −softcap and softcap, ends included. A score s is safe if low < s − φ < high. Among several
    safe φ, return the middle one. A softcap of 0 means no softcap.
    """
    if softcap == 0 or 2 * softcap >= high - low:
        return None
    return (-low - high) / 2


_NARROW = "2 * softcap >= high - low"

SAFE_PHI = python_exercise(
    safe_phi,
    [
        call(2.0, -3.0, 3.0),
        call(4.0, -3.0, 3.0),
        call(3.0, -3.0, 3.0),
        call(7.0, -3.0, 3.0),
        call(30.0, -57.0, 63.0),
        call(50.0, -57.0, 63.0),
        call(59.0, -57.0, 63.0),
        call(60.0, -57.0, 63.0),
        call(2.0, -2.0, 10.0),
        call(0.0, -57.0, 63.0),
    ],
    [
        "the largest score: This φ is the largest possible score. The smallest score is then 2 · softcap "
        "below φ, and a row may see only that score. Look for the φ in the middle.",
        ("(-low - high) / 2", "softcap"),
        "zero: φ = 0 is the middle of the scores. The band is not symmetric, so its middle is not 0. Put the middle of "
        "the scores on the middle of the band.",
        ("(-low - high) / 2", "0.0"),
        "the paper's a: This φ is the smallest possible score. The largest score is then 2 · softcap above φ. Look for "
        "the φ in the middle.",
        ("(-low - high) / 2", "-softcap"),
        "the other sign: The middle of s − φ is −φ, because the middle of the scores is 0. Change the sign of φ.",
        ("(-low - high) / 2", "(low + high) / 2"),
        "half of the range: The scores lie between −softcap and softcap. Compare the whole span with the band.",
        (_NARROW, "softcap >= high - low"),
        "only the upper end: Both ends limit the scores. Compare the span of the scores with the span of the band.",
        (_NARROW, "softcap >= high"),
        "the ends are safe: The ends of the band are not safe: low < s − φ < high. A span as wide as the band has no "
        "safe φ. Look at the comparison.",
        (_NARROW, "2 * softcap > high - low"),
        "never None: Some spans are wider than the band, and then no φ is safe. Compare the spans first.",
        ("if softcap == 0 or 2 * softcap >= high - low:", "if softcap == 0:"),
        "zero bounds nothing: A softcap of 0 means no softcap, so the scores have no bound. Handle 0 first.",
        ("softcap == 0 or ", ""),
    ],
    "a softcap below half of the band needs no calibration and no check.",
    start="return softcap  # yours: lesson 3's choice, the largest possible score",
)


def lazy_fold(
    m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, values: Tensor, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (m, l, acc) of one row after a tile of scores [n] and values [n, D]. acc is [D], m and l are numbers.

    m rises to the largest score of the tile only if that score exceeds m by more than threshold · log 2. Otherwise m
    stays, and the tile adds weights up to 2^threshold. m is −∞ before the first key. A tile of −∞ changes nothing.
    """
    largest = scores.max()
    if largest == -math.inf:
        return m, l, acc
    if largest > m + threshold * math.log(2):
        shrink = torch.exp(m - largest)
        m, l, acc = largest, shrink * l, shrink * acc
    weights = torch.exp(scores - m)
    return m, l + weights.sum(), acc + weights @ values


def _fold(m: float, l: float, acc: float, scores: list[float], threshold: float) -> Case:
    values = torch.arange(1.0, len(scores) + 1)[:, None]
    return call(torch.tensor(m), torch.tensor(l), torch.tensor([acc]), torch.tensor(scores), values, threshold)


LAZY_FOLD = python_exercise(
    lazy_fold,
    [
        _fold(0.0, 1.0, 3.0, [-1.0], 8.0),
        _fold(0.0, 1.0, 3.0, [5.0], 8.0),
        _fold(0.0, 1.0, 3.0, [7.0, 1.0], 8.0),
        _fold(0.0, 1.0, 3.0, [-9.0], 8.0),
        _fold(-INF, 0.0, 0.0, [-20.0, -21.0], 8.0),
        _fold(2.0, 1.0, 3.0, [-INF, -INF], 8.0),
        _fold(-INF, 0.0, 0.0, [-INF], 8.0),
        _fold(0.0, 2.0, 3.0, [0.5, -INF], 0.0),
    ],
    [
        "always raised: m rose although the tile exceeds m by less than the threshold. Look at the condition for m.",
        (" + threshold * math.log(2)", ""),
        "always raised, and nothing shrinks: m rises for every larger score, and l and acc still belong to the old m. "
        "Raise m only above the threshold first. Then multiply l and acc by exp(m − m′).",
        (" + threshold * math.log(2)", ""),
        ("shrink * l, shrink * acc", "l, acc"),
        "a natural threshold: The threshold is in units of log 2. A threshold of 8 lets weights grow to 2⁸, not to e⁸. "
        "Look at the condition for m.",
        (" * math.log(2)", ""),
        "m falls: m fell to the maximum of a tile far below m. m rises or stays. Look at the condition for m.",
        ("largest > m + threshold", "abs(largest - m) > threshold"),
        "not the first tile: m is −∞ before the first key, so every score exceeds m by more than the threshold. m must "
        "become the largest score of the first tile.",
        ("    if largest > m", "    m = m.masked_fill(m == -math.inf, 0.0)\n    if largest > m"),
        "only m: m rose to m′, but l and acc still belong to the old m. Multiply both by exp(m − m′).",
        ("shrink * l, shrink * acc", "l, acc"),
        "acc does not shrink: l belongs to the new m′, but acc belongs to the old m. Multiply acc by exp(m − m′).",
        ("shrink * acc", "acc"),
        "weights by another maximum: m stayed, but the weights are relative to the maximum of the tile. Compute all "
        "weights relative to m, even if they exceed 1.",
        ("torch.exp(scores - m)", "torch.exp(scores - torch.maximum(m, largest))"),
        "NaN for a masked tile: All scores of the tile are −∞, and (−∞) − (−∞) is NaN. Return early for such a tile.",
        ("    if largest == -math.inf:\n        return m, l, acc\n", ""),
    ],
    "any finite m is exact, so m need not be the largest score.",
    imports="import math\nimport torch\nfrom torch import Tensor",
    start="""\
m_new = torch.maximum(m, scores.max())  # yours: not always
weights = torch.exp(scores - m_new)
return m_new, l + weights.sum(), acc + weights @ values  # yours""",
)


def unordered_reads(num_tiles: int, ahead: int, pending: int | None) -> list[int]:
    """Return the tiles that a loop may read while their copy is still on its way.

    The loop reads tiles 0 … num_tiles − 1. Before it, the copies of the first `ahead` tiles begin, each as one group.
    Turn j waits until at most the `pending` newest groups are on their way (None: it does not wait), reads tile j, and
    then begins the copy of tile j + ahead, if there is one.
    """
    found = []
    for j in range(num_tiles):
        begun = min(num_tiles, j + ahead)  # groups, when turn j waits
        arrived = 0 if pending is None else begun - pending
        if j >= arrived:
            found.append(j)
    return found


UNORDERED_READS = python_exercise(
    unordered_reads,
    [
        call(1, 1, 0),
        call(2, 1, None),
        call(3, 2, 0),
        call(3, 2, 1),
        call(4, 2, 2),
        call(6, 3, 2),
        call(4, 3, 1),
        call(2, 4, 3),
    ],
    [
        "the end of the loop: At the end no new group begins. The newest groups are then the tiles that are read next, "
        "and the wait lets them pass. Count the groups that have begun at turn j.",
        ("min(num_tiles, j + ahead)", "j + ahead"),
        "no wait is no group: Without a wait, no copy is known to have arrived. `wait_group 0` is the opposite: it "
        "waits for all of them.",
        ("0 if pending is None else begun - pending", "begun - (pending or 0)"),
        "one more has arrived: Of `begun` groups, all but the `pending` newest have arrived: groups 0 … begun − "
        "pending − 1.",
        ("j >= arrived", "j > arrived"),
        "the copy comes later: Turn j begins its copy after it has read its tile, so this copy does not count yet.",
        ("min(num_tiles, j + ahead)", "min(num_tiles, j + ahead + 1)"),
        "the first one only: Every turn waits anew. Look at the other tiles, too.",
        ("return found", "return found[:1]"),
        "nothing at all: A wait that lets too many groups pass is as bad as none. Which groups have arrived when a "
        "turn reads its tile?",
        ("found.append(j)", "pass"),
        "the tiles that are safe: Those tiles have arrived. Return the others.",
        ("j >= arrived", "j < arrived"),
    ],
    "with pending = ahead − 1 only the end goes wrong. Real loops commit empty groups there.",
    start="return []  # yours: nothing goes wrong",
)


def tile_and_ring(N: int, num_sms: int, in_flight: int) -> tuple[int, int]:
    """Return (B_N, stages) of a flat product with weights [N, K] on a GPU with this number of SMs.

    B_N is the widest of 16, 32, 64 and 128 columns that still gives every SM a thread block, or 16 if no width does.
    A thread block owns B_N columns, and one stage of its ring holds 512 · B_N bytes. Every SM has at least
    ⌊thread blocks / SMs⌋ thread blocks, or 1, and needs `in_flight` bytes on the way at all times. One stage of each
    ring is being multiplied, and the other stages, at least one, are on the way.
    """
    width = next((b for b in (128, 64, 32, 16) if -(-N // b) >= num_sms), 16)
    thread_blocks = max(1, -(-N // width) // num_sms)
    return width, 1 + max(1, -(-in_flight // (thread_blocks * 512 * width)))


TILE_AND_RING = python_exercise(
    tile_and_ring,
    [
        call(128, 1, 65536),
        call(128, 2, 65536),
        call(128, 2, 65537),
        call(128, 2, 10000),
        call(256, 1, 131072),
        call(100, 2, 65536),
        call(64, 40, 16384),
        call(4096, 108, 11327),
        call(4096, 132, 25455),
        call(12288, 132, 25455),
    ],
    [
        "the narrowest tile: A narrow tile reads x more often than necessary. Take the widest tile that gives every "
        "SM a thread block.",
        ("(128, 64, 32, 16)", "(16, 32, 64, 128)"),
        "always the widest: Some SMs have no thread block with this width. Compare the number of thread blocks with "
        "the number of SMs.",
        ("if -(-N // b) >= num_sms", "if True"),
        "the same for every GPU: The width and the ring must follow from N, the SMs and the bytes in flight. Choose "
        "the width first: try the widest tile, and count its thread blocks.",
        ("next((b for b in (128, 64, 32, 16) if -(-N // b) >= num_sms), 16)", "32"),
        ("1 + max(1, -(-in_flight // (thread_blocks * 512 * width)))", "2"),
        "columns left over: The last columns need a thread block too, even if they do not fill it. Round N / B_N up.",
        ("-(-N // b) >= num_sms", "N // b >= num_sms"),
        "no stage to multiply: One stage is being multiplied, so it is not on the way. Add one stage.",
        ("1 + max(1, ", "max(2, "),
        "rounded down: A part of a stage is still needed to reach in_flight. Round the number of stages up.",
        ("-(-in_flight // (thread_blocks * 512 * width))", "in_flight // (thread_blocks * 512 * width)"),
        "one thread block per SM: Several thread blocks of an SM share the need, each with its own ring. Divide "
        "in_flight by the bytes of all of them.",
        ("thread_blocks * 512", "512"),
        "a single buffer: A ring needs a stage on the way while another is multiplied, so it has at least two stages. "
        "Look at small values of in_flight.",
        (
            "1 + max(1, -(-in_flight // (thread_blocks * 512 * width)))",
            "max(1, -(-in_flight // (thread_blocks * 512 * width)))",
        ),
        "no thread block: An SM with a ring has at least one thread block, even if most SMs have none. Look at the "
        "number of thread blocks of an SM.",
        ("max(1, -(-N // width) // num_sms)", "-(-N // width) // num_sms"),
    ],
    "a wide GPU with a fast memory needs narrow tiles and a long ring.",
    start="return 32, 2  # yours",
)

EXERCISES = [ROWS_TO_RECOMPUTE, SAFE_PHI, LAZY_FOLD, TILE_AND_RING, UNORDERED_READS]
