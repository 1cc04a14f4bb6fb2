"""Scripts and notebooks as one tree of Python each, with the place of each line, and their repair byte by byte."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

from nbguard.cell_names import OTHER_LANGUAGES
from nbguard.errors import NbguardError, in_one_line
from nbguard.files import read_file, unreadable
from nbguard.plain_data import read_json

LARGEST = 100 * 1024**2
"""Bytes of a notebook or a script."""
_MOST_MAGICS = 200
"""How often a cell is parsed at most. Once for each line that IPython transforms."""
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
_MAGIC = re.compile(r"\s*(?:[%!?]|[\w., \[\]]+=\s*[!%]|[\w.*]+(?:\[-?\d+\])*\?\??\s*$)")
"""The beginning of a line that IPython transforms, or a question such as `model?`."""
_BARE_MAGICS = frozenset(
    (
        *("autoreload", "cat", "cd", "conda", "cp", "gpumem", "ll", "load_ext", "ls", "mamba", "matplotlib", "mkdir"),
        *("mv", "nbguard", "pip", "reset_gpu", "rm", "rmdir", "run", "time", "timeit", "uv"),
    )
)
"""Magics that IPython also takes without their `%`, where one is the only line of a cell."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement of a piece of one line. Columns are bytes in UTF-8, as in a syntax tree."""

    line: int  # of the tree, from 1
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class LinePlace:
    """The place of a line in its file."""

    cell: int | None  # the number of the code cell among all cells, from 1; None in a script
    line: int  # in the script or the cell, from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The Python of a file."""

    path: str
    tree: ast.Module  # of all cells one after the other; lines are counted through
    lines: tuple[str, ...]  # those that the tree counts, as they stand in the file
    places: tuple[LinePlace, ...]  # of each of these lines
    unparsed: tuple[str, ...] = ()  # why a cell was left out, a sentence each

    @property
    def is_notebook(self) -> bool:
        """Whether it has cells."""
        return self.path.endswith(".ipynb")

    def cell_of(self, node: ast.AST) -> int | None:
        """Return the number of the cell around a node."""
        return self.places[getattr(node, "lineno", 1) - 1].cell if self.places else None


def read_source(path: str) -> Source:
    """Return the Python of a script or a notebook.

    Raises:
        NbguardError: the file cannot be read, or is neither.
    """
    try:
        data = read_file(path, LARGEST)
    except OSError as error:
        raise NbguardError(unreadable(path, error)) from None
    return _notebook(path, data) if path.endswith(".ipynb") else _script(path, data)


def _script(path: str, data: bytes) -> Source:
    try:
        tree = _parsed(data)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        lines = tuple(line.decode(encoding, "replace") for line in data.splitlines())
    except (*_NO_PYTHON, LookupError) as error:
        raise NbguardError(f"{path} is no Python: {_reason(error)}") from None
    return Source(path=path, tree=tree, lines=lines, places=tuple(LinePlace(None, line + 1) for line in range(len(lines))))


def _notebook(path: str, data: bytes) -> Source:
    return notebook_source(path, _cells(path, data))


def notebook_source(path: str, cells: Iterable[tuple[int, str]]) -> Source:
    """Return the Python of a notebook's code cells, each with its number among all cells."""
    body: list[ast.stmt] = []
    lines: list[str] = []
    places: list[LinePlace] = []
    unparsed = []
    for number, text in cells:
        of_cell = _lines(text)
        tree = _cell_tree(text, of_cell)
        if isinstance(tree, str):
            unparsed.append(f"{path}: cell {number} is no Python: {tree}")
        elif tree is not None:
            body += ast.increment_lineno(tree, len(lines)).body
            lines += of_cell
            places += [LinePlace(number, line + 1) for line in range(len(of_cell))]
    tree = ast.Module(body=body, type_ignores=[])
    return Source(path=path, tree=tree, lines=tuple(lines), places=tuple(places), unparsed=tuple(unparsed))


def _cells(path: str, data: bytes) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each code cell."""
    try:
        for number, cell in enumerate(read_json(data)["cells"], start=1):
            if cell["cell_type"] == "code":
                yield number, "".join(cell["source"])
    except (ValueError, KeyError, TypeError):
        raise NbguardError(f"{path} is no notebook of format 4") from None


def _lines(text: str) -> list[str]:
    """Return lines as Python counts them, without their ends."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _cell_tree(text: str, lines: list[str]) -> ast.Module | str | None:
    """Return the tree of a cell, the reason why it has none, or None for a cell in another language.

    A line that IPython would transform stands for `pass`; a line of Python is never taken for one, as the parser stumbles
    over the former only. A cell that is indented as a whole is read as IPython reads it.
    """
    lines = [*lines]
    if text.lstrip().startswith("%%"):
        first = next(number for number, line in enumerate(lines) if line.strip())
        magic = lines[first].strip()[2:].split()
        if not magic or magic[0] in OTHER_LANGUAGES:
            return None
        lines[first] = ""
    for _ in range(_MOST_MAGICS):
        try:
            return _parsed_cell("\n".join(lines))
        except SyntaxError as error:
            number = (error.lineno or 0) - 1
            if not (0 <= number < len(lines) and (_MAGIC.match(lines[number]) or _is_bare_magic(text))):
                return _reason(error)
            _mask(lines, number)
        except _NO_PYTHON as error:
            return _reason(error)
    return f"it has more than {_MOST_MAGICS - 1} magics"


