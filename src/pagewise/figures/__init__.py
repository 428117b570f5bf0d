"""Every figure of the course, drawn from live objects and traces: `from pagewise import figures`.

There is a module per subject:

    palette      the colours and the style of all
    drawing      a figure with its title and alternative text, boxes, arrows, a key of colours
    charts       heat maps, lines, bars, the roofline
    bands        where values lie: histograms, and the band in which a fixed maximum is safe
    attention    matrices that are multiplied, heads that share
    dataflow     what travels where: a decoder, a layer's operators, three kernels and one
    merges       online softmax: (m, l, acc) as keys stream in, trees of merges
    blocks       block tables and the pool, chains of prefixes, a memory under different allocators
    threads      a CUDA kernel at work, from its trace
    stages       a CUDA kernel's levels and stages: what moves between memories, what is kept
    tiles        FlashAttention's tiles of the scores: visited or skipped, split between warps; whose the gradients are
    steps        a stepper, one picture per step; its pictures are in moving_batches, _blocks, _merges, _schemes,
                 _tiles and _warps
    schedules    over time: a GPU's slots, a grid's waves, a profiled step's spans, a ring of buffers
    calculators  the size of a cache and the roofline, to drag
"""

from pagewise.figures.attention import equations, head_maps
from pagewise.figures.bands import histogram, score_bands, score_histogram
from pagewise.figures.blocks import chains, memory_map, owner_colours, query_over_blocks, snapshot, tables_and_pool
from pagewise.figures.calculators import cache_calculator, roofline_calculator
from pagewise.figures.charts import bars, heatmaps, lines, roofline, stacks, tile_width
from pagewise.figures.dataflow import cache_timeline, decoder_flow, one_kernel, operator_map, three_kernels
from pagewise.figures.drawing import show
from pagewise.figures.merges import merge_trees, streaming, tiles_held
from pagewise.figures.moving_batches import Moment, batch_steps, blocks_over_time
from pagewise.figures.moving_blocks import block_steps
from pagewise.figures.moving_merges import softmax_steps
from pagewise.figures.moving_schemes import scheme_steps
from pagewise.figures.moving_tiles import loop_steps, tile_moves, visits
from pagewise.figures.moving_warps import warp_steps
from pagewise.figures.schedules import last_waves, ring, slots_over_time, sm_steps, step_timelines
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
from pagewise.figures.tiles import gradient_owners, visited_tiles, warp_shares
