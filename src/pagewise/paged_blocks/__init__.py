"""Paged blocks: the KV cache in blocks, and who owns which (lesson 4).

manager        BlockManager: block tables, sharing, copy-on-write
pool           which blocks are free, and which is taken next
prefix_cache   full blocks found again by what they hold
cache          PagedKVCache: the tensors that block tables point into, in two layouts
write          new keys and values into their slots, float8 included
"""

from pagewise.paged_blocks.cache import PagedKVCache, from_vllm_layout, to_vllm_layout
from pagewise.paged_blocks.manager import BlockManager, BlockStats
from pagewise.paged_blocks.pool import OutOfBlocks
