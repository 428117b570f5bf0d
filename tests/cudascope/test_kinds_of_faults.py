"""Faults of one kind are found where one of them is: through g++ and through PTX, at the line, with the right names."""

from pathlib import Path

import pytest
import torch
from covering import is_full
from source_files import file_of

from cudascope import CudaKernel, Finding, check
from cudascope.cpp.source import CompileError

SOURCE = Path(__file__).parent / "kinds_of_faults.cu"
LINES = SOURCE.read_text().splitlines()
PATHS = ("c++", "ptx") if is_full() else ("c++",)
SEEDS = (None, 0, 1)


def found(
    name: str, shape: tuple, *args: object, through: str = "c++", seed: int | None = None, **options
) -> list[Finding]:
    """The findings of a launch of a kernel of SOURCE."""
    report = None
    try:
        with check(stop=False, schedule=seed, **options) as report:
            CudaKernel(SOURCE, name, through=through)[shape](*args)
    except Finding:
        pass  # it is the report's last one
    return report.findings


def line_of(text: str) -> int:
    (line,) = (number for number, line in enumerate(LINES, 1) if text in line)
    return line


# ------------------------------------------------------------------------------------------------ variables


@pytest.mark.slow
@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize(
    ("which", "name", "size"),
    [
        *[(0, "taps", 8), (1, "table", 8), (2, "table", 8), (3, "zeros", 6), (4, "primes", 4), (5, "squares", 5)],
        (7, "table", 8),
    ],
)
def test_an_access_past_a_variable_is_found(which, name, size, through):
    kernel = "read_variables"
    for i in (0, size - 1):
        assert found(kernel, (1, 1), torch.zeros(1), which, i, through=through) == []
    before = [] if which in (4, 5) and through == "c++" else [-1, -5]  # g++ tells of the end of a constant only
    for i in (size, size + 1, size + 12, *before):
        (finding,) = found(kernel, (1, 1), torch.zeros(1), which, i, through=through)
        assert (finding.rule, finding.tensor, finding.element, finding.count) == ("out of bounds", name, i, 1)
        assert f"if (which == {which})" in LINES[finding.line - 1]


@pytest.mark.slow
def test_a_read_far_past_a_variable_is_found_and_strings_may_be_read():
    assert [each.rule for each in found("read_variables", (1, 1), torch.zeros(1), 0, 500)] == ["out of bounds"]
    assert found("read_variables", (1, 1), torch.zeros(1), 6, 3) == []


def test_constants_of_more_than_64_kb_are_refused():
    source = "__constant__ float a[8000], b[{}]; __global__ void k(float* x) {{ x[0] = a[0] + b[0]; }}"
    if is_full():
        CudaKernel(source.format(8384), "k")[1, 1](torch.zeros(1))
    with pytest.raises(ValueError, match=r"__constant__ variables of its file can have at most 65536 bytes, got 65540"):
        CudaKernel(source.format(8385), "k")[1, 1](torch.zeros(1))


# ------------------------------------------------------------------------------------------------ barriers


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("which", range(6))
def test_a_barrier_in_a_branch_is_told_from_a_return(which, seed):
    findings = found("early_returns", (2, 64), torch.zeros(128), which, 40, seed=seed)
    rounds = [number for number, line in enumerate(LINES, 1) if line.endswith(f"// round {which}")]
    assert [(each.rule, each.line) for each in findings] == [("barrier in a branch", line) for line in rounds]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_thread_block_that_does_not_come_to_the_barrier_of_the_grid_is_named(missing):
    (finding,) = found("grid_barrier", (3, 32), torch.zeros(96), missing)
    assert f"thread block ({missing}, 0, 0) has ended and has not come to this barrier" in finding.sentence
    assert found("grid_barrier", (3, 32), torch.zeros(96), 3) == []


def test_a_return_before_a_barrier_is_found_if_asked_for():
    for which in (0, 2):
        findings = found("early_returns", (1, 64), torch.zeros(64), which, 40, also=("left before barrier",))
        assert [each.rule for each in findings] == ["left before barrier"]


# ------------------------------------------------------------------------------------------------ lanes

APART = {0: "deadlock", 1: "deadlock", 2: "deadlock", 3: "deadlock"}
APART |= {4: "different masks", 5: "different masks", 6: "different masks"}
APART |= dict.fromkeys((7, 8, 9), "warp function in a branch")


@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize("which", APART)
def test_lanes_in_different_functions_or_with_different_masks_are_found(which, through):
    for seed in SEEDS:
        out = torch.zeros(32, dtype=torch.int32)
        (first,) = found("lanes_apart", (1, 32), out, which, through=through, seed=seed)
        assert first.rule == APART[which]
        if which in (7, 8, 9):
            assert "if (" in LINES[first.line - 1]
            assert first.other_line == first.line + 1


@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize("which", range(11))
def test_lanes_that_part_and_meet_by_the_rules_are_silent(which, through):
    for seed in SEEDS:
        out = torch.zeros(32, dtype=torch.int32)
        assert found("lanes_together", (1, 32), out, which, through=through, seed=seed) == []


