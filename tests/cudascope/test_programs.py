"""`cudascope check file.cu`: the file's own main runs, with stand-ins for the CUDA runtime API."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cudascope.command.line import FOUND_IN_PROGRAM

pytestmark = pytest.mark.slow  # a build for nearly each test

FOLDER = Path(__file__).parent / "programs"
MISTAKES = FOLDER / "mistakes.cu"
OWN_STATUS = 3  # of the program of mistakes


class Ended(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def findings(self) -> list[tuple[int, str, str]]:
        """Line, rule and sentence of each finding."""
        found = re.findall(r"^[\w/.-]+?\.\w+(?::(\d+))?: ([a-z -]+): (.*)$", self.err, re.MULTILINE)
        return [(int(line or 0), rule, sentence) for line, rule, sentence in found]


@pytest.fixture(scope="module")
def command() -> Iterator[Callable[..., Ended]]:
    """Run the command in the folder of the programs."""
    driver = [sys.executable, str(Path(__file__).with_name("commands.py"))]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(driver, **pipes, cwd=FOLDER, env=buffered) as process:

        def run(*arguments: object) -> Ended:
            process.stdin.write(json.dumps([*map(str, arguments)]) + "\n")
            process.stdin.flush()
            return Ended(**json.loads(process.stdout.readline()))

        yield run
        process.stdin.close()


def line_of(text: str, file: Path = MISTAKES) -> int:
    """The first line of `file` that contains `text`."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def case(name: str) -> str:
    return f'is("{name}")'


ORIGIN = f"(d: 400 bytes of cudaMalloc in line {line_of('cudaMalloc(&d, BYTES)')})"

# The case; the rule; what stands in the line; parts of the sentence.
IN_KERNELS = [
    ("past_end", "out of bounds", "the kernel writes", "writes d[100], past its end (100 elements)", ORIGIN),
    ("far_past_end", "out of bounds", "// shifted", "writes d[5100], past its end", ORIGIN),
    ("before_start", "out of bounds", "// shifted", "writes d[-3], before its first element", ORIGIN),
    ("through_struct", "out of bounds", "// through a struct", "writes d[100], past its end", ORIGIN),
    ("doubles_in_struct", "out of bounds", "// doubles", "doubles[10], past its end (10 elements)"),
    ("in_bytes", "out of bounds", "// bytes", "writes d[400], past its end (400 elements)", ORIGIN),
    ("race", "race", "// a race", "d[", "no barrier between", ORIGIN),
    (
        "unwritten",
        "unwritten output",
        "the kernel copies",
        "reads d[0], which neither the host nor a kernel has written",
    ),
    ("half_written", "unwritten output", "the kernel copies", "reads d[50], which neither"),
    ("written_by_kernel", "unwritten output", "the kernel copies", "reads d[64], which neither", "in launch 2"),
    ("second_launch", "out of bounds", "the kernel writes", "in launch 2 of the program"),
    ("misaligned", "misaligned", "// misaligned", "writes 8 bytes at d[1]"),
    ("host_pointer", "out of bounds", "the kernel writes", "memory of the host or of nobody"),
    ("host_pointer_read", "out of bounds", "// sums up", "reads address 0x", "memory of the host or of nobody"),
    ("host_stack", "out of bounds", "// sums up", "reads address 0x", "memory of the host or of nobody"),
    ("null_pointer", "out of bounds", "the kernel writes", "writes a null pointer"),
    (
        "freed_before_launch",
        "use after free",
        "the kernel writes",
        "writes d (",
        f"line {line_of('// freed')} has freed",
    ),
]


@pytest.mark.parametrize(
    ("name", "rule", "place", "parts"), [(n, r, p, q) for n, r, p, *q in IN_KERNELS], ids=lambda v: str(v)[:20]
)
def test_a_mistake_of_a_kernel_names_the_launch_and_the_allocation(command, name, rule, place, parts):
    ended = command("check", MISTAKES, "--", name)
    line, found, sentence = ended.findings[0]
    assert (ended.status, line, found) == (FOUND_IN_PROGRAM, line_of(place), rule)
    launched_there = f"(line {line_of(case(name))})" in sentence
    assert launched_there or name in ("freed_before_launch", "host_stack", "doubles_in_struct")
    assert len(ended.findings) == 1
    assert "far_past_end: cudaSuccess" in ended.out or name != "far_past_end"  # a checked launch goes on
    assert "2 times" not in sentence or name == "through_struct"
    assert all(part in sentence for part in parts), sentence