def _is_bare_magic(text: str) -> bool:
    words = text.split(maxsplit=2)
    return len(text.splitlines()) == 1 and words[0] in _BARE_MAGICS and "=" not in words[1:2]


def _mask(lines: list[str], number: int) -> None:
    """Replace a line that Python cannot read, and its continuation."""
    line = lines[number]
    lines[number] = line[: len(line) - len(line.lstrip())] + "pass"
    while line.endswith("\\") and number + 1 < len(lines):
        number += 1
        line, lines[number] = lines[number], ""


def _parsed_cell(text: str) -> ast.Module:
    """Return the tree of a cell, also of one that is indented as a whole, with the lines and columns of the file."""
    try:
        return _parsed(text)
    except IndentationError:
        if dedent(text) == text:
            raise
    try:
        (whole,) = _parsed(f"if True:\n{text}").body
    except SyntaxError as error:
        error.lineno = (error.lineno or 0) - 1
        raise
    return ast.increment_lineno(ast.Module(body=cast("ast.If", whole).body, type_ignores=[]), -1)


def _parsed(text: str | bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in the user's strings
        return ast.parse(text)


def _reason(error: BaseException) -> str:
    return f"{error.msg} (line {error.lineno})" if isinstance(error, SyntaxError) else in_one_line(error)


# --- repair


def repaired(source: Source, data: bytes, edits: Iterable[Edit]) -> bytes | None:
    """Return a file with edits made in it, all else byte by byte as before; None where that is not certain.

    Args:
        source: the Python of the file.
        data: its bytes.
        edits: none overlaps another one.
    """
    by_line: dict[int, list[Edit]] = {}
    for edit in edits:
        by_line.setdefault(edit.line, []).append(edit)
    lines = {line: _edited(source.lines[line - 1], of_line) for line, of_line in by_line.items()}
    if source.is_notebook:
        return _repaired_notebook(data, {source.places[line - 1]: text for line, text in lines.items()})
    parts = data.splitlines(keepends=True)
    for line, text in lines.items():
        old = source.lines[line - 1].encode()
        if parts[line - 1][: len(old)] != old:  # of another encoding
            return None
        parts[line - 1] = text.encode() + parts[line - 1][len(old) :]
    return b"".join(parts)


def _edited(line: str, edits: list[Edit]) -> str:
    data = line.encode()
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data.decode()


def _repaired_notebook(data: bytes, lines: dict[LinePlace, str]) -> bytes | None:
    content = read_json(data)
    write = _writer_of(content, data)
    if write is None:
        return None
    for place, text in lines.items():
        if place.cell is None:
            return None
        cell = content["cells"][place.cell - 1]
        of_cell = "".join(cell["source"]).split("\n")
        if len(of_cell) != len(_lines("\n".join(of_cell))):  # a carriage return within a line
            return None
        of_cell[place.line - 1] = text + ("\r" if of_cell[place.line - 1].endswith("\r") else "")
        whole, is_list = "\n".join(of_cell), isinstance(cell["source"], list)
        if is_list and "".join(cell["source"]).splitlines(keepends=True) != cell["source"]:
            return None
        cell["source"] = whole.splitlines(keepends=True) if is_list else whole
    return write(content)


def _writer_of(content: Any, data: bytes) -> Callable[[Any], bytes] | None:
    """Return a function that writes JSON as the file is written, or None where none gives the same bytes."""
    for indent in (1, 2, 4, None, 0, "\t"):
        for ascii_only in (False, True):
            for end in ("\n", "", "\r\n"):

                def write(content: Any, indent: Any = indent, ascii_only: bool = ascii_only, end: str = end) -> bytes:
                    return (json.dumps(content, indent=indent, ensure_ascii=ascii_only) + end).encode()

                try:
                    if write(content) == data:
                        return write
                except UnicodeEncodeError:  # half of a surrogate pair
                    continue
    return None


def files_of(paths: Iterable[str]) -> Iterator[str]:
    """Yield files, and of a folder its scripts and notebooks, without those in hidden folders and environments."""
    for path in paths:
        if not Path(path).is_dir():
            yield path
            continue
        for file in sorted(Path(path).rglob("*")):
            inner = file.relative_to(path).parts
            hidden = any(part.startswith(".") or part in ("node_modules", "__pycache__", "site-packages") for part in inner)
            if file.suffix in (".py", ".ipynb") and not hidden and file.is_file():
                yield str(file)
