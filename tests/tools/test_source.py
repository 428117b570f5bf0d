"""Showing the live source: what the page says is what the file says."""

import inspect
from pathlib import Path

import pytest

pytest.importorskip("IPython", reason="only lessons show source, and they run in IPython")

from pagewise import naive_attention
from pagewise.kernels.online_softmax import online_softmax_kernel
from pagewise.naive_attention import attention, finite, grouped_matmul
from pagewise.tools.source import cuda_source, show, show_cuda, show_cuda_part, show_part, source


def documented(x):
    """One line.

    And more: def not_code(): return "docstring"
    """
    # a comment that says why
    text = """not a docstring"""  # another

    def inner():
        "An inner docstring."
        return x, text

    return inner


class Documented:
    """About the class."""

    size: int = 3

    def method(self):
        """About the method."""
        return self.size


class OnlyDocumented(ValueError):
    """All there is to say."""


def undocumented(x):
    "not".join(x)
    return x


SHOWN = {
    documented: """\
def documented(x):
    # a comment that says why
    text = \"\"\"not a docstring\"\"\"  # another

    def inner():
        return x, text

    return inner""",
    Documented: "class Documented:\n    size: int = 3\n\n    def method(self):\n        return self.size",
    Documented.method: "def method(self):\n    return self.size",
    OnlyDocumented: inspect.getsource(OnlyDocumented).rstrip(),  # without it, the class would have no body
    undocumented: inspect.getsource(undocumented).rstrip(),
}


@pytest.mark.parametrize(("obj", "shown"), SHOWN.items(), ids=lambda obj: getattr(obj, "__qualname__", ""))
def test_docstrings_are_dropped_and_comments_and_other_strings_stay(obj, shown):
    assert source(obj) == shown


@pytest.mark.parametrize("obj", [attention, finite, grouped_matmul], ids=lambda f: f.__name__)
def test_docstring_on_request_is_the_text_of_the_file(obj):
    file = Path(naive_attention.__file__).read_text()
    assert source(obj, docstring=True) in file
    assert '"""' in source(obj, docstring=True)


def test_triton_kernel_is_shown_with_its_decorator_and_comments():
    lines = source(online_softmax_kernel).splitlines()
    assert lines[:2] == ["@triton.jit", "def online_softmax_kernel("]
    assert any("# [rows, num_cols], contiguous" in line for line in lines)


def test_show_makes_one_python_block_of_all_it_is_given():
    block = show(finite, undocumented).data
    assert block == f"```python\n{source(finite)}\n\n{source(undocumented)}\n```"
    assert '"""m, with 0' in show(finite, docstring=True).data


CUDA = """\
// Twice x.
// Really.
template <typename T, int N>
__device__ T twice(
    T x)  // a number
{
    if (x > 0) { return 2 * x; }
    return x + twice_of(x);
}
struct Sum {
    float total;
};
__global__ void k(float* x) { x[0] = twice<float, 1>(x[0]); }
"""


def test_a_cuda_function_comes_with_its_comment_and_ends_with_its_brace():
    assert cuda_source(CUDA, "twice") == CUDA[: CUDA.index("struct")].rstrip()
    assert cuda_source(CUDA, "Sum") == "struct Sum {\n    float total;\n}"
    assert cuda_source(CUDA, "k") == "__global__ void k(float* x) { x[0] = twice<float, 1>(x[0]); }"
    with pytest.raises(ValueError, match="no definition of thrice"):
        cuda_source(CUDA, "thrice")


def test_cuda_functions_are_shown_as_one_block(tmp_path):
    (tmp_path / "x.cu").write_text(CUDA)
    shown = show_cuda(tmp_path / "x.cu", "k", "Sum").data
    assert shown.startswith("```cpp\n__global__")
    assert shown.endswith("};\n```") or shown.endswith("}\n```")


def test_a_part_of_a_cuda_function_runs_from_line_to_line_without_its_indent(tmp_path):
    file = tmp_path / "kernel.cu"
    file.write_text("__global__ void f() {\n    int first = 0;\n#pragma unroll\n    for (;;)\n        first++;\n}\n")
    assert show_cuda_part(file, "f", "for", "first").data == "```cpp\nfor (;;)\n    first++;\n```"
    assert "pragma" not in show_cuda_part(file, "f", "int", "++").data
    for missing in (("while", "first"), ("for", "int first")):
        with pytest.raises(ValueError, match="f has no lines from"):
            show_cuda_part(file, "f", *missing)


def test_a_part_of_a_function_is_dedented():
    assert show_part(documented, "def inner", "return").data == "```python\ndef inner():\n    return x, text\n```"
    with pytest.raises(ValueError, match="documented has no lines from 'return inner' to 'def'"):
        show_part(documented, "return inner", "def")
