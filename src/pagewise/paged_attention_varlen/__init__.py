"""`paged_attention_varlen`: any number of new queries per sequence over a paged cache, in one launch (lesson 9).

A step of a serving engine holds sequences that decode, with one query each, beside chunks of prompts, with many. The
queries of all sequences are packed one after the other, as in `flash_attention_varlen`, and the queries of a sequence
are its last tokens. Kwon et al. 2023; chunked prefill: Agrawal et al. 2024 (Sarathi-Serve).
"""

from typing import Literal

from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention.decode import checked
from pagewise.paged_attention.inputs import PagedInputs, checked_splits, used_blocks
from pagewise.paged_attention_varlen.in_cuda import PlanInCuda
from pagewise.paged_attention_varlen.in_torch import PlanInTorch
from pagewise.paged_attention_varlen.in_triton import PlanInTriton
from pagewise.paged_attention_varlen.step import Step
from pagewise.tools.checks import check_running_sums
from pagewise.tools.device import looks
from pagewise.tools.transforms import check_values, derivative_of, outside_graphs

PLANS = {"torch": PlanInTorch, "triton": PlanInTriton, "cuda": PlanInCuda}


def paged_attention_varlen(
    q: Float[Tensor, "total_q H D"],
    k_cache: Shaped[Tensor, "N P Hkv D"],
    v_cache: Shaped[Tensor, "N P Hkv D"],
    block_tables: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, " B"],
    cu_seqlens_q: Int32[Tensor, " ends"],
    *,
    scale: float | None = None,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_splits: int | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    check: bool | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Float[Tensor, "total_q H D"] | tuple[Float[Tensor, "total_q H D"], Float[Tensor, "total_q H"]]:
    """Return `paged_attention` for any number of queries per sequence: its newest tokens, each after the other.

    Queries cu_seqlens_q[b] … cu_seqlens_q[b + 1] − 1 are the last T_b of the seq_lens[b] tokens of sequence b:

        keys       = k_cache[block_tables[b]].flatten(0, 1)[: seq_lens[b]] · k_scale,   values likewise · v_scale
        out[of b]  = attention(q[of b], keys, values, causal=True, …)

    Where T_b = 1 for all b, this is `paged_attention`.

    Args:
        seq_lens: from T_b to M · P. They include the queries' own tokens, whose keys and values are in the cache.
        cu_seqlens_q: [B + 1], running sums of the T_b from 0 to total_q. T_b may be 0.
        num_splits, split_size: as in `flash_decoding`. In torch, the bits of a row do not depend on the batch around it
            if one of them is given. In Triton they do depend on the number of queries, which decides the tiles.
        backend: as in `paged_attention`. "torch" computes the scores of a whole padded batch. On a CPU it takes torch's
            fused attention instead, if nothing asks for more than that can do: no lse, softcap, ALiBi, splits, v_scale
            or derivative, a positive scale, and a finite result.
        The rest as in `paged_attention`.

    Returns:
        out [total_q, H, D] in the dtype of q; with `return_lse` the pair (out, lse [total_q, H]).

    Raises:
        ValueError, TypeError: an argument does not fit, or the backend cannot take it. The message names it.
    """
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, v_scale)
    options = ScoreOptions(scale, causal=True, window=window, softcap=softcap)
    derivative = derivative_of(q, k_cache, v_cache, alibi_slopes)
    options, backend = checked(inputs, cu_seqlens_q, options, k_scale, backend, derivative)
    splits = checked_splits(num_splits, split_size)
    if alibi_slopes is not None:
        options = options._replace(alibi_slopes=alibi_slopes).checked(q[:, :, None], 1)
    step = Step(block_tables, seq_lens, cu_seqlens_q, k_cache.shape[1], False, options, float(v_scale), splits)
    if backend == "torch":
        return _in_torch(inputs, step, return_lse)
    if looks(check, block_tables, seq_lens, cu_seqlens_q):
        _check_numbers(inputs, step)
    return PlanInTriton(step).attend(q, k_cache, v_cache, return_lse=return_lse, plans=False)


@outside_graphs('paged_attention_varlen(backend="torch")', remedy='backend="triton"')
def _in_torch(inputs: PagedInputs, step: Step, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    tensors = {"block_tables": step.block_tables, "seq_lens": step.seq_lens, "cu_seqlens_q": step.cu_seqlens_q}
    check_values('paged_attention_varlen(backend="torch")', remedy='backend="triton"', **tensors)
    _check_numbers(inputs, step)
    return PlanInTorch(step).attend(*inputs[:3], return_lse=return_lse)


def _check_numbers(inputs: PagedInputs, step: Step) -> None:
    """Raise ValueError unless the numbers in the tensors of a step belong together."""
    lengths = check_running_sums("q", step.cu_seqlens_q, len(inputs.q))
    used_blocks(inputs, step.options.window, step.cu_seqlens_q.diff())
    for b, (num_queries, length) in enumerate(zip(lengths, step.seq_lens.tolist(), strict=True)):
        if num_queries > length:
            raise ValueError(
                f"seq_lens must count the queries' own tokens, got {length} for sequence {b}, which has {num_queries} "
                f"queries"
            )


def plan(step: Step, backend: Literal["torch", "triton", "cuda"]) -> PlanInTorch | PlanInTriton | PlanInCuda:
    """Return the plan of a step: `.attend(q, k_cache, v_cache)` is the attention of one layer, and checks nothing.

    A plan may look at the numbers in the step's tensors, for which the host waits for a GPU. The triton and cuda plans
    of a step that decodes do not, and `attend` never does. "cuda" is for caches in vLLM's layout, without window,
    softcap and splits.
    """
    return PLANS[backend](step)
