"""The CUDA kernels compile for the architectures that learners have, and the shared memory of a launch fits.

A call launches nothing here. A stand-in for each kernel notes the instantiation and the dynamic shared memory of the
launch, and the test then compiles the kernel for the architecture. The two slower tests compile for sm_75, which lacks
instructions, and divide sm_86, sm_100 and sm_120 between them. With PAGEWISE_FULL=1 they compile for all. The tests of
each kernel compile more instantiations for sm_80 and sm_90.
"""

import importlib

import pytest
import torch
from covering import is_full

from pagewise.flash_attention import in_cuda as flash
from pagewise.options import ScoreOptions
from pagewise.paged_attention import in_cuda as paged
from pagewise.paged_attention import paged_attention_grouped, paged_attention_v1, paged_attention_v2
from pagewise.tools.architecture import SHARED_BYTES, Architecture

pytestmark = pytest.mark.slow

flat = importlib.import_module("pagewise.flash_decoding_plus_plus.flat_gemm")


class StandIn:
    """Notes (kernel, dynamic shared memory) of each launch."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, launch):
        self.launches.append((self.kernel, launch[2] if len(launch) > 2 else 0))
        return lambda *arguments: None


@pytest.fixture
def launches(sm, monkeypatch):
    """The launches of the test so far, for a GPU of this architecture."""
    noted = []
    make = paged.cuda_kernel
    for module in (paged, flash, flat):
        monkeypatch.setattr(module, "cuda_kernel", lambda *sizes: StandIn(make(*sizes), noted))
    for module in (paged, flat):
        monkeypatch.setattr(module, "shared_bytes_limit", lambda device: SHARED_BYTES[sm])
    monkeypatch.setattr(flat, "architecture", lambda device: Architecture(sm, SHARED_BYTES[sm], num_sms=40))
    return noted


def assert_compile_and_fit(launches, sm):
    """Assert also that no register spills."""
    for kernel, dynamic in launches:
        taken = kernel.resources(f"sm_{sm}")
        assert taken.shared_bytes + dynamic <= SHARED_BYTES[sm], kernel.name
        assert taken.spilled_bytes == 0, kernel.name


def paged_tensors(dtype, cache_dtype, head_size, block_size):
    x = 16 // cache_dtype.itemsize
    return (
        torch.zeros(1, 8, head_size, dtype=dtype),
        torch.zeros(1, 1, head_size // x, block_size, x, dtype=cache_dtype),
        torch.zeros(1, 1, head_size, block_size, dtype=cache_dtype),
        torch.zeros(1, 10_000, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )


HALF, BFLOAT16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("sm", SHARED_BYTES if is_full() else [75, 120])
def test_paged_attention(sm, launches, shapes_unchecked):
    """Also bfloat16 and float8. Where an architecture lacks an instruction, CUDA's headers convert with integers."""
    tensors = paged_tensors(BFLOAT16, BFLOAT16, 64, 16)
    longest = (SHARED_BYTES[sm] - paged.static_bytes(tensors[0])) // 4 // 16 * 16
    paged_attention_v1(*tensors, max_seq_len=longest)
    with pytest.raises(ValueError, match=f"enough for {longest} tokens: use paged_attention_v2"):
        paged_attention_v1(*tensors, max_seq_len=longest + 1)
    paged_attention_v2(*paged_tensors(HALF, E4M3, 32, 16), max_seq_len=2000)
    paged_attention_grouped(*paged_tensors(BFLOAT16, BFLOAT16, 256, 16), max_seq_len=2000)
    assert_compile_and_fit(launches, sm)
    assert [kernel.name.split("<")[0].removeprefix("paged_attention_") for kernel, _ in launches] == [
        "v1_kernel", "v2_kernel", "merge_kernel", "grouped_kernel", "merge_kernel",
    ]  # fmt: skip


@pytest.mark.parametrize("sm", SHARED_BYTES)
def test_flat_gemm(sm, launches):
    """sm_80 and later use tensor cores, sm_75 uses CUDA cores. 64 rows need the most shared memory."""
    for M, dtype in ((64, HALF), (8, BFLOAT16)):
        flat.flat_gemm(torch.zeros(M, 64, dtype=dtype), torch.zeros(40 * 32, 64, dtype=dtype))
    assert_compile_and_fit(launches, sm)
    assert {kernel.name.split("<")[0] for kernel, _ in launches} == {"gemv_kernel" if sm < 80 else "flat_gemm_kernel"}


@pytest.mark.parametrize("sm", SHARED_BYTES if is_full() else [75, 86, 100])
def test_flash_attention(sm, launches, shapes_unchecked):
    q = torch.zeros(1, 1, 1, 64, dtype=BFLOAT16)
    flash.forward(q, q, q, ScoreOptions())
    assert_compile_and_fit(launches, sm)
    too_large = {
        (dtype, head_size)
        for dtype in (torch.float32, HALF, BFLOAT16)
        for head_size in flash.HEAD_SIZES
        if flash.tile_bytes(dtype, head_size) > SHARED_BYTES[sm]
    }  # the launch refuses these
    assert too_large == ({(torch.float32, head_size) for head_size in (96, 112, 128)} if sm == 75 else set())
