"""The command `cudascope`, for a shell and for CI: `cudascope check file.cu "kernel<float>" …`.

Exit status: 0 nothing was found, 1 something was, 2 the command or the kernel cannot be understood or compiled, or the
kernel reached what the CPU runner does not have. A program's own status is passed on, and is 99 if something was found.
"""

import argparse
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from cudascope.arguments.arrays import Array, numbers_of
from cudascope.command.given import (
    CONTENTS,
    VALUES,
    given_file,
    given_schedules,
    given_shape,
    given_tensor,
    given_value,
)
from cudascope.command.program import grouped, is_program_file, program_sources, run_program
from cudascope.cpp.signature import Parameter, spelled
from cudascope.cpp.source import CompileError, Source, read_source
from cudascope.cpp.tokens import Tokens
from cudascope.cpu.rules import SUMMARIES as OF_LAUNCHES
from cudascope.kernels.cuda import CudaKernel, declared_kernels, source_path
from cudascope.watch.causes import by_cause
from cudascope.watch.contexts import check, current_run, observe, time_limit
from cudascope.watch.findings import Finding, sarif_log, uri


def described(name: str, array: Array, file: str | None) -> str:
    """Describe a tensor by its first and last elements, or save it in `file`."""
    numbers = numbers_of(array.owner, array.dtype)
    title = f"{name} = {array.dtype}[{','.join(map(str, array.shape))}]"
    if file:
        with open(file, "wb") as target:  # np.save would add an ending to the name
            np.save(target, numbers)
        return f"{title}: saved in {file}"
    flat = numbers.ravel()
    shown = flat if flat.size <= 8 else [*flat[:4], "…", *flat[-4:]]
    return f"{title}: {' '.join(map(str, shown))}"


CLEAN, FOUND, NOT_UNDERSTOOD, FOUND_IN_PROGRAM = 0, 1, 2, 99
OF_PROGRAMS = {
    "use after free": "Memory is used that the program has freed.",
    "double free": "Memory is freed a second time.",
    "invalid free": "What is freed was not allocated so.",
    "invalid copy": "A copy or a fill leaves its memory, or takes memory of the host for the device's.",
    "host access": "Host code touches memory of the device.",
    "host fault": "Host code touches memory that is not there, or divides by zero.",
    "launch failed": "A launch that CUDA refuses.",
    "leak": "Memory that the program never frees; off unless asked for.",
}
SUMMARIES = OF_LAUNCHES | OF_PROGRAMS


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the command that `arguments` are."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a file's name has any bytes
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:own])
    options.arguments = given[own + 1 :]
    try:
        sources = _program(options)
        return _run_program(sources, options) if sources else options.run(options)
    except (CompileError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_UNDERSTOOD


def _program(options: argparse.Namespace) -> list[Source] | None:
    """The files of the program that shall run; None if a kernel is meant."""
    names = getattr(options, "names", [])
    others = [name for name in names if is_program_file(name)]
    options.kernel = next((name for name in names if name not in others), None)
    if options.run is _list or options.kernel is not None:
        if len(names) > 1:
            raise ValueError(f"name one kernel, or the files of a program: got {' and '.join(names)}")
        return None
    sources = program_sources([options.file, *others], options.define, options.option)
    if sources is None and others:
        raise ValueError(f"none of these files has a main: {', '.join([options.file, *others])}")
    if sources and (given := [name for name in ("grid", "block", "tensor", "scalar") if getattr(options, name)]):
        raise ValueError(f"--{given[0]} belongs to a kernel: name one, or leave it out to run the program's main")
    return sources


def _run_program(sources: list[Source], options: argparse.Namespace) -> int:
    """Run a program's main, once for each schedule, and print what is found in standard error."""
    found: list[Finding] = []
    first_seed: dict[tuple, int | None] = {}
    checks, observes = options.run is _check, options.run is _observe
    also = [rule for rule in options.also if rule != "leak"]
    ignored = [rule for rule in options.ignore if rule not in OF_PROGRAMS]
    for seed in options.schedule:
        with contextlib.ExitStack() as stack:
            stack.enter_context(time_limit(options.time_limit))
            if checks:
                stack.enter_context(check(schedule=seed, stop=False, ignore=ignored, also=also))
            elif observes:
                stack.enter_context(observe(trace_limit=0))
            run = current_run.get()
        outcome = run_program(sources, options.arguments, run, with_leaks="leak" in options.also)
        here = [each for each in outcome.findings if each.rule not in options.ignore]
        for finding in here:
            first_seed.setdefault(finding.place, seed)
        found = by_cause([*found, *here])
        for line in grouped(outcome.observed):
            print(line)
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr):
        _tell(found, first_seed, options)
        if checks:
            launches, schedules = _count(outcome.launches, "launch"), _count(len(options.schedule), "schedule")
            print(f"{Path(options.file).name}: {_count(len(found), 'finding')} in {launches} and {schedules}")
    return FOUND_IN_PROGRAM if found else outcome.status


