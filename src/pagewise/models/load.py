"""Checkpoints and their tokenizers: folders as transformers' `save_pretrained` writes them, and hub ids.

A folder holds config.json, the weights as safetensors (one file, or shards and model.safetensors.index.json), and the
tokenizer's files. `tiny_model` needs neither network nor transformers: its folder lies inside the package.
"""

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pagewise.models.gpt2 import GPT2
from pagewise.models.llama import Llama
from pagewise.models.settings import build_model, eos_token_ids
from pagewise.tools.checks import FLOATS

TINY = Path(__file__).parent / "tiny"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_LEFTOVERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""What older files hold besides weights: RoPE's frequencies, GPT-2's causal mask."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 … 255, and one special token, 256, that ends a text."""

    vocab_size = 257
    eos_token_id = 256
    bos_token_id = None

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`. No special token is added."""
        return list(text.encode())

    def decode(self, ids: Iterable[int] | Int[Tensor, " n"], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become "�".

        Ids above 255 have no bytes and are dropped, whatever `skip_special_tokens` is: it stands here because the
        tokenizers of transformers have it.
        """
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")


def load_model(
    path_or_hub_id: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> tuple[Llama | GPT2, Any]:
    """(model, tokenizer) of a checkpoint of Llama, Qwen2, Qwen3 or GPT-2.

    The weights are converted to `dtype`, on `device`, and need no gradients.

    Args:
        path_or_hub_id: an existing folder, else the name of a repository on the Hugging Face hub ("owner/name").
        dtype: float32, float16, bfloat16 or float64.
        device: default torch's default device, the CPU unless it was changed.

    Returns:
        The model, which knows its `eos_token_ids`, and transformers' tokenizer where the folder has one's files, a
        `ByteTokenizer` where config.json says `"tokenizer": "bytes"`, and None where there is neither.

    Raises:
        ValueError: there is no such checkpoint, its model is not implemented here, or its weights do not fit.
        ImportError: the hub or the tokenizer needs a package that is not installed.
    """
    if dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"dtype must be float32, float16, bfloat16 or float64, got {dtype}")
    if not isinstance(path_or_hub_id, str | Path):
        raise TypeError(f"path_or_hub_id must be a folder or a hub id, got {type(path_or_hub_id).__name__}")
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, but torch finds no GPU here: leave it out, or pass 'cpu'")
    folder = Path(path_or_hub_id).expanduser()
    if not folder.is_dir():
        folder = _download(str(path_or_hub_id))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: it must be a folder that save_pretrained wrote")
    settings = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    with torch.device("meta"):  # no memory, no random weights: they come from the files
        model = build_model(settings)
    model.eos_token_ids = eos_token_ids(_read_json(generation) if generation.is_file() else {}, settings)
    model.load_state_dict(_read_weights(folder, model, dtype, device), assign=True)
    return model.requires_grad_(False).eval(), _tokenizer(folder, settings)


def tiny_model(
    *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> tuple[Llama, ByteTokenizer]:
    """(model, tokenizer) of the model of 1.7 million parameters that ships with the package.

    It has read the text of this repository, byte by byte (see `train_tiny`), and can count to 512 positions.
    """
    return load_model(TINY, dtype=dtype, device=device)


def _read_weights(folder: Path, model: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Every weight of `model` from the safetensors in `folder`. Names and shapes are checked before data is read."""
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    embedding = next(iter(expected))
    prefix = embedding.split(".")[0]  # "model" or "transformer", left out where a decoder was saved without its head
    found = {}
    for shard in map(_open, _weight_files(folder)):
        for name in shard.keys():  # noqa: SIM118 (not a dict)
            whole = f"{prefix}.{name}"
            found[whole if whole in expected else name] = shard.get_slice(name)
    ignored = {name for name in found if name.endswith(_LEFTOVERS)}
    if model.config.tie_word_embeddings and {"lm_head.weight", embedding} <= found.keys():
        if not torch.equal(found["lm_head.weight"][:], found[embedding][:]):
            raise ValueError(f"config.json in {folder} has tie_word_embeddings, but lm_head.weight is another matrix")
        ignored.add("lm_head.weight")
    found = {name: weight for name, weight in found.items() if name in expected or name not in ignored}
    shapes = {name: weight.get_shape() for name, weight in found.items()}
    wrong = [
        _list("missing", [name for name in expected if name not in found]),
        _list("unexpected", [name for name in found if name not in expected]),
        _list(
            "of another shape than config.json says",
            [f"{n} {shapes[n]}, not {expected[n]}" for n in found if n in expected and shapes[n] != expected[n]],
        ),
    ]
    if any(wrong):
        raise ValueError(f"the weights in {folder} do not fit its config.json: " + "; ".join(filter(None, wrong)))
    return {name: weight[:].to(device=device, dtype=dtype) for name, weight in found.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got a {type(content).__name__}")
    return content


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        if not names:
            raise ValueError(f"{index} has no weight_map: it must be as save_pretrained writes it")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} lacks {', '.join(absent)}: weights are read from safetensors only; "
            f"save_pretrained(folder, safe_serialization=True) writes them"
        )
    return [folder / name for name in names]


def _list(what: str, names: list[str], most: int = 5) -> str:
    """ "missing: a, b, c"; only the first few of many names; empty for none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{what}: {', '.join(names[:most])}{more}" if names else ""


def _tokenizer(folder: Path, settings: Mapping[str, Any]) -> Any:
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return require_package("transformers", f"the tokenizer in {folder}").AutoTokenizer.from_pretrained(folder)
    return ByteTokenizer() if settings.get("tokenizer") == "bytes" else None


def _download(hub_id: str) -> Path:
    if not _HUB_ID.fullmatch(hub_id):
        raise ValueError(f"{hub_id!r} is no existing folder, and no hub id (owner/name) either")
    hub = require_package("huggingface_hub", f"{hub_id!r} is no existing folder; fetching it from the hub")
    try:
        return Path(hub.snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "tokenizer*"]))
    except (OSError, ValueError) as error:
        raise ValueError(f"{hub_id!r} is no existing folder and could not be fetched from the hub: {error}") from error


def require_package(package: str, what: str) -> ModuleType:
    """Import what only the extra `models` installs; an ImportError says that `what` needs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{what} needs {package}: pip install pagewise[models]") from error
