"""`cudascope.check(stop=False)`: all that is wrong with a kernel, each place once; and rules that are switched."""

import re
from pathlib import Path

import pytest
import torch
from planted import marked_lines

import cudascope
from cudascope import CudaKernel
from cudascope.cpp.file import read
from cudascope.cpu.rules import FLAGS, RULES, FindingKind
from cudascope.toolchain.headers import RUNTIME
from cudascope.translate.returns import early_returns, has_unmarked_return, kernel_bodies

FINDINGS, PLANTED = (Path(__file__).parent / name for name in ("findings.cu", "planted_bugs.cu"))
SEEDS = (None, 0, 1, 2)


def marked(name: str) -> set[int]:
    lines = FINDINGS.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith(f"// FINDING {name}")}


def run_three_mistakes(**options):
    """300 elements, 384 threads: 84 of them read and write past the end."""
    memory = torch.zeros(600)
    x, out = torch.arange(300.0), torch.from_dlpack(memory[:300])  # with ends of its own
    with cudascope.check(**options) as report:
        CudaKernel(FINDINGS, "three_mistakes")[3, 128](x, out, 300)
    return report, x, memory


@pytest.mark.parametrize("seed", SEEDS)
def test_all_mistakes_of_a_kernel_are_found_and_the_launch_goes_on(seed):
    report, x, memory = run_three_mistakes(stop=False, schedule=seed)
    found = {(error.rule, error.tensor): error for error in report.findings}
    assert set(found) == {("race", "row"), ("out of bounds", "in"), ("out of bounds", "out")}
    assert len(report.findings) == 3
    race, read, write = found["race", "row"], found["out of bounds", "in"], found["out of bounds", "out"]
    assert {race.line, race.other_line} == marked("race")
    assert ({read.line}, {write.line}) == (marked("read"), marked("write"))
    assert (read.count, write.count) == (84, 84)
    assert race.count >= 1
    assert Path(read.file) == FINDINGS
    assert memory[300:].tolist() == [0.0] * 300  # what is outside is not written
    if seed is None:  # a warp after the other: threads 64 to 127 of a thread block find what was written before them
        written = memory[:300].view(-1)[64:128]
        assert torch.equal(written, 2 * x[64:128])


def test_findings_of_several_launches_are_merged():
    x, out = torch.arange(300.0), torch.zeros(300)
    kernel = CudaKernel(FINDINGS, "three_mistakes")
    with cudascope.check(stop=False) as report:
        for _ in range(3):
            kernel[3, 128](x, out, 300)
    assert sorted(error.count for error in report.findings if error.rule == "out of bounds") == [252, 252]
    assert len(report.findings) == 3


def test_findings_are_in_the_order_of_the_thread_blocks():
    kernel = CudaKernel(
        "__global__ void k(int* first, int* second, int* flag) {\n"
        "    if (blockIdx.x == 1) { second[1] = 1; atomicExch(flag, 1); return; }\n"
        "    while (!atomicAdd(flag, 0)) {}  // its thread block finds something after the other one\n"
        "    first[1] = 1;\n"
        "}",
        "k",
    )
    with cudascope.check(stop=False) as report:
        kernel[2, 1](*(torch.zeros(1, dtype=torch.int32) for _ in range(3)))
    assert [error.tensor for error in report.findings] == ["first", "second"]


def test_without_stop_false_the_first_finding_is_raised():
    with pytest.raises(cudascope.Finding) as caught:
        run_three_mistakes()
    assert (caught.value.what, caught.value.count) in {("race", 1), ("out of bounds", 1)}


def test_a_family_of_rules_can_be_ignored():
    report, _, memory = run_three_mistakes(ignore=("race", "out of bounds"))
    assert report.findings == []
    assert memory[300:].tolist() == [0.0] * 300


