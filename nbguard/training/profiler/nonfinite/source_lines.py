"""The lines of the user's code of an operation, read from the source, and the variables and weights of the failed step."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import attributes_of, mro_of
from nbguard.memory.scan.libraries import library_paths
from nbguard.memory.scan.roots.frames import frame_locals
from nbguard.texts import CELL_CODE, running_shell
from nbguard.training.profiler.nonfinite.operation_trace import (
    OperationLine,
    StepProgram,
    StepTrace,
    documented_name,
    function_name,
)

# --- The variables and weights of a step that failed, kept until its operations are known, as the next step changes them all.


_Name = tuple[Any, ...]
"""A variable: the code of its frame, its name, and the places in containers."""
_MOST_of_step_values = 64
"""Items of a container that are examined."""
_DEEPEST = 3
"""Containers in containers that are examined."""
_FRAMES = 60
_CONTAINERS = (list, tuple)


@dataclass(slots=True, kw_only=True)
class RecordedStep:
    """The operations of a step up to its loss, and the variables that it had then."""

    program: StepProgram
    loss: int  # slot
    names: dict[_Name, tuple[int, Any, Any]]  # slot, shape and type of tensors that no gradient goes through
    until: int  # operations up to the loss: those that follow are between the backward pass and the step
    gradients: dict[int, tuple[int, int]] = field(default_factory=dict)  # slots after the backward pass and at the step
    hooks: list[CodeType] = field(default_factory=list)  # of its tensors

    @classmethod
    def of(cls, trace: StepTrace, loss: Any, variables: dict[_Name, Any]) -> RecordedStep | None:
        """Return the operations recorded up to a loss, or None where none of them made it."""
        slot = trace.slot_of(loss)
        if slot is None or not trace.is_whole:
            return None
        step = cls(program=trace.program, loss=slot, names={}, until=len(trace.program.calls), hooks=trace.hooks)
        step.note(trace, variables)
        return step

    def note(self, trace: StepTrace, variables: dict[_Name, Any]) -> None:
        """Note the variables whose tensors the step has read, or made, so far."""
        for name, tensor in variables.items():
            number = None if tensor.requires_grad else trace.slot_of(tensor)
            if number is not None:
                self.names.setdefault(name, (number, tensor.shape, tensor.dtype))


class StepValues:
    """The tensors that variables have now, and copies of the weights."""

    def __init__(self, arguments: Iterable[Any], weights: Iterable[Any]) -> None:
        """`arguments`: of the models' calls. `weights`: that the optimizer is about to change."""
        self.variables: dict[_Name, Any] = named_tensors(arguments)
        self._weights: dict[int, Any] = {}
        for weight in (*weights, *(tensor for tensor in self.variables.values() if tensor.is_leaf and tensor.requires_grad)):
            if id(weight) not in self._weights:
                self._weights[id(weight)] = weight.detach().clone()

    @classmethod
    def none(cls) -> StepValues:
        """Return no values: those of the step that is recorded are as good."""
        values = cls.__new__(cls)
        values.variables, values._weights = {}, {}
        return values

    def by_slot(self, step: RecordedStep) -> dict[int, Any] | None:
        """Return these values by the slots of a step that was recorded; None where its shapes are others."""
        values: dict[int, Any] = {}
        for number in step.program.outside:
            weight = self._weights.get(id(step.program.tensor(number)))
            if weight is not None:
                values[number] = weight
        held = {slot: step.program.tensor(slot) for slot in step.program.outside}

        def is_the_same(item: tuple[_Name, tuple[int, Any, Any]]) -> bool:
            """Say whether a variable still has its tensor, as an item of a list of batches has."""
            name, (slot, *_) = item
            return slot in held and held[slot] is self.variables.get(name)

        for name, (slot, shape, dtype) in sorted(step.names.items(), key=is_the_same):
            value = self.variables.get(name)
            if value is None or value.requires_grad or slot in values:  # a graph has made it since
                continue
            if value.shape != shape or value.dtype != dtype:
                return None
            values[slot] = value
        return values

    def name_of(self, step: RecordedStep, slot: int) -> tuple[str, bool]:
        """Return the variable of a slot, and whether a model was called with it; "" where it has none."""
        names = [name for name, (number, *_) in step.names.items() if number == slot]
        written = next((f"{name[2]}{_path(name[3:])}" for name in names if name[0] != "call"), "")
        return written, any(name[0] == "call" for name in names)


def _path(places: tuple[Any, ...]) -> str:
    return "".join(f".{place}" if type(place) is str else f"[{place}]" for place in places)


def named_tensors(arguments: Iterable[Any]) -> dict[_Name, Any]:
    """Return the tensors of the variables of the frames that run, and those in the arguments of calls."""
    found: dict[_Name, Any] = {}
    with torch._C.DisableTorchFunction():
        for number, argument in enumerate(arguments):
            found.update(_tensors(("call", number), argument, _DEEPEST))
        for frame in user_frames():
            for name, value in frame_locals(frame).items():
                found.update(_tensors((frame.f_code.co_filename, frame.f_code.co_name, name), value, _DEEPEST))
                if name == "self" and (attributes := attributes_of(value)) is not None:
                    for attribute, inside in list(attributes.items()):
                        found.update(_tensors((frame.f_code.co_filename, frame.f_code.co_name, name, attribute), inside, 1))
    return found


def user_frames() -> Iterator[FrameType]:
    """Yield the frames that have led here, without nbguard's own and the shell's."""
    own = library_paths()[-1]
    frame: FrameType | None = sys._getframe(1)
    shell = running_shell()
    for _ in range(_FRAMES):
        if frame is None or (shell is not None and frame.f_code.co_name == "run_code"):
            return
        if not frame.f_code.co_filename.startswith(own):
            yield frame
        frame = frame.f_back


def _tensors(name: _Name, value: Any, depth: int) -> Iterator[tuple[_Name, Any]]:
    cls = type(value)
    if torch.Tensor in mro_of(cls):
        yield name, value
    elif depth and cls in _CONTAINERS:
        for place, item in enumerate(value[:_MOST_of_step_values]):
            yield from _tensors((*name, place), item, depth - 1)
    elif depth and dict in mro_of(cls) and dict.__len__(value) <= _MOST_of_step_values:
        for key, item in dict.items(value):
            if type(key) is str:
                yield from _tensors((*name, key), item, depth - 1)


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
    if code.co_name.startswith(CELL_CODE):
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
