"""The loops of a control flow graph, of PTX or of machine code."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

_Graph = Mapping[int, Collection[int]] | Sequence[Collection[int]]  # the nodes that may follow each node


class Loop(NamedTuple):
    """A loop of a graph. The flow enters it at its `headers`: at one node, unless the graph is irreducible."""

    nodes: frozenset[int]
    headers: frozenset[int]


def loops_of(successors: Sequence[Collection[int]]) -> list[Loop]:
    """Return the loops that can be reached from node 0, each loop before the loops inside it.

    A loop is a strongly connected part of the graph. Without the edges to its headers, its own strongly connected parts
    are the loops inside it. In a reducible graph these are the natural loops, those of one header taken together.
    """
    reached = set(_depth_first(successors, 0, set()))
    found, parts = [], [{node: list(successors[node]) for node in sorted(reached)}]
    for graph in parts:  # grows
        for component in _components(graph):
            if len(component) == 1 and not component & set(graph[min(component)]):
                continue
            outside = (target for node in reached - component for target in successors[node])
            headers = component & {0, *outside}
            found.append(Loop(component, headers))
            inside = component - headers
            parts.append({node: [each for each in graph[node] if each in inside] for node in sorted(component)})
    return found


def _components(graph: Mapping[int, Sequence[int]]) -> Iterator[frozenset[int]]:
    """Yield the strongly connected components, by Kosaraju's algorithm."""
    seen: set[int] = set()
    finished = []
    for start in graph:
        finished += _depth_first(graph, start, seen)
    reverse: dict[int, list[int]] = {node: [] for node in graph}
    for node, targets in graph.items():
        for target in targets:
            reverse[target].append(node)
    seen = set()
    for start in reversed(finished):
        if component := frozenset(_depth_first(reverse, start, seen)):
            yield component


def _depth_first(graph: _Graph, start: int, seen: set[int]) -> list[int]:
    """Return the nodes that can be reached from `start` and were not `seen`, each after those that follow it."""
    if start in seen:
        return []
    seen.add(start)
    order, path = [], [(start, iter(graph[start]))]
    while path:
        node, targets = path[-1]
        target = next((each for each in targets if each not in seen), None)
        if target is None:
            order.append(node)
            path.pop()
        else:
            seen.add(target)
            path.append((target, iter(graph[target])))
    return order
