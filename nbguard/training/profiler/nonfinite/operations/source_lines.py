"""The lines of the user's code of an operation, read from the source for a step unlike the recorded one."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.attributes import attributes_of
from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.memory.scan.roots.frames import frame_locals
from nbguard.training.profiler.nonfinite.operations.operation_trace import (
    OperationLine,
    documented_name,
    function_name,
)
from nbguard.training.profiler.nonfinite.operations.step_values import user_frames

_MOST = 2000
"""Most objects that are examined on the way to the code that a step may run."""
_ITEMS = 64
_INSIDE: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    partial: ("func",),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    property: ("fget",),
}
"""Attributes that lead from a callable to its function."""
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.Mod: "remainder",
    ast.Mult: "mul",
    ast.Add: "add",
    ast.Sub: "sub",
}


def lines_of(name: str, roots: Iterable[Any]) -> set[str] | None:
    """Return the lines of an operation in the code that the step may run, in words, or None if there is too much code.

    `roots`: callables besides the referents of the running frames: models. More code is examined than is run, so a line
    that is not the right one is unlikely to be alone.
    """
    codes = _Reached(roots).codes()
    lines = {
        (code.co_filename, number): OperationLine(code.co_filename, number, function_name(code)).words
        for code in codes
        for found, number in operations_in(code)
        if found == name
    }
    return set(lines.values()) if codes else None


def operations_at(file: str, number: int) -> set[str]:
    """Return the names of the operations that stand on a line."""
    tree = _tree(file)
    found = () if tree is None else map(_operation, ast.walk(tree))
    return {name for name, line in found if name and line == number}


def operations_in(code: CodeType) -> Iterator[tuple[str, int]]:
    """Yield the operations in a code's source, functions inside of it included, by name and line."""
    tree = _tree(code.co_filename)
    for part in () if tree is None else _parts(tree, code):
        for node in ast.walk(part):
            name, number = _operation(node)
            if name:
                yield name, number


def _tree(file: str) -> ast.Module | None:
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=4)  # each function of a file asks
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _parts(tree: ast.Module, code: CodeType) -> list[ast.AST]:
    """Return the function that a code is of; of a cell its statements without the functions and classes that these define."""
    if code.co_name.startswith(("<module", "<cell")):
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return [node for node in tree.body if not isinstance(node, definitions)]
    return [node for node in ast.walk(tree) if _is_of(node, code)]


def _is_of(node: ast.AST, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
        return node.name == code.co_name and first == code.co_firstlineno
    return False


def _operation(node: ast.AST) -> tuple[str, int]:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return documented_name(node.func.attr), node.func.end_lineno or node.lineno
        if isinstance(node.func, ast.Name):
            return documented_name(node.func.id), node.lineno
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return _OPERATORS.get(type(node.op), ""), node.lineno
    return "", 0


class _Reached:
    """The user's code that is reached from the frames that run, by names, methods and modules."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._sites = Sites()
        self._codes: dict[CodeType, None] = {}
        self._seen: set[int] = set()
        self._between: list[FrameType] = []  # frames of libraries
        self._waiting: deque[Any] = deque(roots)
        for frame in user_frames():
            self._frame(frame)
        while self._waiting and len(self._seen) < _MOST:
            self._object(self._waiting.popleft())

    def codes(self) -> list[CodeType]:
        """Return it; none where there is too much of it."""
        return [] if self._waiting else list(self._codes)

    def _frame(self, frame: FrameType) -> None:
        code = frame.f_code
        if not self._sites.is_users(code.co_filename):
            self._between.append(frame)
            return
        while self._between:  # a library that the user's code has called: a Learner has callbacks
            owner = frame_locals(self._between.pop()).get("self")
            self._waiting.extend((attributes_of(owner) or {}).values())
        if code not in self._codes:
            self._code(code, frame.f_globals)
        if frame.f_locals is not frame.f_globals:
            self._waiting.extend(frame_locals(frame).values())

    def _code(self, code: CodeType, namespace: dict[str, Any]) -> None:
        self._codes[code] = None
        nested = [code]
        while nested:
            inner = nested.pop()
            self._waiting.extend(namespace[name] for name in inner.co_names if name in namespace)
            nested.extend(const for const in inner.co_consts if type(const) is CodeType)

    def _object(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        cls = type(value)
        if cls is FunctionType:
            inside = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            if not self._sites.is_users(value.__code__.co_filename):  # a wrapper, maybe of a user's function
                inside = [each for each in inside if type(each) is FunctionType]
            elif value.__code__ not in self._codes:
                self._code(value.__code__, value.__globals__)
            self._waiting.extend(inside)
        elif cls in _INSIDE:
            self._waiting.extend(getattr(value, name) for name in _INSIDE[cls])
        elif cls in (list, tuple, dict):
            self._waiting.extend(() if len(value) > _ITEMS else value.values() if cls is dict else value)
        elif isinstance(value, type):
            for base in filter(self._is_users_class, mro_of(value)):
                self._waiting.extend(vars(base).values())
        elif torch.nn.Module in mro_of(cls) or any(map(self._is_users_class, mro_of(cls))):
            self._waiting.append(cls)
            self._waiting.extend((attributes_of(value) or {}).values())

    def _is_users_class(self, cls: type) -> bool:
        name = vars(cls).get("__module__")
        file = getattr(sys.modules.get(name), "__file__", None) if type(name) is str else None
        return name == "__main__" if file is None else self._sites.is_users(file)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
