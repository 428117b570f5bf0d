"""A launch that waits in another Python thread. It imports no torch, so that a process of its own starts at once."""

import threading
import time

from cudascope import CudaKernel

# The kernel stores 1 in x[0], waits until the test stores 1 in `go` (n steps at most), then stores 2 in x[1].
WAITS = """
__device__ volatile int begun, go;
__global__ void waits(float* x, long long n) {
    x[0] = 1;
    begun = 1;
    for (long long i = 0; i < n && !go; ++i) {}
    x[1] = 2;
}
"""


def kernel_of(source: str, name: str = "k") -> CudaKernel:
    return CudaKernel(source, name)


class Waiting:
    """A launch of WAITS in another Python thread. It ends when the `with` ends."""

    def __init__(self, x: object) -> None:
        kernel = CudaKernel(WAITS, "waits")
        kernel.compile()
        self.begun, self.go = kernel.variable("begun"), kernel.variable("go")
        self.thread = threading.Thread(target=lambda: kernel[1, 1](x, 10**12))

    def __enter__(self) -> None:
        self.thread.start()
        while not self.begun:
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.go[...] = 1
        self.thread.join()
        self.begun[...] = self.go[...] = 0
