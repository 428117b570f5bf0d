"""`triton_compiled`: Triton kernels compiled for a GPU that need not be there, and their PTX executed on the CPU.

The kernel is specialised and compiled as Triton does for a launch on that GPU. A `PtxKernel` executes the PTX, so
`observe`, `check`, `schedule` and `time_limit` work as usual and name lines of the Python source. A second process
compiles (`worker.py`), and its answer is kept in the cache. This process may therefore interpret Triton kernels, and
may not.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from cudascope.arguments.reach import reachable
from cudascope.gpus import SHARED_BYTES
from cudascope.triton.compiler import Compiled, behind_maps, compiled_kernel, passed, specialised
from cudascope.triton.driver import Driver, torch_answers


class Target(NamedTuple):
    """The GPU that the launches inside of a `triton_compiled` are compiled for."""

    sm: int
    edit: Callable[[str], str] | None

    @property
    def shared_bytes(self) -> int:
        return SHARED_BYTES[self.sm]


_target: ContextVar[Target | None] = ContextVar("cudascope_triton_target", default=None)


def triton_target() -> Target | None:
    """Return what Triton kernels are compiled for here; None outside of `triton_compiled`."""
    return _target.get()


def triton_compiled(
    arch: str = "sm_80", *, edit: Callable[[str], str] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Compile the Triton kernels that this thread launches inside for `arch`, and execute their PTX on the CPU.

    An autotuned kernel takes the configuration that its cache has for such arguments, or else the first one that fits
    the GPU. Nothing is timed. `triton.runtime.driver.active`, and torch.cuda where torch has no GPU, describe a GPU of
    the architecture, with the CPU as its device (README).

    A masked load without `other` gives 0 where the mask is false, for the PTX that Triton's compiler writes says so.
    Triton's language leaves this value open. For "sm_100", a `tl.dot` of 64 rows or more is refused: Triton compiles
    it to instructions of tensor memory (tcgen05), which the CPU runner does not execute. Other kernels run.

    Args:
        arch: "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100" or "sm_120".
        edit: gets the PTX of each kernel that is launched, and returns the PTX that is executed.

    Raises:
        ValueError, TypeError: `arch` is unknown, or `edit` is not a function. A launch raises them if an argument is
            refused (arguments/binder.py), or if the kernel has an instruction that the CPU runner does not execute.
        CompileError: a launch raises it, with Triton's message, if the kernel does not compile.
    """
    known = {f"sm_{sm}": sm for sm in SHARED_BYTES}
    if not isinstance(arch, str) or arch not in known:
        error = ValueError if isinstance(arch, str) else TypeError
        raise error(f"arch must be one of {', '.join(known)}, got {arch!r}")
    if edit is not None and not callable(edit):
        raise TypeError(f"edit must be a function of the PTX, got {edit!r}")
    return _compiled_for(Target(known[arch], edit))


_lock = threading.Lock()
_contexts = 0  # of all threads
_originals: list[tuple[Any, str, Any, Any]] = []


@contextlib.contextmanager
def _compiled_for(target: Target) -> Iterator[None]:
    """Replace Triton's launches while any thread needs it. Outside of `triton_compiled` they do what they did."""
    global _contexts
    with _lock:
        if not _contexts:
            _replace()
        _contexts += 1
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)
        with _lock:
            _contexts -= 1
            if not _contexts:
                _restore()


def _replace() -> None:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import DriverConfig
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for owner, launch in ((JITFunction, _run), (InterpretedFunction, _run), (Autotuner, _run_autotuned)):
        _originals.append((owner, "run", owner.run, _instead(owner.run, launch)))
    active = property(_instead(DriverConfig.active.fget, lambda target, _: Driver(target.sm)))
    _originals.append((DriverConfig, "active", DriverConfig.active, active))
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        for name, answer in torch_answers().items():
            real = getattr(torch.cuda, name)
            _originals.append((torch.cuda, name, real, _instead(real, answer)))
        for name in ("device", "_DeviceGuard"):
            real = getattr(torch.cuda, name)
            _originals.append((torch.cuda, name, real, _no_device(real)))
    for owner, name, _, ours in _originals:
        setattr(owner, name, ours)


