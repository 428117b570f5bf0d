"""Replace the linear layers of a model by layers that choose their product from a table (lesson 8)."""

from jaxtyping import Float
from torch import Tensor, nn

from pagewise.flash_decoding_plus_plus.dataflow import Dataflow
from pagewise.models.linear import Linear


class DataflowLinear(nn.Module):
    """A linear layer without bias that chooses its product from a `Dataflow`."""

    def __init__(self, weight: nn.Parameter, dataflow: Dataflow) -> None:
        super().__init__()
        self.weight, self.dataflow = weight, dataflow

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
        return self.dataflow.linear(x, self.weight)


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """Return (N, K) of all nn.Linear layers without bias, each once, as `Dataflow.profile` takes them."""
    return list(dict.fromkeys(tuple(layer.weight.shape) for layer in model.modules() if _without_bias(layer)))


def replace_linear(model: nn.Module, dataflow: Dataflow) -> nn.Module:
    """Replace the nn.Linear layers without bias in place by `DataflowLinear` layers, and return the model.

    Weights and their names stay the same. Layers with a bias stay as they are. So do products without a layer, such as
    the output head of a Llama that is tied to its embedding.
    """
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if _without_bias(layer):
                setattr(parent, name, DataflowLinear(layer.weight, dataflow))
    return model


def _without_bias(layer: nn.Module) -> bool:
    return type(layer) in (nn.Linear, Linear) and layer.bias is None
