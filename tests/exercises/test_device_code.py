"""The exercises' kernels on a GPU that need not be there: they compile for it, and nothing spills."""

import importlib.util
from pathlib import Path

import pytest
from triton_compile import compile_triton

import pagewise.exercises.device_code
from cudascope import CudaKernel
from pagewise.exercises import solutions
from pagewise.exercises.checkers import BY_NAME

pytestmark = pytest.mark.slow

FOLDER = Path(pagewise.exercises.device_code.__file__).parent


TRITON = {
    "one_pass_kernel": ({"s_ptr": "*fp32", "v_ptr": "*fp32", "out_ptr": "*fp32", "num_keys": "i32"}, {"TILE": 4}),
    "merge_kernel": (
        {"m_ptr": "*fp32", "l_ptr": "*fp32", "acc_ptr": "*fp32", "out_ptr": "*fp32", "num_splits": "i32"},
        {"D": 64},
    ),
}


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("name", TRITON)
def test_a_triton_solution_compiles(name, sm, tmp_path):
    path = tmp_path / "solution.py"
    path.write_text(BY_NAME[name].solution)
    spec = importlib.util.spec_from_file_location("solution", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert compile_triton(getattr(module, name), *TRITON[name], sm).spilled_bytes == 0


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.cu")), ids=lambda file: file.stem)
def test_a_cuda_solution_compiles(file):
    resources = CudaKernel(solutions[file.stem], file.stem).resources("sm_90")
    assert resources.spilled_bytes == 0
    assert resources.registers <= 64
