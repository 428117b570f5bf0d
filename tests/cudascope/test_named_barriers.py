"""The barrier that a finding names ends the race: it is strong enough, and it stands where there is none yet."""

import numpy as np
import pytest

from cudascope import CudaKernel, check

PATHS = ["g++", "ptx"]
IN_A_WARP, OF_ALL = "__syncwarp()", "__syncthreads()"


def found(source: str, grid: int, block, *args, through: str):
    with check(stop=False) as report:
        CudaKernel(source, "k", **({"through": "ptx"} if through == "ptx" else {}))[grid, block](*args)
    return report.findings


NEIGHBOURS = """__global__ void k(const float* in, float* out) {
    __shared__ float s[64];
    s[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = s[threadIdx.x ^ DISTANCE];
}"""


@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize(("distance", "name"), [("1", IN_A_WARP), ("32", OF_ALL), ("33", OF_ALL)])
def test_it_orders_all_threads_that_race_and_not_only_the_first_two(distance, name, through):
    ones = np.ones(64, np.float32)
    (finding,) = found(NEIGHBOURS.replace("DISTANCE", distance), 1, 64, ones, ones.copy(), through=through)
    assert (finding.barrier.name, finding.barrier.after, finding.barrier.before) == (name, 3, 4)
    shifted = NEIGHBOURS.replace("threadIdx.x ^ DISTANCE", "(threadIdx.x + 1) % 64")  # most neighbours are in one warp
    (finding,) = found(shifted, 1, 64, ones, ones.copy(), through=through)
    assert finding.barrier.name == OF_ALL


@pytest.mark.parametrize("through", PATHS)
def test_one_barrier_ends_races_within_warps_and_between_them(through):
    source = """__global__ void k(const float* A, const float* B, float* C) {
        __shared__ float a[16][16], b[16][16];
        int x = threadIdx.x, y = threadIdx.y;
        float sum = 0;
        a[y][x] = A[y * 16 + x];
        b[y][x] = B[y * 16 + x];
        for (int i = 0; i < 16; i++) sum += a[y][i] * b[i][x];
        C[y * 16 + x] = sum;
    }"""
    tile = np.ones((16, 16), np.float32)
    (finding,) = found(source, 1, (16, 16), tile, tile.copy(), tile.copy(), through=through)
    assert finding.barrier.name == OF_ALL
    assert len(finding.others) == 1
    assert "a __syncthreads() belongs between lines 5 and 7. The barrier would also end" in str(finding)


@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize("barrier", ["__syncthreads()", 'asm volatile("bar.sync 1, 64;")'])
def test_it_stands_at_the_end_of_a_turn_whose_other_barrier_is_there(barrier, through):
    source = f"""__global__ void k(const float* x, float* out) {{
        __shared__ float s[64];
        float sum = 0;
        for (int i = 0; i < 4; i++) {{
            s[threadIdx.x] = x[i * 64 + threadIdx.x];
            {barrier};
            sum += s[63 - threadIdx.x];
        }}
        out[threadIdx.x] = sum;
    }}"""
    (finding,) = found(source, 1, 64, np.ones(256, np.float32), np.zeros(64, np.float32), through=through)
    assert (finding.barrier.name, finding.barrier.after, finding.barrier.before) == (OF_ALL, 7, 5)


@pytest.mark.parametrize("through", PATHS)
@pytest.mark.parametrize("grid", [1, 2])
def test_where_several_threads_add_to_one_element_an_atomic_is_named(grid, through):
    source = """__global__ void k(const unsigned char* x, int* bins) {
        bins[x[blockIdx.x * 32 + threadIdx.x] & 7] += 1;
    }"""
    x = np.arange(64, dtype=np.uint8)
    (finding,) = found(source, grid, 32, x, np.zeros(8, np.int32), through=through)
    assert "Where several threads update one element, an atomic belongs there instead" in str(finding)
    assert (finding.barrier is None) == (grid == 2)  # no barrier of a thread block orders two of them
    assert ("no barrier of a thread block orders" in str(finding)) == (grid == 2)
