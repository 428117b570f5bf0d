"""One forward pass for a step: build the batch, run the model, return the logits (lesson 9).

On a GPU, launching the kernels of a decode step one by one takes longer than running them. Therefore decode steps are
captured as CUDA graphs, for a few batch sizes, and replayed on fixed buffers. A step copies its inputs into the buffers
of the next larger graph and launches it once. The remaining rows write nowhere (slot −1) and see no key (length 0).
"""

import gc
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pagewise.engine.batch import Batch
from pagewise.engine.config import EngineConfig, free_memory, kv_sizes
from pagewise.engine.flash_decoding_plus_plus import products_by
from pagewise.engine.profile import Profile
from pagewise.engine.request import Chunk
from pagewise.models.linear import PackedWeights
from pagewise.tools.sizes import cdiv


class ModelRunner:
    """Run a model over chunks, with a memory of its own. Every process of an engine has one.

    `config` is complete, as `EngineConfig.completed` returns it. `together(batch)` is a context in which other
    processes compute the same step (see `leader`).
    """

    together: Callable[[Batch], AbstractContextManager] = staticmethod(nullcontext)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        weight = next(model.parameters())
        self.memory = config.new_memory(kv_sizes(model), weight.device, weight.dtype)
        if config.dataflow is None:  # `models.linear` packs weights once
            self._products = PackedWeights(model, most=free_memory() // 4 // config.num_processes)
        else:
            self._products = products_by(model, config.dataflow)
        self.model, self._graphs = model, None
        if weight.is_cuda and config.attention == "paged" and config.backend == "triton" and config.memory is None:
            self._graphs = DecodeGraphs(self, config)

    def run(self, chunks: list[Chunk]) -> Float[Tensor, "n vocab"]:
        """Return the logits after the last `num_logits` tokens of each chunk. Write all K and V into memory."""
        with Profile.span("build batch"):
            batch = self.memory.batch(chunks)
        with Profile.span("decode" if len(batch.token_ids) == len(chunks) else "prefill"), self.together(batch):
            return self.step(batch)

    @torch.inference_mode()
    def step(self, batch: Batch) -> Float[Tensor, "n vocab"]:
        """Compute one step. All processes of an engine call this method with the same batch."""
        if self._graphs is not None and len(batch.token_ids) == len(batch.seq_lens):  # all decode
            return self._graphs.run(batch)
        if hasattr(self.memory, "part_of"):  # context parallelism: this process computes some rows
            batch = self.memory.part_of(batch)
        attend = self.memory.attention(batch)
        with Profile.span("model"), self._products:
            # the tokens of the batch are one row of the model's input
            return self.model(batch.token_ids[None], batch.positions[None], attend, logits_for=batch.logits_for)[0]


class DecodeGraphs:
    """CUDA graphs of decode steps of 1, 2, 4, 8, and then every 8 sequences, captured before the first request comes.

    A step takes the next larger graph. Its block tables are as wide as the longest sequence's. That costs a step
    nothing, because the sizes of its launches do not depend on the width.
    """

    @torch.inference_mode()
    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self._memory, device, self._pool = runner.memory, runner.memory.device, None
        gc.collect()  # graphs of an engine that is gone: destroyed during a capture they would end that
        sizes = [1, 2, 4, *range(8, config.max_num_seqs + 8, 8)]
        self._sizes = sizes[: bisect_left(sizes, config.max_num_seqs) + 1]
        width = min(config.num_blocks, cdiv(config.max_model_len, config.block_size))
        self._captured = {}
        for size in reversed(self._sizes):  # the largest first, so that the others find their memory in its pool
            rows, zeros = torch.arange(size + 1, device=device), torch.zeros(size, dtype=torch.int64, device=device)
            tables = torch.zeros(size, width, dtype=torch.int32, device=device)
            static = Batch([], zeros, zeros.clone(), rows[:-1], zeros - 1, tables, zeros.int(), rows.int())
            self._captured[size] = static, *self._capture(runner, static)

    def run(self, batch: Batch) -> Float[Tensor, "n vocab"]:
        """Return the logits of the rows that `batch.logits_for` names."""
        size = self._sizes[bisect_left(self._sizes, len(batch.seq_lens))]
        static, graph, logits = self._captured[size]
        self._memory.cache.copy_blocks(batch.copies)
        B, M = batch.block_tables.shape
        for name, nothing in {"token_ids": 0, "positions": 0, "slots": -1, "seq_lens": 0}.items():
            buffer = getattr(static, name)
            buffer[:B], buffer[B:] = getattr(batch, name), nothing  # the remaining rows write nowhere and see no key
        static.block_tables[:B, :M] = batch.block_tables
        graph.replay()
        return logits[batch.logits_for]

    def _capture(self, runner: ModelRunner, static: Batch) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return the graph of a step with these buffers, and its logits."""
        usual = torch.cuda.current_stream(static.slots.device)
        side = torch.cuda.Stream(usual.device)
        side.wait_stream(usual)
        with torch.cuda.stream(side):  # compiles and tunes kernels, which is not allowed during a capture
            runner.step(static)
        usual.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = runner.step(static)
        self._pool = graph.pool()
        return graph, logits
