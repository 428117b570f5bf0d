"""The choice of the device and of how Triton runs. It falls at import, so some tests start a fresh Python."""

import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys

import pytest
import torch

from conftest import ROOT, needs_interpreter
from cudascope import observe, triton_compiled
from cudascope.gpus import BY_SM
from pagewise.online_softmax import online_softmax
from pagewise.tools.architecture import CPU, SHARED_BYTES, Architecture, architecture
from pagewise.tools.device import banner, best_device, check_triton_device, choose_triton_mode, triton_mode


def fresh_python(code, **environment):
    """Return the words that `code` prints in a new process without a GPU. TRITON_INTERPRET is set only if given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "PAGEWISE"))}
    env = inherited | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# ------------------------------------------------------------------------------------------------ import pagewise


OF_A_GPU = """
from types import SimpleNamespace
from pagewise.tools.architecture import architecture
torch.cuda.get_device_properties = lambda device: SimpleNamespace(
    major=9, minor=0, shared_memory_per_block_optin=232448, multi_processor_count=132
)
add = torch.compile(lambda x, device: x + architecture(device).num_sms, fullgraph=True, backend=lambda graph, _: graph)
print(add(torch.zeros(1), torch.device("cuda", 0)).item(), add(torch.zeros(1), torch.device("cpu")).item())
"""


@pytest.fixture(scope="module")
def pagewise_first():
    """Import pagewise in a process where each warning is an error, and run OF_A_GPU there. Return the words printed."""
    return fresh_python(
        "import os, sys, time, torch\n"
        "torch.cuda.is_available()\n"  # what a driver takes to answer is not the import's
        "before = set(sys.modules)\n"
        "start = time.process_time()\n"
        "import pagewise\n"
        "print(time.process_time() - start, os.environ.get('TRITON_INTERPRET'), *set(sys.modules) - before)\n"
        + OF_A_GPU,
        PYTHONWARNINGS="error",
    )


@pytest.mark.slow
def test_import_is_quick_chooses_the_interpreter_without_a_gpu_and_brings_no_kernel_engine_or_drawing(pagewise_first):
    seconds, mode, *brought = pagewise_first[:-2]
    assert float(seconds) < 0.3
    assert mode == "1"
    assert {"triton", "matplotlib", "IPython", "jaxtyping", "cuda", "transformers"}.isdisjoint(
        module.split(".")[0] for module in brought
    )
    assert {"pagewise", "pagewise.tools.device"} <= set(brought)
    assert not any(module.startswith(("pagewise.kernels", "pagewise.engine")) for module in brought)


@pytest.fixture(scope="module")
def triton_first():
    """Import triton before pagewise in a process, and in the other order in its child. Return the words printed."""
    child = "import pagewise, torch; from pagewise.tools.device import check_triton_device as check; "
    child += "check(torch.device('cpu')); print('fine')"
    return fresh_python(f"""
import triton, torch, subprocess, sys
from pagewise.online_softmax import online_softmax
print(online_softmax(torch.zeros(1, 2), 2, backend="torch").tolist() == [[0.5, 0.5]])
try:
    online_softmax(torch.zeros(1, 2), 2, backend="triton")
except RuntimeError as error:
    print("import pagewise before triton" in str(error), "TRITON_INTERPRET=1" in str(error))
child = subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True)
print(child.stdout or child.stderr.replace(" ", "_"))
""")


@pytest.mark.slow
def test_triton_imported_too_early_is_an_error_that_says_what_to_do_and_torch_works(triton_first):
    assert triton_first[:3] == ["True"] * 3


@pytest.mark.slow
@needs_interpreter
def test_children_of_a_process_that_imported_triton_too_early_are_not_refused(triton_first):
    """They import pagewise first: what their parent did must not stick to the environment."""
    assert triton_first[3:] == ["fine"]


# ------------------------------------------------------------------------------------------------ the choice, in here


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has two GPUs, the second of them current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Toy")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("gpu")
def test_gpu_leaves_triton_alone(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choose_triton_mode()
    assert "TRITON_INTERPRET" not in os.environ
    assert triton_mode() == "compiled"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("value", ["0", "1"])
def test_choice_of_the_user_stays(value, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    choose_triton_mode()
    assert os.environ["TRITON_INTERPRET"] == value


@needs_interpreter
@pytest.mark.usefixtures("no_gpu")
def test_triton_imported_early_is_fine_if_told_to_interpret(monkeypatch):
    import triton  # noqa: F401

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    choose_triton_mode()
    check_triton_device(torch.device("cpu"))


@pytest.mark.usefixtures("gpu")
def test_best_device_is_the_current_gpu():
    assert best_device() == torch.device("cuda", 1)


@pytest.mark.parametrize(("value", "mode"), [("1", "interpreted"), ("0", "compiled"), (None, "compiled")])
def test_triton_mode_is_what_the_environment_says(value, mode, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert triton_mode() == mode


@pytest.fixture
def installed(monkeypatch):
    """Return a function that says which versions are installed."""

    def installed(**versions):
        monkeypatch.setattr(importlib.util, "find_spec", versions.get)
        monkeypatch.setattr(importlib.metadata, "version", versions.get)

    return installed


def test_missing_triton_is_unavailable(installed):
    installed()
    assert triton_mode() == "unavailable"


@pytest.mark.parametrize(
    ("mode", "device", "versions"),
    [
        ("0", "cuda", None),
        ("0", "cuda:1", None),
        pytest.param("1", "cpu", None, marks=needs_interpreter),
        ("1", "cuda", {"triton": "3.6.0", "numpy": "2.3.5"}),
        ("1", "cuda", {"triton": "3.7.1", "numpy": "2.5.0"}),
        ("0", "cuda", {"triton": "3.6.0", "numpy": "2.5.0"}),
    ],
)
def test_tensors_are_welcome_where_triton_runs(mode, device, versions, installed, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", mode)
    if versions:
        installed(**versions)
    check_triton_device(torch.device(device))


@pytest.mark.parametrize(
    ("mode", "versions", "error", "words"),
    [
        ("1", {}, ValueError, 'install it, or use backend="torch"'),
        ("0", {"triton": "3.7.1"}, ValueError, r'on cpu, .*backend="torch".*TRITON_INTERPRET=1'),
        (
            "1", {"triton": "3.6.0", "numpy": "2.4.0"}, RuntimeError,
            "triton 3.6.0 fails with numpy 2.4.0: install triton>=3.7, or numpy<2.4",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_gpu")
def test_a_cpu_where_triton_cannot_run_is_refused_with_the_remedy(mode, versions, error, words, installed, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", mode)
    installed(**versions)
    with pytest.raises(error, match=words):
        check_triton_device(torch.device("cpu"))


# ------------------------------------------------------------------------------------------------ the banner


@pytest.mark.usefixtures("no_gpu")
def test_banner_names_cpu_versions_and_mode(monkeypatch):
    import triton

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    expected = f"CPU · torch {torch.__version__} · triton {triton.__version__}, interpreted"
    assert banner() == expected


@pytest.mark.usefixtures("gpu")
def test_banner_names_the_gpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert banner().startswith("NVIDIA Toy · torch ")
    assert banner().endswith(", compiled")


@pytest.mark.usefixtures("no_gpu")
def test_banner_says_when_triton_is_missing(installed):
    installed()
    assert banner().endswith("no triton")


# ------------------------------------------------------------------------------------------------ triton_compiled


def test_inside_triton_compiled_kernels_are_compiled_for_that_gpu_and_take_cpu_tensors():
    cpu = torch.device("cpu")
    outside = triton_mode()
    with triton_compiled("sm_86"):
        assert triton_mode() == "compiled"
        assert architecture(cpu) == Architecture(86, SHARED_BYTES[86], 82)
        check_triton_device(cpu)
    assert architecture(cpu) is CPU
    assert triton_mode() == outside


@pytest.mark.parametrize("sm", SHARED_BYTES)
def test_the_gpu_of_an_architecture_is_the_same_everywhere(sm, monkeypatch):
    """For Triton programs, for the choice of tiles, and for the tests' stand-in of a GPU."""
    import triton

    with triton_compiled(f"sm_{sm}"):
        told = triton.runtime.driver.active.utils.get_device_properties(0)
        ours = architecture(torch.device("cpu"))
    monkeypatch.setenv("STUB_CC", f"{sm // 10}.{sm % 10}")
    attributes = runpy.run_path(str(ROOT / "tests" / "rehearsal" / "driver.py"))["DEVICE_ATTRIBUTES"]
    gpu = BY_SM[sm]
    assert gpu.sm == sm
    assert (told["max_shared_mem"], told["multiprocessor_count"]) == (gpu.shared_bytes, gpu.num_sms)
    assert ours == Architecture(sm, gpu.shared_bytes, gpu.num_sms)
    assert (attributes[97], attributes[16]) == (gpu.shared_bytes, gpu.num_sms)


@pytest.mark.slow
def test_a_compiled_kernel_reads_bfloat16_where_the_interpreter_gets_copies_in_float32():
    x = torch.randn(2, 64).bfloat16()
    with triton_compiled("sm_80"), observe() as report:
        out = online_softmax(x, 64, backend="triton")
    assert report.count("write", "global").bytes == 2 * x.numel()
    torch.testing.assert_close(out, x.float().softmax(-1).bfloat16())


@pytest.mark.slow
def test_torch_compile_takes_the_architecture_of_a_gpu_for_a_constant(pagewise_first):
    """Without that, it warns of a function with a cache that it traces, and cannot trace the question for a GPU."""
    assert pagewise_first[-2:] == ["132.0", "1.0"]
