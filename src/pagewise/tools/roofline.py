"""The roofline: how fast a kernel can be, from its arithmetic and its bytes.

    attainable FLOP/s = min(peak FLOP/s, bandwidth · intensity),    intensity = FLOPs / bytes moved

Williams, Waterman & Patterson 2009.
"""

from dataclasses import dataclass

from cudascope import gpus


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet: dense 16-bit tensor-core FLOP/s, bytes/s of its memory, SMs, bytes of its memory."""

    name: str
    peak_flops: float
    bandwidth: float
    num_sms: int
    memory: float

    @property
    def ridge(self) -> float:
        """The intensity (FLOPs per byte) from which arithmetic, not memory, is the limit."""
        return self.peak_flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOP/s that a kernel of this intensity can reach at most."""
        return min(self.peak_flops, self.bandwidth * intensity)

    def seconds(self, flops: float, bytes_moved: float) -> float:
        """The least time for this work: the slower of arithmetic and memory, perfectly overlapped."""
        return max(flops / self.peak_flops, bytes_moved / self.bandwidth)


def _of(gpu: gpus.Gpu, name: str) -> Gpu:
    return Gpu(name, gpu.stated_flops, gpu.stated_bandwidth, gpu.num_sms, gpu.memory)


A100_40GB = _of(gpus.A100_40GB, "A100 40 GB")
A100 = _of(gpus.A100, "A100 SXM 80 GB")
H100 = _of(gpus.H100, "H100 SXM")
H200 = _of(gpus.H200, "H200")
GPUS = (A100, H100, H200)
# Bytes that nvidia-smi reports. They are more than the 80 and 141 GB of the data sheets, `Gpu.memory`.
MEMORY = {A100: 81920 << 20, H100: 81559 << 20, H200: 143771 << 20}


@dataclass(frozen=True)
class AttentionCost:
    """The least that attention of T queries over S keys must do: two matrix products; Q, K, V read, O written once.

    causal: only the pairs that may look at each other count, of a long prompt (T = S) about half.
    """

    B: int
    H: int
    Hkv: int
    T: int
    S: int
    D: int
    itemsize: int = 2
    causal: bool = False

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs of a head need a score."""
        seeing = min(self.T, self.S)  # the last queries; with T > S the first ones see no key
        return seeing * self.S - seeing * (seeing - 1) // 2 if self.causal else self.T * self.S

    @property
    def flops(self) -> int:
        return 4 * self.B * self.H * self.pairs * self.D

    @property
    def bytes_moved(self) -> int:
        return self.itemsize * self.B * self.D * (2 * self.H * self.T + 2 * self.Hkv * self.S)

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes_moved


def standard_attention_bytes(B: int, H: int, Hkv: int, T: int, S: int, D: int, itemsize: int = 2) -> dict[str, int]:
    """Bytes of standard attention's eight matrix reads and writes, in its three steps; S and P go through memory."""
    q, kv, scores = (itemsize * n for n in (B * H * T * D, B * Hkv * S * D, B * H * T * S))
    return {
        "read Q": q,
        "read K": kv,
        "write S": scores,
        "read S": scores,
        "write P": scores,
        "read P": scores,
        "read V": kv,
        "write O": q,
    }
