"""How kernels read the keys of a paged sequence: 90 tokens in six blocks, a head of 128 float16 elements (lesson 5)."""

import torch
from torch import Tensor

import cudascope
from cudascope import CudaKernel
from pagewise.exercises.cuda import reads_of
from pagewise.paged_blocks import to_vllm_layout

D, P, LENGTH = 128, 16, 90
TABLE = torch.tensor([7, 1, 4, 0, 8, 3], dtype=torch.int32)
COLUMNS = ("kernel", "requests", "sectors", "% used", "shuffles", "largest error")


class KeyReads:
    """Random keys and values in blocks, and the kernels that were counted on them, each beside the one before it.

    `names` are the kernels in the order of the lesson. `k_cache` and `v_cache` are [N, P, 1, D], `k_vllm` holds the
    same keys in vLLM's layout, and `keys` and `values` [LENGTH, D] are the sequence in float32. `scores` [96] is the
    output of the last kernel. `launches` has the observed launch of each kernel by name.
    """

    def __init__(self, *names: str) -> None:
        self.names, self.launches = names, {}
        self._rows: dict[str, tuple] = {}
        draw = torch.Generator().manual_seed(0)
        self.k_cache, self.v_cache = torch.randn(2, 9, P, 1, D, generator=draw).half()
        self.k_vllm, _ = to_vllm_layout(self.k_cache, self.v_cache)
        self.query = torch.randn(D, generator=draw).half()
        caches = (self.k_cache, self.v_cache)
        self.keys, self.values = (x[TABLE].flatten(0, 1)[:LENGTH, 0].float() for x in caches)
        self.scores = torch.zeros(96)

    def count(self, name: str, kernel: CudaKernel, cache: Tensor | None = None) -> list[tuple]:
        """Launch a kernel that computes the scores, and return a row of COLUMNS for it and the kernel before it.

        Raises:
            ValueError: `name` is not one of `names`.
        """
        if name not in self.names:
            raise ValueError(f"there is no kernel {name!r}: there are {', '.join(self.names)}")
        with cudascope.observe() as report:
            kernel[1, 128](self.query, self.k_cache if cache is None else cache, TABLE, self.scores, LENGTH)
        seen = self.launches[name] = report.launches[0]
        reads = reads_of(seen, "k", itemsize=2)
        used = 100 * reads.bytes / (32 * reads.pieces)
        error = (self.scores[:LENGTH] - self.keys @ self.query.float()).abs().max()
        self._rows[name] = (name, reads.requests, reads.pieces, used, seen.shuffles, f"{error:.4f}")
        i = self.names.index(name)
        return [self._rows[each] for each in self.names[max(i - 1, 0) : i + 1]]
