"""A model's linear layers by a table: what to profile for them, and the layers themselves (lesson 8)."""

from jaxtyping import Float
from torch import Tensor, nn

from pagewise.flash_decoding_plus_plus.dataflow import Dataflow


class DataflowLinear(nn.Module):
    """A linear layer without bias whose products a table chooses."""

    def __init__(self, weight: nn.Parameter, dataflow: Dataflow) -> None:
        super().__init__()
        self.weight, self.dataflow = weight, dataflow

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
        return self.dataflow.linear(x, self.weight)


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(N, K) of a model's nn.Linear layers without bias, each once: what `Dataflow.profile` is to time for it."""
    return list(dict.fromkeys(tuple(layer.weight.shape) for layer in model.modules() if _without_bias(layer)))


def replace_linear(model: nn.Module, dataflow: Dataflow) -> nn.Module:
    """`model`, its nn.Linear layers without bias replaced in place by `DataflowLinear` ones with the same weights.

    Names of weights stay. Layers with a bias stay, and so does a product that the model makes without a layer, as
    Llama does with a head tied to its embedding.
    """
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if _without_bias(layer):
                setattr(parent, name, DataflowLinear(layer.weight, dataflow))
    return model


def _without_bias(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and layer.bias is None
