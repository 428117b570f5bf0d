"""Every figure of the course, drawn from live objects and traces: `from pagewise import figures`.

The imports below list which module draws which figure. All of them use the colours and the style of `palette` and the
figures, boxes, arrows and legends of `drawing`. The `moving_` modules draw the pictures of a stepper (`steps`).
"""

from pagewise.figures.attention import busy_units, equations, free_changes, head_maps
from pagewise.figures.bands import histogram, score_bands, score_histogram
from pagewise.figures.block_memory import found_over_pools, memory_pictures, paging_calculator
from pagewise.figures.blocks import chains, memory_map, owner_colours, query_over_blocks, snapshot, tables_and_pool
from pagewise.figures.caching import next_token_times, users_until_full
from pagewise.figures.calculators import (
    cache_calculator,
    exponent_calculator,
    link_calculator,
    roofline_calculator,
    saving_calculator,
)
from pagewise.figures.charts import bars, heatmaps, lines, roofline, stacks
from pagewise.figures.clients import tokens_by_step, waiting_clients
from pagewise.figures.dataflow import (
    cache_timeline,
    decoder_flow,
    decoder_shapes,
    three_kernels,
)
from pagewise.figures.decode_calculator import decode_calculator
from pagewise.figures.drawing import show
from pagewise.figures.exchanges import all_to_all, memory_on_each, prompt_and_token
from pagewise.figures.flat_step import flat_step
from pagewise.figures.latencies import latencies
from pagewise.figures.merges import merge_trees, precision_errors, tiles_held
from pagewise.figures.moving_batches import Moment, batch_steps, blocks_over_time
from pagewise.figures.moving_blocks import block_steps
from pagewise.figures.moving_rings import balance_steps, ring_steps
from pagewise.figures.moving_softmax import scheme_steps, softmax_steps
from pagewise.figures.moving_tiles import loop_steps, tile_moves, visits
from pagewise.figures.published import published
from pagewise.figures.schedules import memory_in_use, programs_over_time, ring, sm_steps, step_timelines
from pagewise.figures.sram import sram_box
from pagewise.figures.stages import nested_levels
from pagewise.figures.steps import stepper
from pagewise.figures.table import table
from pagewise.figures.threads import (
    accesses_of_vec,
    butterfly,
    lanes_in_block,
    sectors_of_request,
    three_reads_of_keys,
)
from pagewise.figures.tiles import gradient_owners, visited_tiles
