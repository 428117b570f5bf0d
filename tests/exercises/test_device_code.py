"""The exercises' kernels on a GPU that need not be there: they compile for it, and nothing spills."""

import importlib.util
from pathlib import Path

import pytest
from triton_compile import compile_triton

import pagewise.exercises.device_code
from pagewise.cuda import CudaKernel
from pagewise.exercises import solutions

FOLDER = Path(pagewise.exercises.device_code.__file__).parent
KERNELS = {
    "online_softmax_kernel": ("softmax_kernel", {"x_ptr": "*fp32", "out_ptr": "*fp32", "num_cols": "i32"}, {"TILE": 4}),
    "decode_block": (
        "decode_kernel",
        {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*fp32"),
            **{"block": "i32", "num_tokens": "i32", "scale": "fp32"},
        },
        {"P": 4, "D": 4},
    ),
    "flash_kernel": (
        "flash_kernel",
        {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*fp32"),
            **{"T": "i32", "S": "i32", "scale": "fp32"},
        },
        {"BR": 16, "BC": 16, "D": 16},
    ),
    "decode_split": (
        "decode_split",
        {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "m_ptr", "l_ptr", "acc_ptr"), "*fp32"),
            **{"S": "i32", "scale": "fp32"},
        },
        {"TILE": 4, "D": 4},
    ),
}


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_a_triton_solution_compiles(name, sm):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function, signature, constexprs = KERNELS[name]
    assert compile_triton(getattr(module, function), signature, constexprs, sm).spilled_bytes == 0


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.cu")), ids=lambda file: file.stem)
def test_a_cuda_solution_compiles(file):
    resources = CudaKernel(solutions[file.stem], file.stem).resources("sm_90")
    assert resources.spilled_bytes == 0
    assert resources.registers <= 64
