"""A quick start as a file of Python: a docstring with the package and the address that it follows, imports, then the rest."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

CELLS = Path(__file__).with_name("cells")


@dataclass(frozen=True, slots=True)
class Cell:
    """One quick start."""

    name: str
    package: str  # as pip names it
    address: str  # of the page that it follows
    imports: str  # its first lines, up to the last import
    body: str


def read_cell(file: Path) -> Cell:
    """Return the quick start that a file has."""
    text = file.read_text()
    tree = ast.parse(text)
    package, address = (ast.get_docstring(tree) or "").split()
    first = next(node for node in tree.body[1:] if not isinstance(node, (ast.Import, ast.ImportFrom)))
    lines = text.splitlines(keepends=True)
    begin, split = tree.body[0].end_lineno or 0, first.lineno - 1
    decorators = getattr(first, "decorator_list", [])
    split = min([split, *(each.lineno - 1 for each in decorators)])
    return Cell(file.stem, package, address, "".join(lines[begin:split]).strip(), "".join(lines[split:]).strip())
