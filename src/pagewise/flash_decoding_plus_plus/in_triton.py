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
        tiles = tiles._replace(num_warps=max(4, tiles.num_warps))  # the loop has masks, which take registers
        items = B * Hkv * cdiv(T * H // Hkv, tiles.rows)
        if num_splits is None:
            num_splits = splits_that_fill(items, S, tiles.keys, gpu.num_sms) if gpu.sm else 1
        num_splits = max(1, min(num_splits, cdiv(S, tiles.keys)))
        sizes = {"D": D, "BLOCK_D": padded(D), "HKV": Hkv, "GROUP": H // Hkv, "ROWS": tiles.rows, "TILE": tiles.keys}
        sizes |= {"CAUSAL": causal and T > 1, **tiles.launch_options}
        return cls(tiles, (items, num_splits), sizes, partial_results(B * H * T * num_splits, D, q.device))

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

        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
        rows = (out.view(-1), lse.view(-1))
        launch(
            lazy_rescale_kernel,
            self.grid,
            q=q,
            k=k,
            v=v,
            seq_lens_ptr=seq_lens,
            chosen_ptr=chosen,
            partials=self.partials,
            num_queries=q.shape[2],
            S=k.shape[2],
            scale=scale,
            threshold=tau,
            WIDE=q.dtype == torch.float16 and tau > LOG_FLOAT16_MAX,
            **self.sizes,
        )
        launch(
            merge_splits_kernel,
            (lse.numel(),),
            partials=self.partials,
            out_ptr=rows[0],
            lse_ptr=rows[1],
            num_splits=self.grid[1],
            D=out.shape[-1],
            BLOCK_D=padded(out.shape[-1]),
            LOADS=LOADS,
            outputs=rows,
        )
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
    shared, lse = _Launch.of(q, k, causal, num_splits), q.new_empty(q.shape[:3], dtype=torch.float32)
    launch(
        unified_max_attention_kernel,
        shared.grid,
        q=q,
        k=k,
        v=v,
        seq_lens_ptr=seq_lens,
        partials=shared.partials,
        num_queries=q.shape[2],
        S=k.shape[2],
        scale=scale,
        phi=phi,
        **shared.sizes,
    )
    band = Band.of(phi, low, high, k.shape[2], torch.float32)  # here, because a traced S is not a number
    rows = (out.view(-1), lse.view(-1), unsafe.view(-1))
    launch(
        add_splits_kernel,
        (lse.numel(),),
        partials=shared.partials,
        out_ptr=rows[0],
        lse_ptr=rows[1],
        unsafe_ptr=rows[2],
        num_splits=shared.grid[1],
        **band._asdict(),
        D=q.shape[-1],
        BLOCK_D=padded(q.shape[-1]),
        LOADS=LOADS,
        outputs=rows,
    )
    exact = shared.rescale_lazily(q, k, v, seq_lens, unsafe.view(-1), scale, 0.0)
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
