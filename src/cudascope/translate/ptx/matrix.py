"""PTX instructions on matrices that the lanes of a warp hold together: mma, ldmatrix, stmatrix, movmatrix."""

import re

from cudascope.translate.ptx.calls import Instruction, assign, call, elements, expect, flags, names, vector
from cudascope.translate.ptx.scope import P, Scope, Unknown

_INTEGERS = names("s8 u8 s4 u4")
_SHAPES = {
    **dict.fromkeys(("f16", "bf16"), names("m16n8k8 m16n8k16")),
    "tf32": names("m16n8k4 m16n8k8"),
    "f64": names("m8n8k4 m16n8k4 m16n8k8 m16n8k16"),
    **dict.fromkeys(("s8", "u8"), names("m8n8k16 m16n8k16 m16n8k32")),
    **dict.fromkeys(("s4", "u4"), names("m8n8k32 m16n8k32 m16n8k64")),
    **dict.fromkeys(("e4m3", "e5m2"), names("m16n8k16 m16n8k32")),
}  # of A's type
_PARTNERS = {"s8": "s8 u8", "u8": "s8 u8", "s4": "s4 u4", "u4": "s4 u4", "e4m3": "e4m3 e5m2", "e5m2": "e4m3 e5m2"}


def multiply(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d, …}, {a, …}, {b, …}, {c, …};`"""
    if len(words) < 9 or words[:2] != ["sync", "aligned"] or words[3:5] != ["row", "col"]:
        raise Unknown(name)
    shape, modifiers, (result, a, b, start) = words[2], words[5:-4], words[-4:]
    sums = {"s32"} if a in _INTEGERS else {"f64"} if a == "f64" else {"f16", "f32"} if a != "bf16" else {"f32"}
    known = shape in _SHAPES.get(a, ()) and b in names(_PARTNERS.get(a, a)) and {result, start} <= sums
    expect(name, operands, 4, known and modifiers in ([], ["satfinite"]))
    register = "b64" if a == "f64" else "b32"
    m, n, k = re.findall(r"\d+", shape)
    kinds = [P + kind for kind in (result, a, b, start)]
    fragments = [vector(register, each, scope) for each in operands[1:]]
    value = call("mma", [m, n, k, *kinds, flags(modifiers), P + register], fragments)
    return assign(operands[0], value, scope)


def load(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {a, b, c, d}, [row];`"""
    expect(name, operands, 2)
    arguments, address = _moved(name, words, operands[1], scope)
    value = call("ldmatrix", arguments, [address])
    return assign(operands[0], value if operands[0].startswith("{") else f"{value}.x[0]", scope)


def store(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`stmatrix.sync.aligned.m8n8.x2.shared.b16 [row], {a, b};`"""
    expect(name, operands, 2)
    arguments, address = _moved(name, words, operands[0], scope)
    return call("stmatrix", arguments, [address, vector("b32", operands[1], scope)]) + ";"


def _moved(name: str, words: list[str], address: str, scope: Scope) -> tuple[list[str], str]:
    """How many matrices, whether transposed; where this lane's row is."""
    counts = [word for word in words if word in ("x1", "x2", "x4")]
    known = names("sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16")
    if len(counts) != 1 or not known.issuperset(words) or not {"m8n8", "b16"} <= set(words):
        raise Unknown(name)
    space = "shared" if {"shared", "shared::cta"} & set(words) else "generic"
    return [counts[0][1:], "true" if "trans" in words else "false"], scope.place(space, address)


