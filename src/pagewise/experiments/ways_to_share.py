"""What each way of sharing a model among GPUs holds and sends: bytes per layer, counted (lesson 10 in depth).

A number has 2 bytes, a partial result of decoding 4. The bytes are those that each of n GPUs sends in one layer, for a
prompt of S tokens and for one new token after it.
"""

from typing import NamedTuple

from pagewise.distributed.counted import Sizes, all_to_all_bytes, decode_bytes, ring_bytes
from pagewise.tools.roofline import AttentionCost, Gpu


class Shape(NamedTuple):
    """The sizes of a model: layers, query heads, KV heads, head size, numbers of a token, weights."""

    layers: int
    H: int
    Hkv: int
    D: int
    hidden: int
    weights: float


LLAMA_3_8B = Shape(32, 32, 8, 128, 4096, 8.03e9)
LLAMA_3_405B = Shape(126, 128, 8, 128, 16384, 405e9)
COLUMNS = ["way", "weights, GB on each", "K and V, GB on each", "prompt, MB per layer", "token, kB per layer", "limit"]


class Way(NamedTuple):
    """A way of sharing: the bytes that a GPU holds, the bytes that it sends per layer, and what ends it."""

    name: str
    weights: float
    cache: float
    prompt: float
    token: float | None
    limit: str


def all_reduce_bytes(n: int, T: int, hidden: int) -> float:
    """Return the bytes that each of n GPUs sends in the two all-reduces of a tensor-parallel layer, for T tokens."""
    return 2 * 2 * (n - 1) / n * T * hidden * 2


def ways(model: Shape, n: int, S: int) -> list[Way]:
    """Return the ways of sharing a sequence of S tokens, or the model, among n GPUs."""
    weights, cache = 2 * model.weights, 4.0 * model.layers * S * model.Hkv * model.D
    prompt = Sizes(1, model.H, model.Hkv, S, S, model.D, 2)
    ring, heads, decode = (
        sum(transfer.bytes for transfer in transfers)
        for transfers in (
            ring_bytes(prompt, n, 0, "contiguous"),
            all_to_all_bytes(prompt, n, 0),
            decode_bytes(prompt._replace(T=1), n),
        )
    )
    tensor = all_reduce_bytes(n, S, model.hidden), all_reduce_bytes(n, 1, model.hidden)
    return [
        Way("tensor parallel", weights / n, cache / n, *tensor, "one KV head per GPU"),
        Way("ring, split decode", weights, cache / n, ring, decode, "long blocks hide the link"),
        Way("all-gather, split decode", weights, cache / n, ring, decode, "a layer's K and V fit"),
        Way("all-to-all", weights, cache / n, heads, None, "one KV head per GPU"),
    ]


def table_rows(model: Shape, n: int, S: int) -> list[tuple]:
    """Return the rows of a table with `COLUMNS`."""
    return [
        (w.name, w.weights / 1e9, w.cache / 1e9, w.prompt / 1e6, None if w.token is None else w.token / 1e3, w.limit)
        for w in ways(model, n, S)
    ]


def arithmetic_seconds(model: Shape, n: int, S: int, gpu: Gpu) -> float:
    """Return the least time of one layer's arithmetic for a causal prompt of S tokens, shared evenly by n GPUs."""
    attention = AttentionCost(1, model.H, model.Hkv, S, S, model.D, causal=True).flops
    return (attention + 2 * model.weights / model.layers * S) / n / gpu.peak_flops
