"""The files of a kernel: compilers, reader, cache and findings agree on them, and a build is of what went into it."""

import contextlib
import itertools
import mmap
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cudascope
from conftest import ROOT
from cudascope import CompileError, CudaKernel
from cudascope.cpp.source import Source
from cudascope.cpu import build as cpu_build
from cudascope.cpu.build import Kept, build_key
from cudascope.cpu.library import load
from cudascope.toolchain import cache, headers, nvrtc, precompiled, ptxas
from cudascope.toolchain.cache import cache_dir, code_of, prune
from cudascope.toolchain.compiler import without_own_headers
from cudascope.toolchain.headers import is_foreign

THROUGH = pytest.mark.parametrize("through", ["c++", "ptx"])


def write(folder, files):
    """Write the text of each file, by its path in `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDASCOPE_CACHE", str(tmp_path / "cache"))
    return cache_dir()


def hexa(n):
    return f"{n:032x}"


def result(kernel, count=1):
    x = np.zeros(count, np.int32)
    kernel[1, 1](x)
    return x.tolist()


# ------------------------------------------------------------------------------------------------ where a file is found

LOOKED_UP = {  # by the name of a macro in the header: what it is if the right file is included
    "BESIDE": "a header beside the source, and another one in the current folder",
    "ABOVE": "a header above the source, and another one above the current folder",
    "NESTED": "a header beside the header that includes it, and another one beside the source",
    "LATER": "a header that is not beside the header that includes it but in a later folder, and beside the source",
    "FIRST": "a header in two folders of the command line",
    "MATH_FUNCTIONS": "a header beside the source that has the name of one of cudascope's",
    "PIPELINE": "a header in a user's folder that has the name of one of cudascope's",
    "BY_MACRO": "an include by a macro of the source",
    "GIVEN": "an include by a macro of the command line",
    "CALLED": "an include by a macro with parameters",
    "LINKED": "a header beside a link, and another one beside the file that is linked to",
    "IN_LINKED": "a header in a folder that is a link",
    "FROM_BELOW": "a header that only the source's folder has, for a header in another folder",
    "LENIENT": "a header in <> that only the source's folder has",
    "SYSTEM": "a header in <> that the system has, and the source's folder too",
}
SOURCE = """
#include "beside.h"
#include "../above.h"
#include "sub/nested.h"
#include <library.h>
#include <first.h>
#include "math_functions.h"
#include <cuda_pipeline.h>
#define NAME "by_macro.h"
#include NAME
#include GIVEN_NAME
#define STRING(name) #name
#include STRING(called.h)
#include "link.h"
#include "linked_folder/in_linked.h"
#include <lenient.h>
#include <cuda_runtime.h>
#include <string.h>
#ifndef SYSTEM
#define SYSTEM 1
#endif
__global__ void k(real* x) { int at = 0; VALUES }
""".replace("VALUES", " ".join(f"x[at++] = {name};" for name in LOOKED_UP))


@pytest.fixture(scope="module")
def project():
    """A source whose headers are there several times. Those with 1 are the right ones.

    The folder is the same in each run: the next one finds the builds, and leaves no precompiled header of its own.
    """
    root = ROOT / "build" / "tests" / os.environ.get("PYTEST_XDIST_WORKER", "alone") / "my project (2)"
    shutil.rmtree(root, ignore_errors=True)
    right = {
        "a/src/beside.h": "#define BESIDE 1\nusing real = int;",
        "a/above.h": "#define ABOVE 1",
        "a/src/sub/nested.h": '#include "name.h"',
        "a/src/sub/name.h": '#define NESTED 1\n#include "from_below.h"',
        "a/src/from_below.h": "#define FROM_BELOW 1",
        "one/library.h": '#include "later.h"',
        "two/later.h": "#define LATER 1",
        "one/first.h": "#define FIRST 1",
        "a/src/math_functions.h": "#define MATH_FUNCTIONS 1",
        "two/cuda_pipeline.h": "#define PIPELINE 1",
        "a/src/by_macro.h": "#define BY_MACRO 1",
        "two/given.h": "#define GIVEN 1",
        "a/src/called.h": "#define CALLED 1",
        "a/src/near.h": "#define LINKED 1",
        "elsewhere/in_linked.h": '#include "../elsewhere/deep.h"',
        "elsewhere/deep.h": "#define IN_LINKED 1",
        "a/src/lenient.h": "#define LENIENT 1",
    }
    wrong = {
        "b/cwd/beside.h": "#define BESIDE 2\nusing real = double;",
        "b/above.h": "#define ABOVE 2",
        "a/src/name.h": "#define NESTED 2",
        "b/cwd/name.h": "#define NESTED 3",
        "a/src/later.h": "#define LATER 2",
        "b/cwd/later.h": "#define LATER 3",
        "two/first.h": "#define FIRST 2",
        "b/cwd/by_macro.h": "#define BY_MACRO 2",
        "b/cwd/given.h": "#define GIVEN 2",
        "b/cwd/called.h": "#define CALLED 2",
        "elsewhere/near.h": "#define LINKED 2",
        "elsewhere/link.h": '#include "near.h"',
        "a/src/simt.h": "#error the runner's",
        "b/cwd/simt.h": "#error the runner's",
        "a/src/string.h": "#define SYSTEM 2",
    }
    write(root, {"a/src/k.cu": SOURCE, "a/src/cut.cu": SOURCE + "void host() { k<<<1, 1>>>(0); }", **right, **wrong})
    (root / "a/src/link.h").symlink_to("../../elsewhere/link.h")
    (root / "a/src/linked_folder").symlink_to("../../elsewhere")
    return root


def in_project(project, monkeypatch, source, through):
    """The kernel, given from one folder by relative paths, and launched in another one."""
    monkeypatch.chdir(project)
    options = ["-Ione", "-I two", f"-I{headers.nvidia_headers()}"]  # NVIDIA's come after cudascope's
    kernel = CudaKernel(source, "k", defines=['GIVEN_NAME="given.h"'], options=options, through=through)
    monkeypatch.chdir(project / "b/cwd")
    return kernel


@pytest.mark.slow
@pytest.mark.parametrize(("file", "through"), [("k.cu", "c++"), ("cut.cu", "c++"), ("cut.cu", "ptx")])
def test_each_include_gives_the_file_that_every_compiler_takes(file, through, project, monkeypatch):
    kernel = in_project(project, monkeypatch, f"a/src/{file}", through)
    assert dict(zip(LOOKED_UP, result(kernel, len(LOOKED_UP)), strict=True)) == dict.fromkeys(LOOKED_UP, 1)
    assert kernel.parameters[0].ctype == "int", "the reader takes the same file"


@THROUGH
def test_a_source_that_is_a_link_includes_from_the_folder_of_the_link(through, tmp_path):
    write(tmp_path, {"real/k.cu": '#include "n.h"\n__global__ void k(int* x) { *x = N; }'})
    write(tmp_path, {"real/n.h": "#define N 2", "links/n.h": "#define N 1"})
    (tmp_path / "links/k.cu").symlink_to("../real/k.cu")
    assert result(CudaKernel(tmp_path / "links/k.cu", "k", through=through)) == [1]


@pytest.mark.slow
def test_a_text_includes_from_the_folder_in_which_the_kernel_was_made(tmp_path, monkeypatch):
    text = '#include "n.h"\n__global__ void k(int* x) { *x = N; }'
    write(tmp_path, {f"{n}/n.h": f"#define N {n}" for n in (41, 42)})
    kernels = []
    for n in (41, 42):
        monkeypatch.chdir(tmp_path / str(n))
        kernels.append(CudaKernel(text, "k"))
    assert [result(kernel) for kernel in reversed(kernels)] == [[42], [41]]
    by_nvrtc = [nvrtc.compile_ptx(kernel.source, "k", "sm_80").text for kernel in reversed(kernels)]
    assert [re.findall(r"\s(4[12]);", ptx) for ptx in by_nvrtc] == [["42"], ["41"]]


def test_the_build_of_a_text_without_headers_is_the_same_in_every_folder(tmp_path, monkeypatch):
    paths = set()
    for n in range(3):
        (tmp_path / str(n)).mkdir()
        monkeypatch.chdir(tmp_path / str(n))
        kernel = CudaKernel("#include <math.h>\n__global__ void here(int* x) { *x = 1; x[7] = 2; }", "here")
        with pytest.raises(cudascope.Finding) as raised, cudascope.check():
            kernel[1, 1](np.zeros(1, np.int32))
        assert (raised.value.file, raised.value.line) == ("here.cu", 2)
        paths.add(kernel._on_cpu.library(True).path)
    assert len(paths) == 1


@THROUGH
def test_an_absolute_name_is_that_file_and_the_file_stays_as_it_is(through, tmp_path):
    write(tmp_path, {"n.h": "#define N 4\n", "m.h": "#define M 3\n"})
    source = f'#include <{tmp_path}/n.h>\n#include "{tmp_path}/m.h"\n__global__ void k(int* x) {{ *x = 10 * N + M; }}'
    assert result(CudaKernel(source, "k", through=through)) == [43]
    assert (tmp_path / "n.h").read_text() == "#define N 4\n"


# ----------------------------------------------------------------------------------------------- what makes a build new


def changes(root):
    """Change the files of a project again and again. Yield what the kernel then gives."""
    yield 1
    write(root, {"src/n.h": '#include "deep.h"\n#define N 2'})
    yield 2  # the content of a header
    write(root, {"src/deep.h": "#define MORE 10"})
    yield 12  # the content of a header's header
    write(root, {"one/m.h": "#define M 100"})
    yield 112  # a header that appears in an earlier folder
    write(root, {"src/m.h": "#define M 200"})
    yield 212  # and beside the source
    write(root, {"src/option.h": ""})
    yield 1212  # the answer of __has_include
    write(root, {"src/called.h": "#define CALLED 10000"})
    yield 11212  # a header of which the text does not tell the name
    write(root, {"one/late.h": "#define LATE 100000"})
    yield 111212  # and one that appears in an earlier folder
    (root / "src/m.h").unlink()
    yield 111112  # a header goes


CHANGING = """
#include "n.h"
#ifndef MORE
#define MORE 0
#endif
#include "m.h"
#define STRING(name) #name
#include STRING(called.h)
#include STRING(late.h)
#if __has_include("option.h")
#define OPTION 1000
#else
#define OPTION 0
#endif
__global__ void k(int* x) { *x = N + MORE + M + OPTION + CALLED + LATE; }
"""


@pytest.fixture
def changing(tmp_path):
    write(tmp_path, {"src/k.cu": CHANGING, "src/n.h": "#define N 1", "src/deep.h": "#define MORE 0", "one/none.h": ""})
    write(tmp_path, {"two/m.h": "#define M 0", "src/called.h": "#define CALLED 0", "two/late.h": "#define LATE 0"})
    return lambda: CudaKernel(tmp_path / "src/k.cu", "k", options=[f"-I{tmp_path}/one", f"-I{tmp_path}/two"])


@pytest.mark.slow
def test_a_change_of_any_file_that_decides_is_a_new_build(changing, tmp_path):
    for expected in changes(tmp_path):
        assert result(changing()) == [expected]


@pytest.mark.slow
def test_a_change_of_any_file_that_decides_is_a_new_result_of_nvrtc(changing, tmp_path):
    for expected in changes(tmp_path):
        assert re.search(rf"\s{expected};", nvrtc.compile_ptx(changing().source, "k", "sm_80").text)


def test_a_build_is_found_again_without_the_compiler(changing, tmp_path, monkeypatch):
    assert result(changing()) == [1]
    monkeypatch.setattr(cpu_build, "run_compiler", None)
    kernel = changing()
    assert result(kernel) == [1]
    opened = ("src/n.h", "two/m.h", "src/called.h", "two/late.h")
    assert kernel._on_cpu.library(False).files == tuple(f"{tmp_path}/{name}" for name in opened)


def test_what_ptxas_said_is_found_again_for_the_same_text_and_gpu_alone(own_cache, monkeypatch):
    empty = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n"
    shared = empty.replace("{", "{ .shared .align 4 .b8 tile[64];")
    runs, real = [], ptxas.run_ptxas
    monkeypatch.setattr(ptxas, "run_ptxas", lambda *args: runs.append(args) or real(*args))
    for _ in range(2):  # the second time as in another process
        ptxas.resources_of.cache_clear()
        found = [
            ptxas.resources_of(ptxas.PtxText(text, "k", "sm_80"), sm) for text in (empty, shared) for sm in (80, 90)
        ]
        assert [each.shared_bytes for each in found] == [0, 0, 64, 64]
        assert ptxas.resources_of(ptxas.PtxText("no PTX", "k", "sm_80"), 80) is None
    assert len(runs) == 4 + 2, "a failure is not kept"
    monkeypatch.setattr(cache, "_IN_DOUBT", -1)
    prune(max_age=-1)
    assert not [*own_cache.glob("*.ptxas")]
    monkeypatch.setattr(ptxas, "_program", lambda *_: None)
    ptxas.resources_of.cache_clear()
    assert ptxas.resources_of(ptxas.PtxText(empty, "k", "sm_80"), 80) is None


@pytest.mark.slow
def test_a_missing_header_that_is_installed_is_a_new_build(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_build, "_OF_SYSTEM", (tmp_path / "system",))
    code = "#include <lacking_here.h>\n__global__ void k(int* x) { if (*x) { *x = lacking(); } }"
    source = f"// {tmp_path}: an earlier run looked for the header elsewhere\n{code}"
    kernel = CudaKernel(source, "k")
    assert result(kernel) == [0]
    first = kernel._on_cpu.library(False).path
    assert CudaKernel(source, "k")._on_cpu.library(False).path == first
    write(tmp_path, {"system/lacking_here.h": "__device__ int lacking() { return 3; }"})
    assert CudaKernel(source, "k")._on_cpu.library(False).path != first


def test_the_compilers_flags_and_its_environment_are_parts_of_the_key(monkeypatch):
    keys = [build_key()]
    for name, value in (("CXX", "g++ -DX"), ("CPATH", "/opt/include"), ("CPLUS_INCLUDE_PATH", "/opt/include")):
        monkeypatch.setenv(name, value)
        keys.append(build_key())
    assert all(one != other for one, other in itertools.combinations(keys, 2))


@pytest.mark.slow
def test_a_build_has_the_same_keys_in_every_process():
    code = textwrap.dedent("""
        import hashlib, types
        from cudascope import CudaKernel
        from cudascope.toolchain import cache, nvrtc
        made = []
        cache.hashlib = types.SimpleNamespace(sha256=lambda: made.append(hashlib.sha256()) or made[-1])
        text = "template <class T> __global__ void k(T* x) { *x = 1; }"
        for through in ("c++", "ptx"):
            kernel = CudaKernel(text, "k<int>", through=through)
            for instrumented in (False, True):
                kernel._on_cpu.library(instrumented)
        nvrtc.compile_cubin(kernel.source, "k<int>", "sm_80")
        print(*(each.hexdigest() for each in made))
    """)
    command = [sys.executable, "-c", code]
    first, second = (  # the order in a set follows from the seed
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        for seed in ("1", "2")
    )
    keys = set(second.stdout.split())
    assert len(keys) > 5
    assert keys <= set(first.stdout.split())  # the first process may have made builds, and then had more keys


@pytest.fixture
def copied_package(tmp_path, monkeypatch):
    """A copy of the package, whose code and headers make the keys."""
    package = tmp_path / "cudascope"
    shutil.copytree(cache._PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    monkeypatch.setattr(headers, "_OURS", tuple(package / each.relative_to(cache._PACKAGE) for each in headers._OURS))
    monkeypatch.setattr(headers, "_HERE", package / "toolchain")
    monkeypatch.setattr(cache, "_PACKAGE", package)

    def keys():
        for cached in (cache._modules, code_of, headers.our_headers):
            cached.cache_clear()
        return build_key(), nvrtc._environment.__wrapped__()

    yield package, keys
    monkeypatch.undo()
    keys()


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        *((f"{name}.py", (True, False)) for name in ("arguments/launch_shape", "toolchain/compiler", "cpu/library")),
        *((f"translate/{name}.py", (True, False)) for name in ("assembly", "shifts", "ptx/matrix", "entry_points")),
        *((f"cpp/{name}.py", (True, True)) for name in ("signature", "file", "types", "variables", "source")),
        ("toolchain/nvrtc.py", (False, True)),
        ("watch/findings.py", (False, False)),
        *(
            (f"cpu/{name}", (True, True))
            for name in ("include/simt/shifts.h", "runtime/check.h", "include/cuda/barrier")
        ),
        ("toolchain/include/math.h", (True, True)),
        ("toolchain/stand_ins/cudascope_torch.h", (True, True)),
    ],
)
def test_the_code_that_makes_a_build_is_a_part_of_its_key(file, changed, copied_package):
    package, keys = copied_package
    before = keys()
    with (package / file).open("a") as opened:
        opened.write("\n")
    assert tuple(one != other for one, other in zip(before, keys(), strict=True)) == changed


@pytest.mark.slow
@THROUGH
def test_all_code_that_runs_for_a_build_is_in_its_key(through, monkeypatch):
    cpu_build.runtime()
    monkeypatch.setattr(cpu_build, "runtime_built_meanwhile", contextlib.nullcontext)
    new = f"#include <lacks.h>\n// {os.urandom(8).hex()}\nvoid host() {{ k<<<1, 1>>>(0); }}\n"
    code = 'template <class T> __global__ void k(T* x) { asm("mov.u32 %0, 1;" : "=r"(*x)); }'
    source = CudaKernel(new + code, "k<int>").source
    ran = set()
    sys.setprofile(lambda frame, event, arg: ran.add(frame.f_code.co_filename))
    try:
        if through == "c++":
            cpu_build.build(source, "k<int>", instrumented=False)
        else:
            nvrtc.compile_ptx(source, "k<int>", "sm_80")
    finally:
        sys.setprofile(None)
    digested, names = set(), [cpu_build.__name__ if through == "c++" else nvrtc.__name__]
    for name in names:
        if (path := cache._modules().get(name)) and path not in digested:
            digested.add(path)
            names += cache._read(name)[1]
    ran = {file for file in ran if Path(file).is_relative_to(cache._PACKAGE)}
    assert len(ran) > 8
    assert ran <= digested


# ------------------------------------------------------------------------------------------------ whose file it is


@pytest.mark.slow
@THROUGH
def test_findings_name_the_file_of_the_line(through, tmp_path):
    folders = ("sub", "headers-v2", "precompiled-mine", "cudascope/stand_ins", "cpu/include", "a (discriminator 1)")
    files = {
        f"{folder}/tile.cu": "\n" * (n + 1) + f"__device__ inline void f{n}(int* x) {{ x[{n + 5}] = {n}; }}\n"
        for n, folder in enumerate(folders)
    }
    includes = "".join(f'#include "{name}"\n' for name in files)
    calls = " ".join(f"f{n}(x);" for n in range(len(files)))
    write(tmp_path, {**files, "tile.cu": f"{includes}__global__ void tile(int* x) {{\n{calls}\nx[4] = 0; }}\n"})
    with cudascope.check(stop=False) as report:
        CudaKernel(tmp_path / "tile.cu", "tile", through=through)[1, 1](np.zeros(4, np.int32))
    found = {(str(Path(each.file).relative_to(tmp_path)), each.line) for each in report.findings}
    assert found == {*((name, n + 2) for n, name in enumerate(files)), ("tile.cu", len(files) + 3)}
    assert next(str(each) for each in report.findings if "sub" in each.file).startswith("tile, line 2 ")
    if through == "c++":
        (own,) = [each for each in report.findings if each.file == str(tmp_path / "tile.cu")]
        assert "`x[4] = 0; }`" in str(own)


@THROUGH
def test_a_text_that_includes_a_file_with_its_name_has_another_name(through, tmp_path, monkeypatch):
    write(tmp_path, {"tile.cu": "\n\n__device__ void f(int* x) { x[5] = 1; }"})
    monkeypatch.chdir(tmp_path)
    kernel = CudaKernel(
        '#include "tile.cu"\n__global__ void tile(int* x) { f(x);\nx[6] = 2; }', "tile", through=through
    )
    with cudascope.check(stop=False) as report:
        kernel[1, 1](np.zeros(4, np.int32))
    assert {(each.file, each.line) for each in report.findings} == {(f"{tmp_path}/tile.cu", 3), ("tile.text.cu", 3)}


@pytest.mark.slow
def test_an_error_in_a_users_folder_is_where_it_is(tmp_path):
    folder = "headers-v2 (discriminator 1)"
    write(tmp_path, {f"{folder}/broken.h": "\n\n__device__ int f() { return undeclared; }\n"})
    write(tmp_path, {"k.cu": f'#include "{folder}/broken.h"\n__global__ void k(int* x) {{ *x = f(); }}'})
    with pytest.raises(CompileError) as raised:
        CudaKernel(tmp_path / "k.cu", "k").compile()
    assert f"{tmp_path}/{folder}/broken.h:3:29: error: ‘undeclared’" in str(raised.value)


def test_folders_are_told_apart_by_their_whole_names(monkeypatch):
    kept = cache_dir()
    name = "0" * 32
    foreign = [headers.HEADERS / "simt.h", headers.STAND_INS / "ATen/x.h", headers.FOR_NVRTC / "math.h", "<built-in>"]
    foreign += [kept / f"headers-{name}/cuda_fp16.h", kept / f"precompiled-{name}/simt.h"]
    foreign += [headers.nvidia_headers() / "cuda_fp16.h"]
    assert all(is_foreign(str(each)) for each in foreign)
    own = [f"{headers.HEADERS}-v2/simt.h", f"{headers.STAND_INS}2/x.h", f"{headers.nvidia_headers()}s/x.h", "/usr/x.cu"]
    own += [
        kept / "headers-v2/x.h",
        kept / f"headers-{name}x/x.h",
        f"/a/headers-{name}/x.h",
        kept / "sources/x.cu",
        kept,
    ]
    assert not any(is_foreign(str(each)) for each in own)


def test_messages_keep_a_users_folder_with_nearly_the_name_of_ours():
    said = "/my/headers-v2/tile.h:7:3: error: expected ‘;’\n/my/cudascope/stand_ins/x.h:1:1: note: here"
    assert without_own_headers(said, "k.cu") == said


@pytest.mark.slow
def test_a_shift_in_a_header_is_exact_where_its_name_is_not_ascii(tmp_path):
    write(tmp_path, {"hä/f.h": "__device__ inline int f(int n) { return 1 << n; }"})
    write(tmp_path, {"ü.cu": '#include "hä/f.h"\n__global__ void k(int* x) { *x = f(*x + 40) + 5; }'})
    assert result(CudaKernel(tmp_path / "ü.cu", "k")) == [5]


# ---------------------------------------------------------------------------------------- processes that are killed


@pytest.fixture
def compiling(own_cache, monkeypatch):
    """A compiler that precompiles at once. The first of `ends` is what it does instead."""
    ends, calls = [], []

    def run(command):
        calls.append(command)
        if ends:
            raise ends.pop(0)
        Path(command[-1]).write_text("precompiled")

    monkeypatch.setattr(precompiled, "run_compiler", run)
    precompiled.precompiled([])  # the first build goes without
    (folder,) = own_cache.glob("precompiled-*")
    return folder, ends, calls


@pytest.mark.parametrize("left", ["begun", "lock", "simt.h", ".cudascope-abc"])
def test_a_header_is_precompiled_whatever_a_killed_process_left(left, compiling):
    folder, _, _ = compiling
    (folder / left).touch()
    assert precompiled.precompiled([]) == folder / "simt.h"
    assert (folder / "simt.h.gch").read_text() == "precompiled"
    assert (folder / "simt.h").read_text().startswith("#include")


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(), MemoryError()])
def test_a_header_is_precompiled_after_a_process_that_was_interrupted(end, compiling):
    folder, ends, calls = compiling
    ends.append(end)
    with pytest.raises(type(end)):
        precompiled.precompiled([])
    assert precompiled.precompiled([]) == folder / "simt.h"
    assert len(calls) == 2


def test_a_header_that_cannot_be_precompiled_is_tried_again_after_a_day(compiling):
    folder, ends, calls = compiling
    ends += [CompileError("it does not fit into the memory")]
    assert [precompiled.precompiled([]) for _ in range(2)] == 2 * [headers.HEADERS / "simt.h"]
    assert len(calls) == 1
    os.utime(folder / "refused", (0, 0))
    assert precompiled.precompiled([]) == folder / "simt.h"


def test_a_process_does_not_wait_for_another_one_that_precompiles(compiling):
    folder, _, calls = compiling
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, folder / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        assert precompiled.precompiled([]) == headers.HEADERS / "simt.h"
        other.kill()
    assert not calls
    assert precompiled.precompiled([]) == folder / "simt.h"


@pytest.mark.parametrize("content", ["", "[[", "{}", "null", "[]"])
def test_a_build_whose_list_of_files_is_damaged_is_not_found(content, own_cache, tmp_path):
    write(tmp_path, {"made.so": "machine code", "n.h": ""})
    kept = Kept("k", hexa(1))
    kept.keep(tmp_path / "made.so", [f"{tmp_path}/n.h"], [])
    assert kept.found()
    (own_cache / f"{hexa(1)}.files").write_text(content)
    assert kept.found() is None


def test_a_damaged_list_of_symbols_is_made_again():
    kernel = CudaKernel("__global__ void damaged(int* x) { __shared__ int s[4]; s[0] = *x; *x = s[0] + 4; }", "damaged")
    symbols = kernel._on_cpu.library(False).path.with_suffix(".json")
    whole = symbols.read_text()
    for content in ("", "[[", whole[:-5]):
        symbols.write_text(content)
        load.cache_clear()
        assert result(CudaKernel(kernel.source.text, "damaged")) == [4]
        assert symbols.read_text() == whole


# ------------------------------------------------------------------------------------------------ the cache stays small

DAY = 24 * 3600


def entry(folder, name, *, days, size=10):
    """A build, or what looks like one, that was used so many days ago."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    inside = path
    if path.suffix == "" and not path.name.startswith("."):
        path.mkdir()
        inside = path / "file"
    inside.write_bytes(bytes(size))
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def left(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "pruned"}


