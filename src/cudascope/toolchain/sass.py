"""The machine code (SASS) of a kernel's loops: `kernel.loops("sm_90")`, by ptxas and nvdisasm of Triton's wheel.

A loop is a natural loop of the machine code: what the flow can come back from to the place where it enters the loop.
Loops that only wait for an mbarrier are left out, also of the loops around them.
"""

import functools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cudascope.cpp.source import CompileError
from cudascope.toolchain.flow import loops_of
from cudascope.toolchain.ptxas import PtxText, check_arch, run_ptxas, tool_of_triton

# The class of an instruction is the first whose pattern matches; the names are those of watch/instructions.py.
_CLASSES = {
    "product": r"HMMA|HGMMA|IMMA|IGMMA|QGMMA|QMMA|OMMA|BMMA|BGMMA|DMMA|UTC\w*MMA",
    "special": r"MUFU",
    "fp32": r"FFMA2?|FADD2?|FMUL2?|FMNMX3?|FSEL|FSETP?|FCHK|FSWZADD|FFMA32I|FADD32I|FMUL32I",
    "fp16": r"HFMA2|HADD2|HMUL2|HMNMX2|HSETP?2|HSET2",
    "fp64": r"DADD|DFMA|DMUL|DMNMX|DSETP",
    "convert": r"F2FP|F2F|F2I|I2F|I2FP|F2IP|FRND|I2I",
    "global load": r"LDG|LDGSTS|LD|UTMALDG|UBLKCP|UTMAPF|UBLKPF|CCTL\w*",
    "atomic": r"RED|REDG|REDAS|ATOM|ATOMG|ATOMS|UTMAREDG|UBLKRED",
    "global store": r"STG|ST|UTMASTG",
    "shared load": r"LDS|LDSM",
    "shared store": r"STS|STSM",
    "local": r"LDL|STL",
    "constant": r"LDC|ULDC|LDCU",
    "shuffle": r"SHFL|REDUX|CREDUX|VOTE|VOTEU|MATCH|ELECT",
    "barrier": r"B2R|BAR|LDGDEPBAR|DEPBAR|SYNCS|WARPGROUP|WARPGROUPSET|MEMBAR|FENCE|ERRBAR|UTMACMDFLUSH"
    r"|UCGABAR_\w+|ACQBULK|PREEXIT|ARRIVES|CGAERRBAR",
    "control": r"BRA|BRX|BRXU|CALL|RET|EXIT|JMP|JMX|BREAK|BSSY|BSYNC|BMOV|WARPSYNC|NANOSLEEP|YIELD|USETMAXREG|NOP|BPT",
    "move": r"MOV|MOV32I|IMAD\.MOV\S*|UMOV|CS2R|CS2UR|S2R|S2UR|R2UR|PRMT|UPRMT|P2R|R2P|UP2UR|PLOP3|UPLOP3",
}
_CLASSES = {name: re.compile(rf"(?:{pattern})(?:\.|$)") for name, pattern in _CLASSES.items()}
_MOST_OF_A_WAIT = 6  # instructions

