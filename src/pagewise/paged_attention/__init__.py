"""Paged attention: one new query per sequence over keys and values scattered in blocks (lessons 4 and 5).

decode      `paged_attention`, over a cache [N, P, Hkv, D], in torch or Triton
in_torch    its backend in plain torch, gathered or streamed
in_triton   its backend in Triton
vllm        paged attention in CUDA, over a cache in vLLM's layout: v1, v2 and the grouped variant
in_cuda     the launches of these CUDA kernels
inputs      the checked inputs that all of them share
"""

from pagewise.paged_attention.decode import paged_attention
from pagewise.paged_attention.vllm import (
    choose_version,
    paged_attention_grouped,
    paged_attention_v1,
    paged_attention_v2,
)


def __getattr__(name: str):
    if name == "paged_attention_varlen":  # lesson 9's, imported where it is used
        import importlib

        return importlib.import_module("pagewise.paged_attention_varlen").paged_attention_varlen
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
