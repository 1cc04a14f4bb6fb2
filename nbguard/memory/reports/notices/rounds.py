"""Rounds of one action or cell compared by the memory that each left, and the place where it piles up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar

from nbguard.memory.cleanup.plan.parking import default_plan
from nbguard.memory.cleanup.plan.plan import Action
from nbguard.memory.cleanup.plan.promises import promised
from nbguard.memory.core.advice import Advice, release_stale
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Root
from nbguard.memory.core.references.explain import Path
from nbguard.memory.core.references.graph import GRAPH, STALE_KINDS, nbytes_of, reach, shortest_path, storages_of
from nbguard.memory.core.references.owner_sets import components
from nbguard.memory.core.references.releases import detached, release_of_way
from nbguard.memory.reports.notices.causes import (
    HeldStorages,
    held_storages,
    paths_to,
    roots_of,
    shape_of,
    storage_numbers,
    telling_path,
)
from nbguard.memory.reports.notices.notice import Notice, NoticeKind, StorageKey
from nbguard.render.html import Block, Line, Table, TableRow
from nbguard.render.result import Result
from nbguard.units import counted, format_bytes

# --- Diagnosis of a cell's leftovers without a user's name: by its error, by a result, by a cache of a library.


_STEPS = ("out", "leftovers", "cache")
"""Steps of a cleanup that let go of the leftovers of a cell that ended well."""


def diagnose_left(analysis: Analysis, cell: int, former: HeldStorages | None, least: int, *, raised: bool) -> Notice | None:
    """Return the notice on the cell's leftovers without a name, or None if they are less than `least` bytes.

    `former` are the bytes held at the last scan before it, or None without one: then only the cell's own error and result
    count. An out-of-memory error has a card of its own.
    """
    if raised:
        return None if analysis.facts.oom is not None else _of_error(analysis, cell, least)
    return _of_result(analysis, cell, former, least) or _of_library(analysis, cell, former, least)


def is_still_held(analysis: Analysis, notice: Notice, alive: Collection[StorageKey]) -> bool:
    """Say whether a notice that is about no name still holds: its holders have some of these storages, or they are stale."""
    if release_stale() in notice.advice:
        return not analysis.once(default_plan).storages.isdisjoint(storage_numbers(analysis.facts.graph, alive))
    held = analysis.once(held_storages)
    return any(held[key][1] & notice.roots for key in alive if key in held)


def _of_error(analysis: Analysis, cell: int, least: int) -> Notice | None:
    plan = analysis.once(default_plan)
    nbytes = sum(action.nbytes or 0 for action in plan.actions if action.kind in ("error", "leftovers"))
    if nbytes < least:
        return None
    return _stale(analysis, "error", cell, nbytes, "last error", "error")


def _of_result(analysis: Analysis, cell: int, former: HeldStorages | None, least: int) -> Notice | None:
    """Return the notice on an experiment that the cell has shown or left, and that no name leads to."""
    plan, graph = analysis.once(default_plan), analysis.facts.graph
    actions = [action for action in plan.actions if action.kind in _STEPS and (action.nbytes or 0) >= least]
    come = set[int]() if former is None else plan.storages & storage_numbers(graph, _came(analysis, former))
    has_come = nbytes_of(graph, come) >= least
    own = [action for action in actions if f"Out[{cell}]" in action.names or (action.kind == "leftovers" and has_come)]
    if not own:
        return None
    action = max(own, key=lambda one: one.nbytes or 0)
    return _stale(analysis, "left", cell, action.nbytes or 0, _holder(action), action.kind)


def _holder(action: Action) -> str:
    return action.names[0] if action.kind == "out" else action.subject


def _came(analysis: Analysis, former: HeldStorages) -> set[StorageKey]:
    """Return the storages that were not held before; one at the same address and of another size is another one."""
    held = analysis.once(held_storages)
    return {key for key, (nbytes, _) in held.items() if key not in former or former[key][0] != nbytes}


def _of_library(analysis: Analysis, cell: int, former: HeldStorages | None, least: int) -> Notice | None:
    """Return the notice on the cache or container of a library that alone kept the cell's objects, if a line empties it."""
    if former is None:
        return None
    libraries = {root.label: root for root in analysis.facts.graph.roots if root.kind == "library"}
    kept: dict[str, set[StorageKey]] = {}
    for key in _came(analysis, former):
        labels = analysis.once(held_storages)[key][1]
        if labels <= libraries.keys():
            kept.setdefault(min(labels), set()).add(key)
    for label, keys in kept.items():
        line = _release_line(analysis, libraries[label], keys)
        if line is not None and (line.frees or 0) >= least:
            text = telling_path(analysis, label, keys).text
            nbytes = sum(analysis.once(held_storages)[key][0] for key in keys)
            return Notice(
                kind="left",
                name=label,
                names=(label,),
                cell=cell,
                nbytes=nbytes,
                holders=(text,),
                advice=(line,),
                frees=line.frees,
                shape=f"In[{cell}]: {label}",
                storages=frozenset(keys),
                roots=frozenset({label}),
            )
    return None


