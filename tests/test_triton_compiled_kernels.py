"""Triton kernels compiled for a GPU, their PTX executed and checked on the CPU, against the oracle by the one policy.

The interpreter runs the Python source of a kernel. These tests run the code that a GPU gets: its tensor-core products,
asynchronous copies, shared memory and barriers. Each variant of the table in `pagewise.experiments.compiled_kernels`
runs for one GPU. With PAGEWISE_FULL=1, every pair of call, GPU, dtype, head size and options occurs.
"""

import contextlib
from itertools import product

import pytest
import torch
from covering import covering, is_full, label

from conftest import assert_as_accurate_as_naive, triton_kernels
from cudascope import triton_compiled
from cudascope.triton import launches as triton_launches
from pagewise.experiments.compiled_kernels import ARCHS, CALLS, CASES, Variant, run

AXES = {
    "call": list(CALLS),
    "arch": ARCHS,
    "dtype": [torch.float16, torch.bfloat16, torch.float32],
    "head_size": [16, 32, 40, 64, 80, 128],
    "options": [False, True],
}
# The GPU of each variant of CASES, in their order: all pairs with a dtype that a GPU can compute. None: `make rehearse`
# executes such a launch, and "unified max" launches the kernel of lazy rescaling.
TURNS = (
    "sm_75", "sm_80", "sm_90", "sm_80", "sm_90", "sm_80", None, "sm_80", None, "sm_75", "sm_90", "sm_75", "sm_80",
)  # fmt: skip
# These builds take half as long.
SMALLER = {"paged decode": {"head_size": 32}, "unified max": {"head_size": 32}, "flash": {"options": False}}
CHOSEN = [
    (variant._replace(**SMALLER.get(variant.call, {})), arch)
    for variant, arch in zip(CASES, TURNS, strict=True)
    if arch
]
# The calls that refuse bfloat16 on sm_75. Triton converts it to float32 there, and the others need no more.
REFUSED = [each for each in CALLS if not each.startswith(("softmax", "write", "first"))]


def is_possible(case):
    """First rungs have no options, and their head size is a power of two."""
    if case["call"].startswith("first") and (case["options"] or case["head_size"] & (case["head_size"] - 1)):
        return False
    if "flash" in case["call"] and (case["head_size"] > 64 or case["arch"] == "sm_75"):
        return False  # g++ takes minutes
    return case["arch"] != "sm_75" or case["dtype"] != torch.bfloat16 or case["call"] not in REFUSED


def cases():
    if is_full():
        return covering(AXES, is_possible)
    return [{"arch": arch, **variant._asdict()} for variant, arch in CHOSEN]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=label)
def test_compiled_kernels_are_as_accurate_as_naive_and_have_no_findings(case):
    arch, variant = case["arch"], Variant(**{field: case[field] for field in Variant._fields})
    found, of = run(variant, arch), variant.case()
    assert found.instructions, "no PTX was executed"
    assert not found.findings, found.findings[0]
    results = zip(found.results, of.naive(torch.float64), of.naive(variant.dtype), strict=True)
    for number, (result, exact, naive) in enumerate(results):
        is_gradient = "flash" in variant.call and number >= 2  # after out and lse
        assert_as_accurate_as_naive(result, exact, naive, factor=3 if is_gradient else 2)


@pytest.mark.parametrize("call", REFUSED)
def test_a_t4_refuses_bfloat16_in_a_sentence(call):
    with pytest.raises(ValueError, match=r"bfloat16 on this GPU \(sm_75\): use float16"):
        run(Variant(call, torch.bfloat16, 16), "sm_75")


def test_the_variants_launch_every_triton_kernel_and_take_every_dtype_on_every_gpu(monkeypatch):
    class Nothing:
        """A compiled kernel that does nothing."""

        shared, num_warps, leaves, scratch, parameters = 0, 1, (), (0, 0), ()
        executable = lambda self, edit: self  # noqa: E731
        entry = property(lambda self: self)
        __getitem__ = lambda self, launch: lambda *args: None  # noqa: E731

    launched = set()
    monkeypatch.setattr(triton_launches, "compiled_kernel", lambda launch: launched.add(launch.name) or Nothing())
    # With options, g++ takes minutes for the backward of FlashAttention: it is only launched here.
    for variant, arch in [*CHOSEN, (Variant("flash", torch.float32, 16, True), "sm_80")]:
        with triton_compiled(arch), contextlib.suppress(AssertionError):  # unified max looks at its results
            variant.case().run()
    assert launched == triton_kernels()
    pairs = {(arch, variant.dtype) for variant, arch in CHOSEN}
    assert pairs == set(product(ARCHS, AXES["dtype"])) - {("sm_75", torch.bfloat16)}
