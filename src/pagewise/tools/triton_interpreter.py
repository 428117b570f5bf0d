"""Patches that spare Triton's interpreter needless work: five sixths of the time of a small kernel, or more."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace


@functools.cache
def spare_the_interpreter() -> None:
    """Patch Triton's interpreter once per process, so that it skips needless work. All results stay the same."""
    from triton.runtime import interpreter

    _patch_language_once_per_launch(interpreter)
    _leave_out_overflow_checks(interpreter)
    _remember_numpys_types(interpreter)
    if version("triton").startswith("3.7."):  # these replace methods, whose work another version may divide otherwise
        _list_builtins_once(interpreter)
        _call_builtins_directly(interpreter)
        _remember_shapes()
        _unwrap_plain_values_at_once()
        _promote_and_broadcast_once()


def _patch_language_once_per_launch(interpreter) -> None:
    """Replace the functions of Triton's language once per launch, not once per call of a device function.

    The interpreter replaces them by functions that compute with numpy. They stay replaced until the launch ends, so
    that repeating this at each call is needless. It takes nine tenths of the time of a small kernel.
    """
    from triton import language

    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None:  # another version of Triton
        return
    patched = {}  # in this launch, how each is restored: triton.language, its core, or both

    @functools.cache
    def seen_by(function: Callable) -> frozenset[str]:
        names = {"language": language, "core": language.core}
        return frozenset(name for name in names if any(value is names[name] for value in function.__globals__.values()))

    def end_launch() -> None:
        while patched:
            patched.popitem()[1]()

    def patch_once(function: Callable) -> object:
        is_kernel, scope = not patched, SimpleNamespace()
        if seen_by(function) not in patched:
            scope = patch(function)
            patched[seen_by(function)] = scope.restore
        scope.restore = end_launch if is_kernel else lambda: None
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


def _list_builtins_once(interpreter) -> None:
    """List the functions of Triton's language once per process, not once per launch."""
    from triton import language
    from triton.language import core

    places = (language, core, core.tensor, language.math, core.tensor_descriptor_base)
    builtins = {
        place: [(name, member) for name, member in inspect.getmembers(place) if core.is_builtin(member)]
        for place in places
    }

    def patch(place, builder, scope) -> None:
        for name, member in builtins[place]:
            interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _call_builtins_directly(interpreter) -> None:
    """Call the function itself, not through a wrapper that looks for its argument `_semantic`."""
    from triton.language import core

    wrapper = core.program_id.__code__  # shared by all functions that `core.builtin` has wrapped

    def patch(place, name, member, builder, scope) -> None:
        function = member.__wrapped__ if member.__code__ is wrapper else member

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch


def _remember_shapes() -> None:
    """Check a shape, count its elements and write its name once, not for the result of each operation."""
    from triton.language import core

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    known = {}  # of a shape: attributes of its type, and of a tensor with that type

    def tensor_of(type_):
        tensor = core.tensor.__new__(core.tensor)
        make_tensor(tensor, None, type_)
        return tensor

    scalar = tensor_of(core.int32)

    @functools.wraps(make_type)
    def init_type(self, element_ty, shape):
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        if {*map(type, sizes)} != {int} or sizes not in known:  # 2.0 equals 2, but is refused
            make_type(self, element_ty, [*sizes])
            known[sizes] = SimpleNamespace(shape=self.shape, numel=self.numel, name=str(self.shape), of=tensor_of(self))
        block = known[sizes]
        self.element_ty, self.shape, self.numel = element_ty, block.shape, block.numel
        self.name = f"<{block.name}, {element_ty}>"
        self.of_tensors = block.of

    @functools.wraps(make_tensor)
    def init_tensor(self, handle, type):
        same = type.of_tensors if type.is_block() else scalar
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = same.shape, same.numel

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _unwrap_plain_values_at_once() -> None:
    """Return numbers, tensors and types at once: they wrap nothing."""
    from triton.language import core

    unwrap = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    @functools.wraps(unwrap)
    def unwrap_others(value):
        return value if type(value) in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrap_others


def _promote_and_broadcast_once() -> None:
    """Choose the type of a result once per pair of types, and broadcast only tensors whose shapes differ."""
    from triton.language.semantic import TritonSemantic

    TritonSemantic.computation_type_impl = functools.cache(TritonSemantic.computation_type_impl)
    broadcast = TritonSemantic.broadcast_impl_value

    @functools.wraps(broadcast)
    def broadcast_others(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_others
