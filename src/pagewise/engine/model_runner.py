"""One forward pass for a step: build the batch, run the model, return the logits, choose the tokens (lesson 9).

On a GPU, launching the kernels of a decode step one by one takes longer than running them. Therefore decode steps are
captured as CUDA graphs, for a few batch sizes, and replayed on fixed buffers. A step copies its inputs into the buffers
of the next larger graph and launches it once. The remaining rows write nowhere (slot −1) and see no key (length 0).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pagewise.engine import beam_search
from pagewise.engine.batch import Batch
from pagewise.engine.block_tensors import BlockTensorMemory
from pagewise.engine.dense_memory import DenseMemory
from pagewise.engine.flash_decoding_plus_plus import with_dataflow
from pagewise.engine.memory import BlockMemory, PagedMemory, kv_sizes
from pagewise.engine.profile import span
from pagewise.engine.sampling import Pick, Row, sample
from pagewise.engine.sequence import Chunk, Request, Sequence
from pagewise.engine.speculation import verified
from pagewise.flash_decoding_plus_plus import Dataflow

MEMORIES = {"paged": PagedMemory, "dense": DenseMemory, "block_tensors": BlockTensorMemory}


class ModelRunner:
    """Run the model, or its forward function, over chunks. `graphs`: replay decode steps as CUDA graphs.

    `join(copies, batch)` is a context in which other processes compute the same step (see `followers`).
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        memory: BlockMemory | DenseMemory,
        device: torch.device,
        graphs: bool,
        join: Callable[..., AbstractContextManager] | None = None,
    ) -> None:
        self.model, self.memory, self.device, self._join = model, memory, device, join
        self._graphs = DecodeGraphs(self) if graphs else None

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> Float[Tensor, "n vocab"]:
        """Return the logits after the last `num_logits` tokens of each chunk. Write all K and V into memory."""
        decoding = all(chunk.stop - chunk.start == 1 for chunk in chunks)
        with span("decode" if decoding else "prefill"):
            with span("build batch"):
                copies = self.memory.manager.take_copies() if isinstance(self.memory, BlockMemory) else []
                manager = self.memory.manager if isinstance(self.memory, PagedMemory) else None
                batch = Batch.of(chunks, manager, self.device)
            with nullcontext() if self._join is None else self._join(copies, batch):
                if copies:
                    self.memory.cache.copy_blocks(copies)
                if decoding and self._graphs is not None:
                    return self._graphs.run(batch)
                return self.forward(batch)

    def forward(self, batch: Batch) -> Float[Tensor, "n vocab"]:
        """Run the model once. The tokens of the batch are one row of its input."""
        attend = self.memory.attention(batch)
        with span("model"):
            return self.model(batch.token_ids[None], batch.positions[None], attend, logits_for=batch.logits_for)[0]


def make_runner(
    model: nn.Module, attention: str, kind: dict[str, Any], dataflow: Dataflow | None, followers: Any = None
) -> ModelRunner:
    """Return the runner of a model and a memory, which `kind` describes. Every process of an engine has one."""
    if followers is not None:
        followers.tell(kind)  # they make theirs at the same time
    forward = model if dataflow is None else with_dataflow(model, dataflow)
    weight = next(model.parameters())
    memory = MEMORIES[attention](kv_sizes(model), **kind, device=weight.device)
    if followers is not None:
        followers.wait()
    graphs = weight.is_cuda and attention == "paged" and kind["backend"] == "triton" and followers is None
    return ModelRunner(forward, memory, weight.device, graphs, followers and followers.step)


class Chosen(NamedTuple):
    """The next tokens of each sequence that has logits, and the next beams of each beam search."""

    picks: list[
        tuple[Request, Sequence, list[Pick | None]]
    ]  # the right drafts, and one more; None: logits that are not finite
    selections: list[tuple[Request, beam_search.Selection]]


def choose(chunks: list[Chunk], logits: Float[Tensor, "n vocab"], ends: frozenset[int]) -> Chosen:
    """Return the next tokens. No request changes."""
    rows, drawn = [], []
    searches: dict[Request, list[int]] = {}
    stop = 0
    for chunk in (chunk for chunk in chunks if chunk.num_logits):
        request, at, stop = chunk.request, stop, stop + chunk.num_logits
        if request.sampling.beam_width > 1:
            searches.setdefault(request, []).append(at)
            continue
        for sequence in [chunk.sequence] if request.forked else request.live:  # all begin with these tokens
            for i in range(chunk.num_logits):
                tokens = [*sequence.tokens, *chunk.drafts[:i]] if i else sequence.tokens
                num_new = len(tokens) - len(request.prompt)
                rows.append(Row(at + i, request.sampling, tokens, request.seed, sequence.index, num_new))
            drawn.append((request, sequence, chunk.drafts))
    picks = iter(sample(logits, rows))
    picks = [(r, sequence, verified([*islice(picks, len(drafts) + 1)], drafts)) for r, sequence, drafts in drawn]
    found = [(r, beam_search.select(r, logits[at], r.ends(ends))) for r, at in searches.items()]
    return Chosen(picks, found)


class DecodeGraphs:
    """CUDA graphs of decode steps, captured when a size is first needed: 1, 2, 4, 8, then every 8 sequences.

    The block tables are as wide as the longest sequence's, in powers of two, so that few graphs serve all lengths.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}
        self._pool = None

    def run(self, batch: Batch) -> Float[Tensor, "n vocab"]:
        """Return the logits of the rows that `batch.logits_for` names."""
        B, M = batch.block_tables.shape
        size = B if B <= 2 else 4 if B <= 4 else -(-B // 8) * 8
        key = (size, 1 << (M - 1).bit_length())
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        graph, static, logits = self._captured[key]
        _fill(static, batch)
        graph.replay()
        return logits[batch.logits_for]

    def _capture(self, size: int, width: int) -> tuple[torch.cuda.CUDAGraph, Batch, Tensor]:
        static = _empty(size, width, self._runner.device)
        side = torch.cuda.Stream(self._runner.device)
        side.wait_stream(torch.cuda.current_stream(self._runner.device))
        with torch.cuda.stream(side):  # compiles and tunes kernels, which is not allowed during a capture
            self._runner.forward(static)
        torch.cuda.current_stream(self._runner.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._runner.forward(static)
        self._pool = graph.pool()
        return graph, static, logits


def _empty(size: int, width: int, device: torch.device) -> Batch:
    """Return a decode step of `size` rows that write nowhere and see no key."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    rows = torch.arange(size + 1, device=device)
    return Batch(
        [],
        token_ids=zeros(size),
        positions=zeros(size),
        logits_for=rows[:-1],
        slots=zeros(size) - 1,
        block_tables=zeros(size, width, dtype=torch.int32),
        seq_lens=zeros(size, dtype=torch.int32),
        cu_seqlens_q=rows.to(torch.int32),
    )


def _fill(static: Batch, batch: Batch) -> None:
    """Copy a step into the buffers of a graph. The remaining rows write nowhere and see no key."""
    B, M = batch.block_tables.shape
    for to, new, nothing in (
        (static.token_ids, batch.token_ids, 0),
        (static.positions, batch.positions, 0),
        (static.slots, batch.slots, -1),
        (static.seq_lens, batch.seq_lens, 0),
    ):
        to[:B] = new
        to[B:] = nothing
    static.block_tables[:B, :M] = batch.block_tables