def _check(options: argparse.Namespace) -> int:
    kernel = _kernel(options)
    found: list[Finding] = []
    first_seed: dict[tuple, int | None] = {}
    for seed in options.schedule:
        arguments, outputs = _arguments(kernel, options)
        rules = {"ignore": options.ignore, "also": options.also}
        checked = check(outputs=[*outputs.values()], schedule=seed, stop=False, **rules)
        with time_limit(options.time_limit), checked as report:
            kernel[options.grid, options.block, options.shared](*arguments)
        for finding in report.findings:
            first_seed.setdefault(finding.place, seed)
        found = by_cause([*found, *report.findings])
    _tell(found, first_seed, options)
    print(f"{kernel.name}: {_count(len(found), 'finding')} in {_count(len(options.schedule), 'schedule')}")
    return _status(found)


def _observe(options: argparse.Namespace) -> int:
    kernel = _kernel(options)
    arguments, _ = _arguments(kernel, options)
    with observe() as report:
        status = _launch(kernel, options, arguments)
    if status == CLEAN:
        print(report)
    return status


def _run(options: argparse.Namespace) -> int:
    kernel = _kernel(options)
    arguments, _ = _arguments(kernel, options)
    given = {p.name: array for p, array in zip(kernel.parameters, arguments, strict=False) if isinstance(array, Array)}
    save = dict(options.save)
    if unknown := sorted(save.keys() - given.keys()):
        raise ValueError(f"--save {unknown[0]}: the kernel has no such tensor: name one of {', '.join(given)}")
    status = _launch(kernel, options, arguments)
    if status != CLEAN:
        return status
    for parameter in kernel.parameters:
        if parameter.name in given and (parameter.name in save or not parameter.const):
            print(described(parameter.name, given[parameter.name], save.get(parameter.name)))
    return CLEAN


def _launch(kernel: CudaKernel, options: argparse.Namespace, arguments: Sequence[object]) -> int:
    """Launch the kernel, and print the finding that ends the launch if there is one."""
    try:
        with time_limit(options.time_limit):
            kernel[options.grid, options.block, options.shared](*arguments)
    except Finding as error:
        _print(error, None)
        return _status([error])
    return CLEAN


def _status(found: Sequence[Finding]) -> int:
    if any(finding.what == "not supported" for finding in found):
        return NOT_UNDERSTOOD
    return FOUND if found else CLEAN


def _list(options: argparse.Namespace) -> int:
    print("\n".join(_declarations(options.file)) or f"{options.file} has no kernel")
    return CLEAN


def _declarations(file: str) -> list[str]:
    """The kernels of `file` as their source declares them, each once."""
    path = source_path(Path(file))
    declared = []
    for kernel in declared_kernels(Source(read_source(path), str(path), path.parent, (), ())):
        template = f"template <{_written(kernel.template)}> " if kernel.template is not None else ""
        name = "::".join((*kernel.namespace, kernel.function))
        declared.append(f"{template}{name}({_written(kernel.parameters)})")
    return list(dict.fromkeys(declared))


def _written(tokens: Tokens) -> str:
    """Tokens as one writes them."""
    return re.sub(r" (?=[*&,>\])]|::)|(?<=[<(\[])(?<!,) |(?<=::) | (?=[<\[(])", "", " ".join(tokens))


def _kernel(options: argparse.Namespace) -> CudaKernel:
    if options.kernel is None:
        raise ValueError("\n  ".join([f"name one of the kernels of {options.file}:", *_declarations(options.file)]))
    if options.block is None:
        raise ValueError(f"kernel {options.kernel} needs its block: add --block 128 or --block 16,16")
    options.grid = options.grid or (1,)
    return CudaKernel(Path(options.file), options.kernel, defines=options.define, options=options.option)


def _arguments(kernel: CudaKernel, options: argparse.Namespace) -> tuple[list[object], dict[str, Array]]:
    """The arguments in their order, and those of them that are outputs."""
    repeated = Counter([*(tensor.name for tensor in options.tensor), *(name for name, _ in options.scalar)])
    if twice := [name for name, times in repeated.items() if times > 1]:
        raise ValueError(f"parameter {twice[0]!r} is given {repeated[twice[0]]} times: give each parameter once")
    given: dict[str, object] = {tensor.name: tensor.make() for tensor in options.tensor} | dict(options.scalar)
    names = [parameter.name for parameter in kernel.parameters]
    if unknown := sorted(given.keys() - set(names)):
        raise ValueError(f"kernel {kernel.name} has no parameter {unknown[0]!r}: it has {', '.join(names)}")
    passed = list(kernel.parameters)
    while passed and passed[-1].default and passed[-1].name not in given:
        passed.pop()
    if missing := [parameter for parameter in passed if parameter.name not in given]:
        raise ValueError("\n".join([f"kernel {kernel.name} lacks arguments; add", *map(_remedy, missing)]))
    outputs = {tensor.name: given[tensor.name] for tensor in options.tensor if tensor.is_output}
    return [given[parameter.name] for parameter in passed], outputs


