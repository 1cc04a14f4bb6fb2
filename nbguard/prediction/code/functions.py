"""Statements as functions, and the names in them."""

from __future__ import annotations

import ast
from types import FunctionType
from typing import Any


def as_function(
    statements: list[ast.stmt],
    namespace: dict[str, Any],
    arguments: tuple[str, ...] = (),
    *,
    name: str = "the_cell",
    file: str = "<cell>",
) -> FunctionType:
    """Return statements as a function whose names are those of a namespace, as they are in a cell.

    Args:
        statements: of a cell or a script. None of them runs.
        namespace: its globals.
        arguments: names of the function's arguments; all other names that the statements bind are the namespace's.
        name: of the function.
        file: in which the statements stand.

    Raises:
        SyntaxError: they belong to a function and cannot stand in another: a variable is that of a function around it.
    """
    bound = sorted(set().union(*map(names_bound, statements)) - set(arguments))
    body: list[ast.stmt] = [ast.Global(bound)] if bound else []
    given = [ast.arg(argument) for argument in arguments]
    signature = ast.arguments(posonlyargs=[], args=given, kwonlyargs=[], kw_defaults=[], defaults=[])
    function = ast.FunctionDef(name, signature, [*body, *statements], [])
    if "type_params" in function._fields:  # Python 3.12
        vars(function)["type_params"] = []
    module = ast.fix_missing_locations(ast.Module([function], []))
    names: dict[str, Any] = {}
    exec(compile(module, file, "exec"), names)  # noqa: S102 - this defines a function and runs nothing of it
    own: FunctionType = names[name]
    return FunctionType(own.__code__, namespace, name)


def names_bound(statement: ast.AST) -> set[str]:
    """Return the names that a statement binds in the notebook; a function's own are its own."""
    bound: set[str] = set()
    waiting = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        if not isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            waiting.extend(ast.iter_child_nodes(node))
    return bound


def names_read(node: ast.AST) -> set[str]:
    """Return the names whose values a statement asks for."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
