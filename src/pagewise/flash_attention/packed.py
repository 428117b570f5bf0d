"""Packed sequences: where each lies among the others (lesson 6)."""

from itertools import pairwise
from typing import NamedTuple

from jaxtyping import Int32
from torch import Tensor


class Packed(NamedTuple):
    """Where sequence b lies in tensors [1, H, total, D]: rows cu_seqlens[b] … cu_seqlens[b + 1] − 1."""

    cu_seqlens_q: Int32[Tensor, " ends"]
    cu_seqlens_k: Int32[Tensor, " ends"]

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens_q.numel() - 1

    def sequences(self) -> list[tuple[slice, slice]]:
        """The rows of q and of k that belong together; on a GPU this waits for it."""
        rows, cols = ([slice(*ends) for ends in pairwise(x.tolist())] for x in self)
        return list(zip(rows, cols, strict=True))