def _remedy(parameter: Parameter) -> str:
    option, value = ("--tensor", "DTYPE[SIZES]") if parameter.pointer else ("--scalar", "VALUE")
    return f"  {option} {parameter.name}={value}   for `{spelled(parameter)} {parameter.name}`"


def _tell(found: Sequence[Finding], first_seed: dict[tuple, int | None], options: argparse.Namespace) -> None:
    """Print findings, each with the first seed that shows it, and write them as SARIF if that is asked for."""
    for finding in found:
        _print(finding, first_seed[finding.place])
    if options.sarif:
        Path(options.sarif).write_text(json.dumps(sarif_log(found, SUMMARIES), indent=2) + "\n")


def _print(finding: Finding, seed: int | None) -> None:
    """In the form of compilers, which editors and CI understand."""
    place = ":".join([unquote(uri(finding.file)), *([str(finding.line)] if finding.line else [])])
    remarks = [f"{finding.count:,} times"] if finding.count > 1 else []
    remarks += [] if seed is None else [f"first with --schedule {seed}"]
    print(f"{place}: {finding.rule}: {finding.sentence}" + (f" ({', '.join(remarks)})" if remarks else ""))
    for file, line in dict.fromkeys([(finding.file, finding.line), (finding.other_file, finding.other_line)]):
        with contextlib.suppress(OSError, ValueError, IndexError):  # there is no such file or line
            if code := line and read_source(Path(file)).split("\n")[line - 1].rstrip():
                print(f"{line:5} | {code}")


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number or 'no'} {what}{plural * (number != 1)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cudascope",
        description="CUDA kernels on the CPU: checked, observed, run, listed.",
        epilog="exit status: 0 nothing was found, 1 something was, 2 what was asked is not understood or supported. A "
        "program's own status is passed on, and is 99 if something was found",
    )
    parser.set_defaults(schedule=[None], ignore=[], also=[], sarif=None)  # of the commands without these options
    file = argparse.ArgumentParser(add_help=False)
    file.add_argument("file", help="a .cu file")
    launch = argparse.ArgumentParser(add_help=False, parents=[file])
    add = launch.add_argument
    about_names = (
        'a kernel, as in "scale" or "softmax<float, 128>". Without one the main of the file runs, and more files of '
        "the program may follow; what comes after -- are the arguments of the program"
    )
    add("names", nargs="*", metavar="kernel", help=about_names)
    add("--grid", type=given_shape, help="thread blocks, x first: 4,2 (default: 1)")
    add("--block", type=given_shape, help="threads of a thread block: 128 or 16,16")
    add("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory")
    tensor = "NAME=DTYPE[SIZES][:CONTENTS][:output]"
    about_tensor = f"or NAME=FILE.npy, or NAME=null. CONTENTS: {CONTENTS}; an output must be written, all of it"
    add("--tensor", type=given_tensor, action="append", default=[], metavar=tensor, help=about_tensor)
    add("--scalar", type=given_value, action="append", default=[], metavar="NAME=VALUE", help=VALUES)
    add("--time-limit", type=float, default=30.0, metavar="SECONDS", help="without progress (default: 30)")
    add("--define", action="append", default=[], metavar="NAME[=VALUE]", help="as a compiler's -D")
    add("--include", action="append", dest="option", default=[], type="-I{}".format, metavar="FOLDER", help="as -I")
    add("--option", action="append", default=[], help="another option of the compiler: --option=--std=c++20")
    checks = argparse.ArgumentParser(add_help=False)
    add = checks.add_argument
    seeds = "run it in the order of each of these seeds: 7 or 1,5 or 0..19 (default: once, in the threads' own order)"
    add("--schedule", type=given_schedules, default=[None], metavar="SEEDS", help=seeds)
    add("--ignore", action="append", default=[], metavar="RULE", help="do not report this: 'same value', race, …")
    add("--also", action="append", default=[], metavar="RULE", help="report this too: 'left before barrier'")
    add("--sarif", metavar="FILE", help="write the findings as SARIF 2.1.0")
    outputs = argparse.ArgumentParser(add_help=False)
    add = outputs.add_argument
    about_save = "save a tensor after the launch instead of printing it (types that numpy lacks: as float32)"
    add("--save", type=given_file, action="append", default=[], metavar="NAME=FILE.npy", help=about_save)

    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, options, help in (
        ("check", _check, [launch, checks], "run a kernel or a program and report what is wrong with it"),
        ("observe", _observe, [launch], "run a kernel or a program and print what each line did"),
        ("run", _run, [launch, outputs], "run a kernel and print the tensors that it may write, or run a program"),
        ("list", _list, [file], "print a file's kernels and their parameters"),
    ):
        commands.add_parser(name, parents=options, help=help, description=help).set_defaults(run=run)
    return parser
