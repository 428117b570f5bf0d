"""CUDA kernels on the CPU: what the runner supports, what it counts, what it catches."""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from source_files import file_of

import cudascope
from cudascope import CudaKernel
from cudascope.cpp.source import CompileError
from cudascope.cpu import abi as simt_abi
from cudascope.cpu import build as simt_build
from cudascope.cpu.build import runtime
from cudascope.cpu.rules import FLAGS
from cudascope.toolchain.compiler import find_compiler, run_compiler, without_own_headers
from cudascope.toolchain.headers import HEADERS, RUNTIME

SCHEDULES = [None, *range(5)]

# ------------------------------------------------------------------------------------------------ support

SUPPORTED = r"""#include <cuda_fp16.h>
__constant__ float weights[3] = {1.0f, 10.0f, 100.0f};
__device__ int counter = 5;

__global__ void indices(int* out) {  // [gridDim.z, gridDim.y, gridDim.x, blockDim.z, blockDim.y, blockDim.x, 2]
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int i = block * blockDim.x * blockDim.y * blockDim.z + thread;
    out[2 * i] = block, out[2 * i + 1] = thread;
}

__global__ void barriers_that_count(int* out) {
    int odd = threadIdx.x % 2;
    int count = __syncthreads_count(odd), all = __syncthreads_and(odd), any = __syncthreads_or(odd);
    int really_all = __syncthreads_and(threadIdx.x < 1000), none = __syncthreads_or(threadIdx.x > 1000);
    int* mine = out + 5 * threadIdx.x;
    mine[0] = count, mine[1] = all, mine[2] = any, mine[3] = really_all, mine[4] = none;
}

__global__ void shuffles(int* out) {  // [8, 32]
    int lane = threadIdx.x;
    unsigned full = 0xffffffff;
    out[lane] = __shfl_sync(full, lane, 5);
    out[32 + lane] = __shfl_sync(full, lane, lane + 1, 8);
    out[64 + lane] = __shfl_up_sync(full, lane, 3);
    out[96 + lane] = __shfl_down_sync(full, lane, 3, 16);
    out[128 + lane] = __shfl_xor_sync(full, lane, 9);
    out[160 + lane] = (int)__shfl_sync(full, 0.5 * lane, 6);
    out[192 + lane] = (int)__half2float(__shfl_xor_sync(full, __float2half(lane), 1));
    long long wide = __shfl_down_sync(full, (long long)lane << 32, 1);
    out[224 + lane] = (int)wide + (int)(wide >> 32);
}

__global__ void votes(unsigned* out) {  // [11, 32]
    unsigned lane = threadIdx.x, full = 0xffffffff;
    out[lane] = __ballot_sync(full, lane % 3 == 0);
    out[32 + lane] = __any_sync(full, lane == 7) * 2 + __all_sync(full, lane < 32);
    if (lane < 8) out[64 + lane] = __activemask();
    else out[64 + lane] = __activemask();
    if (lane >= 20) out[96 + lane] = __ballot_sync(0xfff00000, lane > 25);
    out[128 + lane] = __reduce_add_sync(full, lane);
    out[160 + lane] = __reduce_max_sync(full, lane ^ 5);
    out[192 + lane] = __reduce_min_sync(full, (int)lane - 7);
    out[224 + lane] = __reduce_or_sync(full, 1u << lane) & __reduce_and_sync(full, ~lane);
    out[224 + lane] += __reduce_xor_sync(full, lane);
    out[256 + lane] = __match_any_sync(full, lane / 4);
    int all;
    out[288 + lane] = __match_all_sync(full, 7, &all) + all;
    __syncwarp();
    out[320 + lane] = warpSize;
}

__global__ void atomics(int* i, float* f, unsigned* u, __half2* h, unsigned long long* l) {
    atomicAdd(&i[0], 1);
    atomicMax(&i[1], (int)threadIdx.x);
    atomicMin(&i[2], -(int)threadIdx.x);
    atomicSub(&i[3], 2);
    atomicExch(&i[4], 77);
    atomicCAS(&i[5], 0, 9);
    atomicAdd(f, 0.5f);
    atomicMax(&u[0], threadIdx.x);
    atomicOr(&u[1], 1u << threadIdx.x % 32);
    atomicInc(&u[2], 9);
    atomicAdd(h, __floats2half2_rn(1.0f, 2.0f));
    atomicAdd(l, 1ull << 33);
    __shared__ int shared;
    if (threadIdx.x == 0) shared = 0;
    __syncthreads();
    atomicAdd(&shared, 1);
    __syncthreads();
    if (threadIdx.x == 0) i[6 + blockIdx.x] = shared;
}

__global__ void constants(float* out) { out[threadIdx.x] = weights[threadIdx.x] + counter; }
__global__ void speak(int n, const float*) {
    if (threadIdx.x == 0) printf("block %d of %d says %s %.1f\n", blockIdx.x, n, "hi", 0.5);
}
__global__ void sum(const float* x, float* out) {
    __shared__ float part[128];
    part[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (int distance = 64; distance > 0; distance /= 2) {
        if (threadIdx.x < distance) part[threadIdx.x] += part[threadIdx.x + distance];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}
"""


def run(source: str, name: str, grid, block, *, shared_bytes: int = 0, **arguments) -> None:
    CudaKernel(file_of(source), name)[grid, block, shared_bytes](*arguments.values())


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "block"), [(3, 5), ((2, 3), (4, 2)), ((2, 1, 2), (3, 2, 2)), (1, 1024), ((1, 2), (32, 32))]
)
def test_indices_in_one_to_three_dimensions(grid, block):
    blocks, threads = (int(np.prod(dims)) for dims in (grid, block))
    out = zeros(blocks, threads, 2, dtype=torch.int32)
    run(SUPPORTED, "indices", grid, block, out=out)
    assert torch.equal(out[..., 0], torch.arange(blocks, dtype=torch.int32)[:, None].expand(blocks, threads))
    assert torch.equal(out[..., 1], torch.arange(threads, dtype=torch.int32).expand(blocks, threads))


