"""Checkpoints of every architecture that `load_model` knows, small and random, as transformers saves them.

The weights are large enough that every part of a model moves its logits, and that the text a model writes by taking the
likeliest token each time depends on all of the prompt and does not go round in circles: `test_against_transformers`
asserts both.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pagewise.kv_cache import recompute

VOCAB = 97
_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_LLAMA3 = _ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None}
_LLAMA = _SIZES | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "rms_norm_eps": 0.01, "rope_parameters": _ROPE,
}  # fmt: skip
_GQA = {"num_attention_heads": 4, "head_dim": 32}
ARCHITECTURES = {
    "gpt2": ("GPT2Config", _SIZES | {"n_embd": 64, "n_layer": 2, "n_head": 2, "layer_norm_epsilon": 0.01}),
    "llama-2": ("LlamaConfig", _LLAMA),
    "llama-3": (
        "LlamaConfig",
        _LLAMA | _GQA | {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 32}},
    ),
    "qwen2": ("Qwen2Config", _LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _LLAMA | _GQA),
}
"""transformers' configuration and sizes. Head size 32 throughout. Query heads per KV head: 1, 1, 2, 2, 2."""
WINDOWED = {"mistral": ("MistralConfig", _LLAMA | _GQA | {"sliding_window": 8})}
"""An architecture that only the paged attention of the engine supports."""


def random_peer(architecture: str, *, seed: int = 2, **options: object) -> nn.Module:
    """transformers' model of a random checkpoint, in float32."""
    import transformers  # takes three seconds, and every worker collects this module

    name, sizes = (ARCHITECTURES | WINDOWED)[architecture]
    config = getattr(transformers, name)(**sizes | options, attn_implementation="eager")
    peer = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in peer.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.copy_(0.1 * drawn)
        elif weight.dim() == 1:  # of a norm
            weight.copy_(1 + 0.3 * drawn)
        elif any(embedding in name for embedding in ("embed", "wte", "wpe")):
            weight.copy_(0.2 * drawn)  # small: else the token itself, and not what came before it, decides the next
        else:
            weight.copy_(2 * drawn * (len(weight) if "gpt2" in architecture else weight.shape[1]) ** -0.5)
    return peer


def save_random(
    architecture: str, folder: Path, *, seed: int = 2, shard_size: str = "5GB", **options: object
) -> nn.Module:
    """`random_peer`, saved into `folder`."""
    peer = random_peer(architecture, seed=seed, **options)
    peer.save_pretrained(folder, max_shard_size=shard_size)
    return peer


def change_weights(folder: Path, change) -> None:
    """Save the weights in `folder` again after `change` of their dict."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def change_config(folder: Path, *without: str, **changes: object) -> None:
    """Save config.json again with the changes, and without some names."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in settings.items() if name not in without}))


def logits(model: nn.Module, ids: Tensor, **options: object) -> Tensor:
    """The logits of one pass without a cache."""
    return model(ids, torch.arange(ids.shape[1]).expand_as(ids), recompute, **options)