def test_old_builds_of_all_kinds_go_and_files_of_others_stay(own_cache):
    kinds = ("k-{}.so", "k-{}.json", "k-{}-instrumented.so", "{}.files", "simt_runtime-{}.lock", "t-{}.triton.json")
    kinds += ("cubin/{}.cubin", "ptx/{}.ptx", "headers-{}", "precompiled-{}", ".cudascope-{}")
    for kind, age in itertools.product(kinds, (40, 0.1)):
        entry(own_cache, kind.format(hexa(int(age))), days=age)
    theirs = ("notes.txt", "k-123.so", f"{hexa(3)}.tar", "headers-v2", "sources/x.cu", f"data/{hexa(3)}.cubin", "k.so")
    for name in theirs:
        entry(own_cache, name, days=400)
    prune()
    young = {kind.format(hexa(0)) for kind in kinds if not kind.startswith(".")}
    assert {name.removesuffix("/file") for name in left(own_cache)} == {*young, *theirs}


def test_the_oldest_builds_go_first_until_the_cache_is_small(own_cache):
    for n in range(8):
        entry(own_cache, f"k-{hexa(n)}.so", days=8 - n, size=100)
        entry(own_cache, f"k-{hexa(n)}.json", days=20, size=100)  # goes with its library
    prune(max_bytes=650)
    assert left(own_cache) == {f"k-{hexa(n)}.{kind}" for n in (5, 6, 7) for kind in ("so", "json")}
    prune(max_bytes=650)
    assert len(left(own_cache)) == 6


