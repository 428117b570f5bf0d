"""What each way of sharing a model among GPUs holds and sends: bytes per layer, counted (lesson 10 in depth).

A number has 2 bytes, a partial result of decoding 4. The bytes are those that each of n GPUs sends in one layer, for a
prompt of S tokens and for one new token after it.
"""

from typing import NamedTuple

from pagewise.distributed.counted import Sizes, all_to_all_bytes, decode_bytes, ring_bytes
from pagewise.tools.roofline import H100, AttentionCost, Gpu


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
COLUMNS = ["way", "weights, GB on each", "K and V, GB on each", "prompt, MB per layer", "token, kB per layer", "needs"]


class Way(NamedTuple):
    """A way of sharing: the bytes that a GPU holds, the bytes that it sends per layer, and what it needs."""

    name: str
    weights: float
    cache: float
    prompt: float
    token: float | None
    needs: str


def all_reduce_bytes(n: int, T: int, hidden: int) -> float:
    """Return the bytes that each of n GPUs sends in the two all-reduces of a tensor-parallel layer, for T tokens."""
    return 2 * 2 * (n - 1) / n * T * hidden * 2


def ways(model: Shape, n: int, S: int) -> list[Way]:
    """Return the ways of sharing a sequence of S tokens, or the model, among n GPUs."""
    weights, cache = 2 * model.weights, 4.0 * model.layers * S * model.Hkv * model.D
    prompt = Sizes(1, model.H, model.Hkv, S, S, model.D, 2)
    ring, heads = ring_bytes(prompt, n, 0, "contiguous"), all_to_all_bytes(prompt, n, 0)
    decode = decode_bytes(prompt._replace(T=1), n)
    tensor = all_reduce_bytes(n, S, model.hidden), all_reduce_bytes(n, 1, model.hidden)
    return [
        Way("tensor parallel", weights / n, cache / n, *tensor, "one KV head per GPU"),
        Way("ring, split decode", weights, cache / n, ring, decode, "long blocks, to hide the link"),
        Way("all-gather, split decode", weights, cache / n, ring, decode, "memory for a layer's K and V"),
        Way("all-to-all", weights, cache / n, heads, None, "one KV head per GPU"),
    ]


def table_rows(model: Shape, n: int, S: int) -> list[tuple]:
    """Return the rows of a table with `COLUMNS`."""
    return [
        (w.name, w.weights / 1e9, w.cache / 1e9, w.prompt / 1e6, None if w.token is None else w.token / 1e3, w.needs)
        for w in ways(model, n, S)
    ]


def arithmetic_seconds(model: Shape, n: int, S: int, gpu: Gpu) -> float:
    """Return the least time of one layer's arithmetic for a causal prompt of S tokens, shared evenly by n GPUs."""
    attention = AttentionCost(1, model.H, model.Hkv, S, S, model.D, causal=True).flops
    return (attention + 2 * model.weights / model.layers * S) / n / gpu.peak_flops


def token_seconds(model: Shape, n: int, S: int, gpu: Gpu, latency: float) -> dict[str, tuple[float, float, float]]:
    """Return for each way of decoding the seconds of a step after S tokens: for weights, K and V, and exchanges.

    Tensor parallelism reads 1 / n of the weights and has two exchanges of `latency` seconds in a layer. Split decode
    reads all weights and has one exchange. Each GPU reads 1 / n of the keys and values, but tensor parallelism cannot
    divide them further than by the KV heads.
    """
    weights, cache = (
        bytes / gpu.bandwidth for bytes in (2 * model.weights, 4 * model.layers * S * model.Hkv * model.D)
    )
    return {
        "tensor parallel": (weights / n, cache / min(n, model.Hkv), 2 * model.layers * latency),
        "split decode": (weights, cache / n, model.layers * latency),
    }


def over_a_network(model: Shape, n: int, S: int, gpu: Gpu = H100) -> dict[str, object]:
    """Return the arguments of `figures.prompt_and_token`, in ms, for a prompt of S tokens and a token after it.

    The n GPUs are joined by a network of 50 GB/s whose exchanges take 10 µs each.
    """
    prompt = {way.name.removesuffix(", split decode"): 1e3 * way.prompt / 50e9 for way in ways(model, n, S)}
    steps = token_seconds(model, n, S, gpu, latency=10e-6)
    return {
        "prompt": prompt,
        "arithmetic": 1e3 * arithmetic_seconds(model, n, S, gpu),
        "token": {way: tuple(1e3 * part for part in parts) for way, parts in steps.items()},
    }
