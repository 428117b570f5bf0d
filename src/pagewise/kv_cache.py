"""The KV cache: keys and values of the past, kept because they never change (lesson 2).

Row i of the output depends on row i of Q only (lesson 1), so a new token needs one new query, and the K and V of
all tokens before it. Here they lie in one contiguous buffer per batch, reserved for `max_len` tokens up front.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.tools.checks import FLOATS, check_count, check_same, check_shape, check_tensor


class KVCache:
    """K and V of one layer for `batch_size` sequences that grow in step, at most `max_len` tokens each.

    Positions below `length` hold what was appended, in order; nothing else is ever returned.
    """

    def __init__(
        self, batch_size: int, num_kv_heads: int, max_len: int, head_size: int, *,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "max_len": max_len, "head_size": head_size}
        for name, size in sizes.items():
            check_count(name, size)
        if dtype not in (*FLOATS, torch.float64):
            raise TypeError(f"dtype must be float32, float16, bfloat16 or float64, got {dtype}")
        self._kv = torch.empty(2, batch_size, num_kv_heads, max_len, head_size, dtype=dtype, device=device)
        self.length = 0

    def append(
        self, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T D"]
    ) -> tuple[Float[Tensor, "B Hkv len D"], Float[Tensor, "B Hkv len D"]]:
        """Add T tokens; return views of all K and V so far. A refused call (ValueError, TypeError) changes nothing."""
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
        self._kv[0, :, :, self.length : stop] = k
        self._kv[1, :, :, self.length : stop] = v
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
    for name, size in {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_size": head_size}.items():
        check_count(name, size)
    return 2 * num_tokens * num_layers * num_kv_heads * head_size * dtype.itemsize
