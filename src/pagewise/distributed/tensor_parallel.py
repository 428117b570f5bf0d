"""Tensor parallelism: each process computes some heads and columns of every layer (lesson 10).

A layer has two pairs of products. Between the products of a pair, every head or column is computed on its own:

    attention   W_o attend(W_q x, W_k x, W_v x)
    MLP         W_down (silu(W_gate x) ∘ W_up x)

A process keeps its share of the heads and columns. Its share of the first product is a part of the output (column
parallel). Its share of the second product is a term of a sum (row parallel), and an all-reduce adds the terms:

    W_o a = Σ over ranks r of W_o[:, r's channels] a[r's channels]

So a layer needs two all-reduces of [tokens, hidden_size]. A bias of the second product is added once, after the
all-reduce. Where processes outnumber the KV heads, several processes have a copy of the same KV head.

A process also has some rows of the token embedding and of the output head. An embedding that another process has is 0
here, and an all-reduce adds them. An all-gather brings the logits together. All other weights are whole everywhere.

Shoeybi et al. 2019 (Megatron-LM). `torch.distributed.tensor.parallel` does not know GPT-2's Conv1D, whose weight holds
q, k and v, and its plans are longer than the slicing here.
"""

import copy
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from pagewise.distributed.communication import Group, all_gather, all_reduce, compare, group_of
from pagewise.distributed.sequence import pieces, share_lengths
from pagewise.models import gpt2, llama

PAIRS = {
    llama.Attention: (("q_proj", "k_proj", "v_proj"), "o_proj"),
    llama.SwiGLU: (("gate_proj", "up_proj"), "down_proj"),
    gpt2.Attention: (("c_attn",), "c_proj"),
    gpt2.FeedForward: (("c_fc",), "c_proj"),
}
"""The layers of the first product of a pair, and the layer of the second one."""
VOCABULARY = ("model.embed_tokens.weight", "transformer.wte.weight", "lm_head.weight")
"""Weights with a row for each token of the vocabulary. A model has some of them."""
SAMPLE = 2**20  # numbers of a weight that are compared, at most


class Cut(NamedTuple):
    """What a process has of a weight: some ranges of one dimension."""

    dim: int
    ranges: list[slice]

    def of(self, weight: Any) -> Tensor:
        """Return a copy of the ranges of a tensor, or of a slice of a safetensors file, which reads nothing else."""
        return torch.cat([weight[(slice(None),) * self.dim + (part,)] for part in self.ranges], self.dim)


def tensor_parallel(model: nn.Module, group: Group = None) -> nn.Module:
    """Return the share of a model that this process computes. All processes of the group must call the share together.

    The result takes and returns what the model does, for the same config. Its `attend` gets H / n query heads and
    Hkv / n KV heads in a group of n processes, or one KV head if n is a multiple of Hkv. `num_kv_heads` of the result
    is this number. The split weights are copies. All other weights are those of `model`, which does not change. No
    weight of the result requires a gradient.

    Args:
        model: a Llama or a GPT2, with the same weights in every process.
        group: a group of torch.distributed. None: all processes.

    Raises:
        ValueError, TypeError: in every process, if the model is another one in a process, its heads do not divide
            evenly, or its weights are not those of the other processes.
    """
    group = group_of(group)

    def describe() -> dict[str, object]:
        check_splits(model, group.size())
        return described_weights(list(model.state_dict().values()))

    compare("tensor_parallel", group, describe)
    return split(model, group)[0]


def split(model: nn.Module, group: Any) -> tuple[nn.Module, dict[str, Cut]]:
    """Return the share of a model, and what it has of each split weight. The model may be on torch's meta device."""
    rank, size, vocab_size = group.rank(), group.size(), model.config.vocab_size
    cuts = _cuts(model, rank, size)
    # deepcopy takes the tensors of `same` instead of copies of the weights, so only the modules are new
    same = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    share = copy.deepcopy(model, same)
    for name in cuts.keys() & dict(model.named_parameters()):  # an output head may be the embedding
        cut, whole, (layer, _, kind) = cuts[name], share.get_parameter(name), name.rpartition(".")
        part = cut.of(whole)
        if not whole.is_contiguous():  # the layout of Conv1D
            part = part.T.contiguous().T
        setattr(share.get_submodule(layer), kind, nn.Parameter(part, requires_grad=False))
    for module in [module for module in share.modules() if type(module) in PAIRS]:
        _, second = PAIRS[type(module)]
        setattr(module, second, RowParallel(getattr(module, second), group))
    decoder, name = ("transformer", "wte") if isinstance(model, gpt2.GPT2) else ("model", "embed_tokens")
    (rows,) = pieces(vocab_size, size, rank, "contiguous")
    share.get_submodule(decoder)[name] = VocabularyParallel(share.get_submodule(decoder)[name], rows.start, group)

    def gather_logits(_module: nn.Module, _arguments: tuple, logits: Tensor) -> Float[Tensor, "*rows vocab"]:
        lengths = share_lengths(vocab_size, size, "contiguous")
        of_each = all_gather(pad(logits, (0, lengths[0] - logits.shape[-1])), group, "logits")
        return torch.cat([part[..., :length] for part, length in zip(of_each, lengths, strict=True)], dim=-1)

    share.register_forward_hook(gather_logits)
    return share, cuts


