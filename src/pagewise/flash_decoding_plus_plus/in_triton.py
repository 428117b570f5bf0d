"""How the kernels of the unified maximum and of lazy rescaling are launched (lesson 8)."""

import math
from typing import Any

import torch
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_triton import DecodeInputs, partial_results, parts_of
from pagewise.paged_attention.inputs import Splits
from pagewise.tools.launch import launch
from pagewise.tools.sizes import padded
from pagewise.tools.tuning import LOADS

LOG_FLOAT16_MAX = math.log(torch.finfo(torch.float16).max)


def shared_arguments(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor | None, scale: float, causal: bool, num_splits: int | None
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of both attention kernels, and the arguments that both take."""
    (B, H, T, D), S = q.shape, k.shape[2]
    [part] = parts_of(DecodeInputs(q, k, v, ScoreOptions(), Splits("num", num_splits or 0)))
    tiles = part.tiles._replace(num_warps=max(4, part.tiles.num_warps))  # the loop has masks, which take registers
    tensors = {"q": q, "k": k, "v": v, "seq_lens_ptr": seq_lens}
    tensors["partials"] = partial_results(B * H * T * part.num_splits, D, q.device)
    numbers = {"num_queries": T, "S": S, "scale": scale}
    constants = {"SIZES": part.sizes, "HKV": k.shape[1], "CAUSAL": causal and T > 1}
    return (part.items, part.num_splits), tensors | numbers | constants | tiles.launch_options


def merge(kernel: Any, partials: tuple[Tensor, ...], out: Tensor, **arguments: Any) -> None:
    """Merge the splits into out, row by row, by a merge kernel. arguments: what it has besides."""
    D, rows = out.shape[-1], out.numel() // out.shape[-1]
    out, lse = out.view(-1), torch.empty(rows, device=out.device)
    arguments |= {"num_splits": len(partials[0]) // rows, "D": D, "BLOCK_D": padded(D), "LOADS": LOADS}
    launch(kernel, (rows,), partials=partials, out_ptr=out, lse_ptr=lse, outputs=(out,), **arguments)


def rescale_lazily(grid: tuple[int, int], chosen: Tensor | None, tau: float, arguments: dict[str, Any]) -> Tensor:
    """Return out by the lazy kernel, for the chosen rows. The other rows are undefined."""
    from pagewise.kernels.flash_decoding_plus_plus import lazy_rescale_kernel
    from pagewise.kernels.paged_attention import merge_splits_kernel

    q = arguments["q"]
    out, wide = q.new_empty(q.shape), q.dtype == torch.float16 and tau > LOG_FLOAT16_MAX
    launch(lazy_rescale_kernel, grid, chosen_ptr=chosen, threshold=tau, WIDE=wide, **arguments)
    merge(merge_splits_kernel, arguments["partials"], out)
    return out
