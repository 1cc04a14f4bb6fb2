"""The rows of a memory state by number, with the name of each in a request, and the requests that may be made about it.

A browser names rows by their place in this table, never by text. So the table is made from the facts alone, in the same way
for the state that is sent and for looking a number up.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from nbguard.frontend.sidebar.protocol.state import Ability, Experiment, RowPart
from nbguard.frontend.sidebar.protocol.ticks import truncate_utf8
from nbguard.memory.cleanup.figures import holdings_on
from nbguard.memory.cleanup.plan.parking import default_plan, holders_of
from nbguard.memory.core.advice import HARD, least_of_rows
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, Graph, LearnerFact, Node, Root
from nbguard.memory.core.references.explain import is_explained
from nbguard.memory.core.references.graph import (
    STALE_KINDS,
    leading_to,
    nbytes_of,
    path_text,
    reach,
    shortest_path,
    storages_of,
)
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.references.owner_sets import bits_of, owners_of_nodes, owners_of_storages
from nbguard.units import format_bytes

# --- The parts of a holder's row in the words of a training loop: model, gradients, optimizer, earlier Learners.


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
    """Return the bytes that the release of a row gives back, by its plan; no cache is emptied by it."""
    is_with_others = row.is_shared or row.others
    return row.together.frees if is_with_others and row.together.frees is not None else row.frees


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
    may_predict = (
        row.kind == "name" and any(graph.nodes[node].kind == "learner" for node in nodes) and training.isdisjoint(nodes)
    )
    may_park = row.kind == "name" and row.retained > 0 and _is_movable(graph, nodes) and training.isdisjoint(nodes)
    return ("why", "release", *(("park",) if may_park else ()), *(("predict",) if may_predict else ()))


def _is_movable(graph: Graph, nodes: Iterable[int]) -> bool:
    """Say whether this is an experiment, a tensor or a container, which parking is for."""
    facts = (graph.nodes[node] for node in nodes)
    return any(fact.kind in _PARKED_KINDS or fact.type_name in _CONTAINERS for fact in facts)


# --- The Learners of a notebook: each by the shortest way to it, with its bytes, and a stale one's keeper.


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
            can=() if place is None else _can_of_experiments(rows.can[place], route),
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


def _can_of_experiments(row: tuple[Ability, ...], route: _Route) -> tuple[Ability, ...]:
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
