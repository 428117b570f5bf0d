"""How fast is attention over a sequence that is spread over processes? Ring, all-to-all and decode (lesson 10).

    torchrun --nproc-per-node 8 -m pagewise.experiments.context_parallel_speed --record context_parallel.json

The same work is timed on 1, 2, 4, … of the processes. The time of a call is the time of the slowest process, because
the other processes wait for it. Every result is compared with that of one process before it is timed. With a GPU for
each process the tensors travel by NCCL. Otherwise they travel by gloo, and only the smallest shapes are timed.

With `--rounds 15`, the ring takes turns with torch's own ring on CPUs, where both use torch's fused attention.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pagewise.distributed import (
    all_to_all_attention,
    count_bytes,
    decode_attention,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from pagewise.distributed.communication import Group
from pagewise.experiments import speed
from pagewise.flash_attention import flash_attention
from pagewise.flash_decoding import flash_decoding
from pagewise.tools.benchmark import TOLERANCES, relative_error
from pagewise.tools.records import Record, keep, surroundings, table_of
from pagewise.tools.timing import Spread, host_seconds, in_turns


class Shape(NamedTuple):
    """Causal self-attention over `seq_len` tokens, or a decode step over them. `decode` is 0 or 1."""

    num_processes: int
    seq_len: int
    decode: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def flops(self) -> int:
        """Two products, with two operations per visible pair of query and key and element."""
        pairs = self.seq_len if self.decode else self.seq_len * (self.seq_len + 1) // 2
        return 4 * self.num_heads * pairs * self.head_size

    def bytes(self, itemsize: int) -> int:
        """K and V of the whole sequence."""
        return 2 * self.num_kv_heads * self.seq_len * self.head_size * itemsize


LENGTHS = (16384, 65536, 131072)
SMALLEST = [Shape(0, 64, decode, 4, 4, 16) for decode in (0, 1)]


def shapes_for(count: int, *, on_gpu: bool) -> list[Shape]:
    """Return all shapes for 1, 2, 4, … of `count` processes."""
    counts = [n for n in (2**i for i in range(count.bit_length())) if n <= count]
    every = [Shape(0, S, decode) for S in LENGTHS for decode in (0, 1)] if on_gpu else SMALLEST
    return [shape._replace(num_processes=n) for shape in every for n in counts]


def random_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return q, k and v of the whole sequence. They are the same in every process."""
    generator = torch.Generator(device=device).manual_seed(0)
    sizes = [(shape.num_heads, 1 if shape.decode else shape.seq_len)] + [(shape.num_kv_heads, shape.seq_len)] * 2
    return [torch.randn(1, *size, shape.head_size, generator=generator, device=device, dtype=dtype) for size in sizes]


class Method(NamedTuple):
    """A call for this process's share, and the function that makes the whole result of it."""

    run: Callable[[], Tensor]
    whole: Callable[[Tensor], Tensor]


def methods(shape: Shape, inputs: Sequence[Tensor], group: Group) -> dict[str, Method]:
    """Return every method for a shape, by name, prepared for this process's share of the inputs."""
    if shape.decode:
        q, *keys = inputs
        keys = [shard_sequence(x, group, dim=2, order="contiguous") for x in keys]
        return {"decode": Method(partial(decode_attention, q, *keys, group=group), lambda out: out)}
    found = {}
    for order in ("zigzag", "contiguous"):
        shares = [shard_sequence(x, group, dim=2, order=order) for x in inputs]
        whole = partial(unshard_sequence, group=group, dim=2, order=order)
        ring = partial(ring_attention, *shares, group=group, causal=True, order=order)
        found[f"ring, {order}"] = Method(ring, whole)
    if shape.num_kv_heads % shape.num_processes == 0:
        found["all-to-all"] = Method(partial(all_to_all_attention, *shares, group=group, causal=True), whole)
    return found


