"""FlashAttention: exact attention whose scores never leave the chip, forward and backward (lesson 6).

papers      both papers' loops in plain torch, any tile sizes: `version_1`, `version_2`, over `tiles`; `differentiable`
in_torch    the second one's loops, behind the door
dropout     which weights are dropped, the same in every backend, forward and backward
"""

from pagewise.flash_attention.dropout import dropout_mask
from pagewise.flash_attention.papers import (
    flash_attention_1,
    flash_attention_1_backward,
    flash_attention_1_forward,
    flash_attention_2,
    flash_attention_2_backward,
    flash_attention_2_forward,
)
from pagewise.flash_attention.tiles import tile_sizes
