"""A rule. Its code, its name, the search in a program, and one line that it reports with the line to write instead."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from inspect import cleandoc

from nbguard.training.lint.program import ParsedProgram
from nbguard.training.lint.source import Edit


@dataclass(frozen=True, slots=True)
class Hit:
    """A place that breaks a rule."""

    node: ast.AST
    message: str
    edits: tuple[Edit, ...] = ()  # the repair, where it is certain


Find = Callable[[ParsedProgram], Iterable[Hit]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule. Its description is the docstring of its search."""

    code: str
    name: str
    find: Find
    bad: str  # the line that is reported
    good: str  # the line to write instead
    in_notebooks_only: bool = False

    @property
    def description(self) -> str:
        """Return the description as one paragraph."""
        return " ".join(cleandoc(self.find.__doc__ or "").split())


def rule(code: str, name: str, *, bad: str, good: str, in_notebooks_only: bool = False) -> Callable[[Find], Rule]:
    """Make a rule of the function below."""
    return lambda find: Rule(code=code, name=name, find=find, bad=bad, good=good, in_notebooks_only=in_notebooks_only)


def put_behind(node: ast.AST, text: str) -> tuple[Edit, ...]:
    """Return the edit that adds text behind an expression."""
    line, column = getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
    return (Edit(line, column, column, text),)


def put_around(node: ast.AST, before: str, after: str) -> tuple[Edit, ...]:
    """Return the edits that put an expression between two texts."""
    line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    return (Edit(line, column, column, before), *put_behind(node, after))


def first_of_each_line(hits: Iterable[Hit]) -> Iterator[Hit]:
    """Yield hits, the first one of each line and message."""
    seen = set()
    for hit in hits:
        key = (getattr(hit.node, "lineno", 0), hit.message)
        if key not in seen:
            seen.add(key)
            yield hit
