"""`cudascope`: what a shell and CI get to see."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from cudascope import CudaKernel
from cudascope.arguments.arrays import bits_of, numbers_of
from cudascope.command.given import given_tensor, given_value
from cudascope.command.line import main
from cudascope.cpu.rules import RULES

FOLDER = Path(__file__).parent
MISSING_BARRIER = (
    "planted_bugs.cu", "missing_barrier", "--grid", "3", "--block", "128", "--tensor", "in=float32[3,128]",
    "--tensor", "out=float32[3,128]:output",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _beside_the_kernels(monkeypatch):
    monkeypatch.chdir(FOLDER)


def line_of(text: str) -> int:
    """The first line of the planted bugs that contains `text`."""
    lines = (FOLDER / "planted_bugs.cu").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def checked(*arguments: str, capsys) -> tuple[int, str, str]:
    try:
        status = main(["check", *arguments])
    except SystemExit as ended:  # argparse cannot read an option
        status = ended.code
    return status, *capsys.readouterr()


def test_a_clean_kernel_has_status_0(capsys):
    status, out, _ = checked(*MISSING_BARRIER, "--scalar", "planted=false", "--schedule", "0..4", capsys=capsys)
    assert (status, out) == (0, "missing_barrier: no findings in 5 schedules\n")


def test_a_finding_has_status_1_and_is_said_once_with_both_lines_as_compilers_say_it(capsys):
    status, out, _ = checked(*MISSING_BARRIER, "--scalar", "planted=true", "--schedule", "0..4", capsys=capsys)
    write, read = line_of("row[threadIdx.x] = in"), line_of("= row[THREADS - 1")
    assert status == 1
    first, *code, last = out.splitlines()
    place, rule, _ = first.split(": ", 2)
    assert place in (f"planted_bugs.cu:{write}", f"planted_bugs.cu:{read}")
    assert rule == "race"
    assert {int(line.split("|")[0]) for line in code} == {write, read}
    assert last == "missing_barrier: 1 finding in 5 schedules"


def test_what_is_ignored_is_no_finding(capsys):
    status, out, _ = checked(*MISSING_BARRIER, "--scalar", "planted=true", "--ignore", "race", capsys=capsys)
    assert (status, out) == (0, "missing_barrier: no findings in 1 schedule\n")


def test_an_output_that_is_not_all_written_is_a_finding(capsys):
    short = ["out=float32[4,128]:output" if "out=" in argument else argument for argument in MISSING_BARRIER]
    status, out, _ = checked(*short, "--scalar", "planted=false", capsys=capsys)
    assert status == 1
    assert "no thread writes 128 of the 512 elements of out, the first of them out[3, 0]" in out


@pytest.mark.slow
def test_a_kernel_that_hangs_is_a_finding_that_says_who_waits_where(capsys):
    command = ["never_hangs.cu", "barrier_behind_a_spin", "--block", "64", "--scalar", "n=0"]
    tensors = [f"--tensor={name}=float32[64]" for name in ("x", "out")]
    status, out, _ = checked(*command, *tensors, "--tensor=flag=int32[1]:zeros", capsys=capsys)
    assert status == 1
    assert ": spin: thread (0, 0, 0) of thread block (0, 0, 0) polls the volatile flag[0] for ever" in out
    assert "thread (32, 0, 0) and 31 more in line" in out


def test_a_kernel_that_reaches_what_only_a_gpu_has_is_status_2_and_no_mistake_of_the_kernel(capsys, tmp_path):
    kernel = '__global__ void waits(int n) { if (n > 0) asm volatile("tcgen05.wait::ld.sync.aligned;"); }'
    (tmp_path / "waits.cu").write_text(kernel)
    command = [str(tmp_path / "waits.cu"), "waits", "--block", "32"]
    assert checked(*command, "--scalar", "n=0", capsys=capsys)[0] == 0
    status, out, _ = checked(*command, "--scalar", "n=1", capsys=capsys)
    assert status == 2
    assert ":1: not supported: thread (0, 0, 0) of thread block (0, 0, 0) stopped: inline PTX: " in out


def test_the_status_is_the_processes_own():
    command = [sys.executable, "-m", "cudascope", "check", *MISSING_BARRIER, "--scalar", "planted=true"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "race" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["planted_bugs.cu", "missing_barrier", "--block", "128", "--tensor", "in=float32[3,128]"],
         "--tensor out=DTYPE[SIZES]   for `float* out`\n  --scalar planted=VALUE   for `bool planted`"),
        ([*MISSING_BARRIER, "--scalar", "plant=true"], "no parameter 'plant': it has in, out, planted"),
        ([*MISSING_BARRIER, "--scalar", "planted=1"], "planted must be True or False"),
        (["planted_bugs.cu", "--block", "128"], "missing_barrier(const float* __restrict__ in,"),
        (["planted_bugs.cu", "nothing", "--block", "128"], "has no kernel 'nothing'"),
        (["nothing.cu", "nothing", "--block", "128"], "there is no file"),
        ([*MISSING_BARRIER, "--scalar", "planted=true", "--ignore", "races"], "got 'races'"),
        ([*MISSING_BARRIER, "--scalar", "planted=true", "--ignore", "deadlock"], "got 'deadlock'"),
        ([*MISSING_BARRIER, "--scalar", "planted=true", "--include", "/nope"], "'-I/nope' names no folder"),
        ([*MISSING_BARRIER, "--scalar", "planted=true", "--option=-fbogus"], "'-fbogus' is not known here"),
        ([*MISSING_BARRIER, "--scalar", "planted=true", "--option=--std"], "lacks its value, as in --std=c++17"),
        ([*MISSING_BARRIER, "--scalar", "planted=true", "--tensor", "in=float32[3]"], "'in' is given 2 times"),
        ([*MISSING_BARRIER, "--scalar", "planted=true", "--scalar", "planted=false"], "'planted' is given 2 times"),
        ([*MISSING_BARRIER, "--tensor", "x=float33[4]"], "the dtype must be one of bfloat16"),
        ([*MISSING_BARRIER, "--tensor", "x=float32[4]:many"], "the contents must be random"),
        ([*MISSING_BARRIER, "--tensor", "x=float32[99999999999999]"], "allocate"),
        ([*MISSING_BARRIER, "--tensor", "x=nothing.npy"], "nor a .npy file"),
        ([*MISSING_BARRIER, "--tensor", "float32[4]"], "must be NAME=DTYPE[SIZES]"),
        ([*MISSING_BARRIER, "--scalar", "n=many"], "must be NAME=VALUE"),
        ([*MISSING_BARRIER, "--grid", "2,"], "one to three numbers"),
        ([*MISSING_BARRIER, "--schedule", "0...4"], "must be seeds"),
        ([*MISSING_BARRIER, "--schedule", "5..2"], "the lower one first"),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_has_status_2_and_says_what_to_do(arguments, sentence, capsys):
    status, out, err = checked(*arguments, capsys=capsys)
    assert (status, out) == (2, "")
    assert sentence in err


def test_contents_of_tensors(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 4]], dtype=np.int16))
    expected = {
        "x=int32[2,2]:arange": np.array([[0, 1], [2, 3]], dtype=np.int32),
        "x=float16[3]:0.5": np.array([0.5] * 3, dtype=np.float16),
        "x=bool[2]:ones:output": np.array([True, True]),
        f"x={tmp_path}/x.npy": np.array([[1, 2], [3, 4]], dtype=np.int16),
    }
    for text, array in expected.items():
        given = given_tensor(text)
        assert given.name == "x"
        assert given.is_output == text.endswith("output")
        made = given.make()
        assert made.dtype == array.dtype.name == made.owner.dtype.name
        np.testing.assert_array_equal(made.owner, array)
    assert given_tensor("x=null").make() is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_type_that_numpy_lacks_comes_as_its_bits(dtype):
    made = given_tensor(f"x={dtype}[300]").make()
    values = np.random.default_rng(zlib.crc32(b"x")).standard_normal(300)
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    assert made.dtype == dtype
    np.testing.assert_array_equal(made.owner, expected.view(torch.uint16 if dtype == "bfloat16" else torch.uint8))


def test_values_of_scalars_vectors_and_structs():
    values = {"7": 7, "-0x1e": -30, "0.5": 0.5, "1e-3": 0.001, "inf": float("inf"), "true": True, "1,2.5": (1, 2.5)}
    assert {text: given_value(f"n={text}")[1] for text in values} == values
    assert [type(given_value(f"n={text}")[1]) for text in ("7", "7.0", "true")] == [int, float, bool]
    assert given_value("pair=hex:01000000 ff") == ("pair", b"\x01\0\0\0\xff")


def test_tensors_of_one_shape_have_different_random_contents_the_same_in_each_run():
    x, y, again = (given_tensor(text).make().owner for text in ("x=float32[64]", "y=float32[64]", "x=float32[64]"))
    assert np.array_equal(x, again)
    assert not np.array_equal(x, y)
    few = given_tensor("x=int32[1000]:below=3").make().owner
    assert set(few.tolist()) == {0, 1, 2}


def test_sarif_names_rule_file_and_both_lines(capsys, tmp_path):
    arguments = [*MISSING_BARRIER, "--scalar", "planted=true", "--sarif", str(tmp_path / "log.sarif")]
    assert checked(*arguments, capsys=capsys)[0] == 1
    log = json.loads((tmp_path / "log.sarif").read_text())
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    (result,) = run["results"]
    rules = run["tool"]["driver"]["rules"]
    assert result["ruleId"] == rules[result["ruleIndex"]]["id"] == "race"
    places = [each["physicalLocation"] for each in (*result["locations"], *result["relatedLocations"])]
    assert {place["artifactLocation"]["uri"] for place in places} == {"planted_bugs.cu"}
    lines = {place["region"]["startLine"] for place in places}
    assert lines == {line_of("row[threadIdx.x] = in"), line_of("= row[THREADS - 1")}
    assert result["message"]["text"].startswith("missing_barrier: thread (")


def test_sarif_of_a_clean_run_has_all_rules_and_no_results(capsys, tmp_path):
    arguments = [*MISSING_BARRIER, "--scalar", "planted=false", "--sarif", str(tmp_path / "log.sarif")]
    assert checked(*arguments, capsys=capsys)[0] == 0
    (run,) = json.loads((tmp_path / "log.sarif").read_text())["runs"]
    assert run["results"] == []
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(ids)) == len(ids)
    assert {rule.name.replace(" ", "-") for rule in RULES.values()} < set(ids)


def test_observe_prints_the_table_of_lines(capsys):
    status = main(["observe", *MISSING_BARRIER, "--scalar", "planted=false"])
    out = capsys.readouterr().out
    assert status == 0
    assert out.startswith("missing_barrier, 3 thread blocks of 128 threads\n line access")
    # 3 thread blocks × 4 warps write 32 floats each
    assert f"{line_of('row[threadIdx.x] = in'):5} write shared          12     1,536" in out


SCALE = """
__global__ void scale(const float* x, float* out, int* calls, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a * x[i];
    if (i == 0) calls[0] += 1;
}
"""
RUN_SCALE = (
    "run", "scale.cu", "scale", "--grid", "2", "--block", "16", "--tensor", "x=float32[3,10]:arange", "--tensor",
    "out=float32[3,10]:output", "--tensor", "calls=int32[1]:6", "--scalar", "a=0.5", "--scalar", "n=30",
)  # fmt: skip


@pytest.fixture
def scale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scale.cu").write_text(SCALE)


@pytest.mark.usefixtures("scale")
def test_run_prints_the_tensors_that_the_kernel_may_write(capsys):
    assert main(RUN_SCALE) == 0
    shown = "out = float32[3,10]: 0.0 0.5 1.0 1.5 … 13.0 13.5 14.0 14.5\ncalls = int32[1]: 7\n"
    assert capsys.readouterr().out == shown


@pytest.mark.usefixtures("scale")
def test_run_saves_tensors(capsys):
    assert main([*RUN_SCALE, "--save", "out=result.npy", "--save", "x=x.npy"]) == 0
    saved = "x = float32[3,10]: saved in x.npy\nout = float32[3,10]: saved in result.npy\ncalls = int32[1]: 7\n"
    assert capsys.readouterr().out == saved
    np.testing.assert_array_equal(np.load("result.npy"), np.arange(30, dtype=np.float32).reshape(3, 10) / 2)


@pytest.mark.usefixtures("scale")
def test_run_refuses_to_save_what_is_no_tensor_before_the_launch(capsys):
    assert main([*RUN_SCALE, "--save", "n=n.npy"]) == 2
    told = capsys.readouterr()
    assert told.err == "error: --save n: the kernel has no such tensor: name one of x, out, calls\n"
    assert told.out == ""
    with pytest.raises(SystemExit):
        main([*RUN_SCALE, "--save", "out=result.txt"])
    assert "must be NAME=FILE.npy" in capsys.readouterr().err


def test_run_says_what_ended_a_launch(capsys, tmp_path):
    (tmp_path / "fails.cu").write_text("#include <cassert>\n__global__ void fails(int* x) { assert(x[0] == 1); }\n")
    command = ["run", str(tmp_path / "fails.cu"), "fails", "--block", "1", "--tensor", "x=int32[1]:0"]
    assert main(command) == 1
    assert "fails.cu:2: assertion: thread (0, 0, 0) of thread block (0, 0, 0) stopped" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_are_rounded_as_torch_rounds_them(dtype):
    kind, code = getattr(torch, dtype), torch.uint8 if "8_" in dtype else torch.uint16
    codes = torch.arange(128 if code is torch.uint8 else 1 << 15).to(code).view(kind).float()
    known = codes[codes.isfinite()].numpy()
    middle = known[1:] / 2 + known[:-1] / 2
    values = np.concatenate([known, middle, middle * np.float32(1 + 2**-20), middle * np.float32(1 - 2**-20)])
    values = np.concatenate([values, -values])
    expected = torch.from_numpy(values).to(kind).view(code).numpy()
    np.testing.assert_array_equal(bits_of(values.astype(np.float64), dtype), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_of_a_type_that_numpy_lacks_are_torchs(dtype):
    word = np.uint16 if dtype == "bfloat16" else np.uint8
    bits = np.arange(np.iinfo(word).max + 1).astype(word)
    expected = torch.from_numpy(bits).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(numbers_of(bits, dtype), expected)


def test_list_prints_kernels_as_they_are_declared(capsys):
    assert main(["list", "softmax.cu"]) == 0
    assert capsys.readouterr().out == (
        "template <typename T, int THREADS = 128> "
        "softmax(const T* __restrict__ x, T* __restrict__ out, int n, float scale)\n"
    )


def test_list_finds_kernels_that_a_macro_makes(capsys, tmp_path):
    (tmp_path / "made.cu").write_text("#define MAKE(name) __global__ void name(int* x) {}\nMAKE(one)\nMAKE(two)\n")
    assert main(["list", str(tmp_path / "made.cu")]) == 0
    assert capsys.readouterr().out == "one(int* x)\ntwo(int* x)\n"


def test_arguments_with_a_default_may_be_left_out(capsys, tmp_path):
    (tmp_path / "fill.cu").write_text(
        "__global__ void fill(float* x, int n, float value = 2, int step = 1) {\n"
        "    for (int i = threadIdx.x; i < n; i += 32 * step) x[i] = value;\n}\n"
    )
    command = [str(tmp_path / "fill.cu"), "fill", "--block", "32", "--tensor", "x=float32[70]:output"]
    assert checked(*command, "--scalar", "n=70", capsys=capsys)[0] == 0
    assert checked(*command, "--scalar", "n=70", "--scalar", "value=3", capsys=capsys)[0] == 0
    status, _, err = checked(*command, "--scalar", "step=2", capsys=capsys)
    assert (status, "--scalar n=VALUE" in err, "--scalar value=VALUE" in err) == (2, True, True)


LATIN = b'#include "h.h"\n// gr\xfc\xdfe \x85\n__global__ void k(int* x) {\n    x[ONE * 5] = 1;  // \xfc\n}\n'


@pytest.mark.slow
@pytest.mark.parametrize("host", [b"", b"void host() { k<<<1, 1>>>(0); }\n"], ids=["whole", "cut"])
def test_a_file_in_latin_1_with_a_name_in_latin_1_is_read(host, capsysbinary, tmp_path):
    file = os.fsdecode(os.fsencode(tmp_path) + b"/\xfc.cu")
    Path(file).write_bytes(LATIN + host)
    (tmp_path / "h.h").write_bytes(b"// \xfc\n#define ONE 1\n")
    command = [file, "k", "--block=1", "--tensor=x=int32[4]", f"--sarif={tmp_path}/log.sarif"]
    assert main(["check", *command]) == 1
    out = capsysbinary.readouterr().out
    assert b".cu:4: out of bounds: " in out
    assert "\n    4 |     x[ONE * 5] = 1;  // ü\n".encode() in out
    assert "/%FC.cu" in (tmp_path / "log.sarif").read_text()
    assert main(["list", file]) == 0


@pytest.mark.parametrize("host", ["", "void host() { k<<<1, 1>>>(0); }\n"], ids=["whole", "cut"])
def test_a_byte_order_mark_is_not_part_of_the_source(host, capsys, tmp_path):
    text = f"__global__ void k(int* x) {{ x[0] = 1; }}\n{host}"
    (tmp_path / "k.cu").write_text(text, encoding="utf-8-sig")
    assert checked(f"{tmp_path}/k.cu", "k", "--block=1", "--tensor=x=int32[1]:output", capsys=capsys)[0] == 0
    x = np.zeros(1, dtype=np.int32)
    CudaKernel(f"\ufeff{text}", "k")[1, 1](x)
    assert x[0] == 1


def test_a_file_in_utf_16_is_refused_by_its_name(capsys, tmp_path):
    (tmp_path / "k.cu").write_text("__global__ void k(int* x) {}\n", encoding="utf-16")
    status, out, err = checked(f"{tmp_path}/k.cu", "k", "--block=1", capsys=capsys)
    assert (status, out) == (2, "")
    assert f"{tmp_path}/k.cu is written in UTF-16" in err


def test_listing_a_file_that_is_not_there_names_the_file(capsys):
    assert main(["list", "nothing.cu"]) == 2
    assert f"there is no file {FOLDER}/nothing.cu" in capsys.readouterr().err