# The case; the error that CUDA returns; parts of the sentence.
LAUNCHES = [
    ("grid_of_0", "cudaErrorInvalidConfiguration", "grid must be at least 1"),
    ("large_block", "cudaErrorInvalidConfiguration", "1056 threads, at most 1024"),
    ("tall_grid", "cudaErrorInvalidConfiguration", "grid must be at most"),
    ("much_shared", "cudaErrorInvalidValue", "cudaFuncSetAttribute"),
    ("too_much_shared", "cudaErrorInvalidValue", "shared_bytes = 1048576"),
    ("launch_bounds", "cudaErrorInvalidConfiguration", "65 threads, at most 64"),
    ("cooperative", "cudaErrorCooperativeLaunchTooLarge", "an H100 holds 264 of this size"),
    ("no_kernel", "cudaErrorInvalidDeviceFunction", "is no kernel"),
    ("not_configured", "cudaErrorMissingConfiguration", "without <<<"),
]


@pytest.mark.parametrize(("name", "error", "part"), LAUNCHES, ids=lambda value: str(value)[:20])
def test_a_launch_that_cuda_refuses_returns_its_error_and_is_found(command, name, error, part):
    ended = command("check", MISTAKES, "--", name)
    line, rule, sentence = ended.findings[0]
    place = f"{case(name)}" if name not in ("cooperative", "too_much_shared", "not_configured") else None
    assert place is None or line == line_of(place)
    assert (ended.status, rule) == (FOUND_IN_PROGRAM, "launch failed")
    assert part in sentence
    assert f"{name}: {error}" in ended.out
    assert "attribute: cudaErrorInvalidValue" in ended.out or name != "too_much_shared"


# The case; the error that CUDA returns; the rule; a part of the sentence.
MEMORY = [
    ("copy_too_long", "cudaErrorInvalidValue", "invalid copy", "writes 404 bytes from byte 0 of an allocation of 400"),
    ("copy_from_too_short", "cudaErrorInvalidValue", "invalid copy", "reads 400 bytes from byte 4"),
    ("copy_swapped", "cudaErrorInvalidValue", "invalid copy", "memory of the host as if it were the device's"),
    ("copy_to_host", "cudaErrorInvalidValue", "invalid copy", "memory of the host as if it were the device's"),
    ("copy_null", "cudaErrorInvalidValue", "invalid copy", "a null pointer"),
    ("copy_freed", "cudaErrorInvalidValue", "use after free", "reads memory that was freed"),
    ("copy_2d", "cudaErrorInvalidValue", "invalid copy", "writes 440 bytes"),
    ("copy_rows", "cudaErrorInvalidValue", "invalid copy", "writes 440 bytes"),
    ("copy_async", "cudaErrorInvalidValue", "invalid copy", "reads 401 bytes"),
    ("fill_too_long", "cudaErrorInvalidValue", "invalid copy", "fills 401 bytes"),
    ("fill_host", "cudaErrorInvalidValue", "invalid copy", "fills memory of the host"),
    ("symbol_too_long", "cudaErrorInvalidValue", "invalid copy", "of 20 bytes from byte 0 of a variable of 16"),
    ("symbol_offset", "cudaErrorInvalidValue", "invalid copy", "of 8 bytes from byte 12 of a variable of 16"),
    ("no_symbol", "cudaErrorInvalidSymbol", "invalid copy", "no variable of the device"),
    ("double_free", "cudaErrorInvalidValue", "double free", "cudaFree of memory that was freed before"),
    ("double_free_of_copy", "cudaErrorInvalidValue", "double free", "that was freed before"),
    ("double_free_of_host", "cudaErrorInvalidValue", "double free", "cudaFreeHost of memory that was freed before"),
    ("free_inside", "cudaErrorInvalidValue", "invalid free", "does not begin an allocation"),
    ("free_host_memory", "cudaErrorInvalidValue", "invalid free", "was not allocated by CUDA"),
    ("free_pinned", "cudaErrorInvalidValue", "invalid free", "is memory of cudaMallocHost"),
    ("free_host_of_device", "cudaErrorInvalidValue", "invalid free", "is memory of the device"),
]


