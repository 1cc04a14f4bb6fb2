"""Statements as functions, and the names in them."""

from __future__ import annotations

import ast
from types import FunctionType
from typing import Any

from nbguard.cell_names import names_of


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
        file: of the statements.

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


def names_bound(statement: ast.AST) -> frozenset[str]:
    """Return the names that a statement binds or deletes in the notebook; a function's own are its own."""
    names = names_of(statement)
    return names.bound | names.deleted


def names_read(node: ast.AST) -> frozenset[str]:
    """Return the names of the notebook whose values a statement asks for."""
    return names_of(node).read
