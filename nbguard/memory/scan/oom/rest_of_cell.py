"""The rest of a cell after the request that failed: may it allocate more, by its source and the place in each frame."""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from nbguard.memory.scan.oom.chain import slot
from nbguard.memory.scan.oom.names import counted_loop
from nbguard.memory.scan.roots.frames import OPTIMIZED, frame_locals

_MAKING = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_SINGLE = frozenset({*_MAKING, *(f"{name}_like" for name in _MAKING), "arange", "clone", "cuda"})
"""Functions of PyTorch that make one tensor, with one request."""
_KEEPING = frozenset({"append", "add", "insert", "setdefault"})
"""Methods of containers that keep their arguments and make nothing."""
_PLAIN = (ast.Name, ast.Constant, ast.Attribute, ast.expr_context)
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
_PLAIN_STATEMENTS = (ast.Pass, ast.Delete, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Break)
_FUNCTIONS = (ast.FunctionDef, ast.Lambda)
_BELOW = ("nbguard.", "torch.utils._python_dispatch")
"""Beginnings of the names of modules that a request on a simulated device goes through."""


def may_go_on(error: BaseException, files: Collection[str]) -> bool:
    """Say whether the cell may allocate more once the request is served that `error` is about, of an unknown number of bytes.

    It may not where the request is the last thing that each function of the notebook does, and the last thing in the cell.
    The elements of a list of known length count by themselves (`OomFact.elements`). `files` are those of the notebook's cells.
    """
    places = list(_places(error))
    while places and _is_below(places[-1][0]):
        places.pop()
    while places and _file(places[0][0]) not in files:
        places.pop(0)
    if not places or any(_file(frame) not in files for frame, _ in places):
        return True
    return not all(
        _ends_there(frame, instruction, is_deepest=number == len(places) - 1)
        for number, (frame, instruction) in enumerate(places)
    )


def _places(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    """Yield the frames of an error from the outermost on, each with the instruction that it had reached."""
    traceback = slot(error, "__traceback__")
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti
        traceback = traceback.tb_next


def _file(frame: types.FrameType) -> str:
    return frame.f_code.co_filename


def _is_below(frame: types.FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    return type(module) is str and module.startswith(_BELOW)


def _ends_there(frame: types.FrameType, instruction: int, *, is_deepest: bool) -> bool:
    """Say whether a function has nothing left to do that may allocate after its current call."""
    try:
        tree = ast.parse("".join(linecache.getlines(_file(frame))))
    except (SyntaxError, ValueError, RecursionError):
        return False
    above = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    place = _expression_at(tree, frame.f_code, instruction)
    if place is None or (is_deepest and not _is_one_request(place)):
        return False
    node: ast.AST = place
    while (parent := above.get(node)) is not None:
        if isinstance(parent, _FUNCTIONS) or (isinstance(parent, ast.ListComp) and frame.f_code.co_name == "<listcomp>"):
            return not isinstance(parent, ast.FunctionDef) or not _yields(parent)
        if not _is_last_in(parent, node, frame):
            return False
        node = parent
    return True


def _expression_at(tree: ast.AST, code: types.CodeType, instruction: int) -> ast.expr | None:
    """Return the expression that an instruction belongs to; None where this Python (before 3.11) does not tell."""
    positions: Any = getattr(code, "co_positions", None)
    if positions is None:
        return None
    line, end_line, column, end_column = next(islice(positions(), instruction // 2, None), (None,) * 4)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == (
            line,
            end_line,
            column,
            end_column,
        ):
            return node
    return None


def _is_one_request(node: ast.AST) -> bool:
    """Say whether an expression is known to make one request: it makes a tensor, or is arithmetic with two operands."""
    if isinstance(node, ast.Call):
        return (isinstance(node.func, ast.Attribute) and node.func.attr in _SINGLE) or (
            isinstance(node.func, ast.Name) and node.func.id in _SINGLE
        )
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div)


def _is_last_in(parent: ast.AST, node: ast.AST, frame: types.FrameType) -> bool:
    """Say whether nothing in `parent` that may allocate comes after its part `node`."""
    match parent:
        case ast.Call(func=ast.Attribute(attr=attr), args=args):
            return attr in _KEEPING and node in args and not parent.keywords and _are_plain(args[args.index(node) + 1 :])
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return _are_plain(elements[elements.index(node) + 1 :])  # type: ignore[arg-type]
        case ast.Dict(values=values):
            return node in values and _are_plain(values[values.index(node) + 1 :])
        case ast.ListComp():
            return counted_loop(parent) is not None and node is parent.elt
        case ast.Assign() | ast.AnnAssign() | ast.Return() | ast.Expr() | ast.NamedExpr():
            return True
        case ast.Module() | ast.If() | ast.With():
            return _rest_is_plain(parent, node)
        case ast.For():
            is_counted = counted_loop(parent) is not None
            return not parent.orelse and _rest_is_plain(parent, node) and (is_counted or _is_last_turn(parent, frame))
        case ast.Try():
            return node in parent.body and _rest_is_plain(parent, node) and not parent.orelse and not parent.finalbody
    return False


def _rest_is_plain(parent: Any, node: ast.AST) -> bool:
    """Say whether the statements after `node` in its block allocate nothing."""
    block = next((block for block in (parent.body, getattr(parent, "orelse", ())) if node in block), None)
    return block is not None and all(map(_is_plain_statement, block[block.index(node) + 1 :]))


def _is_plain_statement(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(value=value) | ast.Expr(value=value):
            return _are_plain([value])
        case ast.Return(value=value):
            return value is None or _are_plain([value])
        case ast.FunctionDef(decorator_list=[]):
            return True
    return isinstance(statement, _PLAIN_STATEMENTS)


def _are_plain(expressions: Iterable[ast.AST]) -> bool:
    return all(isinstance(part, (*_PLAIN, *_DISPLAYS)) for one in expressions for part in ast.walk(one))


def _is_last_turn(loop: ast.For, frame: types.FrameType) -> bool:
    """Say whether a loop over numbers or strings that are written down was at the last of them."""
    if not isinstance(loop.target, ast.Name) or not isinstance(loop.iter, ast.Tuple | ast.List):
        return False
    values = [one.value for one in loop.iter.elts if isinstance(one, ast.Constant)]
    if len(values) != len(loop.iter.elts) or not values or values.count(values[-1]) != 1:
        return False
    found = frame_locals(frame) if frame.f_code.co_flags & OPTIMIZED else frame.f_globals
    value = found.get(loop.target.id)
    return type(value) is type(values[-1]) and type(value) in (int, str, float) and value == values[-1]


def _yields(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
