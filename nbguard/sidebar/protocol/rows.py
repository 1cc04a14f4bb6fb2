"""The rows of a memory state by number: the name of each in a request, and the requests that may be made about it.

A browser names rows by their place in this table, never by text. So the table is made from the facts alone, in the same way
for the state that is sent and for looking a number up.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from nbguard.cleanup.plan.default import default_plan, holders_of
from nbguard.memory.analysis import Analysis
from nbguard.memory.facts import Graph
from nbguard.memory.references.graph import leading_to, reach
from nbguard.memory.references.holders import Holder
from nbguard.sidebar.protocol.state import Ability

_OUTPUT = re.compile(r"Out\[\d+\]")
_PARKED_KINDS = frozenset({"learner", "model", "optimizer", "tensor"})
_CONTAINERS = frozenset({"list", "tuple", "dict", "L"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a memory state, as columns by the number of the row."""

    devices: tuple[str, ...]  # device of the row, as torch calls it
    holders: tuple[Holder, ...]
    targets: tuple[tuple[str, ...], ...]  # texts for `release` and `park`: `learn`, `Out[9]`, all names of one object; or none
    roots: tuple[str, ...]  # label of the root to explain; empty where no root leads to the row
    can: tuple[tuple[Ability, ...], ...]  # requests that a sidebar may make about the row

    def texts(self, what: str, ids: Iterable[int]) -> tuple[str, ...] | None:
        """Return what the rows `ids` are called; None if there is no such row, or one of them cannot `what`."""
        numbers = tuple(ids)
        if not numbers or not all(0 <= number < len(self.can) and what in self.can[number] for number in numbers):
            return None
        return tuple(dict.fromkeys(text for number in numbers for text in self.targets[number]))


def rows_of(analysis: Analysis) -> Rows:
    """Return the rows of every device, the largest holders first.

    The default cleanup only decides which rows are called stale: the numbers are the same whatever it would free.
    """
    beside = analysis.once(beside_running_code)
    graph = beside.facts.graph
    every = [(device.name, row) for device in beside.devices for row in device.once(holders_of)]
    every.sort(key=lambda each: -each[1].retained)
    training = leading_to(graph, (learner.node for learner in beside.facts.learners if learner.is_running))
    rows = [row for _, row in every]
    targets = tuple(_targets(graph, row) for row in rows)
    return Rows(
        devices=tuple(device for device, _ in every),
        holders=tuple(rows),
        targets=targets,
        roots=tuple(graph.roots[row.roots[0]].label if row.roots else "" for row in rows),
        can=tuple(_can(graph, row, texts, training) for row, texts in zip(rows, targets, strict=True)),
    )


def beside_running_code(analysis: Analysis) -> Analysis:
    """Return an analysis with running functions as holders only of what no name leads to.

    While a cell trains `learn`, its functions hold the same Learner: it stays `learn`, not something that they share.
    """
    graph = analysis.facts.graph
    if not any(root.kind == "frame" for root in graph.roots):
        return analysis
    named = reach(graph, (node for root in graph.roots if root.kind in ("name", "module") for node in root.nodes))
    roots = (
        replace(root, nodes=tuple(node for node in root.nodes if node not in named)) if root.kind == "frame" else root
        for root in graph.roots
    )
    return analysis.with_graph(replace(graph, roots=tuple(roots)), default_plan)


def _targets(graph: Graph, row: Holder) -> tuple[str, ...]:
    """Return what a row is called where that can be asked for: by its names, or as a displayed result."""
    labels = tuple(graph.roots[root].label for root in row.roots)
    if row.kind == "name" and all(label.isidentifier() and not keyword.iskeyword(label) for label in labels):
        return labels
    return labels if row.kind == "out" and all(map(_OUTPUT.fullmatch, labels)) else ()


def _can(graph: Graph, row: Holder, texts: Sequence[str], training: Set[int]) -> tuple[Ability, ...]:
    """Return what may be asked of a row; `training` are the nodes that lead to a Learner on which a fit runs."""
    if not texts:
        return ()
    nodes = graph.roots[row.roots[0]].nodes
    may_park = row.kind == "name" and row.retained > 0 and _is_movable(graph, nodes) and training.isdisjoint(nodes)
    return ("why", "release", "park") if may_park else ("why", "release")


def _is_movable(graph: Graph, nodes: Iterable[int]) -> bool:
    """Say whether this is an experiment, a tensor or a container: what parking is for."""
    facts = (graph.nodes[node] for node in nodes)
    return any(fact.kind in _PARKED_KINDS or fact.type_name in _CONTAINERS for fact in facts)
