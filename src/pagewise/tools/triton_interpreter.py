"""Patches that spare Triton's interpreter needless work: two thirds of the time of a small kernel, or more."""

import dataclasses
import functools
from collections.abc import Callable


@functools.cache
def spare_the_interpreter() -> None:
    """Patch Triton's interpreter once per process, so that it skips needless work. All results stay the same."""
    from triton.runtime import interpreter

    _patch_language_once_per_launch(interpreter)
    _leave_out_overflow_checks(interpreter)
    _remember_numpys_types(interpreter)


def _patch_language_once_per_launch(interpreter) -> None:
    """Replace the functions of Triton's language once per launch, not once per call of a device function.

    The interpreter replaces them by functions that compute with numpy. They stay replaced until the launch ends, so
    that repeating this at each call is needless. It takes nine tenths of the time of a small kernel.
    """
    from triton import language

    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None:  # another version of Triton
        return
    patched = set()  # in this launch: triton.language, its core, or both

    @functools.cache
    def seen_by(function: Callable) -> frozenset[str]:
        names = {"language": language, "core": language.core}
        return frozenset(name for name in names if any(value is names[name] for value in function.__globals__.values()))

    def patch_once(function: Callable) -> object:
        if seen_by(function) in patched:
            return None
        scope = patch(function)
        if not patched:  # the kernel itself, whose launch restores the language when it ends
            restore = scope.restore

            def end_launch() -> None:
                patched.clear()
                restore()

            scope.restore = end_launch
        patched.add(seen_by(function))
        return scope

    interpreter._patch_lang = patch_once


def _leave_out_overflow_checks(interpreter) -> None:
    """Skip the int64 copy of each integer operation, which is needed only for assertions of a debug mode."""
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _remember_numpys_types(interpreter) -> None:
    """Remember numpy's types. The interpreter builds the whole table again for each look-up."""
    look_up = getattr(interpreter, "_get_np_dtype", None)
    if look_up is None:
        return
    known = {}

    @functools.wraps(look_up)
    def remembered(dtype):
        name = dtype.scalar.name  # of its elements
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered
