"""Every figure of the course, drawn from live objects and traces: `from pagewise import figures`.

charts     heat maps, lines, bars; the palette and the style of all
roofs      the roofline, and where kernels stand under it
blocks     block tables, the pool over time, chains of prefixes, waste
threads    a CUDA kernel at work, from its trace
stages     a CUDA kernel's levels and stages: what moves between memories, what is kept
merges     online softmax: (m, l, acc) as keys stream in, trees of merges
dataflow   what travels where: boxes, arrows, spans
attention  matrices that are multiplied, heads that share, what three kernels move
steps      a stepper, one picture per step: moving_blocks, moving_merges, moving_warps and moving_sms have the pictures
calculators  the size of a cache and the roofline, to drag
"""

from pagewise.figures.attention import equations, head_maps, three_kernels
from pagewise.figures.blocks import (
    chains,
    memory_map,
    owner_colours,
    pool_over_time,
    query_over_blocks,
    snapshot,
    stacks,
    tables_and_pool,
)
from pagewise.figures.calculators import cache_calculator, roofline_calculator
from pagewise.figures.charts import bars, heatmaps, lines, show
from pagewise.figures.dataflow import cache_timeline, decoder_flow
from pagewise.figures.merges import histogram, merge_trees, streaming, tiles_held
from pagewise.figures.moving_blocks import block_steps
from pagewise.figures.moving_merges import softmax_steps
from pagewise.figures.moving_sms import sm_steps
from pagewise.figures.moving_warps import warp_steps
from pagewise.figures.roofs import roofline
from pagewise.figures.stages import kept_between_reads, memory_flow, nested_levels
from pagewise.figures.steps import stepper
from pagewise.figures.threads import (
    address_strips,
    banks_of_request,
    butterfly,
    handovers,
    rows_of_block,
    sectors_of_request,
    vecs_of_block,
)

__all__ = [
    "address_strips",
    "banks_of_request",
    "bars",
    "block_steps",
    "butterfly",
    "cache_calculator",
    "cache_timeline",
    "chains",
    "decoder_flow",
    "handovers",
    "heatmaps",
    "histogram",
    "kept_between_reads",
    "lines",
    "memory_flow",
    "memory_map",
    "merge_trees",
    "nested_levels",
    "owner_colours",
    "pool_over_time",
    "query_over_blocks",
    "roofline",
    "roofline_calculator",
    "rows_of_block",
    "sectors_of_request",
    "show",
    "sm_steps",
    "snapshot",
    "softmax_steps",
    "stacks",
    "stepper",
    "streaming",
    "tables_and_pool",
    "vecs_of_block",
    "warp_steps",
]
