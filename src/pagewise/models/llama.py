"""Llama: the decoder block that most open models copy, and Qwen's variations on it.

    x = rms_norm(h)      h = h + W_o attend(rope(W_q x), rope(W_k x), W_v x)
    x = rms_norm(h)      h = h + W_down (silu(W_gate x) ∘ W_up x)

Qwen2 adds biases: W_q x + b_q, W_k x + b_k and W_v x + b_v. Qwen3 normalises each head of W_q x and W_k x before RoPE,
so that scores cannot grow with the length of a query or key. In Mistral, a token sees only the last `sliding_window`
tokens. The config has a field for each.

The model knows nothing of caches or kernels. Its argument `attend` is responsible for the scale, the causal mask and
the keys and values of earlier tokens.

Touvron et al. 2023. RoPE: Su et al. 2021. GQA: Ainslie et al. 2023. SwiGLU: Shazeer 2020. RMSNorm: Zhang & Sennrich
2019. Mistral: Jiang et al. 2023. Qwen2: Yang et al. 2024. Qwen3: Yang et al. 2025. Parameters are named as in
transformers' checkpoints.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from pagewise.models import Attend, in_cpp
from pagewise.models.inputs import Decoder, check_attended, check_inputs, new_embedding
from pagewise.models.linear import Linear, product, products
from pagewise.tools.checks import check_count, check_number


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 extends its context: it stretches wavelengths beyond the original context by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model, with the names of transformers. A wrong size raises ValueError or TypeError."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None  # default: num_attention_heads
    head_dim: int | None = None  # default: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2: biases of the projections to q, k and v
    qk_norm: bool = False  # Qwen3: an RMSNorm of each head of q and k, before RoPE
    sliding_window: int | None = None  # Mistral: a token sees so many tokens, itself included

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            check_count(name, getattr(self, name))
        check_count("max_position_embeddings", self.max_position_embeddings)
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                    f"{self.num_attention_heads}: give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        check_count("num_key_value_heads", self.num_key_value_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}"
            )
        check_count("head_dim", self.head_dim)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, because RoPE rotates pairs of elements, got {self.head_dim}")
        check_number("rms_norm_eps", self.rms_norm_eps, low=0.0)
        check_number("rope_theta", self.rope_theta, low=1.0)
        if self.sliding_window is not None:
            check_count("sliding_window", self.sliding_window)


class Llama(Decoder):
    """The decoder of Llama, Mistral, Qwen2 and Qwen3: see `Decoder`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(
            {
                "embed_tokens": new_embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers)),
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def num_kv_heads(self) -> int:
        """The KV heads that these weights compute: fewer than the config counts, if the model was split by heads."""
        attention = self.model["layers"][0].self_attn
        return attention.k_proj.weight.shape[0] // attention.head_dim

    def forward(
        self,
        token_ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        attend: Attend,
        *,
        logits_for: Int[Tensor, " n"] | None = None,
    ) -> Float[Tensor, "B n vocab"]:
        """Return the logits of the token after each of T tokens (n = T), or after the tokens `logits_for`.

        Args:
            token_ids: int64 or int32, in [0, vocab_size). The range is checked on the CPU only. On a GPU the check
                would wait for the device, and torch's embedding stops an id out of range there.
            positions: the position of each token in its sequence. RoPE has an angle for every integer.
            attend: attend(layer, q[B,H,T,D], k[B,Hkv,T,D], v[B,Hkv,T,D]) -> out[B,H,T,D] is called once per layer, in
                order, with RoPE applied to q and k. The tensors may be strided. If the config has a sliding_window,
                `attend.sliding_window` must be equal to it.
            logits_for: int64 indices into T. A prompt needs the logits of its last token only, and the head is large.

        Returns:
            The logits, in the dtype of the weights.

        Raises:
            ValueError, TypeError: an argument does not fit (raised before any work), or the result of attend does not.
        """
        vocab_size, window = self.config.vocab_size, self.config.sliding_window
        check_inputs(token_ids, positions, attend, logits_for, vocab_size=vocab_size, sliding_window=window)
        turn = rope(positions, self.config)
        h = self.model["embed_tokens"](token_ids)
        for block in self.model["layers"]:
            h = block(h, turn, attend)
        h = self.model["norm"](h if logits_for is None else h[:, logits_for])
        return product(self.model["embed_tokens"], h) if self.config.tie_word_embeddings else self.lm_head(h)


class Block(nn.Module):
    """Attention, then the feed-forward network, each added to the residual stream h."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, h: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), turn, attend)
        return h + self.mlp(self.post_attention_layernorm(h))


class Attention(nn.Module):
    """Projections and RoPE around `attend`."""

    read_together = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = products((self.q_proj, self.k_proj, self.v_proj), x)
        heads = (-1, self.head_dim)
        q = self.q_norm(q.unflatten(-1, heads).transpose(1, 2))  # [B, heads, T, D]
        k = self.k_norm(k.unflatten(-1, heads).transpose(1, 2))
        v = v.unflatten(-1, heads).transpose(1, 2)
        if not in_cpp.rotate(q, k, *turn):
            # under autocast the norms return float32, and v is in its dtype
            q, k = apply_rope(torch.cat((q, k), dim=1), turn).to(v.dtype).split((q.shape[1], k.shape[1]), dim=1)
        out = attend(self.layer, q, k, v)
        if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
            check_attended(out, q)  # which says what is wrong
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) ∘ W_up x)."""

    read_together = ("gate_proj", "up_proj")

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = products((self.gate_proj, self.up_proj), x)
        hidden = in_cpp.silu_and_mul(gate, up)
        return self.down_proj(silu(gate) * up if hidden is None else hidden)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight. The quotient is computed in float32 (float64 for float64)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        if (out := in_cpp.rms_norm(x, self.weight, self.eps)) is not None:
            return out
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rope(
    positions: Int[Tensor, "B T"], config: LlamaConfig
) -> tuple[Float[Tensor, "B 1 T D"], Float[Tensor, "B 1 T D"]]:
    """Return (cos, sin) of position · theta^(−2i / D) in float32. Both halves of D are the same."""
    angles = positions[:, None, :, None].float() * rope_frequencies(config, positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rope_frequencies(config: LlamaConfig, device: torch.device | str | None = None) -> Float[Tensor, " half_D"]:
    """Return theta^(−2i / D) for i < D / 2 in float32, scaled if the config has a `rope_scaling`.

    Llama3Scaling keeps wavelengths below original / high_freq_factor. It divides the frequencies of wavelengths above
    original / low_freq_factor by `factor`, and interpolates between the two.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    if (scaling := config.rope_scaling) is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * keep + frequencies / scaling.factor * (1.0 - keep)


def apply_rope(x: Float[Tensor, "B H T D"], turn: tuple[Tensor, Tensor]) -> Float[Tensor, "B H T D"]:
    """Rotate each pair (x_i, x_{i + D/2}) by its angle. The RoPE paper pairs neighbours instead."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
