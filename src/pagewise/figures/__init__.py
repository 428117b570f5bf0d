"""Every figure of the course, drawn from live objects and traces: `from pagewise import figures`.

One face, and a module per subject:

    palette      the colours and the style of all
    drawing      a figure with its title and alternative text, boxes, arrows, a key of colours
    charts       heat maps, lines, bars
    roofs        the roofline, and where kernels stand under it
    attention    matrices that are multiplied, heads that share, what three kernels move
    dataflow     what travels where: boxes, arrows, spans
    merges       online softmax: (m, l, acc) as keys stream in, trees of merges
    blocks       block tables and the pool, chains of prefixes
    waste        where a memory goes under different allocators
    threads      a CUDA kernel at work, from its trace
    stages       a CUDA kernel's levels and stages: what moves between memories, what is kept
    tiles        FlashAttention's tiles of the scores: visited or skipped, split between warps; whose the gradients are
    bands        where scores lie, and the band in which a fixed maximum is safe
    gemm         flat matrix products: the width of a tile, the ring of buffers
    steps        a stepper, one picture per step; the pictures are in moving_blocks, _merges, _tiles, _warps, _sms,
                 _schemes and _batches (whose blocks they hold, too)
    schedules    a decode step's pieces on a GPU's slots over time, and how full a grid's last wave is
    timelines    a step's spans, from a profile
    calculators  the size of a cache and the roofline, to drag
"""

from pagewise.figures.attention import equations, head_maps, one_kernel, three_kernels
from pagewise.figures.bands import score_bands, score_histogram
from pagewise.figures.blocks import chains, owner_colours, query_over_blocks, snapshot, tables_and_pool
from pagewise.figures.calculators import cache_calculator, roofline_calculator
from pagewise.figures.charts import bars, heatmaps, lines
from pagewise.figures.dataflow import cache_timeline, decoder_flow, operator_map
from pagewise.figures.drawing import show
from pagewise.figures.gemm import ring, tile_width
from pagewise.figures.merges import histogram, merge_trees, streaming, tiles_held
from pagewise.figures.moving_batches import Moment, batch_steps, blocks_over_time
from pagewise.figures.moving_blocks import block_steps
from pagewise.figures.moving_merges import softmax_steps
from pagewise.figures.moving_schemes import scheme_steps
from pagewise.figures.moving_sms import sm_steps
from pagewise.figures.moving_tiles import loop_steps, tile_moves, visits
from pagewise.figures.moving_warps import warp_steps
from pagewise.figures.roofs import roofline
from pagewise.figures.schedules import last_waves, slots_over_time
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
from pagewise.figures.timelines import step_timelines
from pagewise.figures.waste import memory_map, stacks