def _no_device(real: type) -> type:
    """Return a context manager that does nothing inside of `triton_compiled`, and outside what `real` does."""

    @functools.wraps(real, updated=())
    class Device(real):
        def __init__(self, device: Any) -> None:
            self._does_nothing = _target.get() is not None
            if not self._does_nothing:
                super().__init__(device)

        def __enter__(self) -> None:
            if not self._does_nothing:
                super().__enter__()

        def __exit__(self, *error: Any) -> bool:
            return False if self._does_nothing else super().__exit__(*error)

    return Device


def _restore() -> None:
    for owner, name, real, ours in _originals:
        if getattr(owner, name) is ours:  # else someone has wrapped it since; ours does what it did
            setattr(owner, name, real)
    _originals.clear()


def _instead(real: Callable, launch: Callable) -> Callable:
    @functools.wraps(real)
    def run(*args: Any, **kwargs: Any) -> Any:
        target = _target.get()
        return real(*args, **kwargs) if target is None else launch(target, *args, **kwargs)

    return run


def _run(target: Target, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
    """Launch a `@triton.jit` function. Return what Triton compiled."""
    from triton.runtime.errors import OutOfResources

    for hook in kernel.pre_run_hooks:
        hook(*args, **options)
    launch = specialised(kernel, target.sm, args, options)
    compiled = compiled_kernel(launch)
    if compiled.shared > target.shared_bytes:
        raise OutOfResources(compiled.shared, target.shared_bytes, "shared memory")
    if warmup:
        return compiled
    shape = _grid(launch.name, grid(launch.arguments) if callable(grid) else grid)
    if 0 not in shape:
        ptx_kernel = compiled.executable(target.edit)
        parameters = ptx_kernel.entry.parameters
        values = passed(launch.name, compiled.leaves, launch.arguments, parameters, compiled.scratch, shape)
        with reachable(**behind_maps(compiled.leaves, launch.arguments)):
            ptx_kernel[shape, 32 * compiled.num_warps, compiled.shared](*values)
    return compiled


def _grid(kernel: str, grid: Any) -> tuple[int, int, int]:
    if not isinstance(grid, tuple | list) or not 1 <= len(grid) <= 3:
        raise TypeError(f"kernel {kernel}: the grid must be a tuple of 1 to 3 ints, got {grid!r}")
    return (*grid, 1, 1)[:3]


def _run_autotuned(_: Target, tuner: Any, *args: Any, **options: Any) -> Any:
    """Launch an autotuned kernel with a configuration that its cache has, or with the first one that fits."""
    from triton.runtime.errors import OutOfResources

    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    given = tuner.nargs | options
    named = {name: value for name, value in given.items() if name in tuner.arg_names}
    key = [named[name] for name in tuner.keys if name in named]
    key += [str(value.dtype) for value in named.values() if hasattr(value, "dtype")]
    cached = tuner.cache.get(tuple(key)) if len(tuner.configs) > 1 else None
    configurations = [cached] if cached else tuner.prune_configs(options)
    for i, configuration in enumerate(configurations):
        everything = options | configuration.all_kwargs()
        if conflicts := options.keys() & configuration.kwargs.keys():
            raise ValueError(f"the launch and the autotuner both set {', '.join(sorted(conflicts))}: leave one out")
        if configuration.pre_hook is not None:
            configuration.pre_hook(tuner.nargs | everything)
        tuner.pre_hook(tuner.nargs | everything, reset_only=True)
        try:
            result = tuner.fn.run(*args, **everything)
            break
        except OutOfResources:
            if i == len(configurations) - 1:
                raise
    tuner.best_config, tuner.nargs = configuration, None
    return result