@pytest.mark.parametrize(("name", "error", "rule", "part"), MEMORY, ids=lambda value: str(value)[:20])
def test_a_mistake_of_a_copy_or_a_free_returns_the_error_and_is_found_in_a_plain_run_too(
    command, name, error, rule, part
):
    ended = command("run", MISTAKES, "--", name)
    line, found, sentence = ended.findings[0]
    assert (ended.status, found, len(ended.findings)) == (FOUND_IN_PROGRAM, rule, 1)
    assert line >= line_of(case(name))
    assert part in sentence
    assert f"{name}: {error}\n" in ended.out


@pytest.mark.parametrize(("name", "error"), [("copy_pitch", 12), ("copy_direction", 21)])
def test_an_argument_that_cuda_does_not_know_returns_its_error(command, name, error):
    names = {12: "cudaErrorInvalidPitchValue", 21: "cudaErrorInvalidMemcpyDirection"}
    assert command("run", MISTAKES, "--", name)[:2] == (OWN_STATUS, f"{name}: {names[error]}\n")


HOST = [
    ("host_reads", "host access", "the host reads", "d (400 bytes of cudaMalloc in line ", 139),
    ("host_writes", "host access", "the host writes", "memory of the device: copy it with cudaMemcpy", 139),
    ("host_in_library", "host access", "in a function of the library", "memory of the device", 139),
    ("host_reads_freed", "use after free", "the host reads freed memory", "freed in line ", 139),
    ("host_reads_freed_managed", "use after free", "managed memory that was freed", "freed in line ", 139),
    ("host_null", "host fault", "// null", "at address 0", 139),
    ("host_division", "host fault", "// zero", "divides an integer by zero", 136),
    ("host_past_managed", "host fault", "// behind its end", "past the ends of an allocation", 139),
]


@pytest.mark.parametrize(("name", "rule", "place", "part", "status"), HOST, ids=lambda value: str(value)[:20])
def test_a_fault_of_the_host_is_found_at_its_line(command, name, rule, place, part, status):
    ended = command("run", MISTAKES, "--", name)
    [(line, found, sentence)] = ended.findings
    assert (ended.status, line, found) == (FOUND_IN_PROGRAM, line_of(place), rule)
    assert part in sentence
    assert command("check", MISTAKES, "--ignore", rule, "--", name).status == status


def test_a_right_program_has_its_own_status_and_output(command):
    ended = command("check", MISTAKES, "--schedule", "0,1", "--", "right")
    out = "99\nkernel 2\n195\n"
    assert ended == (OWN_STATUS, 2 * out, "mistakes.cu: no findings in 5 launches and 2 schedules\n")
    assert command("run", MISTAKES, "--", "right") == (OWN_STATUS, out, "")


def test_a_failed_kernel_makes_every_later_call_fail_as_on_a_gpu(command):
    ended = command("run", MISTAKES, "--", "assertion")
    assert ended.findings[0][:2] == (line_of("assert(threadIdx.x < n)"), "assertion")
    assert ended.out.split() == [
        *("launch:", "cudaErrorAssert", "synchronize:", "cudaErrorAssert", "malloc:", "cudaErrorAssert")
    ]


@pytest.mark.parametrize(
    ("name", "part"), [("past_end", "the kernel writes"), ("freed_before_launch", "the kernel writes")]
)
def test_a_plain_run_ends_the_kernel_at_a_fault_and_says_how_to_learn_more(command, name, part):
    ended = command("run", MISTAKES, "--", "far_past_end" if name == "past_end" else name)
    line, rule, sentence = ended.findings[0]
    assert (ended.status, rule) == (FOUND_IN_PROGRAM, "fault")
    assert "cudascope check names the access" in sentence
    assert line == line_of("// shifted" if name == "past_end" else part)


