"""What every translated kernel declares for the runtime: its dynamic shared memory and the table of its variables."""

from collections.abc import Iterable

from cudascope.arguments.launch_shape import MAX_SHARED_BYTES

# The memory of all `extern __shared__` arrays, as much as a thread block may have.
DYNAMIC_MEMORY = (
    f'extern "C" {{ __attribute__((used, aligned(1024))) thread_local char simt_dynamic[{MAX_SHARED_BYTES}]; }}\n'
)


def table_of(variables: Iterable[tuple[str, str]], suffix: str = "") -> str:
    """The table of variables by their name and by their expression in C++. The files of a program have one each."""
    rows = [f'{{"{name}", (void*)&{cpp}, sizeof({cpp})}}, ' for name, cpp in variables]
    row = "struct simt_variable { const char* name; void* address; unsigned long bytes; }"
    return f'extern "C" {{ {row} simt_variables{suffix}[] = {{{"".join(rows)}{{nullptr, nullptr, 0}}}}; }}\n'
