"""The rules of every benchmark of kernels: it compares before it times, each failure is a row, and records last.

The file of a benchmark tests its shapes, exact results and figures.
"""

import contextlib
import gc
import time
import weakref
from functools import partial

import pytest
import torch
from in_process import CPU, forked_workers, planted, records, run_on_a_cpu

from conftest import DEVICES
from pagewise.experiments import (
    context_parallel_speed,
    decode_inputs,
    engine_speed,
    flash_attention_speed,
    flash_decoding_speed,
    flat_gemm_speed,
    paged_attention_speed,
    speed,
)
from pagewise.experiments.decode_inputs import paged
from pagewise.tools.benchmark import Timing
from pagewise.tools.records import keep, recorded
from pagewise.tools.timing import Spread
from pagewise.tools.worker import Failed

FORWARD, BACKWARD = (flash_attention_speed.Shape(64, 32, 1, backward, 1, 2) for backward in (0, 1))
DENSE, PAGED = (decode_inputs.Shape(2, 5, 40, 0, paged, 4, 2, 32) for paged in (0, 1))
SPLIT = {"Flash-Decoding", "not split", "the heuristic's splits", "splits of 512 keys", "SDPA math"}
PER_PAGE = {"gather + SDPA", "CUDA v1", "CUDA v2", "CUDA grouped", "Triton"}
PRODUCTS = {"gemv", "flat_gemm", "matmul", "flat_gemm, 2 stages", "flat_gemm, 8 stages"}
# A shape, and the methods that run everywhere. A peer may say why it does not run.
MEASURED = {
    "paged_attention": (paged_attention_speed.Trials, paged(2, 64, 4, 2, head_size=32), PER_PAGE),
    "paged_attention, wide heads": (paged_attention_speed.Trials, paged(1, 48, 2, 2, head_size=64), PER_PAGE),
    "flash_attention": (flash_attention_speed.Trials, FORWARD, {"Triton", "CUDA", "SDPA math"}),
    "flash_attention, not causal": (
        flash_attention_speed.Trials, FORWARD._replace(causal=0), {"Triton", "CUDA", "SDPA math"}
    ),
    "flash_attention_backward": (flash_attention_speed.Trials, BACKWARD, {"Triton", "SDPA math"}),
    "flash_attention_backward, not causal": (
        flash_attention_speed.Trials, BACKWARD._replace(causal=0), {"Triton", "SDPA math"}
    ),
    "flash_decoding": (flash_decoding_speed.Trials, PAGED, SPLIT - {"SDPA math"}),
    "flash_decoding, dense": (flash_decoding_speed.Trials, DENSE, SPLIT),
    "flash_decoding, one length": (flash_decoding_speed.Trials, DENSE.equal, SPLIT | {"unified max", "lazy rescale"}),
    "flat_gemm": (flat_gemm_speed.Trials, flat_gemm_speed.Shape(9, 32, 64), PRODUCTS),
}  # fmt: skip
SHAPES = [pytest.param(*case[:2], id=name) for name, case in MEASURED.items() if "," not in name]
EVERY = [case for case in SHAPES if case.id != "flash_attention_backward"]

# ------------------------------------------------------------------------------------------------ measured


@pytest.mark.slow
@pytest.mark.parametrize(("trials", "shape", "ours"), MEASURED.values(), ids=MEASURED)
def test_every_method_is_right_and_timed_or_says_why_not(trials, shape, ours, kernel_device, monkeypatch):
    monkeypatch.setattr(decode_inputs, "ROTATED_BYTES", 0)  # one input is enough here
    measure = trials(kernel_device, {"repeats": 1, "warmup": 0})
    found = {method: measure(shape, method) for method in measure.methods(kernel_device, shape)}
    assert [method for method in ours if not isinstance(found[method], Timing)] == []
    assert [result for result in found.values() if isinstance(result, str) and "wrong" in result] == []


@pytest.mark.slow
@pytest.mark.parametrize(("trials", "shape"), SHAPES)
def test_a_wrong_method_and_one_that_cannot_be_prepared_are_rows_without_a_time(trials, shape, tmp_path):
    first, second, *_, again = trials.methods(CPU, shape)

    class Broken(trials):
        @classmethod
        def methods(cls, device, shape):
            found = super().methods(device, shape)
            return {name: found[name] for name in (first, second, again)}

        def runs(self, method):
            if method == second:
                raise ImportError("half installed\nand more")
            runs = super().runs(method)
            return [partial(scaled, run) for run in runs] if method == first else runs

    def scaled(run):
        out = run()
        return 1.03 * out if isinstance(out, torch.Tensor) else [1.03 * gradient for gradient in out]

    found = records(Broken, [shape], device=torch.device(DEVICES[-1]), rate=1e12, repeats=2, warmup=0)
    wrong, unprepared, right = found
    assert wrong.refused.startswith("wrong: relative error 0.03")
    assert unprepared.refused == "ImportError: half installed"
    assert right.refused is None
    work = right.bytes if right.limit == "copy" else right.flops
    assert right.fraction == pytest.approx(work / right.seconds / 1e12)
    assert [wrong.seconds, unprepared.seconds] == [None, None]
    for record in found:
        keep(tmp_path / "x.json", record)
    assert recorded(tmp_path / "x.json") == found


