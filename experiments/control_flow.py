"""Natural loops of a control-flow graph (Aho, Lam, Sethi and Ullman, Compilers, section 9.6).

A graph is a list: the successors of each node, node 0 being where it is entered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Graph = Sequence[Sequence[int]]


class IrreducibleError(ValueError):
    """A cycle that is entered at two places, so that it is no natural loop."""


def predecessors(graph: Graph) -> list[list[int]]:
    """Of each node."""
    found: list[list[int]] = [[] for _ in graph]
    for node, targets in enumerate(graph):
        for target in targets:
            found[target].append(node)
    return found


def reached(graph: Graph, starts: Iterable[int], within: Iterable[int] | None = None) -> set[int]:
    """Nodes that there is a path to, the starts among them, through nodes of ``within`` only."""
    allowed = set(range(len(graph)) if within is None else within)
    found = set(starts) & allowed
    waiting = list(found)
    while waiting:
        new = set(graph[waiting.pop()]) & allowed - found
        found |= new
        waiting += new
    return found


def dominators(graph: Graph) -> dict[int, set[int]]:
    """Nodes that every path from the entry to a node goes through, for each node that can be reached."""
    order = _reverse_postorder(graph)
    before = predecessors(graph)
    found = {node: set(order) for node in order}
    found[0] = {0}
    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            common = set.intersection(*(found[other] for other in before[node] if other in found)) | {node}
            changed |= common != found[node]
            found[node] = common
    return found


def _reverse_postorder(graph: Graph) -> list[int]:
    """Each node that can be reached; unless on a cycle, before its successors."""
    seen, finished, path = {0}, [], [(0, iter(graph[0]))]
    while path:
        node, targets = path[-1]
        target = next((target for target in targets if target not in seen), None)
        if target is None:
            finished.append(node)
            path.pop()
        else:
            seen.add(target)
            path.append((target, iter(graph[target])))
    return finished[::-1]


def natural_loops(graph: Graph) -> dict[int, set[int]]:
    """Header -> nodes: those that can reach an edge back to the header without going through it."""
    dominating = dominators(graph)
    place = {node: index for index, node in enumerate(_reverse_postorder(graph))}
    before, loops = predecessors(graph), {}
    for node in place:
        for header in graph[node]:
            if header in dominating[node]:
                inside = reached(before, [node], within=set(place) - {header})
                loops.setdefault(header, {header}).update(inside)
            elif place[header] <= place[node]:
                raise IrreducibleError(f"a cycle through node {header} that is entered elsewhere, too")
    return loops


def optional_regions(graph: Graph, header: int, loop: set[int]) -> list[set[int]]:
    """Parts of a loop that some pass through it leaves out, each of them connected.

    A pass goes from the header to an edge back to it.
    """
    before = predecessors(graph)
    ends = {node for node in loop if header in graph[node]}
    optional = set()
    for node in loop - {header}:
        if ends & reached(graph, [header], within=loop - {node}):
            optional.add(node)
    regions = []
    while optional:
        region, waiting = set(), [min(optional)]
        while waiting:
            node = waiting.pop()
            if node in optional:
                optional.remove(node)
                region.add(node)
                waiting += [*graph[node], *before[node]]
        regions.append(region)
    return regions
