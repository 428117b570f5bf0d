"""The benchmark of paged decode: it runs here, it compares before it times, and what fails is a row."""

import contextlib
import gc
import time
import weakref
from functools import partial

import pytest
import torch
from in_process import InProcess, forked_workers

from pagewise.experiments import decode_inputs, paged_attention_speed, speed
from pagewise.experiments.decode_inputs import Shape, exact, paged, random_inputs
from pagewise.experiments.paged_attention_speed import FIRST, SHAPES, SMALLEST, Trials
from pagewise.experiments.peers import peers_of_paged_decode
from pagewise.tools.benchmark import Timing
from pagewise.tools.records import keep, recorded
from pagewise.tools.timing import Spread
from pagewise.tools.worker import Failed

TINY = paged(2, 64, 4, 2, head_size=32)
records = partial(speed.records, Trials)
OURS = {"gather + SDPA", "CUDA v1", "CUDA v2", "CUDA grouped", "Triton"}


@pytest.fixture
def trials(kernel_device):
    return Trials(kernel_device, {"repeats": 1, "warmup": 0})


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(speed, "Worker", InProcess)


# ------------------------------------------------------------------------------------------------ trials


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TINY, paged(1, 48, 2, 2, head_size=64)], ids=str)
def test_every_method_of_ours_is_right_and_timed(shape, trials):
    assert set(trials.methods(trials.device, shape)) >= OURS
    for method in OURS:
        assert isinstance(trials(shape, method), Timing), method


@pytest.mark.parametrize("method", sorted(peers_of_paged_decode(torch.device("cpu"))))
def test_a_peer_is_right_or_says_why_it_does_not_run(method, trials):
    found = trials(TINY, method)
    assert isinstance(found, Timing) or "wrong" not in found


def test_a_wrong_method_is_not_timed(trials, monkeypatch):
    right = paged_attention_speed.paged_attention_v2
    monkeypatch.setattr(paged_attention_speed, "paged_attention_v2", lambda *a, **o: right(*a, **o) * 1.5)
    assert trials(TINY, "CUDA v2").startswith("wrong: relative error 0.5")
    assert isinstance(trials(TINY, "CUDA v1"), Timing)


