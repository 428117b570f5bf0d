"""The benchmark of attention, forward and backward. `test_every_experiment` has the common rules."""

import pytest
import torch
from in_process import CPU, planted, records

from pagewise.experiments import flash_attention_speed
from pagewise.experiments.flash_attention_speed import SHAPES, SMALLEST, Shape, Trials, draw, exact, shape_of
from pagewise.naive_attention import attention
from pagewise.tools.worker import Failed

# ------------------------------------------------------------------------------------------------ trials


def test_the_cuda_kernel_has_no_backward(kernel_device):
    backward = next(shape for shape in SMALLEST if shape.backward)
    assert "has no backward" in Trials(kernel_device, {"repeats": 1, "warmup": 0})(backward, "CUDA")


@pytest.mark.parametrize("causal", [0, 1])
def test_the_oracle_by_rows_is_the_oracle(causal, monkeypatch):
    monkeypatch.setattr(flash_attention_speed, "ROWS", 7)
    shape = Shape(24, 16, causal, 0, 2, 3)
    inputs = flash_attention_speed.random_inputs(shape, torch.float64, CPU)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = attention(*leaves, causal=bool(causal))
    torch.testing.assert_close(exact(shape, inputs), out.detach())
    gradients = torch.stack(torch.autograd.grad(out, leaves, inputs[3]))
    torch.testing.assert_close(exact(shape._replace(backward=1), inputs), gradients)


def test_gradients_are_compared_a_head_at_a_time():
    right = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    assert flash_attention_speed.gradients_fault(lambda: tuple(right.float()), right) is None
    wrong = right.clone()
    wrong[1, 0, 3, 0] = 0
    assert flash_attention_speed.gradients_fault(lambda: tuple(wrong), right).startswith("wrong")


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


# ------------------------------------------------------------------------------------------------ figure


def test_records_can_be_drawn(shown):
    def seconds(shape, method):
        if method == "SDPA cudnn":
            raise Failed("refused")
        return 2.0 if method == "SDPA flash" else 1.0

    shapes = [s for s in SHAPES if s.head_size == 128 and s.causal and not s.backward][:2]
    draw(records(planted(Trials, seconds), shapes))
    (ax,) = shown[0].axes
    assert ax.get_title(loc="left") == "How fast is the forward? (D = 128, causal)"
    curves = {line.get_label(): line for line in ax.lines}
    assert set(curves) == {"Triton", "CUDA", "SDPA flash", "SDPA math"}
    assert list(curves["SDPA flash"].get_xdata()) == [4096, 16384]
    assert curves["SDPA flash"].get_ydata()[0] == pytest.approx(shapes[0].flops / 2e12)


def test_records_that_cannot_be_drawn_are_an_error_that_says_what_there_is():
    found = records(planted(Trials, lambda shape, method: 1.0), [shape_of(512, D, 1, 0) for D in (128, 256)])
    there = "head_size=128 causal=1 backward=0; head_size=256 causal=1 backward=0"
    with pytest.raises(ValueError, match=rf"has head_size=64 causal=1 backward=0; there are {there}$"):
        draw(found, head_size=64)
    with pytest.raises(ValueError, match="has head_size=128 causal=0 backward=1"):
        draw(found, causal=False, backward=True)
