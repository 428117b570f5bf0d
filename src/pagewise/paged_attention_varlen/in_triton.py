"""Attention of packed queries over a paged cache in Triton: the launches of a serving step (lesson 9).

Sequences that decode and chunks of prompts are two parts of a step, each with the tile that suits it. The sizes of the
launches depend on the numbers of queries and sequences only. The host waits for no length, and a CUDA graph can capture
a decode step.
"""

from jaxtyping import Float, Int32
from torch import Tensor

from pagewise.paged_attention.in_triton import SHARING, DecodeInputs, attend, shared_plan
from pagewise.paged_attention_varlen.step import Cache, Packed, Step


class PlanInTriton:
    """The tensors and the work plan that all layers of a step share. Their numbers stay on the device."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._plans: dict[tuple, Int32[Tensor, "5 columns"] | None] = {}  # by the shapes of q and k: layers may differ

    def attend(
        self, q: Packed, k_cache: Cache, v_cache: Cache, *, return_lse: bool = False, plans: bool = True
    ) -> Packed | tuple[Packed, Float[Tensor, "total_q H"]]:
        """Return out, or (out, lse), of `paged_attention_varlen` for one layer. Nothing is checked.

        The first layer makes the plan, or each op by itself if `plans` is False.
        """
        tables, lens, ends, _, decodes, options, v_scale, splits, _ = self.step
        key = (q.shape, k_cache.shape[2], q.dtype, k_cache.dtype)
        queries, ends = (q.unsqueeze(2), None) if decodes else (q.transpose(0, 1)[None], ends)
        inputs = DecodeInputs(queries, k_cache, v_cache, options, splits or SHARING, tables, lens, ends, v_scale)
        if plans:
            if key not in self._plans:
                self._plans[key] = shared_plan(inputs)
            inputs = inputs._replace(plan=self._plans[key])
        out, lse = (x.squeeze(2) if decodes else x[0].transpose(0, 1) for x in attend(inputs))
        return (out, lse) if return_lse else out
