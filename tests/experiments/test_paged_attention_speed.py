"""The benchmark of paged decode: it runs here, it compares before it times, and its record can be read again."""

import pytest
import torch

from pagewise.experiments import paged_attention_speed as paged_benchmark
from pagewise.experiments.paged_attention_speed import SHAPES, SMALLEST, Shape, benchmark
from pagewise.tools.benchmark import record, recorded

TINY = [Shape(2, 64, 4, 2, head_size=32), Shape(1, 48, 2, 2, head_size=64)]


def test_every_method_is_timed_on_every_shape(kernel_device):
    rows = list(benchmark(TINY, device=kernel_device, repeats=1))
    names = {"gather + SDPA", "CUDA v1", "CUDA v2", "CUDA grouped", "Triton"}
    for shape in TINY:
        of_shape = {row["method"]: row for row in rows if row["seq_len"] == shape.seq_len}
        assert names <= set(of_shape)
        for row in of_shape.values():
            assert row["seconds"] > 0
            assert row["bytes_per_second"] * row["seconds"] == pytest.approx(shape.kv_bytes(2))


def test_kv_bytes_are_what_a_step_must_read():
    assert Shape(8, 4096, 64, 8).kv_bytes(2) == 134_217_728


def test_a_wrong_method_is_not_timed(kernel_device, monkeypatch):
    wrong = paged_benchmark.paged_attention_v2
    monkeypatch.setattr(paged_benchmark, "paged_attention_v2", lambda *a, **o: wrong(*a, **o) * 1.5)
    with pytest.raises(AssertionError, match="CUDA v2"):
        list(benchmark(TINY[:1], device=kernel_device, repeats=1))


def test_a_method_that_refuses_a_shape_says_why(kernel_device, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("too long\nand more")

    monkeypatch.setattr(paged_benchmark, "paged_attention_v1", refuse)
    rows = {row["method"]: row for row in benchmark(TINY[:1], device=kernel_device, repeats=1)}
    assert rows["CUDA v1"]["refused"] == "too long"
    assert "seconds" not in rows["CUDA v1"]
    assert "seconds" in rows["CUDA v2"]


def test_the_shapes_are_those_of_a_server():
    assert {(s.num_seqs, s.seq_len) for s in SHAPES} == {(B, S) for B in (1, 8, 64) for S in (1024, 8192, 32768)}
    assert {(s.num_heads, s.num_kv_heads) for s in SHAPES} == {(64, 8), (32, 32)}
    assert all((s.head_size, s.block_size) == (128, 16) for s in [*SHAPES, *SMALLEST])


def test_a_record_can_be_drawn(shown):
    rows = [
        {**Shape(B, S, 64, 8)._asdict(), "method": name, "seconds": 1.0, "bytes_per_second": speed}
        for B, S in ((8, 1024), (1, 8192))
        for name, speed in (("Triton", 2e12), ("CUDA v1", 1e12))
    ]
    rows += [
        {**Shape(1, 8192, 64, 8)._asdict(), "method": "refusing", "refused": "why"},
        rows[0] | {"num_kv_heads": 32},
    ]
    found = {"device": "GPU", "date": "today", "versions": {"torch": "2"}, "copy_bytes_per_second": 4e12, "rows": rows}
    paged_benchmark.draw(found)
    (ax,) = shown[0].axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1 × 8 k", "8 × 1 k"]
    assert [bar.get_height() for bars in ax.containers for bar in bars] == [50, 50, 25, 25]


def test_a_record_holds_device_date_versions_and_rows(tmp_path):
    path = tmp_path / "measurements" / "x.json"
    assert recorded(path) is None
    record(path, [{"seconds": 0.5}], dtype="bfloat16")
    found = recorded(path)
    assert found["rows"] == [{"seconds": 0.5}]
    assert found["versions"]["torch"] == torch.__version__
    assert found["dtype"] == "bfloat16"
    assert {"device", "date"} <= set(found)


def test_times_of_a_cpu_are_not_recorded(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(paged_benchmark, "best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("sys.argv", ["paged_benchmark", "--record", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit):
        paged_benchmark.main()
    assert "--record needs a GPU" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
