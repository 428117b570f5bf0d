"""The time of a text's next token, with a KV cache and without: measured on this machine, and by a GPU's roofline.

Without a cache, a call of the model computes all n tokens of the text. With a cache, it computes the newest one. Both
read every weight once, so the two calls differ only where arithmetic takes longer than reading the weights.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pagewise.kv_cache import CachedAttention, KVCache, kv_cache_bytes, recompute
from pagewise.models import Llama, LlamaConfig
from pagewise.naive_attention import attention
from pagewise.tools.device import best_device
from pagewise.tools.roofline import MEMORY, Gpu
from pagewise.tools.timing import Spread, copy_bandwidth, host_seconds, in_turns, matmul_rate


class Sizes(NamedTuple):
    """The sizes of a decoder that decide how long a step takes. Weights and cache hold numbers of 2 bytes."""

    layers: int  # parameters of all layers; each takes part in one multiplication and addition per token
    head: int  # parameters of the last matrix, which gives the logits; only the newest token needs it
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int

    @classmethod
    def of(cls, config: LlamaConfig) -> "Sizes":
        """Return the sizes of a Llama without its memory."""
        with torch.device("meta"):
            model = Llama(config)
        layers, head = (sum(p.numel() for p in m.parameters()) for m in (model.model["layers"], model.lm_head))
        kv_heads = config.num_key_value_heads
        return cls(layers, head, config.num_hidden_layers, config.num_attention_heads, kv_heads, config.head_dim)

    @property
    def weight_bytes(self) -> int:
        """The bytes that every step reads. The embedding is not among them: a step reads a few of its rows."""
        return 2 * (self.layers + self.head)

    @property
    def stored_bytes(self) -> int:
        """The bytes of all weights: those that a step reads, and the embedding, which is as large as the head."""
        return self.weight_bytes + 2 * self.head

    def cache_bytes(self, tokens: int) -> int:
        """Return the bytes that the keys and values of so many tokens take."""
        sizes = {"num_layers": self.num_layers, "num_kv_heads": self.num_kv_heads, "head_size": self.head_size}
        return kv_cache_bytes(tokens, **sizes)


LLAMA_13B = Sizes.of(LlamaConfig(32000, 5120, 13824, 40, 40))
LLAMA_2_7B = Sizes.of(LlamaConfig(32000, 4096, 11008, 32, 32))
LLAMA_3_8B = Sizes.of(LlamaConfig(128256, 4096, 14336, 32, 32, 8))
LLAMA_2_70B = Sizes.of(LlamaConfig(32000, 8192, 28672, 80, 64, 8))
MODELS = {"LLaMA-13B": LLAMA_13B, "Llama-3-8B": LLAMA_3_8B, "Llama-2-70B": LLAMA_2_70B}
SERVED = {"LLaMA-13B": LLAMA_13B, "Llama-2-7B": LLAMA_2_7B, "Llama-3-8B": LLAMA_3_8B}  # on one GPU


class Times(NamedTuple):
    """Seconds of the next token of texts of these lengths, and the length at which arithmetic takes over."""

    name: str
    lengths: Sequence[int]
    without: Sequence[float]
    cached: Sequence[float]
    ridge: float


def least_step(model: Sizes, gpu: Gpu, n: int, *, cached: bool, batch: int = 1) -> float:
    """Return the least seconds of a GPU for the newest token of `batch` texts of n tokens, by the roofline."""
    computed = 1 if cached else n
    pairs = n if cached else n * (n + 1) // 2  # of a query and a key that it may see
    attention = 4 * model.num_layers * model.num_heads * model.head_size * pairs
    flops = batch * (2 * model.layers * computed + 2 * model.head + attention)
    kept = batch * model.cache_bytes(n) if cached else 0
    return gpu.seconds(flops, model.weight_bytes + kept)


def users_that_fit(model: Sizes, gpu: Gpu, length: int) -> int:
    """Return how many texts of `length` tokens fit into a GPU beside the weights: at most, without activations."""
    return max(0, (MEMORY[gpu] - model.stored_bytes) // model.cache_bytes(length))


def ms_until_full(model: Sizes, gpu: Gpu, length: int = 2048) -> list[float]:
    """Return the least milliseconds of a step with 1, 2, 3, … texts, up to the number that fits."""
    users = range(1, users_that_fit(model, gpu, length) + 1)
    return [1e3 * least_step(model, gpu, length, cached=True, batch=n) for n in users]


def least_steps(model: Sizes, gpu: Gpu, name: str, lengths: Sequence[int] = tuple(2**i for i in range(12))) -> Times:
    """Return `least_step` of each length. The ridge is in tokens: a 2-byte weight gives one FLOP per byte and token."""
    without, cached = ([least_step(model, gpu, n, cached=way) for n in lengths] for way in (False, True))
    return Times(name, lengths, without, cached, gpu.ridge)


def random_model(device: torch.device, hidden: int | None = None) -> Llama:
    """Return a model of four layers with random weights: 7 million parameters, and on a GPU 200 million."""
    hidden = hidden or (2048 if device.type == "cuda" else 384)
    return Llama(LlamaConfig(257, hidden, 3 * hidden, 4, max(1, hidden // 64), max(1, hidden // 128))).to(device).eval()


def new_caches(model: Llama, max_len: int) -> list[KVCache]:
    """Return an empty cache for each layer of a model, on its device, for one text of at most `max_len` tokens."""
    sizes = (1, model.config.num_key_value_heads, max_len, model.config.head_dim)
    device = next(model.parameters()).device
    return [KVCache(*sizes, device=device) for _ in range(model.config.num_hidden_layers)]


def next_token(model: Llama, n: int, *, cached: bool) -> Callable[[], object]:
    """Return a call that computes the logits after the last of n tokens. It can be repeated."""
    device = next(model.parameters()).device
    positions, last = torch.arange(n, device=device)[None], torch.tensor([n - 1], device=device)
    ids = positions % 257
    if not cached:
        return lambda: model(ids, positions, recompute, logits_for=last)
    caches = new_caches(model, n)
    if n > 1:
        model(ids[:, :-1], positions[:, :-1], CachedAttention(caches))

    def decode() -> torch.Tensor:
        for cache in caches:
            cache.length = n - 1  # forget the token that the last run appended
        return model(ids[:, -1:], positions[:, -1:], CachedAttention(caches))

    return decode


@torch.no_grad()
def measured_steps(lengths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)) -> Times:
    """Measure the next token of `random_model` on this machine, on one thread of a CPU, in some seconds.

    The ridge is measured too: the speed of a large product over the speed of copying a large tensor.
    """
    device, threads = best_device(), torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other would hide what a cache saves
    model, taken = random_model(device), {}
    for n in lengths:
        runs = {way: next_token(model, n, cached=way) for way in (False, True)}
        for way, seconds in in_turns(runs, host_seconds, repeats=7).items():
            taken[n, way] = min(seconds)  # other programs can only add time
    size = 8192 if device.type == "cuda" else 1024
    ridge = matmul_rate(device, torch.float32, size) / copy_bandwidth(device, 2**27)  # FLOPs per byte
    torch.set_num_threads(threads)
    without, cached = ([taken[n, way] for n in lengths] for way in (False, True))
    name = "this GPU" if device.type == "cuda" else "one core of this CPU"
    return Times(name, lengths, without, cached, 2 * ridge)  # a float32 weight gives half a FLOP per byte and token


@torch.no_grad()
def parts_of_a_step(n: int = 256) -> list[tuple[str, float, float]]:
    """Measure what a cached step of `random_model` consists of: rows of (part, milliseconds, share of the step).

    A twin with hidden size 64 has the same operations and hardly any weights, so its time is that of starting
    operations. The weights take their bytes over the speed of copying a large tensor.
    """
    device, threads = best_device(), torch.get_num_threads()
    torch.set_num_threads(1)
    model, twin = random_model(device), random_model(device, 64)
    runs = {"whole step": next_token(model, n, cached=True), "twin": next_token(twin, n, cached=True)}
    taken = {name: Spread.of(each).median for name, each in in_turns(runs, host_seconds, repeats=15).items()}
    weights = sum(p.nbytes for p in model.parameters()) / copy_bandwidth(device, 2**27)
    torch.set_num_threads(threads)
    whole = taken["whole step"]
    parts = {"starting operations": taken["twin"], "reading weights": weights}
    parts["arithmetic and the rest"] = whole - sum(parts.values())
    return [(name, 1e3 * seconds, seconds / whole) for name, seconds in (parts | {"whole step": whole}).items()]


def shapes_of_call(
    model: Llama, new: torch.Tensor, caches: list[KVCache]
) -> tuple[torch.Tensor, dict[str, torch.Size]]:
    """Run one call with a cache. Return the likeliest next token [1, 1], and the shapes that pass layer 0, by name."""
    start, stop = caches[0].length, caches[0].length + new.shape[1]
    shapes = {"token ids": new.shape}
    first = model.model["layers"][0].self_attn
    hook = first.register_forward_pre_hook(lambda _, args: shapes.update(x=args[0].shape))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        K, V = caches[layer].append(k, v)
        out = attention(q, K, V, causal=True)
        tensors = {"q": q, "k": k, "v": v, "K": K, "V": V, "out": out}
        shapes.update({name: tensor.shape for name, tensor in tensors.items()})
        shapes["scores"] = torch.Size([*q.shape[:3], K.shape[2]])
        return out

    logits = model(new, torch.arange(start, stop, device=new.device)[None], attend)
    hook.remove()
    return logits[:, -1:].argmax(dim=-1), shapes | {"logits": logits.shape}
