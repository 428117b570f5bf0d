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


def refusal(error, check, *args, **kwargs):
    with pytest.raises(error) as caught:
        check(*args, **kwargs)
    assert type(caught.value) is error
    return str(caught.value)


def test_tensor_of_the_right_rank_and_dtype_passes():
    check_tensor("x", X, "B T")
    check_tensor("x", X, "B T", dtypes=(torch.float16, torch.float32))
    check_tensor("x", torch.tensor(1.0), "")


def test_what_is_no_tensor_is_refused():
    assert refusal(TypeError, check_tensor, "x", np.zeros(3), "T") == "x must be a torch.Tensor [T], got ndarray"


def test_wrong_rank_is_refused_with_the_shape():
    message = refusal(ValueError, check_tensor, "x", X, "B Hkv T D")
    assert message == "x must have 4 dimensions [B, Hkv, T, D], got shape [2, 3]"


def test_wrong_dtype_is_refused_with_the_choice_and_the_remedy():
    message = refusal(TypeError, check_tensor, "x", X, "B T", dtypes=(torch.int32, torch.int64))
    assert message == "x must be int32 or int64, got float32: convert it with x.to(...)"


def test_wrong_shape_is_refused_with_both():
    check_shape("x", X, [2, 3], "B T")
    assert refusal(ValueError, check_shape, "x", X, (2, 1), "B T") == "x must be [B, T] = [2, 1], got [2, 3]"


def test_dtypes_must_be_the_same():
    check_same("dtype", q=X, k=X)
    message = refusal(TypeError, check_same, "dtype", q=X, k=X, v=X.half())
    assert message == "v must have the dtype of q: float32, got float16; convert it with v.to(q.dtype)"


def test_devices_must_be_the_same():
    message = refusal(ValueError, check_same, "device", q=X, k=X.to("meta"))
    assert message == "k must have the device of q: cpu, got meta; convert it with k.to(q.device)"


@pytest.mark.parametrize(("value", "minimum"), [(1, 1), (10**12, 1), (0, 0)])
def test_count_passes(value, minimum):
    check_count("n", value, minimum=minimum)


@pytest.mark.parametrize(("value", "minimum"), [(0, 1), (-1, 0), (7, 8)])
def test_count_that_is_too_small_is_refused(value, minimum):
    expected = f"n must be at least {minimum}, got {value}"
    assert refusal(ValueError, check_count, "n", value, minimum=minimum) == expected


@pytest.mark.parametrize(("value", "kind"), [(1.0, "float"), (True, "bool"), ("1", "str"), (None, "NoneType")])
def test_count_that_is_no_int_is_refused(value, kind):
    assert refusal(TypeError, check_count, "n", value) == f"n must be an int, got {kind}"


@pytest.mark.parametrize("value", [0, 1, -2.5, 1e300, np.float32(0.5)])
def test_number_passes(value):
    check_number("x", value)


@pytest.mark.parametrize("value", [0.0, 0, 0.999])
def test_number_passes_inside_its_bounds(value):
    check_number("p", value, low=0.0, below=1.0)


@pytest.mark.parametrize("value", [-1e-9, 1.0, 1, math.nan, math.inf, -math.inf])
def test_number_outside_its_bounds_is_refused(value):
    expected = f"p must be a finite number in [0.0, 1.0), got {value}"
    assert refusal(ValueError, check_number, "p", value, low=0.0, below=1.0) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_is_refused(value):
    assert refusal(ValueError, check_number, "x", value) == f"x must be a finite number, got {value}"


@pytest.mark.parametrize(("value", "kind"), [("1", "str"), (True, "bool"), (1j, "complex"), (None, "NoneType")])
def test_what_is_no_number_is_refused(value, kind):
    assert refusal(TypeError, check_number, "x", value) == f"x must be a number, got {kind}"


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1), (6, 3)])
def test_heads_that_divide_pass(heads, kv_heads):
    check_heads(heads, kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 3), (2, 8), (8, 0)])
def test_heads_that_do_not_divide_are_refused_with_the_reason(heads, kv_heads):
    message = refusal(ValueError, check_heads, heads, kv_heads)
    assert all(word in message for word in (f"H = {heads}", f"Hkv = {kv_heads}", "multiple of Hkv"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_queries_keys_and_values_that_fit_pass(dtype):
    q, kv = torch.zeros(2, 8, 3, 16, dtype=dtype), torch.zeros(2, 2, 5, 16, dtype=dtype)
    check_qkv(q, kv, kv)


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 1, 1, 1), (4, 1, 5), (3, 1), (5,), ()], ids=str)
def test_mask_that_broadcasts_passes(shape):
    check_mask("mask", torch.ones(shape, dtype=torch.bool), (2, 4, 3, 5), like=X)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (4,), (2, 4, 3, 5, 1), (1, 2, 4, 3, 5), (0,)], ids=str)
def test_mask_that_does_not_broadcast_is_refused(shape):
    message = refusal(ValueError, check_mask, "mask", torch.ones(shape, dtype=torch.bool), (2, 4, 3, 5), like=X)
    assert message == f"mask must broadcast to [B, H, T, S] = [2, 4, 3, 5], got {list(shape)}"


def test_additive_mask_is_refused_with_the_remedy():
    message = refusal(TypeError, check_mask, "mask", torch.zeros(3, 5), (2, 4, 3, 5), like=X)
    assert all(word in message for word in ("mask ", "bool", "True = may look", "float32", "mask == 0"))
