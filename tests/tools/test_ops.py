"""`custom_op`: what torch sees of an op, and what it must not see."""

import operator
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pagewise.tools.ops import custom_op, is_seen

FIRST_CALLS = """
import sys, torch
from pagewise.flash_attention import flash_attention
from pagewise.flash_decoding import flash_decoding
from pagewise.paged_attention_varlen import paged_attention_varlen
from pagewise.tools.work import count_work
q = torch.zeros(1, 1, 1, 16)
flash_attention(q, q, q, backend="torch"), flash_decoding(q, q, q, backend="triton")
work = count_work(lambda: q + q)
print("torch._dynamo" in sys.modules)
double = lambda: torch.compile(lambda q: q + q, backend=lambda graph, _: graph)(q)
print(count_work(lambda: [double() for _ in range(9)]).bytes_moved == 9 * work.bytes_moved)
"""


@custom_op("test_twice", fake=lambda x, _: torch.empty_like(x))
def twice(x: Tensor, label: str) -> Tensor:
    return 2 * x


@pytest.mark.slow
def test_the_op_is_what_torch_says_an_op_must_be():
    torch.library.opcheck(torch.ops.pagewise.test_twice, (torch.ones(3), "label"))
    assert torch.equal(twice(torch.ones(3), "label"), torch.full((3,), 2.0))
    assert torch.equal(twice(torch.ones(3), label="label"), torch.full((3,), 2.0))


@pytest.mark.slow
def test_the_compiler_does_not_look_into_an_op_that_it_meets_outside_of_its_graphs():
    @torch._dynamo.disable(recursive=False)
    def given_up(x: Tensor) -> Tensor:
        return twice(x, "label")

    graphs = []

    def keep(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    out = torch.compile(lambda x: given_up(x) + 1, backend=keep)(torch.ones(3))
    assert torch.equal(out, torch.full((3,), 3.0))
    assert graphs == [[torch.ops.pagewise.test_twice.default], [operator.add]]


@pytest.mark.slow
def test_neither_an_import_nor_a_first_call_imports_the_compiler():
    said = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=True)
    assert (said.stdout.split(), said.stderr) == (["False", "True"], "")


# ------------------------------------------------------------------------------------------ direct calls

X = torch.ones(3)
NOTED = []


class Subclass(Tensor):
    pass


class InBackward(torch.autograd.Function):
    """Notes what `is_seen` says of the gradient, which is a batch in `is_grads_batched`."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        NOTED.append(is_seen((grad,)))
        return grad


def test_a_plain_call_is_not_seen():
    assert not is_seen((X, None, 1, 0.5, True, "label"))
    with torch.no_grad():
        assert not is_seen((X.clone().requires_grad_(), torch.empty(0)))
    with torch.inference_mode():
        assert not is_seen((torch.ones(3),))


@pytest.mark.parametrize("mode", [TorchDispatchMode, TorchFunctionMode, FakeTensorMode])
def test_a_mode_sees_the_op(mode):
    with mode():
        assert is_seen((X,))


@pytest.mark.parametrize(
    "x",
    [X.as_subclass(Subclass), FakeTensorMode().from_tensor(X), X.clone().requires_grad_()],
    ids=lambda x: type(x).__name__,
)
def test_a_tensor_that_is_more_than_its_numbers_sees_the_op(x):
    assert is_seen((X, x))


def test_transforms_see_the_op():
    seen = []

    def note(x):
        seen.append(is_seen((x,)))
        return x.sum()

    torch.vmap(note)(torch.ones(2, 3))
    torch.func.grad(note)(X)
    torch.func.jvp(note, (X,), (X,))
    assert seen == [True] * 3


def test_a_backward_sees_the_op():
    x = X.clone().requires_grad_()
    torch.autograd.grad(InBackward.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert NOTED == [True]


def test_the_profiler_sees_the_op():
    with torch.profiler.profile() as profile:
        twice(X, "label")
    assert "pagewise::test_twice" in [event.name for event in profile.events()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_sees_the_op():
    traced = torch.jit.trace(lambda x: twice(x, "label"), X)
    assert "pagewise::test_twice" in str(traced.graph)
