"""The contexts of launches inside each other, and their options: who gets which launch, and what is refused."""

import math

import numpy as np
import pytest
import torch

import cudascope
from cudascope import CudaKernel, Finding, PtxKernel, check, observe, schedule, time_limit
from cudascope.watch.contexts import current_run

SOURCE = """
__global__ void copy(float* x, const float* y, int first, int last) {
    if (first <= threadIdx.x && threadIdx.x < last) x[threadIdx.x] = y[threadIdx.x];
}
__global__ void race(float* x) { x[0] = threadIdx.x; }
__global__ void outside(float* x) { x[8 + threadIdx.x] = 1; }
"""
COPY, RACE, OUTSIDE = (CudaKernel(SOURCE, name) for name in ("copy", "race", "outside"))
CONTEXTS = {"check": check, "observe": observe, "schedule": lambda: schedule(3), "time_limit": lambda: time_limit(7)}


def zeros(n: int = 8) -> np.ndarray:
    return np.zeros(n, np.float32)


def num_launches(report: cudascope.Report) -> int:
    return report.num_checked + len(report.launches)


# ------------------------------------------------------------------------------------------------ one in another


@pytest.mark.parametrize("inner", CONTEXTS)
@pytest.mark.parametrize("outer", CONTEXTS)
def test_every_pair_gives_both_reports_the_inner_launch_or_is_refused(outer, inner):
    with CONTEXTS[outer]() as around:
        COPY[1, 8](zeros(), zeros(), 0, 8)
        if {outer, inner} == {"check", "observe"}:
            with pytest.raises(RuntimeError, match="cannot be nested: use one after the other"), CONTEXTS[inner]():
                pass
            return
        with CONTEXTS[inner]() as inside:
            COPY[1, 8](zeros(), zeros(), 0, 8)
            run = current_run.get()
            assert run.seed == (3 if "schedule" in (outer, inner) else None)
            assert run.time_limit == (7 if "time_limit" in (outer, inner) else 30)
        COPY[1, 8](zeros(), zeros(), 0, 8)
    if outer in ("check", "observe"):
        assert num_launches(around) == 3
        assert "no launch" not in str(around)
    if inner in ("check", "observe"):
        assert num_launches(inside) == (3 if inside is around else 1)


def test_three_checks_in_each_other_and_a_schedule_between():
    with check() as first, schedule(1), check() as second:
        with check() as third:
            COPY[1, 8](zeros(), zeros(), 0, 8)
        COPY[1, 8](zeros(), zeros(), 0, 8)
        assert current_run.get().seed == 1
    assert [report.num_checked for report in (first, second, third)] == [2, 2, 1]


def test_a_finding_is_in_every_report_around_it_with_its_own_count():
    with check(stop=False) as outer:
        RACE[1, 2](zeros())
        with check(stop=False) as inner:
            RACE[1, 2](zeros())
            RACE[1, 2](zeros())
    assert [finding.count for finding in inner.findings] == [2]
    assert [finding.count for finding in outer.findings] == [3]


def test_a_finding_that_ends_the_inner_check_is_in_both_reports():
    with check(stop=False) as outer, pytest.raises(Finding, match="past its end"), check() as inner:
        OUTSIDE[1, 2](zeros())
    for report in (outer, inner):
        assert [finding.rule for finding in report.findings] == ["out of bounds"]


def test_each_check_ignores_rules_for_itself():
    with check(ignore=("race",)) as outer:
        with check(stop=False) as strict:
            RACE[1, 2](zeros())
        with check(stop=False, ignore=("race",)):
            RACE[1, 2](zeros())
    assert [finding.what for finding in strict.findings] == ["race"]
    assert outer.findings == []
    with check(stop=False) as outer, check(ignore=("race",)):
        RACE[1, 2](zeros())
    assert outer.findings == [], "the launch ran without the rule"


