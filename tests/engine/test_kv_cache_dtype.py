"""The engine with a float8 cache: it computes the attention of keys and values that were rounded with its scales."""

import gc
import weakref

import pytest
import torch
from covering import is_full
from engine_cases import for_backend
from test_model_runner import captured_graphs  # noqa: F401  the fixture `captured`

from pagewise.engine import LLM, SamplingParams
from pagewise.engine.model_runner import DecodeGraphs
from pagewise.models import Llama, LlamaConfig
from pagewise.naive_attention import attention as naive_attention

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# With these scales most keys fall between the smallest numbers of the format, and the largest values saturate. So the
# numbers in the cache depend on the scales in more than their last bits.
SCALES = {E4M3: {"k_scale": 40.0, "v_scale": 0.003}, E5M2: {"k_scale": 2e4, "v_scale": 2.5e-5}}
ONES = {"k_scale": 1.0, "v_scale": 1.0}
TOLERANCE = 2e-2  # a key that differs from the reference's in its last bit can round to another float8 number


def llama(dtype=torch.float32, head_dim=32):
    """A model whose logits depend on every key and value."""
    torch.manual_seed(3)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    config = LlamaConfig(50, 64, 64, num_hidden_layers=2, max_position_embeddings=256, **heads)
    model = Llama(config).requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.normal_(std=0.5 if "lm_head" in name else 1.5 / weight.shape[1] ** 0.5)
    return model.to(dtype)


MODEL = llama()


def prompt(length, seed=0):
    return torch.randint(50, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(max_tokens, **options):
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **options)


def rounded(x, dtype, scale):
    """Return the number that the cache means by x, computed in float64."""
    largest = torch.finfo(dtype).max
    return ((x.double() / scale).clamp(-largest, largest).float().to(dtype).double() * scale).to(x.dtype)


def reference(model, tokens, dtype, k_scale, v_scale):
    """Return the logits after each token, from one dense pass without a cache."""

    def attend(layer, q, k, v):
        k, v = (x if dtype is None else rounded(x, dtype, one) for x, one in ((k, k_scale), (v, v_scale)))
        return naive_attention(q, k, v, causal=True)

    device = next(model.parameters()).device
    ids, positions = torch.tensor([tokens], device=device), torch.arange(len(tokens), device=device)[None]
    return model(ids, positions, attend)[0]


def recorded(llm):
    """Let the engine also note its logits: {tokens before: logits}."""
    run, found = llm.runner.run, []

    def noting(chunks):
        logits = run(chunks)
        giving = [chunk for chunk in chunks if chunk.num_logits]
        found.extend((chunk.sequence.tokens[: chunk.stop], row) for chunk, row in zip(giving, logits, strict=True))
        return logits

    llm.runner.run = noting
    return found


def assert_logits_of_reference(llm, requests, dtype, scales, *, tolerance=TOLERANCE):
    """Serve the requests and compare the logits of each step with the dense pass; return the outputs."""
    found = recorded(llm)
    prompts, params = zip(*requests, strict=True)
    outputs = llm.generate(list(prompts), list(params))
    assert {tuple(tokens) for tokens, _ in found} == {
        (*output.prompt_token_ids, *choice.token_ids[:i])
        for output in outputs
        for choice in output.choices
        for i in range(len(choice.token_ids))
    }
    for tokens, logits in found:
        exact = reference(llm.model, tokens, dtype, **scales)[-1]
        assert (logits - exact).abs().max() < tolerance * exact.float().std()
    return outputs


def engine(dtype, scales, **options):
    model = for_backend(options.pop("model", MODEL), options.get("backend"))
    return LLM(model, kv_cache_dtype=dtype, **scales, **{"num_blocks": 40, "block_size": 8} | options)


FLOAT8_AND_SCALES = [(E4M3, SCALES[E4M3]), (E5M2, SCALES[E5M2]), (E4M3, ONES), (E5M2, ONES)]
cases = pytest.mark.parametrize(("dtype", "scales"), FLOAT8_AND_SCALES, ids=["e4m3", "e5m2", "e4m3-1", "e5m2-1"])
backends = pytest.mark.parametrize("backend", ["torch", "triton", "cuda"])


def on_backends(e4m3, e5m2):
    """All cases in torch, and each dtype with a kernel. With PAGEWISE_FULL=1 all cases on all backends."""
    rows = [(*case, "torch") for case in FLOAT8_AND_SCALES]
    if is_full():
        rows += [(*case, backend) for case in FLOAT8_AND_SCALES for backend in ("triton", "cuda")]
    else:
        rows += [(E4M3, SCALES[E4M3], e4m3), (E5M2, SCALES[E5M2], e5m2)]
    return pytest.mark.parametrize(("dtype", "scales", "backend"), rows, ids=str)


