"""Small decoders that run real checkpoints: `from pagewise.models import GPT2, Llama, load_model, tiny_model`.

A model knows nothing of caches or kernels: it calls `attend(layer, q, k, v)` and nothing else about attention.
"""

import importlib
from collections.abc import Callable

from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q[B,H,T,D], k[B,Hkv,T,D], v[B,Hkv,T,D]) -> out[B,H,T,D]: how queries meet keys, the past included."""

_HOME = {
    "GPT2": "pagewise.models.gpt2",
    "GPT2Config": "pagewise.models.gpt2",
    "Llama": "pagewise.models.llama",
    "LlamaConfig": "pagewise.models.llama",
    "load_model": "pagewise.models.load",
    "load_tokenizer": "pagewise.models.load",
    "tiny_model": "pagewise.models.load",
    "register_attention": "pagewise.flash_attention.in_transformers",
}
__all__ = ["Attend", *_HOME]


def __getattr__(name: str) -> object:
    """A model or loader is imported when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
