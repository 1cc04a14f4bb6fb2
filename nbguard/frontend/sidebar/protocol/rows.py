"""The rows of a memory state by number, with the name of each in a request, and the requests that may be made about it.

A browser names rows by their place in this table, never by text. So the table is made from the facts alone, in the same way
for the state that is sent and for looking a number up.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from nbguard.frontend.sidebar.protocol.row_parts import row_parts
from nbguard.frontend.sidebar.protocol.state import Ability, RowPart
from nbguard.memory.cleanup.figures import holdings_on
from nbguard.memory.cleanup.plan.default import default_plan, holders_of
from nbguard.memory.core.advice import HARD
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Graph, Node, Root
from nbguard.memory.core.least_shown import least_of_rows
from nbguard.memory.core.references.explain_unheld import is_explained
from nbguard.memory.core.references.graph import leading_to, reach, storages_of
from nbguard.memory.core.references.holders import Holder

_OUTPUT = re.compile(r"Out\[\d+\]")
_PARKED_KINDS = frozenset({"learner", "model", "optimizer", "tensor"})
_CONTAINERS = frozenset({"list", "tuple", "dict", "L"})
_STEP = " → "
"""Before a function in a path from an error."""
_NONE: frozenset[int] = frozenset()
_NOTES = {
    "frame": "in use by running code: freed when that ends",
    "module": "a module's own global: set it to None there",
    "name": "its name cannot be written in a command",
    "error": "Clean stale leaves it: running code or a name of yours needs it",
    "garbage": "a cycle that running code may still use",
}
"""The reason why a row of this kind of root cannot be released."""
_WORKSPACES_NOTE = HARD.command + " clears them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a memory state, as columns by the number of the row."""

    devices: tuple[str, ...]  # device of the row, as torch calls it
    holders: tuple[Holder, ...]
    least: tuple[int, ...]  # least bytes of a holder with a row of its own on its device
    targets: tuple[tuple[str, ...], ...]  # texts for `park` and `why`: `learn`, `Out[9]`, all names of one object; or none
    released: tuple[tuple[str, ...], ...]  # texts for `release`: these, and the names that have to go with them
    roots: tuple[str, ...]  # label of the root to explain; empty where no root leads to the row
    can: tuple[tuple[Ability, ...], ...]  # requests that a sidebar may make about the row
    parts: tuple[tuple[RowPart, ...], ...]  # parts of the row's bytes
    is_running: tuple[bool, ...]  # held by nothing but functions that run now
    short: tuple[str, ...]  # name of the row where its path has no room; empty for its label
    storages: tuple[frozenset[int], ...]  # numbers of the storages in the graph that the row's bytes are

    def texts(self, what: str, ids: Iterable[int]) -> tuple[str, ...] | None:
        """Return the names of the rows `ids`, or None if there is no such row, or one of them cannot `what`."""
        numbers = tuple(ids)
        if not numbers or not all(0 <= number < len(self.can) and what in self.can[number] for number in numbers):
            return None
        texts = self.released if what == "release" else self.targets
        return tuple(dict.fromkeys(text for number in numbers for text in texts[number]))


def rows_of(analysis: Analysis) -> Rows:
    """Return the rows of every device, the largest holders first.

    The default cleanup only decides which rows are called stale: the numbers are the same whatever it would free.
    """
    beside = analysis.once(beside_running_code)
    graph = beside.facts.graph
    every = [(device, row) for device in beside.devices for row in device.once(holders_of)]
    every.sort(key=lambda each: -each[1].retained)
    least = {device.name: least_of_rows(row.retained for row in device.once(holders_of)) for device in beside.devices}
    held = {(device.name, row.roots): storages for device in beside.devices for row, storages in device.once(holdings_on)}
    storages = [held.get((device.name, row.roots), _NONE) if row.roots else _NONE for device, row in every]
    training = leading_to(graph, (learner.node for learner in beside.facts.learners if learner.is_running))
    rows = [row for _, row in every]
    targets = tuple(_targets(graph, row) for row in rows)
    released = tuple(_released(row, texts) for row, texts in zip(rows, targets, strict=True))
    functions = _functions(graph) if any(row.kind == "error" for row in rows) else frozenset[str]()
    return Rows(
        devices=tuple(device.name for device, _ in every),
        holders=tuple(rows),
        least=tuple(least[device.name] for device, _ in every),
        targets=targets,
        released=released,
        roots=tuple(graph.roots[row.roots[0]].label if row.roots else "" for row in rows),
        can=tuple(
            _can(graph, row, texts, may_go, training) for row, texts, may_go in zip(rows, targets, released, strict=True)
        ),
        parts=row_parts(graph, beside.facts.learners, rows, storages),
        is_running=tuple(bool(row.roots) and all(graph.roots[root].kind == "frame" for root in row.roots) for row in rows),
        storages=tuple(storages),
        short=tuple(_short_name(row, functions) for row in rows),
    )