@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_lanes_that_are_there_by_chance_are_not_all_that_come(which, through):
    """A shuffled schedule shows the fault: as a finding in this line, or by other results than the first schedule's."""
    first, lines, differ = torch.zeros(33, dtype=torch.int32), set(), False
    assert which == 1 or found("lanes_there", (1, 32), which, first, through=through) == []
    for seed in range(6):
        out = torch.zeros(33, dtype=torch.int32)
        lines |= {each.line for each in found("lanes_there", (1, 32), which, out, through=through, seed=seed)}
        differ |= not torch.equal(out, first)
    assert lines == set() if which == 2 else lines == {line_of(f"// there {which}")}
    assert differ


@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize("which", [3, 4, 5])
def test_lanes_that_count_who_is_there_are_right_in_every_schedule(which, through):
    for seed in (None, *range(6)):
        out = torch.zeros(33, dtype=torch.int32)
        assert found("lanes_there", (1, 32), which, out, through=through, seed=seed) == []
        assert out.tolist() == [*range(24), *[0] * 8, 12 if which == 4 else 24]


def test_lanes_apart_are_named():
    (finding,) = found("lanes_apart", (1, 32), torch.zeros(32, dtype=torch.int32), 7)
    assert "with mask 0xffffffff here, while lane 1, which the mask names, is in __shfl_xor_sync in" in finding.sentence
    (finding,) = found("lanes_apart", (1, 32), torch.zeros(32, dtype=torch.int32), 5)
    assert "with mask 0x0001ffff, which names lane 16, and that lane has come with mask 0xffff0000" in finding.sentence


def test_a_deadlock_of_lanes_names_the_functions():
    (finding,) = found("lanes_apart", (1, 32), torch.zeros(32, dtype=torch.int32), 0)
    assert "in __shfl_xor_sync with mask 0xffffffff" in str(finding)
    assert "in __shfl_up_sync with mask 0xffffffff" in str(finding)


# ------------------------------------------------------------------------------------------------ memory


def memory(which: int, i: int, through: str = "c++") -> list[Finding]:
    return found("in_memory", (1, 64), torch.zeros(64), which, i, through=through, ignore=("same value",))


@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize(
    ("which", "i", "tensor", "element"),
    [(0, -1, "row", -1), (0, 64, "row", 64), (1, 30, "words", 30), (2, -3, "row", -3), (1, -2, "words", -2)],
)
def test_elements_of_shared_arrays_are_counted_in_their_own_type(which, i, tensor, element, through):
    (finding,) = memory(which, i, through)
    assert (finding.rule, finding.tensor, finding.element) == ("out of shared bounds", tensor, element)


@pytest.mark.parametrize(("which", "right"), [(3, 4), (4, 2)])
def test_misaligned_local_memory_is_found(which, right):
    (finding,) = memory(which, 1)
    assert (finding.rule, finding.count) == ("misaligned", 64)
    assert "reads 16 bytes at a local variable: the address is no multiple of 16" in finding.sentence
    assert memory(which, right) == []
    assert memory(5, 0) == [], "the compiler may put an array of 8 bytes at any multiple of 4"


@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize(
    ("which", "says"),
    [
        (6, "16 bytes from malloc() or new that was freed"),
        (7, "past the end of the 16 bytes"),
        (8, "before the 16 bytes"),
    ],
)
def test_a_finding_in_the_heap_says_what_the_memory_is(which, says, through):
    findings = memory(which, 0, through)
    assert [each.rule for each in findings] == ["out of bounds"]
    assert says in findings[0].sentence


@pytest.mark.parametrize("owner", [0, 16, 31])
def test_a_local_variable_of_another_thread_is_found_wherever_it_is(owner):
    findings = found("variable_of", (1, 32), torch.zeros(32), owner, False)
    assert [each.rule for each in findings] == ["local of another thread"] * (owner != 16)


def test_what_the_last_lane_does_for_all_lanes_is_no_access_to_another_thread():
    out = torch.zeros(32)
    assert found("variable_of", (1, 32), out, 0, True) == []
    assert torch.equal(out, torch.arange(1.0, 33.0).cumsum(0))


def test_a_launch_goes_on_after_a_misaligned_vector():
    x, out = torch.arange(8.0), torch.zeros(8)
    assert {each.rule for each in found("moved", (1, 1), x, out)} == {"misaligned"}
    assert out.tolist() == [7, 1, 2, 3, 4, 0, 0, 0]


WITHOUT_A_CHECK = """
__global__ void add(float* x, int i) {
    __shared__ float s[64];
    atomicAdd(&s[i], x[0]);
}
__global__ void shuffle(int* x, int width) { x[threadIdx.x] = __shfl_sync(~0u, x[0], 1, width); }
"""