def test_a_method_that_refuses_a_shape_says_why(trials, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("too long\nand more")

    monkeypatch.setattr(paged_attention_speed, "paged_attention_v1", refuse)
    assert trials(TINY, "CUDA v1") == "ValueError: too long"


def test_a_peer_that_cannot_even_be_prepared_says_why(trials, monkeypatch):
    def broken(batches):
        raise ImportError("half installed")

    monkeypatch.setattr(paged_attention_speed, "peers_of_paged_decode", lambda device: {"peer": broken})
    assert trials(TINY, "peer") == "ImportError: half installed"


def test_small_inputs_rotate_and_large_ones_do_not(trials, monkeypatch):
    trials(TINY, "gather + SDPA")
    assert len({batch.q.sum().item() for batch in trials.inputs}) == 3
    monkeypatch.setattr(decode_inputs, "ROTATED_BYTES", TINY.bytes(2))
    trials.shape = None
    trials(TINY, "gather + SDPA")
    assert len(trials.inputs) == 1


def test_a_shape_is_built_once_and_freed_before_the_next_is_built(trials, monkeypatch):
    built, alive = [], []

    def noted(*args):
        gc.collect()
        alive.append(sum(tensor() is not None for tensor in built))
        batch = random_inputs(*args)
        built.extend(map(weakref.ref, batch[:5]))
        return batch

    monkeypatch.setattr(decode_inputs, "random_inputs", noted)
    other = TINY._replace(shortest=32, longest=32)
    for shape, method in [(TINY, "CUDA v1"), (TINY, "Triton"), (TINY, "SDPA math, not paged"), (other, "CUDA v1")]:
        trials(shape, method)
    assert alive == [0, 5, 10, 0, 5, 10]


def test_the_oracle_reads_the_blocks_in_the_tables_order(kernel_device):
    batch = random_inputs(TINY, torch.float64, kernel_device, seed=1)
    keys = torch.cat([batch.k_cache[block] for block in batch.block_tables[1].tolist()])[:, 1]  # KV head 1: heads 2, 3
    values = torch.cat([batch.v_cache[block] for block in batch.block_tables[1].tolist()])[:, 1]
    weights = (batch.q[1, 2] @ keys.T / TINY.head_size**0.5).softmax(dim=-1)
    torch.testing.assert_close(exact(batch)[1, 2], weights @ values)


# ------------------------------------------------------------------------------------------------ records


def test_records_come_shape_by_shape_with_every_method(in_process, kernel_device):
    shapes = [TINY, TINY._replace(num_seqs=1)]
    found = list(records(shapes, device=kernel_device, rate=1e12, repeats=1, warmup=0))
    assert [(r.shape["num_seqs"], r.what) for r in found] == [
        (s.num_seqs, m) for s in shapes for m in Trials.methods(kernel_device, s)
    ]
    for record in found:
        assert (record.refused is None) == (record.seconds is not None)
        assert record.bytes == Shape(**record.shape).bytes(2)
        if record.what in {*OURS, "CUDA v1, again"}:
            assert record.fraction == pytest.approx(record.bytes / record.seconds / 1e12)


def test_records_can_be_kept_and_read(in_process, kernel_device, tmp_path):
    found = []
    for record in records([TINY], device=kernel_device, rate=1e12, repeats=2):
        keep(tmp_path / "x.json", record)
        found.append(record)
        assert recorded(tmp_path / "x.json") == found


def test_a_worker_that_failed_is_a_row_and_the_run_goes_on(monkeypatch, kernel_device):
    class Failing(InProcess):
        def __call__(self, shape, method, *, limit):
            if method == "CUDA v2":
                raise Failed(f"no answer within {limit:g} s")
            return Timing(Spread(2.0, 1.5, 2.5), "fake")

    monkeypatch.setattr(speed, "Worker", Failing)
    found = {r.what: r for r in records([TINY], device=kernel_device, limit=7.0)}
    assert found["CUDA v2"].refused == "no answer within 7 s"
    assert (found["Triton"].seconds, found["Triton"].spread, found["Triton"].fraction) == (2.0, 1.0, None)


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
    rows = speed.records(Planted, [TINY], device=torch.device("cpu"), limit=2.0)
    with forked_workers(), contextlib.closing(rows):
        found = [(r.refused, r.seconds) for r in rows]
    refusals = [("no answer within 2 s", None), ("its process ended: exit status 3", None)]
    assert found == [*refusals, (None, 1.0), (None, 1.0)]


# ------------------------------------------------------------------------------------------------ shapes


def test_the_work_of_a_step():
    assert paged(8, 4096, 64, 8).bytes(2) == 134_217_728
    assert paged(8, 4096, 64, 8).flops == 4 * 8 * 4096 * 64 * 128


def test_the_shapes_are_those_of_a_server_and_begin_with_those_that_have_targets():
    assert {(s.num_seqs, s.longest) for s in SHAPES} == {(B, S) for B in (1, 8, 64) for S in (1024, 8192, 32768)}
    assert {(s.num_heads, s.num_kv_heads) for s in SHAPES} == {(64, 8), (32, 32)}
    assert all((s.head_size, s.block_size) == (128, 16) for s in [*SHAPES, *SMALLEST])
    assert len(set(SHAPES)) == len(SHAPES) == 18
    assert SHAPES[:3] == FIRST
    assert [s.bytes(2) // 2**20 for s in FIRST] == [128, 256, 2048]


# ------------------------------------------------------------------------------------------------ figure and command


def test_records_can_be_drawn(shown, in_process):
    (first, *_) = records([TINY], device=torch.device("cpu"), repeats=1, warmup=0)
    first = first._replace(limit_rate=1.0)
    found = [
        first._replace(what=name, shape=paged(B, S, 64, 8)._asdict(), seconds=first.bytes / fraction)
        for B, S in ((8, 1024), (1, 8192))
        for name, fraction in (("Triton", 0.5), ("CUDA v1", 0.25))
    ]
    found += [
        found[0]._replace(what="refusing", seconds=None),
        found[0]._replace(what="Triton, again"),
        found[0]._replace(shape=paged(8, 1024, 32, 32)._asdict()),
    ]
    paged_attention_speed.draw(found)
    (ax,) = shown[0].axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1 × 8 k", "8 × 1 k"]
    assert [bar.get_height() for bars in ax.containers for bar in bars] == [50, 50, 25, 25]


def test_the_command_prints_a_table(in_process, monkeypatch, capsys):
    monkeypatch.setattr(speed, "best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(Trials, "smallest", [TINY, TINY])
    monkeypatch.setattr("sys.argv", ["paged_attention_speed", "--first", "1"])
    speed.command(Trials)
    out = capsys.readouterr().out
    assert "these times say nothing about a GPU" in out
    assert all(out.count(f"\n{method} ") == 1 for method in OURS)


@pytest.mark.slow
def test_a_copy_that_fails_costs_the_fractions_and_nothing_else(capsys):
    nowhere = torch.device("cuda", 99)  # its process finds no such GPU
    assert speed.limit_rate("copy", nowhere, limit=60.0) is None
    assert "The rate of a copy is unknown, so no fractions of it are shown: " in capsys.readouterr().out


def test_times_of_a_cpu_are_not_recorded(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(speed, "best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("sys.argv", ["paged_attention_speed", "--record", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit):
        speed.command(Trials)
    assert "--record needs a GPU" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
