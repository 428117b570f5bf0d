"""The figures of some GPUs: what each unit of the chip can do in a clock cycle, and how fast the clock can be.

    GPUS["H100"].num_sms

A new GPU is one more row of the table here. No other file has one.

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


# By compute capability · 10: FP32 lanes, threads, thread blocks and bytes of shared memory of an SM, and the bytes that
# CUDA reserves in the shared memory of each thread block.
_SMS = {
    75: (64, 1024, 16, 64 << 10, 0),
    80: (64, 2048, 32, 164 << 10, 1024),
    86: (128, 1536, 16, 100 << 10, 1024),
    89: (128, 1536, 24, 100 << 10, 1024),
    90: (128, 2048, 32, 228 << 10, 1024),
    100: (128, 2048, 32, 228 << 10, 1024),
    120: (128, 1536, 24, 100 << 10, 1024),
}
_INT4 = {"s4": 4096, "u4": 4096}
_GEFORCE = {"f16.f32": 512, "bf16": 512, "tf32": 256}  # half the rate for sums in float32
_TENSOR_FLOPS = {
    "T4": {"f16": 1024, "s8": 2048, "u8": 2048} | _INT4,
    **dict.fromkeys(("A100 40 GB", "A100"), _dense(2048, f64=128, s4=8192, u4=8192)),
    **dict.fromkeys(("RTX A6000", "RTX A5000"), _dense(1024) | _INT4),
    "RTX 3090": _dense(1024) | _INT4 | _GEFORCE,
    "RTX 4090": _dense(1024, e4m3=2048) | _INT4 | _GEFORCE | {"e4m3.f32": 1024, "e5m2.f32": 1024},
    "L20": _dense(512, e4m3=1024),
    "L4": _dense(1024, e4m3=2048) | _INT4,
    **dict.fromkeys(("H100", "H200"), _dense(4096, f64=256, e4m3=8192)),
    "H20": _dense(1024, e4m3=2048),  # a quarter of an H100's; the rate for float64 is not published
    **dict.fromkeys(("GB200", "B200"), _dense(8192, f64=128, e4m3=16384)),
    "RTX 5090": _dense(1024, e4m3=2048) | _GEFORCE | {"e4m3.f32": 1024, "e5m2.f32": 1024},
}
_L2_BYTES_PER_CLOCK = {80: 5120}
# The H100, the H200 and the A100 are SXM modules; of a GB200 this is one GPU. Why the clock, the bandwidth or L2 is
# not the data sheet's:
#   RTX A6000, 3090   the highest clock that the driver accepts: 1.8 GHz in the data sheet of the A6000; boards of the
#                     3090 exceed the 1.695 GHz of the white paper
#   RTX 4090          boards exceed the 2.52 GHz of the white paper: 2.82 GHz was reported (club-3090 #697)
#   RTX 5090          the highest clock that the driver accepts (kekzl/imp #1671); 2.407 GHz in the white paper
#   L20, H100         of the data sheet's 59.8 and 67 TFLOP/s in float32; an H100's 989 on tensor cores are at 1.83 GHz
#   GB200, B200       of the data sheet's 2500 TFLOP/s on tensor cores; of its 75 in float32 (its 2250 are at 1.86 GHz)
#   H200              has the 60 MB of L2 of a whole GH100, as its driver reports; an H100 has 50
#   L4, H200, GB200   2 · 6.251 GHz · 192 bits; 2 · 3.201 GHz · 6016 bits; 8 TB/s in the data sheet, which rounds
_TABLE = """
name       |  sm | SMs |   GHz | DRAM, GB/s | L2, MiB | memory, GB | stated TFLOP/s | stated GB/s
T4         |  75 |  40 |  1.59 |        320 |       4 |         16 |             65 |         320
A100 40 GB |  80 | 108 |  1.41 |       1555 |      40 |         40 |            312 |        1555
A100       |  80 | 108 |  1.41 |       2039 |      40 |         80 |            312 |        2039
RTX A6000  |  86 |  84 |   2.1 |        768 |       6 |         48 |          154.8 |         768
RTX A5000  |  86 |  64 |   2.1 |        768 |       6 |         24 |          111.1 |         768
RTX 3090   |  86 |  82 |   2.1 |      936.2 |       6 |         24 |            142 |         936
RTX 4090   |  89 | 128 | 3.105 |       1008 |      72 |         24 |          330.3 |        1008
L20        |  89 |  92 |  2.54 |        864 |      96 |         48 |          119.5 |         864
L4         |  89 |  58 |  2.04 |      300.1 |      48 |         24 |            121 |         300
H100       |  90 | 132 |  1.98 |       3352 |      50 |         80 |            989 |        3350
H20        |  90 |  78 |  1.98 |       4000 |      60 |         96 |            148 |        4000
H200       |  90 | 132 |  1.98 |       4814 |      60 |        141 |            989 |        4800
GB200      | 100 | 148 | 2.062 |       8200 |     126 |        192 |           2500 |        8000
B200       | 100 | 148 |  1.98 |       8200 |     126 |        180 |           2250 |        8000
RTX 5090   | 120 | 170 |  3.09 |       1792 |      96 |         32 |            419 |        1792
"""


def _gpu(row: str) -> Gpu:
    name, *numbers = (cell.strip() for cell in row.split("|"))
    sm, sms, l2_mib = (int(numbers[i]) for i in (0, 1, 4))
    clock, dram, memory, bandwidth = (float(f"{numbers[i]}e9") for i in (2, 3, 5, 7))
    flops, l2, (lanes, *of_sm) = float(f"{numbers[6]}e12"), (l2_mib << 20, _L2_BYTES_PER_CLOCK.get(sm)), _SMS[sm]
    return Gpu(name, sm, sms, clock, lanes, _TENSOR_FLOPS[name], dram, *l2, *of_sm, memory, flops, bandwidth)


GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in map(_gpu, _TABLE.strip().splitlines()[1:])}
A100_40GB, A100, H100, H200 = (GPUS[name] for name in ("A100 40 GB", "A100", "H100", "H200"))
# By compute capability · 10. The last row with a compute capability represents it: the L4 for 89, the H200 for 90.
BY_SM: Mapping[int, Gpu] = {gpu.sm: gpu for gpu in GPUS.values()}
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
