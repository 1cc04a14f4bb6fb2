"""The paths that keep something alive as a compact tree: their common steps are written once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nbguard.memory.core.references.explain import Path, Why
from nbguard.render.blocks import Block, Section, Table, TableRow, Title
from nbguard.texts import joined
from nbguard.units import format_bytes

_WIDEST = 200
"""Characters of a line of the tree."""
_LONGEST = 48
"""Characters of a way that the sentence has as a whole."""
_FEW = 4
"""Keepers that the sentence names."""
_WITH_ARTICLE = ("last error",)
"""Roots that are called by a noun."""


@dataclass(slots=True)
class _Node:
    text: str
    below: dict[str, _Node] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    ends: bool = False  # whether a path ends here


def why_blocks(why: Why) -> Iterator[Block]:
    """Yield the answer in a sentence, and the tree of the ways unless the one way is in the sentence."""
    yield Title(why_sentence(why), "strong")
    if why.nbytes or why.deleted is None:
        yield Section(why.name, why.what, " · ".join(_figures(why)))
    if len(why.paths) > 1 or why.more or any(len(path.steps) > 1 or not path.advice.is_code for path in why.paths):
        yield Table(rows=tuple(branches(why)), code=(0, 3), chips=(2,), widest=_WIDEST)


def why_sentence(why: Why) -> str:
    """Return the answer in a sentence, with the keeper of the thing and the line that lets it go."""
    left = f"{format_bytes(why.nbytes)} of it is still in memory"
    how = f"released by `{why.released_by}`" if why.released_by else "deleted"
    gone = f"`{why.name}` was {how} {'after' if why.is_between_cells else 'in'} In[{why.deleted}]"
    if why.deleted is None:
        keepers = _keepers(why) if why.paths else f"None of your names leads to `{why.name}`"
    elif not why.nbytes:
        return f"{gone}, and nothing of it is left in memory."
    elif not why.paths:
        return f"{gone}, but {left}, and none of your names leads to it."
    else:
        keepers = f"{gone}, but {left}: {_keepers(why)}"
    code = joined(", then ", (line.code for line in why.release))
    if not code:
        return f"{keepers}{_without_release(why)}."
    frees = f"frees {format_bytes(why.released)}" if why.released is not None else "lets go of it"
    return f"{keepers}; " + code + f" {frees}."


def _keepers(why: Why) -> str:
    """Return the subject and the verb: only the name `losses` (assigned in In[1]) keeps it."""
    first = sorted(why.paths, key=lambda path: path.text != why.name)
    own = list({path.steps[0]: path for path in reversed(first) if not path.storages_only}.values())[::-1]
    known = {path.steps[0] for path in own}
    sharing = {path.steps[0]: path for path in reversed(first) if path.steps[0] not in known}
    if len(own) + len(sharing) == 1 and not why.more:
        (path,) = own or sharing.values()
        words = f"only {'the name ' if path.text.isidentifier() else ''}{_keeper(path, 'assigned in ')}"
        verbs = ("keep it", "share its memory") if _is_plural([path]) else ("keeps it", "shares its memory")
        words += f" {verbs[0 if own else 1]}"
    else:
        groups = ((own, "keep it", "keeps it"), (list(sharing.values())[::-1], "share its memory", "shares its memory"))
        shown = ((_listed([*map(_keeper, paths)]), many if _is_plural(paths) else one) for paths, many, one in groups if paths)
        parts = [" ".join(each) for each in shown]
        words = ", and ".join(parts)
    return words if why.deleted is not None else words[0].upper() + words[1:]


def _is_plural(paths: Sequence[Path]) -> bool:
    return len(paths) > 1 or paths[0].steps[0].endswith("cycles")


def _keeper(path: Path, since: str = "") -> str:
    """Return a root and the cell that it stems from; a name with the place of the thing in it, unless that is long."""
    root = path.steps[0].strip()
    if not (root.isidentifier() or root.startswith("Out[")):
        return f"the {root}" if root in _WITH_ARTICLE else root
    whole = path.text if len(path.text) <= _LONGEST else root
    return f"`{whole}`" if path.cell is None or root.startswith("Out[") else f"`{whole}` ({since}In[{path.cell}])"


def _listed(words: Sequence[str]) -> str:
    """Return words as a list; of many, the first few and the number of the others."""
    if len(words) > _FEW:
        words = [*words[: _FEW - 1], f"{len(words) - _FEW + 1} others"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _without_release(why: Why) -> str:
    """Return why there is no line, where the ways say so."""
    effects = {path.advice.effect for path in why.paths if not path.advice.is_code and path.advice.effect}
    return f"; it is {next(iter(effects))}" if len(effects) == 1 and next(iter(effects)).startswith("freed") else ""


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