def test_an_atomic_out_of_shared_memory_names_its_line_without_a_check():
    with pytest.raises(Finding) as caught:
        CudaKernel(file_of(WITHOUT_A_CHECK), "add")[1, 1](torch.zeros(1), -100_000)
    assert caught.value.line == 4


# ------------------------------------------------------------------------------------------------ one cause


def test_races_that_one_barrier_ends_are_one_finding():
    x, out = torch.ones(64), torch.zeros(128)
    (finding,) = found("one_barrier", (1, 64), x, out, 0)
    last_store = line_of("b[t] = in[t] + 1;")
    assert {each.tensor for each in (finding, *finding.others)} == {"a", "b"}
    assert "The barrier would also end the races on" in finding.sentence
    assert finding.barrier.name == "__syncthreads()"
    assert finding.barrier.after <= last_store < finding.barrier.before


def test_the_barrier_at_the_end_of_a_turn_is_told_from_the_one_within_it():
    (finding,) = found("one_barrier", (1, 64), torch.ones(64), torch.zeros(128), 1)
    assert finding.barrier.after == finding.barrier.before + 2
    assert f"belongs after line {finding.barrier.after}, before line {finding.barrier.before} is executed again" in str(
        finding
    )


def test_races_that_need_two_barriers_are_two_findings():
    findings = found("one_barrier", (1, 64), torch.ones(64), torch.zeros(128), 2)
    assert [each.tensor for each in findings] == ["a", "b"]
    assert all(each.barrier.after < each.barrier.before for each in findings)


# ------------------------------------------------------------------------------------------------ unset variables

UNSET = {
    "float s; for (int i = 0; i < n; ++i) s += x[i]; x[0] = s;": "unset variable",
    "float s; x[0] = s;": "unset variable",
    "float m; for (int i = 0; i < n; ++i) m = fmaxf(m, x[i]); x[0] = m;": "unset variable",
    "int c; if (threadIdx.x < n) { c++; x[c & 3] = 1; }": "unset variable",
    "float s; for (int i = 0; i < n; ++i) s = x[i]; x[0] = s;": "maybe unset variable",
    "int best; float m = -1; for (int i = 0; i < n; ++i) if (x[i] > m) { m = x[i]; best = i; } x[0] = best;": (
        "maybe unset variable"
    ),
    "float s = 0; for (int i = 0; i < n; ++i) s += x[i]; x[0] = s;": "",
}


@pytest.mark.parametrize("number", range(len(UNSET)))
def test_a_variable_without_a_value_is_found_by_the_compiler(number):
    kernels = "\n".join(f"__global__ void k{i}(float* x, int n) {{ {body} }}" for i, body in enumerate(UNSET))
    kernel, rule = CudaKernel(file_of(kernels), f"k{number}"), [*UNSET.values()][number]
    for also in ((), ("maybe unset variable",)):
        with check(stop=False, also=also) as report:
            kernel[1, 1](torch.ones(8), 2)
        shown = bool(rule) and (rule == "unset variable" or also != ())
        assert [(each.rule, each.line) for each in report.findings] == [(rule, number + 1)] * shown


# ------------------------------------------------------------------------------------------------ refusals


def test_an_operator_of_a_using_declaration_goes_with_its_operator():
    source = """
namespace a { struct J { const char* s; }; inline J operator""_js(const char* s, size_t n) { return {s}; } }
namespace b { __host__ __device__ constexpr long double operator""_km(long double x) { return x * 1000; } }
using a::operator""_js;
using b::operator""_km;
__global__ void k(float* x) { x[0] = 2.0_km; }
int main() { auto j = "x"_js; k<<<1, 1>>>(nullptr); }
"""
    x = torch.zeros(1)
    CudaKernel(source, "k")[1, 1](x)
    assert x.item() == 2000


@pytest.mark.slow
def test_a_kernel_that_returns_a_number_is_refused_with_a_sentence():
    with pytest.raises(CompileError, match=r"kernel 'k' returns int: a __global__ function must return void"):
        CudaKernel("__global__ int k(float* x) { x[0] = 1; return 1; }", "k")[1, 1](torch.zeros(1))


@pytest.mark.slow
def test_a_class_that_the_stand_in_for_cub_lacks_is_refused_with_a_sentence():
    source = """
#include <cub/cub.cuh>
__global__ void k(float* x, size_t n) { cub::DeviceReduce::Sum(nullptr, n, x, x, 4); }
"""
    with pytest.raises(CompileError, match=r"a stand-in of its own for cub, and DeviceReduce is not in it"):
        CudaKernel(source, "k")[1, 1](torch.zeros(1), 1)


@pytest.mark.parametrize("width", [0, 3, 12, 64])
def test_a_width_of_a_shuffle_that_is_no_power_of_two_is_refused(width):
    kernel = CudaKernel(file_of(WITHOUT_A_CHECK), "shuffle")
    with pytest.raises(Finding, match="a width that is not 1, 2, 4, 8, 16 or 32"):
        kernel[1, 32](torch.zeros(32, dtype=torch.int32), width)
