"""The table of counted instructions: what a loop costs for each score, and the rows of small launches."""

import sys

import pytest

from cudascope.toolchain.sass import SassLoop
from pagewise.experiments import instruction_counts
from pagewise.experiments.instruction_counts import CASES, Case, counted, hot_loops, per_unit, products, row
from pagewise.paged_attention import paged_attention_v2


def loop(total: int, **opcodes: int) -> SassLoop:
    names = {name.replace("_", "."): number for name, number in opcodes.items()}
    return SassLoop(total, {"product": sum(names.values())}, names, is_innermost=True)


@pytest.mark.parametrize(
    ("opcodes", "flops"),
    [
        ({"HMMA_16816_F32": 128}, 128 * 2 * 16 * 8 * 16),
        ({"HMMA_1688_F32_TF32": 2}, 2 * 2 * 16 * 8 * 8),
        ({"HGMMA_64x64x16_F32": 8, "HGMMA_64x128x16_F32": 4}, (8 * 64 + 4 * 128) * 2 * 64 * 16 // 4),
        ({"FFMA": 3}, 0),
    ],
)
def test_products_of_a_loop(opcodes, flops):
    assert products(loop(0, **opcodes)) == flops


def test_what_a_loop_costs_for_each_score():
    # flash forward D128 on sm_80: a tile of 128 × 64 scores by 8 warps
    case = Case(lambda: None, "score", [4 * 128])
    assert per_unit(case, [loop(576, HMMA_16816_F32=128)]) == [576 * 8 / (128 * 64)]
    two = Case(lambda: None, "score", [8 * 128, 6 * 128])  # 64 × 64 scores by 8 warps, four products and three
    loops = [loop(496, HMMA_16816_F32=128), loop(419, HMMA_16816_F32=96)]
    assert per_unit(two, loops) == [496 * 8 / (64 * 64), 419 * 8 / (64 * 64)]
    assert per_unit(two, loops[:1]) == []  # which of the two it is cannot be said
    assert per_unit(case, [loop(10, FFMA=3)]) == []


@pytest.mark.slow
def test_a_row_has_the_counts_of_its_launch(monkeypatch):
    monkeypatch.setitem(CASES, "small", instruction_counts._in_cuda(paged_attention_v2, 1, 32))
    main, _ = launches = counted(CASES["small"], "sm_80")
    assert [launch.kernel.partition("<")[0] for launch in launches] == [
        "paged_attention_v2_kernel",
        "paged_attention_merge_kernel",
    ]
    found = row("small", "sm_80", main)
    assert found[:5] == ("small", "sm_80", "paged_attention_v2", "8 × 4", f"{main.instructions.total:,}")
    assert found[-2].split(" / ") == [str(loop.total) for loop in hot_loops(main)]


def test_an_unknown_case_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["instruction_counts", "--only", "backwards"])
    with pytest.raises(SystemExit):
        instruction_counts.main()
    assert "--only must be a part of one of flash forward D128, " in capsys.readouterr().err
