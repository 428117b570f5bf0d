"""Tests of launches on a GPU. tests/test_rehearsal.py runs this file with the stand-in GPU.

The launcher does right, and if it did not, the rehearsal would notice: one planted bug of each kind.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import repeat_launches
import torch

from cudascope import CudaKernel
from cudascope.kernels import on_gpu as cuda_gpu
from pagewise.flash_attention import flash_attention, in_cuda
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus import dataflow
from pagewise.flash_decoding_plus_plus.dataflow import Dataflow, device_label
from pagewise.online_softmax import online_softmax
from pagewise.options import ScoreOptions
from pagewise.paged_attention import (
    in_triton,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    paged_attention_varlen,
)
from pagewise.paged_attention_varlen import Step, plan
from pagewise.paged_blocks import PagedKVCache, to_vllm_layout
from pagewise.tools import device
from pagewise.tools.architecture import architecture
from pagewise.tools.timing import ColdTimer
from rehearsal import driver, launches, plugin

FILL = "__global__ void fill(float* x, long n, float y) { if (threadIdx.x < n) x[threadIdx.x] = y; }"
MANY = (1 << 33) + 5  # does not fit in 32 bits


@pytest.fixture
def fill():
    return CudaKernel(FILL, "fill")


@pytest.fixture
def x():
    return torch.zeros(32, device="cuda")


@pytest.fixture
def other_gpu():
    """Not the current one: what is launched where Triton or torch stands, and not where its tensors are, is found."""
    return torch.device("cuda", 1)


def in_new_thread(run):
    """Return the exception that `run()` raises in a new thread, or None."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).exception()


# ------------------------------------------------------------------------------------------------ what it does right


@pytest.mark.parametrize("gpu", ["cuda:0", "cuda:1"])
def test_a_cuda_kernel_runs_on_the_gpu_of_its_tensors(fill, gpu):
    x = torch.zeros(32, device=gpu)
    fill[1, 32](x, MANY, 2.0)
    assert x.unique().tolist() == [2.0]


def test_a_cuda_kernel_runs_in_a_new_thread(fill, x):
    fill[1, 32](x, MANY, 1.0)
    assert in_new_thread(lambda: fill[1, 32](x, MANY, 2.0)) is None
    assert x.unique().tolist() == [2.0]


def test_a_graph_may_be_captured_right_after_compiling(fill, x):
    fill.compile("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill[1, 32](x, MANY, 2.0)
    assert x.unique().tolist() == [0.0]
    graph.replay()
    assert x.unique().tolist() == [2.0]


def test_a_time_is_taken_from_a_cold_cache(fill, x):
    timer = ColdTimer()
    assert timer(lambda: fill[1, 32](x, MANY, 2.0)) == pytest.approx(1e-3)  # from one event to the next, here
    assert timer.hidden


def paged_cache(gpu):
    cache = PagedKVCache(1, 8, 16, 2, 32, dtype=torch.float16, device=gpu)
    tables, lens = torch.tensor([[3, 1], [2, 5]], dtype=torch.int32), torch.tensor([20, 17], dtype=torch.int32)
    slots = torch.cat([tables[b].repeat_interleave(16)[:n] * 16 + torch.arange(n) % 16 for b, n in enumerate(lens)])
    k, v = torch.randn(2, 37, 2, 32, generator=torch.Generator().manual_seed(0)).half().to(gpu)
    cache.write(0, slots.to(gpu), k, v)
    return cache.k[0], cache.v[0], tables.to(gpu), lens.to(gpu)


def test_every_triton_kernel_runs_on_the_gpu_of_its_tensors(other_gpu, monkeypatch):
    """The rehearsal holds each launch's context against its tensors, and interprets one program after the other."""
    few = architecture(other_gpu)._replace(num_sms=4)
    monkeypatch.setattr(in_triton, "architecture", lambda device: few)
    x = torch.randn(3, 50, device=other_gpu)
    torch.testing.assert_close(online_softmax(x, 16, backend="triton"), x.softmax(dim=-1))
    q, cache = torch.randn(2, 4, 32, device=other_gpu).half(), paged_cache(other_gpu)
    expected = paged_attention(q, *cache, backend="torch")
    for num_splits in (1, 3):
        out = paged_attention(q, *cache, num_splits=num_splits, backend="triton")
        torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-3)
    q, ends = torch.randn(3, 4, 32, device=other_gpu).half(), torch.tensor([0, 1, 3], device=other_gpu).int()
    k, v = (torch.randn(20, 16, 2, 32, device=other_gpu).half() for _ in range(2))
    lens = torch.tensor([17, 160], device=other_gpu).int()
    cache = (k, v, torch.arange(20, device=other_gpu).int().view(2, 10), lens)
    expected = paged_attention_varlen(q, *cache, ends, backend="torch")
    out = paged_attention_varlen(q, *cache, ends, num_splits=3, backend="triton")
    torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-3)
    sizes = ((2, 4, 1, 32), (2, 2, 300, 32), (2, 2, 300, 32))
    q, k, v = (torch.randn(size, device=other_gpu).half() for size in sizes)
    for lens in (None, torch.tensor([300, 17], dtype=torch.int32, device=other_gpu)):  # cut alike, and in equal ranges
        out, expected = (flash_decoding(q, k, v, seq_lens=lens, backend=name) for name in ("triton", "torch"))
        torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-3)
    assert torch.cuda.current_device() == 0


