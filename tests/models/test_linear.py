"""Packed copies of weights give the products of the weights, and are never older than the weights."""

import threading

import pytest
import torch
from torch.nn.functional import linear

from pagewise.models import GPT2, GPT2Config, Llama, LlamaConfig, in_cpp
from pagewise.models import linear as packed_linear
from pagewise.models.linear import Conv1D, Linear, PackedWeights

ALL = 2**40  # bytes: more than any model here has
pytestmark = pytest.mark.usefixtures("shapes_unchecked")
AVX = torch.backends.cpu.get_cpu_capability().startswith("AVX")
TWO_BYTES = AVX and (torch.ops.mkldnn._is_mkldnn_bf16_supported() or ("product", torch.bfloat16) in in_cpp.library())
PACKS = {torch.float32: AVX, torch.bfloat16: TWO_BYTES, torch.float64: False}


def models():
    sizes = {"vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(**sizes, intermediate_size=80, num_key_value_heads=2, qkv_bias=True)
    tied = LlamaConfig(**sizes, intermediate_size=80, tie_word_embeddings=True, qk_norm=True)
    return {"llama": Llama(llama), "tied": Llama(tied), "gpt2": GPT2(GPT2Config(**sizes))}


def logits_of(model, num_tokens, dtype):
    token_ids = torch.arange(num_tokens)[None]
    return model.to(dtype).requires_grad_(False)(token_ids, token_ids, lambda layer, q, k, v: q)


@pytest.fixture
def reads(monkeypatch):
    """Products by packed weights: the number of rows of each, and the thread."""
    found, by_copy = [], packed_linear._by_copy

    def noting(packed, x, bias, dtype):
        out = by_copy(packed, x, bias, dtype)
        if out is not None:
            found.append((x.numel() // x.shape[-1], threading.get_ident()))
        return out

    monkeypatch.setattr(packed_linear, "_by_copy", noting)
    return found


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
def test_packed_weights_give_the_same_logits_but_for_rounding(name, dtype, num_tokens, reads):
    torch.manual_seed(0)
    model = models()[name]
    exact, plain = logits_of(model, num_tokens, torch.float64), logits_of(model, num_tokens, dtype)
    weights = PackedWeights(model, ALL)
    assert len(weights.packed) == (
        9 if PACKS[dtype] else 0
    )  # of two layers: q with k and v, gate with up are one weight each
    with torch.no_grad(), weights:
        packed = logits_of(model, num_tokens, dtype)
    assert len(reads) == len(weights.packed)
    assert packed.dtype == dtype
    error, usual = ((x.double() - exact).abs().max() for x in (packed, plain))
    assert error <= 4 * usual + 1e-12
    assert torch.equal(logits_of(model, num_tokens, dtype), plain)  # outside the context


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(3),
    "other data": lambda layer: setattr(layer.weight, "data", layer.weight * 3),
    "another parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight * 3, False)),
    "loaded": lambda layer: layer.load_state_dict({k: 3 * v for k, v in layer.state_dict().items()}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", [Linear, Conv1D])
def test_a_weight_that_has_changed_is_read_as_it_is(kind, change):
    layer, x = kind(8, 6).requires_grad_(False), torch.randn(5, 8)
    holder = torch.nn.ModuleList([layer])
    holder.config = GPT2Config(4, 4, 1, 1, tie_word_embeddings=False)
    weights = PackedWeights(holder, ALL)
    assert len(weights.packed) == AVX
    change(layer)
    with torch.no_grad(), weights:
        found = layer(x)
    weight = layer.weight.T if kind is Conv1D else layer.weight
    torch.testing.assert_close(found, linear(x, weight, layer.bias))


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_packed_as_one_are_read_as_they_are(change, name):
    model = models()["llama"].requires_grad_(False)
    weights, token_ids = PackedWeights(model, ALL), torch.arange(5)[None]
    change(model.model["layers"][1].self_attn.get_submodule(name))
    with torch.no_grad(), weights:
        found = model(token_ids, token_ids, lambda layer, q, k, v: q + k.sum() + v.sum())
    expected = model(token_ids, token_ids, lambda layer, q, k, v: q + k.sum() + v.sum())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_and_another_layer_are_heard(register, num_tokens):
    model, token_ids = models()["llama"].requires_grad_(False), torch.arange(num_tokens)[None]
    weights, attention = PackedWeights(model, ALL), model.model["layers"][0].self_attn

    class Doubled(torch.nn.Module):  # as an adapter does, it shows the weight that it wraps
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        weight, bias = property(lambda self: self.inner.weight), property(lambda self: self.inner.bias)

        def forward(self, x):
            return 2 * self.inner(x)

    def logits():
        return model(token_ids, token_ids, lambda layer, q, k, v: q + k.sum() + v.sum())

    before = logits()
    result = (lambda layer, inputs, out: 2 * out) if "pre" not in register else (lambda layer, inputs: 2 * inputs[0])
    for change in (
        lambda: getattr(attention.k_proj, register)(result),
        lambda: setattr(attention, "v_proj", Doubled(attention.v_proj)),
    ):
        change()
        expected = logits()
        with torch.no_grad(), weights:
            torch.testing.assert_close(logits(), expected)
        assert not torch.allclose(expected, before)
        before = expected


def test_other_threads_autocast_strides_and_empty_batches(reads):
    layer = Linear(8, 6).requires_grad_(False)
    holder = torch.nn.ModuleList([layer])
    holder.config = GPT2Config(4, 4, 1, 1, tie_word_embeddings=False)
    x = torch.randn(8, 5)
    with torch.no_grad(), PackedWeights(holder, ALL):
        torch.testing.assert_close(layer(x.T), linear(x.T, layer.weight, layer.bias))
        assert layer(x.T[:0]).shape == (0, 6)
        thread = threading.Thread(target=layer, args=(x.T,))
        thread.start(), thread.join()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x.T).dtype == torch.bfloat16
    assert reads == [(5, threading.get_ident())] * AVX


@pytest.mark.parametrize("seen", [torch.enable_grad, lambda: torch.autocast("cpu")], ids=["gradients", "autocast"])
def test_weights_are_read_as_they_are_while_torch_has_to_see_it(seen, reads):
    layer = Linear(8, 6)
    holder = torch.nn.ModuleList([layer])
    holder.config = GPT2Config(4, 4, 1, 1, tie_word_embeddings=False)
    with torch.no_grad(), seen(), PackedWeights(holder, ALL):
        layer(torch.randn(3, 8))
    assert not reads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("N", "K"), [(32, 32), (6, 8), (33, 31), (70, 100), (64, 257)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_beside_any_other_rows(dtype, N, K, num_threads):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(N, K).to(dtype), torch.randn(N).to(dtype), torch.randn(64, 2 * K).to(dtype)[:, :K]
    if in_cpp.packed(weight) is None:
        pytest.skip("this machine runs no such kernel")
    layer = Linear(K, N).to(dtype).requires_grad_(False)
    layer.weight.copy_(weight)
    packed = packed_linear._pack([layer])

    def product(x, bias):
        return packed_linear._by_copy(packed, x, bias, dtype)

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for given in (None, bias):
            alone = torch.cat([product(x[i : i + 1], given) for i in range(64)])
            exact = x.double() @ weight.double().T + (0 if given is None else given.double())
            error = (alone.double() - exact).abs() / (exact.abs() + K**0.5)
            assert error.max() < (1e-6 if dtype == torch.float32 else 8e-3)
            for rows in (1, 2, 11, 12, 13, 16, 17, 25, 32, 33, 64):
                assert torch.equal(product(x[:rows], given), alone[:rows])
    finally:
        torch.set_num_threads(before)


def test_too_large_a_model_is_not_packed():
    model = models()["llama"]
    nbytes = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, Linear))
    assert len(PackedWeights(model, nbytes - 1).packed) == 0
    assert len(PackedWeights(model, nbytes).packed) == 9 * AVX