def test_a_report_prints_its_findings_with_their_counts():
    report, _, _ = run_three_mistakes(stop=False)
    lines = str(report).splitlines()
    assert len(lines) == 3
    (write,) = marked("write")
    assert sum(line.startswith("out of bounds, 84 ×: three_mistakes, line ") for line in lines) == 2
    assert any(f"line {write} `out[i] = own * other;" in line for line in lines)


def test_a_clean_report_says_how_many_launches_it_is_about():
    x, out = torch.randn(128), torch.zeros(128)
    with cudascope.check() as report:
        for _ in range(2):
            CudaKernel(PLANTED, "missing_barrier")[1, 128](x, out, False)
    assert str(report) == "2 launches checked, nothing found"


@pytest.mark.parametrize("seed", SEEDS)
def test_stores_of_the_same_value_are_a_race_that_can_be_ignored(seed):
    kernel, x = CudaKernel(FINDINGS, "any_negative"), -torch.ones(300)

    def found(planted: bool, **options) -> list[tuple[str, str]]:
        flag = torch.zeros(1, dtype=torch.int32)
        with cudascope.check(schedule=seed, stop=False, **options) as report:
            kernel[3, 128](x, flag, 300, planted)
        assert all({error.line, error.other_line} == marked("store") for error in report.findings)
        return [(error.what, error.rule) for error in report.findings]

    assert found(False) == [("race", "same value")]
    assert found(False, ignore=("same value",)) == []
    assert found(True, ignore=("same value",)) == [("race", "race")]
    assert found(True, ignore=("race",)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_that_returned_before_a_barrier_are_no_mistake_unless_asked_for(seed):
    kernel, x = CudaKernel(FINDINGS, "early_return"), torch.arange(300.0)
    expected = torch.cat([part.flip(0) for part in x.split(128)])
    for also in ((), ("left before barrier",)):
        out = torch.zeros(300)
        with cudascope.check(schedule=seed, stop=False, also=also) as report:
            kernel[3, 128](x, out, 300)
        assert torch.equal(out, expected)
        assert [(error.what, error.rule) for error in report.findings] == [("barrier", name) for name in also]
        assert all({error.line} == marked("early_return") for error in report.findings)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("planted", [True, False])
def test_threads_that_go_round_a_barrier_are_a_mistake(planted, seed):
    x, out = torch.randn(300), torch.zeros(300)
    with cudascope.check(schedule=seed, stop=False) as report:
        CudaKernel(PLANTED, "barrier_in_branch")[3, 128](x, out, 300, planted)
    found = [("barrier in a branch", line) for line in marked_lines(PLANTED, "barrier_in_branch") if planted]
    assert [(error.rule, error.line) for error in report.findings] == found


def test_a_hang_is_the_last_finding():
    out, flag = torch.zeros(100), torch.zeros(1, dtype=torch.int32)
    with cudascope.time_limit(0.5), cudascope.check(stop=False) as report:
        CudaKernel(FINDINGS, "hangs_at_the_end")[1, 128](out, flag, 100)
    write, hang = report.findings
    assert (write.what, write.count, {write.line}) == ("out of bounds", 28, marked("hang_write"))
    assert (hang.what, {hang.line}) == ("deadlock", marked("hang"))


def test_a_fault_sends_to_check_only_where_check_is_off():
    source = "__global__ void k(float* x) { x[1ll << 45] = 1; }"
    with pytest.raises(cudascope.Finding, match=r"its size: run it under cudascope.check\(\), which names the access"):
        CudaKernel(source, "k")[1, 1](torch.zeros(1))
    with cudascope.check(stop=False) as report:
        CudaKernel(source, "k")[1, 1](torch.zeros(1))
    assert [found.rule for found in report.findings] == ["out of bounds", "fault"]
    assert "cudascope.check()" not in report.findings[1].sentence


def test_check_and_observe_keep_the_seed_of_the_schedule_around_them():
    source = "__global__ void order(int* n, int* out) { out[atomicAdd(n, 1)] = 64 * blockIdx.x + threadIdx.x; }"

    def order() -> list[int]:
        n, out = torch.zeros(1, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        CudaKernel(source, "order")[4, 64](n, out)
        return out.tolist()

    with cudascope.schedule(7):
        shuffled = order()
        with cudascope.check():
            assert order() == shuffled
        with cudascope.observe():
            assert order() == shuffled
    assert order() != shuffled
    with cudascope.schedule(3), cudascope.check(schedule=7):
        assert order() == shuffled


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"ignore": ("races",)}, ValueError, "ignore must name what can be switched, .*got 'races'"),
        ({"ignore": ("fault",)}, ValueError, "got 'fault'"),
        ({"also": ("left",)}, ValueError, "also must name"),
        ({"ignore": "race"}, TypeError, r"ignore must be a tuple of names, as in \(\"race\",\), got 'race'"),
    ],
)
def test_a_name_that_cannot_be_switched_is_refused(options, error, sentence):
    with pytest.raises(error, match=sentence):
        cudascope.check(**options)


