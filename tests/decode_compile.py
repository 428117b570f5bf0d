"""Compiles the decode kernels of lessons 5, 7, 8 and 9, as their functions launch them, for any GPU."""

from collections.abc import Callable
from functools import partial

import torch
from covering import covering, is_full
from triton_compile import Compiled, compile_launched

from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus import UnifiedMax, lazy_rescale_attention, unified_max_attention
from pagewise.paged_attention import paged_attention, paged_attention_varlen
from pagewise.tools.architecture import SHARED_BYTES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KERNELS = {
    "paged": "decode_attention_kernel",
    "decode": "decode_attention_kernel",
    "varlen": "decode_attention_kernel",
    "unified": "unified_max_attention_kernel",
    "lazy": "lazy_rescale_kernel",
}
SPILLED = 128  # bytes that ptxas may spill although registers are left: it aims at a number of warps per SM

# A GPU of each assembler and of each size of shared memory. With PAGEWISE_FULL=1, all GPUs.
TENSOR_CORES = [80, 86, 89, 90, 100, 120] if is_full() else [80, 90, 120]


def for_every_gpu(axes, allowed=lambda case: True):
    """Cases with every pair of values of `axes` and of the GPUs; with PAGEWISE_FULL=1, two cases for sm_75 too.

    On sm_75 Triton has no tensor cores, auto takes torch, and a kernel takes six times as long to compile. The two
    cases have the first and the second value of each axis.
    """
    for_sm_75 = [{name: values[i] for name, values in axes.items()} | {"sm": 75} for i in (0, 1)]
    return covering(axes | {"sm": TENSOR_CORES}, allowed) + (for_sm_75 if is_full() else [])


def compiled(which, sm, *, kernel=None, **case) -> Compiled:
    """Return KERNELS[which], or another kernel that a call launches. The last of two launches of one kernel counts."""
    return compile_launched(sm, kernel or KERNELS[which], call_of(which, **case))


def call_of(
    which, head_size, dtype, *, group=4, queries=1, cache=None, options=False, split=True, wide=False
) -> Callable:
    """Return a call of the function that launches KERNELS[which].

    options: ALiBi and softcap, lengths of dense keys; and causal, for several queries. split: keys are cut.
    """
    H, S = 2 * group, 512
    scores = {"softcap": 3.0, "alibi_slopes": torch.ones(H)} if options else {}
    if which in ("paged", "varlen"):
        q = torch.zeros(queries, H, head_size, dtype=dtype)
        k = v = torch.zeros(S // 16, 16, 2, head_size, dtype=cache or dtype)
        tables, lens = torch.arange(S // 16, dtype=torch.int32)[None], torch.tensor([S], dtype=torch.int32)
        splits = {"num_splits": 2 if split else 1, "backend": "triton", "check": False}
        if which == "paged":
            return partial(paged_attention, q, k, v, tables, lens, **splits, **scores)
        ends = torch.tensor([0, queries], dtype=torch.int32)
        if split and options:
            del splits["num_splits"]
        return partial(paged_attention_varlen, q, k, v, tables, lens, ends, **splits, **scores)
    q = torch.zeros(1, H, queries, head_size, dtype=dtype)
    k = v = torch.zeros(1, 2, S, head_size, dtype=dtype)
    given = {"seq_lens": torch.tensor([S], dtype=torch.int32)} if options else {}
    given |= {"causal": options and queries > 1, "backend": "triton"}
    if which == "decode":
        how = {} if split and options else {"num_splits": 2 if split else 1}  # programs share what is of unknown length
        return partial(flash_decoding, q, k, v, **given, **how, **scores)
    if which == "unified":
        return partial(unified_max_attention, q, k, v, UnifiedMax(0.0, -50.0, 50.0), num_splits=2, **given)
    given.pop("seq_lens", None)
    return partial(lazy_rescale_attention, q, k, v, threshold=20.0 if wide else 8.0, num_splits=2, **given)


def assert_fits(which, record_property, sm, **case):
    """The kernel compiles, its shared memory fits the GPU, and it spills next to nothing where it has tensor cores."""
    found = compiled(which, sm, **case)
    for figure in ("registers", "spilled_bytes", "shared_bytes"):
        record_property(figure, getattr(found, figure))
    assert found.shared_bytes <= SHARED_BYTES[sm]
    if sm >= 80:  # on sm_75 Triton has no tensor cores and spills kilobytes; auto takes torch there
        assert found.spilled_bytes <= SPILLED
    return found