@pytest.mark.slow
def test_barriers_that_count_and_vote():
    out = zeros(70, 5, dtype=torch.int32)
    run(SUPPORTED, "barriers_that_count", 1, 70, out=out)
    assert torch.equal(out, torch.tensor([35, 0, 1, 1, 0], dtype=torch.int32).expand(70, 5))


@pytest.mark.parametrize("seed", SCHEDULES)
def test_shuffles(seed):
    out, lane = zeros(8, 32, dtype=torch.int32), torch.arange(32)
    with cudascope.schedule(seed):
        run(SUPPORTED, "shuffles", 1, 32, out=out)
    down = torch.where(lane % 16 + 3 < 16, lane + 3, lane)
    expected = [
        torch.full((32,), 5), lane // 8 * 8 + (lane + 1) % 8, torch.where(lane >= 3, lane - 3, lane), down, lane ^ 9,
        torch.full((32,), 3), lane ^ 1, torch.clamp(lane + 1, max=31),
    ]  # fmt: skip
    assert torch.equal(out, torch.stack(expected).int())


def parts(masks, branches):
    """`masks` if they part the lanes of each branch, else the lanes of the branches."""
    for lane, (mask, branch) in enumerate(zip(masks.tolist(), branches.tolist(), strict=True)):
        same = sum(1 << other for other, its in enumerate(masks.tolist()) if its == mask)
        if same != mask or not mask >> lane & 1 or mask & ~branch:
            return branches
    return masks


@pytest.mark.parametrize("seed", SCHEDULES)
def test_votes_reductions_and_active_lanes(seed):
    out, lane = zeros(11, 32, dtype=torch.int32), torch.arange(32)
    with cudascope.schedule(seed):
        run(SUPPORTED, "votes", 1, 32, out=out)
    expected = [
        sum(1 << i for i in range(0, 32, 3)), 3, torch.where(lane < 8, 0xFF, 0xFFFFFF00),
        torch.where(lane >= 20, 0xFC000000, 0), 496, 31, 2**32 - 7, 0xFFFFFFE0, 0xF << lane // 4 * 4, 0, 32,
    ]  # fmt: skip
    if seed is not None:
        expected[2] = parts(out[2].long() & 0xFFFFFFFF, expected[2])
    for row, values in enumerate(expected):
        assert torch.equal(out[row].long() & 0xFFFFFFFF, torch.as_tensor(values).expand(32)), row


@pytest.mark.parametrize("seed", SCHEDULES)
def test_atomics(seed):
    i, f, u = zeros(10, dtype=torch.int32), zeros(1), zeros(3, dtype=torch.int32)
    h, l = zeros(2, dtype=torch.float16), zeros(1, dtype=torch.int64)
    with cudascope.schedule(seed):
        run(SUPPORTED, "atomics", 4, 64, i=i, f=f, u=u, h=h, l=l)
    assert i.tolist() == [256, 63, -63, -512, 77, 9, 64, 64, 64, 64]
    assert f.item() == 128
    assert u.tolist() == [63, -1, 6]
    assert h.tolist() == [256, 512]
    assert l.item() == 256 << 33


@pytest.mark.slow
def test_constant_memory_and_device_variables():
    out = zeros(3)
    for context in (cudascope.schedule(None), cudascope.observe(), cudascope.check()):
        with context:
            run(SUPPORTED, "constants", 1, 3, out=out)
        assert out.tolist() == [6, 15, 105]


def test_printf_goes_to_pythons_stdout_in_the_order_of_the_thread_blocks(capsys):
    run(SUPPORTED, "speak", 20, 32, n=20, on_the_cpu=zeros(1))
    assert capsys.readouterr().out.splitlines() == [f"block {b} of 20 says hi 0.5" for b in range(20)]


