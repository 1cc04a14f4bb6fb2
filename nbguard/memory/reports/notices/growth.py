"""Diagnosis of a cell that is run again, whether each run leaves more in memory, and where it piles up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nbguard.memory.cleanup.plan.promises import promised
from nbguard.memory.core.advice import Advice
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.references.explain import Path
from nbguard.memory.core.references.graph import GRAPH
from nbguard.memory.reports.notices.judge import HeldStorages, held_storages, paths_to, roots_of, shape_of, storage_numbers
from nbguard.memory.reports.notices.notice import Notice


def judge_growth(
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
    lines = _lines(analysis, paths, nbytes)
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
        keeps_graph=any(GRAPH in step for step in paths[0].steps),
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


def by_label(held: HeldStorages) -> Counter[str]:
    """Return the bytes that each root leads to, by its label."""
    nbytes = Counter[str]()
    for size, labels in held.values():
        for label in labels:
            nbytes[label] += size
    return nbytes
