"""What a program is told about the GPU inside of `triton_compiled`: by Triton's driver, and by torch.cuda.

Many programs ask when they are imported or before a launch: for the architecture, for the device of their tensors, for
the number of SMs. They get the answers of a common GPU of the architecture, and the CPU as the device of tensors.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cudascope.gpus import BY_SM


class Driver:
    """The active driver of Triton. There is one device, the CPU."""

    def __init__(self, sm: int) -> None:
        gpu = BY_SM[sm]
        told = {"max_shared_mem": gpu.shared_bytes, "max_num_regs": 65536, "multiprocessor_count": gpu.num_sms}
        self._sm = sm
        self.utils = SimpleNamespace(get_device_properties=lambda _: told | {"warpSize": 32})

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

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return divmod(self._sm, 10)

    def get_device_interface(self) -> Any:
        """Return torch.cuda, as Triton's own driver does."""
        import torch

        return torch.cuda


def torch_properties(sm: int) -> SimpleNamespace:
    """Return what torch.cuda.get_device_properties tells of a common GPU of the architecture."""
    gpu = BY_SM[sm]
    major, minor = divmod(sm, 10)
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.num_sms,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=gpu.threads_per_sm,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=gpu.shared_bytes,
        shared_memory_per_multiprocessor=gpu.shared_bytes_per_sm,
        L2_cache_size=gpu.l2_bytes,
        total_memory=int(gpu.memory),
    )


def torch_answers() -> dict[str, Callable[..., Any]]:
    """Return functions for names of torch.cuda that raise without a GPU. The first argument of each is the target.

    `is_available` and `device_count` are not among them: a program that saw a GPU would put its tensors there.
    """
    return {
        "current_device": lambda target: 0,
        "get_device_capability": lambda target, device=None: divmod(target.sm, 10),
        "get_device_name": lambda target, device=None: BY_SM[target.sm].name,
        "get_device_properties": lambda target, device=None: torch_properties(target.sm),
        "set_device": lambda target, device: None,
        "synchronize": lambda target, device=None: None,
    }
