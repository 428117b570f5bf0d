"""GPT-2: the decoder before RoPE, RMSNorm and shared KV heads. The source of lesson 9 measured this model.

    h = W_token[token] + W_position[position]
    x = layer_norm(h)      h = h + W_o attend(W_q x + b_q, W_k x + b_k, W_v x + b_v) + b_o
    x = layer_norm(h)      h = h + W_down gelu(W_up x + b_up) + b_down

As in `llama`, the argument `attend` computes all of attention.

Radford et al. 2019. GELU: Hendrycks & Gimpel 2016. LayerNorm: Ba et al. 2016. Parameters are named and laid out as in
transformers' checkpoints, where a layer's weight is [in, out].
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu

from pagewise.models import Attend
from pagewise.models.inputs import Decoder, check_attended, check_inputs, new_embedding
from pagewise.models.linear import Conv1D, Linear, product
from pagewise.tools.checks import check_count, check_number

GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
"""torch's `approximate` for each name of transformers: x Φ(x) itself, or by a tanh, written in three ways."""


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a model, named as in `LlamaConfig`. A size that does not fit raises ValueError or TypeError."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int | None = None  # default: 4 · hidden_size
    max_position_embeddings: int = 1024
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.intermediate_size is None:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            check_count(name, getattr(self, name))
        check_count("max_position_embeddings", self.max_position_embeddings)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} must be a multiple of num_attention_heads = "
                f"{self.num_attention_heads}"
            )
        check_number("layer_norm_epsilon", self.layer_norm_epsilon, low=0.0)
        if self.activation_function not in GELU:
            raise ValueError(
                f"activation_function = {self.activation_function!r} is not implemented: supported are "
                + ", ".join(map(repr, GELU))
            )

    @property
    def num_key_value_heads(self) -> int:
        """Every query head has a KV head of its own."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """The heads share hidden_size evenly."""
        return self.hidden_size // self.num_attention_heads


class GPT2(Decoder):
    """The decoder of GPT-2: see `Decoder`."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": new_embedding(config.vocab_size, config.hidden_size),
                "wpe": new_embedding(config.max_position_embeddings, config.hidden_size),
                "h": nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers)),
                "ln_f": nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon),
            }
        )
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def num_kv_heads(self) -> int:
        """The KV heads that these weights compute: fewer than the config counts, if the model was split by heads."""
        attention = self.transformer["h"][0].attn
        return attention.c_attn.weight.shape[1] // 3 // attention.head_dim

    def forward(
        self,
        token_ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        attend: Attend,
        *,
        logits_for: Int[Tensor, " n"] | None = None,
    ) -> Float[Tensor, "B n vocab"]:
        """Return the logits of the token after each of T tokens (n = T), or after the tokens `logits_for`.

        Arguments and errors are those of `Llama.forward`, but positions must be in [0, max_position_embeddings). The
        range is checked on the CPU only. On a GPU, torch's embedding stops a position out of range.
        """
        c = self.config
        sizes = {"vocab_size": c.vocab_size, "num_positions": c.max_position_embeddings}
        check_inputs(token_ids, positions, attend, logits_for, **sizes)
        h = self.transformer["wte"](token_ids) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            h = block(h, attend)
        h = self.transformer["ln_f"](h if logits_for is None else h[:, logits_for])
        return product(self.transformer["wte"], h) if c.tie_word_embeddings else self.lm_head(h)


class Block(nn.Module):
    """Attention, then the feed-forward network, each added to the residual stream h."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, h: Tensor, attend: Attend) -> Tensor:
        h = h + self.attn(self.ln_1(h), attend)
        return h + self.mlp(self.ln_2(h))


class Attention(nn.Module):
    """Projections around `attend`: one product makes q, k and v."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.c_attn = Conv1D(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        parts = self.c_attn(x).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        out = attend(self.layer, q, k, v)
        if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
            check_attended(out, q)  # which says what is wrong
        return self.c_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """W_down gelu(W_up x + b_up) + b_down."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.approximate = GELU[config.activation_function]
        self.c_fc = Conv1D(config.hidden_size, config.intermediate_size)
        self.c_proj = Conv1D(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(gelu(self.c_fc(x), approximate=self.approximate))
