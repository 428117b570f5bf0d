"""How fast the CPU runner is: `python tests/speed_simt.py`. Ratios are of one run; seconds are this machine's."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import cudascope
from cudascope import CudaKernel

SOURCE = Path(__file__).parent / "cudascope" / "reduction.cu"
BLOCKS, THREADS, BARRIERS = 1024, 128, 64
WAIT = f"__global__ void wait(int n) {{ for (int i = 0; i < {BARRIERS}; i++) __syncthreads(); }}"


def best(run: Callable[[], None], repeats: int = 5) -> float:
    """The least seconds of `repeats` runs after one to warm up."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def reduction(blocks: int) -> Callable[[], None]:
    """The block reduction of tests/cuda over so many thread blocks of 128 threads."""
    kernel = CudaKernel(SOURCE, f"block_reduction<{THREADS}>")
    x, out = torch.randn(blocks * THREADS), torch.zeros(blocks)
    return lambda: kernel[blocks, THREADS](x, out, THREADS)


def first_launch() -> None:
    """Seconds from a source to the result of one thread block, in this fresh process; the build may be in the cache."""
    start = time.perf_counter()
    reduction(1)()
    print(time.perf_counter() - start)


def starts() -> tuple[float, float, float]:
    """Seconds to the first result in a new process: with an empty cache, with the runtime built, with all built."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"CUDASCOPE_CACHE": cache}

        def start() -> float:
            command = [sys.executable, __file__, "first-launch"]
            return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

        cold = start()
        for build in Path(cache).glob("reduction*"):
            build.unlink()
        return cold, start(), min(start() for _ in range(5))


def main() -> None:
    run = reduction(BLOCKS)
    plain = best(run)
    with cudascope.observe():
        observed = best(run, 2)
    with cudascope.check():
        checked = best(run, 2)
    print(f"{BLOCKS} thread blocks × {THREADS} threads, block reduction: {1e3 * plain:.0f} ms")
    print(f"observed {observed / plain:.1f} ×, checked {checked / plain:.1f} × the plain run")
    wait = CudaKernel(WAIT, "wait")
    switches = BLOCKS * THREADS * BARRIERS / min(2, os.cpu_count() or 1)  # per core: thread blocks run on all
    print(f"one fiber to the next at a barrier: {1e9 * best(lambda: wait[BLOCKS, THREADS](0)) / switches:.0f} ns")
    cold, compiled, cached = starts()
    built = f"{compiled:.1f} s with the runtime built, {1e3 * cached:.0f} ms with all"
    print(f"first launch: {cold:.1f} s with nothing built, {built}")


if __name__ == "__main__":
    first_launch() if sys.argv[1:] == ["first-launch"] else main()
