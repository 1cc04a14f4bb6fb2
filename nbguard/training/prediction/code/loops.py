"""The loops of a script that train, found in its source, and marked so that the script can be stopped in front of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REACHED, FEW, GOES_ON = "__nbguard_reached__", "__nbguard_few__", "__nbguard_goes_on__"
"""Names that marked code calls: before a loop that trains; around any loop's iterable; in the condition of any `while`."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.While)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedLoop:
    """A loop that trains and is in no other one of its function."""

    statements: list[ast.stmt]  # the loop, marked, and the code that it needs before
    text: str  # its first line
    line: int
    function: str  # of it; empty for the script's own lines
    file: str


@dataclass(slots=True)
class Loops:
    """The loops that train, of a script and of the files beside it."""

    folder: Path
    functions: set[str] = field(default_factory=set)  # names of functions that train
    methods: set[str] = field(default_factory=set)  # names of methods that train
    marked: list[MarkedLoop] = field(default_factory=list)

    @classmethod
    def of(cls, tree: ast.Module, folder: Path) -> Loops:
        """Return a script's loops that train, with the names of functions that train, in it and in its folder's modules."""
        own = cls(folder)
        trees = [tree, *_imported(tree, folder, set())]
        defined = [each for one in trees for each in _defined(one)]
        size = -1
        while size != len(own.functions) + len(own.methods):
            size = len(own.functions) + len(own.methods)
            for function, is_method in defined:
                if own.trains(function):
                    (own.methods if is_method else own.functions).add(function.name)
        return own

    def trains(self, node: ast.AST) -> bool:
        """Say whether a backward pass runs in it: there, or in a function of the user's that it calls."""
        for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
            called = call.func
            if isinstance(called, ast.Name) and called.id in self.functions:
                return True
            if isinstance(called, ast.Attribute):
                is_modules = called.attr in ("train", "eval") and not (call.args or call.keywords)  # a module's own
                if called.attr == "backward" or (called.attr in self.methods and not is_modules):
                    return True
        return False

    def mark(self, tree: ast.Module, file: str) -> ast.Module:
        """Return a tree with its loops marked."""
        marked: ast.Module = ast.fix_missing_locations(_Marker(self, file).visit(tree))
        return marked


class _Marker(ast.NodeTransformer):
    def __init__(self, loops: Loops, file: str) -> None:
        self._loops, self._file = loops, file
        self._function = ""
        self._is_inside = False  # a loop that trains
        self._whiles = 0

    def visit_FunctionDef(self, node: Any) -> Any:
        former = self._function, self._is_inside
        self._function, self._is_inside = node.name, False
        self.generic_visit(node)
        self._function, self._is_inside = former
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the visitor's names

    def visit_For(self, node: ast.For) -> Any:
        text = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
        is_outermost = self._enter(node)
        node.iter = ast.Call(ast.Name(FEW, ast.Load()), [node.iter], [])
        return self._leave([node], text, is_outermost=is_outermost)

    def visit_While(self, node: ast.While) -> Any:
        text = f"while {ast.unparse(node.test)}:"
        is_outermost = self._enter(node)
        self._whiles += 1
        name = f"{GOES_ON}{self._whiles}"
        before = ast.Assign([ast.Name(name, ast.Store())], ast.Call(ast.Name(GOES_ON, ast.Load()), [], []))
        node.test = ast.BoolOp(ast.And(), [ast.Call(ast.Name(name, ast.Load()), [], []), node.test])
        return self._leave([ast.copy_location(before, node), node], text, is_outermost=is_outermost)

    def _enter(self, node: ast.For | ast.While) -> bool:
        is_outermost = not self._is_inside and self._loops.trains(node)
        self._is_inside |= is_outermost
        self.generic_visit(node)
        return is_outermost

    def _leave(self, statements: list[ast.stmt], text: str, *, is_outermost: bool) -> list[ast.stmt]:
        if not is_outermost:
            return statements
        self._is_inside = False
        line = statements[-1].lineno
        marked = self._loops.marked
        names = [ast.Call(ast.Name(name, ast.Load()), [], []) for name in ("globals", "locals")]
        stop = ast.Expr(ast.Call(ast.Name(REACHED, ast.Load()), [ast.Constant(len(marked)), *names], []))
        marked.append(MarkedLoop(statements=statements, text=text, line=line, function=self._function, file=self._file))
        return [ast.copy_location(stop, statements[-1]), *statements]


def _defined(tree: ast.Module) -> Iterator[tuple[Any, bool]]:
    """Yield (function, whether it is a method) of all that a file defines."""
    methods = {id(each) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    yield from ((node, id(node) in methods) for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))


def _imported(tree: ast.Module, folder: Path, seen: set[Path]) -> Iterator[ast.Module]:
    """Yield the files beside a script that it imports, and that these import."""
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in filter(None, names):
            for path in (
                folder.joinpath(*name.split(".")).with_suffix(".py"),
                folder.joinpath(*name.split("."), "__init__.py"),
            ):
                if path not in seen and path.is_file():
                    seen.add(path)
                    try:
                        own = ast.parse(path.read_text(encoding="utf-8"))
                    except (OSError, SyntaxError, UnicodeDecodeError):
                        continue  # its import will say it
                    yield own
                    yield from _imported(own, folder, seen)
