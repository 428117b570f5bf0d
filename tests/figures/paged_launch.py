"""A launch of paged attention v1, whose trace the figures of its warps show."""

import functools

import torch

import cudascope
from pagewise.paged_attention import paged_attention_v1
from pagewise.paged_blocks import to_vllm_layout

D, P, TABLE = 32, 16, [7, 1, 4, 0, 8, 3]


@functools.cache
def paged_launch():
    """Return the launch for one sequence of 90 tokens in the blocks of TABLE."""
    k, v = torch.randn(2, 9, P, 1, D, generator=torch.Generator().manual_seed(0)).half()
    tables, lens = torch.tensor([TABLE], dtype=torch.int32), torch.tensor([90], dtype=torch.int32)
    with cudascope.observe() as report:
        paged_attention_v1(torch.ones(1, 1, D).half(), *to_vllm_layout(k, v), tables, lens)
    return report.launches[0]
