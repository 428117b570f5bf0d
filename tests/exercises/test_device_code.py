"""The exercises' kernels on a GPU that need not be there: they compile for it, and nothing spills."""

import importlib.util
from pathlib import Path

import pytest
from triton_compile import compile_triton

import pagewise.exercises.device_code
from pagewise.cuda import CudaKernel
from pagewise.exercises import solutions
from pagewise.exercises.checkers import BY_NAME

FOLDER = Path(pagewise.exercises.device_code.__file__).parent
_THREE = ["*fp32", "i32", "i32", 1]
_FOUR = ["*fp32", "i32", "i32", "i32", 1]
KERNELS = {
    "online_softmax_kernel": ("softmax_kernel", {"x_ptr": "*fp32", "out_ptr": "*fp32", "num_cols": "i32"}, {"TILE": 4}),
    "paged_decode_kernel": (
        "paged_decode_kernel",
        {"q": _THREE, "k_cache": _FOUR, "v_cache": _FOUR, "block_tables": ["*i32", "i32", 1]}
        | {"seq_lens_ptr": "*i32", "out": _THREE, "scale": "fp32"},
        {"P": 8, "D": 16, "GROUP": 2, "ROWS": 16, "TILE": 16},
    ),
    "flash_forward_kernel": (
        "flash_forward_kernel",
        {**dict.fromkeys("qkv", _FOUR), "out": _FOUR, "lse": _THREE, "group": "i32", "T": "i32", "S": "i32"}
        | {"scale": "fp32"},
        {"D": 16, "BLOCK_D": 16, "ROWS": 16, "COLS": 16, "CAUSAL": True},
    ),
}


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_a_triton_solution_compiles(name, sm, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(BY_NAME[name].solution)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function, signature, constexprs = KERNELS[name]
    assert compile_triton(getattr(module, function), signature, constexprs, sm).spilled_bytes == 0


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.cu")), ids=lambda file: file.stem)
def test_a_cuda_solution_compiles(file):
    resources = CudaKernel(solutions[file.stem], file.stem).resources("sm_90")
    assert resources.spilled_bytes == 0
    assert resources.registers <= 64
