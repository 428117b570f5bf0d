"""FlashAttention: exact attention whose scores never leave the chip, forward and backward (lesson 6).

dropout     which weights are dropped, the same in every backend, forward and backward
"""

from pagewise.flash_attention.dropout import dropout_mask
