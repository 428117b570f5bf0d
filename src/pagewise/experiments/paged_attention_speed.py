"""How fast is paged decode? Every way of it on the same work, as a fraction of the memory's bandwidth (lesson 5).

    python -m pagewise.experiments.paged_attention_speed --record lessons/measurements/paged_attention.json

A decode step must read K and V once. So the measure is bytes of K and V over time, against what a plain copy reaches on
the same machine. On a GPU all shapes are timed, with a cold L2 cache; on a CPU, where kernels are interpreted and
threads are fibers, the smallest ones only, and the times say nothing about a GPU.
"""

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagewise.paged_attention import paged_attention, paged_attention_grouped, paged_attention_v1, paged_attention_v2
from pagewise.paged_blocks.cache import to_vllm_layout
from pagewise.tools.benchmark import copy_bandwidth, measure, record
from pagewise.tools.device import best_device, triton_mode


class Shape(NamedTuple):
    """A decode step: `num_seqs` sequences of `seq_len` tokens each."""

    num_seqs: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int = 128
    block_size: int = 16

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of K and V that the step must read."""
        return 2 * self.num_seqs * self.seq_len * self.num_kv_heads * self.head_size * itemsize


SHAPES = [Shape(B, S, *heads) for heads in ((64, 8), (32, 32)) for B in (1, 8, 64) for S in (1024, 8192, 32768)]
SMALLEST = [Shape(1, 1024, 8, 1), Shape(1, 1024, 4, 4)]


def methods(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Every method on one random batch, by name; each returns [B, H, D]. Those that this machine lacks are left out."""
    B, S, H, Hkv, D, P = shape
    generator = torch.Generator(device=device).manual_seed(0)
    N = B * (S // P)
    k_cache, v_cache = torch.randn(2, N, P, Hkv, D, generator=generator, device=device, dtype=dtype)
    tables = torch.randperm(N, generator=generator, device=device).view(B, -1).int()
    lens = torch.full((B,), S, dtype=torch.int32, device=device)
    q = torch.randn(B, H, D, generator=generator, device=device, dtype=dtype)
    k_vllm, v_vllm = to_vllm_layout(k_cache, v_cache)
    vllm = (q, k_vllm, v_vllm, tables, lens)

    def gathered() -> Tensor:
        k, v = (cache[tables].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=Hkv != H)[:, :, 0]

    found = {
        "gather + SDPA": gathered,
        "CUDA v1": lambda: paged_attention_v1(*vllm, max_seq_len=S, check=False),
        "CUDA v2": lambda: paged_attention_v2(*vllm, max_seq_len=S, check=False),
        "CUDA grouped": lambda: paged_attention_grouped(*vllm, max_seq_len=S, check=False),
        "Triton": lambda: paged_attention(q, k_cache, v_cache, tables, lens, backend="triton", check=False),
    }
    if triton_mode() == "unavailable":
        del found["Triton"]
    if device.type == "cuda":
        found["FlexAttention, not paged"] = _flex_attention(q, k_cache, v_cache, tables)
        if importlib.util.find_spec("flashinfer"):
            found["FlashInfer"] = _flashinfer(q, k_cache, v_cache, tables)
    return found


def _flex_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor) -> Callable[[], Tensor]:
    """torch's compiled flex_attention on K and V that lie side by side already: the gather is not timed."""
    from torch.nn.attention.flex_attention import flex_attention

    k, v = (cache[tables].flatten(1, 2).transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
    compiled = torch.compile(flex_attention)
    grouped = q.shape[1] != k.shape[1]
    return lambda: compiled(q[:, :, None], k, v, enable_gqa=grouped)[:, :, 0]


def _flashinfer(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor) -> Callable[[], Tensor]:
    import flashinfer

    (B, M), (_, P, Hkv, D) = tables.shape, k_cache.shape
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=q.device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indptr = torch.arange(0, B * M + 1, M, dtype=torch.int32, device=q.device)
    last = torch.full((B,), P, dtype=torch.int32, device=q.device)
    dtypes = {"q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
    decode.plan(indptr, tables.flatten(), last, q.shape[1], Hkv, D, P, **dtypes)
    return lambda: decode.run(q, (k_cache, v_cache))


def benchmark(
    shapes: list[Shape], *, dtype: torch.dtype = torch.bfloat16, device: torch.device, repeats: int = 7
) -> Iterator[dict[str, Any]]:
    """A row per shape and method: seconds, bytes of K and V per second. Each result is compared before it is timed.

    A method that does not run on a shape has its reason in "refused" and no time: v1's shared memory, say.

    Raises:
        AssertionError: a method's output is not that of the others.
    """
    for shape in shapes:
        try:
            functions, refused, expected = methods(shape, dtype, device), {}, None
        except torch.OutOfMemoryError as error:
            functions, refused = {}, {"all": str(error).splitlines()[0]}
        for name, function in list(functions.items()):
            try:
                out = function().float()
            except (ValueError, torch.OutOfMemoryError) as error:
                refused[name] = str(error).splitlines()[0]
                del functions[name]
                continue
            expected = out if expected is None else expected
            torch.testing.assert_close(out, expected, rtol=0.05, atol=0.02, msg=lambda m, n=name: f"{n}: {m}")
        num_bytes = shape.kv_bytes(dtype.itemsize)
        for name, seconds in measure(functions, repeats=repeats, warmup=1, cold=True).items():
            yield {**shape._asdict(), "method": name, "seconds": seconds, "bytes_per_second": num_bytes / seconds}
        for name, reason in refused.items():
            yield {**shape._asdict(), "method": name, "refused": reason}


def draw(found: Mapping[str, Any], *, num_kv_heads: int = 8) -> None:
    """The bandwidth that each method reached in a record, as a share of a copy's; for shapes with so many KV heads."""
    from pagewise.tools import figures

    rows = [row for row in found["rows"] if "seconds" in row and row["num_kv_heads"] == num_kv_heads]
    shapes = sorted({(row["num_seqs"], row["seq_len"]) for row in rows})
    percent = found["copy_bytes_per_second"] / 100
    reached = {(r["method"], r["num_seqs"], r["seq_len"]): r["bytes_per_second"] / percent for r in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    figures.bars(
        [f"{B} × {S // 1024} k" for B, S in shapes],
        {method: [reached.get((method, *shape), 0.0) for shape in shapes] for method in methods},
        title=f"How fast is a decode step? ({rows[0]['num_heads']} query heads, {num_kv_heads} KV heads)",
        ylabel="K and V per second (% of a copy's bandwidth)",
        caption=f"sequences × tokens; {found['device']}, {found['date']}, torch {found['versions']['torch']}",
        width=9.6,
    )


def main() -> None:
    """The command line: all shapes on a GPU, the smallest on a CPU."""
    parser = argparse.ArgumentParser(description="Time every way of paged decode on this machine.")
    parser.add_argument("--record", type=Path, help="write the rows to this file (GPU only)")
    record_to = parser.parse_args().record
    device = best_device()
    on_gpu = device.type == "cuda"
    if record_to and not on_gpu:
        parser.error("--record needs a GPU: times of interpreted kernels are not kept")
    bandwidth = copy_bandwidth(device) if on_gpu else None
    if not on_gpu:
        print("No GPU here: CUDA runs as fibers and Triton interpreted, and these times say nothing about a GPU.")
    rows = []
    for row in benchmark(SHAPES if on_gpu else SMALLEST, device=device, repeats=7 if on_gpu else 1):
        rows.append(row)
        shape = "B {num_seqs:3}  S {seq_len:6}  heads {num_heads}/{num_kv_heads}".format(**row)
        if "refused" in row:
            print(f"{shape}  {row['method']:25} {row['refused']}")
            continue
        of_copy = f"{row['bytes_per_second'] / bandwidth:6.1%} of a copy's bandwidth" if bandwidth else ""
        print(f"{shape}  {row['method']:25} {row['seconds'] * 1e6:10.1f} µs  {of_copy}")
    if record_to:
        record(record_to, rows, dtype="bfloat16", copy_bytes_per_second=bandwidth, l2="cold")


if __name__ == "__main__":
    main()
