"""Input checks shared by all public functions. Each raises before anything is written or launched.

A message names the argument, what it was, what it must be and, where there is one, the remedy.
"""

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral, Real

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT32_MAX = torch.finfo(torch.float32).max


def check_tensor(name: str, value: object, axes: str, *, dtypes: Sequence[torch.dtype] = ()) -> None:
    """`value` must be a tensor with one dimension per letter group of `axes` ("B H T D") and one of `dtypes`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor [{_commas(axes)}], got {type(value).__name__}")
    if value.dim() != len(axes.split()):
        raise ValueError(
            f"{name} must have {len(axes.split())} dimensions [{_commas(axes)}], got shape {list(value.shape)}"
        )
    if dtypes and value.dtype not in dtypes:
        raise TypeError(f"{name} must be {_one_of(dtypes)}, got {_short(value.dtype)}: convert it with {name}.to(...)")


def check_shape(name: str, value: Tensor, expected: Sequence[int], axes: str) -> None:
    """`value.shape` must be `expected`; `axes` says what the sizes are."""
    if list(value.shape) != list(expected):
        raise ValueError(f"{name} must be [{_commas(axes)}] = {list(expected)}, got {list(value.shape)}")


def check_same(attribute: str, **tensors: Tensor) -> None:
    """All tensors must share `attribute`, "dtype" (else TypeError) or "device" (else ValueError)."""
    (first, expected), *rest = ((name, getattr(t, attribute)) for name, t in tensors.items())
    for name, actual in rest:
        if actual != expected:
            error = TypeError if attribute == "dtype" else ValueError
            raise error(
                f"{name} must have the {attribute} of {first}: {_short(expected)}, got {_short(actual)}; "
                f"convert it with {name}.to({first}.{attribute})"
            )


def check_count(name: str, value: object, *, minimum: int = 1) -> None:
    """`value` must be an int (numpy's count) of at least `minimum`, and below 2⁶³."""
    if type(value) is not int and (isinstance(value, bool | Tensor) or not isinstance(value, Integral)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if value >= 2**63:
        raise ValueError(f"{name} must be below 2**63, got {value}")


def check_counts(*, minimum: int = 1, **values: object) -> None:
    """`check_count` of each, by its name."""
    for name, value in values.items():
        check_count(name, value, minimum=minimum)


def check_flag(name: str, value: object) -> None:
    """`value` must be True or False: other things that Python takes for true are mistakes here."""
    if not isinstance(value, bool):
        kind = type(value)
        got = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        raise TypeError(f"{name} must be True or False, got {got}")


def check_number(name: str, value: object, *, low: float = float("-inf"), below: float = float("inf")) -> None:
    """`value` must be a number in [low, below); NaN and infinities never are."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (low <= value < below) or value == float("-inf"):
        bounds = f" in [{low}, {below})" if low != float("-inf") else ""
        raise ValueError(f"{name} must be a finite number{bounds}, got {value}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [B,H,T,D] must fit k and v [B,Hkv,S,D]: same B, D, dtype and device; H a multiple of Hkv."""
    for name, tensor, axes in (("q", q, "B H T D"), ("k", k, "B Hkv S D"), ("v", v, "B Hkv S D")):
        check_tensor(name, tensor, axes, dtypes=(*FLOATS, torch.float64))
    if not q.dtype == k.dtype == v.dtype:
        check_same("dtype", q=q, k=k, v=v)
    if not q.device == k.device == v.device:
        check_same("device", q=q, k=k, v=v)
    (B, H, _, D), (_, Hkv, S, _) = q.shape, k.shape
    check_shape("k", k, (B, Hkv, S, D), "B Hkv S D")
    check_shape("v", v, k.shape, "B Hkv S D")
    check_heads(H, Hkv)
    if D == 0:
        raise ValueError("q must have a head size D of at least 1, got 0")


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Query heads must divide evenly into groups, one group per KV head."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"q has H = {num_heads} heads and k has Hkv = {num_kv_heads}: H must be a multiple of Hkv, "
            f"so that each KV head serves H / Hkv query heads"
        )


def check_running_sums(name: str, cu_seqlens: Tensor, rows: int) -> list[int]:
    """The lengths of which `cu_seqlens_<name>` holds the running sums, from 0 to the number of rows of `name`."""
    sums = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(sums)]
    if sums[0] != 0 or sums[-1] != rows or min(lengths, default=0) < 0:
        shown = str(sums) if len(sums) <= 8 else f"[{_commas(' '.join(map(str, sums[:4])))}, …, {sums[-1]}]"
        raise ValueError(
            f"cu_seqlens_{name} must rise from 0 to the {rows} rows of {name}, got {shown}: running sums of "
            f"lengths, as torch.cumsum gives them, with a 0 in front"
        )
    return lengths


def check_mask(name: str, mask: Tensor, shape: Sequence[int], *, like: Tensor, true_means: str = "may look") -> None:
    """`mask` must be bool and broadcast to `shape` = [B,H,T,S] without enlarging it."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = _short(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"{name} must be a bool tensor (True = {true_means}), got {got}: for an additive mask use mask == 0"
        )
    check_same("device", q=like, **{name: mask})
    fits = mask.dim() <= len(shape) and all(
        size in (1, full) for size, full in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to [B, H, T, S] = {list(shape)}, got {list(mask.shape)}")


def _commas(axes: str) -> str:
    return ", ".join(axes.split())


def _one_of(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(_short(dtype) for dtype in dtypes)


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")