def test_every_rule_has_a_name_of_its_own():
    names = [rule.name for rule in RULES.values()]
    assert len(set(names)) == len(names)
    assert set(FindingKind) - set(RULES) == {FindingKind.NOTHING, FindingKind.INTERRUPTED}


def test_the_runtime_has_its_rules_from_the_table():
    """No file of the runtime lists them again, so a new rule is one row."""
    text = "".join(path.read_text() for path in RUNTIME.iterdir())
    enumerators, endings = (flag.partition("=")[2] for flag in FLAGS)
    assert enumerators.split(",") == [finding.name for finding in FindingKind]
    assert len(FindingKind) <= 64
    assert int(endings.removesuffix("ull"), 16) >> FindingKind.DEADLOCK & 1
    assert not int(endings.removesuffix("ull"), 16) >> FindingKind.RACE & 1
    found = {finding.name for finding in RULES if re.search(rf"\b{finding.name}\b", text)}
    assert found == {finding.name for finding in RULES}, "a rule that the runtime never reports"
    assert not re.search("|".join(rf"case {name}:" for name in found), text)


@pytest.mark.parametrize(
    ("body", "early", "unmarked"),
    [
        ("{ if (i) { __syncthreads(); } }", 0, False),
        ("{ if (i) return; __syncthreads(); }", 1, False),
        ("{ if (i) { return; } return; }", 1, False),
        ("{ auto f = [&](int a) mutable -> int { return a; }; if (i) return; f(3); }", 1, False),
        ("{ struct S { int f() { return 1; } }; if (i) return; __syncthreads(); }", 1, False),
        ("{ if (i) { __syncthreads(); } if (i > 3) return; }", 0, False),
        ("{ LEAVE(i) __syncthreads(); }", 0, True),
        ("{ /* return */ __syncthreads(); }", 0, False),
        ("; void other() { return; }", 0, True),  # its body is not there: nothing can be told
    ],
)
def test_the_returns_by_which_a_thread_leaves_a_kernel_are_seen(body, early, unmarked):
    source = f"#define LEAVE(i) \\\n    if (i) return;\n__global__ void k(int i) {body}\nvoid host() {{ return; }}"
    file = read(source)
    kernels = kernel_bodies(file, file.pieces)
    assert [len(early_returns(file, kernel)) for kernel in kernels] == ([early] if kernels else [])
    assert has_unmarked_return(file, "k") == unmarked


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_with_mistakes_are_cuda_too(arch):
    for name in dict.fromkeys(each.function for each in read(FINDINGS.read_text()).kernels):
        assert CudaKernel(FINDINGS, name).resources(arch).spilled_bytes == 0


def test_a_vector_that_begins_in_the_last_element_is_out_of_bounds():
    kernel = CudaKernel("__global__ void pair(const float2* x, float2* out) { out[0] = x[2]; }", "pair")
    with pytest.raises(cudascope.Finding) as caught, cudascope.check():
        kernel[1, 1](torch.randn(5), torch.zeros(2))
    assert (caught.value.what, caught.value.tensor, caught.value.element) == ("out of bounds", "x", 4)
