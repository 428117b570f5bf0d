"""Lesson 8 in the engine: the table chooses the products of a model's linear layers, and φ replaces the maximum."""

import pytest
import torch
from checkpoints import save_random
from torch.nn.functional import linear

from pagewise.engine import LLM, SamplingParams
from pagewise.engine.flash_decoding_plus_plus import product_shapes
from pagewise.flash_decoding_plus_plus import Dataflow, UnifiedMax
from pagewise.flash_decoding_plus_plus import dataflow as products
from pagewise.flash_decoding_plus_plus.dataflow import device_label
from pagewise.models import GPT2, GPT2Config, Llama, LlamaConfig, load_model
from pagewise.models.gpt2 import Conv1D

HERE = device_label(torch.device("cpu"))
PROMPTS = [[5, 9, 2, 33, 17, 8, 21], [1], [40, 3, 12]]
NUM_TOKENS = 6
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def new_model(kind):
    """Return a random model in which every weight and every bias moves the logits."""
    torch.manual_seed(3)
    if kind == "gpt2":
        model = GPT2(GPT2Config(**SIZES, max_position_embeddings=64))
    else:
        how = {"qkv_bias": kind == "qwen2", "sliding_window": 5 if kind == "mistral" else None}
        model = Llama(LlamaConfig(**SIZES, max_position_embeddings=64, **how))
    for weight in model.parameters():
        weight.data.normal_(std=0.5)
    return model.requires_grad_(False)


def table(model, M1=4, M2=33):
    return Dataflow(HERE, next(model.parameters()).dtype, dict.fromkeys(product_shapes(model), (M1, M2)))


def tokens(llm, prompts=PROMPTS):
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.fixture
def taken(monkeypatch):
    """gemv and flat_gemm compute as torch does, and note their names and weights."""
    calls = []

    def noting(name):
        def product(x, w):
            calls.append((name, tuple(w.shape)))
            return linear(x, w)

        return product

    monkeypatch.setattr(products, "PRODUCTS", {name: noting(name) for name in ("gemv", "flat_gemm")})
    return calls


def names(calls):
    return [name for name, _ in calls]


# ------------------------------------------------------------------------------------------------ linear layers


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("attention", ["paged", "dense"])
def test_with_a_table_the_tokens_stay_the_same(kind, attention, taken):
    model = new_model(kind)
    expected = tokens(LLM(model, num_blocks=16, attention=attention))
    assert taken == []
    assert tokens(LLM(model, num_blocks=16, attention=attention, dataflow=table(model))) == expected
    assert {name for name, _ in taken} == {"gemv", "flat_gemm"}
    assert {shape for _, shape in taken} == set(product_shapes(model))


@pytest.mark.parametrize(("kind", "per_layer"), [("llama", 7), ("qwen2", 7), ("mistral", 7), ("gpt2", 4)])
def test_the_number_of_rows_chooses_every_product(kind, per_layer, taken):
    """A prompt of 7 tokens is 7 rows in all layers and 1 row in the head. Each later token is 1 row everywhere."""
    model = new_model(kind)
    tokens(LLM(model, num_blocks=16, dataflow=table(model)), PROMPTS[:1])
    layers = 2 * per_layer
    assert names(taken) == ["flat_gemm"] * layers + ["gemv"] + ["gemv"] * (layers + 1) * (NUM_TOKENS - 1)


def test_products_that_were_not_profiled_go_to_torch(taken):
    model = new_model("llama")
    (head,) = (shape for shape in product_shapes(model) if shape[0] == SIZES["vocab_size"])
    flow = Dataflow(HERE, torch.float32, {head: (4, 33)})
    assert tokens(LLM(model, num_blocks=16, dataflow=flow)) == tokens(LLM(model, num_blocks=16))
    assert {shape for _, shape in taken} == {head}


