"""Every kernel launched again and again on the same inputs: `python tests/repeat_launches.py [--only CUDA]`.

No kernel here may depend on the order in which threads come: each launch must give the same bits. With `--times 1
--tokens 70` it is what compute-sanitizer is given. All that a kernel may not read is poison, as in the tests.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from paged_cases import paged_inputs
from torch import Tensor

from conftest import DEVICES
from pagewise.flash_attention import flash_attention, in_cuda
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus import UnifiedMax, lazy_rescale_attention, unified_max_attention
from pagewise.flash_decoding_plus_plus.flat_gemm import on_cuda_cores, on_tensor_cores
from pagewise.online_softmax import online_softmax
from pagewise.options import ScoreOptions
from pagewise.paged_attention import paged_attention, paged_attention_grouped, paged_attention_v1, paged_attention_v2
from pagewise.paged_attention.in_triton import DecodeInputs, attend, partial_results
from pagewise.paged_attention.inputs import Splits
from pagewise.paged_attention_varlen import Step, paged_attention_varlen
from pagewise.paged_attention_varlen import plan as plan_of_step
from pagewise.paged_blocks import PagedKVCache, to_vllm_layout
from pagewise.tools.launch import launch

Run = Callable[[], tuple[Tensor, ...]]
IN_TRITON = {"num_splits": 3, "backend": "triton"}
TYPES = [(torch.float32, None), (torch.float16, None), (torch.bfloat16, torch.float8_e5m2)]


def cases(num_tokens: int, device: torch.device) -> Iterator[tuple[str, Run]]:
    """(name, a call that returns its outputs, the first of them finite) of every kernel, in several types."""
    seq_lens = [num_tokens, 0, 17, num_tokens // 2 + 3]
    for dtype, cache_dtype in TYPES:
        inputs = paged_inputs(seq_lens, 8, 2, 64, dtype=dtype, device="cpu", cache_dtype=cache_dtype)
        vllm = (inputs[0], *to_vllm_layout(*inputs[1:3]), *inputs[3:])
        inputs, vllm = ([tensor.to(device) for tensor in tensors] for tensors in (inputs, vllm))
        types, options = str(dtype if cache_dtype is None else cache_dtype)[6:], {"return_lse": True, "check": False}
        of_cuda = {"max_seq_len": num_tokens, **options}
        yield f"CUDA v1, {types}", partial(paged_attention_v1, *vllm, **of_cuda)
        yield f"CUDA v2, {types}", partial(paged_attention_v2, *vllm, partition_size=64, **of_cuda)
        yield f"CUDA grouped, {types}", partial(paged_attention_grouped, *vllm, partition_size=64, **of_cuda)
        for splits in (1, 3, None):
            decode = partial(paged_attention, *inputs, num_splits=splits, backend="triton", **options)
            yield f"Triton decode, num_splits {splits}, {types}", decode
        for splits in (1, 3):
            yield f"Triton packed, num_splits {splits}, {types}", packed(inputs, splits, options)
        yield f"Triton decode step, {types}", decode_step(inputs)
        for layout in ("nhd", "vllm"):
            yield f"Triton write, {layout}, {types}", written(num_tokens, dtype, cache_dtype or dtype, layout, device)
        qkv = padded_qkv(num_tokens, num_tokens // 2 + 3, dtype, device)
        yield f"CUDA flash, {str(dtype)[6:]}", partial(in_cuda.forward, *qkv, ScoreOptions(causal=True))
        yield f"Triton flash, {str(dtype)[6:]}", forward_and_backward(*qkv)
        yield f"Triton flash with a window, {str(dtype)[6:]}", forward_and_backward(*qkv, window=20)
        for split in ("num_splits", "split_size"):
            decode = partial(flash_decoding, qkv[0][:, :, :3], *qkv[1:], **{split: 32}, backend="triton", **options)
            yield f"Triton dense decode, {split}, {str(dtype)[6:]}", decode
        few = (qkv[0][:, :, :3], *qkv[1:])
        yield (
            f"Triton dense decode, shared, {str(dtype)[6:]}",
            partial(attend, DecodeInputs(*few, ScoreOptions(), Splits("share", 5))),
        )
        yield f"Triton unified max, {str(dtype)[6:]}", partial(unified, *few)
        yield f"Triton lazy rescale, {str(dtype)[6:]}", product(lazy_rescale_attention, *few, **IN_TRITON)
        for name, run in first_rungs(inputs, *qkv):
            yield f"{name}, {types}", run
        x, w = (rows[0, 0] for rows in padded_qkv(9, num_tokens, dtype, device)[:2])
        yield f"CUDA gemv, {str(dtype)[6:]}", product(on_cuda_cores, x, w)
        if dtype == torch.float16:
            for stages in (2, 8):
                yield f"CUDA flat GEMM, {stages} stages", product(on_tensor_cores, x, w, num_stages=stages)
        rows = torch.randn(5, num_tokens, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
        yield f"Triton softmax, {str(dtype)[6:]}", lambda rows=rows: (online_softmax(rows, 64, backend="triton"),)


def packed(inputs: list[Tensor], num_splits: int, options: dict[str, bool]) -> Run:
    """The last queries of each sequence: three, none, one and two."""
    _, *rest = inputs
    ends = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32, device=rest[0].device)
    q = torch.randn(6, 8, 64, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype).to(ends.device)
    return partial(paged_attention_varlen, q, *rest, ends, num_splits=num_splits, backend="triton", **options)


def decode_step(inputs: list[Tensor]) -> Run:
    """One query per sequence over the cache, by the work plan of an engine's step."""
    q, k_cache, v_cache, tables, lens = inputs
    ends = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    step = plan_of_step(Step(tables, lens, ends, k_cache.shape[1], decodes=True), "triton")
    return partial(step.attend, q, k_cache, v_cache, return_lse=True)


