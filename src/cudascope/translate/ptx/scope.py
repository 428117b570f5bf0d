"""Where a PTX instruction stands: the C++ variable of each register and operand, and what an operand is in C++."""

import re

P = "simt::ptx::"

SPECIAL_REGISTERS = {
    f"%{name}.{axis}": f"{index}.{axis}"
    for name, index in {"tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}.items()
    for axis in "xyz"
}
SPECIAL_REGISTERS |= {
    "%laneid": "simt_lane()",
    "%warpid": f"{P}warp()",
    "%nwarpid": f"{P}warps()",
    "WARP_SZ": "32u",
    "%smid": "0u",
    "%nsmid": "1u",
    "%gridid": "(uint64_t)0",
    "%clock": "(uint32_t)simt_clock()",
    "%clock_hi": "(uint32_t)(simt_clock() >> 32)",
    "%clock64": "(uint64_t)simt_clock()",
    "%globaltimer": "(uint64_t)simt_clock()",
    "%globaltimer_lo": "(uint32_t)simt_clock()",
    "%globaltimer_hi": "(uint32_t)(simt_clock() >> 32)",
    "%lanemask_eq": "(1u << simt_lane())",
    "%lanemask_lt": "((1u << simt_lane()) - 1)",
    "%lanemask_le": "((2u << simt_lane()) - 1)",
    "%lanemask_gt": "(-2u << simt_lane())",
    "%lanemask_ge": "(-1u << simt_lane())",
    "%cluster_ctarank": "0u",  # every thread block is a cluster of its own
    "%cluster_nctarank": "1u",
}

_ADDRESS = re.compile(r"\[\s*([^\s+\-\[\]]+)\s*(?:([+-])\s*([^\s\]]+))?\s*\]")
_BITS = {"pred": "bool", **{str(n): f"uint{n}_t" for n in (8, 16, 32, 64)}, "128": "unsigned __int128"}


class Malformed(ValueError):
    """No asm statement that a compiler would take."""


class Unknown(LookupError):
    """PTX, but none that the CPU runner has: an instruction, or a register."""


class Scope:
    """A block under way: the variable of each register, those it declares itself, and its statements."""

    def __init__(self, names: dict[str, str], number: int) -> None:
        self.names, self.number = names, number
        self.addresses: dict[str, str] = {}  # of variables
        self.labels: dict[str, str] = {}  # of an enclosing kernel's blocks
        self.declared: list[str] = []
        self.statements: list[str] = []

    def cpp(self) -> str:
        return " ".join(["{", *self.declared, *self.statements, "}"])

    def declare(self, kind: str, written: str) -> None:
        """`.reg .b32 a, b;` or `.reg .f32 r<4>;`"""
        widths = {"f16x2": "32", "bf16x2": "32", "bf16": "16"}
        bits = _BITS.get(widths.get(kind, kind if kind == "pred" else kind.lstrip("busf")))
        if bits is None:
            raise Malformed(f"a register of type .{kind}")
        for name in re.split(r"\s*,\s*", written.strip()):
            many = re.fullmatch(r"([\w%$]+)<(\d+)>", name)
            for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                self.names[each] = "simt_" + re.sub(r"\W", "_", each)
                self.declared.append(f"{bits} {self.names[each]}{{}};")

    def label(self, name: str) -> str:
        return self.labels.get(name) or f"simt_{name.replace('$', '_')}_{self.number}"

    def variable(self, written: str) -> str:
        """The C++ variable of a register."""
        if written not in self.names:
            raise Malformed(f"{written} is no operand and no register of this statement")
        return self.names[written]

    def value(self, written: str) -> str:
        """An operand that is read: something that turns into the type it is needed in."""
        if written.startswith("!"):
            return f"{P}in(!{self.variable(written[1:].strip())})"
        if written in self.names:
            return f"{P}in({self.names[written]})"
        if written in self.addresses:
            return f"{P}in({self.addresses[written]})"
        if written in SPECIAL_REGISTERS:
            return f"{P}in({SPECIAL_REGISTERS[written]})"
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", written):
            return f"{P}Real<float>{{{P}cast_bits<float>(0x{match[1]}u)}}"
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", written):
            return f"{P}Real<double>{{{P}cast_bits<double>(0x{match[1]}ull)}}"
        if re.fullmatch(r"-?\d*\.\d+([eE][+-]?\d+)?|-?\d+\.\d*([eE][+-]?\d+)?", written):
            return f"{P}Real<double>{{{float(written)!r}}}"
        if match := re.fullmatch(r"(-?)\s*(0[xXbB][\da-fA-F]+|0[0-7]*|[1-9]\d*)U?", written):
            number = match[2]
            value = int(number, 8 if re.fullmatch(r"0\d+", number) else 0) * (-1 if match[1] else 1)
            return f"{P}Integer{{{value % 2**64:#x}ull}}"
        if written.startswith("%") and not written[1:2].isdigit():
            raise Unknown(written)
        raise Malformed(f"{written} is no operand, no register and no number")

    def address(self, written: str) -> tuple[str, str]:
        """`[register + offset]` as what is read and the offset in C++."""
        match = _ADDRESS.fullmatch(written)
        if not match:
            raise Malformed(f"an address is written [register + offset], got {written}")
        register, sign, offset = match.groups()
        return self.value(register), f"{sign or ''}(int64_t)({self.value(offset)})" if offset else "0"

    def place(self, space: str, written: str) -> str:
        """`[register + offset]` as an address in C++, in a "generic", "shared" or "local" space."""
        near = ", __builtin_frame_address(0)" * (space == "local")
        return f"{P}{space}_address({', '.join(self.address(written))}{near})"
