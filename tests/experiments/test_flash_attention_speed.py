"""The benchmark of attention, forward and backward: it compares before it times, and what fails is a row."""

from functools import partial

import pytest
import torch
from in_process import InProcess
from torch.nn.attention import flex_attention as flex

from pagewise.experiments import flash_attention_speed, peers, speed
from pagewise.experiments.flash_attention_speed import (
    SHAPES,
    SMALLEST,
    Shape,
    Trials,
    draw,
    exact,
    gradients_fault,
    prepared,
    random_inputs,
    shape_of,
)
from pagewise.naive_attention import attention
from pagewise.tools.benchmark import Timing
from pagewise.tools.records import keep, recorded
from pagewise.tools.timing import Spread
from pagewise.tools.worker import Failed

records = partial(speed.records, Trials)
OURS = ("Triton", "CUDA")
CPU = torch.device("cpu")


@pytest.fixture
def trials(kernel_device):
    return Trials(kernel_device, {"repeats": 1, "warmup": 0})


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(speed, "Worker", InProcess)


# ------------------------------------------------------------------------------------------------ trials


@pytest.mark.parametrize("shape", SMALLEST, ids=lambda s: f"causal {s.causal}, backward {s.backward}")
def test_every_method_is_right_and_timed_or_says_why_not(shape, trials):
    found = {method: trials(shape, method) for method in trials.methods(trials.device, shape)}
    assert isinstance(found["Triton"], Timing)
    assert isinstance(found["SDPA math"], Timing)
    assert not any(isinstance(result, str) and "wrong" in result for result in found.values())
    if shape.backward:
        assert "has no backward" in found["CUDA"]
    else:
        assert isinstance(found["CUDA"], Timing)


@pytest.mark.parametrize("backward", [0, 1])
def test_a_wrong_method_is_not_timed(backward, trials, monkeypatch):
    monkeypatch.setattr(flash_attention_speed, "flash_attention", lambda q, k, v, **_: attention(q, k, v, causal=False))
    shape = Shape(64, 32, 1, backward, 1, 2)
    assert trials(shape, "Triton").startswith("wrong: relative error")
    assert isinstance(trials(shape, "SDPA math"), Timing)


def test_a_method_that_cannot_even_be_prepared_says_why(trials, monkeypatch):
    def broken(seq_len, causal):
        raise ImportError("half installed")

    monkeypatch.setattr(flash_attention_speed, "peers_of_attention", lambda device: {"peer": broken})
    assert trials(SMALLEST[0], "peer") == "ImportError: half installed"


@pytest.mark.parametrize("causal", [0, 1])
def test_the_oracle_by_rows_is_the_oracle(causal, monkeypatch):
    monkeypatch.setattr(flash_attention_speed, "ROWS", 7)
    shape = Shape(24, 16, causal, 0, 2, 3)
    inputs = random_inputs(shape, torch.float64, CPU)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = attention(*leaves, causal=bool(causal))
    torch.testing.assert_close(exact(shape, inputs), out.detach())
    gradients = torch.stack(torch.autograd.grad(out, leaves, inputs[3]))
    torch.testing.assert_close(exact(shape._replace(backward=1), inputs), gradients)


def test_gradients_are_compared_a_head_at_a_time():
    right = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    assert gradients_fault(lambda: tuple(right.float()), right) is None
    wrong = right.clone()
    wrong[1, 0, 3, 0] = 0
    assert gradients_fault(lambda: tuple(wrong), right).startswith("wrong")


# ------------------------------------------------------------------------------------------------ peers


@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_gets_what_it_takes_and_its_backward_runs_again(causal, monkeypatch):
    """It needs a GPU: stand-ins that take the same arguments check ours."""

    def create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, *, device):
        assert (B, H, device) == (None, None, CPU)
        row, col = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)
        return mask_mod(torch.tensor(0), torch.tensor(0), row, col)

    def flex_attention(q, k, v, *, block_mask):
        return attention(q, k, v, attn_mask=block_mask)

    monkeypatch.setattr(flex, "flex_attention", flex_attention)
    monkeypatch.setattr(flex, "create_block_mask", create_block_mask)
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)
    shape = Shape(24, 16, int(causal), 1, 1, 2)
    inputs = random_inputs(shape, torch.float32, CPU)
    with torch._functorch.config.patch(donated_buffer=True):
        run = prepared(peers._flex_attention(CPU, 24, causal), shape, inputs)
        assert torch._functorch.config.donated_buffer is False
    assert gradients_fault(run, exact(shape, inputs)) is None
    assert gradients_fault(run, exact(shape, inputs)) is None


