"""Paths as a compact tree: what they have in common is written once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nbguard.memory.explain import Path, Why


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One line of the tree: `rails` and `text` stand together; the rest are columns, empty where there is nothing to say."""

    rails: str
    text: str
    cell: str
    mark: str
    release: str


@dataclass(slots=True)
class _Node:
    text: str
    below: dict[str, _Node] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    ends: bool = False


def branches(why: Why) -> Iterator[Branch]:
    """Yield the lines of the tree of an explanation."""
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


def _lines(nodes: Sequence[_Node], rails: str, *, is_root: bool = False, said: str = "") -> Iterator[Branch]:
    for place, node in enumerate(map(_joined, nodes)):
        is_last = place == len(nodes) - 1
        release = {path.release for path in node.paths}
        line = next(iter(release)) if len(release) == 1 else ""
        cell, mark = _root_columns(node.paths) if is_root else ("", "")
        yield Branch(
            rails=f"{rails}{'└─' if is_last else '├─'} ",
            text=node.text.strip(),
            cell=cell,
            mark=mark,
            release="" if line == said else line,
        )
        below = list(node.below.values())
        yield from _lines(below, f"{rails}{'   ' if is_last else '│  '}", said=line or said)


def _joined(node: _Node) -> _Node:
    """Return a node with the only one below it in the same line, as long as there is only one."""
    text = node.text
    while len(node.below) == 1 and not node.ends:
        (node,) = node.below.values()
        text += node.text
    return _Node(text, node.below, node.paths, node.ends)


def _root_columns(paths: Sequence[Path]) -> tuple[str, str]:
    first = paths[0]
    cell = f"In[{first.cell}]" if first.cell is not None else ""
    return cell, "stale" if first.stale else "its memory" if all(path.storages_only for path in paths) else ""