def beside_running_code(analysis: Analysis) -> Analysis:
    """Return an analysis with running functions as holders only of memory that nothing else leads to.

    While a cell trains `learn`, its functions hold the same Learner: it stays `learn`, not something that they share.
    """
    graph = analysis.facts.graph
    if not any(root.kind == "frame" for root in graph.roots):
        return analysis
    others = reach(graph, (node for root in graph.roots if root.kind != "frame" for node in root.nodes))
    held, nodes, roots = storages_of(graph, others), list(graph.nodes), list[Root]()
    for root in graph.roots:
        if root.kind == "frame":
            below = reach(graph, root.nodes)
            rest = (graph.rest,) if graph.rest is not None and graph.rest in below - others else ()
            own = tuple(sorted(storages_of(graph, below) - held))
            nodes.append(Node(kind="frame", type_name="frame", ref=0, children=rest, labels=("",) * len(rest), storages=own))
            roots.append(replace(root, nodes=(len(nodes) - 1,)))
        else:
            roots.append(root)
    return analysis.with_graph(replace(graph, roots=tuple(roots), nodes=tuple(nodes)), default_plan)


def _targets(graph: Graph, row: Holder) -> tuple[str, ...]:
    """Return the name of a row where requests can use it: its names, or a displayed result."""
    labels = tuple(graph.roots[root].label for root in row.roots)
    if row.kind == "name" and all(label.isidentifier() and not keyword.iskeyword(label) for label in labels):
        return labels
    return labels if row.kind == "out" and all(map(_OUTPUT.fullmatch, labels)) else ()


def _released(row: Holder, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that the release of a row takes away: its own, and all that have to go with it."""
    return tuple(dict.fromkeys((*texts, *row.together.targets))) if texts or row.is_shared else ()


def frees_of(row: Holder) -> int:
    """Return the bytes that the release of a row gives back, by its plan."""
    return row.frees if row.together.frees is None else row.together.frees


def abilities(rows: Rows, number: int) -> tuple[Ability, ...]:
    """Return all that a view may have done about a row: requests about it, and Clean stale where nothing else frees it."""
    can = rows.can[number]
    row = rows.holders[number]
    is_cleaned = row.stale_bytes and "release" not in can and not row.is_shared
    return (*can, "clean") if is_cleaned else can


def note_of(rows: Rows, number: int) -> str:
    """Return why a row cannot be released from here, or what does it; "" where it can be, or its description says so."""
    row, can = rows.holders[number], abilities(rows, number)
    if row.source == "workspaces":
        return _WORKSPACES_NOTE
    if row.is_shared or not row.roots or "release" in can or "clean" in can:
        return ""
    return _NOTES.get(row.kind, "")


def _functions(graph: Graph) -> frozenset[str]:
    """Return the steps to running and failed functions, as paths write them: ` → fit`."""
    return frozenset(
        label for node in graph.nodes for child, label in node.references if label and graph.nodes[child].kind == "frame"
    )


def _short_name(row: Holder, functions: Set[str]) -> str:
    """Return the name of an error's row where its path has no room: `error in fit()`; empty where its label does."""
    step = row.path.removeprefix(row.label).split(_STEP)[1:2] if row.kind == "error" else []
    return f"error in {step[0]}()" if step and _STEP + step[0] in functions else ""


def _can(graph: Graph, row: Holder, texts: Sequence[str], released: Sequence[str], training: Set[int]) -> tuple[Ability, ...]:
    """Return the requests that a row allows; `training` are the nodes that lead to a Learner with a running fit."""
    if not texts:
        why: tuple[Ability, ...] = ("why",) if row.roots or is_explained(row) else ()
        return (*why, "release") if released else why
    nodes = graph.roots[row.roots[0]].nodes
    may_foresee = (
        row.kind == "name" and any(graph.nodes[node].kind == "learner" for node in nodes) and training.isdisjoint(nodes)
    )
    may_park = row.kind == "name" and row.retained > 0 and _is_movable(graph, nodes) and training.isdisjoint(nodes)
    return ("why", "release", *(("park",) if may_park else ()), *(("foresee",) if may_foresee else ()))


def _is_movable(graph: Graph, nodes: Iterable[int]) -> bool:
    """Say whether this is an experiment, a tensor or a container, which parking is for."""
    facts = (graph.nodes[node] for node in nodes)
    return any(fact.kind in _PARKED_KINDS or fact.type_name in _CONTAINERS for fact in facts)