@cases
def test_the_scales_of_these_tests_change_the_logits_by_much_more_than_the_tolerance(dtype, scales):
    """Otherwise an engine that ignores its scales would pass."""
    tokens = prompt(30)
    exact = reference(MODEL, tokens, dtype, **scales)
    for wrong in ({"k_scale": 1.0}, {"v_scale": 1.0}):
        if scales != ONES:
            other = reference(MODEL, tokens, dtype, **scales | wrong)
            assert (other - exact).abs().max() > 10 * TOLERANCE * exact.std()
    unrounded = reference(MODEL, tokens, None, **ONES)
    assert (unrounded - exact).abs().max() > 3 * TOLERANCE * exact.std()


# ------------------------------------------------------------------------------------------------ logits


@on_backends("triton", "cuda")
def test_chunks_of_prompts_and_decode_steps_attend_to_rounded_keys_and_values(dtype, scales, backend):
    llm = engine(dtype, scales, backend=backend, max_num_batched_tokens=12, prefix_cache=False)
    requests = [(prompt(3), greedy(4)), (prompt(29, 1), greedy(3)), (prompt(9, 2), greedy(3))]
    assert_logits_of_reference(llm, requests, dtype, scales)


@on_backends("cuda", "triton")
def test_a_prefix_from_the_cache_is_read_with_the_scales(dtype, scales, backend):
    llm = engine(dtype, scales, backend=backend)
    common = prompt(72)  # in torch the keys of 64 and more common tokens take a path of their own
    llm.generate([common], greedy(1))
    requests = [(common + prompt(n, n), greedy(2)) for n in (1, 5)]
    outputs = assert_logits_of_reference(llm, requests, dtype, scales)
    assert [output.num_cached_tokens for output in outputs] == [72, 72]


@on_backends("triton", "cuda")
def test_preempted_requests_write_the_same_numbers_again(dtype, scales, backend):
    llm = engine(dtype, scales, backend=backend, num_blocks=5, prefix_cache=False)
    assert_logits_of_reference(llm, [(prompt(14, n), greedy(6)) for n in range(2)], dtype, scales)
    assert llm.scheduler.num_preemptions > 0


@cases
def test_samples_that_share_a_block_get_copies_of_its_numbers(dtype, scales):
    llm = engine(dtype, scales)
    sampling = SamplingParams(max_tokens=5, n=3, seed=1, ignore_eos=True)
    (output,) = assert_logits_of_reference(llm, [(prompt(11), sampling)], dtype, scales)
    assert len({tuple(choice.token_ids) for choice in output.choices}) > 1


@on_backends("cuda", "triton")
def test_a_model_in_bfloat16_reads_a_float8_cache(dtype, scales, backend):
    """The scales are applied in float32, so that only the model itself rounds to bfloat16."""
    llm = engine(dtype, scales, backend=backend, model=llama(torch.bfloat16), max_num_batched_tokens=12)
    assert_logits_of_reference(llm, [(prompt(19), greedy(2))], dtype, scales, tolerance=0.15)


def test_decode_steps_on_fixed_buffers_write_and_read_with_the_scales(captured):
    """As CUDA graphs on a GPU: nothing of a step may depend on numbers that only the host knows."""
    llm = engine(E4M3, SCALES[E4M3])
    llm.runner._graphs = DecodeGraphs(llm.runner, llm.config)
    assert_logits_of_reference(llm, [(prompt(n, n), greedy(4)) for n in (3, 9, 13)], E4M3, SCALES[E4M3])
    assert set(captured.replayed) == {4}


def test_a_dropped_engine_frees_its_graphs_at_once(captured):
    """The garbage collector could destroy them while another engine captures its own, which CUDA does not allow."""
    llm = engine(E4M3, ONES)
    llm.runner._graphs = DecodeGraphs(llm.runner, llm.config)
    graphs = weakref.ref(llm.runner._graphs)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert graphs() is None
    finally:
        gc.enable()


def test_names_and_dtypes_mean_the_same():
    for dtype in (E4M3, E5M2):
        by_name = engine(str(dtype).removeprefix("torch."), SCALES[dtype])
        assert by_name.memory.cache.k.dtype == by_name.memory.cache.v.dtype == dtype
    assert LLM(MODEL, num_blocks=4).memory.cache.k.dtype == torch.float32


# ------------------------------------------------------------------------------------------------ sizes


@backends
def test_the_cache_takes_a_quarter_of_the_bytes_of_float32(backend):
    model = for_backend(MODEL, backend)
    wide = LLM(model, num_blocks=8, backend=backend)
    assert 4 * LLM(model, num_blocks=8, backend=backend, kv_cache_dtype=E5M2).memory.nbytes == wide.memory.nbytes


def test_four_times_as_many_float8_blocks_fit_into_free_memory(monkeypatch):
    block = 2 * 2 * 16 * 2 * 32 * 4  # K and V · layers · tokens · KV heads · D · bytes of float32
    monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": 4 * 5, "SC_PAGE_SIZE": block}.get)
    assert LLM(MODEL).memory.num_blocks == 5
    assert LLM(MODEL, kv_cache_dtype=E4M3).memory.num_blocks == 20


def test_torch_takes_a_head_size_that_float8_vectors_do_not_divide():
    assert engine(E4M3, ONES, model=llama(head_dim=120), backend="torch").generate([[1]], greedy(1))
