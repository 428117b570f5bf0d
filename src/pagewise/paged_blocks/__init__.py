"""Paged blocks: the KV cache in blocks, and which sequence owns which blocks (lesson 4).

manager        BlockManager: the sequences, by their ids
pool           BlockPool: block tables, sharing, copy-on-write, free blocks
prefix_cache   finds full blocks by their content
cache          PagedKVCache: the tensors that block tables point into, in two layouts
write          writes new keys and values into their slots, float8 included
"""

from pagewise.paged_blocks.cache import PagedKVCache, from_vllm_layout, to_vllm_layout
from pagewise.paged_blocks.manager import BlockManager
from pagewise.paged_blocks.pool import BlockPool, BlockStats, OutOfBlocks, PagedSequence