def test_leaks_are_found_if_asked_for(command):
    assert command("check", MISTAKES, "--", "leak").status == OWN_STATUS
    ended = command("check", MISTAKES, "--also", "leak", "--", "leak")
    [(line, rule, sentence)] = ended.findings
    assert (line, rule) == (line_of("cudaMalloc(&p, bytes)"), "leak")
    assert sentence == f"p (12 bytes of cudaMalloc in line {line}): 12 bytes are never freed"
    assert [rule for _, rule, _ in command("run", MISTAKES, "--", "exits").findings] == []
    assert len(command("check", MISTAKES, "--also", "leak", "--", "exits").findings) == 2


def test_free_of_memory_of_the_device_is_found_and_the_program_goes_on(command):
    ended = command("check", MISTAKES, "--", "free_by_host")
    [(line, rule, sentence)] = ended.findings
    assert (line, rule) == (line_of(case("free_by_host")), "invalid free")
    assert "use cudaFree" in sentence


@pytest.mark.parametrize(("name", "status"), [("exits", 5), ("aborts", 134)])
def test_the_programs_own_end_is_passed_on(command, name, status):
    assert command("run", MISTAKES, "--", name) == (status, "", "")


def test_an_assertion_of_the_host_ends_the_program_after_what_it_has_printed(command):
    status, out, err = command("check", MISTAKES, "--", "asserts")
    assert (status, out) == (134, "before\n")
    assert err.startswith("assertion failed: argc == 0\n")


@pytest.mark.parametrize(
    ("name", "rule", "place"), [("host_hangs", "hang", "the host hangs"), ("kernel_hangs", "spin", "waits(")]
)
def test_a_program_that_hangs_ends_with_its_line(command, name, rule, place):
    ended = command("check", MISTAKES, "--time-limit", "0.3", "--", name)
    line, found, _ = ended.findings[0]
    assert (ended.status, line, found) == (FOUND_IN_PROGRAM, line_of(place), rule)


def test_rules_can_be_left_out_and_findings_go_to_sarif(command, tmp_path):
    log = tmp_path / "log.sarif"
    command("check", MISTAKES, "--sarif", log, "--", "double_free")
    assert '"ruleId": "double-free"' in log.read_text(encoding="utf-8")
    assert command("check", MISTAKES, "--ignore", "double free", "--", "double_free").status == OWN_STATUS
    assert command("check", MISTAKES, "--ignore", "out of bounds", "--", "past_end").status == OWN_STATUS


def test_observe_prints_each_launch(command):
    out = command("observe", MISTAKES, "--", "right").out
    assert "launch 1:\nfill, 2 thread blocks of 64 threads" in out
    assert "launch 2:\ncopy, 1 thread blocks of 128 threads" in out


SEVERAL = ("several_main.cu", "several_kernel.cu", "several_host.cpp", "several_in_c.c")


def test_files_are_linked_to_one_program(command):
    ended = command("check", *SEVERAL, "--schedule", "4", "--", "5")
    assert ended[:2] == (10, "sum 35, counted 32\n")
    ended = command("check", *SEVERAL, "--", "5", "6")
    line, rule, sentence = ended.findings[0]
    assert (line, rule) == (line_of("// reads x", FOLDER / "several_kernel.cu"), "out of bounds")
    launch = line_of("scale<<<1, 64", FOLDER / "several_main.cu")
    assert f"in launch 1 of the program (line {launch})" in sentence
    assert "several_kernel.cu:" in ended.err


def test_a_missing_file_of_a_program_is_an_error(command):
    status, _, err = command("run", "several_main.cu", "several_kernel.cu")
    assert status == 2
    assert re.search(r"(sum_of\(float const\*, int\)|twice) is declared and has no body", err)
    assert command("run", "several_main.cu", "missing.cu")[0] == 2
    assert command("run", "several_kernel.cu", "several_host.cpp")[2].startswith(
        "error: none of these files has a main"
    )


