"""Published times beside the model: what is counted, what is read, what is predicted, and what is refused."""

import csv
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from cudascope import observe, triton_compiled
from cudascope.gpus import GPUS
from pagewise.experiments import published
from pagewise.experiments.decode_schedules import LAUNCH, START
from pagewise.experiments.published import COLUMNS, KERNELS, Row, fullest_sm, programs, read_row
from pagewise.kernels.flash_attention import flash_forward_kernel
from pagewise.tools.launch import launch

DECODE = published.rows(table="flash_decoding", kernel="FlashAttention-2")


def shaped(kernel="FlashAttention-2", gpu="A100", B=1, H=1, Hkv=None, T=1, S=1, D=128, causal=False, seconds=1.0):
    return Row("", kernel, gpu, B, H, Hkv or H, T, S, D, causal, seconds, *[""] * 5)


# ------------------------------------------------------------------------------------------------ what is printed


@pytest.mark.slow
def test_the_last_line_says_how_many_rows_fit():
    assert published.summary(published.judged()) == (
        "339 rows, 47 constants, 29 sources; within 1.25 ×: 294 of 339 (87%), of 100 µs or more 260 of 281 (93%); "
        "null model 264 of 339 (78%), of 100 µs or more 239 of 281 (85%)"
    )


@pytest.mark.slow
def test_the_module_prints_each_row_the_predictions_and_the_last_line(capsys):
    published.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(published.rows()) + len(published.measured()) + 1 + 3 + 3
    assert lines[-6].startswith("FlashAttention-2: constant of long prompts, decode: 10 of 10 within 1.25 ×, ")
    assert lines[-5].startswith("FlashMLA: constant of an H100, on an H20: 6 of 6 within 1.25 ×, ")
    assert lines[-4].startswith("vLLM: constant of paged_attention_v1, v2: 2 of 3 within 1.25 ×, ")
    assert lines[-3] == (
        "ours: 194 rows, 14 constants, 1 source; within 1.25 ×: 168 of 194 (87%), of 100 µs or more 125 of 128 (98%); "
        "null model 143 of 194 (74%), of 100 µs or more 114 of 128 (89%)"
    )
    assert lines[-2] == (
        "ours, with the constants of others' H100s: 118 rows, 7 constants, 1 source; within 1.25 ×: 107 of 118 (91%), "
        "of 100 µs or more 92 of 92 (100%); null model 96 of 118 (81%), of 100 µs or more 84 of 92 (91%)"
    )


def test_the_constant_is_the_median_of_its_family():
    for family, measured in published.families().items():
        c = published.constant(measured)
        ratios = [row.seconds / row.model(c) for row in measured if row.is_possible]
        assert sum(ratio < 1 - 1e-9 for ratio in ratios) <= len(ratios) / 2, family
        assert sum(ratio > 1 + 1e-9 for ratio in ratios) <= len(ratios) / 2, family
        assert 0.1 < c <= 1.02, family  # an H20 may exceed its data sheet, whose peak belongs to a lower clock
    assert published.constant(DECODE) == pytest.approx(0.685, abs=0.001)


def test_the_misses_alone_have_a_remark_and_only_the_mislabelled_rows_are_impossible():
    for of in (published.rows(), published.measured()):
        assert [each.row for each in published.judged(of) if each.fits == bool(each.row.remark)] == []
    assert all(row.is_possible for table in ("h200", "h200_cold") for row in published.measured(table))
    impossible = {row.table for row in published.rows() if not row.is_possible}
    assert impossible == {"flex_decoding_mislabelled"}


def test_a_time_below_the_bound_of_its_gpu_fits_no_model_and_no_constant():
    rows = published.rows(table="flex_decoding_mislabelled")
    assert [row.bound > row.seconds for row in rows] == [True] * 3
    assert not any(row.fits(row.seconds) for row in rows)
    assert published.constant(
        published.rows(table="flex_decoding_a6000", kernel=rows[0].kernel) + rows
    ) == pytest.approx(published.constant(published.rows(table="flex_decoding_a6000", kernel=rows[0].kernel)))


# ------------------------------------------------------------------------------------------------ what is counted


def test_a_decode_step_multiplies_a_whole_tile_of_rows():
    """127 of 128 rows are zeros. Without them the published decode times would be the time of the bytes."""
    one, tile = (shaped(T=T, S=4096) for T in (1, 128))
    assert programs(one) == programs(tile) == [64]
    assert one.limits["products"] == pytest.approx((64 + START) * 4 * 128 * 64 * 128 / (312e12 / 108))
    assert one.limits["products"] > 100 * one.limits["L2"]
    assert programs(shaped(S=4097)) == [65]


def test_the_programs_run_in_waves():
    full, one_more = (fullest_sm(shaped(B=B, S=1024)) for B in (108, 109))
    assert one_more == 2 * full == 2 * (16 + START)


