"""The Learners of a notebook: each by the shortest way to it, with its bytes, and a stale one's keeper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nbguard.frontend.sidebar.protocol.rows import Rows
from nbguard.frontend.sidebar.protocol.state import Ability, Experiment
from nbguard.frontend.sidebar.protocol.truncation import truncate_utf8
from nbguard.memory.core.facts import Facts, Graph, LearnerFact, Root
from nbguard.memory.core.references.graph import STALE_KINDS, path_text, shortest_path
from nbguard.memory.core.references.owner_sets import bits_of, owners_of_nodes, owners_of_storages
from nbguard.units import format_bytes

_ORDER = ("name", "module", "frame", "library", "out", "error", "cache", "garbage")
_WAYS = 8
"""Of so many roots that lead to a Learner the shortest way is looked for: of thousands, another would hardly be shorter."""
_SHORT = 5


@dataclass(frozen=True, slots=True)
class _Route:
    """A way to write a Learner."""

    root: Root  # it starts from
    number: int  # of the root
    text: str  # `runs['a'].learn`
    is_direct: bool  # the root is the Learner itself


def experiments(facts: Facts, rows: Rows) -> tuple[Experiment, ...]:
    """Return the Learners, the one that trains first, then the largest, and other parked objects last."""
    listed = sorted(_learners(facts, rows), key=lambda row: (row.state != "training", row.state == "stale", -row.nbytes))
    parked: dict[str, int] = {}
    for fact in facts.parked:
        parked[fact.label] = parked.get(fact.label, 0) + fact.nbytes
    where = "host memory" if facts.tracked != "cpu" else "a file"
    for label, nbytes in parked.items():
        note = f"{format_bytes(nbytes)} parked in {where}"
        known = next((n for n, row in enumerate(listed) if row.label == label), None)
        can: tuple[Ability, ...] = ("unpark",) if truncate_utf8(label) == label else ()
        if known is None:
            listed.append(
                Experiment(id=None, label=truncate_utf8(label), summary="", nbytes=0, state="parked", note=note, can=can)
            )
        elif listed[known].state != "training":
            listed[known] = replace(listed[known], id=None, state="parked", note=note, can=can)
    return tuple(sorted(listed, key=lambda row: row.state == "parked"))


def names_of_learners(facts: Facts) -> dict[int, str]:
    """Return how one would write each Learner, by its id while it lives."""
    routes = zip(facts.learners, _routes(facts), strict=True)
    return {facts.graph.nodes[learner.node].ref: truncate_utf8(route.text) for learner, route in routes if route is not None}


def _learners(facts: Facts, rows: Rows) -> Iterator[Experiment]:
    graph = facts.graph
    apart = [n for n, node in enumerate(graph.nodes) if node.kind in ("frame", "traceback")]  # an error's objects are not its
    owners = owners_of_nodes(graph, [[learner.node] for learner in facts.learners], blocked=apart)
    nbytes = [0] * len(facts.learners)
    for storage, mask in zip(graph.storages, owners_of_storages(graph, owners), strict=True):
        for number in bits_of(mask):
            nbytes[number] += storage.nbytes
    own = [(number, row) for number, row in enumerate(rows.holders) if not row.is_shared]
    places = {root: number for number, row in reversed(own) for root in row.roots}
    for number, (learner, route) in enumerate(zip(facts.learners, _routes(facts), strict=True)):
        if route is None:
            continue
        place = places.get(route.number)
        yield Experiment(
            id=place,
            label=truncate_utf8(route.text),
            summary=truncate_utf8(_summary(learner)),
            nbytes=nbytes[number],
            state="training" if learner.is_running else "stale" if route.root.kind in STALE_KINDS else "live",
            cell=route.root.cell,
            workers=_workers(facts, owners, number),
            note="" if learner.is_running or route.root.kind in ("name", "module") else _kept_by(route.root),
            can=() if place is None else _can(rows.can[place], route),
        )


def _routes(facts: Facts) -> Iterator[_Route | None]:
    """Yield the best way to each Learner: by a name of the user's if there is one, then the shortest."""
    graph = facts.graph
    leading = owners_of_nodes(graph, [root.nodes for root in graph.roots]) if facts.learners else []
    for learner in facts.learners:
        candidates = sorted(bits_of(leading[learner.node]), key=lambda number: _rank(graph, number, learner.node))
        yield min(
            (_route(graph, number, learner.node) for number in candidates[:_WAYS]),
            key=lambda route: (_ORDER.index(route.root.kind), not route.is_direct, len(route.text), route.text),
            default=None,
        )


def _rank(graph: Graph, number: int, node: int) -> tuple[int, bool, int]:
    root = graph.roots[number]
    return _ORDER.index(root.kind), node not in root.nodes, len(root.label)


def _route(graph: Graph, number: int, node: int) -> _Route:
    root = graph.roots[number]
    path = shortest_path(graph, root, {node})
    return _Route(root, number, path_text(graph, root, path, shorten=_SHORT), node in root.nodes)


def _can(row: tuple[Ability, ...], route: _Route) -> tuple[Ability, ...]:
    """Return the requests that a Learner allows: all those of its row, if that is nothing but the Learner."""
    return row if route.is_direct else tuple(ability for ability in row if ability == "why")


def _summary(learner: LearnerFact) -> str:
    """Return the parts of a Learner in words; its type stands before them where it is not plain `Learner`."""
    return " · ".join(learner.names[1:] if learner.names[0] == "Learner" and len(learner.names) > 1 else learner.names)


def _workers(facts: Facts, owners: Sequence[int], number: int) -> int:
    """Return how many worker processes of a Learner's DataLoaders run now."""
    mine = (fact for fact in facts.workers if fact.node is not None and owners[fact.node] >> number & 1)
    return sum(len(fact.processes) for fact in mine)


def _kept_by(root: Root) -> str:
    words = {"error": f"the {root.label}", "garbage": "a cycle that Python has not collected yet"}
    return f"kept by {words.get(root.kind, truncate_utf8(root.label, 60))}"
