"""The options that shape the scores of every attention function, as one value that is checked once.

With query i standing at position i + S − T among S keys, in this order:

    score  = q · k · scale
    score  = softcap · tanh(score / softcap)      if softcap > 0
    score += alibi_slope · −|j − (i + S − T)|     if alibi_slopes are given
    score  = −∞                                   where causal, window or attn_mask hide key j from query i
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pagewise.tools.checks import (
    FLOAT32_MAX,
    check_count,
    check_flag,
    check_mask,
    check_number,
    check_same,
    check_shape,
    check_tensor,
)
from pagewise.tools.transforms import derivative_of, has_values


class ScoreOptions(NamedTuple):
    """The options that public functions spell out, as one value for the functions that they call."""

    scale: float | None = None  # None: D^-½, see `scale_for`
    causal: bool = False
    window: int | None = None
    softcap: float = 0.0
    alibi_slopes: Float[Tensor, " H"] | None = None
    attn_mask: Bool[Tensor, "..."] | None = None

    def checked(self, q: Float[Tensor, "B H T D"], num_keys: int) -> "ScoreOptions":
        """Return these options with plain ints and floats, if they fit queries q over `num_keys` keys.

        Raises:
            ValueError, TypeError: one does not fit; the message names it.
        """
        B, H, T, _ = q.shape
        check_flag("causal", self.causal)
        if self.window is not None:
            check_count("window", self.window)
            if not self.causal:
                raise ValueError(
                    f"window = {self.window} needs causal=True: it counts back from the query's own position"
                )
        if self.scale is not None:
            check_number("scale", self.scale, low=-FLOAT32_MAX, below=FLOAT32_MAX)
        check_number("softcap", self.softcap, low=0.0, below=FLOAT32_MAX)
        if self.alibi_slopes is not None:
            check_tensor("alibi_slopes", self.alibi_slopes, "H", dtypes=(torch.float32,))
            check_shape("alibi_slopes", self.alibi_slopes, (H,), "H")
            check_same("device", q=q, alibi_slopes=self.alibi_slopes)
            looks = q.device.type == "cpu" and has_values(self.alibi_slopes)
            if looks and not torch.isfinite(self.alibi_slopes).all():
                raise ValueError("alibi_slopes must be finite, got NaN or infinity")
        if self.attn_mask is not None:
            check_mask("attn_mask", self.attn_mask, (B, H, T, num_keys), like=q)
        return self._replace(
            scale=None if self.scale is None else float(self.scale),
            window=None if self.window is None else int(self.window),
            softcap=float(self.softcap),
        )

    def without_gradient(self) -> "ScoreOptions":
        """Return these options, for a function that has no gradient for them.

        Raises:
            ValueError: autograd needs a gradient of alibi_slopes.
        """
        if derivative_of(self.alibi_slopes):
            raise ValueError(
                "alibi_slopes must not require a gradient, there is none for them here: pass alibi_slopes.detach(), or "
                "use pagewise.naive_attention.attention"
            )
        return self

    def scale_for(self, head_size: int) -> float:
        """Return the factor of q · k: `scale`, or D^-½."""
        return head_size**-0.5 if self.scale is None else self.scale
