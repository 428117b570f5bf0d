"""The GPU paths rehearsed on a machine without one: whatever can be checked short of a GPU's own arithmetic and speed.

    make rehearse                             the kernels' tests and the lessons, as on an H200
    make rehearse SM=8.0 TESTS=tests/...      some tests, as on an A100
    STUB_TRITON=compiled                      cudascope executes the PTX of Triton kernels: no interpreter

| piece | what it is |
|---|---|
| driver.py | a stub libcuda.so.1 written in Python, which refuses what a driver refuses |
| gpu_memory.cpp | tensors on cuda:0 and cuda:1 that lie in the host's memory; mixing devices fails as on a GPU |
| machine.py | torch.cuda for these two GPUs: streams, events, graphs |
| launches.py | each launch: its parameters compared byte for byte, then run: as fibers, interpreted, or as PTX |

So what runs is the real cuda-core, the real machine code up to its launch, Triton's real compiler and launcher. Not
covered: the GPU's arithmetic, its speed, its races. In a captured graph only kernels' launches are replayed.
"""


def install() -> None:
    """Make this process believe in the GPUs: before anything imports torch."""
    from rehearsal import machine

    machine.install()

    from rehearsal import launches  # imports torch

    launches.install()
