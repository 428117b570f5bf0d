"""The forward's variants for Hopper: how `kernels/flash_attention_hopper.py` is launched, and when (lesson 6)."""

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_attention.launching import Saved, in_base_2, kind, launch, room_like, round_into, strides
from pagewise.options import ScoreOptions
from pagewise.tools.device import triton_launch, triton_mode
from pagewise.tools.sizes import cdiv, padded

NAMES = ("descriptors", "warp_specialized")
WINS: dict[tuple[int, bool], str] = {}
"""(BLOCK_D, causal) → the variant that a measurement in lessons/measurements found faster. None is recorded yet."""


def variant_that_wins(
    q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv S D"], v: Float[Tensor, "B Hkv S D"], options: ScoreOptions
) -> str | None:
    """The variant to take for attention without dropout of sequences that are not packed; None: none."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9 or not takes(q, k, v, options):
        return None
    return WINS.get((padded(q.shape[-1]), options.causal))


def takes(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> bool:
    """Whether the variants can: 16-bit rows that descriptors can name, and no mask but causal."""
    plain = options.window is None and options.attn_mask is None and q.dtype.itemsize == 2 and k.shape[2] > 0
    return plain and all(x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and _in_16_bytes(x) for x in (q, k, v))


def _in_16_bytes(x: Tensor) -> bool:
    return all(stride * x.element_size() % 16 == 0 for stride in strides(x))


def forward(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    options: ScoreOptions,
    variant: str,
    *,
    learns: bool = False,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"], Saved]:
    """`in_triton.forward` by one of NAMES, for what it `takes`."""
    from pagewise.kernels import flash_attention_hopper as kernels

    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    out, lse = room_like(q), q.new_empty(B, H, T, dtype=torch.float32)
    saved = Saved.room(q, learns)
    constants = {
        "D": D, "BLOCK_D": padded(D), "CAUSAL": options.causal, "SOFTCAP": options.softcap > 0,
        "ALIBI": options.alibi_slopes is not None, "LEARNS": learns, "REST": saved.rest.numel() > 0,
    }  # fmt: skip
    with triton_launch(q.device) as readable:
        _let_descriptors_be_made()
        q, k, v, written, rest = (readable(x) for x in (q, k, v, out, saved.rest))
        m_and_log_l = saved.stats.unbind() if learns else (lse, lse)
        slopes = lse if options.alibi_slopes is None else options.alibi_slopes.contiguous()
        places = (*strides(q), *strides(k), *strides(v), *strides(written))
        launch(
            kernels.flash_attention_hopper_kernel,
            kernels.hopper_tiles(kind(q)[0], variant),
            lambda tiles: (cdiv(T, tiles["ROWS"]) * H * B,),
            (q, k, v, slopes, written, lse, rest, *m_and_log_l, *places, H, H // Hkv, T, S, *in_base_2(options, D)),
            constants,
            operations=2 * B * H * T * S * D,
        )
    round_into(out, saved.rest, written)
    return out, lse, saved


def _let_descriptors_be_made() -> None:
    """Descriptors that a kernel makes lie in memory that Triton asks for."""
    if triton_mode() == "compiled":
        import triton

        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
