"""Exercises of lesson 1: safe softmax, the causal mask, grouped heads."""

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise

INF = float("inf")


def safe_softmax(scores: Tensor) -> Tensor:
    """Return the softmax of each row of scores [..., S], for scores of any size.

    A score of −inf means "may not look": its weight is 0, and a row of nothing else gives a row of zeros.
    Not with torch.softmax: write exp(s) / Σ exp(s) so that nothing overflows.
    """
    m = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - m.masked_fill(m == -torch.inf, 0.0))
    l = weights.sum(dim=-1, keepdim=True)
    return weights / l.masked_fill(l == 0, 1.0)


SAFE_SOFTMAX = python_exercise(
    safe_softmax,
    [
        call(torch.tensor([1.0, 2.0, 3.0])),
        call(torch.tensor([[0.0, 1.0], [2.0, 0.0]])),
        call(torch.tensor([1000.0, 1001.0])),
        call(torch.tensor([[0.0, 1.0], [1000.0, 1001.0]])),
        call(torch.tensor([0.0, -INF])),
        call(torch.tensor([-INF, -INF])),
    ],
    [
        "no maximum: exp(1000) is infinite, and inf / inf is NaN: take the row's largest score from all of them "
        "first. It cancels in the quotient.",
        ("scores - m.masked_fill(m == -torch.inf, 0.0)", "scores"),
        "one maximum for all rows: Each row needs its own maximum: less the largest score of all rows, the scores of "
        "a smaller row all vanish in exp, and 0 / 0 is NaN.",
        ("scores.amax(dim=-1, keepdim=True)", "scores.max()"),
        ("l.masked_fill(l == 0, 1.0)", "l"),
        "columns: The rows do not sum to 1: the sum runs over the last dimension, the keys (`dim=-1`, `keepdim=True`).",
        ("dim=-1", "dim=0"),
        "one sum for all rows: Each row is divided by the sum of all rows: give `sum` the dimension (`dim=-1`, "
        "`keepdim=True`).",
        ("weights.sum(dim=-1, keepdim=True)", "weights.sum()"),
        "NaN where nothing is visible: The row's maximum is −inf, and (−inf) − (−inf) is NaN: subtract 0 there "
        "instead, and divide by 1 where the sum is 0.",
        ("m.masked_fill(m == -torch.inf, 0.0)", "m"),
        "a finite number for −inf: A query that may look at nothing looks at everything equally: a large negative "
        "number in place of −inf is the row's maximum there, and exp(0) = 1.",
        ("    m = ", "    scores = scores.clamp(min=-1e9)\n    m = "),
    ],
    "no score overflows, and a query that sees nothing takes nothing.",
    imports="import torch\nfrom torch import Tensor",
)


def causal_mask(T: int, S: int) -> Tensor:
    """Return the keys, of S, that each of T queries may look at: bool [T, S], True where it may.

    The T queries are the *newest* of the S tokens, so the last query sees every key.
    With T > S the first queries come before every key and see no key.
    """
    query, key = torch.arange(T)[:, None], torch.arange(S)[None, :]
    return key <= query + S - T


CAUSAL_MASK = python_exercise(
    causal_mask,
    [call(T=T, S=S) for T, S in ((2, 2), (1, 3), (2, 4), (3, 2))],
    [
        "top left: The last query must see every key: your mask is aligned top left, as if the queries were the "
        "oldest tokens. Query i is token i + S − T.",
        (" + S - T", ""),
        "not itself: A token may look at itself: `<=`, not `<`.",
        ("<=", "<"),
        "one too far: Each query sees one key of the future: off by one.",
        ("S - T", "S - T + 1"),
        "inverted: Inverted: True is where a query *may* look.",
        ("<=", ">"),
        "transposed: Transposed: a row for each query, a column for each key.",
        ("key <= query + S - T", "(key <= query + S - T).T"),
        "numbers: The mask must be of bools: 1.0 and 0.0 do not say where to look when they are added to scores.",
        ("key <= query + S - T", "(key <= query + S - T).float()"),
    ],
    "the last query sees every key, whatever T and S are.",
    imports="import torch\nfrom torch import Tensor",
)


def kv_head(h: int, H: int, Hkv: int) -> int:
    """Return the KV head, of Hkv, that query head h of H reads. H / Hkv *neighbouring* query heads share a KV head."""
    return h // (H // Hkv)


def _all_heads(H: int, Hkv: int) -> Case:
    return Case(f"[kv_head(h, {H}, {Hkv}) for h in range({H})]", lambda theirs: [theirs(h, H, Hkv) for h in range(H)])


KV_HEAD = python_exercise(
    kv_head,
    [_all_heads(2, 2), _all_heads(4, 2), _all_heads(8, 2), _all_heads(8, 4), _all_heads(4, 1)],
    [
        "modulo: Your neighbours read different KV heads: h % Hkv deals the heads out in turn, but a group is H / Hkv "
        "neighbours.",
        ("h // (H // Hkv)", "h % Hkv"),
        "divided by the number of groups: You divide by the number of KV heads: a group has H // Hkv query heads, and "
        "the head's group is what is asked for.",
        ("(H // Hkv)", "Hkv"),
        "place in the group: That is the head's place *in* its group: asked is which group.",
        ("h // (", "h % ("),
        "no grouping: There is no KV head of that number: every query head has its own only if Hkv = H.",
        ("h // (H // Hkv)", "h"),
        "a fraction: A head is a whole number: divide with `//`.",
        ("h // (H // Hkv)", "h / (H / Hkv)"),
    ],
    "neighbours share a KV head: with Hkv = 1 all of them (MQA), with Hkv = H none.",
)

EXERCISES = [SAFE_SOFTMAX, CAUSAL_MASK, KV_HEAD]
