"""Names that a cell reads, binds, makes again and may reach at all by its source and the notebook's functions."""

from __future__ import annotations

import ast
import dis
import gc
import re
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from nbguard.cell_names import bindings
from nbguard.texts import CELL_CODE

Names = frozenset[str]
"""The global names that the functions of the notebook use."""
_GLOBALS = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "IMPORT_NAME"}
    | {f"{what}_{kind}" for what in ("STORE", "DELETE") for kind in ("GLOBAL", "NAME")}
)
"""Instructions of Python that name something global, or a module. Others name attributes, which are no names of the user's."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FILLING = frozenset({"append", "appendleft", "extend", "add", "insert", "update", "setdefault"})
"""Methods that put something into a container."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_MAGICS = ("run_cell_magic", "run_line_magic")
_ANYTHING = frozenset({"exec", "eval", "globals", "locals", "vars", "get_ipython", "__main__", "user_ns", "Out", "In"})
"""Words that let code reach any name."""
_OURS = frozenset({"gpumem", "reset_gpu", "nbguard", "load_ext", "matplotlib", "profile_fit"})
"""Magics that bind and read no name of the user's."""
_RUNNERS = frozenset({"time", "timeit", "capture", "prun", "profile_fit"})
"""Magics that run the code behind them."""
_FUNCTIONS = 5000
"""Most functions of the notebook that are examined; with more, the names they reach count as unknown."""


def names_in(source: str, at: int) -> tuple[set[str], set[str]]:
    """Return (names that a cell reads, names that it had bound when it failed in line `at`).

    Bound are those above that line, and any in a loop around it: an earlier turn may have. Of a cell magic's body, whose lines
    are counted again, all of them.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return set(), set()
    nodes = list(ast.walk(tree))
    reads = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    loops = [node for node in nodes if isinstance(node, _LOOPS) and node.lineno <= at <= (node.end_lineno or at)]
    inside = {id(node) for loop in loops for node in ast.walk(loop)}
    binds = {name for name, node in bindings(tree) if node.lineno < at or id(node) in inside}  # type: ignore[attr-defined]
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MAGICS:
            body = node.args[-1] if node.args else None
            if isinstance(body, ast.Constant) and type(body.value) is str:
                more = names_in(body.value, sys.maxsize)
                reads, binds = reads | more[0], binds | more[1]
    return reads, binds


def made_by(source: str, at: int, global_names: Names | None) -> set[str]:
    """Return the names that a run of a cell which fails in line `at` binds in any case, before anything reads them.

    A later run makes them again, so deleting them costs it nothing. Not the names that a function of the notebook reads
    (`names_of_functions`).
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    if global_names is None or not set(_magics(tree)) <= _OURS:
        return set()
    made: set[str] = set()
    seen = set(global_names)
    for statement in tree.body:
        for name, is_bound in _events(statement, at):
            if is_bound and name not in seen:
                made.add(name)
            seen.add(name)
        if (statement.end_lineno or at) >= at:
            break
    return made


def replaced_by(source: str, global_names: Names | None) -> set[str]:
    """Return the names whose present values no whole run of a cell can read, as it binds each of them first.

    A name in a loop counts, whether the loop turns or not, if each turn binds it first and the cell does not name it elsewhere.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    replaced = made_by(source, sys.maxsize, global_names)
    if global_names is None or not set(_magics(tree)) <= _OURS:
        return replaced
    named = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    for loop in (node for node in ast.walk(tree) if isinstance(node, _LOOPS)):
        turn: list[ast.AST] = [*loop.body] if isinstance(loop, ast.While) else [loop.target, *loop.body]
        inside = Counter(node.id for part in turn for node in ast.walk(part) if isinstance(node, ast.Name))
        seen = set(global_names)
        for part in turn:
            for name, is_bound in _events(part, sys.maxsize) if isinstance(part, ast.stmt) else _targets(part):
                if is_bound and name not in seen and inside[name] == named[name]:
                    replaced.add(name)
                seen.add(name)
    return replaced


def _events(statement: ast.stmt, at: int) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether it is bound in any case) of one statement, in the order of execution.

    The body of a loop, a `try` or an `if` is known to have run only where the failure was in it.
    """
    inside = isinstance(statement, (*_LOOPS, ast.If, ast.Try)) and any(
        inner.lineno <= at <= (inner.end_lineno or at) for inner in statement.body
    )
    if isinstance(statement, ast.Assign):
        yield from _reads(statement.value)
        for target in statement.targets:
            yield from _targets(target)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield from _reads(statement.value)
        yield from _targets(statement.target)
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield from _reads(statement)
        yield statement.name, True
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (((alias.asname or alias.name).partition(".")[0], True) for alias in statement.names)
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        for item in statement.items:
            yield from _reads(item.context_expr)
            if item.optional_vars is not None:
                yield from _targets(item.optional_vars)
        for inner in statement.body:
            yield from _events(inner, at)
    elif inside and isinstance(statement, (*_LOOPS, ast.If, ast.Try)):
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            yield from _reads(statement.iter)
            yield from _targets(statement.target)
        elif isinstance(statement, (ast.While, ast.If)):
            yield from _reads(statement.test)
        for inner in statement.body:
            yield from _events(inner, at)
    else:
        yield from _reads(statement)


def _targets(target: ast.AST) -> Iterator[tuple[str, bool]]:
    if isinstance(target, ast.Name):
        yield target.id, True
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _targets(element)
    else:
        yield from _reads(target)


