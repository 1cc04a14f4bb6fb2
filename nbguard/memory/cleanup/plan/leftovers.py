"""Leftovers that an interrupted fit left on a Learner that is kept and idle, such as the batch, the prediction, the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nbguard.libraries import harmless_leftovers
from nbguard.memory.cleanup.plan.builder import PlanBuilder
from nbguard.memory.cleanup.plan.plan import Action
from nbguard.memory.core.facts import Graph, LearnerFact
from nbguard.memory.core.references.graph import Edge
from nbguard.memory.core.references.owner_sets import bits_of, owners_of_nodes, owners_of_storages

_LOSS = 1024
"""Least bytes of harmless leftovers that are mentioned; a fit that ended well leaves them, too (the bare number of the loss,
bars over a loader still in use)."""


def clear_leftovers(builder: PlanBuilder, only: Collection[int] | None = None) -> None:
    """Drop the leftovers of idle Learners, of those among the nodes `only` if these are given.

    A Learner that only an exception of the user's leads to stays as the exception left it.
    """
    graph = builder.graph
    live = builder.live(blocked={n for n, node in enumerate(graph.nodes) if node.kind in ("frame", "traceback")})
    wanted = live if only is None else live & set(only)
    idle = [fact for fact in builder.facts.learners if fact.node in wanted and not fact.is_running and fact.leftovers]
    cuts = [{edge for name in fact.leftovers for edge in _attribute_edges(graph, fact.node, name)} for fact in idle]
    for fact, cut, is_worth_it in _worth(builder, idle, cuts):
        if cut and is_worth_it:
            what = f"{fact.summary}: {', '.join(fact.leftovers)} of its last batch"
            builder.add(
                Action(
                    kind="leftovers",
                    subject=what,
                    participle="cleared",
                    nbytes=0,
                    refs=(graph.nodes[fact.node].ref,),
                    names=fact.leftovers,
                ),
                cut=cut,
            )


def _worth(
    builder: PlanBuilder, idle: list[LearnerFact], cuts: list[set[Edge]]
) -> Iterator[tuple[LearnerFact, set[Edge], bool]]:
    """Yield each Learner with its references, and whether they are mentioned, given that those before it go.

    All are examined in one pass: without any of these references, and with a bit for each of them, where does it lead?
    """
    graph = builder.graph
    edges = {edge: number for number, edge in enumerate(sorted({edge for cut in cuts for edge in cut}), start=1)}
    left = [node for number, root in enumerate(graph.roots) if number not in builder.gone for node in root.nodes]
    owners = owners_of_nodes(graph, [left, *([child] for _, child in edges)], builder.cut | edges.keys()) if edges else []
    behind: dict[int, dict[int, int]] = {}
    for storage, mask in enumerate(owners_of_storages(graph, owners) if edges else ()):
        if mask and not mask & 1:
            for bit in bits_of(mask):
                behind.setdefault(bit, {}).setdefault(mask, 0)
                behind[bit][mask] += graph.storages[storage].nbytes
    gone = 0
    for fact, cut in zip(idle, cuts, strict=True):
        own = sum(1 << edges[edge] for edge in cut)
        behind_cut = {mask: nbytes for edge in cut for mask, nbytes in behind.get(edges[edge], {}).items()}
        freed = sum(nbytes for mask, nbytes in behind_cut.items() if mask & ~gone and not mask & ~(gone | own))
        is_worth_it = freed >= _LOSS or not harmless_leftovers().issuperset(fact.leftovers)
        gone |= own if is_worth_it else 0
        yield fact, cut, is_worth_it


def _attribute_edges(graph: Graph, owner: int, name: str) -> set[Edge]:
    """Return the references that go when the attribute `name` of the node `owner` (`xb`, `progress.pbar`) is removed."""
    first, _, rest = name.partition(".")
    places = {owner, *(child for child, label in graph.nodes[owner].references if not label)}
    edges = {(place, child) for place in places for child, label in graph.nodes[place].references if label == f".{first}"}
    return {edge for _, child in edges for edge in _attribute_edges(graph, child, rest)} if rest else edges