def unified(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """out and the rows that were recomputed, with a band that some rows leave."""
    return unified_max_attention(q, k, v, UnifiedMax(0.0, -2.0, 2.0), **IN_TRITON)


def first_rungs(inputs: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Run]]:
    """The kernels that a lesson shows whole, launched as their tests do. q, k and v are dense, and `inputs` paged."""
    from pagewise.kernels.flash_attention import flash_forward_kernel
    from pagewise.kernels.flash_attention_backward import flash_dq_kernel
    from pagewise.kernels.flash_decoding import split_decode_kernel
    from pagewise.kernels.flash_decoding_plus_plus import unified_max_kernel
    from pagewise.kernels.paged_attention import paged_decode_kernel

    (_, H, T, D), (_, Hkv, S, _), scale = q.shape, k.shape, q.shape[-1] ** -0.5
    decode = {"D": D, "GROUP": H // Hkv, "ROWS": 16, "TILE": 32}
    flash = {"D": D, "BLOCK_D": D, "ROWS": 32, "COLS": 32, "CAUSAL": True}
    flash |= {"group": H // Hkv, "T": T, "S": S, "scale": scale}
    lse, qkv = q.new_empty(1, H, T, dtype=torch.float32), {"q": q, "k": k, "v": v}
    delta = (q.float() ** 2).sum(dim=-1).flatten()  # as if out and its gradient were q

    def paged() -> tuple[Tensor, ...]:
        block_size = inputs[1].shape[1]
        out = torch.empty_like(inputs[0])
        launch(paged_decode_kernel, (len(out), Hkv), *inputs, out, scale, **decode, P=block_size, outputs=(out,))
        return (out,)

    def split(kernel: Callable, *phi: float) -> tuple[Tensor, ...]:
        partials = partial_results(3 * H, D, q.device)
        launch(kernel, (1, Hkv, 3), q[:, :, 0], k, v, *partials, H, S, scale, *phi, **decode)
        return partials[::-1]

    def forward() -> tuple[Tensor, ...]:
        out = torch.empty_like(q)
        launch(flash_forward_kernel, (-(-T // 32), H, 1), **qkv, out=out, lse=lse, **flash, outputs=(out, lse))
        return out, lse

    def backward() -> tuple[Tensor, ...]:
        dq, sums = torch.empty_like(q), {"lse": forward()[1].flatten(), "delta": delta}
        launch(flash_dq_kernel, (-(-T // 32), H, 1), **qkv, d_out=q, **sums, dq=dq, **flash, outputs=(dq,))
        return (dq,)

    if inputs[0].dtype == inputs[1].dtype:  # it takes no float8
        yield "First rung, paged decode", paged
    yield "First rung, split decode", partial(split, split_decode_kernel)
    yield "First rung, unified max", partial(split, unified_max_kernel, 0.0)
    yield "First rung, flash forward", forward
    yield "First rung, flash dQ", backward


def product(kernel: Callable[..., Tensor], *tensors: Tensor, **options: int | str) -> Run:
    return lambda: (kernel(*tensors, **options),)


def padded_qkv(T: int, S: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q of 8 heads, k and v of 2, rows of 64 between which NaN lies."""
    generator = torch.Generator().manual_seed(0)
    qkv = []
    for heads, tokens in ((8, T), (2, S), (2, S)):
        room = torch.full((1, heads, tokens, 72), torch.nan)
        room[..., :64] = torch.randn(1, heads, tokens, 64, generator=generator)
        qkv.append(room.to(dtype).to(device)[..., :64])
    return qkv


def forward_and_backward(q: Tensor, k: Tensor, v: Tensor, **options: int) -> Run:
    """out and lse, and the gradients of q, k and v from some of out and lse."""
    leaves = [x.requires_grad_() for x in (q.detach(), k.detach(), v.detach())]

    def run() -> tuple[Tensor, ...]:
        out, lse = flash_attention(*leaves, causal=True, return_lse=True, backend="triton", **options)
        d_lse = lse.detach().nan_to_num(neginf=0.0)
        return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (q, d_lse))

    return run


def written(num_tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype, layout: str, device: torch.device) -> Run:
    """Keys and values written into a new cache of zeros, in which every other slot stays free."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(2 * num_tokens, generator=generator)[:num_tokens].to(device)
    k, v = torch.randn(2, num_tokens, 2, 64, generator=generator).to(dtype).to(device)

    def write() -> tuple[Tensor, ...]:
        sizes = (1, -(-2 * num_tokens // 16), 16, 2, 64)
        cache = PagedKVCache(*sizes, dtype=cache_dtype, device=device, layout=layout)
        cache.write(0, slots, k, v, backend="triton")
        return cache.k[0], cache.v[0]

    return write


def fault(run: Run, times: int) -> str | None:
    """Return the fault in the outputs of `times` calls, or None."""
    first = [out.cpu() for out in run()]
    if not first[0].float().isfinite().all():
        return "not finite"
    for time in range(2, times + 1):
        for out, before in zip(run(), first, strict=True):
            if changed := int((out.cpu().view(torch.uint8) != before.view(torch.uint8)).sum()):
                return f"launch {time} differs from the first in {changed} bytes"
    return None


def main() -> None:
    """The command line; exits with 1 if a kernel gave other bits."""
    parser = argparse.ArgumentParser(description="Launch every kernel repeatedly and compare the bits.")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=4000, help="of the longest sequence (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name has this")
    options = parser.parse_args()
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor's memory is its own: a tool sees where it ends
    chosen = [case for case in cases(options.tokens, torch.device(DEVICES[-1])) if options.only in case[0]]
    wrong = 0
    for name, run in chosen:
        verdict = fault(run, options.times)
        wrong += verdict is not None
        print(f"{name:32} {verdict or 'the same bits'}", flush=True)
    print(f"{len(chosen)} kernels launched {options.times} times each, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
