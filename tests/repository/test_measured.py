"""The page of times beside other projects: it is current, and its text says of the records what they say."""

import math

import pytest

from claims import broken_links
from conftest import ROOT
from measured import OURS, PLAN, Times, decode, decode_shape, flat, mixed, page, whole, wrapped
from pagewise.tools.records import keep

LESSONS = ROOT / "lessons"


@pytest.fixture(scope="module")
def times():
    return Times(LESSONS)


def test_the_page_is_what_the_records_give():
    assert (LESSONS / "measured.md").read_text(encoding="utf-8") == page(LESSONS)
    assert broken_links(LESSONS / "measured.md") == []


def test_all_records_are_of_one_run(times):
    runs = {(r.device, r.driver, r.commit, r.date[:10], tuple(r.versions.items())) for r in times.records}
    assert len(runs) == 1
    assert all(r.limit_rate for r in times.records)
    assert len(times.by_key) == len(times.records)  # no two records are of one method, mode, shape and dtype


def test_a_ratio_is_of_two_medians_and_a_range_is_over_all_shapes(times):
    ours, theirs = (times.one(name, "gpu", decode_shape(8, 8192), "bfloat16") for name in (OURS, "FlashInfer"))
    assert times.ratio(theirs) == theirs.seconds / ours.seconds
    assert times.ratio(ours) == 1
    ratios = times.ratios("FlashInfer", decode)
    assert len(ratios) == 18
    assert ratios == sorted(ratios)
    assert times.ratio(theirs) in ratios
    assert times.span("FlashInfer", decode) == f"{ratios[0]:.2f} to {ratios[-1]:.2f}"


def test_what_the_text_claims_without_a_number(times):
    """The words that no figure on the page would correct."""
    assert all(r > 1 for name in ("vLLM unified", "sglang decode") for r in times.ratios(name, decode))
    assert all(r > 1 for r in times.ratios("vLLM unified", mixed))
    assert all(r < 1 for r in times.ratios("SDPA cudnn", whole(0)) + times.ratios("SDPA cudnn", whole(1)))
    assert all(r < 1 for r in times.ratios("tutorial 06", whole(0)))
    assert all(r < 1 for r in times.ratios("tutorial 06", whole(1, 64)))
    assert all(r > 1 for r in times.ratios("tutorial 06", whole(1, 128)))
    for counts, wins in ((1, 2), True), ((16, 32, 64), False):
        ratios = times.ratios("cuBLAS (torch linear)", lambda shape, counts=counts: shape.get("M") in counts)
        assert [r > 1 for r in ratios] == [wins] * 4 * len(counts)
    for rival in ("FlashInfer", "vLLM unified", "sglang decode"):
        assert times.host(rival) < min(times.host(OURS), times.host(PLAN))


def test_every_timed_record_has_ours_beside_it(times):
    for r in times.records:
        if r.seconds is not None:
            assert math.isfinite(times.ratio(r)), r.what


def test_families_do_not_overlap(times):
    kinds = decode, mixed, flat, whole(0), whole(1), lambda shape: shape.get("paged") == 0
    assert all(sum(kind(r.shape) for kind in kinds) == 1 for r in times.records)


def test_lines_are_wrapped_but_not_tables(tmp_path):
    text = "# A heading\n\nWords\nof a paragraph.\n\n- an item\nof two lines\n- another\n\n| a | b |\n| c | d |"
    assert wrapped(text) == (
        "# A heading\n\nWords of a paragraph.\n\n- an item of two lines\n- another\n\n| a | b |\n| c | d |"
    )
    assert max(map(len, wrapped("word " * 100).splitlines())) <= 120
    assert "\n  word" in wrapped("- " + "word " * 100)


def test_a_record_that_was_changed_by_hand_is_refused(tmp_path, times):
    (tmp_path / "measurements").mkdir()
    file = tmp_path / "measurements" / "peers.json"
    keep(file, times.records[0])
    assert Times(tmp_path).records == times.records[:1]
    file.write_text(file.read_text().replace('"seconds": ', '"seconds": 1'))
    with pytest.raises(ValueError, match="changed by hand"):
        Times(tmp_path)
