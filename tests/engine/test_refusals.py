"""Refusals of an engine and of its requests: the calls that raise an error, and the words of each message."""

import subprocess

import pytest
import torch
from engine_cases import finished
from scripted import byte_level
from torch import nn

from pagewise.engine import LLM, SamplingParams
from pagewise.flash_decoding_plus_plus import Dataflow, UnifiedMax
from pagewise.flash_decoding_plus_plus.dataflow import device_label
from pagewise.models import GPT2, GPT2Config, Llama, LlamaConfig, tiny_model

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # the tests read messages that users see


def llama(head_dim=8, dtype=torch.float32):
    return Llama(LlamaConfig(50, 48, 36, 2, 12, 6, head_dim)).to(dtype)


HERE = device_label(torch.device("cpu"))
MODEL = llama()
FLOAT8 = torch.float8_e4m3fn
FLOAT16_TABLE = Dataflow(HERE, torch.float16, {(96, 48): (4, 33)})
FOREIGN_TABLE = Dataflow(HERE, torch.float32, {(16, 17): (4, 33)})
TABLE_OF_A_GPU = Dataflow(HERE, torch.float32, {(96, 48): (4, 33)})
object.__setattr__(TABLE_OF_A_GPU, "device", "NVIDIA H999 (sm_999, 7 SMs)")  # as on a machine with such a GPU
UNIFIED = {"model": MODEL, "unified_max": UnifiedMax(0, -1, 1), "attention": "dense"}
LLMS = [
    # before a model is loaded
    ({"scheduler": "eager"}, ValueError, 'scheduler must be "naive", "static" or "continuous", got \'eager\''),
    ({"generation_config": "vllm"}, ValueError, 'generation_config must be "auto" or "none", got \'vllm\''),
    ({"attention": "flat"}, ValueError, 'attention must be "paged", "dense" or "block_tensors"'),
    ({"attention": "dense", "prefix_cache": True}, ValueError, 'prefix_cache=True needs attention="paged"'),
    ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1"),
    ({"block_size": 0}, ValueError, "block_size must be at least 1"),
    ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1"),
    ({"max_num_batched_tokens": 1.5}, TypeError, "max_num_batched_tokens must be an int"),
    ({"speculate": -1}, ValueError, "speculate must be at least 0, got -1"),
    ({"speculate": 1.5}, TypeError, "speculate must be an int, got float"),
    ({"speculate": True}, TypeError, "speculate must be an int, got bool"),
    ({"speculate": None}, TypeError, "speculate must be an int, got NoneType"),
    ({"kv_cache_dtype": "float8"}, ValueError, 'kv_cache_dtype must be "float8_e4m3fn", "float8_e5m2" or None'),
    ({"kv_cache_dtype": torch.float16}, ValueError, "got torch.float16"),
    ({"kv_cache_dtype": ["float8_e5m2"]}, ValueError, "kv_cache_dtype must be"),
    ({"kv_cache_dtype": FLOAT8, "attention": "dense"}, ValueError, 'needs attention="paged", got attention="dense"'),
    ({"k_scale": 2.0}, ValueError, "k_scale must be 1.0 where the cache has the model's dtype, got 2.0"),
    ({"v_scale": 2.0}, ValueError, "v_scale must be 1.0 where"),
    ({"k_scale": 2.0, "attention": "dense"}, ValueError, "k_scale must be 1.0 where"),
    ({"k_scale": 2.0, "tensor_parallel": 2}, ValueError, "k_scale must be 1.0 where"),
    ({"kv_cache_dtype": FLOAT8, "k_scale": 0.0}, ValueError, "k_scale must be a finite number in"),
    ({"kv_cache_dtype": FLOAT8, "v_scale": -1.0}, ValueError, "v_scale must be a finite number in"),
    ({"kv_cache_dtype": FLOAT8, "k_scale": float("nan")}, ValueError, "k_scale must be a finite number in"),
    ({"kv_cache_dtype": FLOAT8, "v_scale": float("inf")}, ValueError, "v_scale must be a finite number in"),
    ({"kv_cache_dtype": FLOAT8, "v_scale": 1e-46}, ValueError, "v_scale must be a finite number in"),
    ({"kv_cache_dtype": FLOAT8, "k_scale": "1"}, TypeError, "k_scale must be a number, got str"),
    ({"kv_cache_dtype": FLOAT8, "k_scale": torch.tensor(2.0)}, TypeError, "k_scale must be a number, got Tensor"),
    ({"tensor_parallel": 0}, ValueError, "tensor_parallel must be at least 1, got 0"),
    ({"tensor_parallel": "2"}, TypeError, "tensor_parallel must be an int, got str"),
    ({"tensor_parallel": True}, TypeError, "tensor_parallel must be an int, got bool"),
    ({"tensor_parallel": 2, "attention": "dense"}, ValueError, 'tensor_parallel = 2 needs attention="paged", got att'),
    ({"tensor_parallel": 2, "attention": "block_tensors"}, ValueError, 'got attention="block_tensors": others need'),
    ({"tensor_parallel": 2, "device": "cpu:0"}, ValueError, 'device must be "cpu" or "cuda" with tensor_parallel = 2'),
    ({"tensor_parallel": 2}, ValueError, "'no such folder!' is not a folder"),
    # with a model
    ({"model": MODEL, "backend": "jax"}, ValueError, 'backend must be "auto", "torch", "triton" or "cuda"'),
    ({"model": MODEL, "dtype": torch.float16}, ValueError, "dtype is torch.float16, but the model's weights are tor"),
    ({"model": llama(32), "backend": "cuda", "block_size": 4}, ValueError, "takes block_size 8, 16, 32, got 4; b"),
    ({"model": MODEL, "backend": "triton", "block_size": 12}, ValueError, "power of two"),
    ({"model": GPT2(GPT2Config(9, 257, 1, 1)), "backend": "triton"}, ValueError, "head sizes up to 256, got 257"),
    ({"model": llama(dtype=torch.float64), "kv_cache_dtype": FLOAT8}, ValueError, "takes models in .*, got float64"),
    ({"model": llama(120), "kv_cache_dtype": FLOAT8, "backend": "cuda"}, ValueError, 'of 16, got 120; backend="torch"'),
    ({"model": MODEL, "tensor_parallel": 4}, ValueError, "tensor_parallel = 4 must divide num_key_value_heads = 6"),
    ({"model": nn.Linear(2, 2), "tensor_parallel": 2}, TypeError, "takes a Llama or a GPT2, got Linear"),
    ({"model": MODEL, "dataflow": "table.json"}, TypeError, "dataflow must be a Dataflow, got str: Dataflow.load"),
    ({"model": MODEL, "dataflow": FLOAT16_TABLE}, ValueError, "for torch.float16, but the .* in torch.float32"),
    ({"model": MODEL, "dataflow": FOREIGN_TABLE}, ValueError, r"table has \[16, 17\], the model has \[96, 48\], .*: p"),
    ({"model": MODEL, "dataflow": TABLE_OF_A_GPU}, ValueError, "on NVIDIA H999 .*, but the model is on CPU .*: p"),
    (UNIFIED | {"unified_max": 5.0}, TypeError, "unified_max must be a UnifiedMax or None, got float"),
    (UNIFIED | {"attention": "paged"}, ValueError, 'unified_max needs attention="dense", got attention="p'),
    (UNIFIED | {"backend": "cuda"}, ValueError, 'unified_max needs backend=.*, got backend="cuda": cuda'),
]


