"""`custom_op`: what torch sees of an op, and what it must not see."""

import operator
import subprocess
import sys

import torch
import torch._dynamo
from torch import Tensor

from pagewise.tools.ops import custom_op

FIRST_CALLS = """
import sys, torch
from pagewise.flash_attention import flash_attention
from pagewise.flash_decoding import flash_decoding
from pagewise.paged_attention_varlen import paged_attention_varlen
q = torch.zeros(1, 1, 1, 16)
flash_attention(q, q, q, backend="torch"), flash_decoding(q, q, q, backend="triton")
print("torch._dynamo" in sys.modules)
"""


@custom_op("test_twice", fake=lambda x, _: torch.empty_like(x))
def twice(x: Tensor, label: str) -> Tensor:
    return 2 * x


def test_the_op_is_what_torch_says_an_op_must_be():
    torch.library.opcheck(torch.ops.pagewise.test_twice, (torch.ones(3), "label"))
    assert torch.equal(twice(torch.ones(3), "label"), torch.full((3,), 2.0))


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
    assert graphs == [[operator.add]]


def test_neither_an_import_nor_a_first_call_imports_the_compiler():
    said = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False"]
