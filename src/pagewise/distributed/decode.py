"""Decode over keys that are spread over processes: results travel, keys do not (lesson 10).

A decode step has few queries and many keys. Each process attends to its own keys, and the results (out, lse) of all
processes are merged, as lesson 7 merges the splits of one GPU. A result is D + 1 numbers for a query and head, however
long the context is.
"""

import zlib

import torch
import torch.distributed as dist
from jaxtyping import Float, Int32
from torch import Tensor

from pagewise.distributed.communication import Group, all_gather, compare, group_of, refuse_options
from pagewise.flash_decoding import flash_decoding
from pagewise.online_softmax import merge_attention
from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_flag, check_qkv, check_same, check_shape
from pagewise.tools.device import looks
from pagewise.tools.transforms import check_derivative


def decode_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    group: Group,
    seq_lens: Int32[Tensor, " B"] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    return_lse: bool = False,
    check: bool | None = None,
) -> Float[Tensor, "B H T D"] | tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Attend with few queries (T from 1 to about 16) to the keys of all processes of a group.

    Every process passes the same q and its own keys and values, any number of them. Every process gets the same out,
    bit for bit. The result has no gradient.

    Args:
        group: a group of torch.distributed. None: all processes.
        seq_lens: sequence b has that many keys in this process, from 0 to S. Default: S each.
        scale, softcap: as in `attention`. window, alibi_slopes: None, because a process does not know the positions of
            its keys. `all_to_all_attention` has both.
        return_lse: also return the natural log-sum-exp of the scores, float32 (float64 for float64).
        check: let the processes compare their arguments first, q included. By default this is done on the CPU, and not
            on a GPU, where the comparison takes longer than the step. `check` must be the same in every process. It is
            also that of `flash_decoding`.

    Raises:
        ValueError, TypeError, RuntimeError: as `ring_attention`. Other processes hear of an error with `check` only.
    """
    group = group_of(group)
    results, checks = [], _compares(check, q)

    def describe() -> dict[str, object]:
        check_qkv(q, k, v)
        check_flag("return_lse", return_lse)
        check_derivative("decode over processes", q, k, v, remedy="ring_attention")
        refuse_options("decode_attention", window=window, alibi_slopes=alibi_slopes)
        how = {"seq_lens": seq_lens, "scale": scale, "softcap": softcap, "check": check}
        results[:] = flash_decoding(q, k, v, **how, return_lse=True)
        shapes = {"the shape of q": [*q.shape], "Hkv": k.shape[1]}
        if checks:
            shapes["q"] = f"CRC {zlib.crc32(q.detach().cpu().contiguous().view(torch.uint8).numpy())}"
        return {**shapes, "the dtype": q.dtype, "scale": ScoreOptions(scale).scale_for(q.shape[3]), "softcap": softcap}

    compare("decode_attention", group, describe) if checks else describe()
    out, lse = _merged(*results, group)
    return (out, lse) if return_lse else out


def merge_over_processes(
    out: Float[Tensor, "*rows D"], lse: Float[Tensor, "*rows"], *, group: Group, check: bool | None = None
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows"]]:
    """Merge what each process computed over its own keys. Every process gets the same (out, lse), bit for bit.

    For a paged cache, out and lse are the result of `paged_attention(..., return_lse=True)`. A process without keys
    passes lse = −inf, and its out is not used. The result has no gradient. One all-gather carries out and lse.

    Args:
        group, check: as in `decode_attention`.

    Raises:
        ValueError, TypeError, RuntimeError: as `decode_attention`.
    """
    group = group_of(group)

    def describe() -> dict[str, object]:
        for name, x in (("out", out), ("lse", lse)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                got = getattr(x, "dtype", type(x).__name__)
                raise TypeError(f"{name} must be a tensor of floating-point numbers, got {got}")
        check_shape("lse", lse, out.shape[:-1], "...")
        check_same("device", out=out, lse=lse)
        check_derivative("decode over processes", out, lse, remedy="ring_attention")
        return {"the shape of out": [*out.shape], "the dtype of out": out.dtype, "the dtype of lse": lse.dtype}

    compare("merge_over_processes", group, describe) if _compares(check, out) else describe()
    return _merged(out, lse, group)


def _compares(check: bool | None, x: object) -> bool:
    return looks(check, x if isinstance(x, Tensor) else torch.empty(0))


def _merged(out: Tensor, lse: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(out.dtype, lse.dtype)
    packed = torch.cat((out.to(wide), lse.to(wide)[..., None]), dim=-1)  # [..., D + 1]
    gathered = all_gather(packed, group, "out and lse")  # [n, ..., D + 1]
    merged, merged_lse = merge_attention(gathered[..., :-1], gathered[..., -1])
    return merged.to(out.dtype), merged_lse.to(lse.dtype)
