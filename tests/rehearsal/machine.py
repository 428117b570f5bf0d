"""A machine with two GPUs that are not there: torch's half of the rehearsal."""

import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

from rehearsal import driver

HERE = Path(__file__).parent


def folder() -> Path:
    """Where what is built for this Python and this torch is kept."""
    from importlib.metadata import version

    sources = (HERE / "gpu_memory.cpp").read_text() + driver.library_source()
    torch = importlib.util.find_spec("torch").origin  # what is built is linked with this very torch
    key = hashlib.sha256(f"{sources}{sys.version}{version('torch')}{torch}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("CUDASCOPE_CACHE") or Path.home() / ".cache" / "pagewise")
    place = cache / "rehearsal" / key
    place.mkdir(parents=True, exist_ok=True)
    return place


def build(place: Path) -> Path:
    """gpu_memory.cpp as a library for the installed torch."""
    library = place / "gpu_memory.so"
    if not library.exists():
        torch = Path(importlib.util.find_spec("torch").origin).parent
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        link = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *include]
        subprocess.run([*command, HERE / "gpu_memory.cpp", *link, "-o", library], check=True)
    return library


# ------------------------------------------------------------------------------------------------ streams, graphs

_handles = itertools.count(0x5000, 16)
_thread = threading.local()


class Stream:
    """A stream; what is put on it happens at once."""

    def __init__(self, device=None, priority: int = 0, handle: int | None = None) -> None:
        import torch

        index = torch.cuda._utils._get_device_index(device, optional=True)
        self.device, self.cuda_stream = torch.device("cuda", index), next(_handles) if handle is None else handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def synchronize(self) -> None: ...

    def wait_stream(self, stream) -> None: ...


def current_stream(device=None) -> Stream:
    import torch

    index = torch.cuda._utils._get_device_index(device, optional=True)
    if not hasattr(_thread, "streams"):
        _thread.streams = [Stream(i, handle=0) for i in range(driver.NUM_DEVICES)]
    return _thread.streams[index]


@contextlib.contextmanager
def stream(new: Stream):
    """torch.cuda.stream"""
    old = current_stream(new.device)
    _thread.streams[new.device.index] = new
    try:
        yield
    finally:
        _thread.streams[new.device.index] = old


class Graph:
    """torch.cuda.CUDAGraph: the launches of kernels and torch's operations. torch's happen while capturing, too."""

    def __init__(self) -> None:
        self.launches = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


_capturing: dict[int, Graph] = {}  # by the stream's handle


@contextlib.contextmanager
def capture(graph: Graph):
    """torch.cuda.graph"""
    on = Stream()
    _capturing[on.cuda_stream] = graph
    try:
        with stream(on), _recorder(graph):
            yield
    finally:
        del _capturing[on.cuda_stream]


def _recorder(graph: Graph):
    """A mode in which torch's operations on the GPU are kept for the replays: each writes its results where they are.

    Reading a number on the host, which waits for the GPU, fails as it does while a stream is captured.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    def on_gpu(tree) -> list:
        return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_cuda]

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if operation.namespace == "pagewise":
                with self:  # its own operations and launches are kept, not the whole
                    on_gpus = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
                    return operation.redispatch(on_gpus, *args, **kwargs)
            if operation is torch.ops.aten._local_scalar_dense.default and on_gpu(args):
                raise RuntimeError("operation not permitted when stream is capturing: a number is read on the host")
            results = operation(*args, **kwargs)
            aliases = [value.alias_info for value in operation._schema.returns if value.alias_info is not None]
            if any(alias.is_write for alias in aliases):
                graph.launches.append(lambda: operation(*args, **kwargs))
            elif not aliases and "empty" not in operation.name() and (kept := on_gpu(results)):

                def again() -> None:
                    for old, new in zip(kept, on_gpu(operation(*args, **kwargs)), strict=True):
                        old.copy_(new)

                graph.launches.append(again)
            return results

    return Recorder()


def happens(on: int, effect) -> None:
    """Do what a launch does, or keep it if the stream with this handle is captured."""
    _capturing[on].launches.append(effect) if on in _capturing else effect()


class Event:
    """Time that passes by one millisecond from one event to the next."""

    _clock = itertools.count(1.0)

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream=None) -> None:
        self.time = next(self._clock)

    def query(self) -> bool:
        """Return False until the host waits for the event: the GPU is always behind its host."""
        return False

    def elapsed_time(self, later: "Event") -> float:
        return later.time - self.time

    def synchronize(self) -> None: ...


# ------------------------------------------------------------------------------------------------ torch.cuda


def _distinct(function):
    """A function of its own for each name: torch.compile has rules by function."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def install() -> None:
    """Build what is missing, load it, and only then import torch, which asks early what there is."""
    assert "torch" not in sys.modules, "the rehearsal comes before torch"
    assert os.environ.get("TRITON_INTERPRET") != "1", "the rehearsal compiles: unset TRITON_INTERPRET"
    place = folder()
    memory = ctypes.CDLL(str(build(place)))
    driver.install(place)

    import torch

    memory.gpu_take_over()
    memory.gpu_of_address.argtypes = [ctypes.c_size_t]
    driver.device_of_address = memory.gpu_of_address
    driver.is_capturing = _capturing.__contains__

    def exchange_device(index: int) -> int:
        before = memory.gpu_current_device()
        if index >= 0 and index != before:
            memory.gpu_exchange_device(index)
            driver.set_current(index)  # as cudaSetDevice does
        return before

    gpu = driver.GPU
    little = 1 << 20  # a larger cache would take as much longer to clear, on the host
    properties = SimpleNamespace(
        name=driver.NAME, major=driver.CAPABILITY[0], minor=driver.CAPABILITY[1], total_memory=int(gpu.memory),
        multi_processor_count=gpu.num_sms, L2_cache_size=little, warp_size=32, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=gpu.threads_per_sm, shared_memory_per_block=driver.WITHOUT_ASKING,
        shared_memory_per_block_optin=gpu.shared_bytes, shared_memory_per_multiprocessor=gpu.shared_bytes_per_sm,
    )  # fmt: skip
    claims = dict(
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: driver.NUM_DEVICES,
        current_device=lambda: memory.gpu_current_device(), current_stream=current_stream, stream=stream, Stream=Stream,
        set_device=lambda device: exchange_device(torch.cuda._utils._get_device_index(device)), Event=Event,
        _exchange_device=exchange_device, _maybe_exchange_device=exchange_device, CUDAGraph=Graph, graph=capture,
        get_device_name=lambda device=None: driver.NAME, get_device_capability=lambda device=None: driver.CAPABILITY,
        get_device_properties=lambda device=None: properties, get_rng_state=lambda *_: torch.zeros(16).byte(),
        is_current_stream_capturing=lambda: current_stream().cuda_stream in _capturing,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda *_: 0),
        **dict.fromkeys(("init", "_lazy_init", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed",
                         "manual_seed_all", "set_rng_state", "_sleep"), lambda *_: None),
    )  # fmt: skip
    for name, value in claims.items():
        setattr(torch.cuda, name, value if isinstance(value, type) else _distinct(value))
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = (
        torch.cuda.get_rng_state,
        torch.cuda.set_rng_state,
    )
    torch._C._cuda_getCurrentRawStream = lambda index: current_stream(index).cuda_stream
    torch._C._cuda_getDevice = lambda: memory.gpu_current_device()
    for kind in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    torch.version.cuda = torch.version.cuda or "13.0"  # Triton asks whether torch has a GPU backend
