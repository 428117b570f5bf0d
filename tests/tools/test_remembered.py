"""A check that has one answer for all tensors of a kind is made once, and no other answer is taken from memory."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cudascope import triton_compiled
from pagewise.flash_attention import flash_attention
from pagewise.flash_decoding import flash_decoding
from pagewise.paged_attention import paged_attention
from pagewise.paged_attention_varlen import paged_attention_varlen
from pagewise.tools import remembered
from pagewise.tools.remembered import remembers


@pytest.fixture
def calls():
    """A remembered check, and the arguments of each call that it did not remember."""
    noted = []

    @remembers
    def check(x, number=None):
        noted.append((x, number))
        if number == "wrong":
            raise ValueError("wrong")
        return x.shape

    return check, noted


def test_numbers_in_a_tensor_do_not_matter(calls):
    check, noted = calls
    assert [check(torch.randn(2, 3)) for _ in range(3)] == [(2, 3)] * 3
    assert len(noted) == 1


X = torch.zeros(2, 3)
OTHERS = {
    "shape": (torch.zeros(3, 2),),
    "strides": (torch.zeros(3, 2).T,),
    "dtype": (X.double(),),
    "device": (X.to("meta"),),
    "subclass": (torch.nn.Parameter(X),),
    "1": (X, 1),
    "1.0": (X, 1.0),
    "True": (X, True),
    "a string": (X, "1"),
    "a tuple": (X, (1, X)),
    "1.0 in a tuple": (X, (1.0, X)),
    "another tensor in a tuple": (X, (1, X.double())),
    "a subclass in a tuple": (X, (1, torch.nn.Parameter(X))),
}


def test_what_differs_is_checked(calls):
    check, noted = calls
    check(X)
    for number, other in enumerate(OTHERS.values(), start=2):
        check(*other)
        assert len(noted) == number
    check(X)
    assert len(noted) == 1 + len(OTHERS)


def test_another_gpu_is_another_answer(calls):
    check, noted = calls
    for sm in ("sm_75", "sm_80", "sm_75"):
        with triton_compiled(sm):
            check(X)
    assert len(noted) == 2


def test_an_error_is_not_remembered(calls):
    check, noted = calls
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            check(X, "wrong")
    assert len(noted) == 2


@pytest.mark.parametrize(
    "argument", [torch.nn.Parameter(X), (1, torch.nn.Parameter(X)), ("1", [2])], ids=["subclass", "in a tuple", "list"]
)
def test_nothing_is_remembered_of_what_is_neither_tensor_nor_number(argument, calls):
    check, noted = calls
    for _ in range(2):
        check(X, argument)
    assert len(noted) == 2


def test_nothing_is_remembered_of_fake_tensors(calls):
    check, noted = calls
    for _ in range(2):
        with FakeTensorMode() as mode:
            check(mode.from_tensor(X))
            check(X)
    check(X)
    assert len(noted) == 5


def test_memory_is_bounded(calls, monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 3)
    check, noted = calls
    for n in (1, 2, 3, 4, 4, 1):
        check(torch.zeros(n))
    assert len(noted) == 5  # the fourth made room for all: 4 is known, 1 no longer


# ------------------------------------------------------------------------------------------ the public functions


def paged(function=paged_attention, *more, lens=(20, 5), table=((1, 2), (3, 0)), **options):
    q, caches = torch.randn(2, 4, 16), torch.randn(2, 4, 16, 2, 16)
    tables, lens = torch.tensor(table, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
    return function(q, *caches, tables, lens, *more, **options)


def packed(**options):
    return paged(paged_attention_varlen, torch.tensor([0, 1, 2], dtype=torch.int32), **options)


def dense(lens=(20, 5), requires_grad=False, **options):
    q, k, v = torch.randn(2, 4, 1, 16, requires_grad=requires_grad), *torch.randn(2, 2, 2, 20, 16)
    return flash_decoding(q, k, v, seq_lens=torch.tensor(lens, dtype=torch.int32), **options)


def flash(function=flash_attention, **options):
    return function(torch.randn(1, 4, 3, 16), *torch.randn(2, 1, 2, 5, 16), causal=True, **options)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("call", "wrong", "message"),
    [
        (paged, {"lens": (33, 5)}, "seq_lens must be from 0"),
        (paged, {"table": ((1, 2), (4, 0))}, "block_tables must hold blocks"),
        (paged, {"alibi_slopes": torch.full((4,), torch.nan)}, "alibi_slopes must be finite"),
        (paged, {"window": True}, "window must be an int"),
        (paged, {"num_splits": 1.0}, "num_splits must be an int"),
        (packed, {"lens": (33, 5)}, "seq_lens must be from 0"),
        (packed, {"table": ((1, 2), (4, 0))}, "block_tables must hold blocks"),
        (packed, {"softcap": True}, "softcap must be a number"),
        (dense, {"lens": (21, 5)}, "seq_lens must be from 0"),
        (dense, {"alibi_slopes": torch.full((4,), torch.nan)}, "alibi_slopes must be finite"),
        (flash, {"alibi_slopes": torch.zeros(4, requires_grad=True)}, "alibi_slopes must not require"),
        (flash, {"attn_mask": torch.ones(2, 5, dtype=torch.bool)}, "attn_mask must broadcast"),
        (flash, {"dropout_p": 1.0}, "dropout_p must be"),
    ],
)
def test_the_second_call_refuses_what_the_first_would(call, wrong, message, backend, kernel_device, shapes_unchecked):
    right = {"window": 1, "num_splits": 1} if call is paged else {}
    with torch.device(kernel_device):
        call(**right, backend=backend)
        with pytest.raises((TypeError, ValueError), match=message):
            call(**(right | wrong), backend=backend)


def test_the_second_call_refuses_a_gradient_that_it_lacks(kernel_device):
    with torch.device(kernel_device):
        dense(backend="triton")
        with pytest.raises(ValueError, match="has no backward"):
            dense(requires_grad=True, backend="triton")


def test_the_second_call_differentiates():
    flash()
    q = torch.randn(1, 4, 3, 16, requires_grad=True)
    flash_attention(q, *torch.randn(2, 1, 2, 5, 16), causal=True).sum().backward()
    assert q.grad.abs().sum() > 0
