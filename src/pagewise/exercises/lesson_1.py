"""Exercises of lesson 1: safe softmax, the causal mask, attention with shared KV heads, its time, its options."""

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.tools.roofline import H100, Gpu

INF = float("inf")


def safe_softmax(scores: Tensor) -> Tensor:
    """Return the softmax of each row of scores [..., S], for scores of any size.

    A score of −inf means "may not look". Its weight is 0. A row in which every score is −inf gives a row of zeros.
    Do not use torch.softmax: write exp(s) / Σ exp(s) so that nothing overflows.
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
        "no maximum: exp(1000) is infinite, and inf / inf is NaN. Before `exp`, subtract the largest score of the row: "
        "it cancels in the quotient.",
        ("scores - m.masked_fill(m == -torch.inf, 0.0)", "scores"),
        "clamped: Large scores became equal: a limit changes the differences of scores. Subtract the largest score of "
        "the row, which keeps them.",
        ("torch.exp(scores - m.masked_fill(m == -torch.inf, 0.0))", "torch.exp(scores.clamp(max=80))"),
        "the maxima along the columns: Each row needs its own maximum. Without keepdim=True, the maxima of the rows "
        "meet the columns.",
        ("m = scores.amax(dim=-1, keepdim=True)", "m = scores.amax(dim=-1)"),
        "one maximum for all rows: One maximum is subtracted from all rows. In a row of smaller scores every `exp` is "
        "then 0, and 0 / 0 is NaN. Give `amax` the dimension of the keys (`dim=-1`, `keepdim=True`).",
        ("scores.amax(dim=-1, keepdim=True)", "scores.max()"),
        ("l.masked_fill(l == 0, 1.0)", "l"),
        "columns: The rows do not sum to 1. The sum must run over the last dimension, the keys (`dim=-1`, "
        "`keepdim=True`).",
        ("dim=-1", "dim=0"),
        "one sum for all rows: Each row is divided by the sum of all rows. Give `sum` the dimension of the keys "
        "(`dim=-1`, `keepdim=True`).",
        ("weights.sum(dim=-1, keepdim=True)", "weights.sum()"),
        "NaN where nothing is visible: The row's maximum is −inf, and (−inf) − (−inf) is NaN. Where the maximum is "
        "−inf, subtract 0 instead. Where the sum is 0, divide by 1.",
        ("m.masked_fill(m == -torch.inf, 0.0)", "m"),
        "a finite number for −inf: A query that sees no key looks at all keys equally. A large negative number in "
        "place of −inf is the maximum of such a row, and exp(0) is 1. Keep −inf, and treat such a row separately.",
        ("    m = ", "    scores = scores.clamp(min=-1e9)\n    m = "),
    ],
    "no score overflows, and a query that sees no key gets zeros.",
    imports="import torch\nfrom torch import Tensor",
    start="return scores.exp() / scores.exp().sum(dim=-1, keepdim=True)",
)


def causal_mask(T: int, S: int) -> Tensor:
    """Return a bool matrix [T, S] that is True where a query may look at a key.

    The T queries are the *newest* of the S tokens, so the last query sees every key.
    With T > S the first queries come before every key and see no key.
    """
    query, key = torch.arange(T)[:, None], torch.arange(S)[None, :]
    return key <= query + S - T


CAUSAL_MASK = python_exercise(
    causal_mask,
    [call(T=T, S=S) for T, S in ((2, 2), (1, 3), (2, 4), (3, 2))],
    [
        "top left: The mask is aligned top left, as if the queries were the oldest tokens. The last query must see "
        "every key: shift the positions of the queries by S − T.",
        (" + S - T", ""),
        "not itself: A token does not see itself. Compare with `<=` instead of `<`.",
        ("<=", "<"),
        "one too far: Each query sees one key of its future. The positions of the queries are too large by 1.",
        ("S - T", "S - T + 1"),
        "shifted the other way: You shift the mask by T − S. The last query, T − 1, must see the last key, S − 1, so "
        "query t sees keys up to t + S − T.",
        ("query + S - T", "query + T - S"),
        "inverted: The mask is inverted. True marks a key that the query *may* look at.",
        ("<=", ">"),
        "transposed: The mask is transposed. It needs a row for each query and a column for each key.",
        ("key <= query + S - T", "(key <= query + S - T).T"),
        "numbers: The mask holds numbers. Return bools: `masked_fill` and torch's attention need them.",
        ("key <= query + S - T", "(key <= query + S - T).float()"),
    ],
    "the last query sees every key, whatever T and S are.",
    imports="import torch\nfrom torch import Tensor",
    start="return torch.ones(T, S).tril().bool()",
)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention [H, T, D] of the queries q [H, T, D] over k and v [Hkv, S, D].

    H is a multiple of Hkv, and neighbouring query heads share a KV head. The T queries are the last of the S tokens
    (T ≤ S). You may use torch.softmax.
    """
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    T, S = q.shape[1], k.shape[1]
    visible = torch.ones(T, S).tril(S - T).bool()
    scores = (q @ k.mT / q.shape[2] ** 0.5).masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def _heads(H: int, Hkv: int, T: int, S: int, D: int) -> Case:
    generator = torch.Generator().manual_seed(H + 10 * S + 100 * T)
    q, k = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((H, T, D), (Hkv, S, D)))
    return call(q, k, torch.arange(1.0, Hkv * S * D + 1).reshape(Hkv, S, D))


