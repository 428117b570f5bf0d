"""Linear layers, and weights that are packed once on a CPU.

A product of few rows takes as long as reading its weight W. torch's `linear` cannot know whether W has changed since
its last call. So in every call it copies W into the layout that its kernel reads, which takes as long again. An engine
packs the weights of its model once, and computes its steps inside the context `PackedWeights`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from pagewise.models import in_cpp


class Packed(NamedTuple):
    """A packed copy of the weights of some layers, end to end, as they were."""

    copy: Tensor
    kernel: Callable | None  # the product of linear.cpp, if the copy is for this kernel: None for oneDNN's
    sizes: list[int]  # outputs of each layer
    sources: list[tuple[nn.Module, Tensor, int, int]]  # layers, and weights with the addresses and versions they had
    rows: range  # numbers of rows for which the copy is read


def product(layer: nn.Module, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
    """Return x Wᵀ + b of a layer with a weight, by a packed copy of the weight where there is one."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    packed = None if torch.compiler.is_compiling() else in_cpp.here.packed.get((id(layer),))
    if packed is not None and (out := _by_copy(packed, x, bias, weight.dtype)) is not None:
        return out
    return linear(x, weight.T if isinstance(layer, Conv1D) else weight, bias)


def products(layers: tuple[nn.Module, ...], x: Float[Tensor, "*rows K"]) -> Sequence[Float[Tensor, "*rows N"]]:
    """Return the results of linear layers for the same x. One product computes them all if they were packed as one."""
    packed = None if torch.compiler.is_compiling() else in_cpp.here.packed.get(tuple(map(id, layers)))
    if packed is None:
        return [layer(x) for layer in layers]
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    if (out := _by_copy(packed, x, bias, layers[0].weight.dtype)) is not None:
        return out.split(packed.sizes, dim=-1)
    return [linear(x, layer.weight, layer.bias) for layer in layers]  # no hook sees them


def _by_copy(
    packed: Packed, x: Float[Tensor, "*rows K"], bias: Tensor | None, dtype: torch.dtype
) -> Float[Tensor, "*rows N"] | None:
    """Return the product, or None where torch would convert x or the weight, or where the copy gains nothing."""
    rows = x.numel() // x.shape[-1]
    if rows not in packed.rows or x.dtype != dtype or torch.is_autocast_enabled("cpu"):
        return None
    if bias is not None and bias.dtype != dtype:
        return None
    flat = x.reshape(rows, x.shape[-1])
    if packed.kernel is None:
        out = torch.ops.mkldnn._linear_pointwise(flat, packed.copy, bias, "none", [], "")
    else:
        flat, bias = flat if flat.stride(1) == 1 else flat.contiguous(), None if bias is None else bias.contiguous()
        out = torch.empty(rows, sum(packed.sizes), dtype=dtype, device=x.device)
        places = packed.copy.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
        packed.kernel(flat.data_ptr(), flat.stride(0), *places, *out.shape, flat.shape[1], torch.get_num_threads())
    return out.view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """x @ weight[out, in].T + bias."""

    forward = product


class Conv1D(nn.Module):
    """x @ weight[in, out] + bias: a linear layer, by the name and shape that GPT-2's checkpoints have for it.

    In memory, the weights of an output are neighbours. So `weight.T` has contiguous rows, as in nn.Linear, and lesson
    8's products take it.
    """

    forward = product

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        bound = num_in**-0.5
        self.weight = nn.Parameter(torch.empty(num_in, num_out).uniform_(-bound, bound).T.contiguous().T)
        self.bias = nn.Parameter(torch.zeros(num_out))


class PackedWeights:
    """A context in which a model computes by packed copies of its weights, for the thread that enters the context.

    The copies take as much memory as the weights. The copy of a weight that has changed is dropped, and so is that of
    layers packed as one if a hook has to see what one of them computes. The kernels of `in_cpp` are switched on, too,
    where no derivative is wanted.

    Args:
        model: of this package. Its linear layers are packed, and its embedding if the output head is tied to it. Layers
            that a module names in `read_together` are packed as one.
        most: the bytes that all copies may take. Nothing is packed if they would take more.
    """

    def __init__(self, model: nn.Module, most: int) -> None:
        modules = list(model.modules())
        groups = [list(map(module.get_submodule, getattr(module, "read_together", ()))) for module in modules]
        groups = [group for group in groups if group and all(type(layer) is Linear for layer in group)]
        together = {id(layer) for group in groups for layer in group}
        groups += [[layer] for layer in modules if isinstance(layer, Linear | Conv1D) and id(layer) not in together]
        if groups and model.config.tie_word_embeddings:
            groups.append([next(layer for layer in modules if isinstance(layer, nn.Embedding))])
        groups = [group for group in groups if all(_can_pack(layer.weight) for layer in group)]
        fits = sum(layer.weight.nbytes for group in groups for layer in group) <= most
        self.packed = {tuple(map(id, group)): _pack(group) for group in groups} if fits else {}
        self._on_cpu = next(model.parameters()).device.type == "cpu"

    def __enter__(self) -> None:
        for key, packed in list(self.packed.items()):
            for layer, weight, address, version in packed.sources:
                changed = layer.weight is not weight or weight.data_ptr() != address or weight._version != version
                if changed or (len(key) > 1 and (layer._forward_hooks or layer._forward_pre_hooks)):
                    self.packed.pop(key, None)
        in_cpp.switch(self.packed if self._on_cpu else None)

    def __exit__(self, *_: object) -> None:
        in_cpp.switch(None)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.is_inference() or not torch.backends.mkldnn.is_available():
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # not measured
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ("product", weight.dtype) in in_cpp.library()
    return weight.dtype in (torch.float32, torch.bfloat16)


def _pack(layers: list[nn.Module]) -> Packed:
    with torch.no_grad():
        whole = torch.cat([layer.weight.T if isinstance(layer, Conv1D) else layer.weight for layer in layers])
    found = in_cpp.packed(whole)
    if found is None:
        most = 64 if whole.dtype == torch.float32 else in_cpp.EVERY  # for more rows it gains nothing
        found = torch.ops.mkldnn._reorder_linear_weight(whole.contiguous()), None, most
    copy, kernel, most = found
    sizes = [layer.weight.shape[isinstance(layer, Conv1D)] for layer in layers]
    sources = [(layer, layer.weight, layer.weight.data_ptr(), layer.weight._version) for layer in layers]
    return Packed(copy, kernel, sizes, sources, range(1, most + 1))
