"""Exercises of lesson 10: a step of the ring, the zigzag order, the bytes that a process sends, and a causal ring."""

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers
from pagewise.online_softmax import merge_attention


def ring_step(rank: int, step: int, n: int) -> tuple[int, int, int]:
    """Return (block, to, source) of process `rank` in a step of a ring of n processes.

    Process r starts with block r of K and V: in step 0 it attends to its own block. After each step but
    the last, every process passes its block on to the process with the next higher rank. The last process passes it on
    to process 0.

    `block` is the block that the process attends to in this step. `to` is the process to which it then sends the block.
    `source` is the process from which it receives the next block.
    """
    return (rank - step) % n, (rank + 1) % n, (rank - 1) % n


RING_STEP = python_exercise(
    ring_step,
    [
        call(1, 0, 3),
        call(2, 1, 4),
        call(1, 2, 3),
        call(0, 1, 3),
        call(3, 2, 4),
        call(0, 3, 5),
        call(0, 0, 1),
    ],
    [
        "the wrong way round: Blocks move to higher ranks, so a process receives the block of the next lower rank: "
        "(rank − step) mod n.",
        ("(rank - step) % n", "(rank + step) % n"),
        "no circle: Process 0 receives from the last process. Take every rank modulo n.",
        ("(rank - step) % n, (rank + 1) % n, (rank - 1) % n", "rank - step, rank + 1, rank - 1"),
        "its own block: That is the block of step 0. In each later step, the process has the block that the process of "
        "the next lower rank had before. Below rank 0, the ring goes on with the last rank.",
        ("(rank - step) % n", "rank"),
        "no circle for the neighbours: The ring is closed. Process 0 receives from the last process, and the last "
        "process sends to process 0. Take `to` and `source` modulo n.",
        ("(rank + 1) % n, (rank - 1) % n", "rank + 1, rank - 1"),
        "one step ahead: That is the block of the next step. In step 0, a process attends to its own block.",
        ("(rank - step) % n", "(rank - step - 1) % n"),
        "to and source exchanged: The process sends to the next higher rank, and receives from the next lower rank.",
        ("(rank + 1) % n, (rank - 1) % n", "(rank - 1) % n, (rank + 1) % n"),
        "to the process that needs it last: `to` and `source` are the neighbours in every step. They do not depend on "
        "the step.",
        ("(rank + 1) % n, (rank - 1) % n", "(rank + step + 1) % n, (rank - step - 1) % n"),
    ],
    "after n steps, every process has had every block, and each block has travelled n − 1 times.",
    start="return rank, rank + 1, rank - 1  # yours",
)


def zigzag_positions(S: int, n: int) -> list[list[int]]:
    """Return the positions of the tokens that each of n processes holds, in the zigzag order.

    The sequence of S tokens is cut into 2 n pieces of equal length. Process r holds piece r, counted from the start,
    and piece r, counted from the end. Each list is in ascending order. S is a multiple of 2 n.
    """
    c = S // (2 * n)
    return [[*range(r * c, (r + 1) * c), *range(S - (r + 1) * c, S - r * c)] for r in range(n)]


_FIRST, _SECOND = "range(r * c, (r + 1) * c)", "range(S - (r + 1) * c, S - r * c)"

ZIGZAG_POSITIONS = python_exercise(
    zigzag_positions,
    [call(2, 1), call(4, 2), call(8, 2), call(12, 3), call(16, 2)],
    [
        "contiguous: Those are the tokens in their order, cut into n pieces. Cut into 2 n pieces. Each process gets "
        "an early piece and a late piece.",
        (f"[*{_FIRST}, *{_SECOND}]", "[*range(2 * r * c, 2 * (r + 1) * c)]"),
        "striped: Those are single tokens in turns (the striped order). In the zigzag order, a process holds two "
        "pieces of neighbouring tokens.",
        (f"[*{_FIRST}, *{_SECOND}]", "[*range(r, S, n)]"),
        "the late piece first: Each list is in ascending order: put the early piece before the late piece.",
        (
            "[*range(r * c, (r + 1) * c), *range(S - (r + 1) * c, S - r * c)]",
            "[*range(S - (r + 1) * c, S - r * c), *range(r * c, (r + 1) * c)]",
        ),
        "the same distance: Process 0 must hold the last piece, and process 1 the last but one. Count the second piece "
        "from the end.",
        (_SECOND, "range((n + r) * c, (n + r + 1) * c)"),
        "one piece: Each process holds two pieces. The other half of the sequence is missing.",
        (f", *{_SECOND}", ""),
        "n pieces: Cut into 2 n pieces, not n. Now tokens are in two lists.",
        ("S // (2 * n)", "S // n"),
        "backwards: Each list must be ascending. The late pieces are in reversed order, but their tokens are not.",
        (_SECOND, "range(S - r * c - 1, S - (r + 1) * c - 1, -1)"),
    ],
    "an early piece sees little and a late piece sees much, and every process has as much of both.",
    start="return torch.arange(S).view(n, -1).tolist()  # yours",
)