def test_every_way_to_launch_and_every_kind_of_call(command):
    for mode in ("run", "check"):
        ended = command(mode, "features.cu")
        assert ended.out == (FOLDER / "features.out").read_text(encoding="utf-8")
        assert ended.status == FOUND_IN_PROGRAM  # a launch with too much shared memory, and one of no thread block
        assert [rule for _, rule, _ in ended.findings] == ["launch failed"] * 2


REFUSED = [
    ("#include <cublas_v2.h>\n", "", "the program includes <cublas_v2.h>, and cudascope does not have cuBLAS"),
    ("#include <curand.h>\n", "", "the host's side of cuRAND"),
    ("#include <thrust/device_vector.h>\n", "thrust::device_vector<int> v(3);", "thrust"),
    ("#include <mine.h>\n", "", "<mine.h>, which is not there: name the folder with --include"),
    ("", "cudaGraph_t g; cudaGraphCreate(&g, 0);", "cudaGraphCreate, and cudascope does not have this function"),
    ("texture<float, 1> t;\n", "", "textures"),
    ("#include <cuda.h>\n", "cuInit(0);", "cuInit, and cudascope does not have the CUDA driver API"),
    ("__global__ void k() {}\n__global__ void j() { k<<<1, 1>>>(); }\n", "j<<<1, 1>>>();", "runs on a GPU only"),
    ("__global__ void k(int* x) { *x = rand(); }\n", "k<<<1, 1>>>(nullptr);", "rand() is for host code only"),
    ("__global__ void k() { abort(); }\n", "k<<<1, 1>>>();", "refused.cu:2: error: abort() is for host code only"),
    ("__global__ void k() {}\n", "k();", "refused.cu:3: error: k is a kernel: launch it with k<<<grid, block>>>"),
    ("template <int N> __global__ void k() {}\n", "k<2><<<1, 1>>>(); k<2>();", "refused.cu:3: error: k is a kernel"),
]


@pytest.mark.parametrize(("before", "body", "part"), REFUSED, ids=lambda value: re.sub(r"\W+", "_", value)[:20])
def test_what_is_not_there_is_refused_with_a_sentence(command, tmp_path, before, body, part):
    file = tmp_path / "refused.cu"
    file.write_text(f"#include <cstdlib>\n{before}int main() {{ {body} }}\n", encoding="utf-8")
    status, out, err = command("run", file)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert part in err


NOT_KERNELS = {  # what the name of a kernel may also be
    "a function of a namespace": "std::fill(x, x + 4, 7);",
    "a function that using finds": "using namespace std; fill(x, x + 4, 7);",
    "a variable": "auto fill = [](int* x, int n) { *x = n; }; fill(x, 7);",
    "a pointer": "void (*fill)(int*, int) = set; fill(x, 7);",
    "a member": "Setter().fill(x, 7);",
}


@pytest.mark.parametrize("what", NOT_KERNELS)
def test_a_call_of_something_with_the_name_of_a_kernel_is_a_call(command, tmp_path, what):
    file = tmp_path / "names.cu"
    file.write_text(
        f"""#include <algorithm>
#include <cstdio>
__global__ void fill(int* x) {{ *x = 1; }}
void set(int* x, int n) {{ *x = n; }}
{"struct Setter { void fill(int* x, int n) { *x = n; } };" * (what == "a member")}
int main() {{
    int x[4];
    {{ {NOT_KERNELS[what]} }}
    printf("%d", *x);
    int* d;
    cudaMalloc(&d, 4), fill<<<1, 1>>>(d), cudaFree(d);
}}
""",
        encoding="utf-8",
    )
    assert command("run", file) == (0, "7", "")


def test_a_kernel_or_a_program_but_not_both(command):
    assert "--block belongs to a kernel" in command("run", "several_main.cu", "--block", "32").err
    assert "needs its block" in command("run", "several_main.cu", "count").err
    assert "name one of the kernels" in command("run", "several_kernel.cu").err
