"""PTX instructions about threads: who they are, where they wait for each other, what the lanes of a warp exchange."""

import re

from cudascope.translate.ptx.calls import Instruction, always, assign, call, expect, flags, in_scope
from cudascope.translate.ptx.scope import P, Scope, Unknown


def shuffle(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`shfl.sync.bfly.b32 d|p, a, b, bounds, mask;`"""
    expect(name, operands, 5, words in [["sync", how, "b32"] for how in ("idx", "up", "down", "bfly")])
    value = call("shfl", [f"{P}Shuffle::{words[1]}"], _values(operands, scope))
    return assign(operands[0], _one(operands[0], value), scope)


def vote(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`vote.sync.ballot.b32 d, p, mask;`, `vote.sync.any.pred q, p, mask;`"""
    known = (["sync", "ballot", "b32"], *(["sync", each, "pred"] for each in ("any", "all", "uni")))
    expect(name, operands, 3, words in known)
    return assign(operands[0], f"{P}vote_{words[1]}({', '.join(_values(operands, scope))})", scope)


def match(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`match.any.sync.b32 d, a, mask;`, `match.all.sync.b64 d|p, a, mask;`"""
    expect(name, operands, 3, words in [[how, "sync", bits] for how in ("any", "all") for bits in ("b32", "b64")])
    value = call(f"match_{words[0]}", [P + words[2]], _values(operands, scope))
    return assign(operands[0], _one(operands[0], value) if words[0] == "all" else value, scope)


def reduce(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`redux.sync.add.s32 d, a, mask;`, `redux.sync.max.abs.NaN.f32 d, a, mask;`"""
    if len(words) < 3 or words[0] != "sync":
        raise Unknown(name)
    _, operation, *modifiers, kind = words
    if kind == "f32":
        known = operation in ("min", "max") and {"abs", "NaN"}.issuperset(modifiers)
    else:
        kinds = ("b32",) if operation in ("and", "or", "xor") else ("u32", "s32")
        known = operation in ("add", "min", "max", "and", "or", "xor") and kind in kinds and not modifiers
    expect(name, operands, 3, known)
    arguments = [P + kind]
    if kind == "f32":
        arguments += [flags(word for word in modifiers if word == "NaN"), str("abs" in modifiers).lower()]
    return assign(operands[0], call(f"redux_{operation}", arguments, _values(operands, scope)), scope)


def elect(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`elect.sync d|p, mask;`: the lowest lane of the mask."""
    expect(name, operands, 2)
    return assign(operands[0], f"{P}elect({scope.value(operands[1])})", scope)


def active_mask(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`activemask.b32 d;`: the lanes of the warp that are at this instruction together."""
    expect(name, operands, 1)
    return assign(operands[0], "__activemask()", scope)


def barrier(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`bar.sync 0;`, `bar.sync id, threads;`, `bar.arrive id, threads;`, `bar.red.popc.u32 d, 0, p;`"""
    together = name.startswith("bar.") or "aligned" in words  # the lanes of a warp come at once
    words = [word for word in words if word not in ("cta", "aligned")]
    if words == ["warp", "sync"]:
        expect(name, operands, 1)
        return f"__syncwarp({scope.value(operands[0])});"
    if words == ["sync"] and operands == ["0"]:
        return "__syncthreads();"
    reduces = words[:1] == ["red"] and words[1:] in (["popc", "u32"], ["and", "pred"], ["or", "pred"])
    if reduces and operands[1:2] == ["0"]:
        expect(name, operands, 3)
        function = words[1].replace("popc", "count")
        return assign(operands[0], f"__syncthreads_{function}((bool){scope.value(operands[2])})", scope)
    if words not in (["sync"], ["arrive"]) or not operands:
        raise Unknown(name)
    threads = scope.value(operands[1]) if operands[1:] else "0"
    waits = "true" if words == ["sync"] else "false"
    return f"{'__syncwarp(); ' * together}simt_numbered_barrier({scope.value(operands[0])}, {threads}, {waits});"


def fence(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`fence.acq_rel.gpu;`, `membar.gl;`, `fence.proxy.async;`: writes before it are seen before those behind it."""
    kinds = ("async", "async::generic", "alias", "tensormap::generic")
    if words[:1] == ["proxy"] and words[1:2] and words[1] not in kinds:
        raise Unknown(name)
    return "simt_proxy_fence();" if words[:2] == ["proxy", "async"] else in_scope(words, "simt_fence();")


def branch(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`bra label;`"""
    expect(name, operands, 1)
    return f"goto {scope.label(operands[0])};"


def _values(operands: list[str], scope: Scope) -> list[str]:
    return [scope.value(each) for each in operands[1:]]


def _one(target: str, value: str) -> str:
    return value if "|" in target or target == "_" else f"{value}.value"


def call_function(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`call.uni (result), function, (a, b);`, and `call (result), register, (a, b), prototype;`"""
    result = operands.pop(0) if operands[:1] and operands[0].startswith("(") else "()"
    function, passed = operands[0], operands[1] if len(operands) > 1 else "()"
    if function in _LIBRARY:
        called = f"{P}device_{function.lstrip('_')}"
    elif function in scope.addresses or function in scope.names:
        called = f"(({P}Function*)(uint64_t){scope.value(function)})"
    else:
        raise Unknown(f"the function {function}")
    places = [f"(char*)({scope.addresses[each]})" for each in re.findall(r"[\w$]+", f"{result} {passed}")]
    return f"{{ char* const passed[] = {{{', '.join([*places, 'nullptr'])}}}; {called}(passed); }}"


_LIBRARY = ("vprintf", "__assertfail", "malloc", "free")  # functions of every CUDA program


THREADS: dict[str, Instruction] = {
    "shfl": shuffle,
    "vote": vote,
    "match": match,
    "redux": reduce,
    "elect": elect,
    "activemask": active_mask,
    "bar": barrier,
    "barrier": barrier,
    "membar": fence,
    "fence": fence,
    "nanosleep": always("simt_yield();"),
    "bra": branch,
    "call": call_function,
    "trap": always('simt_fail("trap");'),
    "exit": always("simt_exit();"),
}
