"""Input checks: what passes, what is refused, and that the message says name, value, rule and remedy."""

import math

import numpy as np
import pytest
import torch

from pagewise.tools.checks import (
    check_count,
    check_heads,
    check_mask,
    check_number,
    check_qkv,
    check_same,
    check_shape,
    check_tensor,
)

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
X = torch.zeros(2, 3)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIZES, FITTING = (2, 4, 3, 5), [(2, 4, 3, 5), (1, 1, 1, 1), (4, 1, 5), (3, 1), (5,), ()]
Q, KV, BOOL = torch.zeros(2, 8, 3, 16), torch.zeros(2, 2, 5, 16), torch.bool


@pytest.mark.parametrize(
    ("check", "arguments", "options"),
    [
        (check_tensor, ["x", X, "B T"], {}),
        (check_tensor, ["x", X, "B T"], {"dtypes": (torch.float16, torch.float32)}),
        (check_tensor, ["x", torch.tensor(1.0), ""], {}),
        (check_shape, ["x", X, [2, 3], "B T"], {}),
        (check_same, ["dtype"], {"q": X, "k": X}),
        *((check_count, ["n", value], {"minimum": minimum}) for value, minimum in ((1, 1), (10**12, 1), (0, 0))),
        *((check_number, ["x", value], {}) for value in (0, 1, -2.5, 1e300, np.float32(0.5))),
        *((check_number, ["p", value], {"low": 0.0, "below": 1.0}) for value in (0.0, 0, 0.999)),
        *((check_heads, heads, {}) for heads in ([8, 8], [8, 2], [8, 1], [6, 3])),
        *((check_qkv, [t.to(dtype) for t in (Q, KV, KV)], {}) for dtype in DTYPES),
        *((check_mask, ["mask", torch.ones(shape, dtype=BOOL), SIZES], {"like": X}) for shape in FITTING),
    ],
)
def test_what_fits_passes(check, arguments, options):
    check(*arguments, **options)


P = {"low": 0.0, "below": 1.0}
REFUSALS = [
    (check_tensor, ["x", np.zeros(3), "T"], {}, TypeError, "x must be a torch.Tensor [T], got ndarray"),
    (
        check_tensor, ["x", X, "B Hkv T D"], {}, ValueError,
        "x must have 4 dimensions [B, Hkv, T, D], got shape [2, 3]",
    ),
    (
        check_tensor, ["x", X, "B T"], {"dtypes": (torch.int32, torch.int64)}, TypeError,
        "x must be int32 or int64, got float32: convert it with x.to(...)",
    ),
    (check_shape, ["x", X, (2, 1), "B T"], {}, ValueError, "x must be [B, T] = [2, 1], got [2, 3]"),
    (
        check_same, ["dtype"], {"q": X, "k": X, "v": X.half()}, TypeError,
        "v must have the dtype of q: float32, got float16; convert it with v.to(q.dtype)",
    ),
    (
        check_same, ["device"], {"q": X, "k": X.to("meta")}, ValueError,
        "k must have the device of q: cpu, got meta; convert it with k.to(q.device)",
    ),
    *(
        (check_count, ["n", value], {"minimum": minimum}, ValueError, f"n must be at least {minimum}, got {value}")
        for value, minimum in ((0, 1), (-1, 0), (7, 8))
    ),
    *(
        (check_count, ["n", value], {}, TypeError, f"n must be an int, got {kind}")
        for value, kind in ((1.0, "float"), (True, "bool"), ("1", "str"), (None, "NoneType"))
    ),
    *(
        (check_number, ["p", value], P, ValueError, f"p must be a finite number in [0.0, 1.0), got {value}")
        for value in (-1e-9, 1.0, 1, math.nan, math.inf, -math.inf)
    ),
    *(
        (check_number, ["x", value], {}, ValueError, f"x must be a finite number, got {value}")
        for value in (math.nan, math.inf, -math.inf)
    ),
    *(
        (check_number, ["x", value], {}, TypeError, f"x must be a number, got {kind}")
        for value, kind in (("1", "str"), (True, "bool"), (1j, "complex"), (None, "NoneType"))
    ),
    *(
        (
            check_heads, [H, Hkv], {}, ValueError,
            f"q has H = {H} heads and k has Hkv = {Hkv}: H must be a multiple of Hkv, "
            "so that each KV head serves H / Hkv query heads",
        )
        for H, Hkv in ((8, 3), (2, 8), (8, 0))
    ),
    *(
        (
            check_mask, ["mask", torch.ones(shape, dtype=BOOL), SIZES], {"like": X}, ValueError,
            f"mask must broadcast to [B, H, T, S] = [2, 4, 3, 5], got {list(shape)}",
        )
        for shape in ((3, 4), (2, 3, 5), (4,), (2, 4, 3, 5, 1), (1, 2, 4, 3, 5), (0,))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("check", "arguments", "options", "error", "message"), REFUSALS)
def test_what_does_not_fit_is_refused_with_its_name_the_rule_the_value_and_the_remedy(
    check, arguments, options, error, message
):
    with pytest.raises(error) as caught:
        check(*arguments, **options)
    assert type(caught.value) is error
    assert str(caught.value) == message


def test_an_additive_mask_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"mask .*bool.*True = may look.*float32.*mask == 0"):
        check_mask("mask", torch.zeros(3, 5), SIZES, like=X)
