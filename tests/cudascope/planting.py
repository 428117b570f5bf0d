"""Mistakes planted in the text of PTX: one build executes the kernel with each of them.

    mistakes = removals(ptx) + wrong_operands(ptx)
    with triton_compiled("sm_90", edit=lambda ptx: planted(ptx, mistakes)):
        with mistake(3):
            kernel[grid](...)

g++ needs seconds for each new text. `planted` therefore puts every mistake beside its instruction, behind a branch on
a number. The kernel reads the number at a fixed address when it starts, so the text is the same in every process. With
number 0 the kernel makes no mistake.
"""

import contextlib
import ctypes
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cudascope import Finding, check, reachable, time_limit

ADDRESS = 0x5CA1AB1E000  # of the number
EVERY = 8  # of the many instructions on fragments, one of so many gets a mistake
MARK, MEMORY = -1, "memory_of_mistakes"
_FIXED = 0x100000  # MAP_FIXED_NOREPLACE: fail rather than replace other memory


class Mistake(NamedTuple):
    """`instead` takes the place of the instruction at `start` of the text."""

    start: int
    end: int
    instruction: str
    name: str
    instead: str

    def line(self, ptx: str) -> int:
        return ptx.count("\n", 0, self.start) + 1


def instructions(ptx: str, name: str) -> Iterator[re.Match]:
    """The instructions whose name matches the regular expression `name`. Groups: predicate, name, operands."""
    return re.finditer(rf"^[ \t]*(@!?%\w+\s+)?({name})(?![\w:])((?:\.[\w:]+)*[^;]*);", ptx, re.MULTILINE)


def changed(ptx: str, instruction: str, name: str, instead: str = "") -> list[Mistake]:
    """A mistake `name` for each instruction. In `instead`, {all} is the instruction and {0}, {1} its operands."""
    found = []
    for match in instructions(ptx, instruction):
        text = " ".join(match[0].rstrip(";").split())
        start = match.start() + len(match[0]) - len(match[0].lstrip())
        replaced = instead.format(*operands_of(match[3]), all=text)
        found.append(Mistake(start, match.end(), text, name, replaced))
    return found


def operands_of(written: str) -> list[str]:
    """`.x4 {a, b}, [p];` gives `{a, b}` and `[p]`."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", re.sub(r"^\S*", "", written, count=1))
    return [part.strip() for part in parts]


def planted(ptx: str, mistakes: Sequence[Mistake]) -> str:
    """Return `ptx` with `mistakes`, which `mistake(1)`, `mistake(2)`, … choose from. Lines keep their numbers."""
    brace = ptx.index("{", ptx.index(")", ptx.index(".entry")))
    pieces, at = [ptx[: brace + 1]], brace + 1
    pieces.append(" .reg .pred %is_right; .reg .b32 %mistake; .reg .b64 %at_mistake;")
    pieces.append(" .reg .pred %is_lane; .reg .b32 %lane; .reg .b32 %other; .reg .b64 %descriptor;")
    pieces.append(f" mov.b64 %at_mistake, {ADDRESS}; ld.global.b32 %mistake, [%at_mistake];")
    by_start: dict[int, list[tuple[int, Mistake]]] = {}
    for number, each in enumerate(mistakes, 1):
        by_start.setdefault(each.start, []).append((number, each))
    marked = meetings(ptx)
    marks = {each.start: number for number, each in enumerate(marked, 1)}
    ends = {each.start: each.end for each in [*mistakes, *marked]}
    for start, end in sorted(ends.items()):
        mark = stored_mark(marks[start], ptx[start:end]) if start in marks else ""
        is_wait = "wait" in ptx[start:end]
        pieces += [ptx[at:start], mark * (not is_wait)]
        for number, each in by_start.get(start, []):
            pieces.append(f"setp.ne.b32 %is_right, %mistake, {number}; @%is_right bra $RIGHT_{number}; ")
            pieces.append(f"{each.instead}; bra $END_{start}; $RIGHT_{number}: ")
        pieces += [f"{ptx[start:end]} $END_{start}: ", mark * is_wait]
        at = end
    return "".join([*pieces, ptx[at:]])


def stored_mark(number: int, instruction: str) -> str:
    """Store to element `number` of the memory if the thread executes `instruction`."""
    predicate = re.match(r"@(%\w+)", instruction)
    executed = f"and.pred %is_lane, %is_lane, {predicate[1]}; " if predicate else ""
    store = f"@%is_lane st.global.b32 [%at_mistake+{4 * number}], 0; "
    return f"setp.eq.b32 %is_lane, %mistake, {MARK}; {executed}{store}"


def meetings(ptx: str) -> list[Mistake]:
    """The instructions that `planted` marks: barriers, arrivals at an mbarrier, copies, products, commits and waits."""
    barriers = r"bar\.sync|bar\.warp\.sync|barrier\.sync|mbarrier\.arrive|mbarrier\.try_wait"
    copies = r"cp\.async\.c[ag]|cp\.async\.commit_group|cp\.async\.wait_group|cp\.async\.wait_all"
    products = r"wgmma\.mma_async|wgmma\.commit_group|wgmma\.wait_group"
    return changed(ptx, f"{barriers}|{copies}|{products}", "removed")


@contextlib.contextmanager
def mistake(number: int) -> Iterator[None]:
    """Kernels inside that come from `planted` make mistake `number`; 0: none.

    With MARK they make none either. Each thread then stores to element i + 1 of the memory when it comes to instruction
    i of `meetings`. A thread that waits stores after its wait.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
    if libc.mmap(ADDRESS, mmap.PAGESIZE, protection, flags, 2**64 - 1, 0) != ADDRESS:
        raise OSError(ctypes.get_errno(), "the address of the number is taken: mistakes cannot be nested")
    memory = np.frombuffer((ctypes.c_int32 * 1024).from_address(ADDRESS), np.int32)
    memory[0] = number
    try:
        with reachable(**{MEMORY: memory}):
            yield
    finally:
        libc.munmap(ADDRESS, mmap.PAGESIZE)


