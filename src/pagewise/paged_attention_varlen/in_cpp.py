"""Decode steps on a CPU by kernels/paged_attention.cpp, which reads keys and values where they are (lesson 9).

Where `tools.cpp` cannot compile the kernel, torch does the work.
"""

import ctypes
import functools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pagewise.paged_attention_varlen.step import Step
from pagewise.tools.cpp import NAMES, WIDTH, CTensor, functions


class _Sequences(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("row", "table", "first", "length")),
        *((name, ctypes.c_int64) for name in ("count", "blocks_of_table")),
    )


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size"))


@functools.cache
def library() -> dict:
    """Return the compiled kernels by name and dtype, or {} where they cannot run."""
    return functions("paged_attention.cpp", attend=[*[CTensor] * 4, _Sequences, _Sizes, ctypes.c_float, ctypes.c_int])


class DecodeInCpp:
    """The sequences of a step that have one query each.

    Args:
        members: of each sequence its number, the row of its query, and the first and the number of the keys that the
            query sees.
    """

    def __init__(self, step: Step, members: Sequence[tuple[int, int, int, int]]) -> None:
        self._scale_for = functools.cache(step.options.scale_for)  # all layers have one head size
        b, rows, first, num_keys = torch.tensor(members, device=step.block_tables.device).T
        self._held = rows.contiguous(), step.block_tables[b], first.int(), (first + num_keys).int()
        addresses = map(Tensor.data_ptr, self._held)
        self._sequences = _Sequences(*addresses, len(members), step.block_tables.shape[1])

    @staticmethod
    def takes(step: Step) -> bool:
        """Whether the kernel can compute what the step asks for, if its tensors are of a type that the kernel has."""
        options = step.options
        plain = step.plain and step.splits is None and step.v_scale == 1.0
        on_cpu = step.block_tables.device.type == "cpu"
        return plain and on_cpu and options.softcap == 0 and options.alibi_slopes is None and bool(library())

    def attend(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
        out: Float[Tensor, "total_q H D"],
    ) -> bool:
        """Write the rows of these sequences into `out`. Return whether that was possible, with finite results."""
        (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
        if head_dim % WIDTH or q.dtype not in NAMES:
            return False
        tensors = []
        for x in (q, k_cache, v_cache, out):
            # is_in_memory, without a call per tensor and layer
            implied = type(x) is not Tensor or x.is_neg() or x._is_zerotensor()
            if x.dtype != q.dtype or x.stride(-1) != 1 or x.device.type != "cpu" or implied:
                return False
            tensors.append(CTensor(x.data_ptr(), x.stride()[:3]))
        return bool(
            library()["attend", q.dtype](
                *tensors,
                self._sequences,
                _Sizes(num_heads, num_kv_heads, head_dim, block_size),
                self._scale_for(head_dim) * math.log2(math.e),
                torch.get_num_threads(),
            )
        )
