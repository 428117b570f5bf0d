"""Small calls that launch the CUDA kernels, and the oracle's formula for their results. See `kernel_cases`.

Each function of CALLS returns a `Case` for a dtype. Tiles are cut, one sequence is empty, and the slots that no query
may see hold NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewise.experiments.kernel_cases import LENS, Case, Paged, Tensors, dense, normal, seen
from pagewise.flash_attention import in_cuda
from pagewise.flash_decoding_plus_plus.flat_gemm import on_cuda_cores, on_tensor_cores
from pagewise.naive_attention import attention
from pagewise.options import ScoreOptions
from pagewise.paged_attention import paged_attention_grouped, paged_attention_v1, paged_attention_v2
from pagewise.paged_blocks import to_vllm_layout

D = 32  # the smallest head size that the kernels are built for
CAUSAL = ScoreOptions(causal=True)
PARTITION = {"partition_size": 32}  # tokens, so that the longest sequence has three partitions


def paged(attend: Callable[..., Tensors], options: dict[str, Any], dtype: torch.dtype) -> Case:
    """A decode step of three sequences, one of them empty, over a cache in vLLM's layout."""
    inputs = Paged.of(LENS, [1, 1, 1], D, dtype, dtype)
    tensors = (inputs.q, *to_vllm_layout(inputs.k_cache, inputs.v_cache), inputs.tables, inputs.lens)

    def run() -> Tensors:
        out, lse = attend(*tensors, return_lse=True, **options)
        return out, seen(lse)

    return Case(run, inputs.naive)


def flash(attend: Callable[..., Tensors], head_size: int, dtype: torch.dtype, *, num_queries: int = 37) -> Case:
    """The forward alone, causal, over 70 keys. With 200 queries, the first thread block sees no key."""
    qkv = dense(1, num_queries, 70, head_size, dtype)

    def run() -> Tensors:
        out, lse = attend(*qkv)
        return out, seen(lse)

    def naive(dtype: torch.dtype) -> Tensors:
        out, lse = attention(*(x.to(dtype) for x in qkv), causal=True, return_lse=True)
        return out, seen(lse)

    return Case(run, naive)


def product(multiply: Callable[[Tensor, Tensor], Tensor], num_rows: int, dtype: torch.dtype) -> Case:
    """`num_rows` rows of 72 numbers by 40 rows of a weight."""
    x, w = normal(num_rows, 72).to(dtype), normal(40, 72, seed=1).to(dtype)
    return Case(lambda: (multiply(x, w),), lambda dtype: (x.to(dtype) @ w.to(dtype).mT,))


CALLS: dict[str, Callable[[torch.dtype], Case]] = {
    "v1": partial(paged, paged_attention_v1, {}),
    "v2": partial(paged, paged_attention_v2, PARTITION),
    "grouped": partial(paged, paged_attention_grouped, PARTITION),
    "flash": partial(flash, lambda *qkv: in_cuda.forward(*qkv, CAUSAL), D, num_queries=200),
    "gemv": partial(product, on_cuda_cores, 9),  # one row more than fits at once: the shared sums are written twice
    "flat product": partial(product, on_tensor_cores, 5),
}
