"""The benchmark of attention over processes: every method is right and timed, and wrong results are not."""

import pytest
import torch

from pagewise.distributed import Processes
from pagewise.experiments import context_parallel_speed
from pagewise.experiments.context_parallel_speed import SMALLEST, Shape, draw, records, shapes_for


@pytest.fixture(scope="module")
def two():
    with Processes(2, timeout=60.0) as processes:
        yield processes


OPTIONS = {"device": torch.device("cpu"), "dtype": torch.float32, "repeats": 2, "warmup": 0}


def records_of_smallest():
    return [list(records(shape._replace(num_processes=2), None, **OPTIONS)) for shape in SMALLEST]


@pytest.mark.slow
def test_every_method_is_right_and_timed(two):
    found = two.run(records_of_smallest)
    for attention, decode in found:
        assert [r.what for r in attention] == ["ring, zigzag", "ring, contiguous", "all-to-all"]
        assert [r.what for r in decode] == ["decode"]
        assert all(r.seconds > 0 and r.refused is None for r in attention + decode)
    # both processes report the times of the slower process
    assert [[r.seconds for r in each] for each in found[0]] == [[r.seconds for r in each] for each in found[1]]
    assert [r.how.split(", ")[-1] for r in found[0][0]] == [
        f"each process sends at most {n} bytes" for n in [16384] * 3
    ]


@pytest.mark.slow
def test_a_method_that_is_wrong_in_one_process_is_timed_in_none(two):
    def planted():
        right = context_parallel_speed.ring_attention
        rank = torch.distributed.get_rank()
        context_parallel_speed.ring_attention = lambda *tensors, **options: right(*tensors, **options) * (1 + rank)
        try:
            return records_of_smallest()[0]
        finally:
            context_parallel_speed.ring_attention = right

    for zigzag, contiguous, all_to_all in two.run(planted):
        assert zigzag.refused.startswith("wrong: relative error")
        assert contiguous.refused.startswith("wrong: relative error")
        assert all_to_all.refused is None


@pytest.mark.slow
def test_the_command_prints_a_table_for_each_number_of_processes(two, capsys):
    def run():
        import sys

        sys.argv = ["context_parallel_speed"]
        context_parallel_speed.command()

    two.run(run)
    out = capsys.readouterr().out
    assert "these times say nothing about GPUs" in out
    assert out.count("process 0: ring, zigzag ") == out.count("process 0: decode ") == 2
    assert "process 1" not in out


@pytest.mark.slow
def test_torchs_ring_is_a_rival_with_the_same_results(two):
    found, _ = two.run(context_parallel_speed.against_torch, 2)
    assert list(found) == ["forward", "forward and backward"]
    assert all(0 < spread.median < 100 for spread in found.values())


def test_shapes_are_timed_on_powers_of_two_of_processes():
    assert [shape.num_processes for shape in shapes_for(6, on_gpu=True)[:3]] == [1, 2, 4]
    assert {shape.num_processes for shape in shapes_for(1, on_gpu=False)} == {1}
    assert Shape(4, 3, 0, 2, 1, 8).flops == 4 * 2 * 6 * 8
    assert Shape(4, 3, 1, 2, 1, 8).bytes(2) == 2 * 3 * 8 * 2


def test_the_time_over_the_processes_can_be_drawn(shown, two):
    (found, _), _ = two.run(records_of_smallest)
    more = [r._replace(shape=r.shape | {"num_processes": 4}, seconds=1.0) for r in found]
    draw(found + more, seq_len=64)
    (ax,) = shown[0].axes
    assert list(ax.lines[0].get_xdata()) == [2, 4]
    assert ax.lines[0].get_ydata()[1] == 1e3
    with pytest.raises(ValueError, match="has seq_len=65 decode=0; there are seq_len=64 decode="):
        draw(found, seq_len=65)
