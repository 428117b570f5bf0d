"""PTX instructions on the CPU against two sources of NVIDIA's: the assembler's constants, and the headers' host code.

ptxas, which comes with Triton, computes an instruction with constant operands itself and stores the constant. cudascope
executes the same instruction with the same operands in memory. The bits must be equal, except that any NaN equals any
other. ptxas leaves some instructions as they are, and these results are passed over.

Three constants of ptxas contradict the PTX manual, and the operands leave them out. sub.sat.s32 of the least integer
adds this integer. slct.s32 takes its third operand for a float. bfe and bfi of 64 bits do not reduce a place above 255.
"""

import re
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cudascope import PtxKernel
from cudascope.toolchain.compiler import find_compiler
from cudascope.toolchain.headers import nvidia_headers

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARCH = "sm_90"

# ------------------------------------------------------------------------------------------------ instructions

WORDS = [
    0, 1, 2, 3, 7, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x8000, 0xFFFF, 0x12345678, 0x3F800000, 0x7FFFFFFE, 0x7FFFFFFF,
    0x80000000, 0x80000001, 0xC2F63210, 0xFFFFFFF9, 0xFFFFFFFF, 0x0123456789ABCDEF, 0x7FFFFFFFFFFFFFFF,
    0x8000000000000000, 0xFEDCBA9876543210, 0xFFFFFFFFFFFFFFFF,
]  # fmt: skip
PLACES = [0, 1, 4, 5, 8, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 127, 200, 255]  # the range of bfe and bfi
AMOUNTS = [*PLACES, 256, 257, 0x80000000, 0xFFFFFFFF]
SINGLES = [
    0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x387FE000, 0x3DCCCCCD, 0x3F000000,
    0x3F000001, 0x3F7FFFFF, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F818001, 0x3F801000, 0x3F803000, 0xBF801001,
    0x3FB504F3, 0x40200000, 0x40600000, 0xC0200000, 0x40490FDB, 0x42FF0000, 0x43000000, 0x437F8000, 0xC3008000,
    0x43E80000, 0x43E80001, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x4B7FFFFF, 0x4EFFFFFF, 0x4F000000, 0xCF000000,
    0xCF000001, 0x4F7FFFFF, 0x4F800000, 0x5EFFFFFF, 0x5F000000, 0x5F7FFFFF, 0x5F800000, 0x7F7F7FFF, 0x7F7F8000,
    0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
]  # fmt: skip
HALVES = [
    0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x1400, 0x2E66, 0x3800, 0x3BFF, 0x3C00, 0x3C01, 0xBC01, 0x3F81, 0x4100,
    0x4248, 0xC100, 0x4900, 0x57FF, 0x5C01, 0x68FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7F80, 0xFF80,
]  # fmt: skip


def doubles() -> list[int]:
    extreme = [
        1e-320,
        1.7976931348623157e308,
        1 + 2**-24,
        1 + 2**-25,
        -(1 + 3 * 2**-25),
        2.0**31 - 0.5,
        9.3e18,
        2**-1074,
    ]
    values = [struct.unpack("<f", struct.pack("<I", x))[0] for x in SINGLES[::2]] + extreme
    return [int.from_bytes(struct.pack("<d", x), "little") for x in values]


# operands: r w h l integers of 32, 8 to 16, 16 and 64 bits, n m how far to shift, f d floats, e halves, p two halves
OPERANDS = {"r": WORDS, "l": WORDS, "h": WORDS, "n": AMOUNTS, "m": PLACES, "f": SINGLES, "d": doubles(), "e": HALVES}
OPERANDS["p"] = [a | HALVES[(5 * i + 3) % len(HALVES)] << 16 for i, a in enumerate(HALVES)]
BITS = {"r": 32, "l": 64, "h": 16, "n": 32, "m": 32, "f": 32, "d": 64, "e": 16, "p": 32}
REGISTERS = {"r": "b32", "n": "b32", "m": "b32", "p": "b32", "l": "b64", "h": "b16", "e": "b16", "f": "f32", "d": "f64"}