_SOFTMAX = "torch.softmax(scores, dim=-1)"

GROUPED_ATTENTION = python_exercise(
    grouped_attention,
    [_heads(1, 1, 1, 2, 1), _heads(1, 1, 2, 2, 1), _heads(1, 1, 2, 3, 4), _heads(2, 1, 2, 3, 2), _heads(4, 2, 2, 5, 2)],
    [
        "nothing yet: The function returns nothing yet. Begin with one head: scores, mask, softmax, times V.",
        ("    group =", "    return None\n    group ="),
        "no scale: The scores are not divided by √D.",
        (" / q.shape[2] ** 0.5", ""),
        "scaled outside: The weights are divided by √D, so they no longer sum to 1. Divide the scores.",
        (" / q.shape[2] ** 0.5", ""),
        (_SOFTMAX, f"{_SOFTMAX} / q.shape[2] ** 0.5"),
        "no mask: A query looks at keys of its future. Set their scores to −∞ before the softmax.",
        ("tril(S - T)", "tril(S)"),
        "top left: The mask is aligned top left, as if the queries were the first tokens. Query t is token t + S − T.",
        ("tril(S - T)", "tril()"),
        "masked after the softmax: The hidden weights are 0, but the others do not sum to 1. Mask the scores, before "
        "the softmax.",
        (".masked_fill(~visible, -torch.inf)", ""),
        (_SOFTMAX, f"({_SOFTMAX} * visible)"),
        "softmax over the queries: The weights of a *key* sum to 1. The softmax of a row runs over its keys, the last "
        "dimension.",
        (_SOFTMAX, "torch.softmax(scores, dim=-2)"),
        "interleaved: Query heads 0 and 1 read different KV heads. Neighbouring query heads share one: head h reads "
        "KV head h // (H / Hkv).",
        ("x.repeat_interleave(group, dim=0)", "x.repeat(group, 1, 1)"),
        "one KV head for all: All query heads read KV head 0.",
        ("x.repeat_interleave(group, dim=0)", "x[:1]"),
    ],
    "this is the attention of every Llama, for one sequence.",
    imports="import torch\nfrom torch import Tensor",
)


def least_time(shape: tuple[int, ...], gpu: Gpu) -> float:
    """Return the time in microseconds that an attention takes at least on a GPU, by the roofline.

    shape = (B, H, Hkv, T, S, D). Every query sees every key, and each number takes 2 bytes.
    The best kernel reads Q, K and V once and writes O once, while it computes.
    The GPU computes `gpu.peak_flops` FLOPs per second and moves `gpu.bandwidth` bytes per second.
    """
    B, H, Hkv, T, S, D = shape
    flops = 4 * B * H * T * S * D
    moved = 2 * B * D * (2 * H * T + 2 * Hkv * S)
    return 1e6 * max(flops / gpu.peak_flops, moved / gpu.bandwidth)


TOY = Gpu("a GPU of 1 MFLOP/s and 1 MB/s", 1e6, 1e6, 1, 1e6)  # on it a FLOP takes a microsecond, as does a byte


def _on(gpu: Gpu, *shape: int) -> Case:
    return Case(f"{{name}}({shape}, {gpu.name})", lambda theirs: theirs(shape, gpu))


