"""The KV cache's contract, what it costs, and generation with and without it."""

from types import SimpleNamespace

import pytest
import torch

from pagewise.kv_cache import CachedAttention, KVCache, generate, kv_cache_bytes, recompute
from pagewise.models.gpt2 import GPT2, GPT2Config
from pagewise.models.llama import Llama, LlamaConfig
from pagewise.models.load import tiny_model
from pagewise.naive_attention import attention


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_kv(B, Hkv, T, D, *, seed=0, dtype=torch.float32, device="cpu"):
    generator = seeded(seed)
    return [torch.randn(B, Hkv, T, D, generator=generator).to(device, dtype) for _ in range(2)]


def whole_buffer(view):
    """A copy of every byte of the buffer that `view` looks into, beyond its own part too."""
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()).clone()


# ------------------------------------------------------------------------------------------------ append


@pytest.mark.parametrize("pieces", [[1], [5], [3, 1, 1], [1, 0, 4, 2], [0, 2], [0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_views_equal_the_concatenation_of_what_was_appended(pieces, dtype, device):
    cache = KVCache(2, 3, 7, 4, dtype=dtype, device=device)
    added = [random_kv(2, 3, T, 4, seed=i, dtype=dtype, device=device) for i, T in enumerate(pieces)]
    for n, (k, v) in enumerate(added, start=1):
        k_all, v_all = cache.append(k, v)
        assert torch.equal(k_all, torch.cat([k for k, _ in added[:n]], dim=2))
        assert torch.equal(v_all, torch.cat([v for _, v in added[:n]], dim=2))
        assert (k_all.dtype, k_all.device.type, cache.length) == (dtype, device.type, sum(pieces[:n]))


def test_append_copies_its_tokens_once_and_views_of_earlier_appends_stay_valid():
    cache = KVCache(2, 2, 6, 8)
    k, v = random_kv(2, 2, 2, 8)
    k_first, v_first = cache.append(k.clone(), v.clone())
    for seed in range(1, 5):
        k_all, v_all = cache.append(*random_kv(2, 2, 1, 8, seed=seed))
        assert (k_all.data_ptr(), v_all.data_ptr()) == (k_first.data_ptr(), v_first.data_ptr())
    assert torch.equal(k_first, k)
    assert torch.equal(v_first, v)


def test_strided_tokens_are_appended_as_what_they_are():
    """Models hand over [B, T, Hkv, D], transposed."""
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in random_kv(2, 3, 4, 8))
    assert not k.is_contiguous()
    k_all, v_all = KVCache(2, 3, 4, 8).append(k, v)
    assert torch.equal(k_all, k)
    assert torch.equal(v_all, v)


def test_reset_forgets_the_tokens_and_keeps_the_buffer():
    cache = KVCache(1, 2, 4, 8)
    before, _ = cache.append(*random_kv(1, 2, 4, 8))
    cache.reset()
    assert cache.length == 0
    k, v = random_kv(1, 2, 3, 8, seed=1)
    after, v_all = cache.append(k, v)
    assert after.data_ptr() == before.data_ptr()
    assert torch.equal(after, k)
    assert torch.equal(v_all, v)


# ------------------------------------------------------------------------------------------------ refused appends

SPARE = random_kv(2, 3, 2, 4)
REFUSED = {
    "too many tokens": (random_kv(2, 3, 4, 4), ValueError, ["4 tokens", "holds 3", "max_len = 6", ">= 7", "reset"]),
    "v with fewer tokens": ([SPARE[0], SPARE[1][:, :, :1]], ValueError, ["v ", "[2, 3, 2, 4]", "[2, 3, 1, 4]"]),
    "v with more tokens than fit": (
        [SPARE[0], random_kv(2, 3, 4, 4)[1]], ValueError, ["v ", "[2, 3, 2, 4]", "[2, 3, 4, 4]"],
    ),
    "another batch size": (random_kv(1, 3, 2, 4), ValueError, ["k ", "[2, 3, 2, 4]", "[1, 3, 2, 4]"]),
    "another number of KV heads": (random_kv(2, 1, 2, 4), ValueError, ["k ", "[2, 3, 2, 4]", "[2, 1, 2, 4]"]),
    "another head size": (random_kv(2, 3, 2, 1), ValueError, ["k ", "[2, 3, 2, 4]", "[2, 3, 2, 1]"]),
    "another head size of v": ([SPARE[0], SPARE[1][..., :1]], ValueError, ["v ", "[2, 3, 2, 4]", "[2, 3, 2, 1]"]),
    "rank 3": ([t[0] for t in SPARE], ValueError, ["k ", "4 dimensions", "[3, 2, 4]"]),
    "rank 3 of v": ([SPARE[0], SPARE[1][0]], ValueError, ["v ", "4 dimensions", "[3, 2, 4]"]),
    "another dtype": ([t.double() for t in SPARE], TypeError, ["k ", "dtype", "float32", "float64"]),
    "another dtype of v": ([SPARE[0], SPARE[1].half()], TypeError, ["v ", "dtype", "float32", "float16"]),
    "another device": ([t.to("meta") for t in SPARE], ValueError, ["k ", "device", "cpu", "meta"]),
    "another device of v": ([SPARE[0], SPARE[1].to("meta")], ValueError, ["v ", "device", "cpu", "meta"]),
    "no tensor": ([SPARE[0], SPARE[1].tolist()], TypeError, ["v ", "Tensor", "list"]),
}  # fmt: skip


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("new", "error", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_append_writes_nothing(new, error, words):
    cache = KVCache(2, 3, 6, 4)
    view, _ = cache.append(*random_kv(2, 3, 3, 4, seed=9))
    before = whole_buffer(view)
    with pytest.raises(error) as caught:
        cache.append(*new)
    assert torch.equal(whole_buffer(view), before)
    assert cache.length == 3
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


BAD_CACHES = {
    "no sequences": ({"batch_size": 0}, ValueError, ["batch_size", "at least 1", "0"]),
    "negative heads": ({"num_kv_heads": -2}, ValueError, ["num_kv_heads", "at least 1", "-2"]),
    "no room": ({"max_len": 0}, ValueError, ["max_len", "at least 1", "0"]),
    "fractional room": ({"max_len": 8.0}, TypeError, ["max_len", "int", "float"]),
    "head size True": ({"head_size": True}, TypeError, ["head_size", "int", "bool"]),
    "integer dtype": ({"dtype": torch.int8}, TypeError, ["dtype", "float32", "int8"]),
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("change", "error", "words"), BAD_CACHES.values(), ids=BAD_CACHES.keys())
def test_bad_cache_sizes_are_refused_by_name(change, error, words):
    with pytest.raises(error) as caught:
        KVCache(**({"batch_size": 1, "num_kv_heads": 2, "max_len": 4, "head_size": 8} | change))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


# ------------------------------------------------------------------------------------------------ what it costs

LLAMA_13B = {"num_layers": 40, "num_kv_heads": 40, "head_size": 128, "dtype": torch.float16}


def test_llama_13b_keeps_800_kib_per_token():
    assert [kv_cache_bytes(num_tokens, **LLAMA_13B) for num_tokens in (0, 1, 2048)] == [0, 819_200, 1_677_721_600]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_real_cache_reserves_the_predicted_bytes(dtype):
    cache = KVCache(3, 2, 7, 5, dtype=dtype)
    predicted = kv_cache_bytes(3 * 7, num_layers=1, num_kv_heads=2, head_size=5, dtype=dtype)
    view, _ = cache.append(*random_kv(3, 2, 1, 5, dtype=dtype))
    assert cache.nbytes == predicted == whole_buffer(view).numel()


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"num_tokens": -1}, ValueError, "num_tokens"),
        ({"num_tokens": 1.5}, TypeError, "num_tokens"),
        ({"num_layers": 0}, ValueError, "num_layers"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads"),
        ({"head_size": "128"}, TypeError, "head_size"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_cost_sizes_are_refused_by_name(change, error, name):
    with pytest.raises(error, match=name):
        kv_cache_bytes(**({"num_tokens": 1} | LLAMA_13B | change))


# ------------------------------------------------------------------------------------------------ attention over it


@pytest.mark.parametrize("pieces", [[1] * 9, [5, 1, 1, 1, 1], [4, 3, 2], [9]], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1)])
def test_attention_step_by_step_equals_attention_at_once(heads, kv_heads, pieces, device):
    k, v = random_kv(2, kv_heads, 9, 16, dtype=torch.float64, device=device)
    q = random_kv(2, heads, 9, 16, seed=1, dtype=torch.float64, device=device)[0]
    attend = CachedAttention([KVCache(2, kv_heads, 9, 16, dtype=q.dtype, device=device)])
    outs = [attend(0, *parts) for parts in zip(*(t.split(pieces, dim=2) for t in (q, k, v)), strict=True)]
    torch.testing.assert_close(torch.cat(outs, dim=2), attention(q, k, v, causal=True), atol=1e-12, rtol=1e-12)


# ------------------------------------------------------------------------------------------------ generate

SHAPES = {  # heads, kv_heads, head_dim
    "multi-head": (4, 4, None),
    "grouped": (4, 2, None),
    "multi-query": (4, 1, None),
    "wide heads": (6, 3, 10),
}


def random_llama(heads=4, kv_heads=2, head_dim=None, *, seed=0, max_len=64, spread=4.0, qk_norm=False):
    """A float64 Llama whose weights are wide enough that its next token depends on all tokens before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Llama(
            LlamaConfig(
                vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
                num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=max_len,
                qk_norm=qk_norm,
            )
        ).double()  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight *= spread
    return model


def random_prompts(B, T, vocab=37, seed=0):
    return torch.randint(vocab, (B, T), generator=seeded(seed))


def last_logits_of(model):
    """The logits of the last token of each call from now on: they differ where tokens may agree by luck."""
    logits = []
    model.register_forward_hook(lambda _, args, out: logits.append(out[:, -1]))
    return logits


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 7)])
def test_cached_greedy_tokens_and_logits_equal_uncached_ones(sizes, B, T):
    model, prompts = random_llama(*sizes), random_prompts(B, T)
    logits = last_logits_of(model)
    cached, uncached = (generate(model, prompts, 20, cached=cached) for cached in (True, False))
    assert torch.equal(cached, uncached)
    torch.testing.assert_close(torch.stack(logits[:20]), torch.stack(logits[20:]), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_cached_sampled_tokens_equal_uncached_ones_of_the_same_seed(sizes):
    model, prompts = random_llama(*sizes), random_prompts(3, 5)
    cached, uncached, other = (
        generate(model, prompts, 20, cached=cached, temperature=2.0, generator=generator)
        for cached, generator in ((True, seeded(1)), (False, seeded(1)), (True, seeded(2)))
    )
    assert torch.equal(cached, uncached)
    assert not torch.equal(cached, other)


def test_sequences_of_a_batch_are_generated_as_if_alone():
    model, prompts = random_llama(), random_prompts(3, 5)
    together = generate(model, prompts, 12)
    alone = torch.cat([generate(model, prompts[b : b + 1], 12) for b in range(3)])
    assert torch.equal(together, alone)


def test_greedy_tokens_are_those_of_one_pass_over_the_finished_text():
    model, prompts = random_llama(), random_prompts(2, 5)
    before = prompts.clone()
    tokens = generate(model, prompts, 12)
    assert torch.equal(prompts, before)
    assert torch.equal(tokens[:, :5], before)
    logits = model(tokens, torch.arange(17).expand(2, -1), recompute)
    assert torch.equal(tokens[:, 5:], logits[:, 4:-1].argmax(dim=-1))


def calls_of(model):
    """Note each call of the model from now on: (tokens per sequence, first position, last position)."""
    calls = []
    model.register_forward_pre_hook(
        lambda _, args: calls.append((args[0].shape[1], args[1][0, 0].item(), args[1][-1, -1].item()))
    )
    return calls


@pytest.mark.parametrize(
    ("cached", "expected"),
    [(True, [(5, 0, 4), (1, 5, 5), (1, 6, 6), (1, 7, 7)]), (False, [(5, 0, 4), (6, 0, 5), (7, 0, 6), (8, 0, 7)])],
)
def test_a_cached_model_reads_the_prompt_once_and_an_uncached_one_everything_at_each_step(cached, expected):
    model = random_llama()
    calls = calls_of(model)
    generate(model, random_prompts(2, 5), 4, cached=cached)
    assert calls == expected


@pytest.mark.parametrize("cached", [True, False])
def test_generation_can_fill_the_last_position(cached):
    model, prompts = random_llama(max_len=8), random_prompts(1, 8)
    assert generate(model, prompts[:, :5], 3, cached=cached).shape == (1, 8)
    calls = calls_of(model)
    assert torch.equal(generate(model, prompts, 0, cached=cached), prompts)
    assert calls == []  # no token is asked for, so the model reads nothing


def test_generation_builds_no_graph():
    model = random_llama()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        generate(model, random_prompts(1, 3), 2)
    assert saved == []


class Coin(torch.nn.Module):
    """A model whose next token has the same logits whatever it reads."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))
        self.config = SimpleNamespace(
            max_position_embeddings=8, num_key_value_heads=1, head_dim=2, num_hidden_layers=1, vocab_size=len(logits)
        )

    def forward(self, token_ids, positions, attend):
        return self.logits.expand(*token_ids.shape, -1)


def test_temperature_divides_the_logits():
    """At temperature 2 odds of 16 : 1 become 4 : 1."""
    model, prompts = Coin([0.0, torch.tensor(16.0).log().item()]), torch.zeros(4000, 1, dtype=torch.int64)
    tokens = generate(model, prompts, 1, temperature=2.0, generator=seeded(0))
    assert tokens[:, 1].double().mean().item() == pytest.approx(0.8, abs=4 * (0.8 * 0.2 / 4000) ** 0.5)


def test_sampling_without_a_generator_follows_torch_seed():
    model, prompts = Coin([0.0, 0.0, 0.0]), torch.zeros(8, 1, dtype=torch.int64)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(generate(model, prompts, 5, temperature=1.0))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


PROMPTS = random_prompts(2, 5)
BAD_CALLS = {
    "prompt without tokens": ({"prompts": PROMPTS[:, :0]}, ValueError, ["prompts", "at least 1 token", "T = 0"]),
    "too long a text": ({"num_tokens": 4}, ValueError, ["5 tokens", "num_tokens = 4", "8 positions", "at most 3"]),
    "too long a prompt": (
        {"prompts": random_prompts(1, 9), "num_tokens": 0}, ValueError, ["9 tokens", "8 positions", "at most 0"],
    ),
    "negative temperature": ({"temperature": -0.5}, ValueError, ["temperature", "0.0", "-0.5"]),
    "NaN temperature": ({"temperature": float("nan")}, ValueError, ["temperature", "nan"]),
    "infinite temperature": ({"temperature": float("inf")}, ValueError, ["temperature", "inf"]),
    "negative num_tokens": ({"num_tokens": -1}, ValueError, ["num_tokens", "at least 0", "-1"]),
    "fractional num_tokens": ({"num_tokens": 1.0}, TypeError, ["num_tokens", "int", "float"]),
    "one-dimensional prompt": ({"prompts": PROMPTS[0]}, ValueError, ["prompts", "2 dimensions", "[5]"]),
    "prompt of floats": ({"prompts": PROMPTS.float()}, TypeError, ["prompts", "int64", "float32"]),
    "prompt as text": ({"prompts": "Hello"}, TypeError, ["prompts", "Tensor", "str"]),
}  # fmt: skip


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("change", "error", "words"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_generation_is_refused_before_the_model_reads(change, error, words, cached):
    model = random_llama(max_len=8)
    calls = calls_of(model)
    with pytest.raises(error) as caught:
        generate(model, **({"prompts": PROMPTS, "num_tokens": 2, "cached": cached} | change))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert calls == []


def test_what_is_kept_takes_no_part_in_differentiation():
    cache = KVCache(1, 1, 4, 8)
    k = torch.randn(1, 1, 2, 8, requires_grad=True)
    k_all, v_all = cache.append(k, k)
    assert not k_all.requires_grad
    assert not v_all.requires_grad


def test_the_lowest_temperature_is_greedy():
    model, tokenizer = tiny_model()
    prompt = torch.tensor([tokenizer.encode("The cache")])
    assert torch.equal(generate(model, prompt, 4, temperature=1e-30), generate(model, prompt, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", ["Llama", "Llama with norms of q and k", "Llama in float64", "GPT-2"])
def test_a_cache_keeps_what_autocast_gives(model, dtype):
    """Linear layers choose the dtype of k and v there, norms return float32, and float64 stays as it is."""
    torch.manual_seed(0)
    if model == "GPT-2":
        llm = GPT2(GPT2Config(vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    else:
        llm = random_llama(qk_norm="norms" in model).to(torch.float64 if "64" in model else torch.float32)
    prompts = random_prompts(2, 5)
    with torch.autocast("cpu", dtype=dtype):
        cached, uncached = (generate(llm, prompts, 6, cached=cached) for cached in (True, False))
    assert cached.equal(uncached)


def test_the_lowest_temperatures_draw_the_likeliest_tokens():
    model, prompts = tiny_model()[0], torch.zeros(1, 3, dtype=torch.long)
    likeliest = generate(model, prompts, 3)
    for temperature in (1e-30, 1e-40, 1e-46, 5e-324):
        assert generate(model, prompts, 3, temperature=temperature).equal(likeliest)