def test_what_was_used_in_the_last_hour_stays(own_cache):
    entry(own_cache, f"k-{hexa(0)}.so", days=0.02)
    entry(own_cache, f"k-{hexa(1)}.so", days=0.2)
    cache.used(entry(own_cache, f"k-{hexa(2)}.so", days=100))
    entry(own_cache, ".cudascope-young", days=0.02)
    prune(max_bytes=0, max_age=0)
    assert left(own_cache) == {f"k-{hexa(0)}.so", f"k-{hexa(2)}.so", ".cudascope-young"}


def test_a_precompiled_header_goes_after_a_day(own_cache):
    for n, days in enumerate((0.9, 1.1)):
        entry(own_cache, f"precompiled-{hexa(n)}", days=days)
        entry(own_cache, f"headers-{hexa(n)}", days=days)
    prune()
    assert left(own_cache) == {
        f"{kind}-{hexa(n)}/file" for kind, n in (("precompiled", 0), ("headers", 0), ("headers", 1))
    }


@pytest.mark.parametrize("by", ["this process", "another one"])
def test_a_build_that_a_process_has_loaded_stays_until_the_process_ends(by, own_cache, tmp_path):
    path = entry(own_cache, f"k-{hexa(1)}.so", days=100)
    code = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); print(1, flush=True)"
    code += "; input()"
    (tmp_path / "link").symlink_to(own_cache)
    if by == "this process":
        with path.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        prune()
        assert path.exists()
        mapped.close()
    else:
        with subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "link" / path.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            other.stdout.readline()
            prune()
            assert path.exists()
            other.kill()
    prune()
    assert not path.exists()


