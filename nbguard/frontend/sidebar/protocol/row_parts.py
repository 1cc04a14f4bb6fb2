"""The parts of a holder's row in the words of a training loop: model, gradients, optimizer, earlier Learners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from nbguard.frontend.sidebar.protocol.state import RowPart
from nbguard.memory.core.facts import Graph, LearnerFact
from nbguard.memory.core.references.graph import nbytes_of
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.references.owner_sets import owners_of_nodes, owners_of_storages

_KINDS = (("model", "model"), ("optimizer", "optimizer"), ("loader", "data"))
"""Kinds of a Learner's attributes, in the order of precedence for a storage that several lead to, with their words."""


def row_parts(
    graph: Graph, learners: Sequence[LearnerFact], rows: Sequence[Holder], storages: Sequence[Set[int]]
) -> tuple[tuple[RowPart, ...], ...]:
    """Return the parts of each row, which add up to its bytes; none where the row is one thing. One pass for all rows.

    Args:
        graph: the references of the scan.
        learners: the Learners in it.
        rows: the holders.
        storages: numbers of the storages that each row's bytes are.
    """
    if not learners:
        return tuple(() for _ in rows)
    groups = [group for learner in learners for group in _groups(graph, learner)]
    masks = owners_of_storages(graph, owners_of_nodes(graph, groups))
    gradients = {
        storage
        for node in graph.nodes
        for child, label in node.references
        if label == ".grad"
        for storage in graph.nodes[child].storages
    }
    direct = {learner.node: number for number, learner in enumerate(learners)}
    return tuple(
        tuple(_parts(graph, direct, row, own, masks, gradients)) if own and not row.is_shared else ()
        for row, own in zip(rows, storages, strict=True)
    )


def _groups(graph: Graph, learner: LearnerFact) -> Iterator[list[int]]:
    """Yield the nodes of each part of a Learner that lead to its storages, and those of the Learner itself."""
    children = graph.nodes[learner.node].children
    for kind, _ in _KINDS:
        yield [child for child in children if graph.nodes[child].kind == kind]
    yield [learner.node]


def _parts(
    graph: Graph, direct: dict[int, int], row: Holder, own: Set[int], masks: Sequence[int], gradients: Set[int]
) -> Iterator[RowPart]:
    """Yield the parts of one row, largest first; nothing where it has only one."""
    width = len(_KINDS) + 1
    learner = next((direct[node] for root in row.roots for node in graph.roots[root].nodes if node in direct), None)
    storages_of: dict[str, set[int]] = {}
    for storage in own:
        if learner is None:
            is_reached = any(masks[storage] >> place & 1 for place in range(width - 1, width * len(direct), width))
            label = "Learners" if is_reached else "the rest"
        else:
            mask = masks[storage] >> learner * width
            reached = next((words for place, (_, words) in enumerate(_KINDS) if mask >> place & 1), "the rest")
            label = "gradients" if storage in gradients else reached
        storages_of.setdefault(label, set()).add(storage)
    sized = sorted(
        ((nbytes_of(graph, part), label) for label, part in storages_of.items()), key=lambda each: (-each[0], each[1])
    )
    parts = [RowPart(label, nbytes) for nbytes, label in sized if nbytes]
    if len(parts) > 1:
        yield from parts
