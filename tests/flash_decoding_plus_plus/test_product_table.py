"""The heuristic dataflow: inflection points from noisy times, and a table that belongs to its device."""

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from pagewise.flash_decoding_plus_plus import dataflow as module
from pagewise.flash_decoding_plus_plus.dataflow import (
    NUM_ROWS,
    Dataflow,
    device_label,
    inflection_points,
    product_for,
    product_times,
)
from pagewise.tools.benchmark import TOLERANCES, relative_error

CPU = torch.device("cpu")
HERE = device_label(CPU)
POINTS = (*NUM_ROWS, 65)
NAMES = ("gemv", "flat_gemm", "matmul")


def curves(M1, M2, *, gap=1.5, noise=0.0, seed=0):
    """Times whose crossings are known: what the rule takes is `gap` times as fast as the next, then there is noise."""
    noisy = random.Random(seed)
    times = {name: {} for name in NAMES}
    for M in NUM_ROWS:
        right = NAMES.index(product_for(M, M1, M2))
        for i, name in enumerate(NAMES):
            exact = (1 + M / 20) * gap ** abs(i - right)
            times[name][M] = exact * math.exp(noisy.uniform(-noise, noise))
    return times


# ------------------------------------------------------------------------------------------------ inflection points


@given(st.sampled_from(POINTS), st.sampled_from(POINTS), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_known_crossings_are_found_under_noise(M, other, seed):
    M1, M2 = min(M, other), max(M, other)
    # two neighbours are closer than the gap, log 1.5 = 0.41, only with noise of half of it on both
    assert inflection_points(curves(M1, M2, noise=0.2, seed=seed)) == (M1, M2)


def test_shallow_crossings_under_noise_cost_little():
    """Times differ by 5 %, noise is up to 10 % of each: the table's choice loses a fraction of the 5 %."""
    exact, lost = curves(1, 25, gap=1.05), []
    for seed in range(50):
        _, found = inflection_points(curves(1, 25, gap=1.05, noise=0.1, seed=seed))
        lost += [exact[product_for(M, 1, found)][M] / exact[product_for(M, 1, 25)][M] for M in NUM_ROWS]
    assert sum(lost) / len(lost) < 1.01


def test_one_disturbed_time_is_no_crossing():
    times = curves(6, 33)
    times["gemv"][2] *= 4  # the first place where flat_gemm is faster than gemv
    times["flat_gemm"][9] *= 4  # and matmul faster than flat_gemm
    times["matmul"][48] *= 4
    assert inflection_points(times) == (6, 33)


def test_each_number_of_rows_weighs_the_same():
    """In a sum of seconds one large time outweighs many small ones."""
    times = curves(1, 33)
    for product in times.values():
        product[64] *= 1000
    times["flat_gemm"][64] = times["matmul"][64] * 0.9
    assert inflection_points(times) == (1, 33)


def test_ties_go_to_the_simpler():
    same = dict.fromkeys(NUM_ROWS, 1.0)
    assert inflection_points(dict.fromkeys(NAMES, same)) == (1, 1)
    slow = dict.fromkeys(NUM_ROWS, 2.0)
    assert inflection_points({"gemv": same, "flat_gemm": same, "matmul": slow}) == (1, 65)


def test_what_was_not_timed_is_not_taken():
    times = curves(65, 65)
    times["gemv"] = {M: seconds for M, seconds in times["gemv"].items() if M <= 4}
    times["flat_gemm"] = {}
    assert inflection_points(times) == (5, 5)


# ------------------------------------------------------------------------------------------------ profile


@pytest.fixture
def clock(monkeypatch):
    """Take times from curves. Return the list of (product, rows) that were measured."""
    asked, seconds = [], curves(3, 24)

    def measure(calls, **_):
        rows = {name: len(call.args[0]) for name, call in calls.items()}
        asked.extend(rows.items())
        return {name: seconds[name][M] for name, M in rows.items()}

    monkeypatch.setattr(module, "measure", measure)
    return asked, seconds


def test_profile_finds_the_points_of_every_shape(clock):
    flow = Dataflow.profile([(8, 16), (24, 16), (8, 16)], "cpu", dtype=torch.float16)
    assert flow == Dataflow(HERE, torch.float16, {(8, 16): (3, 24), (24, 16): (3, 24)})
    assert flow.inflections(24, 16) == (3, 24)
    with pytest.raises(ValueError, match=r"weights \[16, 24\] were not profiled; the table has \[8, 16\], \[24, 16\]"):
        flow.inflections(16, 24)


def test_a_hopeless_product_is_not_timed_for_more_rows(clock):
    asked, seconds = clock
    seconds["gemv"] = {M: 100.0 if M >= 4 else s for M, s in seconds["gemv"].items()}
    seconds["matmul"] = dict.fromkeys(NUM_ROWS, 50.0)
    times = product_times(8, 16, device=CPU, dtype=torch.bfloat16)
    assert list(times["gemv"]) == [1, 2, 3, 4]
    assert asked.count(("gemv", 4)) == 1
    assert list(times["matmul"]) == list(NUM_ROWS)  # what all else falls back on is timed anyhow
    assert inflection_points(times) == (3, 65)


def test_float32_is_not_for_tensor_cores(clock):
    flow = Dataflow.profile([(8, 16)], "cpu")
    assert flow.dtype == torch.float32
    assert "flat_gemm" not in dict(clock[0])
    assert flow.inflections(8, 16) == (3, 3)  # from there on as fast as matmul, which is simpler


@pytest.mark.slow
def test_profile_runs_here(kernel_device, monkeypatch):
    monkeypatch.setattr(module, "NUM_ROWS", (1, 9, 64))
    dtype = torch.float16
    flow = Dataflow.profile([(24, 32)], kernel_device, dtype=dtype)
    M1, M2 = flow.inflections(24, 32)
    assert 1 <= M1 <= M2 <= 65
    for M in (1, 3, 64, 65):
        x, w = (torch.randn(rows, 32, device=kernel_device).to(dtype) for rows in (M, 24))
        torch.testing.assert_close(flow.linear(x, w), linear(x, w), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("shapes", "device", "dtype", "error", "message"),
    [
        ([(8, 0)], "cpu", None, ValueError, "K must be at least 1"),
        ([(8.0, 8)], "cpu", None, TypeError, "N must be an int"),
        ([(8, 8)], "cpu", torch.float64, TypeError, "dtype must be float32, float16 or bfloat16"),
        ([(8, 8)], "meta", None, ValueError, r"device must be one of this machine's, cpu.*, got meta"),
        ([(8, 8)], "cuda:99", None, ValueError, r"device must be one of this machine's, cpu.*, got cuda:99"),
    ],
)
def test_what_cannot_be_profiled_is_refused(shapes, device, dtype, error, message, shapes_unchecked):
    with pytest.raises(error, match=message):
        Dataflow.profile(shapes, device, dtype=dtype)


# ------------------------------------------------------------------------------------------------ linear


@pytest.fixture
def taken(monkeypatch):
    """Every product computes what it should and notes its name."""
    names = []

    def noting(name):
        def product(x, w, bias=None):
            names.append(name)
            assert (x.dim() == 2 and bias is None) or name == "matmul"
            return linear(x, w, bias)

        return product

    monkeypatch.setattr(module, "PRODUCTS", {name: noting(name) for name in NAMES[:2]})
    monkeypatch.setattr(module, "matmul", noting("matmul"))
    return names


def table(M1, M2, N=6, K=5, dtype=torch.float32):
    return Dataflow(HERE, dtype, {(N, K): (M1, M2)})


@pytest.mark.parametrize(("M1", "M2"), [(3, 17), (1, 65), (65, 65), (1, 1), (8, 8)])
def test_the_table_chooses(M1, M2, taken):
    flow, w = table(M1, M2), torch.randn(6, 5)
    for M in range(1, 67):
        x = torch.randn(M, 5)
        assert torch.equal(flow.linear(x, w), linear(x, w))
    expected = ["gemv" if M < M1 else "flat_gemm" if M < M2 else "matmul" for M in range(1, 67)]
    assert taken == expected


W = torch.randn(6, 5)
CHOSEN = {  # x, w, and the product that a table of (2, 17) for [6, 5] in float32 chooses
    "a vector": (torch.randn(5), W, "gemv"),
    "two dimensions of rows": (torch.randn(2, 1, 5), W, "flat_gemm"),
    "many rows": (torch.randn(5, 4, 5), W, "matmul"),
    "no rows": (torch.randn(0, 5), W, "matmul"),
    "another shape of weights": (torch.randn(1, 6), torch.randn(5, 6), "matmul"),
    "another dtype": (torch.randn(1, 5).double(), W.double(), "matmul"),
    "weights whose rows do not lie one after the other": (torch.randn(1, 5), torch.randn(5, 6).T, "matmul"),
}


@pytest.mark.parametrize(("x", "w", "name"), CHOSEN.values(), ids=CHOSEN)
def test_the_product_depends_on_rows_weights_and_dtype(x, w, name, taken):
    assert torch.equal(table(2, 17).linear(x, w), linear(x, w))
    assert taken == [name]


def test_what_needs_a_gradient_goes_to_matmul(taken):
    flow, x, w = table(2, 65), torch.randn(1, 5), torch.randn(6, 5, requires_grad=True)
    flow.linear(x, w).sum().backward()
    assert torch.equal(w.grad, x.expand(6, 5))
    with torch.no_grad():
        flow.linear(x, w)
    assert taken == ["matmul", "gemv"]


def test_what_does_not_fit_raises_torchs_own_error(shapes_unchecked):
    flow = table(2, 65)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        flow.linear(torch.randn(1, 4), torch.randn(6, 5))
    with pytest.raises(RuntimeError, match="dtype"):
        flow.linear(torch.randn(1, 5).half(), torch.randn(6, 5))


def test_tensors_of_another_device_are_refused():
    with pytest.raises(ValueError, match=r"profiled on CPU \(.*\), x is on META"):
        table(2, 65).linear(torch.randn(1, 5, device="meta"), torch.randn(6, 5, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernels_multiply_as_torch_does(dtype, kernel_device):
    flow = Dataflow(device_label(kernel_device), dtype, {(40, 72): (2, 65)})
    w = torch.randn(40, 80, device=kernel_device).to(dtype)[:, :72]  # rows lie apart
    for rows in ((1,), (3,), (2, 5)):
        x = torch.randn(*rows, 72, device=kernel_device).to(dtype)
        assert relative_error(flow.linear(x, w), x.double() @ w.double().T) <= TOLERANCES[dtype]


@pytest.mark.slow
def test_it_can_be_compiled(shapes_unchecked):
    flow, w = table(2, 17, dtype=torch.float16), torch.randn(6, 5).half()
    compiled = torch.compile(flow.linear, fullgraph=True, backend="eager", dynamic=False)
    for M in (1, 2, 17):
        x = torch.randn(M, 5).half()
        torch.testing.assert_close(compiled(x, w), linear(x, w))


# ------------------------------------------------------------------------------------------------ the file


@pytest.fixture
def saved(tmp_path):
    """A table, its file, and the file's content."""
    flow = Dataflow(HERE, torch.bfloat16, {(6, 5): (2, 17), (12288, 4096): (1, 65)})
    flow.save(tmp_path / "table.json")
    return flow, tmp_path / "table.json", json.loads((tmp_path / "table.json").read_text())


def test_a_table_is_read_as_it_was_saved(saved):
    flow, path, _ = saved
    assert Dataflow.load(path) == Dataflow.load(str(path)) == flow


def entry(**changes):
    """The file's content with changes in its first entry."""
    return lambda c: c | {"inflections": [c["inflections"][0] | changes]}


DAMAGED = [  # the bytes of a file, or a change of its content
    (b"\x80\x04\x95pickled", ""),
    (b'{"version": 1', ""),
    (b"", ""),
    (lambda c: [c], "not a saved Dataflow"),
    (lambda c: {name: value for name, value in c.items() if name != "device"}, "not a saved Dataflow .*device"),
    (lambda c: c | {"version": 2}, "version must be 1, got 2"),
    (lambda c: c | {"dtype": "float64"}, "not a saved Dataflow .*float64"),
    (lambda c: c | {"inflections": [3]}, "not a saved Dataflow"),
    (lambda c: c | {"inflections": [{"N": 6}]}, "not a saved Dataflow .*K"),
    (entry(M1=2.5), "M1 must be an int, got float"),
    (entry(M1=18), "1 <= M1 <= M2 <= 65, got 18 and 17"),
    (entry(M1=0), "M1 must be at least 1"),
    (entry(M2=66), "got 2 and 66"),
    (entry(N=0), "N must be at least 1"),
    (lambda c: c | {"device": "NVIDIA H999 (sm_999, 7 SMs)"}, r"on NVIDIA H999 \(sm_999, 7 SMs\), .* has CPU \("),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_a_file_that_does_not_fit_is_refused_by_its_name(damage, message, saved, shapes_unchecked):
    _, path, content = saved
    path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(damage(content)).encode())
    with pytest.raises(ValueError, match=f"table.json: .*{message}"):
        Dataflow.load(path)
