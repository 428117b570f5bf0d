"""A checkpoint's config.json, as transformers 4 or 5 writes it, read into the configs of the decoders here.

Each function raises ValueError for a setting that is missing, or that changes the result and is not implemented here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pagewise.models.gpt2 import GPT2, GPT2Config
from pagewise.models.llama import Llama, Llama3Scaling, LlamaConfig


def build_model(settings: Mapping[str, Any]) -> Llama | GPT2:
    """The decoder that config.json describes, with new weights on torch's default device."""
    if (kind := settings.get("model_type")) not in SUPPORTED:
        raise ValueError(f"model_type {kind!r} is not implemented: supported are {', '.join(map(repr, SUPPORTED))}")
    model, read_config = SUPPORTED[kind]
    return model(read_config(settings))


def eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text, by the first of the `sources` that names any."""
    for source in sources:
        if (ids := source.get("eos_token_id")) is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(token, int) and token >= 0 for token in ids):
                raise ValueError(f"eos_token_id must be a token id or a list of them, got {ids}")
            return tuple(ids)
    return ()


def llama_config(settings: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Llama, or of a Qwen2 or Qwen3, which are Llamas with biases or with normalised heads."""
    kind = settings.get("model_type", "llama")
    rope = {**(settings.get("rope_scaling") or {}), **(settings.get("rope_parameters") or {})}
    only = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
    _check_only(kind.title(), {**settings, **rope}, only)
    _check_no_window(settings)
    required = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    if kind != "llama":  # where transformers has other defaults than Llama's
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
    )


def gpt2_config(settings: Mapping[str, Any]) -> GPT2Config:
    """The config of a GPT-2, whose sizes have names of their own in config.json."""
    only = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    _check_only("GPT-2", settings, only)
    required = {
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    }
    _check_present(settings, required)
    optional = {name: name for name in ("layer_norm_epsilon", "activation_function", "tie_word_embeddings")}
    names = required | optional | {"n_inner": "intermediate_size"}
    return GPT2Config(**{ours: settings[theirs] for theirs, ours in names.items() if theirs in settings})


def _check_only(model: str, settings: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    for name, supported in only.items():
        if (got := settings.get(name, supported)) != supported:
            raise ValueError(f"{name} = {got!r} is not implemented: {model} here has {name} = {supported!r} only")


def _check_present(settings: Mapping[str, Any], names: Iterable[str]) -> None:
    if missing := [name for name in names if name not in settings]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")


def _check_no_window(settings: Mapping[str, Any]) -> None:
    """Some of Qwen's layers may look back by `sliding_window` tokens only: those listed, or after max_window_layers."""
    kinds = settings.get("layer_types")
    if kinds is None and settings.get("use_sliding_window") and settings.get("sliding_window"):
        full = settings.get("max_window_layers", 28)
        kinds = ["sliding_attention"] * (settings.get("num_hidden_layers", full) - full)
    if windowed := set(kinds or ()) - {"full_attention"}:
        raise ValueError(
            f"layers of {', '.join(map(repr, sorted(windowed)))} are not implemented (sliding_window = "
            f"{settings.get('sliding_window')}): layers here see all of the past"
        )


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


SUPPORTED = {
    "llama": (Llama, llama_config),
    "qwen2": (Llama, llama_config),
    "qwen3": (Llama, llama_config),
    "gpt2": (GPT2, gpt2_config),
}
"""By config.json's model_type."""
