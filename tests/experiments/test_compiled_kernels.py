"""The table of compiled Triton kernels: what a row says, and that a refusal has a row."""

import pytest
import torch

from pagewise.experiments import compiled_kernels
from pagewise.experiments.compiled_kernels import CALLS, Variant, difference, row
from pagewise.experiments.kernel_cases import Case


@pytest.mark.slow
def test_a_row_has_instructions_the_difference_findings_and_seconds():
    variant = Variant("softmax", torch.float16, 40, True)
    what, arch, instructions, apart, findings, build, run, kernels = row(variant, "sm_80")
    assert (what, arch) == ("softmax, float16, D 40, options", "sm_80")
    assert 50 < int(instructions) < 500
    assert (apart, findings, kernels) == ("equal bits", "0", "online_softmax")
    assert float(run) < 5 + float(build)


def test_a_call_that_is_refused_has_a_row_with_the_reason():
    *_, reason = row(Variant("flash", torch.bfloat16, 16), "sm_75")
    assert reason.startswith('refused: backend="triton" cannot compute with bfloat16')


@pytest.mark.slow
def test_a_finding_is_counted_and_printed(monkeypatch, capsys):
    """The last number of x is read after the end of x."""
    from pagewise.kernels.online_softmax import online_softmax_kernel

    def wrong(dtype, head_size, options):
        x, out = torch.ones(39), torch.empty(40)

        def run():
            online_softmax_kernel[(1,)](x, out, 40, TILE=64)
            return (out,)

        return Case(run, lambda dtype: ())

    monkeypatch.setitem(CALLS, "wrong", wrong)
    assert row(Variant("wrong", torch.float32, 40), "sm_80")[4] != "0"
    assert "x_ptr" in capsys.readouterr().out


def test_the_table_has_a_row_for_each_variant_and_gpu(monkeypatch, capsys):
    monkeypatch.setenv("CUDASCOPE_CACHE", "")  # so that the folder of before comes back
    monkeypatch.setattr(compiled_kernels, "CASES", (Variant("softmax", torch.float32, 16),))
    monkeypatch.setattr(compiled_kernels, "row", lambda variant, arch: (str(variant), arch, *"abcdef"))
    monkeypatch.setattr(compiled_kernels, "run", lambda variant, arch: None)
    compiled_kernels.main()
    assert [line.split()[4] for line in capsys.readouterr().out.splitlines()[1:]] == ["sm_75", "sm_80", "sm_90"]


def test_a_difference_is_the_largest_of_all_results():
    a, b = (torch.zeros(2), torch.ones(3)), (torch.zeros(2), torch.tensor([1.0, 0.5, 2.0]))
    assert difference(a, a) == "equal bits"
    assert difference(a, b) == "1.0e+00 of 2.0"
