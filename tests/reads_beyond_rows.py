"""16-bit products of torch that read one element beyond each row, as those on a CPU with AMX do.

oneDNN's products for AMX read a row up to a multiple of 32 columns and multiply what follows the row by 0. NaN there
makes the result NaN (torch 2.13). This plugin gives a CPU without AMX such products:

    pytest -p reads_beyond_rows tests/flash_decoding_plus_plus
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replace torch's products on the CPU in this context."""
    aten = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel", UserWarning)
        for name, replacement in {"mm": product, "bmm": product, "addmm": _sum, "baddbmm": _sum}.items():
            aten.impl(name, replacement, "CPU")
    try:
        yield
    finally:
        aten._destroy()


def pytest_configure() -> None:
    """Install the products for the whole run, as a plugin."""
    _whole_run.enter_context(installed())


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b [..., M, N], plus 0 times what follows each row of a and each column of b in memory."""
    multiply = torch.ops.aten.mm if a.dim() == 2 else torch.ops.aten.bmm
    if a.dtype != b.dtype or a.shape[-1] != b.shape[-2]:
        return multiply.out(a, b, out=a.new_empty(0))  # torch's own error
    narrow = a.dtype.itemsize == 2
    wide = torch.float32 if narrow else a.dtype  # a 16-bit product of copies would read beyond rows itself
    out = a.new_empty(*a.shape[:-1], b.shape[-1], dtype=wide)
    copies = a.to(wide).contiguous(), b.to(wide).contiguous()
    multiply.out(*copies, out=out)
    if narrow:
        out += 0 * following(a)[..., :, None]
        out += 0 * following(b.mT)[..., None, :]
    return out.to(a.dtype)


def following(rows: Tensor) -> Tensor:
    """Return the element after each row [..., K] in memory, or 0 where the storage ends or a row is not contiguous."""
    found = rows.new_zeros(rows.shape[:-1])
    if not rows.numel() or (rows.stride(-1) != 1 and rows.shape[-1] > 1):
        return found
    offsets = torch.full(found.shape, rows.storage_offset() + rows.shape[-1])
    for dim, (size, stride) in enumerate(zip(found.shape, rows.stride(), strict=False)):
        offsets += (torch.arange(size) * stride).view(-1, *[1] * (found.dim() - dim - 1))
    length = rows.untyped_storage().nbytes() // rows.itemsize
    everything = rows.as_strided((length,), (1,), 0)
    return torch.where(offsets < length, everything[offsets.clamp(max=length - 1)], 0)


def _sum(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return (beta * bias if beta else 0) + alpha * product(a, b)


_whole_run = contextlib.ExitStack()
