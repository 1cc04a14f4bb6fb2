"""The names of the notebook that a piece of code binds, deletes and reads, by the scopes of Python. Pure.

A function's own names, a comprehension's variables and the names in the body of a class are none of the notebook's. Names that
a function declares `global` are, and names that `:=` binds in a comprehension.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_OTHER_LANGUAGES = frozenset(
    [
        "bash",
        "cmd",
        "cython",
        "file",
        "html",
        "javascript",
        "js",
        "latex",
        "markdown",
        "perl",
        "pypy",
        "python",
        "python2",
        "python3",
        "R",
        "ruby",
        "script",
        "sh",
        "sql",
        "svg",
        "sx",
        "system",
        "timeit",
        "writefile",
    ]
)
"""Magics whose text binds no name of the notebook's: it is of another language or another process, or is written to a file."""


@dataclass(frozen=True, slots=True)
class CellNames:
    """The names of the notebook in a piece of code."""

    bound: frozenset[str] = frozenset()  # it assigns, imports or defines them, or may do so by a function that it defines
    deleted: frozenset[str] = frozenset()  # it deletes them; the name behind `except … as` goes at the end of its block
    read: frozenset[str] = frozenset()
    has_star: bool = False  # it imports all names of a module


@lru_cache(maxsize=4096)
def cell_names(source: str) -> CellNames | None:
    """Return the names of a cell, as IPython has transformed it, or None if it is no Python.

    The code behind a magic that runs it, such as `%time x = f()`, counts as the cell's.
    """
    try:
        tree = ast.parse(source)
        scope = _scope((tree,))
        inside = [names for code in _code_of_magics(tree) if (names := cell_names(code)) is not None]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    own = scope.names
    return CellNames(
        bound=own.bound.union(*(names.bound for names in inside)),
        deleted=own.deleted.union(*(names.deleted for names in inside)),
        read=own.read.union(*(names.read for names in inside)),
        has_star=own.has_star or any(names.has_star for names in inside),
    )


def names_of(code: ast.AST) -> CellNames:
    """Return the names of a piece of code that stands in a cell outside any function."""
    return _scope((code,)).names


def bindings(code: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each binding of a name of the notebook in a piece of code, with the place where it stands."""
    scope = _scope((code,))
    yield from (*scope.bound, *scope.escaping)


@dataclass(slots=True, kw_only=True)
class _Scope:
    """The names in one scope, without those of the scopes inside that stay there."""

    bound: list[tuple[str, ast.AST]] = field(default_factory=list)
    escaping: list[tuple[str, ast.AST]] = field(default_factory=list)  # bound in functions inside that declare them global
    deleted: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    from_inside: set[str] = field(default_factory=set)  # read by functions inside, which do not see the names of a class
    declared: set[str] = field(default_factory=set)  # global
    nonlocals: set[str] = field(default_factory=set)
    has_star: bool = False

    @property
    def names(self) -> CellNames:
        """Return the names, if this is the scope of the notebook."""
        return CellNames(
            bound=frozenset(name for name, _ in (*self.bound, *self.escaping)),
            deleted=frozenset(self.deleted),
            read=frozenset(self.read | self.from_inside),
            has_star=self.has_star,
        )

    def take(self, inner: _Scope, parameters: Iterable[str] = (), *, is_class: bool = False) -> None:
        """Take over the names that a scope inside binds and reads outside of itself."""
        own = {name for name, _ in inner.bound} | inner.deleted | set(parameters)
        own -= inner.declared | inner.nonlocals
        self.escaping += [*inner.escaping, *(pair for pair in inner.bound if pair[0] in inner.declared)]
        self.deleted |= inner.deleted & inner.declared
        self.from_inside |= (inner.read - own) | (inner.from_inside if is_class else inner.from_inside - own)


def _scope(code: Iterable[ast.AST]) -> _Scope:
    """Return the names in the scope that consists of this code."""
    scope, waiting = _Scope(), list(code)
    while waiting:
        node = waiting.pop()
        if isinstance(node, _FUNCTIONS):
            scope.bound.append((node.name, node))
            scope.take(_scope(node.body), _parameters(node.args))
            waiting += [*node.decorator_list, *_outside(node.args), *([node.returns] if node.returns else [])]
        elif isinstance(node, ast.ClassDef):
            scope.bound.append((node.name, node))
            scope.take(_scope(node.body), is_class=True)
            waiting += [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Lambda):
            scope.take(_scope((node.body,)), _parameters(node.args))
            waiting += _outside(node.args)
        elif isinstance(node, _COMPREHENSIONS):
            waiting += _comprehension(node, scope)
        else:
            _note(node, scope)
            waiting += ast.iter_child_nodes(node)
    return scope


def _note(node: ast.AST, scope: _Scope) -> None:
    match node:
        case ast.Name(id=name, ctx=ast.Load()):
            scope.read.add(name)
        case ast.Name(id=name, ctx=ast.Del()):
            scope.deleted.add(name)
        case ast.Name(id=name):
            scope.bound.append((name, node))
        case ast.AugAssign(target=ast.Name(id=name)):
            scope.read.add(name)
        case ast.ExceptHandler(name=str(name)):
            scope.bound.append((name, node))
            scope.deleted.add(name)
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            scope.bound.append((name, node))
        case ast.alias(name="*"):
            scope.has_star = True
        case ast.alias(name=name, asname=alias):
            scope.bound.append(((alias or name).partition(".")[0], node))
        case ast.Global(names=names):
            scope.declared.update(names)
        case ast.Nonlocal(names=names):
            scope.nonlocals.update(names)


def _comprehension(node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, scope: _Scope) -> list[ast.AST]:
    """Note the names that a comprehension reads and that `:=` binds in it; return its first iterable, which is of the scope."""
    first = node.generators[0].iter
    variables = _scope([generator.target for generator in node.generators])
    rest = [each for each in ast.iter_child_nodes(node) if each is not node.generators[0]]
    inner = _scope([*rest, *node.generators[0].ifs])
    own = {name for name, _ in variables.bound}
    scope.bound += [(name, place) for name, place in inner.bound if name not in own]
    inner.bound = [(name, place) for name, place in inner.bound if name in own]
    inner.read |= variables.read
    scope.take(inner, own)
    return [first]


def _parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {each.arg for each in every if each is not None}


def _outside(arguments: ast.arguments) -> list[ast.AST]:
    """Return the defaults and annotations of a function's arguments, which are computed where it is defined."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [each.annotation for each in every if each is not None]
    return [each for each in (*arguments.defaults, *arguments.kw_defaults, *annotations) if each is not None]


def _code_of_magics(tree: ast.AST) -> Iterator[str]:
    """Yield the code behind magics that run it, as IPython hands it to them; `%%capture NAME` binds that name."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="run_line_magic" | "run_cell_magic" as kind),
                args=[ast.Constant(value=str(magic)), *between, ast.Constant(value=str(code))],
            ) if magic not in _OTHER_LANGUAGES:
                yield code
                if kind == "run_cell_magic" and magic == "capture" and isinstance(between[0], ast.Constant):
                    yield from (f"{word} = None" for word in str(between[0].value).split() if word.isidentifier())
