"""torch's fused attention on a CPU, where its result is right (lesson 9).

scaled_dot_product_attention (SDPA) of torch on a CPU masks before it scales, drops NaN from rows of fewer than 16
scores, and follows autocast and the backends that a caller has switched off. It is several times as fast as scores in
memory. So it is used, and its rows are checked.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagewise.tools.transforms import derivative_of, has_values


def fused_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    scale: float,
    is_causal: bool = False,
    mask: Float[Tensor, "B 1 #T S"] | Bool[Tensor, "..."] | None = None,
    otherwise: Callable[[Int[Tensor, " rows"] | slice], Float[Tensor, "B H rows D"]],
    plain: bool = False,
) -> Float[Tensor, "B H T D"]:
    """Return attention by SDPA. Where its result may be wrong, `otherwise(rows)` computes rows from scores in memory.

    SDPA treats NaN and infinity among scores and values in its own way. Rows that are not finite, or all zeros, are
    therefore computed again. If a derivative is wanted, all rows are: SDPA's own would follow an autocast around the
    backward. `plain`: the caller knows that no derivative is wanted and that the tensors have values.
    """
    on_cpu, backends = q.device.type == "cpu", torch.backends.cuda
    switched_on = backends.flash_sdp_enabled() or backends.math_sdp_enabled()  # for a CPU too
    plain = plain or (has_values(q, k, v) and not derivative_of(q, k, v))
    if not on_cpu or not switched_on or scale <= 0 or not plain:
        return otherwise(slice(None))
    with torch.autocast("cpu", enabled=False):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True)
    size = out.abs().amax(dim=-1, keepdim=True) if out.numel() else out[..., :1]
    sound = (size > 0) & (size < torch.inf)
    if not sound.all():
        rows = (~sound).flatten(0, 1).any(dim=0)[:, 0].nonzero()[:, 0]
        out[:, :, rows] = torch.where(sound[:, :, rows], out[:, :, rows], otherwise(rows))
    return out
