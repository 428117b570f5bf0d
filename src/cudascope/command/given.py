"""A kernel's arguments as a shell writes them: `x=float32[1024]:ones`, `out=float32[4,256]:output`, `n=1024`."""

import argparse
import math
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cudascope.arguments.arrays import ITEMSIZES, Array, as_array, bits_of

CONTENTS = "random (the default: normal, integers 0 to 9), zeros, ones, arange, a number, or below=N (integers)"
VALUES = "a number, true or false; 1,2,3 for a vector; hex:… for the bytes of a struct"

_SHAPED = re.compile(r"(\w+)\[([\d, ]*)\]")


class GivenTensor(NamedTuple):
    """The tensor that `--tensor name=` describes. Each `make` is a tensor of its own with the same contents."""

    name: str
    initial: np.ndarray | None
    dtype: str
    is_output: bool

    def make(self) -> Array | None:
        """A tensor with the contents; None for a null pointer."""
        return None if self.initial is None else as_array(self.initial.copy())._replace(dtype=self.dtype)


def given_tensor(text: str) -> GivenTensor:
    """Read NAME=DTYPE[SIZES], NAME=FILE.npy or NAME=null, and what follows it after colons."""
    name, _, described = text.partition("=")
    what, *suffixes = described.split(":")
    contents = [suffix for suffix in suffixes if suffix != "output"]
    shaped = _SHAPED.fullmatch(what)
    if not described or len(contents) > (shaped is not None):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=DTYPE[SIZES], NAME=FILE.npy or NAME=null; of the first with :CONTENTS, which are "
            f"{CONTENTS}; and with :output, if the kernel shall write all of it"
        )
    initial, dtype = None, ""
    if shaped:
        dtype, sizes = shaped.groups()
        try:
            initial = _filled(name, dtype, [int(size) for size in sizes.split(",") if size.strip()], *contents)
        except (MemoryError, OverflowError, ValueError) as error:  # too large, or no such contents of this dtype
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    elif what.endswith(".npy") and Path(what).is_file():
        initial = np.ascontiguousarray(np.load(what))
        dtype = initial.dtype.name
    elif what != "null":
        raise argparse.ArgumentTypeError(f"{text!r}: {what!r} is neither DTYPE[SIZES], nor null, nor a .npy file")
    return GivenTensor(name, initial, dtype, "output" in suffixes)


_DTYPES = {"bool", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32", "float64"}
_DTYPES |= ITEMSIZES.keys()


def _filled(name: str, dtype: str, sizes: list[int], contents: str = "random") -> np.ndarray:
    """Return the array that a shell asks for. A dtype that numpy lacks comes as its bit patterns."""
    if dtype not in _DTYPES:
        known = ", ".join(sorted(_DTYPES))
        raise argparse.ArgumentTypeError(f"{name}: the dtype must be one of {known}, got {dtype!r}")
    generator = np.random.default_rng(zlib.crc32(name.encode()))  # another for each array, the same each time
    if below := re.fullmatch(r"below=(\d+)", contents):
        values = generator.integers(int(below[1]), size=sizes)
    elif contents == "random":
        values = generator.standard_normal(sizes) if "float" in dtype else generator.integers(10, size=sizes)
    elif contents == "arange":
        values = np.arange(math.prod(sizes)).reshape(sizes)
    else:
        try:
            number = float({"zeros": "0", "ones": "1"}.get(contents, contents))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name}: the contents must be {CONTENTS}, got {contents!r}") from None
        values = np.full(sizes, number)
    return bits_of(values.astype(np.float64), dtype) if dtype in ITEMSIZES else values.astype(dtype)


def given_file(text: str) -> tuple[str, str]:
    """Read NAME=FILE.npy."""
    name, _, file = text.partition("=")
    if not name or not file.endswith(".npy"):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FILE.npy")
    return name, file


def given_value(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, where VALUE is as VALUES says."""
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
    """Read a grid or a block: 4 or 4,2 or 4,2,1."""
    if not re.fullmatch(r"\d+(,\d+){0,2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be one to three numbers with commas between, x first")
    return tuple(map(int, text.split(",")))


def given_schedules(text: str) -> list[int]:
    """Read seeds: 7 or 1,5 or 0..19."""
    first, dots, last = text.partition("..")
    try:
        seeds = list(range(int(first), int(last) + 1)) if dots else [int(seed) for seed in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} must be seeds, as in 7 or 1,5 or 0..19, the lower one first")
    return seeds
