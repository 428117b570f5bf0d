"""The KV cache: keys and values of the past, kept because they never change (lesson 2).

Row i of the output depends on row i of Q only (lesson 1), so a new token needs one new query, and the K and V of
all tokens before it. Here they lie in one contiguous buffer per batch, reserved for `max_len` tokens up front.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pagewise.models import Attend
from pagewise.naive_attention import attention
from pagewise.tools.checks import FLOATS, check_count, check_counts, check_number, check_same, check_shape, check_tensor
from pagewise.tools.transforms import apart_from


class KVCache:
    """K and V of one layer for `batch_size` sequences that grow in step, at most `max_len` tokens each.

    Positions below `length` hold what was appended, in order; nothing else is ever returned.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_len: int,
        head_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        check_counts(batch_size=batch_size, num_kv_heads=num_kv_heads, max_len=max_len, head_size=head_size)
        if dtype not in (*FLOATS, torch.float64):
            raise TypeError(f"dtype must be float32, float16, bfloat16 or float64, got {dtype}")
        self._kv = torch.empty(2, batch_size, num_kv_heads, max_len, head_size, dtype=dtype, device=device)
        self.length = 0

    def append(
        self, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T D"]
    ) -> tuple[Float[Tensor, "B Hkv len D"], Float[Tensor, "B Hkv len D"]]:
        """Add T tokens; return views of all K and V so far. A refused call (ValueError, TypeError) changes nothing.

        What is kept takes no part in differentiation: gradients end at the cache.
        """
        _, B, Hkv, max_len, D = self._kv.shape
        for name, new in (("k", k), ("v", v)):
            check_tensor(name, new, "B Hkv T D")
            check_same("dtype", cache=self._kv, **{name: new})
            check_same("device", cache=self._kv, **{name: new})
            check_shape(name, new, (B, Hkv, k.shape[2], D), "B Hkv T D")
        stop = self.length + k.shape[2]
        if stop > max_len:
            raise ValueError(
                f"k brings {k.shape[2]} tokens to a cache that holds {self.length} of at most max_len = {max_len}: "
                f"make the cache with max_len >= {stop}, or reset() it"
            )
        for kept, new in zip(self._kv, apart_from((self._kv,), k, v), strict=True):
            kept[:, :, self.length : stop] = new
        self.length = stop
        return self._kv[0, :, :, :stop], self._kv[1, :, :, :stop]

    def reset(self) -> None:
        """Forget all tokens; the buffer stays."""
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes reserved for K and V together, used or not."""
        return self._kv.nbytes


def kv_cache_bytes(
    num_tokens: int, *, num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype = torch.float16
) -> int:
    """Bytes of K and V of `num_tokens` tokens in all layers: 2 · tokens · layers · Hkv · D · itemsize."""
    check_count("num_tokens", num_tokens, minimum=0)
    check_counts(num_layers=num_layers, num_kv_heads=num_kv_heads, head_size=head_size)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float16, got {dtype!r}")
    return 2 * int(num_tokens) * int(num_layers) * int(num_kv_heads) * int(head_size) * dtype.itemsize


def recompute(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An `attend` for models that keeps nothing: every call brings the whole sequence."""
    return attention(q, k, v, causal=True)


class CachedAttention:
    """An `attend` for models that keeps K and V: each call brings the new tokens only. One `KVCache` per layer."""

    def __init__(self, caches: list[KVCache]) -> None:
        self.caches = caches

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_all, v_all = self.caches[layer].append(k, v)
        return attention(q, k_all, v_all, causal=True)


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    prompts: Int[Tensor, "B T"],
    num_tokens: int,
    *,
    cached: bool = True,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B len"]:
    """The prompts and `num_tokens` more tokens each: the likeliest ones, or sampled if temperature > 0.

    With `cached`, the model reads the prompt once (prefill) and then one token per step (decode); without, it reads
    everything again at every step. The tokens are the same. `generator` must be on the model's device.
    """
    check_tensor("prompts", prompts, "B T", dtypes=(torch.int64,))
    check_count("num_tokens", num_tokens, minimum=0)
    check_number("temperature", temperature, low=0.0)
    (B, T), config = prompts.shape, model.config
    if T == 0:
        raise ValueError("prompts must hold at least 1 token each, got T = 0: start from the end-of-text token")
    if T + num_tokens > config.max_position_embeddings:
        raise ValueError(
            f"prompts of {T} tokens and num_tokens = {num_tokens} exceed the model's {config.max_position_embeddings} "
            f"positions: ask for at most {max(0, config.max_position_embeddings - T)}"
        )
    weight = next(model.parameters())
    attend: Attend = recompute
    if cached and num_tokens:
        sizes = (B, config.num_key_value_heads, T + num_tokens, config.head_dim)
        on = {"dtype": _dtype_of_keys(weight), "device": weight.device}
        caches = [KVCache(*sizes, **on) for _ in range(config.num_hidden_layers)]
        attend = CachedAttention(caches)
    tokens, start = prompts, 0
    for _ in range(num_tokens):
        positions = torch.arange(start, tokens.shape[1], device=tokens.device).expand(B, -1)
        logits = model(tokens[:, start:], positions, attend)[:, -1]
        if temperature > 0:
            below_the_best = logits.float() - logits.amax(dim=-1, keepdim=True).float()
            lowest = torch.finfo(torch.float32).tiny  # anything lower would be 0 in float32
            probabilities = torch.softmax(below_the_best / max(temperature, lowest), dim=-1)
            new = torch.multinomial(probabilities, 1, generator=generator)
        else:
            new = logits.argmax(dim=-1, keepdim=True)
        start = tokens.shape[1] if cached else 0
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


def _dtype_of_keys(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer with this weight gives keys and values. Autocast may choose it."""
    on = weight.device.type
    follows = weight.dtype != torch.float64 and torch.is_autocast_enabled(on)
    return torch.get_autocast_dtype(on) if follows else weight.dtype