def _release_line(analysis: Analysis, root: Root, keys: Collection[StorageKey]) -> Advice | None:
    graph = analysis.facts.graph
    numbers = storage_numbers(graph, keys)
    carriers = {n for n, node in enumerate(graph.nodes) if numbers.intersection(node.storages)}
    line = release_of_way(graph, root, shortest_path(graph, root, carriers))
    return replace(line, frees=promised(analysis.facts, (line,))) if line.is_code and line.cut else None


def _stale(analysis: Analysis, kind: NoticeKind, cell: int, nbytes: int, holder: str, step: str) -> Notice:
    frees = promised(analysis.facts, (release_stale(),))
    graph = analysis.facts.graph
    return Notice(
        kind=kind,
        name=holder,
        names=(holder,),
        cell=cell,
        nbytes=nbytes,
        holders=(holder,),
        advice=(release_stale(frees),),
        frees=frees,
        shape=f"In[{cell}]: {step} {holder}",
        storages=frozenset((graph.storages[n].device, graph.storages[n].address) for n in analysis.once(default_plan).storages),
        roots=frozenset(root.label for root in graph.roots if root.kind in STALE_KINDS),
    )


# --- Diagnosis of a cell that is run again, whether each run leaves more in memory, and where it piles up. Pure.


def diagnose_growth(
    analysis: Analysis, cell: int, former: HeldStorages, least: int, former_cell: int | None = None
) -> Notice | None:
    """Return the notice on a cell that leaves more at each run, or None if nothing holds more than after the run before.

    `former` are the bytes held then, `former_cell` is the number of that run. Names that other cells bound since are not this
    one's.
    """
    graph, held = analysis.facts.graph, analysis.once(held_storages)
    grown = by_label(held)
    grown.subtract(by_label(former))
    between = range(cell if former_cell is None else former_cell + 1, cell)
    others = {root.label for root in graph.roots if root.cell in between}
    growing = {label for label, nbytes in grown.items() if nbytes >= least} - others
    came = {key for key, (_, labels) in held.items() if key not in former and labels & growing}
    nbytes = min(
        sum(held[key][0] for key in came), sum(nbytes for nbytes, _ in held.values()) - sum(n for n, _ in former.values())
    )
    if nbytes < least:
        return None
    left = storage_numbers(graph, came)
    roots = {n for storage in left for n in roots_of(analysis, storage) if graph.roots[n].label in growing}
    paths, _ = paths_to(analysis.facts, None, left, roots)
    paths.sort(key=lambda path: -grown[path.steps[0]])
    graphs = _graph_lines(analysis, paths, nbytes)
    lines = _lines(analysis, paths, nbytes) or graphs
    return Notice(
        kind="growth",
        name=paths[0].steps[0],
        names=(paths[0].steps[0],),
        cell=cell,
        nbytes=nbytes,
        holders=tuple(dict.fromkeys(path.text.partition(GRAPH)[0] for path in paths)),
        holder_kind=next(root.kind for root in graph.roots if root.label == paths[0].steps[0]),
        advice=lines,
        frees=promised(analysis.facts, lines) if lines else None,
        shape=shape_of(graph, paths[0]),
        holder_cell=paths[0].cell,
        keeps_graph=bool(graphs) or any(GRAPH in step for step in paths[0].steps),
        storages=frozenset(came),
        roots=frozenset(growing),
    )


