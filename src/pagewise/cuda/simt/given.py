"""A kernel's arguments as a shell writes them: `x=float32[1024]:ones`, `out=float32[4,256]:output`, `n=1024`."""

import argparse
import math
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

CONTENTS = "random (the default: normal, integers 0 to 9), zeros, ones, arange, a number, or below=N (integers)"
VALUES = "a number, true or false; 1,2,3 for a vector; hex:… for the bytes of a struct"

_SHAPED = re.compile(r"(\w+)\[([\d, ]*)\]")


class GivenTensor(NamedTuple):
    """What stands after `--tensor name=`. Each `make` is a tensor of its own with the same contents."""

    name: str
    initial: Tensor | None
    is_output: bool

    def make(self) -> Tensor | None:
        return None if self.initial is None else self.initial.clone()


def given_tensor(text: str) -> GivenTensor:
    """Reads NAME=DTYPE[SIZES], NAME=FILE.npy or NAME=null, and what follows it after colons."""
    name, _, described = text.partition("=")
    what, *suffixes = described.split(":")
    contents = [suffix for suffix in suffixes if suffix != "output"]
    shaped = _SHAPED.fullmatch(what)
    if not described or len(contents) > (shaped is not None):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=DTYPE[SIZES], NAME=FILE.npy or NAME=null; of the first with :CONTENTS, which are "
            f"{CONTENTS}; and with :output, if the kernel shall write all of it"
        )
    if shaped:
        sizes = [int(size) for size in shaped[2].split(",") if size.strip()]
        try:
            initial = _filled(name, shaped[1], sizes, *contents)
        except RuntimeError as error:  # too large, or no such contents of this dtype
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    elif what.endswith(".npy") and Path(what).is_file():
        initial = torch.from_numpy(np.ascontiguousarray(np.load(what)))
    elif what == "null":
        initial = None
    else:
        raise argparse.ArgumentTypeError(f"{text!r}: {what!r} is neither DTYPE[SIZES], nor null, nor a .npy file")
    return GivenTensor(name, initial, "output" in suffixes)


def _filled(name: str, dtype_name: str, sizes: list[int], contents: str = "random") -> Tensor:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{name}: {dtype_name!r} is no dtype of torch: float32, float16, int32, …")
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # another for each tensor, the same each time
    if below := re.fullmatch(r"below=(\d+)", contents):
        return torch.randint(int(below[1]), sizes, generator=generator).to(dtype)
    if contents == "random" and not dtype.is_floating_point:
        return torch.randint(10, sizes, generator=generator).to(dtype)
    if contents == "random":
        return torch.randn(sizes, generator=generator).to(dtype)
    if contents == "arange":
        return torch.arange(math.prod(sizes)).view(sizes).to(dtype)
    try:
        number = float({"zeros": "0", "ones": "1"}.get(contents, contents))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name}: the contents must be {CONTENTS}, got {contents!r}") from None
    return torch.full(sizes, number, dtype=torch.float64).to(dtype)


def given_value(text: str) -> tuple[str, Any]:
    """Reads NAME=VALUE, where VALUE is as VALUES says."""
    name, _, value = text.partition("=")
    try:
        if value.startswith("hex:"):
            return name, bytes.fromhex(value.removeprefix("hex:"))
        numbers = tuple(map(_number, value.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, {VALUES}") from None
    return name, numbers if len(numbers) > 1 else numbers[0]


def _number(text: str) -> int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text, 0)
    except ValueError:
        return float(text)


def given_shape(text: str) -> tuple[int, ...]:
    """Reads a grid or a block: 4 or 4,2 or 4,2,1."""
    if not re.fullmatch(r"\d+(,\d+){0,2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be one to three numbers with commas between, x first")
    return tuple(map(int, text.split(",")))


def given_schedules(text: str) -> list[int]:
    """Reads seeds: 7 or 1,5 or 0..19."""
    first, dots, last = text.partition("..")
    try:
        return list(range(int(first), int(last) + 1)) if dots else [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be seeds, as in 7 or 1,5 or 0..19") from None