def test_written_elements_count_for_the_checks_around_and_not_for_those_inside():
    x, y = zeros(), zeros()
    with check() as outer:
        COPY[1, 8](x, y, 0, 2)
        with check(outputs=[x], ignore=("never written",)) as inner:
            COPY[1, 8](x, y, 2, 5)
            assert inner.unwritten(x).ravel().tolist() == [0, 1, 5, 6, 7]
    assert outer.unwritten(x).ravel().tolist() == [5, 6, 7]
    with check(outputs=[x], ignore=("never written",)) as outer:
        COPY[1, 8](x, y, 0, 4)
        with check() as inner:
            COPY[1, 8](x, y, 2, 6)
    assert inner.unwritten(x).ravel().tolist() == [0, 1, 6, 7]
    assert outer.unwritten(x).ravel().tolist() == [6, 7]


def test_outputs_of_both_checks_hold_inside():
    x, y = zeros(), zeros()
    with check(outputs=[x], ignore=("never written",)):
        COPY[1, 8](x, y, 0, 4)
        with check():
            COPY[1, 8](y, x, 0, 4)  # the outer check knows that they are written
            with pytest.raises(Finding, match=r"x\[4\]|y\[4\], an output that nobody has written"):
                COPY[1, 8](y, x, 4, 5)
    with check(), check(outputs=[x]), pytest.raises(Finding, match="an output that nobody has written"):
        COPY[1, 8](y, x, 0, 1)


def test_an_inner_observe_chooses_the_length_of_the_trace():
    with observe() as outer, observe(trace_limit=3) as inner:
        COPY[1, 8](zeros(), zeros(), 0, 8)
    assert len(outer.trace) == len(inner.trace) == 3
    assert outer.launches == inner.launches


# ------------------------------------------------------------------------------------------------ options

PTX = """.version 8.4
.target sm_80
.address_size 64
.visible .entry nothing(.param .u64 x)
{
    ret;
}
"""
SEEDS = [
    (-1, ValueError),
    (2**64, ValueError),
    (1.5, TypeError),
    (True, TypeError),
    ("3", TypeError),
    (math.nan, TypeError),
]
SECONDS = [(0, ValueError), (-1.0, ValueError), (math.inf, ValueError), (math.nan, ValueError), (1e300, ValueError)]
SECONDS += [("3", TypeError), (None, TypeError), (True, TypeError), (torch.tensor(3.0), TypeError)]
LISTS = [("race", TypeError), (3, TypeError), (None, TypeError), (("no rule",), ValueError), ([3], ValueError)]
X = torch.zeros(4)


def cuda_kernel(**options):
    return lambda: CudaKernel(SOURCE, "copy", **options)


