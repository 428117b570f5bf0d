"""The cost of many operations on a CPU, as ratios of one run (`make bench`). Seconds depend more on the machine.

Each table compares several ways to do the same work with the first way. Every result is checked before it is timed, and
the ways take turns. A ratio is the median over neighbouring calls, with its quartiles. The time is that of busy cores,
so that other work on the machine does not count. `pagewise.experiments.engine_benchmark` compares the engine's
schedulers.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cudascope
from pagewise.experiments.decode_inputs import Shape, exact, paged, random_inputs
from pagewise.experiments.peers import gathered
from pagewise.flash_decoding import flash_decoding
from pagewise.naive_attention import attention
from pagewise.paged_attention import paged_attention, paged_attention_v1
from pagewise.paged_attention.in_torch import gathered_attention, streamed_attention
from pagewise.paged_attention.inputs import DECODING
from pagewise.paged_attention_varlen import paged_attention_varlen
from pagewise.paged_blocks import BlockManager
from pagewise.paged_blocks.cache import to_vllm_layout
from pagewise.tools.benchmark import ratios
from pagewise.tools.progress import progress, say
from pagewise.tools.records import table
from pagewise.tools.timing import cpu_seconds

CPU = torch.device("cpu")
TOKENS = 1000
Contest = tuple[str, dict[str, Callable], Tensor | None]


def contests() -> list[Callable[[], Contest]]:
    """Return a function for every comparison. When its turn comes, it builds (title, functions, the right result)."""
    return [
        block_manager,
        partial(torch_paths, paged(8, 512, 8, 8, head_size=64)),
        partial(torch_paths, paged(8, 512, 8, 2, head_size=64)),
        partial(cpu_runner, paged(2, 64, 4, 2, head_size=64)),
        partial(interpreter, paged(1, 64, 4, 2, head_size=64)),
        partial(splits, 8192),
    ]


def block_manager() -> Contest:
    """Append TOKENS tokens to a sequence and free it, with and without other sequences in the pool."""

    def in_a_list() -> None:
        tokens = [0]
        for i in range(TOKENS):
            tokens.append(i)

    def in_blocks(manager: BlockManager) -> None:
        manager.allocate("new", [0])
        for i in range(TOKENS):
            manager.append("new", i)
        manager.free("new")

    def with_others(num_others: int, num_blocks: int) -> Callable[[], None]:
        manager = BlockManager(num_blocks, 16)
        for other in range(num_others):
            manager.allocate(other, [0] * (num_blocks // 2 // num_others * 16))
        return partial(in_blocks, manager)

    functions = {
        "list.append": in_a_list,
        "BlockManager, alone, 1,000 blocks": with_others(1, 1_000),
        "BlockManager, 100 others, 10,000 blocks": with_others(100, 10_000),
    }
    return f"{TOKENS} tokens appended to a sequence", functions, None


def torch_paths(shape: Shape) -> Contest:
    """Decode in torch over contiguous keys and values, or over blocks."""
    batch = random_inputs(shape, torch.float32, CPU, seed=0)
    q, (k, v) = batch.q[:, :, None], gathered(batch)
    inputs = batch, DECODING
    functions = {
        "SDPA, contiguous": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0],
        "naive, contiguous": lambda: attention(q, k, v)[:, :, 0],
        "paged, gathered": lambda: gathered_attention(*inputs)[0],
        "paged, streamed": lambda: streamed_attention(*inputs)[0],
        "paged, packed": partial(paged_attention_varlen, *batch[:5], torch.arange(shape.num_seqs + 1).int()),
    }
    return f"decode in torch, {_sizes(shape)}", functions, exact(batch)


def cpu_runner(shape: Shape) -> Contest:
    """Run the CUDA kernel as fibers: plain, observed and checked."""
    batch = random_inputs(shape, torch.float32, CPU, seed=0)
    caches = to_vllm_layout(batch.k_cache, batch.v_cache)

    def plain() -> Tensor:
        return paged_attention_v1(batch.q, *caches, batch.block_tables, batch.seq_lens)

    def observed() -> Tensor:
        with cudascope.observe():
            return plain()

    def checked() -> Tensor:
        with cudascope.check():
            return plain()

    functions = {"plain": plain, "observed": observed, "checked": checked}
    return f"CPU runner, paged_attention_v1, {_sizes(shape)}", functions, exact(batch)


def interpreter(shape: Shape) -> Contest:
    """Compare Triton's interpreter with torch."""
    batch = random_inputs(shape, torch.float32, CPU, seed=0)
    functions = {backend: partial(paged_attention, *batch[:5], backend=backend) for backend in ("torch", "triton")}
    return f"paged_attention, Triton interpreted, {_sizes(shape)}", functions, exact(batch)


def splits(num_keys: int) -> Contest:
    """Split the keys in torch, where nothing runs in parallel: what the splits and their merge cost."""
    q, k, v = (torch.randn(1, heads, tokens, 64) for heads, tokens in ((8, 1), (2, num_keys), (2, num_keys)))
    functions = {"naive": lambda: attention(q, k, v)}
    for num in (1, 4, 32):
        functions[f"flash_decoding, {num} splits"] = partial(flash_decoding, q, k, v, num_splits=num, backend="torch")
    right = attention(*(x.double() for x in (q, k, v)))
    return f"Flash-Decoding in torch, {num_keys} keys, 8 heads over 2", functions, right


def _sizes(shape: Shape) -> str:
    return f"{shape.num_seqs} × {shape.longest} tokens, {shape.num_heads} heads over {shape.num_kv_heads}"


def main(*, seconds: float = 4.0, repeats: int = 9) -> None:
    """Make every comparison, each for `seconds` and at least `repeats` rounds."""
    torch.set_num_threads(1)  # more would spin while they wait for each other
    for contest in progress(contests(), "comparisons"):
        title, functions, right = contest()
        rows = []
        found = ratios(functions, right, seconds=seconds, repeats=repeats, timer=cpu_seconds)
        for name, ratio in found.items():
            if isinstance(ratio, str):
                rows.append((name, "–", ratio))
            else:
                rows.append((name, f"× {ratio.median:.2f}", f"{ratio.low:.2f} and {ratio.high:.2f}"))
        say(table((title, "ratio", "half of them between"), rows) + "\n")


if __name__ == "__main__":
    main()
