"""Shared by all tests: checked shapes, devices, the one tolerance policy, and the count of executed kernels."""

import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import signal
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

# For scripts in tests/, where the folder tests/cudascope hides the package of this name.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import pagewise  # before triton: decides whether kernels are interpreted

# With this package jsonschema, which nbformat imports, would build 38 grammars of addresses in over a second.
sys.modules["rfc3987_syntax"] = None

# The shape annotations of all modules are checked while the tests run (not of kernels: Triton reads their source).
if importlib.util.find_spec("beartype"):
    import jaxtyping
    from beartype import BeartypeConf, beartype

    # an int is a float, as in Python's own rules
    typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError))
    _with_shapes = jaxtyping.jaxtyped
    _calls: dict = {}  # how often each function was called in the present test; a Counter would run lines of Python
    MOST_CHECKED = 3  # a loop's later calls have the shapes of its first ones

    def _jaxtyped(function=None, **options):
        """jaxtyping's own for functions of tensors. The others have no shapes, and of them a call costs a tenth.

        The checks of a function are made at its first checked call, because a worker calls few of all functions. A
        function within a function has no checks: they would be compiled at each call of the outer one.
        """
        if "<locals>" in getattr(function, "__qualname__", ""):
            return function
        if function is None:
            return functools.partial(_jaxtyped, **options)
        if not inspect.isfunction(function):
            return _with_shapes(function, **options)

        @functools.cache
        def checked():
            has_shapes = "Tensor" in str(inspect.signature(function))
            return _with_shapes(function, **options) if has_shapes else typechecker(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            number = _calls[function] = _calls.get(function, 0) + 1
            unchecked = jaxtyping.config.jaxtyping_disable or number > MOST_CHECKED
            return (function if unchecked else checked())(*args, **kwargs)

        return call

    jaxtyping.jaxtyped = _jaxtyped

    def _get_code(self, name):
        """The code of a checked module. Its bytecode is kept under a name of its own, as in jaxtyping's loader.

        There the name holds while the module runs, so everything that the module imports would be compiled, too: a
        thousand modules of torch and sympy, which take seven seconds.
        """
        renamed = functools.partial(_hook._optimized_cache_from_source, self._typechecker.get_hash())
        with mock.patch("importlib._bootstrap_external.cache_from_source", renamed):
            return SourceFileLoader.get_code(self, name)

    _hook = jaxtyping._import_hook
    _loader = _hook._JaxtypingLoader
    _loader.get_code, _loader.exec_module = _get_code, SourceFileLoader.exec_module
    _checked = [f"pagewise.{m.name}" for m in pkgutil.iter_modules(pagewise.__path__) if m.name != "kernels"]
    jaxtyping.install_import_hook(_checked, "conftest.typechecker")

    _met: set[tuple[str, str]] = set()

    def pytest_runtest_setup(item: pytest.Item) -> None:
        """Check shapes in the first case of each test, and in a case whose name has a word that no earlier case has.

        Each option of a test is therefore checked once. Checks in all cases cost a seventh of the tests' own time.
        """
        test, _, case = item.nodeid.removesuffix("]").partition("[")
        words = [part for part in case.split("-") if part.isidentifier()]
        parts = {(test, word) for word in ["", *words]}
        jaxtyping.config.update("jaxtyping_disable", parts <= _met)
        _met.update(parts)
        _calls.clear()


# A shell starts background jobs with SIGINT ignored, and tests send it. Processes that tests start inherit this, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("matplotlib"):
    import matplotlib

    matplotlib.use("Agg")  # figures are drawn without a screen

# The tensors here are small: more threads only wait for each other, and each core has a test worker of its own.
torch.set_num_threads(1)

# Modules that are imported while tests are collected stay. Looking for garbage in them costs a fifth of the time.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures, which may have replaced what is asked here
def pytest_runtest_teardown():
    """Give large memory of a GPU back: workers share one, and torch would keep what a test of large strides took."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


ROOT = Path(__file__).parent.parent
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# ------------------------------------------------------------------------------------------------ a quick run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the first case of each test that is not marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.quick:
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = first.values()


# ------------------------------------------------------------------------------------------------ devices


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    """The CPU always, and the GPU when there is one."""
    return torch.device(request.param)


@pytest.fixture
def kernel_device() -> torch.device:
    """Where kernels run in this process: compiled on the GPU when there is one, else interpreted on the CPU."""
    return torch.device(DEVICES[-1])


def _version(package: str) -> tuple[int, ...]:
    return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))


needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None and _version("triton") < (3, 7) and _version("numpy") >= (2, 4),
    reason="asks Triton's interpreter, which is refused with this numpy: tests/tools/test_device.py",
)
"""Of tests whose kernels are interpreted even where there is a GPU."""


@pytest.fixture
def shapes_unchecked():
    """Switch jaxtyping off, so that a test of bad input meets the function's own error and not the annotation's."""
    from jaxtyping import config

    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


# ------------------------------------------------------------------------------------------------ figures


@pytest.fixture
def shown(monkeypatch):
    """The figures that were shown so far, each rendered: what cannot be drawn fails here."""
    import matplotlib.pyplot as plt

    caught = []

    def show():
        plt.gcf().canvas.draw()
        caught.append(plt.gcf())

    monkeypatch.setattr(plt, "show", show)
    yield caught
    plt.close("all")


@pytest.fixture
def unrendered(monkeypatch):
    """Let steppers draw each figure but not render it, which takes most of the time. Another test renders it."""
    monkeypatch.setattr("pagewise.figures.steps._png", lambda figure: b"")


# ------------------------------------------------------------------------------------------------ tolerance

ROW_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def assert_as_accurate_as_naive(out: Tensor, exact: Tensor, naive: Tensor, *, factor: float = 2.0) -> None:
    """The one tolerance policy. `exact` is the float64 oracle, `naive` the oracle's formula in the dtype under test.

    1. Everything is finite, and shape and dtype are those of `naive`.
    2. max|out − exact| ≤ factor · max|naive − exact| + one rounding of the largest output.
       `factor` is 2, and 3 for gradients.
    3. Every row is right by itself: ‖out − exact‖ ≤ a fraction of ‖exact‖ + factor · ‖naive − exact‖ + a few roundings
       of float32, so that a row of zeros never passes, however small the right one is.
    """
    assert out.shape == exact.shape == naive.shape, f"shapes {out.shape}, {exact.shape}, {naive.shape}"
    assert out.dtype == naive.dtype, f"dtype {out.dtype}, naive has {naive.dtype}"
    assert torch.isfinite(out).all(), "not finite"
    if not out.numel():
        return
    dtype = naive.dtype
    # What float32 (float64) arithmetic costs in any order of summation, and one rounding of the output. A GPU's exp2
    # and log2 are approximations with errors of 2 eps (PTX ISA: ex2.approx, lg2.approx): in a weight and in their sum.
    arithmetic = (8 if out.is_cuda else 4) * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    rounding = max(arithmetic, torch.finfo(dtype).eps / 2)
    out, exact, naive = (t.detach().double().cpu() for t in (out, exact, naive))
    largest = exact.abs().max()

    worst, allowed = (out - exact).abs().max(), factor * (naive - exact).abs().max() + rounding * largest
    assert worst <= allowed, f"largest error {worst:.2e}, allowed {allowed:.2e} ({factor:g} × naive's)"

    error, naive_error, size = (t.norm(dim=-1) for t in (out - exact, naive - exact, exact))
    row_allowed = ROW_TOLERANCE[dtype] * size + factor * naive_error + arithmetic * largest
    excess = error - row_allowed
    row = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    assert excess[row] <= 0, f"row {row}: error {error[row]:.2e} of {size[row]:.2e}, allowed {row_allowed[row]:.2e}"


def assert_results(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], naive: tuple[Tensor, Tensor]) -> None:
    """Compare (out, lse) by the policy. Rows that see no key must be 0 and −∞."""
    (out, lse), (exact_out, exact_lse), (naive_out, naive_lse) = found, exact, naive
    assert_as_accurate_as_naive(out, exact_out, naive_out)
    empty = exact_lse == -torch.inf
    assert (lse == -torch.inf).equal(empty)
    assert (out[empty] == 0).all()
    # A relative error of Σ exp(s) is an absolute one of its logarithm, also where that is near 0.
    seen = (torch.nn.functional.pad(x[~empty], (0, 1), value=1.0) for x in (lse, exact_lse, naive_lse))
    assert_as_accurate_as_naive(*seen)


# ------------------------------------------------------------------------------------------------ canaries

CANARY = -123.0


@pytest.fixture
def canaries(monkeypatch):
    """Surround every tensor of floats that is made without values by canaries, and fill it with NaN.

    The fixture is a function that fails if one of the canaries was written, and returns the number of such tensors.
    """
    buffers = []

    def surrounded(make):
        def call(*args, **options):
            like = make(*args, **options)
            if not like.is_floating_point():
                return like
            buffer = torch.full((like.numel() + 128,), CANARY, dtype=like.dtype, device=like.device)
            buffers.append(buffer)
            return buffer.as_strided(like.shape, like.stride(), 64).fill_(torch.nan)

        return call

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, surrounded(getattr(owner, name)))

    def check() -> int:
        ends = torch.cat(
            [end.cpu().float() for buffer in buffers for end in (buffer[:64], buffer[-64:])] or [torch.ones(0)]
        )
        assert (ends == CANARY).all(), "memory outside of a tensor was written"
        return len(buffers)

    return check


# ------------------------------------------------------------------------------------------------ kernels executed

executed: Counter[str] = Counter()
_from_workers: Counter[str] = Counter()


def triton_kernels() -> set[str]:
    """Every kernel of `pagewise.kernels`: the `@triton.jit` functions whose name ends in `_kernel`."""
    names = set()
    package = importlib.import_module("pagewise.kernels")
    for module in pkgutil.iter_modules(package.__path__):
        for name, value in vars(importlib.import_module(f"pagewise.kernels.{module.name}")).items():
            if name.endswith("_kernel") and hasattr(value, "fn"):
                names.add(name)
    return names


def cuda_kernels() -> set[str]:
    """Every `__global__` function of kernels/*.cu."""
    from cudascope.cpp.file import read

    folder = Path(importlib.import_module("pagewise.kernels").__file__).parent
    return {
        f"{name} (CUDA)"
        for file in folder.glob("*.cu")
        for name in {each.function for each in read(file.read_text()).kernels}
    }


def all_kernels() -> set[str]:
    return triton_kernels() | cuda_kernels()


def missing_kernels() -> set[str]:
    """Kernels that no test executed; that there are none of a kind is as bad."""
    none = {f"any in {kind}" for kind, found in (("Triton", triton_kernels()), ("CUDA", cuda_kernels())) if not found}
    return none | (all_kernels() - set(all_executed()))


def all_executed() -> Counter[str]:
    """Triton's launches and CudaKernel's, of this process and of xdist's workers."""
    return executed + _from_workers


def _count_cuda_launches() -> None:
    """Count each launch of a CudaKernel that was not refused by its function's name, on either device."""
    from cudascope import CudaKernel

    launch = CudaKernel._launch

    def counted(self, *args):
        launch(self, *args)
        executed[f"{self.function} (CUDA)"] += 1

    CudaKernel._launch = counted


def _count_triton_launches() -> None:
    """Count each launch of a Triton kernel by its name, compiled or interpreted."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter, jit

    for launcher in (jit.JITFunction, interpreter.InterpretedFunction):
        run = launcher.run

        def counted(self, *args, _run=run, **kwargs):
            executed[self.fn.__name__] += 1
            return _run(self, *args, **kwargs)

        launcher.run = counted


_count_cuda_launches()
_count_triton_launches()


def _is_whole_run(config: pytest.Config) -> bool:
    chosen = config.option
    selected = chosen.quick or chosen.keyword or chosen.markexpr or chosen.collectonly or getattr(chosen, "lf", False)
    return config.args_source == pytest.Config.ArgsSource.TESTPATHS and not selected


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    _from_workers.update(getattr(node, "workeroutput", {}).get("kernels", {}))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernels"] = dict(all_executed())
    elif exitstatus == 0 and _is_whole_run(session.config) and missing_kernels():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    ran, kernels = all_executed(), all_kernels()
    if not ran and not _is_whole_run(config):
        return
    mode = importlib.import_module("pagewise.tools.device").triton_mode()
    counts = ", ".join(f"{name} × {ran[name]}" for name in sorted(kernels & set(ran)))
    terminalreporter.write_line(f"kernels executed ({mode}): {counts or 'none'}")
    if _is_whole_run(config) and (missing := missing_kernels()):
        terminalreporter.write_line(
            f"FAILED: kernels never executed by any test: {', '.join(sorted(missing))}", red=True
        )
