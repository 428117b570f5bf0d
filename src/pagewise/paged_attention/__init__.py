"""Paged attention: one new query per sequence over keys and values scattered in blocks (lessons 4 and 5).

door        the public functions: they check, choose, and call one of
in_torch    gathered or streamed, in plain torch
in_triton   the Triton kernels, over a cache [N, P, Hkv, D]
vllm        paged attention in CUDA, over a cache in vLLM's layout: v1, v2 and the grouped variant
in_cuda     the launches of its kernels
inputs      what all three are given
varlen      any number of new queries per sequence, and what all layers of a step share (lesson 9)
"""

from pagewise.paged_attention.door import paged_attention
from pagewise.paged_attention.varlen import paged_attention_varlen
from pagewise.paged_attention.vllm import (
    choose_version,
    paged_attention_grouped,
    paged_attention_v1,
    paged_attention_v2,
)
