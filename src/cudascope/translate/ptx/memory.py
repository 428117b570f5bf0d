"""PTX instructions on memory: loads and stores, atomics, addresses, asynchronous copies, what only hints at caches.

ld.global.nc.v4.f32 {a, b, c, d}, [p + 16];
"""

from cudascope.translate.ptx.bulk import copy_bulk, reduce_bulk
from cudascope.translate.ptx.calls import (
    HALVES,
    SCALARS,
    Instruction,
    always,
    assign,
    call,
    elements,
    expect,
    in_scope,
    names,
    vector,
)
from cudascope.translate.ptx.scope import Malformed, P, Scope, Unknown

_SPACES = {"global": "generic", "const": "generic", "local": "local", "shared": "shared", "shared::cta": "shared"}
_STRONG = names("relaxed acquire release acq_rel mmio")
_HINTS = _STRONG | names("weak volatile nc ca cg cs lu cv wb wt cta cluster gpu sys noftz v2 v4 v8")
_TYPES = names(f"b8 u8 s8 b128 {SCALARS} {HALVES}")
_PARAMETERS = names("param param::entry param::func")
_ATOMICS = {
    "add": names(f"u32 s32 u64 s64 f32 f64 {HALVES}"),
    **dict.fromkeys(("min", "max"), names(f"u32 s32 u64 s64 {HALVES}")),
    **dict.fromkeys(("inc", "dec"), names("u32")),
    **dict.fromkeys(("and", "or", "xor", "exch"), names("b32 b64")),
    "cas": names("b16 b32 b64"),
}  # the types of each operation


def _address(words: list[str], written: str, scope: Scope) -> str:
    return scope.place(next((_SPACES[word] for word in words if word in _SPACES), "generic"), written)


def _check(name: str, words: list[str], allowed: frozenset[str]) -> None:
    *rest, kind = words or [""]
    known = _HINTS | _SPACES.keys() | allowed
    if kind not in _TYPES or not all(word in known or word.startswith(("L1::", "L2::")) for word in rest):
        raise Unknown(name)
    if kind == "b128" and _STRONG & set(rest):  # an atomic of the CPU has 8 bytes at most
        raise Unknown(name)


def _ordered(words: list[str], statement: str) -> str:
    """The access with the fence that its order asks for, in the scope that it names."""
    if {"release", "acq_rel"} & set(words):
        statement = f"simt_fence(); {statement}"
    if {"acquire", "acq_rel"} & set(words):
        statement = f"{statement} simt_acquire();"
    return in_scope(words, statement)


