"""PTX instructions of Hopper's asynchronous machinery: mbarrier, tensormap, bulk copies.

mbarrier.try_wait.parity.shared::cta.b64 complete, [bar], parity;
cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [to], [map, {x, y}], [bar];
cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [map, {x, y}], [from];
"""

import re
from collections.abc import Iterable

from cudascope.translate.ptx.calls import Instruction, assign, elements, expect
from cudascope.translate.ptx.scope import Malformed, P, Scope, Unknown

_SPACES = {"shared", "shared::cta", "shared::cluster"}
_ORDERS = {"release", "acquire", "relaxed", "cta", "cluster"}
_HINT = "L2::cache_hint"


def _shared(written: str, scope: Scope) -> str:
    return scope.place("shared", written)


def mbarrier(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`mbarrier.init`, `inval`, `expect_tx`, `arrive`, `arrive.expect_tx`, `try_wait`, `test_wait`."""
    is_generic = not _SPACES & set(words)
    words = [word for word in words if word not in _SPACES | _ORDERS]
    if is_generic or words[-1:] != ["b64"]:
        raise Unknown(name)
    match words[:-1]:
        case ["init"]:
            expect(name, operands, 2)
            return f"simt_phases_init({_shared(operands[0], scope)}, {scope.value(operands[1])});"
        case ["inval"]:
            expect(name, operands, 1)
            return f"simt_mbarrier_invalidate({_shared(operands[0], scope)});"
        case ["expect_tx"]:
            expect(name, operands, 2)
            return f"simt_mbarrier_expect({_shared(operands[0], scope)}, {scope.value(operands[1])});"
        case ["arrive", *expects] if expects in ([], ["expect_tx"]):
            target, operands = (operands[0], operands[1:]) if not operands[0].startswith("[") else ("_", operands)
            at, given = _shared(operands[0], scope), scope.value(operands[1]) if operands[1:] else "1"
            if not expects:
                return assign(target, f"simt_mbarrier_arrive({at}, {given})", scope)
            expect(name, operands, 2)
            return f"simt_mbarrier_expect({at}, {given}); {assign(target, f'simt_mbarrier_arrive({at}, 1)', scope)}"
        case ["try_wait" | "test_wait" as how, *rest] if rest in ([], ["parity"]):
            if len(operands) not in (3, 4):
                raise Malformed(f"{name} has 3 or 4 operands, got {len(operands)}")
            # the lowest bit is the parity; Triton writes -1 for 1, and the state that arrive() gives is a number
            at, phase = _shared(operands[1], scope), f"(uint32_t)({scope.value(operands[2])}) & 1"
            waits = "true" if how == "try_wait" else "false"
            return assign(operands[0], f"simt_mbarrier_ended({at}, {phase}, {waits})", scope)
    raise Unknown(name)


_FIELDS = {"global_address": "address", "rank": "last_dim", "elemtype": "type", "box_dim": "box", "global_dim": "size"}
_FIELDS |= {"global_stride": "stride", "element_stride": "element_stride", "swizzle_mode": "swizzle"}
_FIELDS |= {"interleave_layout": "interleave", "fill_mode": "fill"}


def tensormap(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [map], 0x0, size;`, `tensormap.cp_fenceproxy`."""
    if words[:1] == ["cp_fenceproxy"]:
        expect(name, operands, 3)
        source = _either(name, words[2:], operands[1], scope)
        return f"{P}publish_map({scope.place('generic', operands[0])}, {source});"
    if words[:2] != ["replace", "tile"] or len(words) != 6 or words[2] not in _FIELDS or words[4] != "b1024":
        raise Unknown(name)
    place, field = _either(name, words[3:4], operands[0], scope), _FIELDS[words[2]]
    has_index = field in ("box", "size", "stride", "element_stride")
    expect(name, operands, 2 + has_index)
    index = f"[{int(operands[1], 0)}]" if has_index else ""
    return f"{P}set_field(&((simt::TensorMap*)({place}))->{field}{index}, {scope.value(operands[-1])});"


def _either(name: str, words: list[str], written: str, scope: Scope) -> str:
    """An address in shared memory may be written in 64 bits: its lower half counts."""
    if not _SPACES & set(words[:1]) and words[:1] not in ([], ["global"]):
        raise Unknown(name)
    return scope.place("map" if _SPACES & set(words[:1]) else "generic", written)


def copy_bulk(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`cp.async.bulk`, with or without `.tensor`, its commit and its wait. `words` are those after it."""
    if words == ["commit_group"]:
        return "simt_bulk_commit();"
    if words in (["wait_group"], ["wait_group", "read"]):
        expect(name, operands, 1)
        return f"simt_bulk_wait({scope.value(operands[0])});"
    if words[:1] == ["prefetch"]:
        return ";"
    return _copy(name, words, operands, scope)


_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_TYPES = {"b32": 2, "u32": 2, "s32": 3, "b64": 4, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 9, "bf16": 10}
"""The number that a tensor map has for a type (PTX: tensormap.replace.elemtype)."""


def reduce_bulk(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`cp.reduce.async.bulk`, with or without `.tensor`. `words` are those after it."""
    operation = next((word for word in words if word in _OPERATIONS), None)
    words = [word for word in words if word not in (operation, "noftz")]
    if operation is None:
        raise Unknown(name)
    function = operation + "_" * (operation in ("and", "or", "xor"))
    fields = [f"copy.combine = {P}combine<{P}Atomic::{function}>;"]
    if words[:1] != ["tensor"]:
        if words[-1] not in _TYPES:
            raise Unknown(name)
        fields.append(f"copy.map.type = {_TYPES[words.pop()]};")
    return _copy(name, words, operands, scope, fields)


def _copy(name: str, words: list[str], operands: list[str], scope: Scope, fields: Iterable[str] = ()) -> str:
    """A copy with these fields besides its places."""
    dims, gathers = 0, False
    if words[:1] == ["tensor"]:
        match = re.fullmatch(r"([1-5])d", words[1]) if words[1:] else None
        if not match:
            raise Unknown(name)
        gathers = bool({"tile::gather4", "tile::scatter4"} & set(words))
        modes = ("tile", "tile::gather4", "tile::scatter4")
        dims, words = int(match[1]), [word for word in words[2:] if word not in modes]
    operands = operands[:-1] if _HINT in words else operands
    words = [word for word in words if word != _HINT]
    loads = len(words) == 3 and words[0] in _SPACES and words[1:] == ["global", "mbarrier::complete_tx::bytes"]
    stores = len(words) == 3 and words[0] == "global" and words[1] in _SPACES and words[2] == "bulk_group"
    known = (loads or stores) and not (loads and fields) and not (gathers and dims != 2)
    expect(name, operands, 3 - stores + (dims == 0), known)
    shared, other = (operands[0], operands[1]) if loads else (operands[1], operands[0])
    lines = ["simt::BulkCopy copy{};", *fields, f"copy.shared = {_shared(shared, scope)};"]
    lines += [f"copy.rank = {dims}; copy.to_global = {'true' if stores else 'false'};"]
    if dims:
        match = re.fullmatch(r"\[\s*([^,\]]+),\s*(\{[^}]*\})\s*\]", other)
        if not match or len(elements(match[2])) != (5 if gathers else dims):
            raise Malformed(f"a place in a tensor of rank {dims} is written [map, {{x, …}}], got {other}")
        lines.append(f"copy.gathers = {str(gathers).lower()};")
        lines.append(f"copy.map = {P}map_at({scope.value(match[1].strip())});")
        lines += [f"copy.at[{i}] = {scope.value(each)};" for i, each in enumerate(elements(match[2]))]
    else:
        lines.append(f"copy.global = {scope.place('generic', other)};")
        lines.append(f"copy.bytes = {scope.value(operands[2])};")
    lines.append(f"simt_bulk_load(&copy, {_shared(operands[-1], scope)});" if loads else "simt_bulk_store(&copy);")
    return f"{{ {' '.join(lines)} }}"


BULK: dict[str, Instruction] = {"mbarrier": mbarrier, "tensormap": tensormap}
