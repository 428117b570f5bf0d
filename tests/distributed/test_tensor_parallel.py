"""Shares of a model compute together what the whole model computes. The processes are threads with a group of gloo."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from checkpoints import VOCAB, change_weights, save_random
from safetensors import safe_open
from torch import nn

from pagewise.distributed import count_bytes, tensor_parallel
from pagewise.distributed.team import Team
from pagewise.distributed.tensor_parallel import split
from pagewise.models import GPT2, GPT2Config, Llama, LlamaConfig, load, load_model
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
        groups.append(team := Team(store, rank, count, on_one_host=True))
        return work(team.groups["all"])

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
def test_a_share_has_a_third_of_every_split_weight_and_no_copy_of_the_others(name, tmp_path):
    """A third of 50 tokens is 16 or 17 tokens."""
    whole = random_model(name)
    before = {key: weight.clone() for key, weight in whole.state_dict().items()}
    shares = in_threads(3, tmp_path, lambda group: tensor_parallel(whole, group))
    vocabulary = {"embed_tokens", "wte", "lm_head"}
    split = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_attn", "c_fc", "c_proj"}
    for rank, share in enumerate(shares):
        assert share.num_kv_heads == whole.num_kv_heads // 3
        assert share.config == whole.config
        weights = share.state_dict()
        assert weights.keys() == before.keys()
        for key, weight in weights.items():
            layer, kind = key.split(".")[-2:]
            is_split = layer in split | vocabulary and (kind == "weight" or layer in split - {"c_proj"})
            if layer in vocabulary:
                assert weight.equal(before[key].tensor_split(3)[rank]), key
            else:
                assert weight.numel() * (3 if is_split else 1) == before[key].numel(), key
            assert (weight.data_ptr() == whole.state_dict()[key].data_ptr()) != is_split, key
            assert weight.untyped_storage().nbytes() == weight.nbytes, key  # not a view of the whole weight
        assert not any(weight.requires_grad for weight in share.parameters())
    assert all(weight.requires_grad for weight in whole.parameters())
    assert all(weight.equal(before[key]) for key, weight in whole.state_dict().items())


def test_a_layer_sends_its_tokens_twice(tmp_path):
    """Each of two all-reduces sends 2 (n − 1) / n · tokens · hidden_size numbers, as the embeddings do."""
    whole = random_model("llama")
    with count_bytes() as sent:  # of both threads
        in_threads(3, tmp_path, lambda group: logits(tensor_parallel(whole, group)))
    once = 2 * 2 * (7 * 40 * 8) // 3
    assert [one.bytes for one in sent if one.name == "all-reduce"] == [once] * (3 * 2 * 2)
    assert [one.bytes for one in sent if one.name == "embeddings"] == [once] * 3
    assert [one.bytes for one in sent if one.name == "logits"] == [2 * (7 * 17 * 8)] * 3


@pytest.mark.parametrize(("kv_heads", "count"), [(1, 2), (2, 4), (3, 6)])
def test_where_processes_outnumber_kv_heads_several_have_a_copy_of_the_same(kv_heads, count, tmp_path):
    whole = Llama(LlamaConfig(**LLAMA | {"num_key_value_heads": kv_heads}, qkv_bias=True)).double()
    shares = in_threads(count, tmp_path, lambda group: tensor_parallel(whole, group))
    keys = whole.model["layers"][0].self_attn.k_proj.weight.chunk(kv_heads)
    for rank, share in enumerate(shares):
        assert share.num_kv_heads == 1
        assert share.model["layers"][0].self_attn.k_proj.weight.equal(keys[rank * kv_heads // count])
    (tmp_path / f"store of {count}").unlink()
    for one in in_threads(count, tmp_path, lambda group: logits(tensor_parallel(whole, group))):
        torch.testing.assert_close(one, logits(whole), rtol=0, atol=1e-10 * float(logits(whole).abs().max()))


def test_other_weights_in_a_process_are_refused_in_every_process(tmp_path):
    def refusal(group):
        model = random_model("llama")
        if group.rank() == 1:
            model.model["embed_tokens"].weight.data[3, 4] += 1e-9
        with pytest.raises(ValueError, match=r"a sum over the weights .*one seed. must be the same in every"):
            tensor_parallel(model, group)

    in_threads(3, tmp_path, refusal)


class Group(NamedTuple):
    """What `split` asks a group."""

    number: int
    count: int

    def rank(self):
        return self.number

    def size(self):
        return self.count


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "qwen2"])
def test_a_process_reads_only_its_own_slices_of_a_checkpoint(architecture, tmp_path, monkeypatch):
    save_random(architecture, tmp_path)
    whole, _ = load_model(tmp_path)
    numbers = []

    def recorded(path, **options):
        file = safe_open(path, **options)

        class File:
            keys = staticmethod(file.keys)

            def get_tensor(self, name):
                numbers.append(file.get_tensor(name).numel())
                return file.get_tensor(name)

            def get_slice(self, name):
                class Slice:
                    def __getitem__(self, at):
                        numbers.append(file.get_slice(name)[at].numel())
                        return file.get_slice(name)[at]

                return Slice()

        return File()

    monkeypatch.setattr(load, "safe_open", recorded)
    for rank in range(2):
        numbers.clear()
        share, _ = load_model(tmp_path, split=lambda model, rank=rank: split(model, Group(rank, 2)))
        right, cuts = split(whole, Group(rank, 2))
        assert len(cuts) >= 8
        for name, weight in right.state_dict().items():
            assert share.state_dict()[name].equal(weight), name
            assert share.state_dict()[name].stride() == weight.stride(), name
            assert weight.is_contiguous() == whole.state_dict()[name].is_contiguous(), name
        assert sum(numbers) == sum(weight.numel() for weight in share.state_dict().values())


@pytest.mark.slow
def test_an_output_head_that_repeats_the_embedding_is_cut_like_it(tmp_path):
    save_random("qwen2", tmp_path)
    embedding = "model.embed_tokens.weight"
    for difference in (0.0, 1.0):
        change_weights(tmp_path, lambda w, by=difference: w | {"lm_head.weight": w[embedding] + by})
        for rank, rows in enumerate((slice(49), slice(49, VOCAB))):
            if difference:
                with pytest.raises(ValueError, match=r"lm_head.weight is another matrix"):
                    load_model(tmp_path, split=lambda model, rank=rank: split(model, Group(rank, 2)))
            else:
                share, _ = load_model(tmp_path, split=lambda model, rank=rank: split(model, Group(rank, 2)))
                assert share.state_dict()[embedding].equal(load_model(tmp_path)[0].state_dict()[embedding][rows])


@pytest.mark.parametrize(
    ("model", "count", "message"),
    [
        (MODELS["llama"], 4, "tensor_parallel = 4 must divide num_key_value_heads = 6: give 1 or 2 or 3"),
        (MODELS["gpt2"], 5, "tensor_parallel = 5 must divide num_attention_heads = 6: give 1 or 2 or 3"),
        (lambda: GPT2(GPT2Config(50, 48, 2, 6, 35, 64)), 2, "must divide intermediate_size = 35: give 1"),
        (
            lambda: Llama(LlamaConfig(**LLAMA | {"num_key_value_heads": 4})),
            6,
            "num_key_value_heads = 4: give 1 or 2 or 4",
        ),
        (lambda: nn.Linear(2, 2), 2, "tensor_parallel = 2 takes a Llama or a GPT2, got Linear"),
    ],
)
def test_a_model_that_cannot_be_shared_evenly_is_refused_by_every_process(model, count, message, tmp_path):
    def refusal(group):
        with pytest.raises((ValueError, TypeError)) as error:
            tensor_parallel(model(), group)
        return str(error.value)

    assert all(message in one for one in in_threads(count, tmp_path, refusal))


def test_a_model_that_one_process_refuses_is_refused_by_every_process(tmp_path):
    def refusal(group):
        model = nn.Linear(2, 2) if group.rank() == 1 else MODELS["llama"]()
        with pytest.raises((ValueError, TypeError), match="tensor_parallel = 3 takes a Llama or a GPT2, got Linear"):
            tensor_parallel(model, group)

    in_threads(3, tmp_path, refusal)


def test_a_process_that_shares_no_model_is_named(tmp_path):
    def shares(group):
        group.set_timeout(timedelta(seconds=0.5))
        if group.rank() != 2:
            with pytest.raises(RuntimeError, match="tensor_parallel: process 2 has ended, or did not call it within"):
                tensor_parallel(MODELS["gpt2"](), group)

    in_threads(3, tmp_path, shares)


def test_without_a_group_there_is_nothing_to_share_with():
    with pytest.raises(RuntimeError, match="there is no group of processes: start the program with torchrun"):
        tensor_parallel(MODELS["gpt2"]())
