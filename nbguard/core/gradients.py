"""Gradients that idle Learners keep: a fit leaves them, as large as the model, and the next one makes them anew."""

from __future__ import annotations

from nbguard.core.facts import Facts
from nbguard.core.ownership import nbytes_of, reach, reach_of_roots, storages_of


def idle_gradients(facts: Facts) -> tuple[tuple[str, int], ...]:
    """Return (name, bytes) for each idle Learner that a name leads to and whose gradients nothing else needs."""
    graph = facts.graph
    gradients = {
        (parent, child) for parent, node in enumerate(graph.nodes) for child, label in node.references if label == ".grad"
    }
    if not gradients:
        return ()
    running = {learner.node for learner in facts.learners if learner.is_running}
    named = [root for root in graph.roots if root.kind == "name" and len(root.nodes) == 1]
    learners = {root.nodes[0]: root.label for root in reversed(named) if graph.nodes[root.nodes[0]].kind == "learner"}
    everything = range(len(graph.roots))
    alive = storages_of(graph, reach_of_roots(graph, everything))
    found = []
    for node, label in learners.items():
        below = reach(graph, (node,))
        own = {edge for edge in gradients if edge[0] in below}
        nbytes = nbytes_of(graph, alive - storages_of(graph, reach_of_roots(graph, everything, own)))
        if nbytes and node not in running:
            found.append((label, nbytes))
    return tuple(found)


def zero_grad(label: str) -> str:
    """Return the line that frees the gradients of the Learner called `label`; the next fit makes new ones."""
    return f"{label}.model.zero_grad()"
