"""Published times beside lower bounds: the scaled counts are those of a whole grid, and no time is below its bound."""

import pytest

from pagewise.experiments.limits_against_published import (
    PUBLISHED,
    TILES,
    FlashWork,
    attention,
    compared,
    decode,
    decode_work,
    forward_work,
)
from pagewise.flash_attention.tuning import Tiles

SMALL = Tiles(16, 16, 1, 2)


@pytest.mark.slow
def test_the_scaled_work_of_a_program_is_the_work_of_a_grid():
    scaled, direct = FlashWork(16, SMALL, "sm_80").of(2, 64), forward_work(2, (64, 64), 16, SMALL, "sm_80")
    assert scaled.l2_bytes <= direct.l2_bytes
    assert scaled._replace(l2_bytes=0) == direct._replace(l2_bytes=0)
    assert scaled.tensor_flops == {("f16", "f32"): 4 * 2 * 64 * 64 * 16}
    assert scaled.dram_read_bytes == 3 * 2 * 64 * 16 * 2


def test_the_work_of_a_batch_is_that_of_its_sequences():
    one, three = (decode_work(decode("paged_attention_v2", "A100", batch, 32, 1.0, "")) for batch in (1, 3))
    tables_and_lengths = 2 * 32  # a sector each
    assert one.dram_read_bytes == 32 * 8 * 128 * 2 * 2 + 64 * 128 * 2 + tables_and_lengths
    assert three.dram_read_bytes == 3 * one.dram_read_bytes
    assert three.thread_blocks == 3 * 64


@pytest.mark.slow
def test_the_bound_is_the_larger_of_tensor_cores_and_dram():
    fast, slow = (attention("FlashAttention-2", "A100", (8, 64, 64, 16), tflops, "") for tflops in (500, 1))
    first, second = compared([fast, slow], SMALL)
    assert first.bound == second.bound == pytest.approx(512 * 3 * 64 * 16 * 2 / 2.039e12)
    assert first.ratio < 1 < second.ratio
    assert first.ours >= first.bound


def test_published_times_are_above_the_time_of_their_products():
    """Without a launch: the products alone, at the rates of the table. `compared` adds the other units."""
    from cudascope.gpus import GPUS

    rows = [row for row in PUBLISHED if not row.decodes]
    for row in rows:
        gpu = GPUS[row.gpu]
        assert row.seconds > row.flops / (gpu.tensor_rate("f16", "f32") * gpu.num_sms * gpu.clock), row
        assert row.tokens % TILES.owned == 0
    assert {row.gpu for row in rows} == {"A100", "H100", "H200", "B200"}
