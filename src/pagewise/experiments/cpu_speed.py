"""What things cost on a CPU, as ratios of one run (`make bench`): a machine's seconds mean little, its ratios more.

Each table compares ways to do the same with the first one. The result is checked before it is timed, the ways take
turns, and each ratio is the median of neighbours, with the quartiles between which half of them lie. What is compared
is the time that cores were busy: other work on the machine is not in it.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from pagewise.cuda import simt
from pagewise.engine import LLM
from pagewise.engine.scheduler import Policy
from pagewise.experiments.engine_workload import Workload
from pagewise.experiments.paged_attention_peers import side_by_side
from pagewise.experiments.paged_attention_speed import Shape, exact, random_batch
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus.dataflow import Dataflow, device_label
from pagewise.kv_cache import generate
from pagewise.models import tiny_model
from pagewise.naive_attention import attention
from pagewise.paged_attention import paged_attention, paged_attention_v1
from pagewise.paged_attention.in_torch import gathered_attention, streamed_attention
from pagewise.paged_attention.inputs import checked_inputs
from pagewise.paged_attention_varlen import paged_attention_varlen
from pagewise.paged_blocks import BlockManager
from pagewise.paged_blocks.cache import to_vllm_layout
from pagewise.tools import benchmark

CPU = torch.device("cpu")
TOKENS = 1000
Contest = tuple[str, dict[str, Callable], Tensor | None]


def contests() -> Iterator[Contest]:
    """(title, functions, what they must return) of every comparison; each is built when its turn comes."""
    yield block_manager()
    yield torch_paths(Shape(8, 512, 8, 8, head_size=64))
    yield torch_paths(Shape(8, 512, 8, 2, head_size=64))
    yield cpu_runner(Shape(2, 64, 4, 2, head_size=64))
    yield interpreter(Shape(1, 64, 4, 2, head_size=64))
    yield splits(8192)
    yield dispatch(1024)
    yield engines(Workload("shared", num_requests=8, prompt_tokens=96, max_new_tokens=4))


def block_manager() -> Contest:
    """A sequence of TOKENS tokens comes, grows token by token, and goes; with others in the pool or without."""

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
    """Decode in torch: keys and values side by side, or in blocks."""
    batch = random_batch(shape, torch.float32, CPU, seed=0)
    q, k, v = side_by_side(batch)
    q, k, v = q[:, :, None], k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    paged = checked_inputs(*batch[:5])
    functions = {
        "SDPA, contiguous": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0],
        "naive, contiguous": lambda: attention(q, k, v)[:, :, 0],
        "paged, gathered": lambda: gathered_attention(*paged)[0],
        "paged, streamed": lambda: streamed_attention(*paged)[0],
        "paged, packed": partial(paged_attention_varlen, *batch[:5], torch.arange(shape.num_seqs + 1).int()),
    }
    return f"decode in torch, {_sizes(shape)}", functions, exact(batch)


def cpu_runner(shape: Shape) -> Contest:
    """The CUDA kernel as fibers: plain, observed, and held against the rules."""
    batch = random_batch(shape, torch.float32, CPU, seed=0)
    caches = to_vllm_layout(batch.k_cache, batch.v_cache)

    def plain() -> Tensor:
        return paged_attention_v1(batch.q, *caches, batch.block_tables, batch.seq_lens)

    def observed() -> Tensor:
        with simt.observe():
            return plain()

    def checked() -> Tensor:
        with simt.check():
            return plain()

    functions = {"plain": plain, "observed": observed, "checked": checked}
    return f"CPU runner, paged_attention_v1, {_sizes(shape)}", functions, exact(batch)


def interpreter(shape: Shape) -> Contest:
    """Triton's interpreter against torch."""
    batch = random_batch(shape, torch.float32, CPU, seed=0)
    functions = {backend: partial(paged_attention, *batch[:5], backend=backend) for backend in ("torch", "triton")}
    return f"paged_attention, Triton interpreted, {_sizes(shape)}", functions, exact(batch)


def splits(num_keys: int) -> Contest:
    """Flash-Decoding in torch: what cutting the keys and merging costs where nothing runs side by side."""
    q, k, v = (torch.randn(1, heads, tokens, 64) for heads, tokens in ((8, 1), (2, num_keys), (2, num_keys)))
    functions = {"naive": lambda: attention(q, k, v)}
    for num in (1, 4, 32):
        functions[f"flash_decoding, {num} splits"] = partial(flash_decoding, q, k, v, num_splits=num, backend="torch")
    right = attention(*(x.double() for x in (q, k, v)))
    return f"Flash-Decoding in torch, {num_keys} keys, 8 heads over 2", functions, right


def dispatch(size: int) -> Contest:
    """What looking up the table costs, where it chooses torch's own product."""
    x, w = torch.randn(1, size), torch.randn(size, size)
    flow = Dataflow(device_label(CPU), torch.float32, {(size, size): (1, 1)})
    functions = {"torch's linear": lambda: linear(x, w), "Dataflow.linear": lambda: flow.linear(x, w)}
    return f"a token times weights [{size}, {size}], float32", functions, x.double() @ w.double().T


def engines(workload: Workload) -> Contest:
    """The engine, new each time: requests one by one, in batches for which K and V are copied, in batches by tables."""
    model, _ = tiny_model()
    prompts, sampling = workload.draw(model.config.vocab_size, 0)

    def tokens(scheduler: Policy, attention: str) -> Tensor:
        llm = LLM(model, scheduler=scheduler, attention=attention, num_blocks=256)
        return Tensor([output.token_ids for output in llm.generate(prompts, sampling, progress=False)])

    ways = (("naive", "dense"), ("static", "dense"), ("continuous", "paged"))
    functions = {f"{scheduler}, {attention}": partial(tokens, scheduler, attention) for scheduler, attention in ways}
    alone = [generate(model, torch.tensor([prompt]), workload.max_new_tokens)[0, len(prompt) :] for prompt in prompts]
    sizes = f"{workload.num_requests} × {workload.prompt_tokens} tokens, {workload.max_new_tokens} new"
    return f"engine, tiny model, {sizes}", functions, torch.stack(alone).double()


def _sizes(shape: Shape) -> str:
    return f"{shape.num_seqs} × {shape.seq_len} tokens, {shape.num_heads} heads over {shape.num_kv_heads}"


def main(*, seconds: float = 4.0, repeats: int = 9) -> None:
    """Every comparison, each for so many seconds and at least so many rounds."""
    torch.set_num_threads(1)  # more would spin while they wait for each other
    for title, functions, right in contests():
        rows = []
        found = benchmark.ratios(functions, right, seconds=seconds, repeats=repeats, timer=benchmark.cpu_seconds)
        for name, ratio in found.items():
            failed = isinstance(ratio, str)
            rows.append((name, "–", ratio) if failed else (name, f"× {ratio.median:.2f}", _quartiles(ratio)))
        print(benchmark.table((title, "ratio", "half of them between"), rows), end="\n\n", flush=True)


def _quartiles(ratio: benchmark.Spread) -> str:
    return f"{ratio.low:.2f} and {ratio.high:.2f}"


if __name__ == "__main__":
    main()
