"""The units of a GPU that a PTX instruction needs.

    cost("fma.rn.f32 %f1, %f2, %f3, %f4")    →    {"fma": 1}

A cost is that of one warp. It is what the machine code needs at least, for ptxas may join instructions:

- A product and a sum without a rounding word (mul.f32, add.f32) may become one fused multiply-add. They are counted
  apart, and only the larger of the two numbers counts in the end (PTX ISA, 9.7.3: mul and add without .rn).
- A division costs nothing here: several divisions by one number need one reciprocal of that number.
- A special function of a constant costs nothing, because ptxas computes the result.
- Registers of a thread may replace `.local` memory, and parameters are constants: their loads cost nothing.
"""

import re
from collections.abc import Mapping

_INSTRUCTION = re.compile(r"(?:@\s*!?\s*[\w%$]+\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
SPECIAL = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"}
_MOVES = {"ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix"}
_NUMBER = re.compile(r"-?\d[\w.]*")
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


def cost(text: str) -> Mapping[str, int]:
    """Return what one warp needs for the instruction, by unit. Products are FLOPs under ("tensor", type of A, of D)."""
    match = _INSTRUCTION.fullmatch(text)
    if not match:
        return {}
    name, operands = match.groups()
    first, *words = name.split(".")
    if first == "mma" or name.startswith(("wmma.mma.", "wgmma.mma_async.")):
        return _product(first, words)
    numbers = {"f32": 1, "f32x2": 2}.get(words[-1] if words else "", 0)
    if first in ("fma", "mad") and numbers:
        return {"fma": numbers}
    if first in ("add", "sub", "mul") and numbers:
        rounds = {"rn", "rz", "rm", "rp"} & set(words)
        return {"fma" if rounds else "product" if first == "mul" else "sum": numbers}
    if first in SPECIAL and words[-1] != "f64":
        return {} if _NUMBER.fullmatch(operands.partition(",")[2].strip()) else {"special": 1}
    if first in _MOVES:
        return {} if {"param", "local"} & set(words) else {"moves": 1}
    if first == "cp":
        return {"moves": 1} if words[:2] in (["async", "ca"], ["async", "cg"]) else {}
    return {}


def _product(first: str, words: list[str]) -> Mapping[str, int]:
    m, n, k = map(int, next(match for word in words if (match := _SHAPE.fullmatch(word))).groups())
    kinds = [word for word in words[words.index(f"m{m}n{n}k{k}") + 1 :] if word not in ("row", "col", "satfinite")]
    if first == "wmma" and len(kinds) == 2:  # of half: only D and C are named
        result, a = kinds[0], "f16"
    else:
        result, a = kinds[:2]
    warps = 4 if first == "wgmma" else 1  # which share the product
    return {("tensor", a, result): 2 * m * n * k // warps}
