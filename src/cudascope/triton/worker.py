"""The process that compiles Triton kernels to PTX. It imports nothing of cudascope, and does not interpret.

    python -P worker.py ANSWER < request.json

The request is made by `launches.py`, the answer is JSON too: the PTX and the resources of the kernel, or the
compiler's message.
"""

import __future__

import ast
import collections
import inspect
import json
import pkgutil
import sys
import textwrap
import types
from typing import Any

_sources: dict[Any, tuple[list[str], int]] = {}
"""The lines of each function that was made here, and the number of its first line."""


class Opaque:
    """A value that no kernel can use: Triton refuses it in its own words. A parameter's default may use its members."""

    def __init__(self, kind: str, members: dict[str, Any]) -> None:
        self.kind = kind
        vars(self).update(members)

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class Reader:
    """The values of a description (`source.py`)."""

    def __init__(self, functions: list[dict[str, Any]]) -> None:
        self._defaults: list[list[ast.expr]] = []
        self._functions = list(map(self._make, functions))
        for parts in zip(self._functions, functions, self._defaults, strict=True):
            self._complete(*parts)

    def value(self, described: Any) -> Any:
        if not isinstance(described, list):
            return described
        kind, *parts = described
        return getattr(self, f"_{kind.replace(' ', '_')}")(*parts)

    def _constexpr(self, value: Any) -> Any:
        from triton.language import constexpr

        return constexpr(self.value(value))

    def _pointer(self, element: Any) -> Any:
        from triton.language import pointer_type

        return pointer_type(self.value(element))

    def _dtype(self, name: str) -> Any:
        from triton.language import dtype

        return dtype(name)

    def _tuple(self, items: list[Any]) -> tuple:
        return tuple(map(self.value, items))

    def _list(self, items: list[Any]) -> list:
        return list(map(self.value, items))

    def _dict(self, items: list[Any]) -> dict:
        keys, values = items
        return dict(zip(map(self.value, keys), map(self.value, values), strict=True))

    def _namedtuple(self, name: str, fields: list[str], values: list[Any]) -> tuple:
        return self._namedtuple_class(name, fields, [])(*map(self.value, values))

    def _namedtuple_class(self, name: str, fields: list[str], defaults: list[Any]) -> type:
        return collections.namedtuple(name, fields, defaults=map(self.value, defaults))

    def _opaque(self, kind: str, members: dict[str, Any]) -> Opaque:
        return Opaque(kind, {name: self.value(value) for name, value in members.items()})

    def _import(self, module: str, name: str) -> Any:
        try:
            return pkgutil.resolve_name(f"{module}:{name}")
        except (ImportError, AttributeError):
            return Opaque(f"{module}.{name}", {})

    def _module_of(self, name: str, members: dict[str, Any]) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update({each: self.value(value) for each, value in members.items()})
        return module

    def _function(self, index: int) -> Any:
        return self._functions[index]

    def _make(self, described: dict[str, Any]) -> Any:
        """Make a function that knows no globals yet: two functions may need each other."""
        import triton

        tree = ast.parse(textwrap.dedent("".join(described["lines"])))
        (definition,) = tree.body
        definition.decorator_list = []
        self._defaults.append(definition.args.defaults)
        definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
        ast.fix_missing_locations(ast.increment_lineno(tree, described["line"] - 1))
        code = compile(tree, described["file"], "exec", __future__.annotations.compiler_flag, dont_inherit=True)
        scope = {"__name__": described["module"]}
        exec(code, scope)
        function = scope[described["name"]]
        function.__qualname__, function.__annotations__ = described["qualname"], described["annotations"]
        _sources[function] = described["lines"], described["line"]
        if described["kind"] == "constexpr_function":
            return triton.constexpr_function(function)
        if described["kind"] == "python":
            return function
        return triton.jit(function, noinline=described["noinline"])

    def _complete(self, made: Any, described: dict[str, Any], defaults: list[ast.expr]) -> None:
        function = made if described["kind"] == "python" else made.fn
        scope = function.__globals__
        scope |= {name: self.value(value) for name, value in described["globals"].items()}
        values = (eval(compile(ast.Expression(each), described["file"], "eval"), scope) for each in defaults)
        function.__defaults__ = tuple(values)
        if made is not function:
            made.signature = inspect.signature(function)


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """Return the text of each level of a kernel, up to PTX, and Triton's metadata."""
    from triton.compiler import ASTSource

    real = inspect.getsourcelines
    inspect.getsourcelines = lambda function: _sources.get(function) or real(function)
    reader = Reader(request["functions"])
    kernel, signature, constants, attributes, options = map(reader.value, request["kernel"])
    texts, metadata = compiled(ASTSource(kernel, signature, constants, attributes), request["sm"], options)
    return {"asm": texts, "metadata": metadata}


def compiled(source: Any, sm: int, options: dict[str, Any], last: str = "ptx") -> tuple[dict[str, str], dict[str, Any]]:
    """Return the texts of an `ASTSource` up to the stage `last`, and Triton's metadata. No one needs a cubin."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = GPUTarget("cuda", sm, 32)
    triton.runtime.driver.set_active(types.SimpleNamespace(get_current_target=lambda: target))  # functions ask for it
    backend = make_backend(target)
    options = backend.parse_options(options)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    arguments = backend.get_codegen_implementation(options), backend.get_module_map(), context
    module = source.make_ir(target, options, *arguments)
    metadata, texts = {"target": target, **vars(options)}, {}
    for stage in list(stages)[list(stages).index("ttir") : list(stages).index(last) + 1]:
        module = stages[stage](module, metadata)
        texts[stage] = str(module)
    return texts, metadata


def main() -> None:
    """Write the answer to the file that the command names."""
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    try:
        answer = compile_kernel(request)
    except Exception as error:  # the compiler's own, which is raised where the request came from
        answer = {"error": f"{type(error).__name__}: {error}"}
        causes = []
        while (error := error.__cause__) is not None:
            causes.append(f"{type(error).__name__}: {error}")
        answer["error"] = "\n".join([answer["error"], *causes])
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(answer, file, default=str)  # of metadata that is no number and no text


if __name__ == "__main__":
    main()
