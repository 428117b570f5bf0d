"""The figures of some GPUs: what each unit of the chip can do in a clock cycle, and how fast the clock can be.

    GPUS["H100"].num_sms

A new GPU is one more row here. No other file has a table of GPUs.

The figures are peaks, so a time computed from them is a lower bound. Most come from NVIDIA's white papers of Turing
(TU102), Ampere (GA100 and GA102), Ada (AD102), Hopper (GH100) and Blackwell (GB202). The data sheets of the A100 with
40 GB, RTX A5000, RTX A6000, L4, L20, H20, HGX B200 and GB200 complete them. The results per clock cycle and SM are in
the section "Arithmetic Instructions" of the CUDA C++ Programming Guide; registers, threads and shared memory are in its
section "Compute Capabilities".
"""

from collections.abc import Mapping
from typing import NamedTuple

# These are the same on all GPUs of the table.
SPECIAL_PER_CLOCK = 16  # results of reciprocals, roots, exponentials, logarithms, sines per clock and SM (the guide)
ISSUES_PER_CLOCK = 4  # instructions of a warp per clock and SM: an SM has four schedulers
LOADS_PER_CLOCK = 32  # lanes of loads and stores per clock and SM: the A100 and the H100 have 32 units, others 16 or 32
REGISTERS_PER_QUARTER = 16384  # an SM has four quarters, and each of them runs its own warps
REGISTER_UNIT = 256  # registers are given to a warp in this unit