@pytest.mark.parametrize(("options", "error", "says"), LLMS)
def test_an_engine_that_cannot_be_is_refused_before_a_process_is_started(options, error, says, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(error, match=says):
        LLM(**{"model": "no such folder!", "num_blocks": 8} | options)


# ------------------------------------------------------------------------------------------------ requests

TINY, TOKENIZER = tiny_model()
GREEDY = SamplingParams(max_tokens=7, temperature=0)


def generate(prompts, sampling=GREEDY):
    return lambda llm: llm.generate(prompts, sampling)


def second(prompt, **params):
    """Generate from a prompt that can be served, and from this prompt."""
    return generate(["a", prompt], [GREEDY, SamplingParams(**params)])


def add(prompt, **params):
    return lambda llm: llm.add_request(prompt, SamplingParams(**params))


REQUESTS = [
    ({}, generate("one text"), TypeError, "put a single one into a list"),
    ({}, generate([1, 2, 3]), TypeError, "list of token ids, got int: put a single one into a list"),
    ({}, generate(torch.tensor([1, 2, 3])), TypeError, "list of token ids, got Tensor: put a single one into a list"),
    ({}, generate([b"text"]), TypeError, "list of token ids, got bytes"),
    ({}, add(b"text"), TypeError, "list of token ids, got bytes"),
    ({}, second([]), ValueError, "at least 1 token"),
    ({}, second(""), ValueError, "at least 1 token"),
    ({}, second([1, 257]), ValueError, r"\[0, vocab_size = 257\), got 257 in the prompt"),
    ({}, second([-1]), ValueError, "got -1 in the prompt"),
    ({}, second([1.5]), TypeError, "tokens must be ints"),
    ({}, second("x" * 500, max_tokens=13), ValueError, "500 tokens and max_tokens = 13 exceed .* context of 512"),
    ({}, second("x" * 60, max_tokens=70), ValueError, "need 9 blocks of 16 tokens, and the memory has 8"),
    ({}, second("x" * 30, max_tokens=20, n=5), ValueError, "5 sequences of a prompt of 30 tokens .* need 16 blocks"),
    ({}, second("x", n=7), ValueError, "n or beam_width = 7 exceeds max_num_seqs = 6"),
    ({"max_num_batched_tokens": 5}, add("x", n=6), ValueError, "n or beam_width = 6 exceeds .*_batched_tokens = 5"),
    ({}, generate(["a", "b"], [GREEDY]), ValueError, "one for each of 2 prompts, got 1"),
    ({}, generate(["a"], {"max_tokens": 3}), TypeError, "sampling must be SamplingParams, got dict"),
    ({}, lambda llm: llm.stream("a", SamplingParams(n=2)), ValueError, "one text, got n or beam_width = 2"),
    ({}, add("a", stop="a", beam_width=2), ValueError, "stop has strings, but a beam search knows tokens only"),
    ({"tokenizer": None}, generate(["a"]), ValueError, "without a tokenizer: give token ids"),
    ({"tokenizer": None}, add([1], stop="a"), ValueError, "stop has strings"),
    ({}, lambda llm: llm.abort(1), ValueError, "there is no request 1"),
]


@pytest.fixture(scope="module")
def tokens_of_the_first():
    return LLM(TINY, num_blocks=8).generate([[65, 66]], GREEDY)[0].token_ids


@pytest.mark.parametrize(("options", "call", "error", "says"), REQUESTS)
def test_a_request_that_cannot_be_served_is_refused_and_disturbs_no_other(
    options, call, error, says, tokens_of_the_first
):
    llm = LLM(TINY, **{"tokenizer": TOKENIZER, "num_blocks": 8, "max_num_seqs": 6} | options)
    first = llm.add_request([65, 66], GREEDY)
    llm.step()
    with pytest.raises(error, match=says):
        call(llm)
    outputs = finished(llm)
    assert [(output.request_id, output.token_ids) for output in outputs] == [(first, tokens_of_the_first)]
    assert llm.memory.num_free_blocks == 8


# ------------------------------------------------------------------------------------------------ ends and defaults


@pytest.mark.parametrize(("given", "name"), [({"stop": [50]}, "stop"), ({"stop_token_ids": [1, 77]}, "stop_token_ids")])
@pytest.mark.parametrize("more", [{}, {"beam_width": 2}])
def test_a_stop_outside_of_the_vocabulary_is_refused_and_harms_no_other(given, name, more):
    llm = LLM(MODEL)
    other = llm.add_request([1, 2], SamplingParams(max_tokens=3, temperature=0))
    wrong = given[name][-1]
    with pytest.raises(ValueError, match=f"^{name} must name tokens in .0, vocab_size = 50., got {wrong}"):
        llm.add_request([1, 2], SamplingParams(max_tokens=3, min_tokens=1, **given, **more))
    assert len(finished(llm)[other].token_ids) == 3


def test_an_end_that_the_tokenizer_has_and_the_model_has_not_never_comes():
    tokenizer = byte_level()  # its special tokens come after the model's 50
    llm = LLM(MODEL, tokenizer=tokenizer)
    assert tokenizer.eos_token_id >= 50
    for more in ({}, {"stop": "<|im_end|>"}):
        (out,) = llm.generate([[1, 2]], SamplingParams(max_tokens=3, min_tokens=2, temperature=0, **more))
        assert len(out.token_ids) == 3


@pytest.mark.parametrize("ids", [b"ab", bytearray(b"ab")])
def test_bytes_are_no_token_ids(ids):
    for given in ({"stop": ids}, {"stop_token_ids": ids}):
        with pytest.raises(TypeError, match=f"must be .*token ids, got {type(ids).__name__}"):
            SamplingParams(**given)
    with pytest.raises(TypeError, match=f"got {type(ids).__name__}"):
        LLM(MODEL).add_request(ids)


def test_torchs_defaults_may_change_between_two_requests():
    llm, params = LLM(tiny_model()[0]), SamplingParams(max_tokens=4, seed=3, logprobs=0, logit_bias={5: 1.0})
    first = llm.generate([[1, 2, 3]], params)[0]
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        second = llm.generate([[1, 2, 3]], params)[0]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert (second.token_ids, second.logprobs) == (first.token_ids, first.logprobs)
