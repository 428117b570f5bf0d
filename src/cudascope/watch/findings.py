"""The findings of the runtime in words, and as SARIF 2.1.0 (OASIS), which code hosts and editors show."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from cudascope.cpp.variables import element_bytes
from cudascope.cpu.abi import ERROR, WAITER, Access, Collective, Space
from cudascope.cpu.executable import Executable
from cudascope.cpu.library import Library, SharedArray
from cudascope.cpu.memory import Memory
from cudascope.cpu.rules import RULES, FindingKind


class MissingBarrier(NamedTuple):
    """A barrier whose lack makes a race: `name` belongs into `file`, after line `after` and before line `before`.

    In a loop line `before` may come first in the file: the barrier belongs to the end of a turn.
    """

    name: str
    file: str
    after: int
    before: int

    def __str__(self) -> str:
        if self.after == self.before:
            times = f"between two executions of line {self.after}, or between its read and its write"
            return f"{self.name} belongs {times}. {_TOGETHER}"
        if self.after > self.before:
            return f"{self.name} belongs after line {self.after}, before line {self.before} is executed again"
        return f"{self.name} belongs between lines {self.after} and {self.before}"


class Finding(RuntimeError):
    """A finding in a kernel, and its place in the source. `str` gives all of it. `sentence` leaves out the place.

    kernel, file, line: where in the source      thread_block, thread: as (x, y, z)
    other_file, other_line: the place of the other thread in a race or at a barrier; "" and 0 for other findings
    tensor, element: the tensor or shared array and the element in it, if memory is concerned
    what: "out of bounds", "misaligned", "race", "barrier", "deadlock", "lane", "uninitialised", "argument", "copy",
          "assertion", "fault", "not supported"
    rule: the rule of that family that was broken (cpu/rules.py)
    count: how often, under `cudascope.check(stop=False)`; thread and element are the first's
    barrier: of a race in a thread block, the MissingBarrier; None if a line is not known, or if threads of several
             thread blocks race there, too
    others: the races that this barrier would end as well
    apart: of a race, the farthest threads: 0 in one warp, 1 in one thread block, 2 in several
    """

    def __init__(
        self,
        sentence: str,
        *,
        kernel: str,
        what: str,
        rule: str,
        file: str,
        line: int,
        code: str = "",
        other_file: str = "",
        other_line: int = 0,
        thread_block: tuple[int, int, int] = (0, 0, 0),
        thread: tuple[int, int, int] = (0, 0, 0),
        tensor: str | None = None,
        element: int | None = None,
        count: int = 1,
        barrier: MissingBarrier | None = None,
        apart: int = 0,
    ) -> None:
        at = f", line {line}" + (f" `{code}`" if code else f" of {os.path.basename(file)}") if line else ""
        self._at, self._did, self._alone = f"{kernel}{at}: ", sentence, barrier
        self.kernel, self.what, self.rule, self.apart = kernel, what, rule, apart
        self.file, self.line, self.other_file, self.other_line = file, line, other_file, other_line
        self.thread_block, self.thread, self.tensor, self.element = thread_block, thread, tensor, element
        self.count = count
        self._name(())

    def _name(self, others: "Sequence[Finding]") -> None:
        """Write the sentence, with the barrier that ends this race and the races of `others`."""
        self.others, self.barrier, self.sentence = tuple(others), self._alone, self._did
        if self.barrier:
            stronger = max((each._alone.name for each in (self, *others)), key=_BY_STRENGTH.index)
            self.barrier = self.barrier._replace(name=stronger)
            self.sentence += f": a {self.barrier}"
        pairs = ", ".join(f"{each.tensor} in lines {each.other_line} and {each.line}" for each in others)
        self.sentence += f"{_ALSO}{pairs}" if others else ""
        self.args = (self._at + self.sentence,)

    def alone(self) -> "Finding":
        """This finding without its `others`."""
        return self.with_others(())

    def with_others(self, others: "Sequence[Finding]") -> "Finding":
        """A copy of this finding that names the other races which its barrier would end."""
        copy = Finding.__new__(Finding)
        copy.__dict__ |= self.__dict__
        copy._name(others)
        return copy

    @property
    def place(self) -> tuple:
        """The key that equal findings share: the rule and the lines. The lines of a race count in either order."""
        lines = (self.file, self.line), (self.other_file, self.other_line)
        return self.kernel, self.rule, frozenset(lines) if self.what == "race" else lines


_ALSO = ". The barrier would also end the races on "
_TOGETHER = "Where several threads update one element, an atomic belongs there instead"
_BY_STRENGTH = ["__syncwarp()", "__syncthreads()"]

# by Access
_READS, _READ, _ACCESS = ("reads", "writes", "updates"), ("read", "written", "updated"), ("read", "write", "update")
_COLLECTIVES = (
    "__shfl_sync, __shfl_up_sync, __shfl_down_sync, __shfl_xor_sync, __ballot_sync, __any_sync, __all_sync, vote.uni, "
    "__match_any_sync, __match_all_sync, __reduce, __syncwarp, __syncthreads, the grid's barrier, bar.sync, "
    "a cuda::barrier, a group's exchange, a matrix product, a load or store of a matrix, an mbarrier"
)
_SHOWN = _COLLECTIVES.split(", ")  # by Collective
_BARRIERS = {Collective.SYNCTHREADS, Collective.SYNCGRID, Collective.NUMBERED, Collective.PHASE, Collective.MBARRIER}

_NO_BARRIER, _NO_ORDER = " with no barrier between", ", and nothing orders the two thread blocks"
_PASS_ON = (
    ": to pass data on by a flag or a counter, call __threadfence() after the write, and then __syncthreads() if "
    "another thread sets the flag"
)
_IN_SEVERAL = ". Threads of several thread blocks race there, too, which no barrier of a thread block orders"
_NO_WRITER = "no thread changes the value, or the thread that would change it waits too"
_NO_CHANGE = "no step of the loop changes a value, and no other thread does"
_HINT = " (if a pointer in a struct or a table leads there, name the memory with cudascope.reachable())"
_REMEDY = "if a pointer in a struct or a table leads to it, cudascope.reachable() must name"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """`findings`, each place once and with the sum of the counts, in their order.

    Of several races at a place, the one whose threads are farthest apart stays: its barrier ends them all.
    """
    found: dict[tuple, Finding] = {}
    for finding in findings:
        first = found.setdefault(finding.place, finding)
        if first is finding:
            continue
        kept, count = max(first, finding, key=lambda each: each.apart), first.count + finding.count
        found[finding.place], kept.count = kept, count
    return list(found.values())


def error_of(
    executable: Executable,
    error: ERROR,
    library: Library,
    memory: Memory,
    shared: list[SharedArray],
    checked: bool,
) -> Finding:
    """Describe a finding in a launch of an executable with thread blocks of this size, in words."""
    waits = error.finding in (FindingKind.DEADLOCK, FindingKind.SPIN, FindingKind.HANG)
    waiters = error.waiters[: error.num_waiters] if waits else []
    lines = {0: ("", 0)} | executable.located(
        library, [error.site, error.other_site, error.barrier_site, *(w.site for w in waiters)]
    )
    hint = ""
    if error.space == Space.GLOBAL:
        moved = memory.moved_from(error.address)
        hint = f" (argument {moved} has moved from there: {_REMEDY} {moved} too)" if moved else _HINT
    place, tensor, element = f"address {error.address:#x}, which belongs to no tensor of this launch{hint}", None, None
    sizes = {} if executable.ptx and executable.ptx.is_quoted else element_bytes(executable.source.read())
    region = error.region if error.region >= 0 else memory.region_beside(error.address)
    if error.region >= 0 and error.space == Space.SHARED:
        array = shared[error.region]
        tensor, element = array.name, error.offset // sizes.get(array.name, error.bytes)
        place = f"{tensor}[{element}] (byte {error.offset} of the {array.bytes} of this shared array)"
    elif error.region >= 0 and error.space == Space.OTHER:
        variable = library.objects[error.region]
        size = sizes.get(variable.name, error.bytes)
        tensor, element = variable.name, error.offset // size
        side = "before its first element" if element < 0 else f"past its end ({variable.bytes // size} elements)"
        place = f"{tensor}[{element}], {side}"
    elif error.finding == FindingKind.OUT_OF_BOUNDS and error.text:
        place = error.text.decode()
    elif error.space == Space.OTHER:
        place = "a local variable"
    elif region >= 0:
        offset = error.offset if error.region >= 0 else error.address - memory.regions[region][0]
        tensor, element, place = memory.element_at(region, offset)
    block, thread, other_block = _dim(error.block), _dim(error.thread), _dim(error.other_block)
    other_file, other_line = lines[error.other_site]
    polls = _polls(error, place if tensor else "")
    rule = RULES[error.finding]
    did = rule.sentence.format(
        verb=_READS[error.access],
        place=place,
        bytes=error.bytes,
        lane=error.lane,
        other=_dim(error.other_thread),
        waiting=error.num_waiters,
        other_function=_SHOWN[error.waiters[1].collective],
        other_verb=_READ[error.other_access],
        other_line=other_line,
        other_access=_ACCESS[error.other_access],
        function=_SHOWN[error.waiters[0].collective],
        mask=f"{error.waiters[0].mask:#010x}",
        other_mask=f"{error.waiters[1].mask:#010x}",
        stuck=error.text.decode() or ": the thread block cannot go on",
        other_block=f" of thread block {other_block}" if other_block != block else "",
        unordered=_NO_BARRIER if other_block == block else _NO_ORDER,
        remedy="" if other_block == block else _PASS_ON,
        polls=polls,
        hang=f". The thread {polls}: {_NO_WRITER}" if error.address else "",
        no_writer=_NO_WRITER if error.address else _NO_CHANGE,
        check="" if checked else ": run it under cudascope.check(), which names the access",
        text=error.text.decode(errors="replace"),
        tensor=tensor,
    )
    barrier = _missing_barrier(error, lines) if error.finding == FindingKind.RACE else None
    if error.finding == FindingKind.RACE and error.apart == 2:
        did += _IN_SEVERAL if other_block == block else ""
        did += f". {_TOGETHER}" if lines[error.site] == lines[error.other_site] else ""
    did += "".join(f"\n  {who}" for who in _waiting(waiters, lines))
    # A thread may be stopped in a call stub, which belongs to no line.
    sites = [error.site, *(w.site for w in waiters)]
    site = next((site for site in sites if lines[site][1]), error.site)
    file, line = lines[site]
    return Finding(
        f"thread {thread} of thread block {block} {did}",
        kernel=executable.name,
        what=rule.what,
        rule=rule.name,
        file=file,
        line=line,
        code=executable.quoted(library, site, file, line),
        other_file=other_file,
        other_line=other_line,
        thread_block=block,
        thread=thread,
        tensor=tensor,
        element=element,
        count=error.count,
        barrier=barrier,
        apart=error.apart,
    )


def _missing_barrier(error: ERROR, lines: Mapping[int, tuple[str, int]]) -> MissingBarrier | None:
    """The barrier that a race within a thread block lacks; None for other races, and if the lines are in two files.

    Both accesses come after the last barrier, so of two lines the one that comes first after it, in a loop too, is the
    earlier.
    """
    (file, line), (other_file, other_line) = lines[error.site], lines[error.other_site]
    if error.apart == 2 or file != other_file or not (line and other_line):
        return None
    barrier_file, last = lines[error.barrier_site]
    last = last if barrier_file == file else 0
    after, before = sorted((line, other_line), key=lambda each: (each <= last, each))
    return MissingBarrier(_BY_STRENGTH[error.apart], file, after, before)


def _polls(error: ERROR, place: str) -> str:
    """Say how a thread waits in a loop, and for the value in which `place`, if that is known."""
    if not error.address:
        return "repeats a loop"
    if error.access == Access.ATOMIC:
        return f"repeats an atomic on {place}" if place else "repeats an atomic"
    return f"polls the volatile {place}" if place else "polls a volatile variable"


def _waiting(waiters: Sequence[WAITER], lines: Mapping[int, tuple[str, int]]) -> Iterator[str]:
    """Say which threads wait at which line. Threads at one line of one function are counted together."""
    groups: dict[str, list[WAITER]] = {}
    for w in waiters:
        mask = "" if w.collective in _BARRIERS else f" with mask {w.mask:#010x}"
        doing = ", running" if w.running else f" in {_SHOWN[w.collective]}{mask}"
        line = w.line or lines[w.site][1]
        where = f"in line {line}" if line else "in a call" if w.site else "at its start"
        groups.setdefault(where + doing, []).append(w)
    for where, group in groups.items():
        others = sum(w.count for w in group) - 1
        yield f"thread {_dim(group[0].thread)}{f' and {others} more' if others else ''} {where}"


def _dim(dim: object) -> tuple[int, int, int]:
    return dim.x, dim.y, dim.z


SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif_log(findings: Sequence[Finding], summaries: dict[str, str]) -> dict:
    """A SARIF log of one run. `summaries`: by the name of each rule there is, what it says."""
    names = list(summaries)
    rules = [
        {"id": _id(name), "name": "".join(map(str.capitalize, name.split())), "shortDescription": {"text": summary}}
        for name, summary in summaries.items()
    ]
    other = "the other thread"
    results = [
        {
            "ruleId": _id(found.rule),
            "ruleIndex": names.index(found.rule),
            "level": "error",
            "message": {"text": f"{found.kernel}: {found.sentence}"},
            "locations": [_location(found.file, found.line)],
            "relatedLocations": [_location(found.other_file, found.other_line, other)] * bool(found.other_line),
            "occurrenceCount": found.count,
        }
        for found in findings
    ]
    driver = {"name": "cudascope", "rules": rules}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _location(file: str, line: int, message: str = "") -> dict:
    physical: dict = {"artifactLocation": {"uri": uri(file)}}
    if line:
        physical["region"] = {"startLine": line}
    return {"physicalLocation": physical} | ({"message": {"text": message}} if message else {})


def uri(file: str) -> str:
    """Relative to the current folder where the file lies in it, as code hosts want it."""
    path = Path(file).absolute()
    if path.is_relative_to(Path.cwd()):
        return quote(os.fsencode(path.relative_to(Path.cwd())))
    return path.as_uri()


def _id(name: str) -> str:
    return name.replace(" ", "-")