@pytest.mark.slow
def test_several_may_prune_at_once(own_cache):
    for n in range(200):
        entry(own_cache, f"k-{hexa(n)}.so", days=n)
        if n % 5 == 0:
            entry(own_cache, f"headers-{hexa(n)}", days=n)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: prune(), range(8)))
    assert max(int(name[-35:-3], 16) for name in left(own_cache) if name.endswith(".so")) == 29
    assert not list(own_cache.glob(".cudascope-*"))


def test_a_build_prunes_the_cache_once_an_hour(own_cache, monkeypatch):
    pruned = []
    monkeypatch.setattr(cache, "prune", lambda: pruned.append(1))
    for expected in (1, 1):
        cache.prune_at_times()
        assert len(pruned) == expected
    os.utime(own_cache / "pruned", (time.time() - 4000,) * 2)
    cache.prune_at_times()
    assert len(pruned) == 2


def test_a_use_of_a_build_is_noted(own_cache):
    kernel = CudaKernel("__global__ void noted(int* x) { *x = 1; }", "noted")
    kernel.resources()
    (cubin,) = own_cache.glob("cubin/*")
    os.utime(cubin, (0, 0))
    CudaKernel(kernel.source.text, "noted").resources()
    assert cubin.stat().st_mtime > time.time() - 60