def slowest(values: Sequence[float], group: Group, device: torch.device) -> list[float]:
    """Return the largest of all processes for each of these numbers."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest.tolist()


def records(
    shape: Shape, group: Group, *, device: torch.device, dtype: torch.dtype, repeats: int = 20, warmup: int = 3
) -> Iterator[Record]:
    """Time every method on a shape. All processes of the group must call this function."""
    inputs = random_inputs(shape, dtype, device)
    right = flash_decoding(*inputs) if shape.decode else flash_attention(*inputs, causal=True)
    about = surroundings(device)
    for name, method in methods(shape, inputs, group).items():
        with count_bytes() as sent:
            out = method.run()
        (error,) = slowest([relative_error(method.whole(out), right)], group, device)
        most = int(slowest([sum(each.bytes for each in sent)], group, device)[0])
        record = Record(
            what=name,
            shape=shape._asdict(),
            dtype=str(dtype).removeprefix("torch."),
            how=f"slowest process, {repeats} calls, each process sends at most {most} bytes",
            bytes=shape.bytes(dtype.itemsize),
            flops=shape.flops,
            limit="copy" if shape.decode else "matmul",
            limit_rate=None,
            **about,
        )
        if error > TOLERANCES[dtype]:
            yield record._replace(refused=f"wrong: relative error {error:.2g}, allowed {TOLERANCES[dtype]:.2g}")
            continue
        for _ in range(warmup):
            method.run()
        taken = []
        for _ in range(repeats):
            dist.barrier(group)
            taken.append(host_seconds(method.run))
        seconds = Spread.of(slowest(taken, group, device))
        yield record._replace(seconds=seconds.median, spread=seconds.high - seconds.low)


def against_torch(rounds: int, *, seq_len: int = 2048) -> dict[str, Spread]:
    """Return how many times as long as torch's ring `ring_attention` takes on CPUs, for causal zigzag shares.

    Both rings take turns. torch's ring is internal: its public `context_parallel` does not work on CPUs.

    Raises:
        RuntimeError: the results are not equal.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    theirs._cp_options.enable_load_balance, theirs._cp_options.convert_to_f32 = True, False
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 1, 4, seq_len, 64, generator=generator)
    q, k, v, d_out = (shard_sequence(x, None, dim=2) for x in whole)
    group = dist.group.WORLD

    def backward(grad_out, query, key, value, out, logsumexp, *, is_causal, **_):
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return run(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    def torchs() -> tuple[Tensor, Tensor]:
        return theirs._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)

    def torchs_with_backward() -> Sequence[Tensor]:
        results = d_out, "grad_out", q, k, v, *torchs()
        return theirs._templated_ring_attention_backward(group, 2, backward, *results, True)[:3]

    def ours() -> Tensor:
        return ring_attention(q, k, v, group=None, causal=True)

    def ours_with_backward() -> Sequence[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(ring_attention(*leaves, group=None, causal=True), leaves, d_out)

    pairs = [(ours(), torchs()[0]), *zip(ours_with_backward(), torchs_with_backward(), strict=True)]
    if max(relative_error(a, b) for a, b in pairs) > TOLERANCES[torch.float32]:
        raise RuntimeError("the two rings give different results")

    def until_all_are_done(run: Callable[[], object]) -> float:
        dist.barrier()
        return host_seconds(lambda: (run(), dist.barrier()))

    rivals = {"ours": ours, "torch's": torchs, "ours, all": ours_with_backward, "torch's, all": torchs_with_backward}
    seconds = in_turns(rivals, until_all_are_done, repeats=rounds)
    names = {"forward": ("ours", "torch's"), "forward and backward": ("ours, all", "torch's, all")}
    return {
        name: Spread.of([a / b for a, b in zip(seconds[mine], seconds[other], strict=True)])
        for name, (mine, other) in names.items()
    }


def command() -> None:
    """Run the command line in each process that torchrun starts. Process 0 prints and keeps the records."""
    parser = argparse.ArgumentParser(description="Time attention over processes on this machine.")
    parser.add_argument("--record", type=Path, help="keep each record in this file as it comes (GPUs only)")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N shapes")
    parser.add_argument("--rounds", type=int, metavar="N", help="only compare with torch's ring, N times, on CPUs")
    asked = parser.parse_args()
    if not dist.is_initialized():
        if "LOCAL_RANK" not in os.environ:
            parser.error("start it with torchrun --nproc-per-node N -m pagewise.experiments.context_parallel_speed")
        has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        if has_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    on_gpu = "nccl" in dist.get_backend_config()
    if asked.record and not on_gpu:
        parser.error("--record needs a GPU for each process: times on CPUs are not kept")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype, options = (torch.bfloat16, {}) if on_gpu else (torch.float32, {"repeats": 3, "warmup": 1})
    rank, count = dist.get_rank(), dist.get_world_size()
    if asked.rounds:
        for name, spread in against_torch(asked.rounds).items():
            if rank == 0:
                print(f"{name}: {spread.median:.2f} × torch's ring ({spread.low:.2f} to {spread.high:.2f})")
        return
    if rank == 0 and not on_gpu:
        print("The processes do not have a GPU each: these times say nothing about GPUs.")
    shapes = shapes_for(count, on_gpu=on_gpu)[: asked.first]
    groups = {n: dist.new_group(list(range(n))) for n in sorted({shape.num_processes for shape in shapes})}
    for shape in shapes:
        if rank < shape.num_processes:
            found = list(records(shape, groups[shape.num_processes], device=device, dtype=dtype, **options))
            if rank == 0:
                for record in found if asked.record else []:
                    keep(asked.record, record)
                print(f"{table_of(found)}\n", flush=True)
        dist.barrier()


def draw(found: Sequence[Record], *, seq_len: int, decode: bool = False) -> None:
    """Draw the time of each method over the number of processes.

    Raises:
        ValueError: no record has a time and this length and kind of step.
    """
    from pagewise import figures

    kind = {"seq_len": seq_len, "decode": int(decode)}
    timed = speed.drawn(found, **kind)
    times = {(r.what, r.shape["num_processes"]): 1e3 * r.seconds for r in timed}
    counts = sorted({count for _, count in times})
    figures.lines(
        counts,
        {name: [times.get((name, n), float("nan")) for n in counts] for name in dict.fromkeys(r.what for r in timed)},
        title=f"How long does {'a decode step' if decode else 'causal attention'} over {seq_len} tokens take?",
        xlabel="processes",
        ylabel="ms",
        logx=True,
        logy=True,
        caption=speed.caption(timed),
    )


if __name__ == "__main__":
    command()
    dist.destroy_process_group()