def test_engines_share_a_model_and_only_one_uses_the_table(taken):
    model = new_model("gpt2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    kinds = [type(layer) for layer in model.modules()]
    plain, chosen = LLM(model, num_blocks=16), LLM(model, num_blocks=16, dataflow=table(model))
    plain.add_request(PROMPTS[0], GREEDY)
    chosen.add_request(PROMPTS[0], GREEDY)
    outputs = []
    for _ in range(NUM_TOKENS):
        calls = len(taken)
        outputs += plain.step()
        assert len(taken) == calls
        outputs += chosen.step()
        assert len(taken) > calls
    one, other = outputs
    assert one.token_ids == other.token_ids
    assert [type(layer) for layer in model.modules()] == kinds
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    calls = len(taken)
    model(torch.tensor([[1]]), torch.tensor([[0]]), lambda layer, q, k, v: q)
    assert len(taken) == calls


def test_a_failed_step_leaves_torchs_linear_as_it_was(taken):
    model = new_model("llama")
    llm = LLM(model, num_blocks=16, dataflow=table(model))
    llm.memory.attention = lambda batch: None  # no Attend: the model raises
    with pytest.raises(TypeError, match="attend"):
        llm.generate(PROMPTS, GREEDY)
    linear(torch.zeros(1, 16), torch.zeros(16, 16))
    assert taken == []


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_that_change_are_followed(kind, taken):
    model = new_model(kind)
    llm = LLM(model, num_blocks=16, dataflow=table(model), prefix_cache=False)
    before = tokens(llm)
    for weight in model.parameters():
        weight.data.copy_(weight.flip(0))
    expected = tokens(LLM(model, num_blocks=16))
    assert tokens(llm) == expected != before


def test_a_gpt2_from_a_file_is_laid_out_for_the_products(tmp_path, taken):
    save_random("gpt2", tmp_path)
    model, _ = load_model(tmp_path)
    tokens(LLM(model, num_blocks=16, dataflow=table(model)), PROMPTS[:1])
    assert len(taken) == NUM_TOKENS * (2 * 4 + 1)
    weights = [layer.weight for layer in model.modules() if isinstance(layer, Conv1D)]
    assert [weight.T.is_contiguous() for weight in weights] == [True] * 2 * 4


@pytest.mark.slow
def test_the_kernels_themselves_serve(shapes_unchecked):
    """Simulated, so that only one product goes to a kernel."""
    model = new_model("gpt2")
    flow = Dataflow(HERE, torch.float32, {(48, 16): (2, 2)})  # of q, k and v, and of the head
    llm, sampling = LLM(model, num_blocks=8, dataflow=flow), SamplingParams(max_tokens=2, temperature=0.0)
    (output,), (expected,) = (one.generate([[5, 9]], sampling) for one in (llm, LLM(model, num_blocks=8)))
    assert output.token_ids == expected.token_ids


def test_shapes_are_those_of_all_products():
    for kind in ("llama", "mistral"):
        assert product_shapes(new_model(kind)) == [(16, 16), (24, 16), (16, 24), (48, 16)]
    assert product_shapes(new_model("gpt2")) == [(48, 16), (16, 16), (24, 16), (16, 24)]


# ------------------------------------------------------------------------------------------------ the unified maximum

WIDE, FAR, NARROW = UnifiedMax(0.0, -57.0, 63.0), UnifiedMax(200.0, -57.0, 63.0), UnifiedMax(0.0, 0.0, 0.5)
NUM_ROWS = 2 * 2 * (NUM_TOKENS * len(PROMPTS) - 2)  # layers · heads · decoded tokens: one prompt is a single token


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_with_a_unified_maximum_the_tokens_stay_the_same(kind, backend, kernel_device):
    model = new_model(kind).to(kernel_device)
    llm = LLM(model, num_blocks=16, attention="dense", backend=backend, unified_max=WIDE)
    assert tokens(llm) == tokens(LLM(model, num_blocks=16))
    assert llm.memory.num_recomputed == 0


@pytest.mark.parametrize(
    ("backend", "band", "recomputed"),
    [("torch", FAR, [NUM_ROWS]), ("triton", FAR, [NUM_ROWS]), ("torch", NARROW, range(1, NUM_ROWS))],
    ids=["torch, every row", "triton, every row", "torch, some rows"],
)
def test_rows_outside_the_band_are_recomputed_and_counted(backend, band, recomputed, kernel_device):
    model = new_model("llama").to(kernel_device)
    llm = LLM(model, num_blocks=16, attention="dense", backend=backend, unified_max=band)
    assert tokens(llm) == tokens(LLM(model, num_blocks=16))
    assert llm.memory.num_recomputed in recomputed
