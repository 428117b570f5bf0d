"""The `__global__` functions that a CUDA source declares, found by their tokens."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from cudascope.tokens import NAME, Tokens, matching, split, strip_comments, tokens_of

ATTRIBUTES = {"__launch_bounds__", "__maxnreg__", "__cluster_dims__", "__block_size__", "__attribute__", "alignas"}
_CONDITIONAL = re.compile(r"^[ \t]*#[ \t]*if.*?^[ \t]*#[ \t]*endif", re.DOTALL | re.MULTILINE)


class Declaration(NamedTuple):
    """A `__global__` function as it is declared, in tokens."""

    function: str
    namespace: tuple[str, ...]  # an unnamed one has no part in it
    template: Tokens | None
    attributes: dict[str, Tokens]
    parameters: Tokens
    defined: bool


def kernel_names(source: str) -> list[str]:
    """The names of all `__global__` functions in `source`, in the order they are declared, each once."""
    tokens = tokens_of(strip_comments(source))
    return list(dict.fromkeys(kernel.function for kernel in kernels_of(tokens)))


def plain_kernels(source: str) -> list[str]:
    """Those that are no templates and are defined outside of namespaces and of #if: they can be built together."""
    kernels = kernels_of(tokens_of(unconditional(source)))
    plain = (each.function for each in kernels if each.defined and each.template is None and not each.namespace)
    return list(dict.fromkeys(plain))


def unconditional(source: str) -> str:
    """`source` without comments and without what stands between #if and #endif."""
    return _CONDITIONAL.sub("", strip_comments(source))


def kernels_of(tokens: Tokens) -> Iterator[Declaration]:
    """Every declaration of a `__global__` function among `tokens`, in their order."""
    template, i = None, 0
    scopes: list[list[str]] = []  # of each brace that is open, the namespace it opened
    while i < len(tokens):
        token = tokens[i]
        if token == "{":
            start = i
            while start and (tokens[start - 1] == "::" or NAME.fullmatch(tokens[start - 1])):
                start -= 1
            words = [word for word in tokens[start:i] if word != "::"]
            scopes.append(words[words.index("namespace") + 1 :] if "namespace" in words else [])
        elif token == "}" and scopes:
            scopes.pop()
        if token == "template" and tokens[i + 1 : i + 2] == ["<"]:
            end = matching(tokens, i + 1)
            template, i = tokens[i + 2 : end], end
        elif token in (";", "{", "}"):
            template = None
        elif token == "__global__":
            attributes, i = {}, i + 1
            while i + 1 < len(tokens) and not (tokens[i + 1] == "(" and tokens[i] not in ATTRIBUTES):
                if tokens[i] in ATTRIBUTES:
                    end = matching(tokens, i + 1)
                    attributes[tokens[i]], i = tokens[i + 2 : end], end
                i += 1
            if i + 1 < len(tokens):
                end = matching(tokens, i + 1)
                if NAME.fullmatch(tokens[i]):  # else `f<float>(…)`: a template written out for one type
                    namespace = tuple(name for scope in scopes for name in scope)
                    defined = tokens[end + 1 : end + 2] == ["{"]
                    yield Declaration(tokens[i], namespace, template, attributes, tokens[i + 2 : end], defined)
                i = end
        i += 1


def find_kernel(tokens: Tokens, path: tuple[str, ...], name: str) -> list[Declaration]:
    """All declarations of kernel `path`, each with the default template arguments of the first."""
    kernels = list(kernels_of(tokens))
    same_name = [kernel for kernel in kernels if kernel.function == path[-1]]
    found = [kernel for kernel in same_name if (*kernel.namespace, kernel.function) == path]
    other_paths = rf"(using|inline) namespace |namespace \w+ = |using [\w: ]*:: {path[-1]} ;"
    if not found and re.search(other_paths, " ".join(tokens)):
        found = same_name
    if not found:
        full = [*dict.fromkeys("::".join((*kernel.namespace, kernel.function)) for kernel in same_name or kernels)]
        if not same_name:
            names = ", ".join(full) or "no __global__ function at all"
            raise ValueError(f"name: the source has no kernel {'::'.join(path)!r}; it has {names}")
        instance = name[name.index("<") :] if "<" in name else ""
        remedy = " or ".join(f'"{each}{instance}"' for each in full)
        raise ValueError(f"name: the source has no kernel {'::'.join(path)!r}: name it {remedy}")
    return [kernel._replace(template=_with_defaults(kernel.template, found[0].template)) for kernel in found]


def _with_defaults(template: Tokens | None, first: Tokens | None) -> Tokens | None:
    if not template or not first or len(split(template)) != len(split(first)):
        return template
    pairs = zip(split(template), split(first), strict=True)
    merged = [own if "=" in own or "=" not in old else own + old[old.index("=") :] for own, old in pairs]
    return [token for parameter in merged for token in (*parameter, ",")][:-1]