def _lines(analysis: Analysis, paths: Iterable[Path], least: int) -> tuple[Advice, ...]:
    """Return the line that has the holder itself, or a library, let go of the piled-up objects; none that deletes a name."""
    kinds = {root.label: root.kind for root in analysis.facts.graph.roots}
    for path in paths:
        line = path.advice
        if line.is_code and line.cut and (line.is_own or kinds[path.steps[0]] == "library"):
            frees = promised(analysis.facts, (line,))
            if frees is not None and frees >= least:
                return (line,)
    return ()


def _graph_lines(analysis: Analysis, paths: Iterable[Path], least: int) -> tuple[Advice, ...]:
    """Return the lines that keep the piled-up values without their graphs, where that frees as much as each run leaves."""
    roots = {root.label: root for root in analysis.facts.graph.roots}
    lines = [detached(analysis.facts.graph, roots[label]) for label in dict.fromkeys(path.steps[0] for path in paths)]
    return tuple(lines) if all(line.command for line in lines) and (promised(analysis.facts, lines) or 0) >= least else ()


def by_label(held: HeldStorages) -> Counter[str]:
    """Return the bytes that each root leads to, by its label."""
    nbytes = Counter[str]()
    for size, labels in held.values():
        for label in labels:
            nbytes[label] += size
    return nbytes


_PLAIN = frozenset({"dict", "list", "tuple", "set", "cell", "method"})
"""Types of objects that tell nothing about a cycle, where it has others."""
_NAMED = 3
"""Types that a cycle is told by."""
_TRIED = 50
"""Cycles among which the one that keeps most is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftByRounds:
    """Memory that one holder has more of after each round."""

    holder: str  # where it piles up, as one would write it
    nbytes: int  # bytes per round, on average, without the first
    keeps_graph: bool  # autograd graphs keep it
    cell: int | None = None  # number of the cell that the holder stems from
    command: str = field(default="", metadata={"json": False})  # line that lets go of it, where the holder or a library has one
    line: str = ""  # line of the user's that allocated most of it: `In[7], line 3 in step()`; empty where unknown


@dataclass(frozen=True, slots=True)
class Garbage:
    """Memory that no name leads to any more, and that is freed only when Python's garbage collector runs."""

    nbytes: int
    cycle: tuple[str, ...]  # types of the objects that refer to each other in a circle and keep most of it


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsReport(Result):
    """The answer of `%gpumem leak` and of `nbguard.watch`, with the memory that each round left and its holders."""

    kind: ClassVar[str] = "rounds"
    view: ClassVar[str] = "nbguard.memory.reports.notices.rounds:rounds_blocks"

    action: str  # the expression, or the name of the watch
    rounds: tuple[int, ...]  # bytes that each round left and that are still held after the last one
    left: tuple[LeftByRounds, ...]  # by holder, the most first; the first round, which may fill caches, does not count
    garbage: tuple[Garbage, ...] = ()  # that each round left to the collector

    @property
    def leaks(self) -> bool:
        """Return whether every round but the first left something."""
        return len(self.rounds) > 1 and all(self.rounds[1:])


def compare_rounds(
    action: str,
    held: Sequence[HeldStorages],
    garbage: Sequence[Garbage],
    last: Analysis,
    lines: Mapping[StorageKey, str] | None = None,
) -> RoundsReport:
    """Return the report on rounds from the bytes `held` before the first and after each of them, and the `last` scan.

    Objects that each round replaces count once: a global that it binds again is at another address, and leaves no more than
    before. `garbage` are the bytes that each of them left to the collector, `lines` are the lines that allocated the storages,
    as far as they are known.
    """
    came = [{key for key in after if key not in before and key in held[-1]} for before, after in pairwise(held)]
    counting = came[1:] or came
    whole = [sum(nbytes for nbytes, _ in state.values()) for state in held]
    new = (sum(held[-1][key][0] for key in keys) for keys in came)
    rounds = tuple(max(0, min(nbytes, after - before)) for nbytes, (before, after) in zip(new, pairwise(whole), strict=True))
    grown = by_label(held[-1])
    grown.subtract(by_label(held[-1 - len(counting)]))
    piled_up: dict[str, set[StorageKey]] = {}
    for key in set().union(*counting):
        for label in held[-1][key][1]:
            piled_up.setdefault(label, set()).add(key)
    left, of_libraries = [], {root.label for root in last.facts.graph.roots if root.kind == "library"}
    for label, keys in piled_up.items():
        nbytes = min(grown[label], sum(held[-1][key][0] for key in keys)) // len(counting)
        if nbytes <= 0:
            continue
        path = telling_path(last, label, keys)
        text = path.text.partition(GRAPH)[0]
        left.append(
            LeftByRounds(
                holder=text,
                nbytes=nbytes,
                keeps_graph=any(GRAPH in step for step in path.steps),
                cell=path.cell,
                command=path.advice.command if path.advice.is_own or label in of_libraries else "",
                line=_line(keys, held[-1], lines or {}),
            )
        )
    return RoundsReport(
        action=action,
        rounds=rounds,
        left=tuple(sorted(left, key=lambda one: -one.nbytes)),
        garbage=tuple(garbage),
    )