TO_INTEGERS = ("rni", "rzi", "rmi", "rpi")
ORDERED, UNORDERED = ("eq", "ne", "lt", "le", "gt", "ge"), ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
SIZES = {"u16": "h", "s16": "h", "u32": "r", "s32": "r", "u64": "l", "s64": "l"}
TABLE = [  # instructions that ptxas computes, and the kinds of result and operands
    *(f"{name}.{t} {k * 3}" for name in ("add", "sub", "mul.lo", "min", "max", "mul.hi") for t, k in SIZES.items()),
    *(f"{name}.{t}32 rrr" for name in ("div", "rem") for t in "us"),
    *(f"mul.wide.{t} {k}" for t, k in {"u16": "rhh", "s16": "rhh", "u32": "lrr", "s32": "lrr"}.items()),
    "mad.wide.u32 lrrl", "mad.wide.s32 lrrl", "mad.lo.s32 rrrr", "add.sat.s32 rrr", "sub.sat.s32 rrr",
    "abs.s32 rr", "neg.s32 rr", "abs.s64 ll", "not.b32 rr", "cnot.b32 rr", "and.b32 rrr", "xor.b64 lll",
    *(f"{name}.b{n} {k}{k}n" for name in ("shl", "shr") for n, k in ((16, "h"), (32, "r"), (64, "l"))),
    *(f"shr.s{n} {k}{k}n" for n, k in ((16, "h"), (32, "r"), (64, "l"))), "shr.u16 hhn",
    *(f"shf.{way}.{mode}.b32 rrrn" for way in "lr" for mode in ("clamp", "wrap")),
    *(f"{name}.b32 rr" for name in ("popc", "clz", "brev")), "popc.b64 rl", "clz.b64 rl", "brev.b64 ll",
    *(f"bfind{s}.{t} r{k}" for s in ("", ".shiftamt") for t, k in SIZES.items() if k != "h"),
    "bfe.u32 rrnn", "bfe.s32 rrnn", "bfe.u64 llmm", "bfe.s64 llmm", "bfi.b32 rrrnn", "bfi.b64 lllmm",
    "mul24.lo.s32 rrr", "mad24.lo.u32 rrrr", "slct.f32.f32 ffff",
    *(f"cvt.{to}.{of} {a}r" for to, a in (("s8", "r"), ("u8", "r"), ("s16", "r"), ("u32", "r"), ("s64", "l"))
      for of in ("u8", "s8", "s16", "s32", "u32")),
    *(f"cvt.sat.{to}.{of} r{b}" for to in ("s8", "u8", "s16", "u16")
      for of, b in (("s32", "r"), ("u32", "r"), ("s64", "l"))),
    *(f"cvt.{mode}.{to}.{of} {a}{b}" for mode in TO_INTEGERS for of, b in (("f32", "f"), ("f64", "d"))
      for to, a in (("s32", "r"), ("u32", "r"), ("s64", "l"), ("u64", "l"))),
    "cvt.rzi.s32.f16 re", "cvt.rzi.u16.f16 re", "cvt.rzi.s64.f16 le", "cvt.rn.f32.s32 fr", "cvt.rn.f32.u32 fr",
    "cvt.rn.f32.f64 fd", "cvt.rn.ftz.f32.f64 fd", "cvt.f64.f32 df", "cvt.f32.f16 fe", "cvt.rn.f16.s32 er",
    "cvt.rn.f16.f32 ef", "cvt.rn.ftz.f16.f32 ef", "cvt.rn.sat.f16.f32 ef", "cvt.rn.f16.f64 ed", "cvt.rn.f16x2.f32 pff",
    *(f"cvt.{mode}{more}.f32.f32 ff" for mode in TO_INTEGERS for more in ("", ".ftz", ".sat")),
    "cvt.sat.f32.f32 ff", "cvt.ftz.f32.f32 ff", "cvt.rna.tf32.f32 rf",
    *(f"{name}.rn{ftz}.f32 fff" for name in ("add", "sub", "mul") for ftz in ("", ".ftz")), "div.rn.ftz.f32 fff",
    "add.sat.f32 fff", "mul.sat.f32 fff",
    *(f"{name}{ftz}.f32 ff" for name in ("abs", "neg") for ftz in ("", ".ftz")), "abs.f64 dd", "neg.f64 dd",
    *(f"{name}{more}.f32 fff" for name in ("min", "max") for more in ("", ".ftz", ".NaN")), "min.f64 ddd",
    "max.f64 ddd", "min.f16x2 ppp", "abs.f16 ee", "abs.f16x2 pp", "neg.f16 ee", "neg.f16x2 pp", "neg.bf16 bb",
    *(f"set.{c}.u32.f32 rff" for c in ("lt", "ltu", "ge", "num", "nan", "ne", "neu")),
    "set.le.f32.s32 frr", "set.lo.u32.u32 rrr",
    *(f"setp.{c}.{t} {k}" for c in (*ORDERED, *UNORDERED)
      for t, k in (("f32", "rff"), ("ftz.f32", "rff"), ("f64", "rdd"), ("f16", "ree"), ("ftz.f16", "ree"))),
    *(f"setp.{c}.{t} r{k}{k}" for c in ORDERED for t, k in (("s32", "r"), ("u32", "r"), ("s64", "l"), ("u16", "h"))),
    *(f"setp.{c}.u32 rrr" for c in ("lo", "ls", "hi", "hs")),
    *(f"testp.{c}.f32 rf" for c in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")),
]  # fmt: skip
# b and q are bfloat16 and pairs of it: the patterns of halves, which have other values there
for bfloat, half in (("b", "e"), ("q", "p")):
    OPERANDS[bfloat], BITS[bfloat], REGISTERS[bfloat] = OPERANDS[half], BITS[half], REGISTERS[half]
ROWS = 16


class Instruction(NamedTuple):
    name: str
    kinds: str  # of result and operands
    operands: list[tuple[int, ...]]

    def text(self, result: str, sources: list[str]) -> str:
        """The statement, whose result is 1 or 0 if it is a predicate."""
        if self.name.startswith(("setp", "testp")):
            return f"{self.name} %p1, {', '.join(sources)}; selp.b32 {result}, 1, 0, %p1;"
        return f"{self.name} {', '.join([result, *sources])};"


def instructions() -> list[Instruction]:
    found = []
    for row in TABLE:
        name, kinds = row.split()
        values = [OPERANDS[kind] for kind in kinds[1:]]
        count = len(values[0]) if len(values) == 1 else ROWS if len(values) > 2 else ROWS + 8
        operands = [
            tuple(each[(i * (1, 5, 7, 11)[j] + i // len(each) * j + 3 * j) % len(each)] % 2 ** BITS[kind]
                  for j, (each, kind) in enumerate(zip(values, kinds[1:], strict=True)))
            for i in range(count)
        ]  # fmt: skip
        if len(values) == 2:
            operands += [(a, b) for a in values[0][:4] for b in values[1][:4]]
        if name == "sub.sat.s32":  # ptxas adds the least integer instead, which is no definition of the manual's
            operands = [each for each in operands if each[1] != 0x80000000]
        if name.startswith(("div", "rem")) and kinds in ("rrr", "lll"):
            least = 2 ** (BITS[kinds[0]] - 1)
            operands = [each for each in operands if each[1] and each != (least, 2 * least - 1)]
        found.append(Instruction(name, kinds, operands))
    return found


# ------------------------------------------------------------------------------------------------ the assembler

HEADER = f".version 8.5\n.target {ARCH}\n.address_size 64\n"
DECLARED = "".join(f".reg .{kind} %{kind}_<8>; " for kind in ("b16", "b32", "b64", "f32", "f64")) + ".reg .pred %p<3>; "


def register(kind: str, number: int) -> str:
    return f"%{REGISTERS[kind]}_{number}"


def constant(kind: str, value: int) -> str:
    return {"f": f"0f{value:08X}", "d": f"0d{value:016X}"}.get(kind, f"{value:#x}")


def with_constants(instruction: Instruction, number: int) -> str:
    """An entry that stores the results of all operands, 8 bytes apart."""
    lines = [f".visible .entry f{number}(.param .u64 out) {{ {DECLARED}.reg .b64 %out; ld.param.u64 %out, [out];"]
    result, *kinds = instruction.kinds
    sources = [register(kind, 1 + i) for i, kind in enumerate(kinds)]
    for row, values in enumerate(instruction.operands):
        for kind, source, value in zip(kinds, sources, values, strict=True):
            lines.append(f"mov.{REGISTERS[kind]} {source}, {constant(kind, value)};")
        lines.append(instruction.text(register(result, 0), sources))
        lines.append(f"st.global.{REGISTERS[result]} [%out+{8 * row}], {register(result, 0)};")
    return "\n".join([*lines, "ret; }\n"])


def half(written: str) -> int | None:
    """The bits of half an immediate operand, which the disassembler writes as a number."""
    if "QNAN" in written or "SNAN" in written:
        return None
    text = written.replace(" ", "").replace("+INF", "inf").replace("INF", "inf")
    return int(np.float16(float(text)).view(np.uint16))


def folded(sass: str) -> dict[int, int]:
    """The constants that straight-line code stores, by the row of the result."""
    registers: dict[str, int | None] = {"RZ": 0, "URZ": 0}
    stored: dict[int, int] = {}
    for line in sass.split("\n"):
        code = re.sub(r"/\*.*?\*/", "", line).strip().rstrip(";").strip()
        if code.startswith(".L") or re.search(r"\b(BRA|CALL|RET)\b", code):  # another way may lead to the next line
            registers = {"RZ": 0, "URZ": 0}
        elif move := re.fullmatch(r"(?:U?MOV|IMAD\.MOV(?:\.U32)?)\s+(U?R\d+), (?:RZ, RZ, )?(-?\w+)", code):
            value = registers.get(move[2]) if "R" in move[2] else int(move[2], 0) % 2**32
            registers[move[1]] = value
        elif move := re.fullmatch(r"HFMA2(?:\.MMA)?\s+(R\d+), -RZ, RZ, ([^,]+), ([^,]+)", code):
            high, low = half(move[2]), half(move[3])
            registers[move[1]] = None if high is None or low is None else high << 16 | low
        elif move := re.fullmatch(r"CS2R\s+R(\d+), SRZ", code):
            registers[f"R{move[1]}"] = registers[f"R{int(move[1]) + 1}"] = 0
        elif move := re.fullmatch(r"STG\.E(\.\w+)?\s+desc\[\w+\]\[R\d+\.64(?:\+(0x[0-9a-f]+))?\], R(\d+|Z)", code):
            at = int(move[2] or "0", 16)
            names = ["RZ"] * 2 if move[3] == "Z" else [f"R{move[3]}", f"R{int(move[3]) + 1}"]
            words = [registers.get(name) for name in names[: 2 if move[1] == ".64" else 1]]
            if at % 8 == 0 and None not in words:
                stored[at // 8] = sum(word << 32 * i for i, word in enumerate(words))
        elif written := re.match(r"(?:@!?U?P\d+ )?[\w.]+\s+(?:P\w, )?(U?R\d+)", code):
            number = int(written[1].lstrip("UR"))
            prefix = written[1].rstrip("0123456789")
            registers |= {f"{prefix}{number}": None, f"{prefix}{number + 1}": None}
    return stored


@pytest.fixture(scope="module")
def assembled(tmp_path_factory) -> list[dict[int, int]]:
    """For each instruction the results that ptxas knows."""
    folder = tmp_path_factory.mktemp("assembled")
    table = instructions()
    (folder / "f.ptx").write_text(HEADER + "".join(with_constants(each, i) for i, each in enumerate(table)))
    subprocess.run([TOOLS / "ptxas", f"-arch={ARCH}", folder / "f.ptx", "-o", folder / "f.cubin"], check=True)
    run = subprocess.run([TOOLS / "nvdisasm", "-c", folder / "f.cubin"], capture_output=True, text=True, check=True)
    functions = re.split(r"^\.text\.f(\d+):", run.stdout, flags=re.MULTILINE)[1:]
    known = {int(number): folded(sass) for number, sass in zip(functions[::2], functions[1::2], strict=True)}
    return [known[i] for i in range(len(table))]


# ------------------------------------------------------------------------------------------------ the CPU runner


def with_operands(table: list[Instruction]) -> str:
    """An entry whose thread i executes each instruction with its operands i: x[instruction, i, operand].

    Rows that an instruction lacks repeat its first, so no operand is one that it cannot have.
    """
    lines = [
        f".visible .entry all(.param .u64 x, .param .u64 out, .param .u32 n) {{ {DECLARED}.reg .b64 %x, %out;"
        ".reg .b32 %i, %n; ld.param.u64 %x, [x]; ld.param.u64 %out, [out]; ld.param.u32 %n, [n];"
        "mov.u32 %i, %ctaid.x; mov.u32 %b32_7, %tid.x; mad.lo.u32 %i, %i, 256, %b32_7; setp.ge.u32 %p2, %i, %n;"
        "@%p2 bra END;"
        "mad.wide.u32 %x, %i, 32, %x; mad.wide.u32 %out, %i, 8, %out;"
    ]
    for each in table:
        result, *kinds = each.kinds
        sources = [register(kind, 1 + i) for i, kind in enumerate(kinds)]
        for i, (kind, source) in enumerate(zip(kinds, sources, strict=True)):
            lines.append(f"ld.global.{REGISTERS[kind]} {source}, [%x+{8 * i}];")
        lines.append(each.text(register(result, 0), sources))
        lines.append(f"st.global.{REGISTERS[result]} [%out], {register(result, 0)};")
        lines.append("mad.wide.u32 %x, %n, 32, %x; mad.wide.u32 %out, %n, 8, %out;")
    return HEADER + "\n".join([*lines, "END: ret; }\n"])


def executed(table: list[Instruction]) -> np.ndarray:
    """The results [instruction, row]."""
    n = max(len(each.operands) for each in table)
    x, out = np.zeros((len(table), n, 4), np.uint64), np.zeros((len(table), n), np.uint64)
    for each, rows in zip(table, x, strict=True):
        rows[:, : len(each.kinds) - 1] = each.operands[0]
        rows[: len(each.operands), : len(each.kinds) - 1] = each.operands
    PtxKernel(with_operands(table))[-(-n // 256), 256](x, out, n)
    return out


def numbers(instruction: Instruction, result: int) -> Iterator[int | str]:
    """The bits of a result, in which all NaNs are one."""
    kind = instruction.kinds[0]
    parts = re.findall(r"\.(f16|bf16)(?:x2)?(?=\.|$)", instruction.name)
    form = {"f": (8, 23), "d": (11, 52)}.get(kind) or (
        (8, 7) if kind in "bq" else (5, 10) if kind in "ep" and parts else None
    )
    if "tf32" in instruction.name:
        form = (8, 23)
    if form is None:
        yield result
        return
    size = 1 + sum(form)
    for shift in range(0, BITS[kind], size):
        bits = result >> shift & (1 << size) - 1
        yield "NaN" if bits & (1 << size - 1) - 1 > ((1 << form[0]) - 1) << form[1] else bits


def differences(instruction: Instruction, mine: np.ndarray, theirs: Mapping[int, int], whose: str) -> Iterator[str]:
    """The results that are not those of NVIDIA, which are known for some rows."""
    for row, expected in theirs.items():
        found = int(mine[row]) % 2 ** BITS[instruction.kinds[0]]
        if found != expected and [*numbers(instruction, found)] != [*numbers(instruction, expected)]:
            operands = ", ".join(map(hex, instruction.operands[row]))
            yield f"{instruction.name} of {operands}: {found:#x}, and {whose} has {expected:#x}"


def test_instructions_give_what_the_assembler_computes_for_constants(assembled):
    table = instructions()
    results = executed(table)
    each = zip(table, results, assembled, strict=True)
    wrong = [text for instruction, mine, known in each for text in differences(instruction, mine, known, "ptxas")]
    assert not wrong, "\n".join([*wrong[:60], f"{len(wrong)} in all"])
    compared = [len(known) for known in assembled if known]
    assert len(compared) > 200
    assert sum(compared) > 5000


# ------------------------------------------------------------------------------------------------ the headers

ALL = range(65536)
RANDOM = np.random.default_rng(0)
MANY = [
    *SINGLES,
    *map(int, RANDOM.integers(0, 2**32, 2000)),
    *(h << 16 | t for h in HALVES for t in (0x7FFF, 0x8000, 0x8001)),
]
MANY += [
    int(np.float32(np.uint16(h).view(np.float16)).view(np.uint32)) + t for h in HALVES for t in (0xFFF, 0x1000, 0x1001)
]
WIDE = [
    *doubles(),
    *(int(np.float64(np.uint32(x).view(np.float32)).view(np.uint64)) + t for x in MANY[:300] for t in (-1, 0, 1)),
]
INTEGERS = [
    *WORDS,
    *map(int, RANDOM.integers(0, 2**63, 1000)),
    *(2**n + 2 ** (n - k) + t for n in (15, 30, 40, 62) for k in (8, 11) for t in (-1, 0, 1)),
]
PAIRS = [(int(a), int(b)) for a in HALVES for b in HALVES]
HEADERS = [  # instruction, kinds, operands, and the function of NVIDIA's in terms of a and b
    ("cvt.f32.f16", "fe", ALL, "bits(__half2float(h16(a)))"),
    ("cvt.rzi.s32.f16", "re", ALL, "(unsigned)__half2int_rz(h16(a))"),
    *((f"cvt.rn.satfinite.{t}x2.f16x2", "hp", ALL,
       f"__nv_cvt_halfraw2_to_fp8x2(twice(a), __NV_SATFINITE, __NV_{t.upper()})") for t in ("e4m3", "e5m2")),
    *((f"cvt.rn.f16x2.{t}x2", "ph", ALL, f"bits(__nv_cvt_fp8x2_to_halfraw2(a, __NV_{t.upper()}))")
      for t in ("e4m3", "e5m2")),
    *((f"cvt.{mode}.f16.f32", "ef", MANY, f"bits(__float2half_{name}(single(a)))")
      for mode, name in (("rn", "rn"), ("rz", "rz"), ("rm", "rd"), ("rp", "ru"))),
    *((f"cvt.{mode}.bf16.f32", "bf", MANY, f"bits(__float2bfloat16_{name}(single(a)))")
      for mode, name in (("rn", "rn"), ("rz", "rz"), ("rm", "rd"), ("rp", "ru"))),
    *((f"cvt.rn.satfinite.{t}x2.f32", "hff", [*zip(MANY, MANY[7:], strict=False)],
       f"__nv_cvt_float2_to_fp8x2(float2{{single(b), single(a)}}, __NV_SATFINITE, __NV_{t.upper()})")
      for t in ("e4m3", "e5m2")),
    ("cvt.rn.f16.f64", "ed", WIDE, "bits(__double2half(real(a)))"),
    ("cvt.rn.bf16.f64", "bd", WIDE, "bits(__double2bfloat16(real(a)))"),
    ("cvt.rn.f16.s64", "el", INTEGERS, "bits(__ll2half_rn((long long)a))"),
    ("cvt.rn.f16.u64", "el", INTEGERS, "bits(__ull2half_rn(a))"),
    ("cvt.rn.bf16.s64", "bl", INTEGERS, "bits(__ll2bfloat16_rn((long long)a))"),
    ("cvt.rn.bf16.u64", "bl", INTEGERS, "bits(__ull2bfloat16_rn(a))"),
    ("cvt.rn.bf16.s32", "br", INTEGERS, "bits(__int2bfloat16_rn((int)a))"),
    *((f"{name}.f16", "eee", PAIRS, f"bits(__h{name}(h16(a), h16(b)))")
      for name in ("add", "sub", "mul", "min", "max")),
    *((f"{name}.bf16", "bbb", PAIRS, f"bits(__h{name}(brain(a), brain(b)))") for name in ("min", "max")),
    *((f"{name}.NaN.f16", "eee", PAIRS, f"bits(__h{name}_nan(h16(a), h16(b)))") for name in ("min", "max")),
    *((f"setp.{c}.f16", "ree", PAIRS, f"(unsigned)__h{c}(h16(a), h16(b))")
      for c in ("eq", "ne", "lt", "ltu", "geu", "gt")),
]  # fmt: skip


def host_program() -> str:
    """C++ that reads rows of a and b, and writes the results of each function."""
    loops = "\n".join(
        f"    for (unsigned i = 0; i < {len(operands)}; ++i) {{ auto [a, b] = next(); put({expression}); }}"
        for _, _, operands, expression in HEADERS
    )
    return f"""
#include <cstdio>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
using u64 = unsigned long long;
struct Row {{ u64 a, b; }};
template <class To, class From> To as(From from) {{
    To to{{}};
    memcpy((void*)&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
    return to;
}}
template <class T> unsigned bits(T x) {{ return as<unsigned>(x); }}
__half h16(u64 a) {{ return as<__half>((unsigned short)a); }}
__nv_bfloat16 brain(u64 a) {{ return as<__nv_bfloat16>((unsigned short)a); }}
float single(u64 a) {{ return as<float>((unsigned)a); }}
double real(u64 a) {{ return as<double>(a); }}
__half2_raw twice(u64 a) {{ return {{(unsigned short)a, (unsigned short)a}}; }}
Row next() {{ Row row; return fread(&row, sizeof(row), 1, stdin) ? row : Row{{}}; }}
void put(unsigned x) {{ fwrite(&x, sizeof(x), 1, stdout); }}
int main() {{
{loops}
}}
"""


def test_conversions_and_halves_give_what_the_headers_compute_on_the_host(tmp_path):
    table, rows = [], []
    for name, kinds, operands, _ in HEADERS:
        tuples = [each if isinstance(each, tuple) else (each,) for each in operands]
        rows += [(each[0] % 2**64, each[-1] % 2**64) for each in tuples]
        if kinds == "hp":  # the same half twice
            tuples = [(a << 16 | a,) for (a,) in tuples]
        bits = [2 ** BITS[kind] for kind in kinds[1:]]
        table.append(Instruction(name, kinds, [tuple(x % y for x, y in zip(t, bits, strict=True)) for t in tuples]))
    (tmp_path / "host.cpp").write_text(host_program())
    command = [*find_compiler()[0], "-std=c++17", "-O1", "-w", f"-I{nvidia_headers()}", "host.cpp", "-o", "host"]
    subprocess.run(command, cwd=tmp_path, check=True)
    given = np.array(rows, np.uint64).tobytes()
    host = subprocess.run(tmp_path / "host", input=given, capture_output=True, check=True)
    expected = np.frombuffer(host.stdout, np.uint32)
    wrong, at = [], 0
    for instruction, found in zip(table, executed(table), strict=True):
        theirs = expected[at : at + len(instruction.operands)]
        at += len(theirs)
        wrong += differences(instruction, found, dict(enumerate(theirs.tolist())), "the header")
    assert at == len(expected)
    assert not wrong, "\n".join([*wrong[:60], f"{len(wrong)} in all"])


# ------------------------------------------------------------------------------------------------ approximations

# The largest error that the PTX manual allows, as relative to the exact result, and where it holds. `absolute` errors
# are those of sin and cos.
APPROXIMATE = [
    ("ex2.approx.f32", np.exp2, 2**-22, (-20, 20)),
    ("ex2.approx.ftz.f32", np.exp2, 2**-22, (-20, 20)),
    ("lg2.approx.f32", np.log2, 2**-22, (2, 1000)),
    ("rcp.approx.f32", lambda x: 1 / x, 2**-23, (0.001, 1000)),
    ("sqrt.approx.f32", np.sqrt, 2**-23, (0.001, 1000)),
    ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 2**-22.9, (0.001, 1000)),
    ("tanh.approx.f32", np.tanh, 2**-11, (-3, 3)),
    ("sin.approx.f32", np.sin, None, (-6.28, 6.28)),
    ("cos.approx.f32", np.cos, None, (-6.28, 6.28)),
]


def test_approximations_are_as_near_as_the_manual_says():
    inputs = [RANDOM.uniform(*where, 500).astype(np.float32) for *_, where in APPROXIMATE]
    table = [
        Instruction(name, "ff", [(int(bits),) for bits in x.view(np.uint32)])
        for (name, *_), x in zip(APPROXIMATE, inputs, strict=True)
    ]
    for (name, function, bound, _), x, found in zip(APPROXIMATE, inputs, executed(table), strict=True):
        result = found[: len(x)].astype(np.uint32).view(np.float32).astype(np.float64)
        exact = function(x.astype(np.float64))
        allowed = 2**-20.5 if bound is None else bound * np.abs(exact)
        assert (np.abs(result - exact) <= allowed).all(), name
