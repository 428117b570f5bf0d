"""FlashAttention: exact attention whose scores never leave the chip, forward and backward (lesson 6).

attention   the public functions `flash_attention` and, for packed sequences, `flash_attention_varlen`; `measure_tiles`
inputs      the one value that they check and every backend reads
ops         the custom ops that they call
in_torch    FlashAttention-2's loops
in_triton   the Triton kernels, forward and backward; `tuning` chooses their tiles
in_cuda     a CUDA C++ kernel to be read and observed, forward only
dropout     which weights are dropped, the same in every backend, forward and backward
papers      the loops of both papers in plain torch, with any tile sizes: `version_1`, `version_2`, over `tiles`
in_transformers   `register_attention`: the same under Hugging Face's models
"""

from pagewise.flash_attention.attention import flash_attention, flash_attention_varlen, measure_tiles
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