WAITS_AND_FENCES = (
    "bar.sync", "bar.arrive", "bar.warp.sync", "barrier.sync", "barrier.arrive",
    "cp.async.wait_group", "cp.async.wait_all", "cp.async.commit_group",
    "cp.async.bulk.commit_group", "cp.async.bulk.wait_group",
    "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "fence.proxy.async", "mbarrier.init", "mbarrier.arrive",
)  # fmt: skip


def removals(ptx: str) -> list[Mistake]:
    """Every barrier, wait, fence, commit and arrival, each left out in turn."""
    found = [each for name in WAITS_AND_FENCES for each in changed(ptx, re.escape(name), "removed")]
    found += changed(ptx, r"mbarrier\.try_wait", "removed", "mov.pred {0}, 1")
    return sorted(found)


def wrong_operands(ptx: str) -> list[Mistake]:
    """Waits for one group less, wrong parities, byte counts and descriptors, and fragments of one lane exchanged."""
    found = []
    for each in changed(ptx, r"(?:cp\.async|cp\.async\.bulk|wgmma)\.wait_group", "waits for one group less"):
        number = re.search(r"\d+$", each.instruction)
        found.append(each._replace(instead=each.instruction[: number.start()] + str(int(number[0]) + 1)))
    for each in changed(ptx, r"mbarrier\.try_wait", "waits for the other parity", "{2}"):
        parity = each.instead
        waits = re.sub(rf"{re.escape(parity)}$", "%other", each.instruction)
        found.append(each._replace(instead=f"xor.b32 %other, {parity}, 1; {waits}"))
    for each in changed(ptx, r"mbarrier\.arrive\.expect_tx", "expects one byte more", "{2}"):
        number = int(each.instead)
        found.append(each._replace(instead=each.instruction[: -len(each.instead)] + str(number + 1)))
        less = each.instruction[: -len(each.instead)] + str(number - 1)
        found.append(each._replace(name="expects one byte less", instead=less))
    for each in changed(ptx, r"wgmma\.mma_async", "", "{1}|{2}"):
        for which, register in zip("AB", each.instead.split("|"), strict=True):
            if not register.startswith("{"):
                found += wrong_descriptors(each, which, register)
    for each in changed(ptx, "ldmatrix", "a lane's fragments exchanged", "{0}")[::EVERY]:
        registers = re.findall(r"[%\w]+", each.instead)
        if len(registers) > 1:
            found.append(each._replace(instead=f"{each.instruction}; {exchanged_in_a_lane(*registers[:2])}"))
    for each in changed(ptx, r"mma\.sync", "a lane's fragments exchanged", "{1}")[::EVERY]:
        exchange = exchanged_in_a_lane(*re.findall(r"[%\w]+", each.instead)[:2])
        found.append(each._replace(instead=f"{exchange}; {each.instruction}; {exchange}"))
    return found


def wrong_descriptors(product: Mistake, which: str, register: str) -> list[Mistake]:
    """Descriptors of operand `which` (A or B) of a wgmma with another swizzle or stride: PTX ISA, 9.7.15.5.1."""
    wrong = {
        "swizzle": f"xor.b64 %descriptor, {register}, {1 << 62}",
        "stride offset": f"add.s64 %descriptor, {register}, {1 << 32}",
        "leading offset": f"add.s64 %descriptor, {register}, {1 << 16}",
    }
    instead = re.sub(rf"{re.escape(register)}\b", "%descriptor", product.instruction)
    return [
        product._replace(name=f"wrong {field} of {which}", instead=f"{code}; {instead}")
        for field, code in wrong.items()
    ]


def exchanged_in_a_lane(one: str, other: str, lane: int = 2) -> str:
    moves = f"@%is_lane mov.b32 %other, {one}; @%is_lane mov.b32 {one}, {other}; @%is_lane mov.b32 {other}, %other"
    return f"mov.u32 %lane, %laneid; setp.eq.u32 %is_lane, %lane, {lane}; {moves}"


class Outcome(NamedTuple):
    """How a launch with a mistake ended: the rules that `check` found broken, and whether the result was right."""

    findings: tuple[Finding, ...]
    is_right: bool

    @property
    def seen(self) -> str:
        """One of "found", "wrong result" and "survived"."""
        return "found" if self.findings else "survived" if self.is_right else "wrong result"


def outcome(
    number: int, run: Callable[[], Sequence[np.ndarray]], expected: Sequence[np.ndarray], seed: int | None
) -> Outcome:
    """Run a planted kernel under `check` with mistake `number`. `expected`: the results without a mistake."""
    with mistake(number), time_limit(5), check(stop=False, ignore=("same value",), schedule=seed) as report:
        try:
            results = run()
        except Finding as finding:
            return Outcome((*report.findings, finding), False)
    same = all(np.array_equal(*map(np.asarray, pair), equal_nan=True) for pair in zip(results, expected, strict=True))
    return Outcome(tuple(report.findings), same)
