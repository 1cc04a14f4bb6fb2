"""The parts of the last error, and the references that go when an object that it holds is replaced by a stand-in."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from nbguard.memory.cleanup.plan.plan import Action, ActionKind
from nbguard.memory.core.facts import DEBUGGER, Graph
from nbguard.memory.core.references.graph import DEFAULT, FUNCTION, Edge


def shell_of(graph: Graph, entries: Iterable[int]) -> set[int]:
    """Return the exceptions, tracebacks and frames that make up an error's own chain, and no others.

    A tuple or dict right below an exception (a group's parts) or at the top (a debugger's leftovers) is passed through.
    """
    shell: set[int] = set()
    todo = [(node, True) for node in entries]
    while todo:
        node, may_pass = todo.pop()
        fact = graph.nodes[node]
        if fact.kind in ("frame", "traceback", "locals"):
            if node not in shell:
                shell.add(node)
                todo += [(child, fact.kind == "traceback") for child in fact.children]
        elif may_pass and fact.type_name in ("tuple", "dict"):
            todo += [(child, False) for child in fact.children]
    return shell


def variables_of_error(graph: Graph) -> set[int]:
    """Return the nodes that variables of the last error's frames are: among them the Learner whose fit failed."""
    entries = [node for root in graph.roots if root.kind == "error" and root.label != DEBUGGER for node in root.nodes]
    return {child for owner in shell_of(graph, entries) for child, _, _ in parts_of_error(graph, owner)}


@dataclass(frozen=True, slots=True)
class ReleasedParts:
    """Parts of an error that give way to stand-ins: references that go, (owner, object) refs in turn, names, owners."""

    cut: set[Edge]
    refs: tuple[int, ...]
    names: tuple[str, ...]
    owners: set[int]

    def action(self, kind: ActionKind, words: str, detail: str) -> Action:
        """Return the step that releases them; `words` say which they are, without a verb."""
        return Action(
            kind=kind,
            subject=words,
            participle="released",
            nbytes=0,
            detail=detail,
            refs=self.refs,
            names=self.names,
        )


def released_parts(graph: Graph, shell: Iterable[int], wanted: Set[int], done: Set[Edge] = frozenset()) -> ReleasedParts:
    """Return the parts of the exceptions and frames `shell` that are `wanted`, but for those that are `done` already."""
    cut, refs, names, owners = set[Edge](), list[int](), list[str](), set[int]()
    for owner in sorted(shell):
        for child, label, edges in parts_of_error(graph, owner):
            if child in wanted and not edges <= done:
                cut |= edges
                refs += [graph.nodes[owner].ref, graph.nodes[child].ref]
                names.append(label)
                owners.add(owner)
    return ReleasedParts(cut, tuple(refs), tuple(names), owners)


def parts_of_error(graph: Graph, owner: int) -> Iterable[tuple[int, str, set[Edge]]]:
    """Return the objects that a part of an error holds, each with the references that go when it is replaced.

    Of a frame its variables, and the defaults and attributes of the function that it ran, which it keeps (where anything
    else has that function, these are live); of an exception `AttributeError.obj` and the attributes that somebody has put on
    it. Its arguments stay: they are its message.
    """
    fact = graph.nodes[owner]
    if fact.kind == "frame":
        variables = [variable for variable in _variables(graph, owner) if variable[1] not in ("", FUNCTION)]
        parts = [(child, label, _release_edges(graph, owner, child)) for child, label in variables]
        return parts + _parts_of_function(graph, owner)
    if fact.kind == "locals":
        return []
    parts = [(child, label, {(owner, child)}) for child, label in fact.references if label == ".obj"]
    return parts + _attributes(graph, owner)


def _parts_of_function(graph: Graph, frame: int) -> list[tuple[int, str, set[Edge]]]:
    parts: list[tuple[int, str, set[Edge]]] = []
    for function, label in graph.nodes[frame].references:
        if label in ("", FUNCTION) and graph.nodes[function].type_name == "function":
            parts += [(part, DEFAULT, {(function, part)}) for part, step in graph.nodes[function].references if step == DEFAULT]
            parts += _attributes(graph, function)
    return parts


def _attributes(graph: Graph, owner: int) -> list[tuple[int, str, set[Edge]]]:
    """Return the attributes of a node as parts of it."""
    spaces = [child for child, label in graph.nodes[owner].references if not label and graph.nodes[child].type_name == "dict"]
    return [(child, label, {(space, child)}) for space in spaces for child, label in graph.nodes[space].references]


def _variables(graph: Graph, frame: int) -> Iterable[tuple[int, str]]:
    """Return (node, label) of each variable of a finished frame: its own, and the variables of the namespace it keeps."""
    fact = graph.nodes[frame]
    variables = dict(fact.references)
    for view in [child for child in fact.children if graph.nodes[child].kind == "locals"]:
        for child, label in graph.nodes[view].references:
            variables.setdefault(child, label)
    return variables.items()


def _release_edges(graph: Graph, frame: int, variable: int) -> set[Edge]:
    """Return the references that go when a variable of a finished frame is replaced.

    A variable that closures share lives in a cell, whose content goes. Up to Python 3.12 a debugger's view of the frame is
    one dict that the frame keeps (kind `locals`): it follows.
    """
    nodes = graph.nodes
    is_cell = nodes[variable].kind == "cell"
    values = set(nodes[variable].children) if is_cell else {variable}
    cut = {(variable, value) for value in values} if is_cell else {(frame, variable)}
    views = [child for child in nodes[frame].children if nodes[child].kind == "locals"]
    return cut | {(view, value) for view in views for value in values if value in nodes[view].children}
