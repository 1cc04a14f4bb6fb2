"""Names that a cell binds to a part of another name's object, e.g. `m = learn.model`. Deleting one surprises nobody."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def alias_of(source: str, name: str) -> str:
    """Return the name whose parts a cell with this source binds `name` to last, or "" where it binds it to something new."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    bound = [(target.lineno, _start(value)) for target, value in _bindings(tree) if target.id == name]
    return max(bound, default=(0, ""), key=lambda binding: binding[0])[1]


def _bindings(tree: ast.AST) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Yield each name that is bound, with the expression that it is bound to, or whose elements it takes one by one."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _pairs(target, value)
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value) | ast.NamedExpr(target, value):
                yield target, value
            case ast.For(target=ast.Name() as target, iter=value):
                yield target, value


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    match target, value:
        case ast.Name(), _:
            yield target, value
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=values) | ast.List(elts=values))):
            for one, its in zip(targets, values, strict=False):
                yield from _pairs(one, its)
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), _):
            for one in targets:
                yield from _pairs(one, value)


def _start(value: ast.expr) -> str:
    """Return the first name of a chain of attributes and subscripts, or of an iterator over one such as `iter(dls.train)`.

    Empty for anything else, any other call above all.
    """
    match value:
        case ast.Call(func=ast.Name("iter" | "enumerate"), args=[ast.expr() as value, *_]):
            pass
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""