def test_a_causal_program_visits_the_tiles_that_it_sees():
    for kernel, D, T, S in (("FlashAttention-2", 64, 1000, 1000), ("FlashAttention-3", 64, 300, 700)):
        cut = KERNELS[kernel, D]
        visible = torch.ones(T, S).tril(S - T)
        counted = [
            sum(bool(rows[:, j : j + cut.keys].any()) for j in range(0, S, cut.keys))
            for rows in visible.split(cut.rows)
        ]
        found = programs(shaped(kernel, H=2, T=T, S=S, D=D, causal=True))
        assert sorted(found) == sorted(2 * counted)
        assert found[0] == (counted[0] if cut.order == "launched" else counted[-1])


def test_the_longest_programs_first_end_earlier():
    order = [shaped(kernel, "H100", B=4, H=48, T=2048, S=2048, causal=True) for kernel in ("cuDNN", "TLX for Hopper")]
    launched, longest_first = map(fullest_sm, order)
    assert longest_first < launched


def test_heads_that_share_a_kv_head_share_a_tile():
    packed = shaped("FlashMLA", "H100", B=2, H=64, Hkv=1, T=3, S=128, D=576, causal=True)
    assert programs(packed) == 2 * [2, 2, 2]  # 192 rows of a KV head in three tiles of 64
    assert packed.bytes == 2 * (2 * 64 * 3 * (576 + 512) + 2 * 128 * 576)


@given(
    kernel=st.sampled_from(sorted(name for name in KERNELS if KERNELS[name].rows > 1)),
    gpu=st.sampled_from(sorted(GPUS)),
    B=st.integers(1, 3),
    Hkv=st.integers(1, 4),
    group=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 400), st.integers(1, 400)).map(sorted),
    causal=st.booleans(),
)
def test_the_fullest_sm_has_at_least_its_share_and_at_most_all(kernel, gpu, B, Hkv, group, sizes, causal):
    name, D = kernel
    row = shaped(name, gpu, B, Hkv * group, Hkv, *sizes, D, causal)
    tiles, found, num_sms = programs(row), fullest_sm(row), GPUS[gpu].num_sms
    assert sum(tiles) / num_sms < found <= sum(tiles) + START * len(tiles)
    assert found <= (sum(tiles) + START * len(tiles)) / num_sms + max(tiles) + START
    cut = KERNELS[kernel]
    useful = B * Hkv * group * sizes[0] * (sizes[1] - sizes[0] if causal else sizes[1])
    assert sum(tiles) * cut.rows * cut.keys >= useful


def test_keys_that_l2_holds_do_not_come_from_memory():
    short, long = (shaped("FlashInfer", "L20", B=128, H=64, Hkv=8, S=S) for S in (131, 259))
    assert (short.limit, long.limit) == ("L2", "DRAM")
    assert long.model(1.0) / short.model(1.0) > 3


def test_launches_are_added():
    row = shaped("FlashAttention-2, KV cache", "H100", S=64)
    assert row.launching == 2 * LAUNCH  # cut, and merged
    assert row._replace(B=256).launching == LAUNCH  # enough programs
    assert row.model(0.5) == pytest.approx(2 * max(row.limits.values()) + 2 * LAUNCH)


@pytest.mark.slow
def test_the_work_of_the_model_is_the_work_that_a_launch_counts(monkeypatch):
    """Two heads of 64 queries and keys in tiles of 32 × 16, on the course's own kernel."""
    monkeypatch.setitem(KERNELS, ("ours", 16), published.Kernel(32, 16))
    row = shaped("ours", H=2, T=64, S=64, D=16)
    q, k, v, out = (torch.randn(1, 2, 64, 16).half() for _ in range(4))
    sizes = {"D": 16, "BLOCK_D": 16, "ROWS": 32, "COLS": 16, "CAUSAL": False, "group": 1, "T": 64, "S": 64}
    outputs = out, torch.empty(1, 2, 64)
    with observe(trace_limit=0) as report, triton_compiled("sm_80"):
        launch(
            flash_forward_kernel, (2, 2, 1), q=q, k=k, v=v, out=out, lse=outputs[1], scale=0.25, **sizes, num_warps=1,
            num_stages=2, outputs=outputs,
        )  # fmt: skip
    work = report.launches[0].work
    assert work.tensor_flops == {("f16", "f32"): 4 * 32 * 16 * 16 * sum(programs(row))}
    assert work.dram_read_bytes + work.dram_written_bytes == row.bytes + 2 * 64 * 4  # and lse


# ------------------------------------------------------------------------------------------------ what is read


