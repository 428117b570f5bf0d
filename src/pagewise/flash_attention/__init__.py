"""FlashAttention: exact attention whose scores never leave the chip, forward and backward (lesson 6).

door        `flash_attention`: it checks, chooses, and calls an op of `ops`; `varlen`, the same for `packed` sequences
in_torch    FlashAttention-2's loops
in_triton   the Triton kernels, forward and backward; `in_triton_hopper`, variants; `launching`, what they share
in_cuda     a CUDA C++ kernel to be read and watched, forward only
dropout     which weights are dropped, the same in every backend, forward and backward
papers      both papers' loops in plain torch, any tile sizes: `version_1`, `version_2`, over `tiles`; `differentiable`
counted     what a call of an op does, for tools.work
in_transformers   `register_attention`: the same under Hugging Face's models
"""

from pagewise.flash_attention import counted
from pagewise.flash_attention.door import flash_attention
from pagewise.flash_attention.dropout import dropout_mask
from pagewise.flash_attention.in_transformers import register_attention
from pagewise.flash_attention.papers import (
    flash_attention_1,
    flash_attention_1_backward,
    flash_attention_1_forward,
    flash_attention_2,
    flash_attention_2_backward,
    flash_attention_2_forward,
)
from pagewise.flash_attention.tiles import tile_sizes
from pagewise.flash_attention.varlen import flash_attention_varlen
