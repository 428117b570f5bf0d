"""`%%cuda name`: a cell of CUDA C++ becomes a kernel, and messages point at the cell's lines."""

import pytest
import torch

pytest.importorskip("IPython.core", reason="a cell magic is IPython's")
from IPython.core.interactiveshell import InteractiveShell

import cudascope
from cudascope import CompileError, CudaKernel
from cudascope.command import magic

SCALE = """template <typename T>
__global__ void scale(T* x, int n) {
    if (threadIdx.x <= n) x[threadIdx.x] *= FACTOR;
}
"""


@pytest.fixture
def shell():
    shell = InteractiveShell.instance()
    magic.load_ipython_extension(shell)
    yield shell
    shell.reset(new_session=False)


def test_a_cell_becomes_a_kernel_of_that_name(shell):
    shell.run_cell("%%cuda scale<float> -DFACTOR=3\n" + SCALE).raise_error()
    kernel, x = shell.user_ns["scale"], torch.ones(4)
    assert isinstance(kernel, CudaKernel)
    kernel[1, 3](x, 3)
    assert x.tolist() == [3, 3, 3, 1]


@pytest.mark.slow
def test_a_cell_may_have_the_host_code_too(shell):
    main = "#include <vector>\nint main() { std::vector<float> x(4); scale<float><<<1, 4>>>(x.data(), 4); }"
    shell.run_cell(f"%%cuda scale<float> -DFACTOR=3\n{SCALE}{main}").raise_error()
    x = torch.ones(2)
    shell.user_ns["scale"][1, 2](x, 2)
    assert x.tolist() == [3, 3]


def test_a_compilers_complaint_names_the_line_of_the_cell_and_shows_no_traceback(shell, capsys):
    shell.user_ns["scale"] = "the kernel of the cell before"
    result = shell.run_cell("%%cuda scale<float>\n" + SCALE)  # no FACTOR
    assert isinstance(result.error_in_exec, CompileError)
    shown = capsys.readouterr().out
    assert "scale.cu:4:" in shown  # the magic's own line is the first
    assert "Traceback" not in shown
    assert "magic.py" not in shown
    assert "scale" not in shell.user_ns


def test_the_runners_checks_name_the_line_of_the_cell(shell):
    shell.run_cell("%%cuda scale<float> -DFACTOR=3\n" + SCALE).raise_error()
    with pytest.raises(cudascope.Finding, match="line 4 `if") as error, cudascope.check():
        shell.user_ns["scale"][1, 8](torch.ones(4), 4)
    assert error.value.line == 4


@pytest.mark.parametrize("line", ["", "-DX=1", "two words", "scale 3", "scale -DX=1 scale"])
def test_a_line_that_is_no_name_says_what_to_write(shell, line, capsys):
    assert not shell.run_cell(f"%%cuda {line}\n{SCALE}").success
    assert "write the kernel's name: %%cuda name" in "".join(capsys.readouterr())


def test_another_name_than_the_kernels_names_those_there_are(shell, capsys):
    assert not shell.run_cell("%%cuda other\n" + SCALE).success
    assert "the source has no kernel 'other'; it has scale" in capsys.readouterr().out
