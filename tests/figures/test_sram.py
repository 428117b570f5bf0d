"""FlashAttention in one picture: its bytes are those that version 2's loops move."""

import drawn
import torch

from pagewise.figures import sram_box
from pagewise.flash_attention import flash_attention_2_forward
from pagewise.tools.work import count_work


def test_the_title_counts_the_bytes_of_the_loops(shown):
    q = k = v = torch.zeros(1, 1, 256, 32)
    work = count_work(lambda: flash_attention_2_forward(q, k, v, tile_rows=64, tile_cols=32))
    in_16_bits = (work.bytes_moved - 4 * 256) / 2  # without the log-sum-exp of each row
    sram_box(tokens=256, head_size=32, rows=64, cols=32)
    (title,) = drawn.titles(shown[0])
    assert f"{in_16_bits / 1024:.0f} KB cross the border of the SMs" in title
    assert title.startswith("65,536 scores pass through a tile of 2,048")


def test_q_and_o_cross_once_and_k_and_v_once_per_tile_of_queries(shown):
    sram_box(tokens=1024, head_size=64, rows=128, cols=64)
    texts = drawn.texts(shown[0].axes[0])
    assert (texts.count("1 × in all"), texts.count("8 × in all")) == (2, 2)
