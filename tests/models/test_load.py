"""Checkpoints: what transformers saves is loaded, exactly; what does not fit is refused by name; the tiny model."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, change_config, change_weights, logits, save_random
from scripted import byte_level

from conftest import ROOT
from pagewise.experiments.train_tiny import prose
from pagewise.kv_cache import generate
from pagewise.models.llama import Llama, Llama3Scaling
from pagewise.models.load import TINY, ByteTokenizer, llama_config, load_model, tiny_model

SENTENCE = "The cache holds the keys and values of all tokens, one block after the other."


# ------------------------------------------------------------------------------------------------ checkpoints

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_are_converted_to_the_dtype_asked_for(dtype, tmp_path):
    save_random("llama-2", tmp_path)
    model, tokenizer = load_model(str(tmp_path), dtype=dtype)
    assert tokenizer is None
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert logits(model, torch.zeros(1, 3, dtype=torch.int64)).dtype == dtype


def test_configs_of_transformers_4_are_read():
    """There rope_theta is at the top level and the type of scaling is optional."""
    settings = {name: 8 for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    settings |= {"num_attention_heads": 2, "rope_theta": 500000, "rope_scaling": None, "head_dim": None}
    config = llama_config(settings)
    assert (config.rope_theta, config.rope_scaling) == (500000.0, None)
    assert (config.num_key_value_heads, config.head_dim) == (2, 4)
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"} | {"original_max_position_embeddings": 8192}
    assert llama_config(settings | {"rope_scaling": scaling}).rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_leftovers_of_older_checkpoints_are_ignored(tmp_path):
    peer = save_random("llama-2", tmp_path, tie_word_embeddings=True)
    leftovers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    leftovers["lm_head.weight"] = peer.model.embed_tokens.weight.clone()
    change_weights(tmp_path, lambda weights: weights | leftovers)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(logits(load_model(tmp_path)[0], ids), peer(ids).logits, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ what is refused


def config(*without, **changes):
    return lambda folder: change_config(folder, *without, **changes)


def weights(change):
    return lambda folder: change_weights(folder, change)


def without(name):
    return weights(lambda old: {key: weight for key, weight in old.items() if key != name})


def replaced(name, text):
    return lambda folder: (folder / name).write_text(text)


def transposed(name):
    return weights(lambda old: old | {name: old[name].T.contiguous()})


def without_the_second_file(folder):
    save_random("llama-2", folder, shard_size="50KB")
    next(folder.glob("*-00002-of-*.safetensors")).unlink()


class Trap:
    """Unpickling it would be noticed."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save(Trap(), folder / "pytorch_model.bin")


