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
from pagewise.kernels.arguments import DecodeSizes
from pagewise.paged_attention.in_triton import partial_results
from pagewise.tools.architecture import architecture
from pagewise.tools.launch import launch
from pagewise.tools.ops import custom_op
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
        sizes = {"SIZES": DecodeSizes(None, D, padded(D), H // Hkv, tiles.rows, tiles.keys), "HKV": Hkv}
        sizes |= {"CAUSAL": causal and T > 1, **tiles.launch_options}
        return cls(tiles, (items, num_splits), sizes, partial_results(B * H * T * num_splits, D, q.device))

    def merge(self, kernel: Any, out: Tensor, *, outputs: tuple[Tensor, ...] = (), **arguments: Any) -> None:
        """Merge the splits into out, row by row, by a merge kernel. outputs, arguments: what it has besides."""
        D, rows = out.shape[-1], out.numel() // out.shape[-1]
        out, lse = out.view(-1), torch.empty(rows, device=out.device)
        launch(
            kernel,
            (rows,),
            partials=self.partials,
            out_ptr=out,
            lse_ptr=lse,
            num_splits=self.grid[1],
            D=D,
            BLOCK_D=padded(D),
            LOADS=LOADS,
            outputs=(out, lse, *outputs),
            **arguments,
        )

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
        self.merge(merge_splits_kernel, out)
        return out


@custom_op(
    "unified_max_attention",
    fake=lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.bool)),
)
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
    shared.merge(add_splits_kernel, out, outputs=(flags,), unsafe_ptr=flags, **band._asdict())
    exact = shared.rescale_lazily(q, k, v, seq_lens, flags, scale, 0.0)
    unsafe = unsafe.view(torch.bool)
    return torch.where(unsafe[..., None], exact, out), unsafe


@custom_op("lazy_rescale_attention", fake=lambda q, *_: q.new_empty(q.shape))
def lazy_rescale(
    q: Tensor, k: Tensor, v: Tensor, threshold: float, scale: float, causal: bool, num_splits: int | None
) -> Tensor:
    """Return `lazy_rescale_attention`, for tensors that the kernels do not refuse. threshold: in units of log 2."""
    if not q.numel():
        return q.new_empty(q.shape)
    shared = _Launch.of(q, k, causal, num_splits)
    return shared.rescale_lazily(q, k, v, None, None, scale, threshold * math.log(2))
