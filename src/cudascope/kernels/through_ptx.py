"""A kernel of a CUDA source as NVRTC compiles it, executed on the CPU: `CudaKernel(..., through="ptx")`.

NVRTC's optimiser decides what the PTX computes: it merges a product with a sum into one fma, takes approximate
functions, and moves and joins accesses. The build for the CPU from the same source by g++ shows none of this.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from cudascope.arguments.values import size_of
from cudascope.cpp.parameters import Parameter
from cudascope.cpp.signature import base_name
from cudascope.cpp.source import CompileError, Source
from cudascope.cpu.library import Library
from cudascope.kernels.ptx import Code, EntryOnCpu
from cudascope.ptx.module import PtxError, read_module
from cudascope.toolchain.compiler import run_tool
from cudascope.toolchain.nvrtc import compile_ptx
from cudascope.watch.rules import declares_return


class CudaThroughPtx(EntryOnCpu):
    """Kernel `name` of `source`, compiled by NVRTC for `arch`. Names and lines are those of the source.

    Raises:
        CompileError: NVRTC refuses the source, or the kernel needs what the CPU runner does not execute.
        RuntimeError: cuda-bindings or NVRTC is not installed.
    """

    def __init__(self, source: Source, name: str, parameters: Sequence[Parameter], arch: str) -> None:
        ptx = compile_ptx(source, name, arch)
        module = read_module(ptx.text)
        entry = module.entries[ptx.symbol]
        names = {symbol: variable for variable, symbol in ptx.variables.items()}
        try:
            code = Code(ptx.text, module, entry, f"{Path(source.filename).stem}.ptx", names)
        except PtxError as error:
            number, message = re.fullmatch(r"line (\d+): (.*)", str(error), re.DOTALL).groups()
            file, line = module.places.get(int(number), ("its PTX", number))
            raise CompileError(f"kernel {name}: {file}, line {line}: {message}") from None
        sizes = [8 if each.pointer else size_of(each) for each in parameters]
        if sizes != (compiled := [each.bytes for each in entry.parameters]):
            raise CompileError(f"kernel {name}: parameters were read as {sizes} bytes, but compiled to {compiled}")
        super().__init__(source, name, parameters, code)
        self._lines = source.text.split("\n")
        self._may_return = declares_return(source.read(), base_name(name))

    def _code(self, library: Library, site: int, file: str, line: int) -> str:
        """Return the text of the line if the line is in the kernel's own file, and "" otherwise."""
        own = file == self.source.filename and 0 < line <= len(self._lines)
        return self._lines[line - 1].strip() if own else ""

    def _named(self, library: Library) -> Library:
        """Return the library with the source's names for its shared arrays: `tile` for ptx__ZZ1kPfE4tile."""
        names = [each.name.removeprefix("ptx_") for each in library.shared]
        names += [library.dynamic_name.removeprefix("ptx_")] * (library.dynamic_offset is not None)
        plain = [each.rpartition("::")[2] for each in run_tool("c++filt", lines=names).splitlines()] if names else []
        shared = tuple(each._replace(name=name) for each, name in zip(library.shared, plain, strict=False))
        return library._replace(shared=shared, dynamic_name="".join(plain[len(shared) :]))
