"""Attention of packed queries over a paged cache in Triton: the launches of a serving step (lesson 9).

Sequences that decode and chunks of prompts are two parts of a step, each with the tile that suits it. The sizes of the
launches depend on the numbers of queries and sequences only. The host waits for no length, and a CUDA graph can capture
a decode step.
"""

from jaxtyping import Float, Int32
from torch import Tensor

from pagewise.paged_attention.in_triton import SHARING, attend, shared_plan
from pagewise.paged_attention_varlen.step import Cache, Packed, Step


class PlanInTriton:
    """The tensors and the work plan that all layers of a step share. Their numbers stay on the device."""

    def __init__(self, step: Step) -> None:
        self.step, self.splits = step, step.splits or SHARING
        cu_seqlens_q = None if step.decodes else step.cu_seqlens_q
        self.of_step = {"block_tables": step.block_tables, "seq_lens": step.seq_lens, "cu_seqlens_q": cu_seqlens_q}
        self._plans: dict[tuple, Int32[Tensor, "5 columns"] | None] = {}  # by the shapes of q and k: layers may differ

    def attend(self, q: Packed, k_cache: Cache, v_cache: Cache) -> Packed:
        """Return out of `paged_attention_varlen` for one layer. Nothing is checked."""
        return self.attend_with_lse(q, k_cache, v_cache)[0]

    def attend_with_lse(
        self, q: Packed, k_cache: Cache, v_cache: Cache, *, plans: bool = True
    ) -> tuple[Packed, Float[Tensor, "total_q H"]]:
        """Return (out, lse). The first layer makes the plan, or each op by itself if `plans` is False."""
        key, decodes, plan = (q.shape, k_cache.shape[2], q.dtype, k_cache.dtype), self.step.decodes, None
        q = q.unsqueeze(2) if decodes else q.transpose(0, 1)[None]
        if plans:
            if key not in self._plans:
                self._plans[key] = shared_plan(q, k_cache, self.step.options, self.splits, **self.of_step)
            plan = self._plans[key]
        others = {"v_scale": self.step.v_scale, "plan": plan}
        out, lse = attend(q, k_cache, v_cache, self.step.options, self.splits, **self.of_step, **others)
        return (out.squeeze(2), lse.squeeze(2)) if decodes else (out[0].transpose(0, 1), lse[0].transpose(0, 1))
