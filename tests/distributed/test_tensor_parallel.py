"""Shares of a model compute together what the whole model computes. The processes are threads with a group of gloo."""

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pagewise.distributed import count_bytes, tensor_parallel
from pagewise.models import GPT2, GPT2Config, Llama, LlamaConfig
from pagewise.naive_attention import attention as naive_attention

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}
LLAMA = {"vocab_size": 50, "hidden_size": 40, "intermediate_size": 36, "num_hidden_layers": 2, **HEADS}
MODELS = {
    "gpt2": lambda: GPT2(GPT2Config(50, 48, 2, 6, 36, 64)),
    "gpt2-untied": lambda: GPT2(GPT2Config(50, 48, 2, 6, 36, 64, tie_word_embeddings=False)),
    "llama": lambda: Llama(LlamaConfig(**LLAMA)),
    "qwen2": lambda: Llama(LlamaConfig(**LLAMA, qkv_bias=True, tie_word_embeddings=True)),
    "qwen3": lambda: Llama(LlamaConfig(**LLAMA, qk_norm=True)),
}
TOKENS = torch.tensor([[1, 2, 3, 9, 40, 40, 7]])
POSITIONS = torch.arange(7)[None]


def random_model(name):
    """Biases and norms are random too, so that every part of the model changes the logits."""
    model = MODELS[name]().double()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.3 + (weight.dim() == 1)
    return model


def in_threads(count, folder, work):
    """Return `work(group)` of each rank, computed at the same time."""
    groups = []  # no group may end while another thread still connects to it

    def run(rank):
        store = dist.FileStore(str(folder / f"store of {count}"), count)
        groups.append(group := dist.ProcessGroupGloo(store, rank, count, datetime.timedelta(seconds=30)))
        return work(group)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


@torch.inference_mode()
def logits(model, **options):
    return model(TOKENS, POSITIONS, lambda _, q, k, v: naive_attention(q, k, v, causal=True), **options)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_all_shares_give_the_logits_of_the_whole_model(name, count, tmp_path):
    whole = random_model(name)
    for one in in_threads(count, tmp_path, lambda group: logits(tensor_parallel(whole, group))):
        torch.testing.assert_close(one, logits(whole), rtol=0, atol=1e-10 * float(logits(whole).abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_a_process_that_wants_no_logits_takes_part_in_the_sums(name, tmp_path):
    whole, none = random_model(name), torch.zeros(0, dtype=torch.int64)

    def work(group):
        return logits(tensor_parallel(whole, group), **{"logits_for": none} if group.rank() else {})

    first, second = in_threads(2, tmp_path, work)
    torch.testing.assert_close(first, logits(whole), rtol=0, atol=1e-10 * float(logits(whole).abs().max()))
    assert second.shape == (1, 0, 50)


@pytest.mark.parametrize("name", MODELS)
def test_a_share_has_a_third_of_every_split_weight_and_no_copy_of_the_others(name, tmp_path):
    whole = random_model(name)
    before = {key: weight.clone() for key, weight in whole.state_dict().items()}
    shares = in_threads(3, tmp_path, lambda group: tensor_parallel(whole, group))
    split = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_attn", "c_fc", "c_proj"}
    for share in shares:
        assert share.num_kv_heads == whole.num_kv_heads // 3
        assert share.config == whole.config
        weights = share.state_dict()
        assert weights.keys() == before.keys()
        for key, weight in weights.items():
            layer, kind = key.split(".")[-2:]
            is_split = layer in split and (kind == "weight" or layer in split - {"c_proj"})
            assert weight.numel() * (3 if is_split else 1) == before[key].numel(), key
            assert (weight.data_ptr() == whole.state_dict()[key].data_ptr()) != is_split, key
            assert weight.untyped_storage().nbytes() == weight.nbytes, key  # not a view of the whole weight
        assert not any(weight.requires_grad for weight in share.parameters())
    assert all(weight.requires_grad for weight in whole.parameters())
    assert all(weight.equal(before[key]) for key, weight in whole.state_dict().items())


def test_a_layer_sends_its_tokens_twice(tmp_path):
    """Each of two all-reduces sends 2 (n − 1) / n · tokens · hidden_size numbers."""
    whole = random_model("llama")
    with count_bytes() as sent:  # of both threads
        in_threads(3, tmp_path, lambda group: logits(tensor_parallel(whole, group)))
    assert [one.bytes for one in sent] == [2 * 2 * (7 * 40 * 8) // 3] * (3 * 2 * 2)


@pytest.mark.parametrize(
    ("model", "count", "message"),
    [
        (MODELS["llama"], 4, "tensor_parallel = 4 must divide num_key_value_heads = 6: give 1 or 2 or 3"),
        (MODELS["gpt2"], 5, "tensor_parallel = 5 must divide num_attention_heads = 6: give 1 or 2 or 3"),
        (lambda: GPT2(GPT2Config(50, 48, 2, 6, 35, 64)), 2, "must divide intermediate_size = 35: give 1"),
        (lambda: Llama(LlamaConfig(**LLAMA | {"num_key_value_heads": 1})), 2, "num_key_value_heads = 1: give 1"),
        (lambda: nn.Linear(2, 2), 2, "tensor_parallel = 2 takes a Llama or a GPT2, got Linear"),
    ],
)
def test_a_model_that_cannot_be_shared_evenly_is_refused_by_every_process(model, count, message, tmp_path):
    def refusal(group):
        with pytest.raises((ValueError, TypeError)) as error:
            tensor_parallel(model(), group)
        return str(error.value)

    assert all(message in one for one in in_threads(count, tmp_path, refusal))


def test_without_a_group_there_is_nothing_to_share_with():
    with pytest.raises(RuntimeError, match="there is no group of processes: start the program with torchrun"):
        tensor_parallel(MODELS["gpt2"]())