def sent_bytes(n: int, S: int, H: int, Hkv: int, D: int) -> dict[str, float]:
    """Return the bytes that each of n processes sends in one layer: {"ring": …, "all-to-all": …, "decode": …}.

    The sequence has S tokens, and each process holds S / n of them. There are H query heads and Hkv KV heads of size D.
    Queries, keys, values and outputs are 2 bytes a number. In "decode", there is one query token, and every process
    sends its out and its lse for all query heads to each other process. These are 4 bytes a number.
    """
    share = S / n * D * 2  # of one head
    return {
        "ring": (n - 1) * 2 * Hkv * share,
        "all-to-all": (n - 1) / n * (2 * H + 2 * Hkv) * share,
        "decode": (n - 1) * H * (D + 1) * 4,
    }


SENT_BYTES = python_exercise(
    sent_bytes,
    [
        call(2, 2, 2, 2, 1),
        call(2, 8, 2, 1, 4),
        call(4, 64, 8, 4, 8),
        call(8, 2**20, 32, 8, 128),
    ],
    [
        "the start: That is one step of the ring. A process sends a block after each step but the last.",
        ("(n - 1) * 2 * Hkv", "2 * Hkv"),
        ("(n - 1) / n * (2 * H + 2 * Hkv) * share", "0"),
        ("(n - 1) * H * (D + 1) * 4", "0"),
        "the ring alone: The ring is right. In the all-to-all, a process sends the heads of the others: of q, k and v "
        "before, and of out afterwards.",
        ("(n - 1) / n * (2 * H + 2 * Hkv) * share", "0"),
        ("(n - 1) * H * (D + 1) * 4", "0"),
        "n sends: After the last step of the ring, no process needs its block any more: n − 1 sends.",
        ('"ring": (n - 1)', '"ring": n'),
        "K alone: The ring moves K and V: twice as many bytes.",
        ("(n - 1) * 2 * Hkv", "(n - 1) * Hkv"),
        "one send: The ring has n steps. A process sends a block after each of them but the last.",
        ("(n - 1) * 2 * Hkv", "2 * Hkv"),
        "query heads on the ring: K and V have Hkv heads. The query heads of a group share them.",
        ("(n - 1) * 2 * Hkv", "(n - 1) * 2 * H"),
        "the output stays: The all-to-all brings q, k and v to the heads' processes, and then the output back.",
        ("(2 * H + 2 * Hkv)", "(H + 2 * Hkv)"),
        "own heads sent: In the all-to-all, a process keeps the part of its own heads: it sends (n − 1) / n of what it "
        "has.",
        ("(n - 1) / n * (2 * H", "(2 * H"),
        "to each process: An all-to-all sends different parts to different processes, and each part once.",
        ("(n - 1) / n * (2 * H", "(n - 1) * (2 * H"),
        "H heads of K and V: q and out have H heads, but k and v have only Hkv.",
        ("(2 * H + 2 * Hkv)", "4 * H"),
        "no lse: A merge needs the output, D numbers, and the lse, one number more: D + 1.",
        ("H * (D + 1) * 4", "H * D * 4"),
        "2 bytes in decode: Partial results are float32 until they are merged: 4 bytes a number.",
        ("(D + 1) * 4", "(D + 1) * 2"),
        "to one process: Each process sends its result to all n − 1 others, because each of them merges.",
        ('"decode": (n - 1) * H', '"decode": H'),
    ],
    "only the ring and the all-to-all depend on S. Split decode sends as much for any length.",
    start="""\
share = S / n * D * 2  # of one head
return {"ring": 2 * Hkv * share, "all-to-all": 0, "decode": 0}  # yours""",
)


