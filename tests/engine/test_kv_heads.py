"""A model that holds a part of the attention heads gets a memory for these heads only."""

import pytest
import torch
from torch import nn

from pagewise.engine import LLM, SamplingParams
from pagewise.engine.checks import default_num_blocks
from pagewise.models import GPT2, GPT2Config, Llama, LlamaConfig
from pagewise.naive_attention import attention as naive_attention

PROMPTS = [[1, 2, 3], [4, 9, 4, 30, 17, 2, 2, 8, 40], [7]]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def llama():
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    return Llama(LlamaConfig(50, 32, 32, num_hidden_layers=2, max_position_embeddings=64, **heads))


def gpt2():
    torch.manual_seed(0)
    return GPT2(GPT2Config(50, 32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64))


def half_llama():
    """The model with the first half of its query heads and KV heads."""
    model = llama()
    for block in model.model["layers"]:
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(block.self_attn, name)
            linear.weight = nn.Parameter(linear.weight[: len(linear.weight) // 2].clone())
        out = block.self_attn.o_proj
        out.weight = nn.Parameter(out.weight[:, : out.in_features // 2].clone())
    return model


def half_gpt2():
    """The model with the first half of its heads."""
    model = gpt2()
    for block in model.transformer["h"]:
        qkv, out = block.attn.c_attn, block.attn.c_proj
        qkv.weight = nn.Parameter(torch.cat([part[:, :16] for part in qkv.weight.chunk(3, dim=1)], dim=1))
        qkv.bias = nn.Parameter(torch.cat([part[:16] for part in qkv.bias.chunk(3)]))
        out.weight = nn.Parameter(out.weight[:16].clone())
    return model


def served_without_a_cache(model, prompt):
    """The tokens that one dense pass over all tokens after another gives."""
    tokens = list(prompt)
    for _ in range(GREEDY.max_tokens):
        positions = torch.arange(len(tokens))[None]
        logits = model(torch.tensor([tokens]), positions, lambda _, *qkv: naive_attention(*qkv, causal=True))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("attention", ["paged", "dense"])
@pytest.mark.parametrize(("whole", "half"), [(llama, half_llama), (gpt2, half_gpt2)], ids=["llama", "gpt2"])
def test_half_of_the_heads_get_half_of_the_memory_and_their_own_tokens(whole, half, attention):
    model, sizes = half(), {"num_blocks": 32, "block_size": 4, "attention": attention}
    assert (model.num_kv_heads, whole().num_kv_heads) == (2, 4)
    llm = LLM(model, **sizes, max_num_batched_tokens=5)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [served_without_a_cache(model, prompt) for prompt in PROMPTS]
    assert [output.token_ids for output in LLM(whole(), **sizes).generate(PROMPTS, GREEDY)] != [
        output.token_ids for output in outputs
    ]


@pytest.mark.parametrize(("whole", "half"), [(llama, half_llama), (gpt2, half_gpt2)], ids=["llama", "gpt2"])
def test_half_of_the_heads_make_blocks_of_half_the_bytes(whole, half):
    assert 2 * LLM(half(), num_blocks=4).memory.nbytes == LLM(whole(), num_blocks=4).memory.nbytes


def test_twice_as_many_blocks_of_half_the_heads_fit_into_free_memory(monkeypatch):
    block = 2 * 2 * 16 * 4 * 8 * 4  # K and V · layers · tokens · KV heads · D · bytes of float32
    monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": 4 * 5, "SC_PAGE_SIZE": block}.get)
    assert default_num_blocks(llama(), 16, 64, torch.float32) == 5
    assert default_num_blocks(half_llama(), 16, 64, torch.float32) == 10
