"""The paths that keep something alive as a compact tree: what they have in common is written once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nbguard.memory.references.explain import Path, Why
from nbguard.render.blocks import Block, Line, Section, Table, TableRow
from nbguard.units import format_bytes

_WIDEST = 200
"""Characters of a line of the tree."""


@dataclass(slots=True)
class _Node:
    text: str
    below: dict[str, _Node] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    ends: bool = False  # whether a path ends here


def why_blocks(why: Why) -> Iterator[Block]:
    """Yield the head and the tree of an explanation."""
    if why.deleted is None:
        yield Section(why.name, why.what, " · ".join(_figures(why)))
    else:
        left = f"{format_bytes(why.nbytes)} of it are still in memory" if why.nbytes else "nothing of it is left in memory"
        yield Section(why.name, why.what, f"deleted in In[{why.deleted}]: {left}")
    if why.paths:
        yield Table(rows=tuple(branches(why)), code=(0, 3), chips=(2,), widest=_WIDEST)
    elif why.nbytes or why.deleted is None:
        yield Line("none of your names leads to it", "dim")


def _figures(why: Why) -> Iterator[str]:
    """Yield the figures of a name: those of its row in the report."""
    if why.together.command:
        others = ", ".join(text for text in why.together.targets if text != why.name)
        yield f"with {others}: {format_bytes(why.together.frees or 0)}"
    elif why.frees is not None:
        yield f"frees now {format_bytes(why.frees)}"
    yield f"reaches {format_bytes(why.nbytes)}"


def branches(why: Why) -> Iterator[TableRow]:
    """Yield the lines of the tree: path, cell, stale, and the line that cuts the path."""
    roots: dict[str, _Node] = {}
    for path in why.paths:
        level = roots
        for place, step in enumerate(path.steps):
            node = level.setdefault(step, _Node(step))
            node.paths.append(path)
            node.ends |= place == len(path.steps) - 1
            level = node.below
    for label, count in why.more:
        roots[label].below[""] = _Node(f"{count} more")
    yield from _lines(list(roots.values()), "", is_root=True)


def _lines(nodes: Sequence[_Node], rails: str, *, is_root: bool = False, above: str = "") -> Iterator[TableRow]:
    """Yield the lines of nodes and of those below; a way to release that stands `above` already is not repeated."""
    for place, node in enumerate(map(_joined, nodes)):
        is_last = place == len(nodes) - 1
        ways = {path.advice.command for path in node.paths}
        release = next(iter(ways)) if len(ways) == 1 else ""
        cells = (node.text.strip(), *(_root_cells(node.paths) if is_root else ("", "")))
        yield TableRow(
            cells=(*cells, "" if release == above else release),
            rails=f"{rails}{'└─' if is_last else '├─'} ",
        )
        below = list(node.below.values())
        yield from _lines(below, f"{rails}{'   ' if is_last else '│  '}", above=release or above)


def _joined(node: _Node) -> _Node:
    """Return a node with the only one below it in the same line, as long as there is only one."""
    text = node.text
    while len(node.below) == 1 and not node.ends:
        (node,) = node.below.values()
        text += node.text
    return _Node(text, node.below, node.paths, node.ends)


def _root_cells(paths: Sequence[Path]) -> tuple[str, str]:
    """Return the cell of a root (and whether the root leads to the memory only), and whether it is stale."""
    first = paths[0]
    words = [f"In[{first.cell}]"] if first.cell is not None else []
    words += ["its memory"] if not first.stale and all(path.storages_only for path in paths) else []
    return ", ".join(words), "stale" if first.stale else ""