LEAST_TIME = python_exercise(
    least_time,
    [
        _on(TOY, 1, 1, 1, 1, 1, 1),
        _on(TOY, 1, 1, 1, 4, 4, 1),
        _on(TOY, 3, 1, 1, 1, 1, 1),
        _on(TOY, 1, 4, 2, 1, 1, 1),
        _on(TOY, 1, 4, 2, 8, 16, 2),
        _on(H100, 1, 32, 8, 1, 4096, 128),
        _on(H100, 2, 32, 8, 4096, 4096, 128),
    ],
    [
        "arithmetic alone: The time covers the arithmetic alone. Count the bytes of Q, K, V and O too, divide them by "
        "the bandwidth, and take the slower of the two.",
        ("max(flops / gpu.peak_flops, moved / gpu.bandwidth)", "flops / gpu.peak_flops"),
        "bytes alone: The time covers the bytes alone. Divide the FLOPs by the peak too, and take the slower of the "
        "two.",
        ("max(flops / gpu.peak_flops, moved / gpu.bandwidth)", "moved / gpu.bandwidth"),
        "the sum: The two times are added. A kernel computes while it moves data: take the larger time.",
        ("max(flops / gpu.peak_flops, moved / gpu.bandwidth)", "(flops / gpu.peak_flops + moved / gpu.bandwidth)"),
        "the faster one: The time is that of the faster part. The kernel must wait for the slower one: `max`, not "
        "`min`.",
        ("max(", "min("),
        "half of the FLOPs: The FLOPs are half as many as they should be. There are two products, and each of their "
        "terms is a multiplication and an addition.",
        ("4 * B", "2 * B"),
        "numbers for bytes: The traffic is counted in numbers. Each number takes 2 bytes.",
        ("moved = 2 * B", "moved = B"),
        "K and V for every query head: K and V are read once for each query head. They have Hkv heads, not H: a group "
        "of query heads shares one read.",
        ("2 * Hkv * S", "2 * H * S"),
        "without O: One matrix of T rows is missing from the traffic. Q is read, and O is written.",
        ("2 * H * T", "H * T"),
        "without V: One matrix of S rows is missing from the traffic. K and V are both read.",
        ("2 * Hkv * S", "Hkv * S"),
        "one sequence: The batch is missing from the traffic. Each of the B sequences has its own Q, K, V and O.",
        ("moved = 2 * B", "moved = 2"),
        "three kernels: The traffic includes the scores and the weights. The best kernel keeps both on the chip: count "
        "Q, K, V and O only.",
        ("2 * Hkv * S)", "2 * Hkv * S) + 8 * B * H * T * S"),
        "seconds: The result is in seconds. Multiply by 1e6 for microseconds.",
        ("1e6 * ", ""),
    ],
    "the slower of arithmetic and memory sets the time.",
    imports="from pagewise.tools.roofline import Gpu",
    start="""\
B, H, Hkv, T, S, D = shape
flops = 4 * B * H * T * S * D
return 1e6 * flops / gpu.peak_flops""",
)


def changed_scores(scores: Tensor, softcap: float, slope: float, window: int) -> Tensor:
    """Return the scores [T, S] of causal attention after softcap, ALiBi and window, in this order.

    Softcap c makes c · tanh(s / c) of a score s. ALiBi subtracts slope · (distance from the query to the key). The
    window keeps the `window` most recent visible keys, the query's own included. Other scores become −inf. The T
    queries are the last of the S tokens.
    """
    T, S = scores.shape
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    scores = softcap * torch.tanh(scores / softcap) - slope * distance
    return scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)


def _options(scores: list[list[float]], softcap: float, slope: float, window: int) -> Case:
    return call(torch.tensor(scores), softcap, slope, window)


CHANGED_SCORES = python_exercise(
    changed_scores,
    [
        _options([[1.0, 2.0]], 100.0, 0.0, 2),
        _options([[9.0, 0.0]], 2.0, 0.0, 2),
        _options([[0.0, 0.0, 0.0]], 100.0, 0.5, 3),
        _options([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]], 100.0, 0.0, 2),
        _options([[4.0, 8.0, 1.0], [4.0, 8.0, 1.0]], 2.0, 1.0, 2),
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with the distance of each query to each key: query t is "
        "token t + S − T.",
        ("    T, S =", "    return None\n    T, S ="),
        "no softcap: The scores are not capped: c · tanh(s / c) is never above c.",
        ("softcap * torch.tanh(scores / softcap)", "scores"),
        "tanh of the score: The cap changes small scores, too. Divide by c before the tanh.",
        ("torch.tanh(scores / softcap)", "torch.tanh(scores)"),
        "clamped: A softcap bends scores, and a limit cuts them. Use c · tanh(s / c).",
        ("softcap * torch.tanh(scores / softcap)", "scores.clamp(-softcap, softcap)"),
        "ALiBi rewards distance: Far keys gain. ALiBi *subtracts* slope · distance.",
        ("- slope * distance", "+ slope * distance"),
        "ALiBi before the softcap: The softcap bends the penalty of ALiBi, too. Cap the scores first.",
        (
            "softcap * torch.tanh(scores / softcap) - slope * distance",
            "softcap * torch.tanh((scores - slope * distance) / softcap)",
        ),
        "top left: Your queries are the first tokens. Query t is token t + S − T.",
        ("torch.arange(S - T, S)", "torch.arange(T)"),
        "one key too many: The window has one key too many. The query's own key, at distance 0, is one of them.",
        ("distance >= window", "distance > window"),
        "the future is visible: A query sees keys after its own position: their distance is negative.",
        ("(distance < 0) | (distance >= window)", "distance >= window"),
        "no window: A query sees keys that are older than the window.",
        ("(distance < 0) | (distance >= window)", "distance < 0"),
    ],
    "each change needs a score and two positions, and nothing from memory.",
    imports="import torch\nfrom torch import Tensor",
)

EXERCISES = [CAUSAL_MASK, GROUPED_ATTENTION, SAFE_SOFTMAX, LEAST_TIME, CHANGED_SCORES]