class Gpu(NamedTuple):
    """One GPU. Rates are per clock cycle and SM unless their name says otherwise."""

    name: str
    sm: int  # compute capability · 10
    num_sms: int
    clock: float  # the highest, in Hz. Data sheets state peaks at a lower clock
    fp32_lanes: int  # additions, multiplications or fused multiply-adds
    # FLOPs (a multiply-add is two) by the type of A; "f16.f32" where a sum in float32 has a rate of its own
    tensor_flops: Mapping[str, int]
    dram_bandwidth: float  # bytes per second, from the clock and the width of the memory
    l2_bytes: int
    l2_bytes_per_clock: int | None  # of the whole GPU; None: NVIDIA does not publish it
    threads_per_sm: int
    blocks_per_sm: int
    shared_bytes_per_sm: int
    reserved_shared_bytes: int  # of each thread block, for CUDA itself
    memory: float  # bytes
    # The data sheet's figures, which are rounded and belong to a lower clock: FLOP/s of dense products in float16 (on
    # GeForce with sums in float16), and bytes per second.
    stated_flops: float
    stated_bandwidth: float

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a thread block can have at most."""
        return self.shared_bytes_per_sm - self.reserved_shared_bytes

    def tensor_rate(self, a: str, result: str) -> int | None:
        """FLOPs per clock cycle and SM of products whose A has type `a`, summed in `result`. None: not on this GPU."""
        return self.tensor_flops.get(f"{a}.{result}") or self.tensor_flops.get(a)


def _dense(f16: int, **others: int) -> dict[str, int]:
    """Return FLOPs per clock cycle and SM. 8-bit integers have twice the rate of f16, and tf32 has half of it."""
    rates = {"f16": f16, "bf16": f16, "tf32": f16 // 2, "s8": 2 * f16, "u8": 2 * f16} | others
    return rates | ({"e5m2": rates["e4m3"]} if "e4m3" in rates else {})


T4 = Gpu(
    name="T4",
    sm=75,
    num_sms=40,
    clock=1.59e9,
    fp32_lanes=64,
    tensor_flops={"f16": 1024, "s8": 2048, "u8": 2048, "s4": 4096, "u4": 4096},
    dram_bandwidth=320e9,
    l2_bytes=4 << 20,
    l2_bytes_per_clock=None,
    threads_per_sm=1024,
    blocks_per_sm=16,
    shared_bytes_per_sm=64 << 10,
    reserved_shared_bytes=0,
    memory=16e9,
    stated_flops=65e12,
    stated_bandwidth=320e9,
)
A100_40GB = Gpu(
    name="A100 40 GB",
    sm=80,
    num_sms=108,
    clock=1.41e9,
    fp32_lanes=64,
    tensor_flops=_dense(2048, f64=128, s4=8192, u4=8192),
    dram_bandwidth=1.555e12,
    l2_bytes=40 << 20,
    l2_bytes_per_clock=5120,
    threads_per_sm=2048,
    blocks_per_sm=32,
    shared_bytes_per_sm=164 << 10,
    reserved_shared_bytes=1024,
    memory=40e9,
    stated_flops=312e12,
    stated_bandwidth=1.555e12,
)
A100 = A100_40GB._replace(  # the SXM module with 80 GB
    name="A100",
    dram_bandwidth=2.039e12,
    memory=80e9,
    stated_bandwidth=2.039e12,
)
RTX_A6000 = Gpu(
    name="RTX A6000",
    sm=86,
    num_sms=84,
    clock=2.1e9,  # the highest that its driver accepts; 1.8 GHz in the data sheet
    fp32_lanes=128,
    tensor_flops=_dense(1024, s4=4096, u4=4096),
    dram_bandwidth=768e9,
    l2_bytes=6 << 20,
    l2_bytes_per_clock=None,
    threads_per_sm=1536,
    blocks_per_sm=16,
    shared_bytes_per_sm=100 << 10,
    reserved_shared_bytes=1024,
    memory=48e9,
    stated_flops=154.8e12,
    stated_bandwidth=768e9,
)
RTX_A5000 = RTX_A6000._replace(
    name="RTX A5000",
    num_sms=64,
    memory=24e9,
    stated_flops=111.1e12,
)
RTX_3090 = RTX_A6000._replace(
    name="RTX 3090",
    num_sms=82,
    clock=2.1e9,  # the highest that its driver accepts; boards exceed the 1.695 GHz of the white paper
    tensor_flops=_dense(1024, s4=4096, u4=4096) | {"f16.f32": 512, "bf16": 512, "tf32": 256},
    dram_bandwidth=936.2e9,
    memory=24e9,
    stated_flops=142e12,
    stated_bandwidth=936e9,
)
RTX_4090 = Gpu(
    name="RTX 4090",
    sm=89,
    num_sms=128,
    clock=3.105e9,  # boards exceed the 2.52 GHz of the white paper: 2.82 GHz was reported (club-3090 #697)
    fp32_lanes=128,
    tensor_flops=_dense(1024, e4m3=2048, s4=4096, u4=4096)
    | {"f16.f32": 512, "bf16": 512, "tf32": 256, "e4m3.f32": 1024, "e5m2.f32": 1024},
    dram_bandwidth=1.008e12,
    l2_bytes=72 << 20,
    l2_bytes_per_clock=None,
    threads_per_sm=1536,
    blocks_per_sm=24,
    shared_bytes_per_sm=100 << 10,
    reserved_shared_bytes=1024,
    memory=24e9,
    stated_flops=330.3e12,
    stated_bandwidth=1.008e12,
)
L20 = RTX_4090._replace(
    name="L20",
    num_sms=92,
    clock=2.54e9,  # of the data sheet's 59.8 TFLOP/s in float32
    tensor_flops=_dense(512, e4m3=1024),
    dram_bandwidth=864e9,
    l2_bytes=96 << 20,
    memory=48e9,
    stated_flops=119.5e12,
    stated_bandwidth=864e9,
)
L4 = RTX_4090._replace(
    name="L4",
    num_sms=58,
    clock=2.04e9,
    tensor_flops=_dense(1024, e4m3=2048, s4=4096, u4=4096),
    dram_bandwidth=300.1e9,  # 2 · 6.251 GHz · 192 bits
    l2_bytes=48 << 20,
    stated_flops=121e12,
    stated_bandwidth=300e9,
)
H100 = Gpu(  # the SXM module
    name="H100",
    sm=90,
    num_sms=132,
    clock=1.98e9,  # of the data sheet's 67 TFLOP/s in float32; its 989 on tensor cores are at 1.83 GHz
    fp32_lanes=128,
    tensor_flops=_dense(4096, f64=256, e4m3=8192),
    dram_bandwidth=3.352e12,
    l2_bytes=50 << 20,
    l2_bytes_per_clock=None,
    threads_per_sm=2048,
    blocks_per_sm=32,
    shared_bytes_per_sm=228 << 10,
    reserved_shared_bytes=1024,
    memory=80e9,
    stated_flops=989e12,
    stated_bandwidth=3.35e12,
)
H20 = H100._replace(
    name="H20",
    num_sms=78,
    tensor_flops=_dense(1024, e4m3=2048),  # a quarter of an H100's; the rate for float64 is not published
    dram_bandwidth=4e12,
    l2_bytes=60 << 20,
    memory=96e9,
    stated_flops=148e12,
    stated_bandwidth=4e12,
)
H200 = H100._replace(
    name="H200",
    dram_bandwidth=4.814e12,  # 2 · 3.201 GHz · 6016 bits
    memory=141e9,
    stated_bandwidth=4.8e12,
)
GB200 = H100._replace(  # one of its GPUs
    name="GB200",
    sm=100,
    num_sms=148,
    clock=2.062e9,  # of the data sheet's 2500 TFLOP/s on tensor cores
    tensor_flops=_dense(8192, f64=128, e4m3=16384),
    dram_bandwidth=8.2e12,  # 8 TB/s in the data sheet, which rounds
    l2_bytes=126 << 20,
    memory=192e9,
    stated_flops=2500e12,
    stated_bandwidth=8e12,
)
B200 = GB200._replace(
    name="B200",
    clock=1.98e9,  # of the data sheet's 75 TFLOP/s in float32; its 2250 on tensor cores are at 1.86 GHz
    memory=180e9,
    stated_flops=2250e12,
)
RTX_5090 = RTX_4090._replace(
    name="RTX 5090",
    sm=120,
    num_sms=170,
    clock=3.09e9,  # the highest that its driver accepts (kekzl/imp #1671); 2.407 GHz in the white paper
    # without 4-bit integers
    tensor_flops={key: rate for key, rate in RTX_4090.tensor_flops.items() if key not in ("s4", "u4")},
    dram_bandwidth=1.792e12,
    l2_bytes=96 << 20,
    memory=32e9,
    stated_flops=419e12,
    stated_bandwidth=1.792e12,
)

_ROWS = [value for value in [*globals().values()] if isinstance(value, Gpu)]  # in the order of this file
GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _ROWS}
# By compute capability · 10. The last row with a compute capability represents it: the L4 for 89, the H200 for 90.
BY_SM: Mapping[int, Gpu] = {gpu.sm: gpu for gpu in _ROWS}
SHARED_BYTES = {sm: gpu.shared_bytes for sm, gpu in BY_SM.items()}  # of a thread block, at most


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name.

    Raises:
        ValueError: the table does not have it.
    """
    if name not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name]


def thread_blocks_per_sm(gpu: Gpu, threads: int, registers: int, shared_bytes: int) -> dict[str, int]:
    """Thread blocks that an SM holds at once, as each resource allows. The least of them counts.

    Args:
        threads: of a thread block. registers: per thread, at least 1.
        shared_bytes: of a thread block, static and dynamic.
    """
    warps = -(-threads // 32)
    per_warp = REGISTER_UNIT * -(-32 * registers // REGISTER_UNIT)
    warps_by_registers = 4 * (REGISTERS_PER_QUARTER // per_warp)
    shared = shared_bytes + gpu.reserved_shared_bytes
    return {
        "thread blocks": gpu.blocks_per_sm,
        "threads": gpu.threads_per_sm // (32 * warps),
        "registers": warps_by_registers // warps,
        "shared memory": gpu.shared_bytes_per_sm // shared if shared else gpu.blocks_per_sm,
    }