def move(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`movmatrix.sync.aligned.m8n8.trans.b16 d, a;`"""
    expect(name, operands, 2, words == ["sync", "aligned", "m8n8", "trans", "b16"])
    return assign(operands[0], f"{P}movmatrix({scope.value(operands[1])})", scope)


_WMMA = names("m16n16k16 m32n8k16 m8n32k16")


def whole_warp(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`wmma.load.a.sync.aligned.row.m16n16k16.shared.f16`, `wmma.mma`, `wmma.store.d`, of 16-bit elements."""
    step, words = words[0], [word for word in words[1:] if word not in ("sync", "aligned")]
    shape = next((word for word in words if word in _WMMA), None)
    if shape is None:
        raise Unknown(name)
    m, n, k = re.findall(r"\d+", shape)
    if step == "mma":
        kinds = words[words.index(shape) + 1 :]
        halves = len(kinds) == 2 and {*kinds} <= {"f16", "f32"}  # only D and C are named
        expect(name, operands, 4, halves or kinds == ["f32", "bf16", "bf16", "f32"])
        fragments = [vector("b32", each, scope) for each in operands[1:]]
        factors = "f16" if halves else "bf16"
        value = call("wmma_mma", [m, n, k, P + kinds[0], P + factors, P + kinds[-1]], fragments)
        return assign(operands[0], value, scope)
    which, layout, *rest = words
    kind = rest[-1]
    spaces = [word for word in rest if word not in (shape, kind)]
    known = step in ("load", "store") and layout in ("row", "col") and kind in ("f16", "bf16", "f32")
    if not known or spaces not in ([], ["global"], ["shared"], ["shared::cta"]):
        raise Unknown(name)
    rows, columns = {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}[which]
    place, fragment = (operands[1], operands[0]) if step == "load" else (operands[0], operands[1])
    address = scope.place("shared" if spaces and spaces[0].startswith("shared") else "generic", place)
    stride = scope.value(operands[2]) if operands[2:] else columns if layout == "row" else rows
    arguments = [rows, columns, "true" if layout == "row" else "false", P + kind, str(len(elements(fragment)))]
    if step == "load":
        return assign(fragment, call("wmma_load", arguments, [address, stride]), scope)
    return call("wmma_store", arguments, [address, vector("b32", fragment, scope), stride]) + ";"


_WGMMA_TYPES = {**dict.fromkeys(("f16", "bf16"), 16), "tf32": 8, **dict.fromkeys(("e4m3", "e5m2", "s8", "u8"), 32)}


def multiply_async(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {d, …}, a, b, p, 1, 1, 0, 1;`, its fence, commit and wait."""
    if words == ["fence", "sync", "aligned"]:
        return "simt_products_fence();"
    if words == ["commit_group", "sync", "aligned"]:
        return "simt_products_commit();"
    if words == ["wait_group", "sync", "aligned"]:
        expect(name, operands, 1)
        return f"simt_products_wait({scope.value(operands[0])}, __LINE__);"
    match = re.fullmatch(r"m64n(\d+)k(\d+)", words[3]) if len(words) in (7, 8) else None
    if not match or words[:3] != ["mma_async", "sync", "aligned"] or words[7:] not in ([], ["satfinite"]):
        raise Unknown(name)
    result, a, b = words[4:7]
    n, k = map(int, match.groups())
    sums = {"s32"} if a in ("s8", "u8") else {"f32", "f16"} if a not in ("bf16", "tf32") else {"f32"}
    if _WGMMA_TYPES.get(a) != k or b not in names(_PARTNERS.get(a, a)) or result not in sums or n % 8 or n > 256:
        raise Unknown(name)
    in_registers = operands[1].startswith("{")
    turns = 0 if k != 16 else 1 if in_registers else 2
    expect(name, operands, 4 + (0 if result == "s32" else 2) + turns)
    out = elements(operands[0])
    keeps = operands[3] if operands[3] in ("0", "1") else scope.variable(operands[3])
    fields = [f".a_in_registers = {str(in_registers).lower()}", f".keeps = (bool){keeps}"]
    flags = [int(each) for each in operands[4:]]
    if result == "f16":
        fields.append(".at_once = true")
    if result != "s32":
        fields += [f".negated_a = {str(flags[0] < 0).lower()}", f".negated_b = {str(flags[1] < 0).lower()}"]
    if turns:
        transposed = dict(zip(("b",) if in_registers else ("a", "b"), flags[2:], strict=True))
        fields += [f".transposed_{which} = {'true' if turned else 'false'}" for which, turned in transposed.items()]
    lines = ["simt::Product product{};", f"product.num_out = {len(out)};"]
    lines += [f"product.out[{i}] = &{scope.variable(each)};" for i, each in enumerate(out)]
    if in_registers:
        lines += [f"product.fragment[{i}] = {scope.variable(each)};" for i, each in enumerate(elements(operands[1]))]
    else:
        lines.append(f"product.a = {scope.variable(operands[1])};")
    lines.append(f"product.b = {scope.variable(operands[2])};")
    lines += [f"product{each};" for each in fields]
    if words[7:]:
        lines.append("product.saturates = true;")
    return "{ " + " ".join(lines) + f" {P}wgmma<{n}, {P}{result}, {P}{a}, {P}{b}>(product); }}"


MATRIX: dict[str, Instruction] = {
    "mma": multiply,
    "ldmatrix": load,
    "stmatrix": store,
    "movmatrix": move,
    "wgmma": multiply_async,
    "wmma": whole_warp,
}