def _reads(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield every name in a piece of code as one that is read: it may be, or bound only if it comes to that."""
    yield from ((inner.id, False) for inner in ast.walk(node) if isinstance(inner, ast.Name))


def _magics(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each magic that a piece of code runs; `?` where it is not written down."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MAGICS:
            name = node.args[0] if node.args else None
            yield name.value if isinstance(name, ast.Constant) and type(name.value) is str else "?"


def reached_by(source: str, namespace: dict[str, Any], global_names: Names | None) -> set[str] | None:
    """Return the names that a cell, or a function of the notebook (`names_of_functions`), may reach, or None if any.

    Functions count whether they were called or not: a model's `forward`, a hook and a closure are none that a cell names.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    reached = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    reached |= {name for node in ast.walk(tree) if isinstance(node, _SCOPES) and (name := getattr(node, "name", ""))}
    magics = set(_magics(tree))
    if not magics <= _OURS | _RUNNERS:
        return None
    if magics:
        reached = (reached - {"get_ipython"}) | _in_strings(tree)
    if global_names is None:
        return None
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} - {
        "get_ipython"
    }
    hidden = {name for name in (read | global_names) & namespace.keys() if name.startswith("_") and not name.startswith("__")}
    if hidden or (reached | global_names) & _ANYTHING:
        return None
    return reached | global_names


def length_of_list(source: str, at: int) -> int | None:
    """Return the number of elements of the list that line `at` builds, where it is written down.

    `[f() for _ in range(9)]`, or `for _ in range(9): xs.append(f())`.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.ListComp | ast.For))
    lengths = [counted_loop(node) for node in loops if node.lineno <= at <= (node.end_lineno or at)]
    return lengths[0] if len(lengths) == 1 else None


def filled_in_loops(source: str, at: int) -> set[str]:
    """Return the names of containers into which the loops around line `at` put something: `outs` of `self.outs.append(x)`."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    loops = (node for node in ast.walk(tree) if isinstance(node, _LOOPS) and node.lineno <= at <= (node.end_lineno or at))
    return {name for loop in loops for node in ast.walk(loop) if (name := _name_filled_by(node))}


def _name_filled_by(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Attribute(value=container, attr=method)) if method in _FILLING:
            pass
        case ast.Subscript(value=container, ctx=ast.Store()) | ast.AugAssign(target=container, op=ast.Add() | ast.BitOr()):
            pass
        case _:
            return ""
    while isinstance(container, ast.Subscript):
        container = container.value
    return container.id if isinstance(container, ast.Name) else container.attr if isinstance(container, ast.Attribute) else ""


def counted_loop(node: ast.ListComp | ast.For) -> int | None:
    """Return how often a loop that makes one element each time does so: over one `range` of a constant; None of any other."""
    if isinstance(node, ast.For):
        call = node.iter
        match node.body:
            case [ast.Expr(ast.Call(func=ast.Attribute(attr="append"), args=[_], keywords=[]))]:
                pass
            case _:
                return None
    else:
        (first, *more) = node.generators
        call = first.iter
        if more or first.ifs:
            return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "range":
        return None
    count = call.args[0] if len(call.args) == 1 else None
    return count.value if isinstance(count, ast.Constant) and type(count.value) is int else None


def _in_strings(tree: ast.AST) -> set[str]:
    """Return every word in the strings that magics are called with: names are among them, whatever else is."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    texts = [arg.value for call in calls if call.func.attr in _MAGICS for arg in call.args if isinstance(arg, ast.Constant)]  # type: ignore[attr-defined]
    return {word for text in texts if type(text) is str for word in re.findall(r"\w+", text)}


def names_of_functions(namespace: dict[str, Any]) -> Names | None:
    """Return the global names that functions of the namespace use; None if they are too many, or some may be frozen.

    It goes over the whole heap: ask several questions about a cell with one call. Objects hidden by `gc.freeze()` are not seen.
    """
    if gc.get_freeze_count():
        return None
    codes = []
    for value in gc.get_objects():
        if type(value) is not types.FunctionType or value.__globals__ is not namespace:
            continue
        if not value.__code__.co_name.startswith(CELL_CODE):  # IPython makes one of each cell while it runs
            codes.append(value.__code__)
            if len(codes) > _FUNCTIONS:
                return None
    return frozenset(word for code in codes for word in _words(code))


def globals_used(function: types.FunctionType, namespace: dict[str, Any]) -> set[str]:
    """Return the global names that a function of the namespace uses, itself or by functions that it names."""
    used: set[str] = set()
    left, seen = [function], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen or one.__globals__ is not namespace or len(seen) > _FUNCTIONS:
            continue
        seen.add(id(one))
        words = {*_words(one.__code__)}
        used |= words
        cells = gc.get_referents(*(one.__closure__ or ()))
        left += [value for value in (*cells, *map(namespace.get, words)) if type(value) is types.FunctionType]
    return used


def _words(code: types.CodeType) -> Iterable[str]:
    """Yield the global names of a function and of those inside of it, and `user_ns` and `__main__` however they are written."""
    yield from (one.argval for one in dis.get_instructions(code) if one.opname in _GLOBALS)
    yield from {"user_ns"}.intersection(code.co_names)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _words(constant)
        elif type(constant) is str and constant == "__main__":
            yield constant
