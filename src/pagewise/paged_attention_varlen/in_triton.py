"""Attention of packed queries over a paged cache in Triton: the launches of a serving step (lesson 9).

Sequences that decode and chunks of prompts are two parts of a step, each with the tile that suits it. The sizes of the
launches depend on the numbers of queries and sequences only. The host waits for no length, and a CUDA graph can capture
a decode step.
"""

from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.paged_attention.in_triton import SHARING, attend, shared_plan
from pagewise.paged_attention_varlen.step import Step


class PlanInTriton:
    """The tensors and the work plan that all layers of a step share. Their numbers stay on the device."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._plans: dict[tuple, Int32[Tensor, "5 columns"] | None] = {}  # by the shapes of q and k: layers may differ

    def attend(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
    ) -> Float[Tensor, "total_q H D"]:
        """Return out of `paged_attention_varlen` for one layer. Nothing is checked."""
        return self.attend_with_lse(q, k_cache, v_cache)[0]

    def attend_with_lse(
        self,
        q: Float[Tensor, "total_q H D"],
        k_cache: Shaped[Tensor, "N P Hkv D"],
        v_cache: Shaped[Tensor, "N P Hkv D"],
    ) -> tuple[Float[Tensor, "total_q H D"], Float[Tensor, "total_q H"]]:
        """Return (out, lse) of `paged_attention_varlen`. The first layer makes the plan."""
        key = (q.shape, k_cache.shape[2], q.dtype, k_cache.dtype)
        if key not in self._plans:
            q_of_op, k, _, of_step = _as_op_takes(q, k_cache, v_cache, self.step)
            splits = self.step.splits or SHARING
            self._plans[key] = shared_plan(q_of_op, k, self.step.options, splits, **of_step)
        return attend_to_step(q, k_cache, v_cache, self.step, self._plans[key])


def attend_to_step(
    q: Float[Tensor, "total_q H D"],
    k_cache: Shaped[Tensor, "N P Hkv D"],
    v_cache: Shaped[Tensor, "N P Hkv D"],
    step: Step,
    plan: Int32[Tensor, "5 columns"] | None = None,
) -> tuple[Float[Tensor, "total_q H D"], Float[Tensor, "total_q H"]]:
    """Return (out, lse) of `paged_attention_varlen`. The op makes the plan of the step if it is not given."""
    q, k, v, of_step = _as_op_takes(q, k_cache, v_cache, step)
    splits = step.splits or SHARING
    out, lse = attend(q, k, v, step.options, splits, **of_step, v_scale=step.v_scale, plan=plan)
    return (out.squeeze(2), lse.squeeze(2)) if step.decodes else (out[0].transpose(0, 1), lse[0].transpose(0, 1))


def _as_op_takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor, dict]:
    """Return q, k and v as `in_triton.attend` takes them, and the tensors of the step."""
    tables = {"block_tables": step.block_tables, "seq_lens": step.seq_lens}
    q = q[:, :, None] if step.decodes else q.transpose(0, 1)[None]
    tables["cu_seqlens_q"] = None if step.decodes else step.cu_seqlens_q
    return q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), tables
