"""Load checkpoints and their tokenizers, from folders or from the Hugging Face hub.

transformers' `save_pretrained` writes such a folder. It holds config.json, the weights as safetensors (one file, or
shards and model.safetensors.index.json), and the files of the tokenizer with its chat template. generation_config.json
has end tokens, and the sampling parameters that the model's authors recommend. `tiny_model` loads a folder inside the
package and needs neither a network nor transformers. A setting that is not implemented here raises ValueError.
"""

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pagewise.models.gpt2 import GPT2, GPT2Config
from pagewise.models.llama import Llama, Llama3Scaling, LlamaConfig
from pagewise.tools.checks import FLOATS
from pagewise.tools.progress import progress

TINY = Path(__file__).parent / "tiny"
_LEFTOVERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # older files hold these besides weights
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges.txt")  # * matches / too
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 … 255, and one special token, 256, that ends a text."""

    vocab_size = 257
    eos_token_id = 256
    bos_token_id = None

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`. No special token is added."""
        return list(text.encode())

    def convert_ids_to_tokens(self, token: int) -> str:
        """The name of a token: sentencepiece's for a byte."""
        return f"<0x{token:02X}>" if token < 256 else ""

    def decode(self, ids: Iterable[int] | Int[Tensor, " n"], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids` up to 255; bytes that are not UTF-8 become "�". Transformers has `skip_special_tokens`."""
        return bytes(filter((256).__gt__, map(int, ids))).decode(errors="replace")


def load_model(
    path_or_hub_id: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    split: Callable[[nn.Module], tuple[nn.Module, Mapping[str, Any]]] | None = None,
) -> tuple[Llama | GPT2, Any]:
    """Return (model, tokenizer) of a checkpoint of Llama, Mistral, Qwen2, Qwen3 or GPT-2.

    The weights are converted to `dtype` and moved to `device`. They do not require gradients.

    Args:
        path_or_hub_id: a folder, or the name of a repository on the Hugging Face hub ("owner/name").
        dtype: float32, float16, bfloat16 or float64.
        device: the default is torch's default device, normally the CPU.
        split: what to load of it. It takes the model without weights, and returns a share of the model and, by the
            names of weights, a `Cut` of each weight that the share has a part of. Nothing else is read of these.

    Returns:
        The model has its `eos_token_ids` and `sampling_defaults`. The tokenizer is that of transformers if the folder
        has the files of one, a `ByteTokenizer` if config.json has `"tokenizer": "bytes"`, and else None.

    Raises:
        ValueError: the checkpoint does not exist, its model is not implemented here, or its weights do not fit.
        ImportError: the hub or the tokenizer needs a package that is not installed.
    """
    if dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"dtype must be float32, float16, bfloat16 or float64, got {dtype}")
    device = torch.device(device or torch.get_default_device())
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, but torch finds no GPU here: leave it out, or pass 'cpu'")
    folder, settings = checkpoint(path_or_hub_id)
    generation = _read_json(path) if (path := folder / "generation_config.json").is_file() else {}
    _check_not_quantised(settings)
    with torch.device("meta"):  # no memory and no random weights, because the weights come from the files
        model = build_model(settings)
        model, cuts = (model, {}) if split is None else split(model)
    model.eos_token_ids = eos_token_ids(generation, settings)
    model.sampling_defaults = sampling_defaults(generation)
    weights = _read_weights(folder, model, dtype, device, cuts)
    _check_weights(folder, weights, model.state_dict())
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval(), _tokenizer(folder, settings)


def load_tokenizer(path_or_hub_id: str | Path) -> Any:
    """Return the tokenizer of a checkpoint as `load_model` does, without its weights.

    Raises:
        ValueError, ImportError: as `load_model`.
    """
    return _tokenizer(*checkpoint(path_or_hub_id))


def checkpoint(path_or_hub_id: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a checkpoint, which may be fetched from the hub, and its config.json."""
    folder = Path(path_or_hub_id).expanduser()
    if not folder.is_dir():
        folder = _download(str(path_or_hub_id))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: it must be a folder that save_pretrained wrote")
    return folder, _read_json(folder / "config.json")


def tiny_model(
    *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> tuple[Llama, ByteTokenizer]:
    """Return (model, tokenizer) of the model of 1.7 million parameters that ships with the package.

    It was trained on the text of this repository, byte by byte, with contexts of up to 512 bytes.
    """
    return load_model(TINY, dtype=dtype, device=device)


def _read_weights(
    folder: Path, model: nn.Module, dtype: torch.dtype, device: torch.device, cuts: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Read the weights from the safetensors in `folder`, under the names that `model` has for them."""
    expected = model.state_dict()
    embedding = next(iter(expected))
    prefix = embedding.split(".")[0]  # "model" or "transformer"; missing if the decoder was saved without its head
    weights = {}
    shards = map(_open, _weight_files(folder))
    found = [(shard, name) for shard in shards for name in shard.keys()]  # noqa: SIM118 (not a dict)
    for shard, name in progress(found, "weights", delay=1.0):
        if not name.endswith(_LEFTOVERS):
            found_as, whole = name, f"{prefix}.{name}"
            name = whole if whole in expected else name
            weight = cuts[name].of(shard.get_slice(found_as)) if name in cuts else shard.get_tensor(found_as)
            if weight.dtype not in (*FLOATS, torch.float64):
                raise ValueError(f"{found_as} in {folder} is {weight.dtype}: quantised weights are not implemented")
            weight = weight.to(device=device, dtype=dtype)
            if name in expected and not expected[name].is_contiguous() and weight.dim() == 2:
                weight = weight.T.contiguous().T  # the layout of the model: see gpt2.Conv1D
            weights[name] = weight
    if model.config.tie_word_embeddings:
        head = weights.pop("lm_head.weight", None)
        if head is not None and embedding in weights and not torch.equal(head, weights[embedding]):
            raise ValueError(f"config.json in {folder} has tie_word_embeddings, but lm_head.weight is another matrix")
    return weights


def _check_weights(folder: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not exactly those that config.json describes."""
    shapes = {name: (list(found[name].shape), list(expected[name].shape)) for name in found.keys() & expected.keys()}
    faults = {
        "lacks": expected.keys() - found.keys(),
        "has besides": found.keys() - expected.keys(),
        "has of another size": {f"{name} {was}, not {size}" for name, (was, size) in shapes.items() if was != size},
    }
    for fault, names in faults.items():
        if names:
            raise ValueError(f"the weights in {folder} do not fit its config.json: the folder {fault} {_first(names)}")


def _first(names: Iterable[str]) -> str:
    """Return the first three names, and the number of the others."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    remedy = "weights are read from safetensors only; save_pretrained(folder, safe_serialization=True) writes them"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        remedy = f"{index.name} names {len(names)} files; fetch what is missing"
    elif not (folder / names[0]).is_file() and (shards := [one.name for one in folder.glob("*-of-*.safetensors")]):
        names, remedy = [index.name], f"this file says what is in {_first(shards)}; fetch it too"
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {_first(absent)}: {remedy}")
    return [folder / name for name in names]


def _tokenizer(folder: Path, settings: Mapping[str, Any]) -> Any:
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        if (folder / "tokenizer_config.json").is_file():  # transformers would make a tokenizer without tokens of it
            raise ValueError(f"{folder} has tokenizer_config.json, but none of {', '.join(_VOCABULARIES)}")
        return ByteTokenizer() if settings.get("tokenizer") == "bytes" else None
    transformers = _require_package("transformers", f"the tokenizer in {folder}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read; is a file missing? {error}") from error
    processor = folder / "chat_template.json"  # where older processors keep a template, which AutoTokenizer ignores
    if not tokenizer.chat_template and processor.is_file():
        tokenizer.chat_template = _read_json(processor).get("chat_template")
    return tokenizer


def _download(hub_id: str) -> Path:
    hub = _require_package("huggingface_hub", f"{hub_id!r} is not a folder; fetching it from the hub")
    try:
        return Path(hub.snapshot_download(hub_id, allow_patterns=[*_DOWNLOADED]))
    except (OSError, ValueError) as error:
        raise ValueError(f"{hub_id!r} is not a folder and could not be fetched from the hub: {error}") from error


def _require_package(package: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{what} needs {package}: pip install 'attention-page-by-page[models]'") from error


def build_model(settings: Mapping[str, Any]) -> Llama | GPT2:
    """Return the decoder that config.json describes, with new weights on torch's default device."""
    if (kind := settings.get("model_type")) not in SUPPORTED:
        raise ValueError(f"model_type {kind!r} is not implemented: supported are {', '.join(map(repr, SUPPORTED))}")
    model, read_config = SUPPORTED[kind]
    return model(read_config(settings))


def eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a text in any of the sources."""
    found = {}
    for source in sources:
        if (ids := source.get("eos_token_id")) is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(token, int) and token >= 0 for token in ids):
                raise ValueError(f"eos_token_id must be a token id or a list of them, got {ids}")
            found |= dict.fromkeys(ids)
    return tuple(found)


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters that generation_config.json recommends, with the names of `SamplingParams`."""
    found = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    if generation.get("do_sample") is False:  # transformers then leaves out all parameters of drawing
        found = {name: value for name, value in found.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    if generation.get("max_new_tokens") is not None:
        found["max_tokens"] = generation["max_new_tokens"]
    return found


def llama_config(settings: Mapping[str, Any]) -> LlamaConfig:
    """Return the config of a Llama, or of one with a window (Mistral), biases (Qwen2) or normalised heads (Qwen3)."""
    kind = settings.get("model_type", "llama")
    rope = {**(settings.get("rope_scaling") or {}), **(settings.get("rope_parameters") or {})}
    only = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
    _check_only(kind.title(), {**settings, **rope}, only)
    required = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    if kind != "llama":  # their defaults in transformers differ from those of Llama
        required += ["num_key_value_heads", "max_position_embeddings"] + ["head_dim"] * (kind == "qwen3")
    _check_present(settings, required)
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings")
    sizes = {name: settings[name] for name in (*required, *optional) if name in settings}
    return LlamaConfig(
        **sizes,
        rms_norm_eps=float(settings.get("rms_norm_eps", LlamaConfig.rms_norm_eps)),
        rope_theta=float(rope.get("rope_theta", settings.get("rope_theta", LlamaConfig.rope_theta))),
        rope_scaling=_rope_scaling(rope, settings),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        sliding_window=_window(kind, settings),
    )


def gpt2_config(settings: Mapping[str, Any]) -> GPT2Config:
    """Return the config of a GPT-2. Its config.json has other names for the sizes."""
    only = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    _check_only("GPT-2", settings, only)
    names = {
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    }
    _check_present(settings, names)
    names |= {name: name for name in ("layer_norm_epsilon", "activation_function", "tie_word_embeddings")}
    names["n_inner"] = "intermediate_size"
    return GPT2Config(**{ours: settings[theirs] for theirs, ours in names.items() if theirs in settings})


def _check_not_quantised(settings: Mapping[str, Any]) -> None:
    """Refuse a quantised checkpoint, whose weights mean nothing without their scales."""
    for name in ("quantization_config", "compression_config"):
        if quantised := settings.get(name):
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ValueError(
                f"{name} says that the checkpoint is quantised ({method}), which is not implemented: use the original "
                f"checkpoint, in float32, float16 or bfloat16"
            )


def _check_only(model: str, settings: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    for name, supported in only.items():
        if (got := settings.get(name, supported)) != supported:
            raise ValueError(f"{name} = {got!r} is not implemented: {model} here has {name} = {supported!r} only")


def _check_present(settings: Mapping[str, Any], names: Iterable[str]) -> None:
    if missing := [name for name in names if name not in settings]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")


def _window(kind: str, settings: Mapping[str, Any]) -> int | None:
    """Return the window of all layers of a Mistral. None: each token sees all of the past, as in the other models.

    A model in which some layers have a window is refused. Transformers' default is 4096.
    """
    kinds, window = set(settings.get("layer_types") or ()), settings.get("sliding_window", 4096)
    usual = "sliding_attention" if kind == "mistral" and window is not None else "full_attention"
    if kind != "mistral" and not kinds and settings.get("use_sliding_window") and window is not None:
        full = settings.get("max_window_layers", 28)
        kinds = {"sliding_attention"} if settings.get("num_hidden_layers", full) > full else kinds
    if others := kinds - {usual}:
        raise ValueError(
            f"layers of {', '.join(map(repr, sorted(others)))} are not implemented (sliding_window = {window}): "
            f"all layers of a {kind.title()} here have {usual!r}"
        )
    longest = settings.get("max_position_embeddings", 0)
    return None if usual == "full_attention" or (isinstance(window, int) and window >= longest > 0) else window


def _rope_scaling(rope: Mapping[str, Any], settings: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_scaling of type {kind!r} is not implemented: supported are 'default' and 'llama3'")
    rope = {"original_max_position_embeddings": settings.get("max_position_embeddings"), **rope}
    names = ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [name for name in (*names, "original_max_position_embeddings") if rope.get(name) is None]:
        raise ValueError(f"rope_scaling of type 'llama3' lacks {', '.join(missing)}")
    return Llama3Scaling(*(float(rope[name]) for name in names), int(rope["original_max_position_embeddings"]))


SUPPORTED = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), (Llama, llama_config)) | {"gpt2": (GPT2, gpt2_config)}