def garbage_of(analysis: Analysis) -> Garbage:
    """Return the bytes that wait for the collector in a scan, and the cycle that keeps most of it."""
    graph = analysis.facts.graph
    held = analysis.once(held_storages)
    tops = [node for root in graph.roots if root.kind == "garbage" for node in root.nodes]
    waiting = {
        n for n in storages_of(graph, reach(graph, tops)) if (graph.storages[n].device, graph.storages[n].address) not in held
    }

    def kept(cycle: Sequence[int]) -> int:
        return nbytes_of(graph, waiting & storages_of(graph, reach(graph, cycle)))

    found = components([node.children for node in graph.nodes], tops)
    cycles = [cycle for cycle in found if len(cycle) > 1 or cycle[0] in graph.nodes[cycle[0]].children]
    largest = max(sorted(cycles, key=len)[-_TRIED:], key=kept, default=[])
    types = [graph.nodes[node].type_name for node in reversed(largest)]
    telling = [name for name in types if name not in _PLAIN] or types
    return Garbage(nbytes_of(graph, waiting), tuple(dict.fromkeys(telling))[:_NAMED])


def _garbage_lines(report: RoundsReport) -> Iterator[Block]:
    """Yield a sentence on the memory that each round leaves to the collector."""
    if any(each.nbytes for each in report.garbage):
        amounts = ", ".join(format_bytes(each.nbytes) for each in report.garbage)
        cycle = max(report.garbage, key=lambda each: each.nbytes).cycle
        through = f": a cycle through {' and '.join(cycle)}" if cycle else ""
        runs = counted(len(report.garbage), "run")
        yield Line(f"{runs} of {report.action} left {amounts} that only Python's garbage collector frees{through}", "strong")
        yield Line("It piles up until the collector runs: break the cycle, or run  import gc; gc.collect()  after each run")


def _keeps(one: LeftByRounds) -> str:
    return "keeps it: " + one.command + " lets go of it" if one.command else "keeps it"


def _line(keys: Iterable[StorageKey], held: HeldStorages, lines: Mapping[StorageKey, str]) -> str:
    """Return the line that allocated most of these bytes."""
    nbytes = Counter[str]()
    for key in keys:
        nbytes[lines.get(key, "")] += held[key][0]
    return nbytes.most_common(1)[0][0]


def rounds_blocks(report: RoundsReport) -> Iterator[Block]:
    """Yield a sentence on the rounds, and a row for each holder that has more after each of them."""
    amounts = ", ".join(map(format_bytes, report.rounds))
    yield from _garbage_lines(report)
    if not any(report.rounds):
        if not any(each.nbytes for each in report.garbage):
            yield Line(f"{counted(len(report.rounds), 'run')} of {report.action} left nothing in memory", "strong")
        return
    is_first_alone = not any(report.rounds[1:])
    how = "each leaves more" if report.leaks else "the first alone does" if is_first_alone else "not each of them does"
    yield Line(f"{counted(len(report.rounds), 'run')} of {report.action} left {amounts}: {how}", "strong")
    rows = (
        TableRow(
            cells=(
                one.holder,
                f"{format_bytes(one.nbytes)} a run",
                "" if one.cell is None else f"In[{one.cell}]",
                f"allocated by {one.line}" if one.line else "",
                "keeps its graph: append loss.item() or t.detach()" if one.keeps_graph else _keeps(one),
            )
        )
        for one in report.left
    )
    if report.left:
        yield Table(rows=tuple(rows), figures=(1,), code=(0,), widest=120)