REFUSED = [
    *((f"schedule({seed!r})", lambda seed=seed: schedule(seed), error, "schedule") for seed, error in SEEDS),
    *(
        (f"check(schedule={seed!r})", lambda seed=seed: check(schedule=seed), error, "schedule")
        for seed, error in SEEDS
    ),
    *((f"observe(schedule={s!r})", lambda s=s: observe(schedule=s), error, "schedule") for s, error in SEEDS),
    *((f"observe(trace_limit={n!r})", lambda n=n: observe(trace_limit=n), error, "trace_limit") for n, error in SEEDS),
    ("observe(trace_limit=None)", lambda: observe(trace_limit=None), TypeError, "trace_limit"),
    *((f"time_limit({s!r})", lambda s=s: time_limit(s), error, "seconds") for s, error in SECONDS),
    *((f"check(ignore={names!r})", lambda n=names: check(ignore=n), error, "ignore") for names, error in LISTS),
    *((f"check(also={names!r})", lambda n=names: check(also=n), error, "also") for names, error in LISTS),
    *((f"check(stop={stop!r})", lambda s=stop: check(stop=s), TypeError, "stop") for stop in (0, None, "no")),
    ("check(outputs=tensor)", lambda: check(outputs=X), TypeError, r"outputs must be a list .* \[out\], got Tensor"),
    ("check(outputs=array)", lambda: check(outputs=X.numpy()), TypeError, "outputs must be a list"),
    ("check(outputs=None)", lambda: check(outputs=None), TypeError, "outputs must be a list"),
    ("check(outputs={})", lambda: check(outputs={"x": X}), TypeError, "outputs must be a list"),
    ("check(outputs=[3])", lambda: check(outputs=[X, 3]), TypeError, "outputs must be tensors or arrays, got int"),
    ("check(outputs=[sparse])", lambda: check(outputs=[X.to_sparse()]), ValueError, r"outputs\[0\] must be a dense"),
    ("CudaKernel(3)", lambda: CudaKernel(3, "copy"), TypeError, "source must be a path or CUDA"),
    ("CudaKernel(name=3)", lambda: CudaKernel(SOURCE, 3), TypeError, "name must be a string"),
    ("CudaKernel(name='')", lambda: CudaKernel(SOURCE, ""), ValueError, "name must be a kernel"),
    ("CudaKernel(defines='A')", cuda_kernel(defines="A"), TypeError, "defines must be a sequence of strings"),
    ("CudaKernel(defines=['1A'])", cuda_kernel(defines=["1A"]), ValueError, "defines: '1A' is neither"),
    ("CudaKernel(defines=['A B=1'])", cuda_kernel(defines=["A B=1"]), ValueError, "defines: 'A B=1' is neither"),
    ("CudaKernel(defines=[''])", cuda_kernel(defines=[""]), ValueError, "defines: '' is neither"),
    ("CudaKernel(options=None)", cuda_kernel(options=None), TypeError, "options must be a sequence"),
    ("CudaKernel(options=['-O3'])", cuda_kernel(options=["-O3"]), ValueError, "options: '-O3' is not known"),
    ("CudaKernel(through=None)", cuda_kernel(through=None), ValueError, "through must be"),
    ("CudaKernel(arch=80)", cuda_kernel(arch=80), TypeError, "arch must be a string such as"),
    ("CudaKernel(arch='80')", cuda_kernel(through="ptx", arch="80"), ValueError, "arch must be a string such as"),
    ("resources(90)", lambda: COPY.resources(90), TypeError, "arch must be a string"),
    ("compile('gpu')", lambda: COPY.compile("gpu"), ValueError, 'device must be "cpu"'),
    ("compile('cuda:x')", lambda: COPY.compile("cuda:x"), ValueError, 'device must be "cpu"'),
    ("variable(device=3)", lambda: COPY.variable("v", 3), ValueError, 'device must be "cpu"'),
    ("PtxKernel(3)", lambda: PtxKernel(3), TypeError, "source must be a path or PTX text, got int"),
    ("PtxKernel(bytes)", lambda: PtxKernel(PTX.encode()), TypeError, "source must be a path or PTX text, got bytes"),
    ("PtxKernel(no file)", lambda: PtxKernel("none.ptx"), FileNotFoundError, "looked up from the current folder"),
    (
        "PtxKernel(name=3)",
        lambda: PtxKernel(PTX, 3),
        ValueError,
        "name must be an entry of the module .nothing., got 3",
    ),
    ("triton_compiled(80)", lambda: cudascope.triton_compiled(80), TypeError, "arch must be one of sm_75"),
    ("triton_compiled(['sm_80'])", lambda: cudascope.triton_compiled(["sm_80"]), TypeError, "arch must be one of"),
    ("triton_compiled('sm_8')", lambda: cudascope.triton_compiled("sm_8"), ValueError, "arch must be one of"),
    ("triton_compiled(edit=3)", lambda: cudascope.triton_compiled(edit=3), TypeError, "edit must be a function"),
]


@pytest.mark.parametrize(("call", "error", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_wrong_option_is_refused_by_name_at_the_call(call, error, message):
    with pytest.raises(error, match=message) as refused:
        call()
    assert type(refused.value) is error, "no subclass, such as OverflowError"


def test_options_may_be_numpy_scalars_and_iterators():
    with time_limit(np.float32(2)), schedule(np.int64(5)), observe(trace_limit=np.int32(4)) as report:
        COPY[1, 8](zeros(), zeros(), 0, 8)
        assert current_run.get()[1:2] == (5,)
        assert current_run.get().time_limit == 2
    assert len(report.trace) == 4
    x = zeros()
    with check(outputs=iter([x]), ignore=iter(["race", "never written"]), stop=np.bool_(False)) as report:
        RACE[1, 2](x)
    assert report.findings == []
    assert len(report.unwritten(x)) == 7


def test_the_shortest_time_limit_is_a_time_limit():
    with time_limit(1e-12):
        COPY[1, 8](zeros(), zeros(), 0, 8)
