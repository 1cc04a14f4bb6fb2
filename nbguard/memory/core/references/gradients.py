"""Gradients that idle Learners keep. A fit leaves them, as large as the model, and the next one makes them again."""

from __future__ import annotations

from functools import reduce
from itertools import islice
from operator import and_

from nbguard.memory.core.advice import Advice, zero_gradients
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.references.graph import GRADIENT, Edge, nbytes_of, reach_of_roots
from nbguard.memory.core.references.owner_sets import bits_of, owners_of_nodes, owners_of_storages


def gradient_storages(facts: Facts) -> tuple[tuple[str, int, frozenset[int]], ...]:
    """Return (name, node, storages) for each idle Learner that a name leads to and whose gradients nothing else needs.

    All Learners in one pass: without any of their gradients' references, and with a bit for each set of Learners that have
    such references in common, which sets does each storage still depend on? A Learner that is in all of them frees it.
    """
    graph = facts.graph
    running = {learner.node for learner in facts.learners if learner.is_running}
    named = [root for root in graph.roots if root.kind == "name" and len(root.nodes) == 1]
    learners = {root.nodes[0]: root.label for root in reversed(named) if graph.nodes[root.nodes[0]].kind == "learner"}
    gradients = _gradients_by_learners(facts, list(learners))
    if not gradients:
        return ()
    everything = [node for root in graph.roots for node in root.nodes]
    groups = [everything, *([child for _, child in edges] for edges in gradients.values())]
    whose = [0, *gradients]
    own_storages: list[set[int]] = [set() for _ in learners]
    owners = owners_of_nodes(graph, groups, {edge for edges in gradients.values() for edge in edges})
    for storage, mask in enumerate(owners_of_storages(graph, owners)):
        if mask:
            for learner in bits_of(reduce(and_, (whose[bit] for bit in bits_of(mask)))):
                own_storages[learner].add(storage)
    named_storages = zip(learners.items(), own_storages, strict=True)
    return tuple((label, node, frozenset(own)) for (node, label), own in named_storages if own and node not in running)


def _gradients_by_learners(facts: Facts, learners: list[int]) -> dict[int, list[Edge]]:
    """Return the references to gradients below any of these Learners, by the set of those that they are below."""
    graph = facts.graph
    edges = [(parent, child) for parent, node in enumerate(graph.nodes) for child, text in node.references if text == GRADIENT]
    if not edges or not learners:
        return {}
    reached = reach_of_roots(graph, range(len(graph.roots)))
    below = owners_of_nodes(graph, [[learner] for learner in learners])
    by_learners: dict[int, list[Edge]] = {}
    for parent, child in edges:
        if below[parent] and parent in reached:
            by_learners.setdefault(below[parent], []).append((parent, child))
    return by_learners


def idle_gradients(facts: Facts) -> tuple[tuple[str, int], ...]:
    """Return (name, bytes) for each idle Learner that a name leads to and whose gradients nothing else needs."""
    sized = ((label, nbytes_of(facts.graph, storages)) for label, _, storages in gradient_storages(facts))
    return tuple((label, nbytes) for label, nbytes in sized if nbytes)


def zero_gradients_of(facts: Facts, label: str, frees: int | None = None) -> Advice:
    """Return the advice that frees the gradients of the Learner of a name, by the call that its library has for it."""
    nodes = {node for root in facts.graph.roots if root.label == label for node in root.nodes}
    calls = (call for node, call in facts.gradient_calls if node in nodes)
    return zero_gradients(label, frees, *islice(calls, 1))
