"""Branches on values, written with `torch.where`: the statement that stands in for an `if`, and a copy of a model with it.

`torch.where` computes both sides and picks one by the condition, so that the values are the same ones, and an exporter can
follow it. The user's source is read, and run only as the copy's own forward pass.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_AS_BOOLEAN = ("bool", "float")
"""Functions that read a value from a tensor, which a condition of `torch.where` must not do."""
_LONGEST = 160
"""Characters of a statement that is advised."""


@dataclass(frozen=True, slots=True)
class _Place:
    """An `if` among the statements of a block, or a statement with an `… if … else …` in it."""

    block: list[ast.stmt]
    index: int


def where_statement(file: str, number: int) -> str:
    """Return the statement with `torch.where` that computes the same as the branch at a line; empty where there is none.

    It stands in for the whole `if` and its `else`; of two returns, for both.
    """
    try:
        function = _function_at(file, number)
        found = None if function is None else _rewritten(function, {number})
    except (SyntaxError, ValueError, RecursionError):
        return ""
    text = ast.unparse(found[0]) if found else ""
    return text if text and "\n" not in text and len(text) <= _LONGEST else ""


def cond_call(file: str, number: int) -> str:
    """Return the call of `torch.cond` that a branch at a line can become; empty where there is none.

    It is given the values that both sides read, and each is to be a function of them.
    """
    try:
        function = _function_at(file, number)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    places = () if function is None else _places(function, number)
    branch = next((each for place in places if isinstance(each := place.block[place.index], ast.If)), None)
    if branch is None:
        return ""
    own = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)} - {"self"}
    names = [each for each in ast.walk(function) if isinstance(each, ast.Name) and each.lineno < branch.lineno]
    own |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
    sides = [each for part in (*branch.body, *branch.orelse) for each in ast.walk(part) if isinstance(each, ast.Name)]
    inputs = ", ".join(sorted({each.id for each in sides if each.id in own}))
    call = f"torch.cond({ast.unparse(_condition(branch.test))}, yes, no, [{inputs}])"
    return f"{call}, where yes({inputs}) and no({inputs}) return the values of its sides" if len(call) <= _LONGEST else ""


def with_branches_rewritten(model: nn.Module, lines: dict[tuple[str, str], set[int]]) -> bool:
    """Give modules of a copy of a model methods where the branches at some lines are `torch.where`.

    Args:
        model: the copy.
        lines: of source, by (path of the module, name of its method).

    Returns:
        Whether all of them could be written so.
    """
    for (path, name), numbers in lines.items():
        module = model.get_submodule(path)
        method = inspect.unwrap(getattr(type(module), name))
        made = _compiled(method, numbers) if isinstance(method, types.FunctionType) else None
        if made is None:
            return False
        object.__setattr__(module, name, types.MethodType(made, module))
    return True


def _compiled(method: types.FunctionType, numbers: set[int]) -> types.FunctionType | None:
    """Return a function like a method, with its branches at some lines rewritten; None where that cannot be done."""
    if "torch" not in method.__globals__:
        return None
    code = method.__code__
    function = _function_at(code.co_filename, min(numbers))
    if function is None or function.name != code.co_name or len(_rewritten(function, numbers)) != len(numbers):
        return None
    function.decorator_list, free = [], code.co_freevars
    outer = ast.parse(f"def outer({', '.join(free)}):\n    pass")
    maker: Any = outer.body[0]
    maker.body = [function, ast.Return(ast.Name(function.name, ast.Load()))]
    whole = compile(ast.fix_missing_locations(outer), code.co_filename, "exec", dont_inherit=True)
    (made,) = (each for each in _codes(whole) if each.co_name == function.name and each.co_firstlineno == function.lineno)
    cells = dict(zip(free, method.__closure__ or (), strict=True))
    result = types.FunctionType(
        made, method.__globals__, method.__name__, method.__defaults__, tuple(cells[name] for name in made.co_freevars)
    )
    result.__kwdefaults__ = method.__kwdefaults__
    return result


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _function_at(file: str, number: int) -> Any:
    """Return a fresh syntax tree of the innermost function that has a line; None where no source is to be had."""
    source = "".join(linecache.getlines(file))
    functions = [
        each
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.FunctionDef) and each.lineno <= number <= (each.end_lineno or 0)
    ]
    return max(functions, key=lambda each: each.lineno, default=None)


def _rewritten(function: ast.FunctionDef, numbers: Collection[int]) -> list[ast.stmt]:
    """Write the branches at some lines of a function with `torch.where`, in place; return the statements that are new."""
    made: list[ast.stmt] = []
    for number in sorted(numbers, reverse=True):  # the innermost first, and none moves another's line
        for place in _places(function, number):
            statement = place.block[place.index]
            if isinstance(statement, ast.If):
                new, taken = _of_if(statement, place.block[place.index + 1 :])
            else:
                new, taken = _of_ternary(statement, number), 0
            if new is not None:
                place.block[place.index : place.index + 1 + taken] = [ast.copy_location(new, statement)]
                made.append(new)
                break
    return made


def _places(function: ast.FunctionDef, number: int) -> Iterator[_Place]:
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            block: Any = getattr(node, name, None)
            for index, each in enumerate(block if isinstance(block, list) else ()):
                end = (each.test.end_lineno if isinstance(each, ast.If) else each.end_lineno) or each.lineno
                is_simple = isinstance(each, (ast.Assign, ast.Return, ast.AugAssign, ast.AnnAssign, ast.Expr))
                if each.lineno <= number <= end and (is_simple or isinstance(each, ast.If)):
                    yield _Place(block, index)


def _of_if(branch: ast.If, following: list[ast.stmt]) -> tuple[ast.stmt | None, int]:
    """Return (the statement that computes the same, how many of the following ones it takes in)."""
    first = following[0] if following else None
    returned = _returned(branch, first)
    if returned is not None:
        return ast.Return(returned), int(not _ends(branch))
    names = _assigned([branch])
    if len(names) != 1:
        return None, 0
    (name,) = names
    value = _value(branch, name)
    return (None if value is None else ast.Assign([ast.Name(name, ast.Store())], value, lineno=branch.lineno)), 0


def _ends(branch: ast.If) -> bool:
    """Say whether each side of an `if` returns by itself."""
    last = branch.orelse[0] if len(branch.orelse) == 1 else None
    return isinstance(last, ast.Return) or (isinstance(last, ast.If) and _ends(last))


def _returned(statement: ast.stmt | None, following: ast.stmt | None) -> ast.expr | None:
    """Return the value that a `return`, or an `if` with one on each side, gives back."""
    if isinstance(statement, ast.Return):
        return statement.value
    if not isinstance(statement, ast.If) or len(statement.body) != 1 or len(statement.orelse) > 1:
        return None
    yes = _returned(statement.body[0], None)
    no = _returned(statement.orelse[0] if statement.orelse else following, following)
    return None if yes is None or no is None else _where(statement.test, yes, no)


def _assigned(block: list[ast.stmt]) -> set[str]:
    """Return the names that the statements of a block assign; something else than a name counts as a name of its own."""
    names: set[str] = set()
    for each in block:
        if isinstance(each, ast.If):
            names |= _assigned(each.body) | _assigned(each.orelse)
        elif isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            names.add(each.targets[0].id)
        elif isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
        else:
            names |= {ast.unparse(each), ""}
    return names


def _value(statement: ast.stmt, name: str) -> ast.expr | None:
    """Return the value that a name has after a statement."""
    if isinstance(statement, ast.Assign):
        return statement.value
    if isinstance(statement, ast.AugAssign):
        return ast.BinOp(ast.Name(name, ast.Load()), statement.op, statement.value)
    if not isinstance(statement, ast.If) or len(statement.body) != 1 or len(statement.orelse) > 1:
        return None
    yes = _value(statement.body[0], name)
    no = _value(statement.orelse[0], name) if statement.orelse else ast.Name(name, ast.Load())
    return None if yes is None or no is None else _where(statement.test, yes, no)


def _of_ternary(statement: ast.stmt, number: int) -> ast.stmt | None:
    """Return a statement with the first `… if … else …` of a line written with `torch.where`; None if it has none."""

    class Writer(ast.NodeTransformer):
        is_done = False

        def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
            if self.is_done or not node.test.lineno <= number <= (node.test.end_lineno or 0):
                return self.generic_visit(node)
            self.is_done = True
            return ast.copy_location(_where(node.test, node.body, node.orelse), node)

    writer = Writer()
    changed: ast.stmt = writer.visit(statement)
    return changed if writer.is_done else None


def _where(condition: ast.expr, yes: ast.expr, no: ast.expr) -> ast.Call:
    where = ast.Attribute(ast.Name("torch", ast.Load()), "where", ast.Load())
    return ast.Call(where, [_condition(condition), yes, no], [])


def _condition(node: ast.expr) -> ast.expr:
    """Return a condition as a tensor of booleans, read by no `bool()` or `.item()`, and put together by `&`, `|` and `~`."""
    if isinstance(node, ast.BoolOp):
        return _joined(ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr(), list(map(_condition, node.values)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _unread(node.operand)
        if isinstance(inner, (ast.Name, ast.Attribute)):  # it may be a bool of Python's, as self.training, which ~ makes -2
            return ast.Compare(inner, [ast.Eq()], [ast.Constant(0)])
        return ast.UnaryOp(ast.Invert(), _condition(inner))
    if isinstance(node, ast.Compare):
        sides = [_unread(each) for each in (node.left, *node.comparators)]
        parts = [ast.Compare(sides[place], [each], [sides[place + 1]]) for place, each in enumerate(node.ops)]
        return _joined(ast.BitAnd(), list(parts))  # of a < b < c
    inner = _unread(node)
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in ("any", "all", "gt", "lt"):
        return inner
    return ast.Compare(inner, [ast.NotEq()], [ast.Constant(0)])


def _joined(operator: ast.operator, parts: list[ast.expr]) -> ast.expr:
    return functools.reduce(lambda one, other: ast.BinOp(one, operator, other), parts)


def _unread(node: ast.expr) -> ast.expr:
    """Return an expression without the `.item()`, `float()` or `bool()` around it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
        return _unread(node.func.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _AS_BOOLEAN and len(node.args) == 1:
        return _unread(node.args[0])
    return node