def test_every_row_and_table_is_read_and_used():
    with open(Path(published.__file__).with_name("published_tables.csv"), encoding="utf-8", newline="") as file:
        tables = list(csv.DictReader(file))
    of_others, ours = published.rows(), [*published.measured(), *published.measured("h200_cold")]
    every = [*of_others, *ours]
    assert [table["table"] for table in tables] == list(dict.fromkeys(row.table for row in every))
    assert all(table["source"] and table["address"].startswith("https://") for table in tables[:-2])
    assert {(row.kernel, row.D) for row in every} == KERNELS.keys()
    assert len({row[:10] for row in every}) == len(every)
    assert {row[1:10] for row in ours[:194]} == {row[1:10] for row in ours[194:]}


def test_a_published_speed_is_a_time_of_the_useful_products():
    (row,) = published.rows(table="pytorch_2391", kernel="Triton tutorial", S=512)
    assert row.published == "328.882 TFLOP/s"
    assert row.seconds == pytest.approx(4 * 32 * 16 * 512 * 512 * 128 / 328.882e12)
    (causal,) = published.rows(table="triton_1917", causal=True, S=1024)
    assert causal.seconds == pytest.approx(2 * 4 * 48 * 1024 * 1024 * 64 / 86.866073e12)
    assert DECODE[0].seconds == pytest.approx(390.5e-6)


def test_what_the_docstring_says_of_our_measurements():
    found = json.loads((ROOT / "lessons/measurements/constants.json").read_text())
    assert (found["l2_bytes"], found["num_sms"]) == (GPUS["H200"].l2_bytes, GPUS["H200"].num_sms)
    mib, said = found["measured"]["cache sizes"]["mib"], " ".join(published.__doc__.split())
    rate = {n: 16 * 2**20 / (mib[f"{n + 16}"]["sum"] - mib[f"{n}"]["sum"]) for n in (16, 40, 48)}
    assert f"L2 was {rate[16] / GPUS['H200'].stated_bandwidth:.1f} times as fast as DRAM" in said
    assert rate[16] > 2 * rate[40]  # sums of more than 40 MiB do not stay in L2
    assert "held 40 of its 60 MiB" in said
    assert f"in a CUDA graph took {1e6 * found['measured']['launches']['graph_empty']:.1f} µs" in said
    (smallest,) = [row for row in published.measured() if row[1] == "pagewise, KV cache" and row.shape == "1 × 1,024"]
    assert f"two kernels, {1e6 * smallest.seconds:.2f} µs" in said
    cold = {row[1:10]: row.seconds for row in published.measured("h200_cold")}
    slower = [
        row.seconds / cold[row[1:10]]
        for row in published.measured()
        if row.kernel == "cuDNN" and 1e-3 <= row.seconds <= 20e-3
    ]
    assert f"took {min(slower):.2f} to {max(slower):.2f} times as long" in said
    clock = found["measured"]["clock"]
    hot = clock["mhz_of_more_than_400_watts"]
    assert f"up to {clock['watts_most']:.0f} W and ran at {min(hot)} to {max(hot)} MHz" in said


LINE = dict(zip(COLUMNS, "t,FlashMLA,H20,1,4,2,1,9,576,0,1.5,ms,".split(","), strict=True))  # noqa: SIM905
BAD = {
    "no field": ({"unit": None}, "must have the fields"),
    "another table": ({"table": "u"}, "table must be one of"),
    "another kernel": ({"kernel": "Flash"}, "must be in KERNELS"),
    "another head size": ({"D": "64"}, "must be in KERNELS"),
    "another GPU": ({"gpu": "H2O"}, "must be in KERNELS"),
    "words": ({"S": "many"}, "sizes must be integers"),
    "yes": ({"causal": "yes"}, "causal 0 or 1"),
    "nan": ({"value": "nan"}, "must be positive"),
    "infinite": ({"value": "inf"}, "must be positive"),
    "negative": ({"value": "-1"}, "must be positive"),
    "no sequence": ({"B": "0"}, "must be positive"),
    "heads": ({"H": "3"}, "H a multiple of Hkv"),
    "queries": ({"T": "10"}, "T at most S"),
    "seconds": ({"unit": "s"}, "unit must be"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_bad_line_is_refused(change, message):
    tables = {"t": {"source": "", "address": "", "assumed": ""}}
    assert read_row(LINE, tables).seconds == 1.5e-3
    with pytest.raises(ValueError, match=message):
        read_row(LINE | change, tables)


def test_rows_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="a row has no field 'card'"):
        published.rows(card="A100")
    with pytest.raises(ValueError, match=r"no row has {'gpu': 'A10'}.*'A100 40 GB'"):
        published.rows(gpu="A10")
    with pytest.raises(ValueError, match="table must be h200 or h200_cold, got 'h100'"):
        published.measured("h100")
    with pytest.raises(ValueError, match="at least one row"):
        published.constant([])
