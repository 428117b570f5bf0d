"""The GPU of `triton_compiled` as `triton.runtime.driver.active` describes a GPU that is there.

Many Triton programs ask for the active driver when they are imported or before a launch: for the architecture, for the
device of their tensors, for the number of SMs. They get the answers of a common GPU of the architecture.
"""

from collections.abc import Mapping
from typing import Any

from cudascope.gpus import BY_SM


class Driver:
    """The answers to a Triton program that asks for the active driver. There is one device, the CPU."""

    def __init__(self, sm: int) -> None:
        self._sm, self.utils = sm, _Utils(sm)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(each for each in (*vars(type(self)), "utils") if not each.startswith("_"))
        raise AttributeError(f"triton_compiled has no GPU: triton.runtime.driver.active has {known}, but not {name}")

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._sm, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0


class _Utils:
    def __init__(self, sm: int) -> None:
        self._sm = sm

    def get_device_properties(self, _: int | None) -> Mapping[str, int]:
        gpu = BY_SM[self._sm]
        return {
            "max_shared_mem": gpu.shared_bytes,
            "max_num_regs": 65536,
            "multiprocessor_count": gpu.num_sms,
            "warpSize": 32,
        }
