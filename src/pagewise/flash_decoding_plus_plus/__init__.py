"""FlashDecoding++: three ideas for decoding, built with the safety that makes them exact (lesson 8).

unified_max    softmax without a running maximum, and what recomputes the rows it does not suit; its cousin lazy_rescale
flat_gemm      matrix products with few rows, padded to 8 and not to 64
dataflow       which product for which number of rows, found by profiling

Hong et al. 2023.
"""

from pagewise.flash_decoding_plus_plus.dataflow import Dataflow, inflection_points, product_times
from pagewise.flash_decoding_plus_plus.flat_gemm import flat_gemm, gemv
from pagewise.flash_decoding_plus_plus.lazy_rescale import lazy_rescale_attention
from pagewise.flash_decoding_plus_plus.unified_max import UnifiedMax, calibrate, unified_max_attention
