"""The unified maximum and lazy rescaling in Triton: how the kernels are launched (lesson 8).

Rows for which φ was not safe are recomputed by a second launch, with the plain online softmax. A program none of whose
rows is unsafe reads no key. The host therefore never waits to see whether a row is unsafe, and a CUDA graph holds both
launches.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagewise.flash_decoding_plus_plus.band import Band
from pagewise.paged_attention.in_triton import partial_results
from pagewise.tools.architecture import architecture
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv, padded
from pagewise.tools.tuning import LOADS, Tiles, decode_tiles, splits_that_fill

LOG_FLOAT16_MAX = math.log(torch.finfo(torch.float16).max)


class _Launch(NamedTuple):
    """The sizes that all launches for one q and k share, and the memory for the partial results of the splits."""

    tiles: Tiles
    grid: tuple[int, int]
    sizes: dict[str, Any]
    partials: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, causal: bool, num_splits: int | None) -> "_Launch":
        (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
        tiles, gpu = decode_tiles(T * H // Hkv, D, q.dtype, k.dtype), architecture(q.device)
        items = B * Hkv * cdiv(T * H // Hkv, tiles.rows)
        if num_splits is None:
            num_splits = splits_that_fill(items, S, tiles.keys, gpu.num_sms) if gpu.sm else 1
        num_splits = max(1, min(num_splits, cdiv(S, tiles.keys)))
        sizes = {"D": D, "BLOCK_D": padded(D), "HKV": Hkv, "GROUP": H // Hkv, "ROWS": tiles.rows, "TILE": tiles.keys}
        sizes |= {"CAUSAL": causal and T > 1, **tiles.launch_options}
        return cls(tiles, (items, num_splits), sizes, partial_results(B * H * T * num_splits, D, q.device))

    def merge(self, kernel: Any, out: Tensor, *arguments: Any, flags: tuple[Tensor, ...] = ()) -> None:
        """Merge the splits into out, row by row, by a merge kernel."""
        D, num_splits = out.shape[-1], self.grid[1]
        outputs = (out.view(-1), torch.empty(out.numel() // D, device=out.device), *flags)
        sizes = {"D": D, "BLOCK_D": padded(D), "LOADS": LOADS}
        launch(kernel, (len(outputs[1]),), self.partials, *outputs, num_splits, *arguments, **sizes, outputs=outputs)

    def rescale_lazily(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_lens: Tensor | None,
        chosen: Tensor | None,
        scale: float,
        tau: float,
    ) -> Tensor:
        """Return out by the lazy kernel, for the chosen rows. The other rows are undefined."""
        from pagewise.kernels.flash_decoding_plus_plus import lazy_rescale_kernel
        from pagewise.kernels.paged_attention import merge_splits_kernel

        out = q.new_empty(q.shape)
        wide = q.dtype == torch.float16 and tau > LOG_FLOAT16_MAX
        numbers = (q.shape[2], k.shape[2], scale, tau)
        tensors = (q, k, v, seq_lens, chosen, self.partials)
        launch(lazy_rescale_kernel, self.grid, *tensors, *numbers, **self.sizes, WIDE=wide)
        self.merge(merge_splits_kernel, out, 1.0)
        return out


@torch.library.custom_op("pagewise::unified_max_attention", mutates_args=())
def unified_max(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor | None,
    phi: float,
    low: float,
    high: float,
    scale: float,
    causal: bool,
    num_splits: int | None,
) -> tuple[Tensor, Tensor]:
    """Return (out, recomputed) of `unified_max_attention`, for tensors that the kernels do not refuse."""
    from pagewise.kernels.flash_decoding_plus_plus import add_splits_kernel, unified_max_attention_kernel

    out, unsafe = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.uint8)
    if not q.numel():
        return out, unsafe.view(torch.bool)
    shared, flags = _Launch.of(q, k, causal, num_splits), unsafe.view(-1)
    numbers = (q.shape[2], k.shape[2], scale, phi)
    launch(unified_max_attention_kernel, shared.grid, q, k, v, seq_lens, shared.partials, *numbers, **shared.sizes)
    band = Band.of(phi, low, high, k.shape[2], torch.float32)  # here, because a traced S is not a number
    shared.merge(add_splits_kernel, out, *band, flags=(flags,))
    exact = shared.rescale_lazily(q, k, v, seq_lens, flags, scale, 0.0)
    unsafe = unsafe.view(torch.bool)
    return torch.where(unsafe[..., None], exact, out), unsafe


@unified_max.register_fake
def _(q, *others):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.bool)


@torch.library.custom_op("pagewise::lazy_rescale_attention", mutates_args=())
def lazy_rescale(
    q: Tensor, k: Tensor, v: Tensor, threshold: float, scale: float, causal: bool, num_splits: int | None
) -> Tensor:
    """Return `lazy_rescale_attention`, for tensors that the kernels do not refuse. threshold: in units of log 2."""
    if not q.numel():
        return q.new_empty(q.shape)
    shared = _Launch.of(q, k, causal, num_splits)
    return shared.rescale_lazily(q, k, v, None, None, scale, threshold * math.log(2))


@lazy_rescale.register_fake
def _(q, *others):
    return q.new_empty(q.shape)
