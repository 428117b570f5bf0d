"""Compare the result of a reader's function with the right one, and say the first difference in words."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

RTOL, ATOL = 1e-4, 1e-5  # wider than float32 rounding in any order of a sum; every natural mistake differs by more
_MOST_SHOWN = 32


class Raised:
    """The outcome of a call that did not return. Two outcomes of the same kind count as equal."""

    def __init__(self, kind: object, message: str) -> None:
        self.kind, self.message = kind, message


def difference(expected: object, got: object, place: str = "") -> str | None:
    """Return how `got` differs from `expected`, or None. NaN equals NaN, a list equals a tuple, and 2.0 equals 2."""
    subject = f"the result{place}" if not place or place.startswith("[") else place
    if isinstance(expected, Raised) or isinstance(got, Raised):
        same = isinstance(expected, Raised) and isinstance(got, Raised) and expected.kind == got.kind
        return None if same else f"{subject}: {text(expected)} against {text(got)}"
    if got is None and expected is not None:
        return f"{subject} is None, and there may be no `return`"
    if isinstance(expected, Tensor):
        return _tensor_difference(expected, got, subject)
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or set(got) != set(expected):
            return f"{subject} must be a dictionary of {', '.join(expected)}, got {_kind(got)}"
        parts = ((expected[key], got[key], f"{place} {key}".strip()) for key in expected)
    elif isinstance(expected, tuple | list):
        if not isinstance(got, tuple | list) or isinstance(got, str):
            return f"{subject} must be a {type(expected).__name__} of {len(expected)}, got {_kind(got)}"
        if len(got) != len(expected):
            return f"{subject} must have {len(expected)} {'entry' if len(expected) == 1 else 'entries'}, got {len(got)}"
        parts = ((e, g, f"{place}[{i}]") for i, (e, g) in enumerate(zip(expected, got, strict=True)))
    else:
        return _number_difference(expected, got, subject)
    return next((found for part in parts if (found := difference(*part)) is not None), None)


def _tensor_difference(expected: Tensor, got: object, subject: str) -> str | None:
    if not isinstance(got, Tensor):
        return f"{subject} must be a tensor, got {_kind(got)}"
    if got.shape != expected.shape:
        return f"{subject} must have shape {list(expected.shape)}, got {list(got.shape)}"
    if got.dtype != expected.dtype:
        return f"{subject} must be {expected.dtype}, got {got.dtype}"
    wanted, found = expected.detach().cpu().double(), got.detach().cpu().double()
    wrong = ~torch.isclose(found, wanted, RTOL, ATOL, equal_nan=True)
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    must, has = (text(tensor[at].item()) for tensor in (expected, got))
    return f"{subject}{list(at) if at else ''} must be {must}, got {has}"


def _number_difference(expected: object, got: object, subject: str) -> str | None:
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    if expected is None or not isinstance(got, int | float) or isinstance(got, bool):
        return None if expected is got else f"{subject} must be {text(expected)}, got {text(got)}"
    both_nan = math.isnan(got) and math.isnan(expected)
    close = both_nan or math.isclose(got, expected, rel_tol=RTOL * isinstance(expected, float), abs_tol=ATOL)
    return None if close else f"{subject} must be {text(expected)}, got {text(got)}"


def text(value: object) -> str:
    """Return a value as a reader would write it down: four digits, and at most a few rows."""
    if isinstance(value, Raised):
        return value.message
    if isinstance(value, Tensor):
        if value.numel() > _MOST_SHOWN:
            return f"a tensor of shape {list(value.shape)}"
        return text(value.detach().cpu().tolist())
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text(each)}" for key, each in value.items())
    if isinstance(value, tuple | list):
        if len(value) > _MOST_SHOWN:
            return f"{_kind(value)} of {len(value)}"
        brackets = "()" if isinstance(value, tuple) else "[]"
        return brackets[0] + ", ".join(map(text, value)) + brackets[1]
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if value is None or isinstance(value, int | str) else _kind(value)


def _kind(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__}"


def small_numbers(*shape: int) -> Tensor:
    """Return small whole numbers of which no two neighbours are equal."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 11 - 5.0).reshape(shape)
