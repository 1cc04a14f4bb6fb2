"""The page docs/rooms.md and its picture, made from the imports of the package: python docs/make_rooms.py writes both anew."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rooms.md"
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"

Arrows = dict[str, set[str]]
"""Per room, the rooms that it imports."""

_HEAD = """# The rooms

Each box is a room, in the colour of its wing, or a file of `nbguard`. Each line is an import of something that stands lower;
a line that others lead along already is left out. Made from the imports by `docs/make_rooms.py`; a test sees that it is
current.

![The rooms as boxes in rows, from the command line at the top down to units; the table below has the same](pictures/rooms.svg)

| room | wing | imports |
|---|---|---|
"""

WINGS = ("memory", "training", "frontend")
"""Folders of `nbguard` that hold rooms. The other folders, and the files, are rooms themselves."""

_BOX, _GAP, _ROW = (112, 28), 16, 72
"""Width and height of a box, the space between two in a row, and from one row to the next, in pixels."""

_STYLE = """  <style>
    text { font: 13px system-ui, sans-serif; fill: #1b1b1b; text-anchor: middle; dominant-baseline: central }
    rect { fill: #dbe7f5; stroke: #5b7ea8 }
    .memory { fill: #d9efdc; stroke: #4d8a5b }
    .training { fill: #f8e8cd; stroke: #a97f35 }
    .frontend { fill: #ecdff5; stroke: #7f5ba8 }
    path { fill: none; stroke: #7a8694; stroke-width: 1.2 }
  </style>
"""
"""Boxes with a ground of their own, so that they can be read on a light page and on a dark one."""


def room_of(module: str) -> str:
    """Return the room of a module: the name below `nbguard` or its wing; empty for the package and the wings themselves."""
    first, *rest = module.removeprefix("nbguard").lstrip(".").split(".")
    return first if first not in WINGS else rest[0] if rest else ""


def wing_of(room: str) -> str:
    """Return the wing of a room; empty for one that stands by itself."""
    return next((wing for wing in WINGS if (ROOT / "nbguard" / wing / room).is_dir()), "")


def imports(tree: ast.Module) -> set[str]:
    """Return the modules of nbguard that a module imports, inside of functions, too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name.startswith("nbguard.")}


def arrows() -> Arrows:
    """Return which room imports which. `nbguard/__init__.py`, which names many of them lazily, is no room."""
    package = ROOT / "nbguard"
    modules = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in sorted(package.rglob("*.py"))}
    rooms = sorted({room_of(module) for module in modules.values()})
    found: Arrows = {room: set() for room in rooms if room and not room.startswith("__")}
    for file, module in modules.items():
        room = room_of(module)
        if room in found:
            targets = {room_of(name) for name in imports(ast.parse(file.read_bytes()))}
            found[room] |= targets & found.keys() - {room}
    return found


def reached(graph: Arrows, start: str) -> set[str]:
    """Return the rooms that lie at the end of any way from a room."""
    seen: set[str] = set()
    left = [start]
    while left:
        for room in graph[left.pop()] - seen:
            seen.add(room)
            left.append(room)
    return seen


def without_detours(graph: Arrows) -> Arrows:
    """Return the arrows that no longer way replaces. The rooms must have no circle."""
    return {
        room: {to for to in targets if not any(to in reached(graph, via) for via in targets - {to})}
        for room, targets in graph.items()
    }


def rows(graph: Arrows) -> list[list[str]]:
    """Return the rooms by row, each above all that it imports, and near the rooms of the row above that import it."""
    depth = dict.fromkeys(graph, 0)
    for _ in graph:  # the longest way has no more steps than there are rooms
        for room, targets in graph.items():
            for target in targets:
                depth[target] = max(depth[target], depth[room] + 1)
    order: list[list[str]] = []
    place: dict[str, float] = {}
    for level in range(max(depth.values()) + 1):
        named = sorted(room for room in graph if depth[room] == level)
        above = {room: [place[other] for other in place if room in graph[other]] for room in named}
        named.sort(key=lambda room: sum(above[room]) / len(above[room]) if above[room] else 0.0)
        place |= {room: number - (len(named) - 1) / 2 for number, room in enumerate(named)}
        order.append(named)
    return order


def picture() -> str:
    """Return the rooms as an SVG."""
    graph = without_detours(arrows())
    levels = rows(graph)
    (width, height), step = _BOX, _BOX[0] + _GAP
    middle = max(map(len, levels)) * step / 2
    at = {
        room: (middle + (number - (len(named) - 1) / 2) * step, level * _ROW + height / 2 + 2)
        for level, named in enumerate(levels)
        for number, room in enumerate(named)
    }
    lines = []
    for room, targets in graph.items():
        for target in sorted(targets):
            (x, y), (to_x, to_y) = at[room], at[target]
            bend = (to_y - y) / 2
            lines.append(
                f'  <path d="M{x:g} {y:g} C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y - height / 2:g}"/>'
            )
    for room, (x, y) in at.items():
        wing = f'class="{wing_of(room)}" ' if wing_of(room) else ""
        lines.append(f'  <rect {wing}x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width}" height="{height}" rx="4"/>')
        lines.append(f'  <text x="{x:g}" y="{y:g}">{room}</text>')
    size = f"{2 * middle:g} {len(levels) * _ROW - _ROW + height + 4:g}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">\n{_STYLE}' + "\n".join(lines) + "\n</svg>\n"


def page() -> str:
    """Return the text of docs/rooms.md."""
    graph = without_detours(arrows())
    by_wing = sorted(graph.items(), key=lambda each: (*WINGS, "").index(wing_of(each[0])))
    return _HEAD + "".join(f"| {room} | {wing_of(room)} | {', '.join(sorted(to)) or 'nothing'} |\n" for room, to in by_wing)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
