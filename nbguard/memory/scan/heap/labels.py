"""Labels of references, as the user would write the step from one object to the next: `.model`, `[3]`, ` → graph`."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import types
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from nbguard.memory.core.references.graph import CONTEXT, DEFAULT, FUNCTION, GRAPH, KEY, SOMEWHERE
from nbguard.memory.scan.heap.attributes import TRANSPARENT, Writer, attributes_of, hiding_names, key_text
from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.kinds import Types, TypeTable, Unwalked, is_graph_node, mro_of, name_of, namespace_of
from nbguard.memory.scan.roots.frames import frame_locals

HAMT = "hamt"
"""The beginning of the names of the classes that make up a context's mapping from variables to values."""
_WRITTEN = Types((dict, list, tuple))
_UNWRITTEN = Types((Unwalked, contextvars.Context))
_FRAMES = Types((types.FrameType, types.TracebackType))


def _dict_labels(mapping: dict[Any, Any], writer: Writer | None, wanted: set[int]) -> dict[int, str]:
    labels: dict[int, str] = {}
    for position, (key, value) in enumerate(list(dict.items(mapping))):
        if id(value) not in wanted and id(key) not in wanted:
            continue
        if writer is not None and type(key) is str:
            label = writer.label(key, position)
        else:
            label = f"[{key_text(key)}]"
            labels.setdefault(id(key), f"{KEY}{key_text(key)}")
        labels.setdefault(id(value), label)
    return labels


def _function_labels(function: types.FunctionType) -> dict[int, str]:
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    labels = {id(cell): f" → closure {name}" for name, cell in zip(names, cells, strict=False)}
    labels |= {id(function.__defaults__): DEFAULT, id(function.__kwdefaults__): DEFAULT}
    return labels | {id(function.__globals__): ".__globals__"}


def _frame_labels(frame: types.FrameType) -> dict[int, str]:
    cells = set(frame.f_code.co_cellvars) | set(frame.f_code.co_freevars)
    labels = {}
    for name, value in frame_locals(frame).items():
        its_own = name in cells and type(value) is types.FunctionType and value.__code__ is frame.f_code
        labels[id(value)] = (
            FUNCTION if its_own else f" → {name}"
        )  # that function the frame itself keeps, whatever the cell holds
        if name in cells:
            labels[-id(value)] = f" → {name}"  # the cell around it, see `Labels.of`
    return labels


def _context_labels(node: Any) -> dict[int, str]:
    """Return the labels of the contents of a node of a context's mapping: values by their variables, and further nodes.

    The collector is told of each value, then of its variable (CPython 3.10 to 3.14), of a node below alone.
    """
    parts = gc.get_referents(node)
    labels = {id(part): "" for part in parts if name_of(type(part)).startswith(HAMT)}
    for value, variable in pairwise(parts):
        if type(variable) is contextvars.ContextVar and id(value) not in labels:
            labels[id(value)] = f"{CONTEXT}{variable.name}"
    return labels


def _slots_of(cls: type) -> list[tuple[str, Any]]:
    spaces = map(namespace_of, mro_of(cls))
    return [(name, slot) for space in spaces for name, slot in space.items() if type(slot) is types.MemberDescriptorType]


def _has_items(cls: type) -> bool:
    """Say whether instances of a class are subscripted: elements of a container that they keep in C are written as theirs."""
    return any("__getitem__" in namespace_of(base) for base in mro_of(cls))


