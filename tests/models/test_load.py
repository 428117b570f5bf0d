"""Checkpoints: what transformers saves is loaded, exactly; what does not fit is refused by name; the tiny model."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import ROOT
from pagewise.experiments.train_tiny import documents
from pagewise.kv_cache import generate
from pagewise.models.llama import Llama, Llama3Scaling
from pagewise.models.load import TINY, ByteTokenizer, llama_config, load_model, tiny_model
from pagewise.naive_attention import attention

SENTENCE = "The cache holds the keys and values of all tokens, one block after the other."


def saved(folder, *, shard_size="5GB", **options):
    """A random transformers Llama, saved into `folder`."""
    import transformers

    sizes = {
        "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 0.1, "initializer_range": 0.2,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        **sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}} | options
    )
    torch.manual_seed(0)
    peer = transformers.LlamaForCausalLM(config).requires_grad_(False).eval()
    peer.save_pretrained(folder, max_shard_size=shard_size)
    return peer


def logits(model, ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model(ids, positions, lambda layer, q, k, v: attention(q, k, v, causal=True))


# ------------------------------------------------------------------------------------------------ checkpoints

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "head_dim": 8},
        {"num_key_value_heads": 1},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}},
    ],
    ids=["untied", "tied", "mha", "mqa", "llama3"],
)
def test_what_transformers_saves_gives_the_same_logits(options, shard_size, tmp_path):
    peer = saved(tmp_path, shard_size=shard_size, **options)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "10KB")
    model, tokenizer = load_model(tmp_path)
    ids = torch.randint(67, (2, 50), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logits(model, ids), peer(ids).logits, rtol=1e-4, atol=1e-4)
    assert tokenizer is None
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_are_converted_to_the_dtype_asked_for(dtype, tmp_path):
    saved(tmp_path)
    model, _ = load_model(str(tmp_path), dtype=dtype)
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert logits(model, torch.zeros(1, 3, dtype=torch.int64)).dtype == dtype


def test_configs_of_transformers_4_are_read():
    """There rope_theta is at the top level and the type of scaling is optional."""
    settings = {name: 8 for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    settings |= {"num_attention_heads": 2, "rope_theta": 500000, "rope_scaling": None, "head_dim": None}
    config = llama_config(settings)
    assert (config.rope_theta, config.rope_scaling, config.num_key_value_heads, config.head_dim) == (
        500000.0,
        None,
        2,
        4,
    )
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"} | {"original_max_position_embeddings": 8192}
    assert llama_config(settings | {"rope_scaling": scaling}).rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_leftovers_of_older_checkpoints_are_ignored(tmp_path):
    peer = saved(tmp_path, tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    ids = torch.arange(9)[None]
    torch.testing.assert_close(logits(load_model(tmp_path)[0], ids), peer(ids).logits, rtol=1e-4, atol=1e-4)
    weights["lm_head.weight"] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tie_word_embeddings, but lm_head.weight is another matrix"):
        load_model(tmp_path)


def without(weights, name):
    del weights[name]


def renamed(weights, name):
    weights["model.layers.7.strange"] = weights[name].clone()


def transposed(weights, name):
    weights[name] = weights[name].T.contiguous()


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without, rf'do not fit its config.json: (?s:.*)Missing key.*"{Q}"'),
        (renamed, 'Unexpected key.*"model.layers.7.strange"'),
        (transposed, rf"size mismatch for {Q}: .*\[32, 48\].*\[48, 32\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(spoil, says, tmp_path):
    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    spoil(weights, Q)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not implemented: .* 'llama', 'qwen2', 'qwen3', 'gpt2'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling of type 'yarn' is not implemented"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
            "type 'linear' is not implemented",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not implemented"),
        ({"attention_bias": True}, "attention_bias = True is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
    ],
)
def test_what_is_not_implemented_is_refused(changes, says, tmp_path):
    saved(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ValueError, match=says):
        load_model(tmp_path)


def test_folders_that_are_no_checkpoints_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        load_model(tmp_path)
    saved(tmp_path, shard_size="10KB")
    next(tmp_path.glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-\d+\.safetensors"):
        load_model(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors: weights are read from safetensors only"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="is not a folder and could not be fetched from the hub"):
        load_model(tmp_path / "nowhere")


def test_bad_dtype_is_refused():
    with pytest.raises(TypeError, match=r"dtype must be .*, got torch\.int8"):
        load_model(TINY, dtype=torch.int8)


# ------------------------------------------------------------------------------------------------ the hub


def test_hub_id_is_downloaded(tmp_path, monkeypatch):
    asked = []

    def download(repo_id, allow_patterns):
        asked.append(repo_id)
        saved(tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model, _ = load_model("someone/some-model.v1")
    assert asked == ["someone/some-model.v1"]
    assert model.config.vocab_size == 67


def test_failed_download_says_what_was_tried(monkeypatch):
    def download(repo_id, allow_patterns):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match=r"'someone/else' is not a folder and could not be fetched.*no network"):
        load_model("someone/else")


def test_missing_packages_name_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=re.escape("huggingface_hub: pip install 'attention-page-by-page[models]'")):
        load_model("someone/else")
    for path in TINY.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ImportError, match=re.escape("transformers: pip install 'attention-page-by-page[models]'")):
        load_model(tmp_path)


@pytest.mark.slow
def test_importing_models_the_engine_and_the_exercises_is_light():
    code = (
        "import sys, pagewise.engine.serve, pagewise.exercises, pagewise.models.load; "
        "pagewise.models.load.tiny_model(); "
        "print({'transformers', 'huggingface_hub', 'triton', 'torch._dynamo', 'IPython', 'matplotlib', "
        "'pagewise.figures', 'pagewise.experiments'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# ------------------------------------------------------------------------------------------------ tokenizers


@pytest.mark.parametrize("text", ["", "plain", "softmax(QKᵀ)·V ≤ ∞\n\t\0", "日本語 🙂"])
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(torch.tensor(ids, dtype=torch.int64)) == text


def test_decoding_replaces_broken_bytes_and_drops_special_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xE2, 0x88]) == "�"
    assert tokenizer.decode([72, tokenizer.eos_token_id, 105, 300]) == "Hi"


def test_tokenizer_files_are_used(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    saved(tmp_path)
    words = Tokenizer(models.WordLevel({"the": 0, "cache": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    _, tokenizer = load_model(tmp_path)
    assert tokenizer.encode("the cache holds") == [0, 1, 2]


# ------------------------------------------------------------------------------------------------ the tiny model


def test_tiny_model_is_a_folder_that_transformers_loads_too():
    import transformers

    model, _ = tiny_model()
    peer = transformers.LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ids = torch.tensor([list(SENTENCE.encode())])
    torch.testing.assert_close(logits(model, ids), peer(ids).logits.detach(), rtol=1e-4, atol=1e-4)
    assert peer.config.eos_token_id == ByteTokenizer.eos_token_id


def test_tiny_model_is_small_and_says_where_it_comes_from():
    model, tokenizer = tiny_model(dtype=torch.bfloat16)
    assert isinstance(model, Llama)
    assert isinstance(tokenizer, ByteTokenizer)
    assert (TINY / "model.safetensors").stat().st_size <= 4 * 2**20
    record = json.loads((TINY / "training.json").read_text())
    assert record["num_parameters"] == sum(weight.numel() for weight in model.parameters())
    known = {"corpus_bytes", "corpus_sha256", "steps", "seconds", "held_out_nats_per_byte", "seed", "torch", "date"}
    assert known <= record.keys()
    assert record["held_out_nats_per_byte"] < 3.0


def test_tiny_model_has_learnt_english():
    model, tokenizer = tiny_model()
    ids = torch.tensor([tokenizer.encode(SENTENCE)])
    loss = torch.nn.functional.cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:])
    assert loss < 3.0, f"{loss:.2f} nats per byte"


@pytest.mark.slow
def test_tiny_model_writes_words_of_this_repository(shapes_unchecked):
    texts = documents(ROOT)
    known = set(re.findall(r"[a-z]+", " ".join(paragraph for text in texts for paragraph in text).lower()))
    model, tokenizer = tiny_model()
    for prompt in ("The KV cache", "Attention", "softmax"):
        ids = generate(model, torch.tensor([tokenizer.encode(prompt + " ")]), 80)
        written = re.findall(r"[a-z]+", tokenizer.decode(ids[0]).lower())[len(prompt.split()) : -1]
        assert len(written) >= 10, written
        assert sum(word in known for word in written) >= 0.7 * len(written), written


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "{", "config.json is not a JSON object"),
        ("config.json", "[1]", "config.json is not a JSON object"),
        ("model.safetensors", "nonsense", "model.safetensors is not a whole safetensors file"),
        ("model.safetensors.index.json", "{}", "(?s)do not fit its config.json: .*Missing key"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text, words):
    folder = shutil.copytree(TINY, tmp_path / "tiny")
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        load_model(folder)


def test_what_is_no_path_is_refused(shapes_unchecked):
    with pytest.raises(TypeError, match="int"):
        load_model(3)


def test_models_and_loaders_are_importable_from_the_package():
    import pagewise.models

    assert pagewise.models.tiny_model is tiny_model
    assert {"Llama", "LlamaConfig", "load_model", "tiny_model"} <= set(dir(pagewise.models))
    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        pagewise.models.Lama  # noqa: B018