def load(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`ld.global.v2.f32 {a, b}, [p];`; a cache policy may follow."""
    _check(name, words, _PARAMETERS)
    expect(name, operands, 3 if len(operands) == 3 else 2)
    kind, target, address = words[-1], operands[0], _address(words, operands[1], scope)
    count = len(elements(target))
    if _PARAMETERS & set(words):  # no access to memory that is watched
        value = f"{P}parameter<{P}Vector<{P}{kind}, {count}>>({address})"
    else:
        function = "load_strong" if _STRONG & set(words) else "load"
        value = call(function, [P + kind, str(count), *["true"] * ("volatile" in words)], [address])
    return _ordered(words, assign(target, value if target.startswith("{") else f"{value}.x[0]", scope))


def store(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`st.shared.v2.b32 [p], {a, b};`"""
    _check(name, words, _PARAMETERS)
    expect(name, operands, 3 if len(operands) == 3 else 2)
    kind, source = words[-1], operands[1]
    if _PARAMETERS & set(words):
        return f"{P}set_parameter({_address(words, operands[0], scope)}, {vector(kind, source, scope)});"
    function = "store_strong" if _STRONG & set(words) else "store"
    sources = [_address(words, operands[0], scope), vector(kind, source, scope)]
    arguments = [P + kind, str(len(elements(source))), *["true"] * ("volatile" in words)]
    return _ordered(words, call(function, arguments, sources) + ";")


def atomic(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`atom.global.add.f32 old, [p], x;`, and `red`, which returns nothing."""
    _check(name, words, frozenset(_ATOMICS))
    operation = next((word for word in words if word in _ATOMICS), None)
    if operation is None or words[-1] not in _ATOMICS[operation]:
        raise Unknown(name)
    target, operands = ("_", operands) if name.startswith("red") else (operands[0], operands[1:])
    expect(name, operands, 3 if operation == "cas" else 2)
    kind = words[-1]
    sources = [_address(words, operands[0], scope), *(vector(kind, each, scope) for each in operands[1:])]
    operation += "_" if operation in ("and", "or", "xor") else ""
    arguments = [f"{P}Atomic::{operation}", P + kind, str(len(elements(operands[1])))]
    value = call("atom", arguments, sources)
    is_scalar = target != "_" and not target.startswith("{")
    return _ordered(words, assign(target, f"{value}.x[0]" if is_scalar else value, scope))


def convert_address(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`cvta.to.shared.u64 d, a;`, and back without `.to`."""
    *direction, space, size = words if len(words) > 1 else ("", "")
    known = space in (*_SPACES, "param") and size in ("u32", "u64") and direction in ([], ["to"])
    expect(name, operands, 2, known)
    if space == "local" and not direction:
        return assign(operands[0], f"(uint64_t){_address(['local'], f'[{operands[1]}]', scope)}", scope)
    function = f"cvta{'_to' * len(direction)}_shared" if _SPACES.get(space) == "shared" else "cvta_global"
    return assign(operands[0], f"{P}{function}({scope.value(operands[1])})", scope)


def is_space(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`isspacep.shared p, a;`"""
    expect(name, operands, 2, words in (["global"], ["shared"], ["shared::cta"]))
    space = words[0].partition("::")[0]
    return assign(operands[0], f"{P}is_{space}({scope.value(operands[1])})", scope)


def copy_async(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`cp.async.cg.shared.global [to], [from], 16, bytes;`, where bytes past `bytes` become 0; and its waits."""
    if words[:2] == ["async", "bulk"]:
        return copy_bulk(name, words[2:], operands, scope)
    if words[:3] == ["reduce", "async", "bulk"]:
        return reduce_bulk(name, words[3:], operands, scope)
    if words == ["async", "mbarrier", "arrive", "noinc", "shared", "b64"]:
        at = _address(["shared"], operands[0], scope)
        return f"simt_phases_await_copies({at}); simt_mbarrier_arrive({at}, 1);"
    if words == ["async", "commit_group"]:
        return "simt_copies_commit();"
    if words == ["async", "wait_all"]:
        return "simt_copies_wait_all();"
    if words == ["async", "wait_group"]:
        expect(name, operands, 1)
        return f"simt_copies_wait({scope.value(operands[0])});"
    known = words[:1] == ["async"] and words[1:2] in (["ca"], ["cg"]) and "bulk" not in words
    if not known or not all(w in ("shared", "shared::cta", "global") or w.startswith("L2::") for w in words[2:]):
        raise Unknown(name)
    operands = operands[:-1] if "L2::cache_hint" in words else operands
    if len(operands) not in (3, 4):
        raise Malformed(f"{name} has 3 or 4 operands, got {len(operands)}")
    to, source = _address(["shared"], operands[0], scope), _address(["global"], operands[1], scope)
    size = scope.value(operands[2])
    return f"{P}copy_async({to}, {source}, {size}, {scope.value(operands[3]) if operands[3:] else size});"


def policy(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`createpolicy.fractional.L2::evict_first.b64 d;`: the caches of the CPU take no advice."""
    return f"{scope.variable(operands[0])} = 0;"


MEMORY: dict[str, Instruction] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "cvta": convert_address,
    "isspacep": is_space,
    "cp": copy_async,
    "createpolicy": policy,
    **dict.fromkeys(("prefetch", "prefetchu", "applypriority", "discard", "griddepcontrol", "pmevent"), always(";")),
    **dict.fromkeys(("setmaxnreg", "brkpt"), always(";")),
}
