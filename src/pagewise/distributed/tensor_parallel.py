"""Tensor parallelism: each process computes some heads and columns of every layer (lesson 10).

A layer has two pairs of products. Between the products of a pair, every head or column is computed on its own:

    attention   W_o attend(W_q x, W_k x, W_v x)
    MLP         W_down (silu(W_gate x) ∘ W_up x)

A process has some heads and columns. Its share of the first product is a part of the output (column parallel). Its
share of the second product is a term of a sum (row parallel): W_o a = Σ over ranks r of W_o[:, r's rows] a[r's rows].
An all-reduce adds the terms, and then a bias is added once. Where processes outnumber the KV heads, several processes
have a copy of the same KV head.

A process also has some rows of the token embedding and of the output head. All-reduces and all-gathers bring embeddings
and logits together. All other weights are whole everywhere. Shoeybi et al. 2019 (Megatron-LM).
`torch.distributed.tensor.parallel` does not know GPT-2's Conv1D, whose weight holds q, k and v.
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

FIRST = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc")  # the layers of a pair, by name
SECOND = ("o_proj", "down_proj", "c_proj")
VOCABULARY = ("model.embed_tokens.weight", "transformer.wte.weight", "lm_head.weight")  # a model has some of them
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
        weight = share.get_parameter(name)
        part = cuts[name].of(weight)
        weight.data = part if weight.is_contiguous() else part.T.contiguous().T  # the layout of Conv1D
    for path, layer in [*share.named_modules()]:
        parent, _, name = path.rpartition(".")
        if name in SECOND:
            setattr(share.get_submodule(parent), name, RowParallel(layer, group))
        elif name in ("embed_tokens", "wte"):
            start = cuts[f"{path}.weight"].ranges[0].start
            setattr(share.get_submodule(parent), name, VocabularyParallel(layer, start, group))

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
    for name, weight in model.named_parameters():
        *_, layer, kind = name.split(".")
        if layer in FIRST or (layer in SECOND and kind == "weight"):
            is_transposed = layer.startswith("c_")  # GPT-2's Conv1D
            dim = int(kind == "weight" and (layer in SECOND) != is_transposed)
            owners = min(size, model.config.num_key_value_heads) if layer in ("k_proj", "v_proj") else size
            whole = weight.shape[dim] // (3 if layer == "c_attn" else 1)  # q, k and v of GPT-2 are one output
            length = whole // owners
            starts = range(rank * owners // size * length, weight.shape[dim], whole)
            found[name] = Cut(dim, [slice(start, start + length) for start in starts])
    return found
