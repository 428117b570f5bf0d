"""cudascope's counts beside ncu's: the page of ncu is read right, and both have the same launches."""

import pytest
import torch

from cudascope import CudaKernel, observe
from pagewise.experiments import hardware_counts
from pagewise.experiments.hardware_counts import METRICS, Counts, base_name, by_cudascope, by_ncu, row, rows_of


def page(*kernels: tuple[str, list[str]]) -> str:
    """A raw page of ncu 2025.3, with what ncu says before it. ncu prints more columns."""
    rows = [["ID", "Kernel Name", "Block Size", "Grid Size", *METRICS]]
    rows += [["", "", "", "", "sector", "sector", "sectors", "inst"]]
    rows += [[str(i), name, "(128, 1, 1)", "(2, 2, 1)", *numbers] for i, (name, numbers) in enumerate(kernels)]
    lines = [",".join(f'"{cell}"' for cell in cells) for cells in rows]
    return "\n".join(["==PROF== Connected to process 7", *lines, ""])


def test_the_page_of_ncu_is_read_and_torchs_kernels_are_left_out():
    text = page(
        ("void at::native::vectorized_elementwise_kernel<4, F>(int)", ["1"] * 4),
        (
            "void flash_attention_kernel<__half, 64, 32, 4>(T1 *, float *, const T1 *, const T1 *, const T1 *, int)",
            ["8,192", "2,112", "81,152 (0x7fadc18b9610: 512; 0x7fadc18b9c50: 768; 0x7fadc18ba130: 4,224)", "765,008"],
        ),
        ("online_softmax_kernel", ["2,512", "1,256", "1,280", "36,864"]),
    )
    first, second = by_ncu(text)
    assert first == Counts("flash_attention_kernel", 8192, 2112, 81152, 765008)
    assert second == Counts("online_softmax_kernel", 2512, 1256, 1280, 36864)


def test_a_row_shows_where_the_counts_differ():
    ours, theirs = Counts("k", 1000, 2, 3, 4), Counts("k", 1000, 2, 5, 6000)
    assert row("case", ours, theirs) == ("case", "k", "1,000", "2", "3 / 5", "4 / 6,000")


@pytest.mark.slow
def test_the_counts_of_a_launch():
    source = """
__global__ void k(const float* x, float* out) {
    __shared__ float row[32 * 32];
    row[threadIdx.x * 32] = x[threadIdx.x * 8];
    __syncwarp();
    out[threadIdx.x] = row[threadIdx.x * 32];
}"""
    x, out = (torch.empty(size + 16) for size in (256, 32))
    x, out = (each[-each.data_ptr() % 64 // 4 :] for each in (x, out))
    with observe() as report:
        CudaKernel(source, "k", through="ptx")[1, 32](x, out)
    ours = by_cudascope(report.launches[0])
    assert ours == Counts("k", 32, 4, 32 + 32, report.instructions.total)


def test_other_kernels_on_the_gpu_are_an_error(monkeypatch):
    monkeypatch.setattr(hardware_counts, "counted", lambda *_: [])
    monkeypatch.setattr(hardware_counts, "measured", lambda _: [Counts("merge_kernel", 0, 0, 0, 0)])
    with pytest.raises(RuntimeError, match="cudascope ran \\[\\], the GPU \\['merge_kernel'\\]"):
        rows_of("CUDA v1", "sm_90")


def test_the_name_of_a_kernel_has_no_arguments():
    assert (
        base_name("softmax<float, (int)3>(float*)") == base_name("softmax(float*)") == base_name("softmax") == "softmax"
    )