# ------------------------------------------------------------------------------------------------ what cannot be told


def test_a_result_of_nvrtc_is_not_kept_if_the_text_does_not_tell_its_files(own_cache, tmp_path):
    write(
        tmp_path,
        {"n.h": "#define N 1", "k.cu": "#define S(x) #x\n#include S(n.h)\n__global__ void k(int* x) { *x = N; }"},
    )
    CudaKernel(tmp_path / "k.cu", "k").resources()
    assert not list(own_cache.glob("cubin/*"))


def test_a_result_of_nvrtc_is_not_kept_if_a_file_changes_meanwhile(own_cache, tmp_path, monkeypatch):
    write(tmp_path, {"n.h": "#define N 1", "k.cu": '#include "n.h"\n__global__ void k(int* x) { *x = N; }'})
    compile_now = nvrtc._compile

    def slowly(*args):
        write(tmp_path, {"n.h": "#define N 2"})
        return compile_now(*args)

    monkeypatch.setattr(nvrtc, "_compile", slowly)
    CudaKernel(tmp_path / "k.cu", "k").resources()
    assert not list(own_cache.glob("cubin/*"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('#include "a.h"', ["a.h"]),
        ('#  include \\\n  "a.h"', ["a.h"]),
        ('/* b.h */ # /* */ include /**/ "a.h" // b.h', ["a.h"]),
        ("#include <b.h>", ["b.h"]),
        ('#define H "a.h"\n#include H', ["a.h"]),
        ('#ifdef X\n#define H "a.h"\n#else\n#define H "b.h"\n#endif\n#include H', ["a.h", "b.h"]),
        ('#import "a.h"', ["a.h"]),
        ("#define S(x) #x\n#include S(a.h)", None),
        ("#include GIVEN", ["a.h"]),
        ("#include NOWHERE", None),
        ('#define H OTHER\n#define OTHER "a.h"\n#include H', None),
        ("#include_next <a.h>", None),
        ('#include "none.h"', []),
        ("#include <a.h>", ["a.h"]),
        ("#include <../x.h>", []),
        ("#include <vector>", []),
    ],
)
def test_the_text_tells_its_files_or_says_that_it_does_not(text, expected, tmp_path):
    write(tmp_path, {"a.h": "int a;", "one/b.h": "int b;"})
    included = Source(text, "k.cu", tmp_path, ('GIVEN="a.h"',), (f"-I{tmp_path}/one",)).with_included()
    assert included.is_unread == (expected is None)
    if expected is not None:
        assert sorted(path.name for path, _ in included.files) == expected


def test_a_link_to_a_file_is_another_file_because_its_folder_decides_what_it_includes(tmp_path):
    write(tmp_path, {"sub/x.h": '#include "y.h"', "sub/y.h": "int sub;", "y.h": "int here;"})
    (tmp_path / "x.h").symlink_to("sub/x.h")
    source = Source('#include "sub/x.h"\n#include "x.h"', "k.cu", tmp_path, (), ())
    assert [str(path.relative_to(tmp_path)) for path, _ in source.included()] == ["sub/x.h", "sub/y.h", "x.h", "y.h"]


def test_a_text_whose_folder_is_gone_is_refused_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    kernel = CudaKernel(f"// {os.urandom(8).hex()}\n__global__ void k(int* x) {{ *x = 1; }}", "k")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").rmdir()
    with pytest.raises(
        CompileError, match=f"the folder from which the source includes is not there any more: {tmp_path}/gone"
    ):
        kernel.compile()
