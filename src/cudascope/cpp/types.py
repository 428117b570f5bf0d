"""CUDA's types as Python sees them: what carries a scalar, and which elements a pointer points to."""

import ctypes
from typing import NamedTuple

from cudascope.cpp.tokens import Tokens

FLOATS = {"float": "float32", "double": "float64", "__half": "float16", "__nv_bfloat16": "bfloat16"}
FLOATS |= {".f32": "float32", ".f64": "float64"}  # PTX's types begin with a dot

_BUILT_IN = {"char": 8, "short": 16, "int": 32, "long": 64, "long long": 64}  # `long` as on Linux
INTEGERS: dict[str, tuple[int, bool | None]] = {  # bits, signed (None: either)
    **{name: (bits, True) for name, bits in _BUILT_IN.items()},
    **{f"unsigned {name}": (bits, False) for name, bits in _BUILT_IN.items()},
    **{f"{u}int{bits}_t": (bits, not u) for u in ("", "u") for bits in (8, 16, 32, 64)},
    **{f".{kind}{bits}": (bits, None) for kind in "bsu" for bits in (8, 16, 32, 64)},
    **dict.fromkeys(("size_t", "uintptr_t"), (64, False)),
    **dict.fromkeys(("ptrdiff_t", "intptr_t"), (64, True)),
    "signed char": (8, True),
}
ADDRESSES = {".b64", ".s64", ".u64"}
"""PTX's types that carry a number or an address."""

C_TYPES: dict[str, type] = {  # what carries a scalar: two-byte floats by their bit pattern
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "__half": ctypes.c_uint16,
    "__nv_bfloat16": ctypes.c_uint16,
    ".f32": ctypes.c_float,
    ".f64": ctypes.c_double,
    **{name: getattr(ctypes, f"c_{'' if signed else 'u'}int{bits}") for name, (bits, signed) in INTEGERS.items()},
}

_ELEMENTS = {f"{u[:1]}{name.replace(' ', '')}": u + name for u in ("", "unsigned ") for name in _BUILT_IN}
_ELEMENTS |= {"float": "float", "double": "double"}
VECTORS = {f"{name}{lanes}": (element, lanes) for name, element in _ELEMENTS.items() for lanes in (1, 2, 3, 4)}
VECTORS |= {"dim3": ("unsigned int", 3), "__half2": ("__half", 2), "__nv_bfloat162": ("__nv_bfloat16", 2)}


class Pointee(NamedTuple):
    """The arrays that a pointer may point to: their dtypes (an empty tuple allows any), and the alignment in bytes."""

    dtypes: tuple[str, ...]
    alignment: int


def _integer_dtypes(bits: int, signed: bool) -> tuple[str, ...]:
    """Unsigned integers above 8 bits are rare in torch: there the signed array of the same width does too."""
    return (f"int{bits}",) if signed else (f"uint{bits}",) if bits == 8 else (f"uint{bits}", f"int{bits}")


def _pointees() -> dict[str, Pointee]:
    known = {"void": Pointee((), 1), "bool": Pointee(("bool",), 1)}
    known |= {name: Pointee((dtype,), ctypes.sizeof(C_TYPES[name])) for name, dtype in FLOATS.items()}
    known |= {name: Pointee(_integer_dtypes(*width), width[0] // 8) for name, width in INTEGERS.items()}
    known |= dict.fromkeys(ADDRESSES, Pointee((), 1))
    for name, (element, lanes) in VECTORS.items():  # CUDA aligns vectors of 2 and 4 to their size, up to 16 bytes
        dtypes, size = known[element]
        known[name] = Pointee(dtypes, size if lanes % 2 else min(16, size * lanes))
    for format, dtype in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")):
        known |= {f"__nv_fp8{x}_{format}": Pointee((dtype,), bytes) for x, bytes in (("", 1), ("x2", 2), ("x4", 4))}
    return known


POINTEES = _pointees()

FUNDAMENTAL = {"bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "void"}
_PLAIN = {f"{u}{name}" for u in ("", "unsigned ") for name in _BUILT_IN} | {"bool", "float", "double", "void"}
_SAME = {name: _ELEMENTS[name] for name in ("uchar", "ushort", "uint", "ulong")}
_SAME |= {name: f"__{name}" for name in ("half", "half2", "nv_bfloat16", "nv_bfloat162")}
_SAME |= {f"__{name}_raw": f"__{name}" for name in ("half", "nv_bfloat16")}
_SAME |= {f"__nv_fp8{x}_storage_t": f"unsigned {name}" for x, name in (("", "char"), ("x2", "short"), ("x4", "int"))}
_SAME |= dict.fromkeys(("cudaTextureObject_t", "cudaSurfaceObject_t"), "unsigned long long")
_TORCHS = {"Half": "__half", "BFloat16": "__nv_bfloat16", "Float8_e4m3fn": "__nv_fp8_e4m3"}
_TORCHS |= {"Float8_e5m2": "__nv_fp8_e5m2"}


def canonical_type(tokens: Tokens) -> str | None:
    """One spelling per type: `unsigned` is "unsigned int", `half` is "__half". None for other types."""
    if tokens[:1] == ["::"] or tokens[:2] == ["std", "::"]:
        tokens = tokens[1 + (tokens[0] == "std") :]
    if tokens and all(token in FUNDAMENTAL for token in tokens):
        if sorted(tokens) == ["char", "signed"]:
            return "signed char"
        name = " ".join(sorted((token for token in tokens if token not in ("int", "signed")), reverse=True))
        name = f"{name} int".strip() if name in ("", "unsigned") else name
        return name if name in _PLAIN else None
    if tokens[:-1] in (["c10", "::"], ["at", "::"], ["torch", "::"]) and tokens[-1] in _TORCHS:
        return _TORCHS[tokens[-1]]
    if len(tokens) == 1 and tokens[0].isidentifier():
        return _SAME.get(tokens[0], tokens[0])
    return None
