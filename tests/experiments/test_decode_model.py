"""The three terms of a decode step: FlashAttention-2's published decode follows from its speed on long prompts."""

import pytest

from pagewise.experiments import published
from pagewise.experiments.decode_model import SHARE, decode_times, speed
from pagewise.experiments.decode_schedules import SATURATING
from pagewise.tools.roofline import A100, H200

MEASURED = {  # µs: FlashAttention-2 2.0.9 in the announcement of Flash-Decoding, sequences of keys
    (256, 256): 390.5, (128, 512): 366.3, (64, 1024): 364.8, (32, 2048): 352.0, (16, 4096): 401.7,
    (8, 8192): 529.2, (4, 16384): 582.7, (2, 32768): 1156.1, (1, 65536): 2300.6, (1, 131072): 4592.2,
}  # fmt: skip


@pytest.mark.parametrize(("B", "S"), MEASURED)
def test_padding_explains_the_announced_times(B, S):
    products = 1e6 * decode_times(B, 16, 2, S, A100, rows=128, packed=False).products
    assert 0.95 < MEASURED[B, S] / products < 1.25  # a start per program, which counts at 256 keys, is left out


def test_its_share_of_the_peak_is_the_constant_of_the_published_prompts():
    prompts = published.rows(table="fa_307", kernel="FlashAttention-2", D=128)
    assert round(published.constant(prompts), 3) == SHARE


def test_neither_packing_nor_cutting_alone_is_enough():
    shape = 1, 16, 2, 65536, A100
    cut = decode_times(*shape, splits=64, rows=128, packed=False)
    packed = decode_times(*shape)
    both = decode_times(*shape, splits=64)
    assert both.total < 50e-6
    assert cut.total > 5 * both.total < packed.total


def test_the_memory_is_busy_from_saturating_programs_on():
    assert speed(SATURATING, H200) == H200.bandwidth > speed(SATURATING - 1, H200)


def test_the_last_wave_takes_as_long_as_a_full_one():
    one, two = (decode_times(B, 16, 2, 1024, A100, rows=128, packed=False).products for B in (6, 7))
    assert two == 2 * one