def causal_ring(q: Tensor, k: Tensor, v: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return (out [H, S, D], lses [n, H, S]) of causal attention, as a ring of n processes computes it.

    q, k and v are [H, S, D]. Process r holds the tokens `zigzag_positions(S, n)[r]`. In step s, it attends from its
    queries to the block of `ring_step(r, s, n)`. A query sees the keys whose positions are not later than its own.
    lses[s] holds the log-sum-exp that each query found in step s. `merge_attention(outs, lses)` merges the steps. It
    does not read an out whose lse is −inf.
    """
    shares = [torch.tensor(share) for share in zigzag_positions(q.shape[1], n)]
    outs, lses = q.new_empty(n, *q.shape), q.new_empty(n, *q.shape[:2])
    for r, mine in enumerate(shares):
        for step in range(n):
            theirs = shares[ring_step(r, step, n)[0]]
            scores = q[:, mine] @ k[:, theirs].mT / q.shape[-1] ** 0.5
            scores = scores.masked_fill(theirs > mine[:, None], -torch.inf)
            outs[step, :, mine] = scores.softmax(dim=-1) @ v[:, theirs]
            lses[step, :, mine] = scores.logsumexp(dim=-1)
    return merge_attention(outs, lses)[0], lses


def _ring_of(H: int, S: int, D: int, n: int) -> Case:
    q, k = small_numbers(H, S, D) / 4, small_numbers(H, S + 1, D)[:, 1:] / 4
    return call(q, k, small_numbers(H, S + 2, D)[:, 2:], n)


_MASK = ".masked_fill(theirs > mine[:, None], -torch.inf)"

CAUSAL_RING = python_exercise(
    causal_ring,
    [_ring_of(1, 2, 1, 1), _ring_of(1, 4, 1, 2), _ring_of(2, 8, 2, 2), _ring_of(2, 12, 2, 3), _ring_of(1, 16, 4, 4)],
    [
        "not causal: That lets a query see later keys. Compare the positions of keys and queries.",
        (_MASK, ""),
        "places for positions: You compare places within the blocks. A key is hidden if its position in the text is "
        "later than that of the query.",
        (_MASK, ".masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)"),
        "itself hidden: A query sees its own key: hide only the keys after it.",
        ("theirs > mine", "theirs >= mine"),
        "the mean: That is the mean of the steps. Merge them with their lses: `merge_attention`.",
        ("merge_attention(outs, lses)[0]", "outs.nan_to_num().mean(dim=0)"),
        "the sum: Each step's output is normalised by its own sum. Merge them with their lses: `merge_attention`.",
        ("merge_attention(outs, lses)[0]", "outs.nan_to_num().sum(dim=0)"),
        "the other way round: The output is right, but the steps are not in the order of `ring_step`.",
        ("ring_step(r, step, n)[0]", "(r + step) % n"),
        "own block only: That is step 0 in every step. `ring_step` gives the block of each step.",
        ("ring_step(r, step, n)[0]", "r"),
        "contiguous: The output is right, but the processes must hold the tokens in the zigzag order.",
        ("zigzag_positions(q.shape[1], n)", "torch.arange(q.shape[1]).view(n, -1).tolist()"),
        "no scale: The scores lack the division by √D.",
        (" / q.shape[-1] ** 0.5", ""),
    ],
    "this is ring attention in the zigzag order. The package's version differs in one point: its blocks travel.",
    imports="import torch\nfrom torch import Tensor\n\nfrom pagewise.exercises.lesson_10 import ring_step, "
    "zigzag_positions\nfrom pagewise.online_softmax import merge_attention",
    start="""\
scores = q @ k.mT / q.shape[-1] ** 0.5  # yours
out, lse = scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)
return out, lse.expand(n, *lse.shape)""",
)

EXERCISES = [RING_STEP, ZIGZAG_POSITIONS, SENT_BYTES, CAUSAL_RING]
