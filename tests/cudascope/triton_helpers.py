"""A device function and a kernel for several files of tests."""

import torch
import triton
import triton.language as tl

FACTOR = tl.constexpr(3)


@triton.jit
def scaled(x, factor: tl.constexpr = FACTOR):
    return x * factor


@triton.jit
def product_kernel(a, b, c, M, N, K, TILE: tl.constexpr, DEEP: tl.constexpr, IN_WARPS: tl.constexpr):
    """c = a b by tensor descriptors. With IN_WARPS, some warps copy tiles and the others multiply."""
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [TILE, DEEP])
    right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [DEEP, TILE])
    out = tl.make_tensor_descriptor(c, [M, N], [N, 1], [TILE, TILE])
    row, col = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    acc = tl.zeros([TILE, TILE], tl.float32)
    for k in tl.range(0, K, DEEP, warp_specialize=IN_WARPS, num_stages=3):
        acc = tl.dot(left.load([row, k]), right.load([k, col]), acc)
    out.store([row, col], acc.to(tl.float16))


def product(in_warps: bool, M: int = 72) -> tuple[torch.Tensor, torch.Tensor]:
    """a b by `product_kernel`, in seven steps of a ring of three stages, and by torch. A thread block has 64 rows."""
    torch.manual_seed(0)
    a, b, c = torch.randn(M, 208).half(), torch.randn(208, 64).half(), torch.full((M, 64), 7.0).half()
    product_kernel[triton.cdiv(M, 64), 1](a, b, c, M, 64, 208, TILE=64, DEEP=32, IN_WARPS=in_warps, num_warps=4)
    return c, (a.double() @ b.double()).half()