def test_products_with_few_rows_run_on_the_gpu_of_their_tensors_and_are_profiled_there(other_gpu, monkeypatch):
    monkeypatch.setattr(dataflow, "NUM_ROWS", (1,))
    flow = Dataflow(device_label(other_gpu), torch.float16, {(40, 64): (2, 65)})
    w = torch.randn(40, 64, device=other_gpu).half()
    for M in (1, 3):
        x = torch.randn(M, 64, device=other_gpu).half()
        torch.testing.assert_close(flow.linear(x, w), x @ w.T, rtol=0.01, atol=0.02)
    assert Dataflow.profile([(40, 64)], other_gpu).device == flow.device
    assert torch.cuda.current_device() == 0


def test_first_rungs_and_other_softmaxes_run_on_the_gpu_of_their_tensors(other_gpu, monkeypatch):
    monkeypatch.setattr(repeat_launches, "TYPES", [(torch.float16, None)])
    wanted = ("First rung", "unified max", "lazy rescale", "grouped")
    chosen = [(name, run) for name, run in repeat_launches.cases(40, other_gpu) if any(w in name for w in wanted)]
    assert len(chosen) == 8
    for name, run in chosen:
        assert repeat_launches.fault(run, 1) is None, name


def attended(gpu, dtype=torch.float16, **options):
    """flash_attention of one head in tiles that are not full, and the gradients of q, k and v."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 32, generator=draw).to(dtype).to(gpu).requires_grad_() for n in (20, 35, 35))
    out = flash_attention(q, k, v, causal=True, **options)
    return out, *torch.autograd.grad(out.float().sin().sum(), (q, k, v))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "window": 9}], ids=str)
def test_flash_attention_runs_on_the_gpu_of_its_tensors_forward_and_backward(options, other_gpu):
    results = (attended(other_gpu, **options, backend=backend) for backend in ("triton", "torch"))
    for out, expected in zip(*results, strict=True):
        torch.testing.assert_close(out, expected, rtol=0.02, atol=4e-3)


def test_every_cuda_kernel_runs_on_the_gpu_of_its_tensors():
    q, (k_cache, v_cache, *tables) = torch.randn(2, 4, 32, device="cuda:1").half(), paged_cache("cuda:1")
    expected = paged_attention(q, k_cache, v_cache, *tables, backend="torch")
    caches = to_vllm_layout(k_cache, v_cache)
    for version in (paged_attention_v1, paged_attention_v2):
        torch.testing.assert_close(version(q, *caches, *tables), expected, rtol=0.01, atol=1e-3)
    q, k, v = torch.randn(3, 1, 2, 20, 32, device="cuda:1").half()
    expected = flash_attention(q, k, v, causal=True, backend="torch")
    out, _ = in_cuda.forward(q, k, v, ScoreOptions(causal=True))
    torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("decodes", [True, False])
def test_a_captured_step_follows_lengths_that_change(decodes, monkeypatch):
    """The work plan is made by torch's operations on the device, so a replay makes it anew for the new lengths.

    A captured decode executes the PTX of its kernels, with the arguments that the graph keeps.
    """
    monkeypatch.setattr(launches, "EXECUTES_PTX", decodes or launches.EXECUTES_PTX)
    q, (k, v, tables, lens) = torch.randn(2, 4, 32, device="cuda:0").half(), paged_cache("cuda:0")
    cu_seqlens_q = torch.arange(3, dtype=torch.int32, device="cuda:0")

    def attend():
        return plan(Step(tables, lens, cu_seqlens_q, block_size=16, decodes=decodes), "triton").attend(q, k, v)

    attend()  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for new in ([20, 17], [1, 3], [0, 17]):
        lens.copy_(torch.tensor(new))
        graph.replay()
        expected = paged_attention(q, k, v, tables, lens, backend="torch")
        torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-3)


def test_a_number_read_on_the_host_cannot_be_captured(x):
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        int(x.sum())


@pytest.mark.skipif(driver.CAPABILITY >= (8, 0), reason="a GPU with bfloat16 and tensor cores for Triton")
def test_a_gpu_without_bfloat16_refuses_it_and_takes_torch_by_default():
    q, cache = torch.randn(2, 4, 32, device="cuda:0").half(), paged_cache("cuda:0")
    with pytest.raises(ValueError, match=r"bfloat16 on sm_75.*float16"):
        paged_attention(q.bfloat16(), *(x.bfloat16() for x in cache[:2]), *cache[2:], backend="triton")
    with pytest.raises(ValueError, match=r"bfloat16.*float16"):
        attended("cuda:0", backend="triton", dtype=torch.bfloat16)
    before = dict(launches.counted)
    paged_attention(q, *cache)
    flash_decoding(q[:, :, None], *(x[:2].transpose(1, 2).contiguous() for x in cache[:2]))
    assert launches.counted["Triton"] == before.get("Triton", 0)


# ------------------------------------------------------------------------------------------------ planted bugs


def test_a_cpu_tensor_in_a_cuda_launch_is_found(fill, x, monkeypatch):
    bind = fill._binder.bind
    monkeypatch.setattr(fill._binder, "bind", lambda args: bind(args)._replace(device=str(x.device)))
    with pytest.raises(AssertionError, match="x is cpu memory, launched on GPU 0"):
        fill[1, 32](x.cpu(), MANY, 2.0)


def test_a_cpu_tensor_in_a_triton_launch_is_found(x):
    from pagewise.kernels.online_softmax import online_softmax_kernel

    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        online_softmax_kernel[(1,)](x.cpu(), x, 32, TILE=32)


def test_an_int_of_32_bits_for_a_parameter_of_64_is_found(fill, x, monkeypatch):
    launch = cuda_gpu.GpuKernel.launch

    def narrow(self, grid, block, shared_bytes, args):
        launch(self, grid, block, shared_bytes, [args[0], ctypes.c_int(args[1].value), args[2]])

    monkeypatch.setattr(cuda_gpu.GpuKernel, "launch", narrow)
    with pytest.raises(AssertionError, match=f"n = {MANY} reached the driver as 05000000"):
        fill[1, 32](x, MANY, 2.0)


def test_a_missing_context_is_found(fill, x, monkeypatch):
    fill[1, 32](x, MANY, 2.0)
    monkeypatch.setattr(cuda_gpu, "_thread", type("Forgotten", (), {"has_context": True}))
    assert "201" in str(in_new_thread(lambda: fill[1, 32](x, MANY, 2.0)))


def test_more_shared_memory_than_the_card_has_is_found(fill, x):
    fill.compile("cuda")
    fill._on_gpu[0]._most_bytes = 1 << 20
    with pytest.raises(RuntimeError, match="MAX_DYNAMIC_SHARED_SIZE_BYTES on GPU 0: CUDA_ERROR_INVALID_VALUE"):
        fill[1, 32, 1 << 18](x, MANY, 2.0)


def test_a_launch_on_the_wrong_stream_is_found(fill, x, monkeypatch):
    fill[1, 32](x, MANY, 2.0)
    wrong = fill._on_gpu[0]._stream()
    monkeypatch.setattr(cuda_gpu.GpuKernel, "_stream", lambda self: wrong)
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(AssertionError, match="launched on stream 0x0, current"):
        fill[1, 32](x, MANY, 2.0)


def test_a_triton_launch_on_another_gpu_is_found(monkeypatch):
    monkeypatch.setattr(device.torch.cuda, "device", lambda gpu: torch.cuda._DeviceGuard(0))
    with pytest.raises(AssertionError, match="x_ptr is cuda:1 memory, launched on GPU 0"):
        online_softmax(torch.zeros(1, 8, device="cuda:1"), 8, backend="triton")


def test_code_that_is_loaded_while_a_graph_is_captured_is_found(fill, x, monkeypatch):
    monkeypatch.setattr(cuda_gpu.GpuKernel, "_load", lambda self: None)
    fill.compile("cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(Exception, match="STUB_ERROR_900"):
        fill[1, 32](x, MANY, 2.0)


def test_a_spill_is_found(monkeypatch):
    monkeypatch.setattr(plugin, "ALLOWED", 16)
    built = {("a_kernel", str(spilled)): launches.Built(255, spilled, 0, "q=*fp16") for spilled in (0, 16, 24)}
    monkeypatch.setattr(launches, "built", built)
    assert plugin.spilling() == [("a_kernel", "q=*fp16", 24)]
