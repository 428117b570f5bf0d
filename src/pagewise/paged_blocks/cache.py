"""The paged KV cache: the tensors that block tables point into (lesson 4).

K and V of all layers are two tensors of N blocks with P slots each. Token i of a sequence is in block
block_table[i // P] at offset i % P; slot = block · P + offset names the place in one number. Two layouts:

    nhd     K and V  [N, P, Hkv, D]         a token's K is one contiguous piece
    vllm    K [N, Hkv, D/x, P, x]           x elements (16 bytes) of P neighbouring tokens side by side, so that
            V [N, Hkv, D, P]                threads with neighbouring keys read neighbouring addresses (lesson 5)
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from pagewise.paged_blocks.write import write_kv_cache
from pagewise.tools.checks import FLOAT8, FLOATS, check_count, check_counts, check_same, check_shape, check_tensor
from pagewise.tools.sizes import cdiv


class PagedKVCache:
    """K and V of `num_layers` layers, zero at first. `.k[layer]` and `.v[layer]` are views of one tensor each.

    It stores what it is given, in its own dtype; which slots belong to whom is the BlockManager's business.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        layout: Literal["nhd", "vllm"] = "nhd",
    ) -> None:
        check_counts(num_layers=num_layers, num_blocks=num_blocks, block_size=block_size)
        check_counts(num_kv_heads=num_kv_heads, head_size=head_size)
        if dtype not in (*FLOATS, torch.float64, *FLOAT8):
            raise TypeError(f"dtype must be float32, float16, bfloat16, float64, float8_e4m3fn or _e5m2, got {dtype}")
        if layout not in ("nhd", "vllm"):
            raise ValueError(f'layout must be "nhd" or "vllm", got {layout!r}')
        self.num_blocks, self.block_size, self.layout = num_blocks, block_size, layout
        self.num_kv_heads, self.head_size = num_kv_heads, head_size
        if layout == "nhd":
            k_shape = v_shape = (num_blocks, block_size, num_kv_heads, head_size)
        else:
            x = _vec(head_size, dtype)
            k_shape = (num_blocks, num_kv_heads, head_size // x, block_size, x)
            v_shape = (num_blocks, num_kv_heads, head_size, block_size)
        self.k = torch.zeros(num_layers, *k_shape, dtype=dtype, device=device)
        self.v = torch.zeros(num_layers, *v_shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all layers together, used or not."""
        return self.k.nbytes + self.v.nbytes

    def write(
        self,
        layer: int,
        slots: Int64[Tensor, " T"],
        k: Shaped[Tensor, "T Hkv D"],
        v: Shaped[Tensor, "T Hkv D"],
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        check: bool = True,
        backend: Literal["auto", "torch", "triton"] = "auto",
    ) -> None:
        """Put token t's K and V into slots[t]; slot −1 writes nowhere.

        The cache takes no part in differentiation.

        Args:
            k, v: in the cache's dtype. A float8 cache takes float32, float16 and bfloat16 too.
            k_scale, v_scale: what a float8 cache divides k and v by before it rounds them (see `write`).
            check: look at everything before anything is written, which on a GPU waits for it once. False trusts the
                arguments: wrong slots then write into foreign memory.
            backend: "auto" is triton on a GPU, torch on the CPU. Both write the same bits.

        Raises:
            ValueError, TypeError: a slot below −1 or beyond the cache, a slot given twice, tensors that do not fit, or
                a scale that is not positive, or not 1 where nothing is converted.
        """
        if check:
            self._check_layer(layer)
        how = {"k_scale": k_scale, "v_scale": v_scale, "check": check, "backend": backend}
        write_kv_cache(self.k[layer], self.v[layer], slots, k, v, **how)

    def gather(
        self, layer: int, block_table: Sequence[int] | Int64[Tensor, " M"], length: int
    ) -> tuple[Shaped[Tensor, "len Hkv D"], Shaped[Tensor, "len Hkv D"]]:
        """Copies of K and V of a sequence's first `length` tokens. Table entries beyond them are not looked at."""
        self._check_layer(layer)
        check_count("length", length, minimum=0)
        length = int(length)  # numpy's integers would wrap around
        num_used = cdiv(length, self.block_size)
        if num_used > len(block_table):
            raise ValueError(f"length = {length} needs {num_used} blocks, block_table has {len(block_table)}")
        blocks = [operator.index(block) for block in block_table[:num_used]]
        self._check_blocks("block_table", blocks)
        blocks = torch.tensor(blocks, dtype=torch.int64, device=self.k.device)
        k, v = self.k[layer][blocks], self.v[layer][blocks]
        if self.layout == "vllm":
            k, v = from_vllm_layout(k, v)
        return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in all layers, as if all sources were read before any destination is written.

        So the order of pairs does not matter, and a block that is both source and destination hands on its old
        content. A destination given twice, or a block outside the cache, is refused (ValueError).
        """
        pairs = list(pairs)
        if not pairs:
            return
        src, dst = (list(map(operator.index, blocks)) for blocks in zip(*pairs, strict=True))
        self._check_blocks("src", src)
        self._check_blocks("dst", dst)
        if len(set(dst)) < len(dst):
            raise ValueError(f"pairs must have distinct destinations, got {sorted(dst)}")
        src, dst = (torch.tensor(blocks, device=self.k.device) for blocks in (src, dst))
        for cache in (self.k, self.v):
            cache[:, dst] = cache[:, src]

    def _check_layer(self, layer: int) -> None:
        check_count("layer", layer, minimum=0)
        if layer >= len(self.k):
            raise ValueError(f"layer must be below num_layers = {len(self.k)}, got {layer}")

    def _check_blocks(self, name: str, blocks: list[int]) -> None:
        if blocks and not (min(blocks) >= 0 and max(blocks) < self.num_blocks):
            wrong = next(block for block in blocks if not 0 <= block < self.num_blocks)
            raise ValueError(f"{name} must hold blocks from 0 to {self.num_blocks - 1}, got {wrong}")


def to_vllm_layout(
    k_cache: Shaped[Tensor, "N P Hkv D"], v_cache: Shaped[Tensor, "N P Hkv D"]
) -> tuple[Shaped[Tensor, "N Hkv D_x P x"], Shaped[Tensor, "N Hkv D P"]]:
    """The same cache in vLLM's layout, x = 16 // itemsize. D must be a multiple of x."""
    check_tensor("k_cache", k_cache, "N P Hkv D")
    check_tensor("v_cache", v_cache, "N P Hkv D")
    check_shape("v_cache", v_cache, k_cache.shape, "N P Hkv D")
    check_same("dtype", k_cache=k_cache, v_cache=v_cache)
    k = k_cache.unflatten(-1, (-1, _vec(k_cache.shape[-1], k_cache.dtype)))  # [N, P, Hkv, D/x, x]
    return k.permute(0, 2, 3, 1, 4).contiguous(), v_cache.permute(0, 2, 3, 1).contiguous()


def from_vllm_layout(
    k_cache: Shaped[Tensor, "N Hkv D_x P x"], v_cache: Shaped[Tensor, "N Hkv D P"]
) -> tuple[Shaped[Tensor, "N P Hkv D"], Shaped[Tensor, "N P Hkv D"]]:
    """The exact inverse of `to_vllm_layout`."""
    check_tensor("k_cache", k_cache, "N Hkv D/x P x")
    check_tensor("v_cache", v_cache, "N Hkv D P")
    check_same("dtype", k_cache=k_cache, v_cache=v_cache)
    N, Hkv, vecs, P, x = k_cache.shape
    check_shape("v_cache", v_cache, (N, Hkv, vecs * x, P), "N Hkv D P")
    k = k_cache.permute(0, 3, 1, 2, 4).flatten(-2)  # [N, P, Hkv, D/x, x], then D
    return k.contiguous(), v_cache.permute(0, 3, 1, 2).contiguous()


def _vec(head_size: int, dtype: torch.dtype) -> int:
    """x, the elements of 16 bytes, by which the vllm layout splits D."""
    x = 16 // dtype.itemsize
    if head_size % x:
        raise ValueError(
            f"head_size must be a multiple of x = {x} (16 bytes of {dtype}) for the vllm layout, got {head_size}: "
            f'use layout "nhd"'
        )
    return x
