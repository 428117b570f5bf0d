"""Files of torch extensions: what their kernels use of torch's headers."""

from pathlib import Path

import pytest
import torch

from cudascope import CudaKernel, Finding, check

pytestmark = pytest.mark.slow  # a build of large headers
FILE = Path(__file__).parent / "torch_device_side.cu"


@pytest.mark.parametrize(("name", "dtype"), [("c10::Half", torch.float16), ("at::BFloat16", torch.bfloat16)])
def test_numbers_of_16_bits_are_computed_as_torch_computes_them(name, dtype):
    patterns = torch.arange(-(2**15), 2**15, 5, dtype=torch.int16)
    x, y = patterns.view(dtype), patterns.flip(0).roll(777).view(dtype)
    n = len(x)
    out, is_so = torch.empty(9, n, dtype=dtype), torch.empty(4, n, dtype=torch.bool)
    CudaKernel(FILE, f"numbers<{name}>")[4, 128](x, y, out, is_so, n)
    want = [x + y, x - y, x * y, x / y, -x, x + 1, (x.float() + 1.001).to(dtype), torch.fmax(x, y)]
    want.append(torch.fmin(x, torch.full_like(x, 2)))
    assert torch.equal(is_so, torch.stack([x < y, x >= 0, x != y, x.isnan()]))
    for row, expected in zip(out, want, strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=0, equal_nan=True)


def warps_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0)).half().t()  # its rows are not contiguous
    return x, torch.zeros(3, 43, dtype=torch.float16), torch.arange(10, 22).view(3, 4)[:, 1]


def test_warp_functions_atomics_and_tensors_by_value():
    x, out, index = warps_data()
    with check():
        CudaKernel(FILE, "warps<at::Half>")[3, 32](x, out, index, 32)
    assert torch.equal(out[:, 0], x[:, 3])
    assert torch.equal(out[:, 1], x[:, 0])
    last, first = x[:, 31:], x[:, :1]
    assert torch.equal(out[:, 2:34], torch.cat([x[:, 1:], last], 1) - torch.cat([first, x[:, :-1]], 1))
    assert torch.equal(out[:, 40:].float(), torch.stack([torch.full((3,), 32.0), x.float().amax(1).clamp(0), index], 1))


def test_an_index_past_a_tensor_by_value_is_found_with_the_tensors_name():
    x, out, index = warps_data()
    with pytest.raises(Finding, match=r"reads x\[\d+\], past its end") as raised, check():
        CudaKernel(FILE, "warps<at::Half>")[3, 64](x, out, index, 32)
    assert "x[row][lane]" in str(raised.value)


def test_an_assertion_of_a_kernel_is_found():
    x, out, index = warps_data()
    with pytest.raises(Finding, match="assertion failed: columns <= "), check():
        CudaKernel(FILE, "warps<at::Half>")[3, 32](x, out, index, 33)


REFUSED = {
    "another number of dimensions": ((0,), ValueError, "x must have 2 dimensions .*, got 1"),
    "another dtype": (None, TypeError, "x must be float16 .*, got float32"),
    "no array": ("3", TypeError, "x must be a tensor float16"),
}


@pytest.mark.parametrize(("change", "error", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_tensor_of_the_declared_kind_is_refused(change, error, sentence):
    x, out, index = warps_data()
    x = x[change] if isinstance(change, tuple) else x.float() if change is None else change
    with pytest.raises(error, match=sentence):
        CudaKernel(FILE, "warps<at::Half>")[3, 32](x, out, index, 32)


def test_the_other_types_convert_as_torchs_do():
    x = torch.linspace(-440, 440, 64)  # above 448 it depends on torch's version
    x[10:20] *= 1e-3
    out = torch.empty(5, 64)
    with check():
        CudaKernel(FILE, "more_types")[1, 64](x, out)
    z = torch.complex(x, torch.ones(64))
    quotient = z * z / 2j
    limits = [65504, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float16).eps, -torch.inf, 3]
    assert out[4, :5].tolist() == limits
    want = torch.stack([x.to(torch.float8_e4m3fn).float(), x.to(torch.float8_e5m2).float()])
    torch.testing.assert_close(out[:2], want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out[2:4], torch.stack([quotient.real, quotient.imag]))


def test_torchs_own_headers_are_not_read_even_where_they_are(tmp_path):
    folder = tmp_path / "torch" / "include"
    for name in ("c10/macros/Macros.h", "c10/util/Half.h", "torch/extension.h"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("#error host code\n")
    source = '#include <torch/extension.h>\n#include "c10/util/Half.h"\n__global__ void k(c10::Half* x) { x[0] *= 2; }'
    x = torch.ones(1, dtype=torch.float16)
    CudaKernel(source, "k", options=[f"-I{folder}"])[1, 1](x)
    assert x[0] == 2


def test_nvrtc_takes_the_same_file():
    for name in ("numbers<at::BFloat16>", "warps<c10::Half>"):
        assert CudaKernel(FILE, name).resources("sm_90").registers > 0