@pytest.mark.slow
def test_a_shape_is_built_once_and_freed_before_the_next_is_built():
    built, alive = [], []

    class Noted(flat_gemm_speed.Trials):
        def build(self, shape):
            gc.collect()
            alive.append(sum(tensor() is not None for tensor in built))
            inputs, exact = super().build(shape)
            built.extend(map(weakref.ref, (*inputs[0], *exact)))
            return inputs, exact

    trials = Noted(CPU, {"repeats": 1, "warmup": 0})
    shape, other = (flat_gemm_speed.Shape(9, 32, K) for K in (64, 128))
    for each, method in [(shape, "matmul"), (shape, "matmul"), (shape, "gemv"), (other, "matmul")]:
        trials(each, method)
    assert alive == [0, 0]


# ------------------------------------------------------------------------------------------------ planted


@pytest.mark.parametrize(("trials", "shape"), SHAPES)
def test_records_come_shape_by_shape_with_every_method_and_count_the_work(trials, shape):
    shapes = [shape, trials.smallest[0]]
    found = records(planted(trials, lambda shape, method: 2.0), shapes)
    assert [(r.shape, r.what) for r in found] == [(s._asdict(), m) for s in shapes for m in trials.methods(CPU, s)]
    for r in found:
        size = type(shape)(**r.shape)
        assert (r.flops, r.bytes, r.dtype) == (size.flops, size.bytes(2), str(trials.dtype)[6:])
        assert (r.seconds, r.spread, r.fraction, r.how) == (2.0, 1.0, None, "planted")


def test_a_worker_that_failed_is_a_row_and_the_run_goes_on():
    def seconds(shape, method):
        if method == "CUDA v2":
            raise Failed("no answer within 7 s")
        return 2.0

    shape = paged_attention_speed.SMALLEST[0]
    found = {r.what: r for r in records(planted(paged_attention_speed.Trials, seconds), [shape])}
    assert (found["CUDA v2"].refused, found["CUDA v2"].seconds) == ("no answer within 7 s", None)
    assert (found["Triton"].refused, found["Triton"].seconds) == (None, 2.0)


class Planted(speed.Trials):
    """One method hangs, one ends its process, the others take a second."""

    title = "planted"

    @classmethod
    def methods(cls, device, shape):
        return dict.fromkeys(["hangs", "ends", "is fast", "is fast, too"])

    def __call__(self, shape, method):
        if method == "hangs":
            time.sleep(600)
        if method == "ends":
            raise SystemExit(3)
        return Timing(Spread(1.0, 1.0, 1.0), "planted")


@pytest.mark.slow
def test_a_method_that_hangs_or_crashes_in_its_process_is_a_row():
    rows = speed.records(Planted, paged_attention_speed.SMALLEST[:1], device=CPU, limit=2.0)
    with forked_workers(), contextlib.closing(rows):
        found = [(r.refused, r.seconds) for r in rows]
    refusals = [("no answer within 2 s", None), ("its process ended: exit status 3", None)]
    assert found == [*refusals, (None, 1.0), (None, 1.0)]


@pytest.mark.slow
def test_a_copy_that_fails_costs_the_fractions_and_nothing_else(capsys):
    nowhere = torch.device("cuda", 99)  # its process finds no such GPU
    assert speed.limit_rate("copy", nowhere, limit=60.0) is None
    assert "The rate of a copy is unknown, so no fractions of it are shown: " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ command lines


@pytest.mark.parametrize(("trials", "_"), EVERY)
@pytest.mark.parametrize("first", [1, None])
def test_the_command_prints_a_table_for_each_of_the_smallest_shapes(trials, _, first, capsys):
    few = ["--first", str(first)] if first else []
    run_on_a_cpu(partial(speed.command, planted(trials, lambda shape, method: 1.0)), *few)
    out = capsys.readouterr().out
    assert "these times say nothing about a GPU" in out
    methods = [method for shape in trials.smallest[:first] for method in trials.methods(CPU, shape)]
    assert all(out.count(f"\n{method}  ") == methods.count(method) for method in methods)


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        *((partial(speed.command, case.values[0]), ["--record", "x.json"], "--record needs a GPU") for case in EVERY),
        (engine_speed.main, ["--record", "x.json"], "--record needs a GPU"),
        (engine_speed.main, ["sources"], "TABLE must be source or rivals, got sources"),
        (context_parallel_speed.command, [], "start it with torchrun --nproc-per-node"),
    ],
)
def test_what_a_command_cannot_do_is_refused(main, arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # torchrun sets it
    with pytest.raises(SystemExit, match="2"):
        run_on_a_cpu(main, *arguments)
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