def check_splits(model: nn.Module, size: int) -> None:
    """Check that `size` processes can share the heads and columns of a model evenly. Raise ValueError or TypeError."""
    if not isinstance(model, llama.Llama | gpt2.GPT2):
        raise TypeError(f"tensor_parallel = {size} takes a Llama or a GPT2, got {type(model).__name__}")
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = {name: getattr(model.config, name) for name in names}

    def fits(name: str, n: int) -> bool:
        return sizes[name] % n == 0 or (name == "num_key_value_heads" and n % sizes[name] == 0)

    for name, number in sizes.items():
        if not fits(name, size):
            possible = " or ".join(str(n) for n in range(1, size) if all(fits(each, n) for each in sizes))
            raise ValueError(f"tensor_parallel = {size} must divide {name} = {number}: give {possible}")


def described_weights(weights: list[Tensor]) -> dict[str, int]:
    """Return a sum over the bytes of weights that all processes have, for `compare`."""
    total = 0
    for i, weight in enumerate(weights, start=1):
        sample = weight.detach().flatten()[:: -(-weight.numel() // SAMPLE)].contiguous()
        total += i * int(sample.view(torch.uint8).sum(dtype=torch.int64))
    return {"a sum over the weights (of one checkpoint, or random from one seed)": total}


class RowParallel(nn.Module):
    """x Wᵀ + bias, where each process of a group has some columns of W [out, in] and the same columns of x."""

    def __init__(self, layer: nn.Module, group: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.group = layer.weight, layer.bias, group
        self.is_transposed = isinstance(layer, gpt2.Conv1D)

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
        weight = self.weight.T if self.is_transposed else self.weight
        out = all_reduce(linear(x, weight), self.group, "all-reduce")
        return out if self.bias is None else out + self.bias


class VocabularyParallel(nn.Embedding):
    """An embedding of which each process of a group has some rows: those of the tokens from `start` on."""

    def __init__(self, embedding: nn.Embedding, start: int, group: Any) -> None:
        super().__init__(*embedding.weight.shape, _weight=embedding.weight, _freeze=True)
        self.start, self.group = start, group

    def forward(self, token_ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows hidden"]:
        rows = token_ids - self.start
        is_mine = (rows >= 0) & (rows < self.num_embeddings)
        embedded = super().forward(rows.where(is_mine, 0)).where(is_mine[..., None], 0.0)
        return all_reduce(embedded, self.group, "embeddings")


def _cuts(model: nn.Module, rank: int, size: int) -> dict[str, Cut]:
    """Return what one of `size` processes has of each weight that they share, by the names of the state dict."""
    (rows,) = pieces(model.config.vocab_size, size, rank, "contiguous")
    found = {name: Cut(0, [slice(rows.start, rows.stop)]) for name in VOCABULARY}
    for path, module in model.named_modules():
        first, second = PAIRS.get(type(module), ((), None))
        for name in (*first, second) if first else ():
            layer, is_second = module.get_submodule(name), name == second
            of_kv_heads = name in ("k_proj", "v_proj")
            owners = min(size, model.config.num_key_value_heads) if of_kv_heads else size
            for kind, weight in layer.named_parameters():
                if is_second and kind == "bias":
                    continue
                dim = int(kind == "weight" and is_second != isinstance(layer, gpt2.Conv1D))
                number = 3 if name == "c_attn" else 1  # q, k and v of GPT-2 are one output
                whole = weight.shape[dim] // number
                start, length = rank * owners // size * (whole // owners), whole // owners
                ranges = [slice(i * whole + start, i * whole + start + length) for i in range(number)]
                found[f"{path}.{name}.{kind}"] = Cut(dim, ranges)
    return found