@pytest.mark.slow
def test_launches_from_several_python_threads_do_not_meet():
    x = torch.randn(4, 100 * 128)
    outs = [zeros(100) for _ in range(4)]

    def launch(i: int) -> None:
        for _ in range(5):
            with cudascope.check() if i == 0 else cudascope.schedule(i):
                run(SUPPORTED, "sum", 100, 128, x=x[i], out=outs[i])

    launch(0)
    threads = [threading.Thread(target=launch, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, out in enumerate(outs):
        torch.testing.assert_close(out, x[i].view(100, 128).sum(1))


# ------------------------------------------------------------------------------------------------ compiling


def test_an_error_in_a_function_of_cuda_is_at_the_users_line_and_names_no_header_of_the_runner():
    source = """
        __device__ float shuffled(float4 a) { return __shfl_sync(~0u, a, 0).x; }
        __global__ void k(float* x) {
            shuffled(float4{});
            atomicAdd(x, "a");
            __reduce_add_sync(~0u, x[0]);
            __stcs(x, "a");
        }"""
    with pytest.raises(CompileError) as raised:
        CudaKernel(source, "k").compile("cpu")
    message = str(raised.value)
    for line, why in ((2, "static assertion failed"), (5, "no matching"), (6, "ambiguous"), (7, "to ‘float’")):
        assert re.search(rf"k.cu:{line}:\d+: error: .*{why}", message), message
    assert not re.search(r"simt|<cudascope>", message), message


def test_messages_about_own_headers_go_in_a_folder_whose_name_has_a_space(monkeypatch):
    headers = "/my course/src/cudascope/cpu/include"
    monkeypatch.setattr("cudascope.toolchain.headers._OURS", (Path(headers),))
    said = f"""\
/my course/my kernel.cu: In function ‘void k(float*)’:
my kernel.cu:5:22: error: no matching function for call to ‘atomicAdd(float*&, const char [2])’
{headers}/simt/atomics.h:36:13: note: candidate: ‘T atomicAdd(T*, value_of<T>)’
   36 | SIMT_ATOMIC(atomicAdd, old + value)
{headers}/simt/warp.h: In instantiation of ‘uint64_t bits(const T&)’:
/my course/my kernel.cu:6:22:   required from here
{headers}/simt/warp.h:76:29: error: static assertion failed"""
    assert without_own_headers(said, "my kernel.cu").splitlines() == [
        "/my course/my kernel.cu: In function ‘void k(float*)’:",
        "my kernel.cu:5:22: error: no matching function for call to ‘atomicAdd(float*&, const char [2])’",
        "/my course/my kernel.cu:6:22: error: static assertion failed",
    ]


def test_the_compiler_speaks_english_in_every_locale(monkeypatch):
    """A header is missing where the compiler says so, and in German it says: Datei oder Verzeichnis nicht gefunden."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    assert run_compiler(["sh", "-c", "echo $LC_ALL $LANGUAGE"]) == "C.UTF-8\n"


@pytest.mark.slow
def test_two_processes_may_compile_at_once(tmp_path):
    program = (
        "import numpy\nfrom cudascope import CudaKernel\nx = numpy.zeros(1, numpy.float32)\n"
        "kernel = CudaKernel('__global__ void k(float* x) { x[0] += 1; }', 'k')\n"
        "kernel[1, 1](x)\nprint(x.item(), kernel.resources().spilled_bytes)"
    )
    environment = {**os.environ, "CUDASCOPE_CACHE": str(tmp_path)}
    shutil.copy(runtime()._name, tmp_path)  # which takes longest of all
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["1.0 0\n", "1.0 0\n"]
    unfinished = [path for path in tmp_path.rglob("*") if path.name.startswith(("tmp", "."))]
    assert unfinished == []


def test_the_runtime_is_compiled_once_though_two_ask_for_it(tmp_path, monkeypatch):
    calls = []

    def compile_slowly(limits, path):
        calls.append(str(path))
        time.sleep(0.3)
        path.touch()

    monkeypatch.setenv("CUDASCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr(simt_build, "_compile_runtime", compile_slowly)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: str(simt_build._runtime_file.__wrapped__()), range(2)))
    assert both == 2 * calls


# ------------------------------------------------------------------------------------------------ observing

OBSERVED = r"""#include <cuda_fp16.h>
__global__ void strided(const float* x, float* out, int stride) {
    out[threadIdx.x] = x[stride * threadIdx.x];  // load and store
}
__global__ void vectors(const float4* x, float4* out) {
    out[threadIdx.x] = x[threadIdx.x];  // 16 bytes
}
__global__ void halves(const __half2* x, __half2* out) {
    out[threadIdx.x] = x[threadIdx.x];  // 4 bytes
}
__global__ void banks(float* out, int stride) {
    __shared__ float row[32 * 33];
    row[stride * threadIdx.x] = 1.0f;  // store
    __syncthreads();
    out[threadIdx.x] = row[stride * threadIdx.x];  // load
}
__global__ void vector_banks(float4* out, int stride) {
    extern __shared__ float4 wide[];
    wide[stride * threadIdx.x] = make_float4(1, 2, 3, 4);  // store
    __syncwarp();
    out[threadIdx.x] = wide[stride * threadIdx.x];
}
__global__ void double_banks(double* out, int stride) {
    __shared__ double row[32 * 17];
    row[stride * threadIdx.x] = 1.0;  // store
    __syncthreads();
    out[threadIdx.x] = row[0];  // broadcast
}
__global__ void collectives(float* out, int* bins) {
    float v = threadIdx.x;
    for (int distance = 16; distance > 0; distance /= 2)
        v += __shfl_xor_sync(0xffffffff, v, distance);  // shuffle
    __syncthreads();  // barrier
    atomicAdd(&bins[threadIdx.x % 4], 1);  // atomic
    if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = v;
}
__device__ float load(const float* x, int i) {
    return x[i];  // inner
}
__global__ void calls(const float* x, float* out) {
    out[threadIdx.x] = load(x, threadIdx.x) + __ldg(x + threadIdx.x);  // outer
}
"""


def line_of(source: str, comment: str, after: str = "") -> int:
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if after in line)
    return next(i for i, line in enumerate(lines[start:], start + 1) if line.endswith(f"// {comment}"))


def observed(name: str, grid, block, **arguments):
    with cudascope.observe() as report:
        run(OBSERVED, name, grid, block, **arguments)
    (launch,) = report.launches
    return launch


@pytest.mark.parametrize(
    ("stride", "offset", "sectors"),
    [(1, 0, 4), (1, 1, 5), (1, 4, 5), (1, 7, 5), (2, 0, 8), (8, 0, 32), (32, 0, 32), (0, 0, 1)],
)
def test_sectors_of_a_strided_load(stride, offset, sectors):
    x, out = torch.randn(32 * 32 + offset)[offset:], zeros(32)
    launch = observed("strided", 1, 32, x=x, out=out, stride=stride)
    assert torch.equal(out, x[torch.arange(32) * stride])
    line = line_of(OBSERVED, "load and store")
    assert [each[:7] for each in launch.lines] == [
        (line, "read", "global", 1, 32, 128, sectors), (line, "write", "global", 1, 32, 128, 4),
    ]  # fmt: skip


def test_a_load_of_sixteen_bytes_is_one_request_of_sixteen_sectors():
    x, out = torch.randn(32, 4), zeros(32, 4)
    launch = observed("vectors", 2, 32, x=x, out=out)
    for access in ("read", "write"):
        assert launch.count(access, "global")[3:7] == (2, 64, 1024, 32)
    assert (launch.trace["bytes"] == 16).all()
    out, x = zeros(64, dtype=torch.float16), torch.randn(64).half()
    launch = observed("halves", 1, 32, x=x, out=out)
    assert torch.equal(x, out)
    for access in ("read", "write"):
        assert launch.count(access, "global")[3:7] == (1, 32, 128, 4)


@pytest.mark.parametrize(
    ("name", "dtype", "lane", "conflicts"),
    [
        ("banks", torch.float32, 1, {1: 0, 2: 1, 3: 0, 4: 3, 16: 15, 32: 31, 33: 0, 0: 0}),
        # 8 bytes a lane are served in halves of a warp.
        ("double_banks", torch.float64, 1, {1: 0, 2: 2, 16: 30, 17: 0}),
        # 16 bytes a lane are served in quarters of a warp. Stride 1: eight lanes cover the 32 banks. Stride 2: lanes i
        # and i + 4 of a quarter meet: one more turn each. Stride 8: all eight lanes of a quarter meet: 7 more turns.
        ("vector_banks", torch.float32, 4, {1: 0, 2: 4, 8: 28}),
    ],
)
def test_bank_conflicts_of_a_stride(name, dtype, lane, conflicts):
    for stride, number in conflicts.items():
        out = zeros(32 * lane, dtype=dtype)
        launch = observed(name, 1, 32, out=out, stride=stride, shared_bytes=4096 * (lane == 4))
        stored = launch.count("write", "shared", line_of(OBSERVED, "store", f"void {name}"))
        assert (stored.bank_conflicts, *stored[3:6]) == (number, 1, 32, 32 * lane * dtype.itemsize), stride
        assert launch.count("read", "shared").bank_conflicts == (0 if name == "double_banks" else number), stride


def test_barriers_shuffles_and_atomics_are_counted():
    out, bins = zeros(2), zeros(4, dtype=torch.int32)
    launch = observed("collectives", 3, 64, out=out, bins=bins)
    assert bins.tolist() == [48] * 4
    assert (launch.barriers, launch.shuffles, launch.atomics) == (3, 3 * 2 * 5, 3 * 64)
    lines = {access: line_of(OBSERVED, access) for access in ("barrier", "shuffle", "atomic")}
    for access, line in lines.items():
        assert launch.count(access, line=line) == launch.count(access)._replace(line=line)
    assert launch.count("atomic", "global").requests == 6


def test_an_access_in_a_device_function_has_the_functions_line():
    launch = observed("calls", 1, 32, x=torch.randn(32), out=zeros(32))
    lines = {(each.line, each.access) for each in launch.lines}
    assert lines >= {(line_of(OBSERVED, "inner"), "read"), (line_of(OBSERVED, "outer"), "write")}
    assert {line for line, _ in lines} <= {line_of(OBSERVED, "inner"), line_of(OBSERVED, "outer")}


def test_the_trace_tells_who_touched_what():
    launch = observed("strided", 2, 40, x=torch.randn(200), out=zeros(40), stride=5)
    reads = launch.accesses("x")
    assert len(reads) == 80
    assert (reads["access"] == "read").all()
    first = reads[reads["thread_block"] == 0]
    assert (first["element"] == 5 * np.arange(40)).all()
    assert (first["warp"] == np.arange(40) // 32).all()
    assert (first["lane"] == np.arange(40) % 32).all()
    assert (np.sort(launch.trace["order"]) == np.arange(160)).all()
    assert (launch.accesses("out")["element"].reshape(2, 40) == np.arange(40)).all()
    with cudascope.observe(trace_limit=10) as report:
        run(OBSERVED, "strided", 1, 32, x=torch.randn(32), out=zeros(32), stride=1)
    assert len(report.trace) == 10
    assert report.count().lanes == 64


def test_a_report_prints_as_a_table():
    launch = observed("banks", 1, (32, 32), out=zeros(32 * 32), stride=32)
    assert re.search(r"read shared\s+32\s+4,096\s+992\s+out\[threadIdx", str(launch))
    assert str(launch).startswith("banks, 1 thread blocks of 32 × 32 threads")


# ------------------------------------------------------------------------------------------------ checking

# Each kernel is right with bad = 0 and wrong in the marked line with bad = 1.
CHECKED = r"""
__global__ void past_the_end(const float* x, float* out, int n, int bad) {
    int i = threadIdx.x;
    if (i < n) out[i] = x[i + bad];  // past_the_end
}
__global__ void far_away(const float* x, float* out, int n, int bad) {
    if (threadIdx.x < n) out[threadIdx.x] = x[threadIdx.x + bad * 123456789ll];  // far_away
}
__global__ void before(const float* x, float* out, int n, int bad) {
    if (threadIdx.x < n) out[(int)threadIdx.x - bad] = x[threadIdx.x];  // before
}
__global__ void past_shared(const float* x, float* out, int n, int bad) {
    __shared__ float row[64];
    row[threadIdx.x + bad] = 1.0f;  // past_shared
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = row[bad + threadIdx.x] * x[threadIdx.x];
}
__global__ void into_the_next(const float* x, float* out, int n, int bad) {
    __shared__ float one[64], two[64];
    two[threadIdx.x] = 1.0f;
    if (threadIdx.x % 2 == 0) *(float2*)&one[threadIdx.x + 2 * bad] = make_float2(1, 2);  // into_the_next
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = one[threadIdx.x + bad] * two[threadIdx.x];
}
__global__ void past_dynamic(const float* x, float* out, int n, int bad) {
    extern __shared__ float dynamic[];
    dynamic[threadIdx.x + bad] = 1.0f;  // past_dynamic
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = dynamic[threadIdx.x] * x[threadIdx.x];
}
__global__ void no_barrier(const float* x, float* out, int n, int bad) {
    __shared__ float row[64];
    row[threadIdx.x] = 2.0f;  // no_barrier also
    if (!bad) __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = row[threadIdx.x ^ 32] * x[threadIdx.x];  // no_barrier
}
__global__ void no_second_barrier(const float* x, float* out, int n, int bad) {
    __shared__ float one;
    float total = 0;
    for (int i = 0; i < 4; ++i) {
        if (threadIdx.x == i) one = x[i];  // no_second_barrier
        __syncthreads();
        total += one;  // no_second_barrier also
        __syncwarp();  // in the threads' own order, both warps have read before the next store
        if (!bad) __syncthreads();
    }
    if (threadIdx.x < n) out[threadIdx.x] = total;
}
__global__ void no_syncwarp(const float* x, float* out, int n, int bad) {
    __shared__ float row[64];
    row[threadIdx.x] = 2.0f;  // no_syncwarp also
    if (bad) __shfl_sync(0xffffffff, 1, 0);  // orders no memory
    else __syncwarp();
    if (threadIdx.x < n) out[threadIdx.x] = row[threadIdx.x ^ 1] * x[threadIdx.x];  // no_syncwarp
}
__global__ void branch(const float* x, float* out, int n, int bad) {
    if (threadIdx.x % 2 || !bad)
        __syncthreads();  // branch also
    else
        __syncthreads();  // branch
    if (threadIdx.x < n) out[threadIdx.x] = x[threadIdx.x];
}
__global__ void gone_lane(const float* x, float* out, int n, int bad) {
    if (bad && threadIdx.x % 32 == 31) return;
    float v = __shfl_down_sync(0xffffffff, x[threadIdx.x % n], 1);  // gone_lane
    if (threadIdx.x < n) out[threadIdx.x] = v;
}
__global__ void not_in_mask(const float* x, float* out, int n, int bad) {
    float v = 0;
    if (threadIdx.x % 32 < 16) v = __shfl_down_sync(0x0000ffff, x[threadIdx.x % n], bad ? 1 : 0);  // not_in_mask
    if (threadIdx.x < n) out[threadIdx.x] = v;
}
__global__ void unwritten_shared(const float* x, float* out, int n, int bad) {
    __shared__ float row[64];
    if (threadIdx.x < 64 - bad) row[threadIdx.x] = x[threadIdx.x % n];
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = row[63 - threadIdx.x];  // unwritten_shared
}
__global__ void unwritten_output(const float* x, float* out, int n, int bad) {
    if (threadIdx.x >= n) return;
    if (!bad) out[threadIdx.x] = 0;
    out[threadIdx.x] += x[threadIdx.x];  // unwritten_output
}
__device__ int total;
__device__ float kept[64];
__global__ void past_variable(const float* x, float* out, int n, int bad) {
    kept[threadIdx.x + bad] = 1;  // past_variable
}
__global__ void variable_without_barrier(const float* x, float* out, int n, int bad) {
    kept[threadIdx.x] = x[threadIdx.x % n];  // variable_without_barrier also
    if (!bad) __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = kept[63 - threadIdx.x];  // variable_without_barrier
}
__global__ void plain_count(const float* x, float* out, int n, int bad) {
    if (bad) total += n;  // plain_count
    else atomicAdd(&total, n);
}
__global__ void deadlock(const float* x, float* out, int n, int bad) {
    float v = 1;
    if (threadIdx.x % 32 == 3 && bad) __syncthreads();  // deadlock also
    else v = __shfl_xor_sync(0xffffffff, v, 1);  // deadlock
    if (threadIdx.x < n) out[threadIdx.x] = v * x[0];
}
__global__ void different_masks(const float* x, float* out, int n, int bad) {
    unsigned mask = bad && threadIdx.x % 2 ? 0xfffffffe : 0xffffffff;
    float v = __shfl_sync(mask, x[0], 2);  // different_masks
    if (threadIdx.x < n) out[threadIdx.x] = v;
}
"""

PLANTED = {
    "past_the_end": ("out of bounds", "x", 40), "far_away": ("out of bounds", "x", 123456789),
    "before": ("out of bounds", "out", -1), "past_shared": ("out of bounds", "row", 64),
    "into_the_next": ("out of bounds", "one", 64), "past_dynamic": ("out of bounds", "dynamic", 64),
    "no_barrier": ("race", "row", None), "no_second_barrier": ("race", "one", 0),
    "no_syncwarp": ("race", "row", None), "branch": ("barrier", None, None), "gone_lane": ("lane", None, None),
    "not_in_mask": ("lane", None, None), "unwritten_shared": ("uninitialised", "row", 63),
    "unwritten_output": ("uninitialised", "out", 0), "deadlock": ("deadlock", None, None),
    "different_masks": ("deadlock", None, None), "past_variable": ("out of bounds", "kept", 64),
    "variable_without_barrier": ("race", "kept", None), "plain_count": ("race", "total", 0),
}  # fmt: skip


def checked(name: str, bad: bool, seed: int | None) -> None:
    """Run a kernel of CHECKED on 40 elements, 64 threads."""
    x, out = torch.randn(40), zeros(40)
    outputs = [out] if name == "unwritten_output" else []
    with cudascope.check(outputs=outputs, schedule=seed):
        run(CHECKED, name, 1, 64, x=x, out=out, n=40, bad=int(bad), shared_bytes=256)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught_in_its_line(name):
    what, tensor, element = PLANTED[name]
    lines = {line_of(CHECKED, name)} | {
        i for i, text in enumerate(CHECKED.splitlines(), 1) if text.endswith(f"// {name} also")
    }
    for seed in SCHEDULES:
        with pytest.raises(cudascope.Finding) as caught:
            checked(name, True, seed)
        error = caught.value
        assert (error.kernel, error.what, error.tensor) == (name, what, tensor), error
        assert error.line in lines, error
        if element is not None and seed is None:
            assert error.element == element, error


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_the_correct_twin_of_a_planted_bug_passes(name):
    for seed in [None, *range(20)]:
        checked(name, False, seed)


@pytest.mark.parametrize(("name", "function"), [("deadlock", "xor_"), ("different_masks", "")])
def test_a_deadlock_is_an_error_without_checking_too(name, function):
    with pytest.raises(cudascope.Finding, match="waits for threads that never come") as caught:
        run(CHECKED, name, 2, 64, x=torch.randn(40), out=zeros(40), n=40, bad=1)
    assert f"in line {line_of(CHECKED, name)} in __shfl_{function}sync with mask 0x" in str(caught.value)


OPTIMISED = r"""
__global__ void filled_by_one(const float* x, float* out, int n) {  // a compiler would make a memset of this
    __shared__ float row[64];
    if (threadIdx.x == 0)
        for (int i = 0; i < 64; ++i) row[i] = 0;
    __syncthreads();
    out[threadIdx.x] = row[threadIdx.x] + x[threadIdx.x];
}
__global__ void copied(const float* x, float* out, int n) {
    __shared__ float row[64];
    if (threadIdx.x == 0) memcpy(row, x, 64 * sizeof(float));
    __syncthreads();
    float four[4] = {};
    for (int i = 0; i < 4; ++i) four[i] = row[threadIdx.x / 4 * 4 + i];  // and one load of 16 bytes of these
    out[threadIdx.x] = four[threadIdx.x % 4];
}
__global__ void never_read(const float* x, float* out, int n) {  // and move this load out of the loop
    __shared__ float nothing[4];
    float sum = x[threadIdx.x];
    for (int i = 0; i < n; ++i)
        if (i > 1000) sum += nothing[2];
    out[threadIdx.x] = sum;
    if (n > 1000) nothing[threadIdx.x % 4] = 1;
}
"""


@pytest.mark.parametrize("name", ["filled_by_one", "copied", "never_read"])
def test_the_compiler_neither_hides_nor_invents_an_access(name):
    x, out = torch.randn(64), zeros(64)
    with cudascope.check(outputs=[out]):
        run(OPTIMISED, name, 1, 64, x=x, out=out, n=8)
    assert torch.equal(out, x)


def test_an_error_says_everything():
    with pytest.raises(cudascope.Finding) as caught:
        checked("past_the_end", True, None)
    assert str(caught.value) == (
        "past_the_end, line 4 `if (i < n) out[i] = x[i + bad];  // past_the_end`: thread (39, 0, 0) of thread block "
        "(0, 0, 0) reads x[40], past its end (40 elements)"
    )
    assert (caught.value.thread, caught.value.thread_block) == ((39, 0, 0), (0, 0, 0))
    with pytest.raises(
        cudascope.Finding, match=r"which thread \(\d+, 0, 0\) has (read|written) in line \d+ with no barrier between"
    ):
        checked("no_barrier", True, None)


def test_a_checked_launch_writes_its_results_back():
    x, out = torch.randn(64, 2), zeros(2, 40)
    with cudascope.check() as report:  # views: a column, and a row beside which nothing may be written
        run(CHECKED, "past_the_end", 1, 64, x=x.view(-1)[:40], out=out[1], n=40, bad=0)
    assert torch.equal(out[1], x.view(-1)[:40])
    assert not out[0].any()
    assert len(report.unwritten(out[1])) == 0
    assert report.unwritten(out).tolist() == [[0, i] for i in range(40)]


def test_tensors_that_overlap_are_one_memory():
    x = torch.randn(40)
    before = x.clone()
    with cudascope.check():
        run(CHECKED, "past_the_end", 1, 64, x=x, out=x, n=40, bad=0)
        assert torch.equal(x, before)
        with pytest.raises(cudascope.Finding) as caught:
            run(CHECKED, "past_the_end", 1, 64, x=x[:39], out=x, n=39, bad=1)
    assert caught.value.what == "race"


def test_unwritten_elements_are_listed():
    out = zeros(6, 8)
    with cudascope.check() as report:
        run(CHECKED, "past_the_end", 1, 64, x=torch.randn(40), out=out, n=40, bad=0)
        assert report.unwritten(out).tolist() == [[5, i] for i in range(8)]
        run(CHECKED, "past_the_end", 1, 64, x=torch.randn(40), out=out.view(-1)[8:], n=40, bad=0)
    assert len(report.unwritten(out)) == 0


def test_an_output_written_by_an_earlier_launch_may_be_read():
    x, out = torch.randn(40), zeros(40)
    with cudascope.check(outputs=[out]):
        run(CHECKED, "past_the_end", 1, 64, x=x, out=out, n=40, bad=0)
        run(CHECKED, "unwritten_output", 1, 64, x=x, out=out, n=40, bad=1)
    torch.testing.assert_close(out, 2 * x)


HALVES = r"""#include <cuda_bf16.h>
struct Pair { float a, b; __host__ __device__ Pair() {} };
__shared__ __nv_bfloat16 of_the_file[64];
__global__ void k(float* out) {
    __shared__ __half row[64];
    __shared__ __half2 wide[64];
    __shared__ Pair pairs[64];
    int i = threadIdx.x;
    row[i] = __float2half(i), wide[i] = __half2half2(row[i]), pairs[i].a = i, of_the_file[i] = __float2bfloat16(i);
    __syncthreads();
    int j = 63 - i;
    out[i] = __half2float(row[j]) + __half2float(wide[j].x) + pairs[j].a + __bfloat162float(of_the_file[j]);
}
"""


IN_TEMPLATE = r"""#include <cuda_bf16.h>
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec { T data[N]; };
template <typename T>
__global__ void k(float* out) {
    __shared__ Vec<T, 4> rows[64];
    int i = threadIdx.x;
    rows[i].data[3] = T(float(i));
    __syncthreads();
    out[i] = float(rows[63 - i].data[3]);
}
"""


@pytest.mark.parametrize(
    ("source", "name", "factor"),
    [(HALVES, "k", 4), *((IN_TEMPLATE, f"k<{element}>", 1) for element in ("float", "__half", "__nv_bfloat16"))],
)
def test_shared_arrays_of_a_class_have_no_hidden_accesses(source, name, factor):
    out = zeros(64)
    with cudascope.check(outputs=[out]):
        run(source, name, 1, 64, out=out)
    assert out.tolist() == [factor * (63 - i) for i in range(64)]
    with cudascope.observe() as report:
        run(source, name, 1, 64, out=out)
    assert {line.space for line in report.launches[0].lines if line.access in ("read", "write")} == {"global", "shared"}


def test_a_null_pointer_and_an_empty_tensor_are_out_of_bounds():
    source = "__global__ void k(float* x) { x[threadIdx.x] += 1; }"
    for x in (None, zeros(0)):
        with pytest.raises(cudascope.Finding, match="address 0x0, which belongs to no tensor"), cudascope.check():
            run(source, "k", 1, 1, x=x)


DYNAMIC = r"""
#include <assert.h>
#include <cassert>
namespace ns {
extern __shared__ float in_a_namespace[];
__device__ float* get() { return in_a_namespace; }
}
extern __align__(16) __shared__ float aligned[];
__global__ void k(float* out) {
    extern __shared__ __align__(16) unsigned char bytes[];
    assert(out != nullptr && blockDim.x == 8 && (size_t)bytes % 16 == 0);
    ns::get()[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = aligned[7 - threadIdx.x] + 10 * reinterpret_cast<float*>(bytes)[threadIdx.x];
}
"""


@pytest.mark.slow
def test_dynamic_shared_memory_of_two_types_in_a_namespace_and_an_assert_with_its_header():
    for context in (contextlib.nullcontext(), cudascope.check()):
        out = zeros(8)
        with context:
            run(DYNAMIC, "k", 1, 8, out=out, shared_bytes=32)
        assert out.tolist() == [7 - i + 10 * i for i in range(8)]
    with pytest.raises(cudascope.Finding, match="assertion failed: out != nullptr"):
        run(DYNAMIC, "k", 1, 4, out=out, shared_bytes=32)


SPINNING = r"""
__global__ void changes_nothing(int* out, int n) { for (int i = 0; i < n; ++i) atomicMax(out, i & 3); }
__global__ void waits(int* out, int n) { while (atomicAdd(out, 0) == n) {} }
"""


def test_many_atomics_that_change_nothing_are_no_deadlock_and_waiting_for_ever_is_one():
    out = torch.tensor([5], dtype=torch.int32)
    run(SPINNING, "changes_nothing", 1, 1024, out=out, n=2000)
    for block in (1, 64):
        with pytest.raises(cudascope.Finding, match=r"waits, line 3 .*repeats an atomic on \w+\[0\] for ever"):
            run(SPINNING, "waits", 1, block, out=out, n=5)


LARGE = r"""
__global__ void too_large(float* out) {
    __shared__ float a[12289];
    a[threadIdx.x] = 1;
    out[0] = a[12288 - threadIdx.x];
}
__global__ void large(float* out) {
    __shared__ float a[12288];
    extern __shared__ float b[];
    a[threadIdx.x] = b[threadIdx.x] = 1;
    out[0] = a[12287 - threadIdx.x] + b[threadIdx.x];
}
"""


def test_static_shared_memory_has_limits():
    out = zeros(1)
    run(LARGE, "large", 1, 1, out=out, shared_bytes=(227 - 48) << 10)
    with pytest.raises(ValueError, match=r"at most 232448 bytes of shared memory, got 49152 \+ 183300 = 232452"):
        run(LARGE, "large", 1, 1, out=out, shared_bytes=183300)
    with pytest.raises(ValueError, match="at most 49152 bytes, got 49156"):
        run(LARGE, "too_large", 1, 1, out=out)


def test_check_and_observe_cannot_be_nested():
    for outer, inner in ((cudascope.check, cudascope.observe), (cudascope.observe, cudascope.check)):
        with outer(), cudascope.schedule(3), pytest.raises(RuntimeError, match="cannot be nested"), inner():
            pass


STRUCTS = r"""
#include <atomic>
#include <chrono>
#include <iostream>
#include <string>
#include <time.h>
struct Complex { double re, im; };
struct Padded { char c; float v; short s; };
struct __attribute__((packed)) Packed { char c; float v; };
__global__ void packed(const float* x, float* out, int bad) { ((Packed*)out)->v = ((const Packed*)x)->v; }
__global__ void copies(const float* x, float* out, int bad) {
    const Complex* from = (const Complex*)(x + 2);
    Complex* to = (Complex*)(out + 2);
    to[threadIdx.x] = from[threadIdx.x];
    Complex made{from[threadIdx.x].im, 2};
    to[threadIdx.x] = made;
}
__global__ void loads(const float* x, float* out, int bad) {
    float4 v = *(const float4*)(x + 2 * bad);
    out[0] = v.x + v.w;
}
__global__ void loads_by_index(const float* x, float* out, int bad) {
    const float4* row = (const float4*)(x + 2 * bad);
    float4 v = row[threadIdx.x];
    out[0] = v.x + v.w;
}
__global__ void stores_by_reference(const float* x, float* out, int bad) {
    float4& to = *(float4*)(out + 2 * bad);
    for (int i = 0; i < 2; ++i) to = make_float4(x[i], 1, 2, 3);
}
__global__ void members(const float* x, float* out, int bad) {
    const float4& v = *(const float4*)(x + 2);
    out[0] = v.x + v.w;
}
__global__ void stores(const float* x, float* out, int bad) { *(float4*)(out + 2 * bad) = make_float4(x[0], 1, 2, 3); }
__device__ __noinline__ float twice(float v) { return 2 * v; }
__global__ void padding(const float* x, float* out, int bad) {
    __shared__ Padded a[32], b[32];
    a[threadIdx.x].c = 1, a[threadIdx.x].s = 2;
    if (!bad) a[threadIdx.x].v = 3;
    b[threadIdx.x] = a[threadIdx.x];
    out[threadIdx.x] = twice(b[threadIdx.x].s);
}
"""


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("copies", None),
        ("loads", "misaligned"),
        ("loads_by_index", "misaligned"),
        ("stores", "misaligned"),
        ("stores_by_reference", "misaligned"),
        ("members", None),
        ("padding", "uninitialised"),
        ("packed", None),
    ],
)
def test_the_alignment_and_the_padding_of_structs(name, what):
    tensors = dict(x=zeros(64), out=zeros(64))
    with cudascope.check():
        run(STRUCTS, name, 1, 1, **tensors, bad=0)
    if what:
        with cudascope.check(), pytest.raises(cudascope.Finding) as caught:
            run(STRUCTS, name, 1, 1, **tensors, bad=1)
        assert caught.value.what == what


# ------------------------------------------------------------------------------------------------ the runtime's source


def test_python_and_the_runtime_have_the_same_kinds_and_structures():
    """The compiler is asked about each enumerator and each field that Python has read from the headers."""
    kinds = {"Mode", "Space", "Access", "Collective"}
    claims = [f"{kind.name} == {kind.value}" for name in kinds for kind in getattr(simt_abi, name)]
    for name in ("REGION", "SHARED_ARRAY", "WAITER", "ERROR", "LAUNCH"):
        structure = getattr(simt_abi, name)
        claims.append(f"sizeof({structure.__name__}) == {ctypes.sizeof(structure)}")
        claims += [
            f"offsetof({structure.__name__}, {field}) == {getattr(structure, field).offset}"
            for field, *_ in structure._fields_
        ]
    claims += [f"offsetof(Event, {name}) == {offset}" for name, (_, offset) in simt_abi.EVENT.fields.items()]
    claims.append(f"sizeof(Event) == {simt_abi.EVENT.itemsize}")
    assert len(claims) > 100
    text = f'#include <cstddef>\n#include "{RUNTIME / "launch.h"}"\n'
    text += "".join(f'static_assert({claim}, "");\n' for claim in claims)
    run_compiler([*find_compiler()[0], "-std=c++17", *FLAGS, "-fsyntax-only", "-x", "c++", "-"], text)


def test_the_runtimes_headers_do_not_include_each_other_in_a_circle():
    files = [path for folder in (RUNTIME, HEADERS) for path in folder.rglob("*") if path.is_file()]
    includes = {
        path.resolve(): {(path.parent / name).resolve() for name in re.findall(r'#include "(.*)"', path.read_text())}
        for path in files
    }
    assert len(includes) > 10
    while includes:
        leaves = {path for path, others in includes.items() if not others & includes.keys()}
        assert leaves, f"in a circle: {[path.name for path in includes]}"
        includes = {path: others for path, others in includes.items() if path not in leaves}


@pytest.mark.slow
def test_an_object_with_virtual_functions_lies_in_shared_memory():
    """Its table of functions is written by its constructor and read by a call, like any other member."""
    source = """
        #include <new>
        struct Shape { __device__ virtual int sides() = 0; };
        struct Square : Shape { __device__ int sides() override { return 4; } };
        __global__ void polymorphic(int* out) {
            __shared__ __align__(8) char room[sizeof(Square)];
            Shape* shape = threadIdx.x ? (Shape*)room : new (room) Square;
            BARRIER;
            out[threadIdx.x] = shape->sides();
        }
    """
    out = torch.zeros(2, dtype=torch.int32)
    with cudascope.check():
        CudaKernel(source, "polymorphic", defines=["BARRIER=__syncthreads()"])[1, 2](out)
    assert out.tolist() == [4, 4]
    with pytest.raises(cudascope.Finding, match="room"), cudascope.check():
        CudaKernel(source, "polymorphic", defines=["BARRIER="])[1, 2](out)


@pytest.mark.slow
def test_the_last_thread_block_may_put_the_counter_back():
    """An atomic after a fence comes before whatever follows the next atomic on it; without the fence it does not."""
    source = """
        __device__ unsigned arrived = 0;
        __global__ void last(int* parts, int* out) {
            parts[blockIdx.x] = blockIdx.x;
            FENCE;
            if (atomicAdd(&arrived, 1) < gridDim.x - 1) return;
            for (int i = 0; i < gridDim.x; ++i) *out += parts[i];
            arrived = 0;
        }
    """
    parts, out = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for seed in range(20):
        with cudascope.check(), cudascope.schedule(seed):
            CudaKernel(source, "last", defines=["FENCE=__threadfence()"])[4, 1](parts, out)
    assert out.item() == 20 * (0 + 1 + 2 + 3)
    with pytest.raises(cudascope.Finding, match="parts"), cudascope.check():
        CudaKernel(source, "last", defines=["FENCE="])[4, 1](parts, out)