def test_the_peers_of_a_gpu():
    names = {"SDPA flash", "SDPA cudnn", "SDPA math", "FlexAttention"}
    assert set(peers.peers_of_attention(torch.device("cuda"))) == names


# ------------------------------------------------------------------------------------------------ records


def test_records_can_be_kept_and_read(in_process, kernel_device, tmp_path, monkeypatch):
    monkeypatch.setattr(flash_attention_speed, "flash_attention", lambda q, k, v, causal, backend: attention(q, k, v))
    found = []
    for record in records(SMALLEST[:2], device=kernel_device, rate=1e12, repeats=2, warmup=0):
        keep(tmp_path / "x.json", record)
        found.append(record)
        assert recorded(tmp_path / "x.json") == found
    assert [(r.shape, r.what) for r in found] == [
        (s._asdict(), m) for s in SMALLEST[:2] for m in Trials.methods(kernel_device, s)
    ]
    for record in found:
        assert record.flops == Shape(**record.shape).flops
        assert (record.refused is None) == (record.seconds is not None)
        if record.seconds:
            assert record.fraction == pytest.approx(record.flops / record.seconds / 1e12)


@pytest.fixture
def planted(monkeypatch):
    """One method fails, the others take a second, or two."""

    class Planted(InProcess):
        def __init__(self, *_):
            pass

        def __call__(self, shape, method, *, limit):
            if method == "SDPA cudnn":
                raise Failed(f"no answer within {limit:g} s")
            seconds = 2.0 if method == "SDPA flash" else 1.0
            return Timing(Spread(seconds, 0.5, 2.5), "fake")

    monkeypatch.setattr(speed, "Worker", Planted)


def test_a_worker_that_failed_is_a_row_and_the_run_goes_on(planted):
    found = {r.what: r for r in records(SMALLEST[:1], device=CPU, limit=7.0)}
    assert found["SDPA cudnn"].refused == "no answer within 7 s"
    assert (found["SDPA math"].seconds, found["SDPA math"].spread, found["SDPA math"].fraction) == (1.0, 2.0, None)


# ------------------------------------------------------------------------------------------------ shapes


def test_the_work_of_a_shape():
    assert shape_of(4096, 128, 0, 0) == Shape(4096, 128, 0, 0, 4, 16)
    assert shape_of(4096, 128, 0, 0).flops == 4 * 4 * 16 * 4096**2 * 128
    assert shape_of(4096, 128, 1, 0).flops == 4 * 4 * 16 * (4096 * 4097 // 2) * 128
    assert shape_of(4096, 128, 0, 1).flops == 2.5 * shape_of(4096, 128, 0, 0).flops
    assert Shape(64, 32, 0, 0, 2, 3).bytes(2) == 2 * 3 * 64 * (4 * 32 * 2 + 4)
    assert Shape(64, 32, 0, 1, 2, 3).bytes(2) == 2 * 3 * 64 * (8 * 32 * 2 + 4)


def test_the_shapes_are_those_of_the_papers_and_begin_with_those_that_have_targets():
    assert {s.batch * s.seq_len for s in SHAPES} == {16384}
    assert {s.num_heads * s.head_size for s in SHAPES} == {2048}
    assert {s.seq_len for s in SHAPES} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {s.head_size for s in SHAPES} == {64, 128, 256}
    assert len(set(SHAPES)) == len(SHAPES) == 72
    assert {(s.head_size, s.seq_len) for s in SHAPES[:8]} == {(128, 4096), (128, 16384)}


# ------------------------------------------------------------------------------------------------ figure and command


def test_records_can_be_drawn(shown, planted):
    shapes = [s for s in SHAPES if s.head_size == 128 and s.causal and not s.backward][:2]
    draw(list(records(shapes, device=CPU)))
    (ax,) = shown[0].axes
    assert ax.get_title(loc="left") == "How fast is the forward? (D = 128, causal)"
    curves = {line.get_label(): line for line in ax.lines}
    assert set(curves) == {"Triton", "CUDA", "SDPA flash", "SDPA math"}
    assert list(curves["SDPA flash"].get_xdata()) == [4096, 16384]
    assert curves["SDPA flash"].get_ydata()[0] == pytest.approx(shapes[0].flops / 2e12)


def test_the_command_prints_a_table(planted, monkeypatch, capsys):
    monkeypatch.setattr(speed, "best_device", lambda: CPU)
    monkeypatch.setattr("sys.argv", ["flash_attention_speed", "--first", "1"])
    speed.command(Trials)
    out = capsys.readouterr().out
    assert "these times say nothing about a GPU" in out
    assert all(out.count(f"\n{method} ") == 1 for method in Trials.methods(CPU, SMALLEST[0]))