def pickled_with_an_index(folder):
    pickled(folder)
    weight_map = {"weight_map": {"transformer.wte.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))


def without_the_index(folder):
    save_random("llama-2", folder, shard_size="50KB")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").unlink(missing_ok=True)


def in_scaled_bytes(folder):
    """As fp8 checkpoints are, but with nothing in config.json."""
    change_weights(folder, lambda old: old | {MLP: old[MLP].to(torch.float8_e4m3fn), f"{MLP}_scale": torch.ones(1)})


def packed(folder):
    """As AWQ and GPTQ pack 4 bits."""
    change_weights(folder, lambda old: old | {"model.layers.0.mlp.up_proj.qweight": torch.ones(4, dtype=torch.int32)})


MLP = "model.layers.1.mlp.up_proj.weight"
NO_WINDOW = {"layer_types": None, "use_sliding_window": True}
WINDOW = {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
HEAD = {"lm_head.weight": torch.ones(VOCAB, 64)}
LLAMA3_FACTOR = {"rope_type": "llama3", "factor": 2.0}
LINEAR = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}
NO_LLAMA = r"model_type 'llama4_text' is not implemented: .* 'llama', 'mistral', 'qwen2', 'qwen3', 'gpt2'"
REFUSED = [  # the checkpoint, how it is spoilt, the message
    ("gpt2", without("transformer.h.1.attn.c_attn.bias"), "the folder lacks transformer.h.1.attn.c_attn.bias$"),
    ("gpt2", without("transformer.wpe.weight"), "the folder lacks transformer.wpe.weight$"),
    ("llama-2", without("lm_head.weight"), "do not fit its config.json: the folder lacks lm_head.weight$"),
    ("qwen2", without("model.layers.1.self_attn.k_proj.bias"), "lacks model.layers.1.self_attn.k_proj.bias$"),
    ("qwen3", without("model.layers.0.self_attn.q_norm.weight"), "lacks model.layers.0.self_attn.q_norm.weight$"),
    ("llama-2", weights(lambda old: old | {"odd.weight": torch.ones(3)}), "the folder has besides odd.weight$"),
    ("llama-2", transposed(MLP), rf"of another size {MLP} \[64, 96\], not \[96, 64\]$"),
    ("gpt2", config(n_positions=128), r"of another size transformer.wpe.weight \[256, 64\], not \[128, 64\]$"),
    ("qwen2", config(model_type="llama"), r"besides model\S+k_proj.bias, model\S+q_proj.bias, model\S+ and 3 more$"),
    ("llama-2", config(model_type="qwen2"), r"lacks model.layers.0.self_attn.k_proj.bias, \S+, \S+ and 3 more$"),
    ("llama-2", config(quantization_config={"quant_method": "fp8", "x": {}}), r"is quantised \(fp8\), which is not"),
    ("qwen2", config(quantization_config={"quant_method": "awq", "bits": 4}), r"is quantised \(awq\), which is not"),
    ("gpt2", config(compression_config={"format": "pack-quantized"}), "compression_config says that .* quantised"),
    ("llama-2", in_scaled_bytes, rf"{MLP} in .* is torch.float8_e4m3fn: quantised weights are not implemented$"),
    ("llama-2", packed, "qweight in .* is torch.int32: quantised weights are not implemented$"),
    ("qwen2", weights(lambda old: old | HEAD), "tie_word_embeddings, but lm_head.weight is another matrix"),
    ("gpt2", config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx = True is not implemented"),
    ("gpt2", config(scale_attn_weights=False), "scale_attn_weights = False is not implemented"),
    ("gpt2", config(add_cross_attention=True), "add_cross_attention = True is not implemented"),
    ("gpt2", config(activation_function="relu"), "activation_function = 'relu' is not implemented"),
    ("qwen2", config(layer_types=["full_attention", "sliding_attention"]), "layers of 'sliding_attention' are not"),
    ("qwen2", config(**WINDOW), r"layers of 'sliding_attention' are not implemented \(sliding_window = 8\)"),
    # transformers' default is 4096, also if the context is shorter
    ("qwen2", config("sliding_window", **NO_WINDOW, max_window_layers=1), r"implemented \(sliding_window = 4096\)"),
    ("qwen3", config("sliding_window", **NO_WINDOW, max_window_layers=0), r"implemented \(sliding_window = 4096\)"),
    ("qwen3", config(**NO_WINDOW, sliding_window=0, max_window_layers=1), r"implemented \(sliding_window = 0\)"),
    ("qwen3", config(attention_bias=True), "attention_bias = True is not implemented: Qwen3 here has"),
    ("qwen3", config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "of type 'yarn' is not implemented"),
    ("llama-3", config(model_type="llama4_text"), NO_LLAMA),
    ("llama-2", config(**LINEAR), "type 'linear' is not implemented"),
    ("llama-2", config(rope_parameters=LLAMA3_FACTOR), "lacks low_freq_factor, high_freq_factor"),
    ("llama-2", config(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor = 0.5 is not"),
    ("llama-2", config(attention_bias=True), "attention_bias = True is not implemented"),
    ("llama-2", config(hidden_act="gelu"), "hidden_act = 'gelu' is not implemented"),
    ("llama-2", config(num_key_value_heads=3), "must be a multiple of num_key_value_heads"),
    ("gpt2", config("n_head", "n_positions"), "config.json lacks n_head, n_positions"),
    ("qwen3", config("num_key_value_heads", "head_dim"), "config.json lacks num_key_value_heads, head_dim"),
    ("llama-2", config("hidden_size"), "config.json lacks hidden_size"),
    ("gpt2", replaced("config.json", "{"), "config.json is not a JSON object"),
    ("gpt2", replaced("config.json", "[1]"), "config.json is not a JSON object"),
    ("gpt2", replaced("model.safetensors", "nonsense"), "model.safetensors is not a whole safetensors file"),
    ("gpt2", replaced("model.safetensors.index.json", "{}"), "do not fit its config.json: the folder lacks .* more$"),
    ("gpt2", lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    ("llama-2", without_the_second_file, r"lacks model-00002-of-\d+\.safetensors: .*index.json names \d+ files; fetch"),
    ("llama-2", without_the_index, r"lacks model.safetensors.index.json: this file says what is in .* fetch it too"),
    ("gpt2", pickled, r"lacks model\.safetensors: weights are read from safetensors only"),
    ("gpt2", pickled_with_an_index, r"pytorch_model\.bin is not a whole safetensors file"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ARCHITECTURES}
    for name, folder in folders.items():
        save_random(name, folder)
    return folders


@pytest.mark.parametrize(("architecture", "spoil", "says"), REFUSED)
def test_what_does_not_fit_or_is_not_implemented_is_refused(architecture, spoil, says, checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints[architecture], tmp_path / "spoilt")
    spoil(folder)
    with pytest.raises(ValueError, match=says) as refusal:
        load_model(folder)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400 + len(str(folder))


def test_a_whole_file_needs_no_index(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["llama-2"], tmp_path / "whole")
    (folder / "other-00001-of-00002.safetensors").touch()
    load_model(folder)


@pytest.mark.parametrize(
    "spoil", [config(**NO_WINDOW, sliding_window=None), config("sliding_window", layer_types=None)]
)
def test_a_qwen_without_a_window_is_loaded(spoil, checkpoints, tmp_path):
    from transformers import AutoConfig

    folder = shutil.copytree(checkpoints["qwen2"], tmp_path / "whole")
    spoil(folder)
    load_model(folder)
    assert set(AutoConfig.from_pretrained(folder).layer_types) == {"full_attention"}  # transformers agrees


@pytest.mark.parametrize(
    ("path", "options", "error", "says"),
    [
        (3, {}, TypeError, "int"),
        (TINY, {"dtype": torch.int8}, TypeError, r"dtype must be .*, got torch\.int8"),
        ("no/such", {}, ValueError, "'no/such' is not a folder and could not be fetched from the hub: no network"),
    ],
)
def test_what_names_no_checkpoint_is_refused(path, options, error, says, monkeypatch, shapes_unchecked):
    def download(repo_id, allow_patterns):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(error, match=says):
        load_model(path, **options)


# ------------------------------------------------------------------------------------------------ the hub


def test_hub_id_is_downloaded(tmp_path, monkeypatch):
    asked = []

    def download(repo_id, allow_patterns):
        asked.append(repo_id)
        save_random("llama-2", tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model, _ = load_model("someone/some-model.v1")
    assert asked == ["someone/some-model.v1"]
    assert model.config.vocab_size == VOCAB


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that has the folder `hub` and gives what it is asked for."""
    from huggingface_hub.utils import filter_repo_objects

    def download(repo_id, allow_patterns):
        names = [str(path.relative_to(tmp_path / "hub")) for path in (tmp_path / "hub").rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "hub" / name, tmp_path / "here" / name)
        return str(tmp_path / "here")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return tmp_path / "hub"


ONE, TWO = "{{ messages[0]['content'] }}", {"default": "1{{ messages[0]['content'] }}", "tool_use": "2"}
PLACES = {  # where a chat template may be: how a tokenizer is saved, and what is changed afterwards
    "a file of its own": (ONE, {}, lambda folder: None),
    "tokenizer_config.json": (ONE, {"save_jinja_files": False}, lambda folder: None),
    "a file for each": (TWO, {}, lambda folder: None),
    "a list": (TWO, {"save_jinja_files": False}, lambda folder: None),
    "chat_template.json": (
        None,
        {},
        lambda f: (f / "chat_template.json").write_text(json.dumps({"chat_template": ONE})),
    ),
}


@pytest.mark.parametrize("from_hub", [False, True], ids=["folder", "hub"])
@pytest.mark.parametrize("place", PLACES)
def test_a_chat_template_comes_with_the_checkpoint(place, from_hub, hub):
    template, options, change = PLACES[place]
    save_random("llama-2", hub)
    byte_level(chat_template=template).save_pretrained(hub, **options)
    change(hub)
    tokenizer = load_model("someone/else" if from_hub else hub)[1]
    said = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert said == ("1Hi" if template is TWO else "Hi")


@pytest.mark.parametrize("from_hub", [False, True], ids=["folder", "hub"])
def test_the_merges_of_an_older_tokenizer_come_with_the_checkpoint(from_hub, hub):
    save_random("gpt2", hub)
    whole = byte_level(chat_template=None)
    (hub / "vocab.json").write_text(json.dumps(whole.get_vocab()))
    (hub / "merges.txt").write_text("#version: 0.2\nĠ t\nh e\nĠt he\n")
    (hub / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    _, tokenizer = load_model("someone/else" if from_hub else hub)
    assert tokenizer.encode("a the") == whole.encode("a the")
    assert len(tokenizer.encode("a the")) == 2


@pytest.mark.parametrize(
    ("kind", "missing", "says"),
    [
        ("LlamaTokenizer", "vocab.json merges.txt", "has tokenizer_config.json, but none of tokenizer.json, tokenizer"),
        ("GPT2Tokenizer", "merges.txt", "the tokenizer in .* cannot be read; is a file missing?"),
        ("Qwen2Tokenizer", "merges.txt", "the tokenizer in .* cannot be read; is a file missing?"),
    ],
)
def test_half_a_tokenizer_is_refused(kind, missing, says, hub):
    save_random("gpt2", hub)
    (hub / "vocab.json").write_text(json.dumps(byte_level().get_vocab()))
    (hub / "merges.txt").write_text("#version: 0.2\n")
    (hub / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    for name in missing.split():
        (hub / name).unlink()
    with pytest.raises(ValueError, match=says):
        load_model(hub)


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

    save_random("llama-2", tmp_path)
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
    files = [*(ROOT / "lessons").glob("*.ipynb"), *(ROOT / "src" / "pagewise").rglob("*.py")]
    known = set(re.findall(r"[a-z]+", " ".join(map(prose, files)).lower()))
    model, tokenizer = tiny_model()
    for prompt in ("The KV cache", "Attention", "softmax"):
        ids = generate(model, torch.tensor([tokenizer.encode(prompt + " ")]), 80)
        written = re.findall(r"[a-z]+", tokenizer.decode(ids[0]).lower())[len(prompt.split()) : -1]
        assert len(written) >= 10, written
        assert sum(word in known for word in written) >= 0.7 * len(written), written


def test_models_and_loaders_are_importable_from_the_package():
    import pagewise.models

    assert pagewise.models.tiny_model is tiny_model
    assert {"Llama", "LlamaConfig", "load_model", "tiny_model"} <= set(dir(pagewise.models))
    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        pagewise.models.Lama  # noqa: B018
