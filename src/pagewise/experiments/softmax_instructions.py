"""Executed instructions of three softmax loops of split decode, for each tile of keys (lesson 8).

The three kernels differ in the maximum and in nothing else: lesson 7's first kernel, the same kernel with a maximum
that follows only a much larger score, and the first rung of the unified maximum. Triton compiles them for a GPU, and
the CPU executes their PTX. Counts are exact and say nothing about waits.
"""

import functools
import inspect
import linecache
import math

import torch

from cudascope import observe, triton_compiled
from pagewise.kernels.flash_decoding import split_decode_kernel
from pagewise.kernels.flash_decoding_plus_plus import unified_max_kernel
from pagewise.tools.launch import launch

TILE, D, GROUP = 64, 128, 4
THRESHOLD = 8 * math.log(2)  # FlashAttention-4's


@functools.cache
def lazy_kernel() -> object:
    """Return lesson 7's first kernel with a lazy maximum: acc is corrected only in tiles that raise it."""
    text = f"import triton\nimport triton.language as tl\n\n\n{inspect.getsource(split_decode_kernel.fn)}"
    largest = f"largest = tl.max(scores, axis=1)\n        m_new = tl.where(largest > m + {THRESHOLD}, largest, m)"
    lazily = "if tl.min(alpha, axis=0) < 1.0:\n            acc = alpha[:, None] * acc\n        acc += tl.dot"
    edits = {
        "m_new = tl.maximum(m, tl.max(scores, axis=1))": largest,
        "acc = alpha[:, None] * acc + tl.dot": lazily,
    }
    for old, new in edits.items():
        if old not in text:
            raise ValueError(f"split_decode_kernel has no line {old!r}")
        text = text.replace(old, new)
    filename = "<split_decode_kernel with a lazy maximum>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)  # Triton reads it again
    namespace = {"__name__": __name__}
    exec(compile(text, filename, "exec"), namespace)
    return namespace["split_decode_kernel"]


def executed(name: str, S: int, arch: str = "sm_80") -> dict[str, int]:
    """Return the instructions that the warps of one program execute for S keys, by class.

    `name` is "online softmax", "lazy rescaling" or "unified maximum". The scores are random: after the first tile, none
    exceeds the largest so far by the threshold.
    """
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=draw).half() for shape in ((1, GROUP, D), *[(1, 1, S, D)] * 2))
    m, l, acc = (torch.empty(GROUP * n) for n in (1, 1, D))
    numbers, sizes = (GROUP, S, D**-0.5), {"D": D, "GROUP": GROUP, "ROWS": 16, "TILE": TILE}
    with triton_compiled(arch), observe(trace_limit=0) as report:
        kernel = {"online softmax": split_decode_kernel, "unified maximum": unified_max_kernel}.get(
            name
        ) or lazy_kernel()
        phi = (0.0,) if kernel is unified_max_kernel else ()
        launch(kernel, (1, 1, 1), q, k, v, m, l, acc, *numbers, *phi, **sizes)
    return dict(report.launches[0].instructions.classes)


def per_tile(name: str, arch: str = "sm_80") -> dict[str, float]:
    """Return the executed instructions for each further tile of keys, by class, and their sum as "all"."""
    short, long = (executed(name, tiles * TILE, arch) for tiles in (8, 16))
    counts = {kind: (long[kind] - short.get(kind, 0)) / 8 for kind in long}
    return {"all": sum(counts.values())} | counts
