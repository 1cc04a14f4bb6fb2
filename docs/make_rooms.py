"""The picture of the rooms in docs/rooms.md, made from the imports of the package: python docs/make_rooms.py writes it anew."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "rooms.md"

Arrows = dict[str, set[str]]
"""Per room, the rooms that it imports."""

_HEAD = """# The rooms

Each box is a folder or a file of `nbguard`, each arrow an import; an arrow that others lead along already is left
out. Made from the imports by `docs/make_rooms.py`; a test sees that it is current.

```mermaid
flowchart TD
"""


def room_of(module: str) -> str:
    """Return the room of a module: the name below `nbguard`; empty for the package itself."""
    return module.removeprefix("nbguard").lstrip(".").partition(".")[0]


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
    rooms = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    found: Arrows = {room: set() for room in sorted(rooms) if not room.startswith("__")}
    for file in sorted(package.rglob("*.py")):
        room = file.relative_to(package).with_suffix("").parts[0]
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


def picture() -> str:
    """Return the text of docs/rooms.md: the rooms as a Mermaid diagram."""
    graph = without_detours(arrows())
    lines = [f"  {room} --> {target}" for room in graph for target in sorted(graph[room])]
    lines += [f"  {room}" for room in graph if not graph[room] and not any(room in targets for targets in graph.values())]
    return _HEAD + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
