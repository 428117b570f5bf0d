"""Exercises of lesson 10: the send of a ring, the zigzag order, the bytes that a process sends, and a causal ring."""

import torch
import torch.distributed as dist
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.processes import ProcessExercise, passing
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers
from pagewise.online_softmax import merge_attention


def pass_on(x: Tensor) -> Tensor:
    """Send x to the next process of the ring, and return the tensor that the previous process sends.

    Every process calls `pass_on` at the same time, with a tensor of the same shape and dtype. Process r sends to
    process r + 1, and the last process sends to process 0. x itself must not change.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    for transfer in (dist.isend(x, (rank + 1) % n), dist.irecv(received, (rank - 1) % n)):
        transfer.wait()
    return received


_NEXT, _PREVIOUS = "dist.isend(x, (rank + 1) % n)", "dist.irecv(received, (rank - 1) % n)"

PASS_ON = python_exercise(
    pass_on,
    [
        passing("{name}(torch.tensor([rank])) in 3 processes", lambda rank: [float(rank)]),
        passing("{name}(torch.tensor([[rank, 7], [8, 10 · rank]])) in 3 processes", lambda r: [[r, 7], [8, 10 * r]]),
    ],
    [
        "nothing travels: Every process still has its own tensor. Send x to the next process, and receive what the "
        "previous process sends into a tensor of its own.",
        ("return received", "return x"),
        "the other way round: The tensors went to the previous process. Process r sends to r + 1 and receives from "
        "r − 1.",
        (_NEXT, "dist.isend(x, (rank - 1) % n)"),
        (_PREVIOUS, "dist.irecv(received, (rank + 1) % n)"),
        "into the tensor that is sent: What arrives has overwritten x. Receive into a new tensor.",
        ("received = torch.empty_like(x)", "received = x.detach()"),
        (_NEXT, "dist.isend(x.clone(), (rank + 1) % n)"),
    ],
    "n − 1 calls of this function are all that a ring sends. Start both transfers, then wait: a process that first "
    "waits for its send may wait for ever.",
    imports="import torch\nimport torch.distributed as dist\nfrom torch import Tensor",
    start="return x  # yours: it stays at home",
    kind=ProcessExercise,
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
return {"ring": share, "all-to-all": share, "decode": 0}  # yours""",
)


def causal_ring(q: Tensor, k: Tensor, v: Tensor, shares: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return (out [H, S, D], lses [n, H, S]) of causal attention, as a ring of n processes computes it.

    q, k and v are [H, S, D]. Process r holds the tokens at the positions shares[r]. In step s, it attends from its
    queries to the block that began in process r − s, modulo n. A query sees the keys whose positions are not later than
    its own. lses[s] holds the log-sum-exp that each query found in step s. `merge_attention(outs, lses)` merges the
    steps. It does not read an out whose lse is −inf.
    """
    n, shares = len(shares), [torch.tensor(share) for share in shares]
    outs, lses = q.new_empty(n, *q.shape), q.new_empty(n, *q.shape[:2])
    for r, mine in enumerate(shares):
        for step in range(n):
            theirs = shares[(r - step) % n]
            scores = q[:, mine] @ k[:, theirs].mT / q.shape[-1] ** 0.5
            scores = scores.masked_fill(theirs > mine[:, None], -torch.inf)
            outs[step, :, mine] = scores.softmax(dim=-1) @ v[:, theirs]
            lses[step, :, mine] = scores.logsumexp(dim=-1)
    return merge_attention(outs, lses)[0], lses


def _ring_of(H: int, S: int, D: int, n: int) -> Case:
    q, k = small_numbers(H, S, D) / 4, small_numbers(H, S + 1, D)[:, 1:] / 4
    return call(q, k, small_numbers(H, S + 2, D)[:, 2:], zigzag_positions(S, n))


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
        "the other way round: The output is right, but the steps are in another order: blocks travel to higher ranks.",
        ("(r - step) % n", "(r + step) % n"),
        "own block only: That is step 0 in every step. In step s, the block of process r − s is here.",
        ("shares[(r - step) % n]", "mine"),
        "contiguous: The output is right, but each process holds the tokens that `shares` lists.",
        ("for share in shares]", "for share in torch.arange(q.shape[1]).view(len(shares), -1).tolist()]"),
        "no scale: The scores lack the division by √D.",
        (" / q.shape[-1] ** 0.5", ""),
    ],
    "this is ring attention in the zigzag order. The package's version differs in one point: its blocks travel.",
    imports="import torch\nfrom torch import Tensor\n\nfrom pagewise.online_softmax import merge_attention",
    start="""\
scores = q @ k.mT / q.shape[-1] ** 0.5  # yours
out, lse = scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)
return out, lse.expand(len(shares), *lse.shape)""",
)


def all_reduce_bytes(n: int, T: int, hidden: int) -> float:
    """Return the bytes that each of n processes sends in one layer of a tensor-parallel model.

    T tokens are computed, and a token has `hidden` numbers of 2 bytes. A layer has one all-reduce after attention and
    one after the MLP. An all-reduce has two halves. First each process gets the sum of its own 1 / n of the numbers:
    it sends every other process the terms of its part. Then it sends its finished part to every other process.
    """
    part = T * hidden * 2 / n
    return 2 * (2 * (n - 1) * part)


ALL_REDUCE_BYTES = python_exercise(
    all_reduce_bytes,
    [call(2, 1, 2), call(2, 4, 8), call(4, 1, 8), call(4, 16, 8), call(8, 131_072, 4096)],
    [
        "half of them: A layer has two all-reduces, and each has two halves: four times the same number of bytes.",
        ("2 * (2 * (n - 1) * part)", "2 * (n - 1) * part"),
        "everything to everyone: A process sends only one part to each other process, 1 / n of the numbers.",
        ("T * hidden * 2 / n", "T * hidden * 2"),
        "its own part, too: A process keeps its own part: it sends to n − 1 others.",
        ("(n - 1) * part", "n * part"),
        "to one process: Each half sends to all n − 1 others.",
        ("(n - 1) * part", "part"),
        "one token: All T tokens of the step are added up.",
        ("T * hidden * 2 / n", "hidden * 2 / n"),
    ],
    "nearly four times the activations, however many processes there are, and nothing hides them.",
    start="return 0.0  # yours",
)

EXERCISES = [PASS_ON, SENT_BYTES, ZIGZAG_POSITIONS, CAUSAL_RING, ALL_REDUCE_BYTES]