class Labels:
    """Labels of the steps from objects to their referents. Remembers which dicts are attributes of something."""

    def __init__(self, autograd: Autograd | None, class_spaces: Iterable[int] = ()) -> None:
        self._writers: dict[int, Writer] = {space: Writer("__dict__") for space in class_spaces}
        self._closures: dict[int, tuple[str, ...]] = {}  # by id of the tuple of a function's cells: the names of these
        self._autograd = autograd
        self._slots = TypeTable(_slots_of)
        self._hiding = TypeTable(hiding_names)

    def of(self, obj: Any, kind: str, children: list[Any]) -> list[str]:
        """Return the label of each child of `obj`, in order."""
        cls = type(obj)
        is_plain = cls is list or (cls is tuple and id(obj) not in self._closures)
        if is_plain and len(obj) == 1 and [*map(id, obj)] == [*map(id, children)]:
            return ["[0]"]  # the rule below, for chains of a million of them
        known = self._known(obj, kind, set(map(id, children)))
        return [self._label(obj, kind, known, child) for child in children]

    def _known(self, obj: Any, kind: str, wanted: set[int]) -> dict[int, str]:
        cls = type(obj)
        if id(obj) in self._closures:
            names = self._closures[id(obj)]
            return {id(cell): f" → closure {name}" for name, cell in zip(names, obj, strict=False)}
        if cls is dict:
            return _dict_labels(obj, self._writers.get(id(obj)), wanted)
        if cls is list or cls is tuple or cls is deque:
            return {id(item): f"[{i}]" for i, item in reversed(list(enumerate(obj))) if id(item) in wanted}
        if dict in mro_of(cls):
            return self._attribute_labels(obj) | _dict_labels(obj, self._writers.get(id(obj)), wanted)
        if cls is types.FunctionType:
            self._closures[id(obj.__closure__)] = obj.__code__.co_freevars
            labels = _function_labels(obj)
            return labels if wanted <= labels.keys() else self._attribute_labels(obj) | labels
        if kind == "frame":
            return _frame_labels(obj)
        if kind == "class":
            self._writers.update((id(space), Writer("__dict__")) for space in gc.get_referents(namespace_of(obj)))
            return {id(value): f".{name}" for name, value in namespace_of(obj).items()}
        if cls is contextvars.Context or name_of(cls).startswith(HAMT):
            return _context_labels(obj)
        if kind in ("graph", "cell", "array", "part of an array") or cls is types.TracebackType:
            return {}
        known = self._slot_labels(obj) | self._attribute_labels(obj)
        if kind == "tensor" and self._autograd is not None:
            known |= self._autograd.labels(obj)
        return known

    def _attribute_labels(self, obj: Any) -> dict[int, str]:
        """Return how an object's attributes are written, and note how the dicts that hold them write theirs."""
        attributes = attributes_of(obj)
        if attributes is None:
            return {}
        cls = type(obj)
        writer = Writer("__dict__", self._hiding.of(cls))
        self._writers[id(attributes)] = writer
        for name in TRANSPARENT:
            if name in attributes:
                self._writers[id(attributes[name])] = Writer.of_parts(name, cls)
        known = {id(value): writer.label(name) for name, value in list(attributes.items()) if type(name) is str}
        return known | {id(attributes): ""}

    def _slot_labels(self, obj: Any) -> dict[int, str]:
        labels: dict[int, str] = {}
        taken: set[str] = set()
        for name, slot in self._slots.of(type(obj)):
            label = f" → {name}" if name in taken else f".{name}"  # of two slots of that name an attribute gives the first
            with contextlib.suppress(AttributeError):  # a slot without a value
                labels.setdefault(id(slot.__get__(obj)), label)
            taken.add(name)
        return labels

    def _label(self, obj: Any, kind: str, known: dict[int, str], child: Any) -> str:
        written = known.get(id(child))
        if written is not None:
            return written
        if kind == "tensor" and (type(child) is Unwalked or is_graph_node(type(child))):
            return GRAPH
        if type(child) in _UNWRITTEN:
            return ""
        if type(child) is types.CellType and kind == "frame":
            try:
                return known.get(-id(child.cell_contents), SOMEWHERE)
            except ValueError:  # an empty cell
                return SOMEWHERE
        if type(child) is types.FrameType:
            return f" → {child.f_code.co_name}" if kind == "traceback" else ""
        if kind in ("graph", "traceback", "cell", "array", "part of an array", "frame") or type(child) in _FRAMES:
            return ""
        if type(obj) is types.MethodType:
            return ".__self__"
        is_written = type(child) in _WRITTEN and (kind in ("class", "code") or _has_items(type(obj)))
        return "" if is_written else f" → {name_of(type(child))}"