_LABEL = re.compile(r"\s*(\.L_[\w.]+|\$[\w$.]+):\s*")
_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+\{?\s*(.*?)\s*;")
_GUARD = re.compile(r"@!?U?P\w+\s+")
_ENDS = re.compile(r"(BRA|BRX|BRXU|JMP|JMX|EXIT|RET)\b")
_TARGET = re.compile(r"(\.L_\w+|\$[\w$.]+)")


class SassLoop(NamedTuple):
    """A loop of a kernel's machine code, with the loops inside it.

    Attributes:
        total: instructions.
        classes: instructions by class: integer, fp32, special, product, …, as in `report.instructions.classes`. Moves
            and logic of predicates are moves.
        opcodes: instructions by name ("IMAD.WIDE.U32").
        is_innermost: no loop is inside it.
    """

    total: int
    classes: Mapping[str, int]
    opcodes: Mapping[str, int]
    is_innermost: bool


class _Instruction(NamedTuple):
    name: str
    text: str  # with its predicate


@functools.lru_cache(maxsize=64)
def loops_of_ptx(ptx: PtxText, arch: str | None) -> tuple[SassLoop, ...]:
    """Return the loops of a kernel in the order of their addresses, as ptxas compiles its PTX for `arch` ("sm_90").

    Without `arch`, ptxas compiles for the GPU that the PTX names. ValueError: the PTX is for another GPU than `arch`.
    CompileError: ptxas refuses the PTX. RuntimeError: ptxas or nvdisasm is not installed.
    """
    arch = ptx.target if arch is None else arch
    check_arch(arch)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        done = run_ptxas(ptx, _target(ptx, arch), str(file))
        if done is None:
            raise RuntimeError(_missing("ptxas"))
        if done.returncode:
            raise CompileError(f"kernel {ptx.entry}: ptxas does not compile the PTX for {arch}\n{done.stderr.strip()}")
        return loops_of_cubin(file.read_bytes(), ptx.entry)


@functools.lru_cache(maxsize=64)
def loops_of_cubin(code: bytes, symbol: str) -> tuple[SassLoop, ...]:
    """Return the loops of the kernel `symbol` of a cubin. RuntimeError: nvdisasm is not installed."""
    instructions, labels = _disassembled(code, symbol)
    blocks, successors = _graph(instructions, labels)
    loops = loops_of(successors)
    waits = [each.nodes for each in loops if _waits([i for node in each.nodes for i in blocks[node]], instructions)]
    waiting = frozenset().union(*waits)
    kept = [each.nodes for each in loops if each.nodes not in waits]
    found = []
    for nodes in sorted(kept, key=min):
        names = [instructions[i].name for node in nodes - waiting for i in blocks[node]]
        classes = Counter(class_of(name) for name in names)
        innermost = not any(other < nodes for other in kept)
        found.append(SassLoop(len(names), dict(classes.most_common()), dict(Counter(names).most_common()), innermost))
    return tuple(found)


def class_of(name: str) -> str:
    """Return the class of an instruction ("IMAD.WIDE.U32"). All that matches no pattern is integer."""
    return next((known for known, pattern in _CLASSES.items() if pattern.match(name)), "integer")


def _target(ptx: PtxText, arch: str) -> str:
    wanted, made = (int(re.search(r"\d+", each)[0]) for each in (arch, ptx.target))
    special = ptx.target[-1].isalpha()
    if made > wanted or (special and made != wanted):
        raise ValueError(f"kernel {ptx.entry}: its PTX is for {ptx.target}, so arch cannot be {arch!r}")
    return ptx.target if special else arch


def _missing(tool: str) -> str:
    return f"loops() needs {tool}, which is not here: pip install triton, whose wheel has it, or put CUDA's on the PATH"


def _disassembled(code: bytes, symbol: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Return the instructions of a kernel, and the position that each label stands before."""
    program = tool_of_triton("nvdisasm") or shutil.which("nvdisasm")
    if program is None:
        raise RuntimeError(_missing("nvdisasm"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"kernel {symbol}: nvdisasm does not read the machine code\n{done.stderr.strip()}")
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    section = ""
    for line in done.stdout.split("\n"):
        if match := re.match(r"\s*\.section\s+([^\s,]+)", line):
            section = match[1]
        elif section != f".text.{symbol}":
            continue
        elif match := _LABEL.fullmatch(line):
            labels[match[1]] = len(instructions)
        elif match := _LINE.match(line):
            instructions.append(_Instruction(_GUARD.sub("", match[1]).split()[0], match[1]))
    if not instructions:
        raise RuntimeError(f"kernel {symbol}: nvdisasm shows no machine code for it")
    return instructions, labels


def _graph(instructions: Sequence[_Instruction], labels: Mapping[str, int]) -> tuple[list[range], list[list[int]]]:
    """Return the basic blocks, as the positions of their instructions, and the blocks that may follow each block."""
    targets = {}
    for i, (name, text) in enumerate(instructions):
        if _ENDS.match(name) or name.startswith("CALL"):
            targets[i] = [labels[each] for each in _TARGET.findall(text) if each in labels]
    starts = {0, *labels.values(), *(i + 1 for i in targets), *(each for found in targets.values() for each in found)}
    starts = sorted(start for start in starts if start < len(instructions))
    blocks = [range(*each) for each in zip(starts, [*starts[1:], len(instructions)], strict=True)]
    number = {block.start: i for i, block in enumerate(blocks)}
    successors = []
    for block in blocks:
        last = instructions[block[-1]]
        after = [number[each] for each in targets.get(block[-1], ()) if each in number]
        # `@P0 BRA …`, or `BRA.U UP0, …`, or `BRA P0, …`
        has_predicate = last.text.startswith("@") or re.search(r"\s!?U?P\d", last.text)
        if (has_predicate or not _ENDS.match(last.name)) and block.stop in number:
            after.append(number[block.stop])
        successors.append(after)
    return blocks, successors


def _waits(positions: Sequence[int], instructions: Sequence[_Instruction]) -> bool:
    """Whether a loop only waits for an mbarrier."""
    names = [instructions[i].name for i in positions]
    return len(names) <= _MOST_OF_A_WAIT and any(name.startswith(("SYNCS", "NANOSLEEP")) for name in names)
