"""How the user would write the step from an object to what it refers to: `.model`, `[3]`, ` → graph`."""

from __future__ import annotations

import types
from typing import Any

from nbguard.core.ownership import FUNCTION, KEY
from nbguard.probes.autograd import Autograd
from nbguard.probes.frames import frame_locals
from nbguard.probes.kinds import mro_of, name_of, namespace_of

_TRANSPARENT = frozenset({"_modules", "_parameters", "_buffers"})
_SEQUENCES = (list, tuple)
_ATOMS = (str, int, bool, float, bytes, type(None))


def attributes_of(obj: Any) -> dict[str, Any] | None:
    """Return an instance's attribute dict, or None. Reads the slot itself, so no property or `__getattr__` runs."""
    for cls in mro_of(type(obj)):
        slot = namespace_of(cls).get("__dict__")
        if type(slot) in (types.GetSetDescriptorType, types.MemberDescriptorType):  # the latter: SimpleNamespace
            found = slot.__get__(obj)
            return found if type(found) is dict else None
    return None


def key_text(key: object) -> str:
    """Return a dict key as text: atoms as written, anything else by its type (its repr would be the user's code)."""
    if type(key) in _ATOMS:
        text = repr(key)
        return text if len(text) <= 40 else text[:37] + "…'"
    if type(key) is tuple and all(type(part) in _ATOMS for part in key):
        return repr(key)
    return f"<{name_of(type(key))}>"


def _attribute_labels(values: dict[str, Any]) -> dict[int, str]:
    return {id(value): "" if name in _TRANSPARENT else f".{name}" for name, value in list(values.items()) if type(name) is str}


def _dict_labels(mapping: dict[Any, Any], as_attributes: bool) -> dict[int, str]:
    labels: dict[int, str] = {}
    for key, value in list(dict.items(mapping)):
        if as_attributes and type(key) is str:
            label = "" if key in _TRANSPARENT else f"[{key}]" if key.isdigit() else f".{key}"
        else:
            label = f"[{key_text(key)}]"
            labels.setdefault(id(key), f"{KEY}{key_text(key)}")
        labels.setdefault(id(value), label)
    return labels


def _function_labels(function: types.FunctionType) -> dict[int, str]:
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    labels = {id(cell): f" → closure {name}" for name, cell in zip(names, cells, strict=False)}
    return labels | {id(function.__defaults__): " → default ", id(function.__kwdefaults__): " → default "}


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


class Labels:
    """Labels of the steps from objects to their referents. Remembers which dicts are attributes of something."""

    def __init__(self, autograd: Autograd | None) -> None:
        self._attribute_dicts: set[int] = set()
        self._autograd = autograd
        self._slots: dict[type, list[tuple[str, Any]]] = {}

    def of(self, obj: Any, kind: str, children: list[Any]) -> list[str]:
        """Return the label of each child of `obj`, in order."""
        known = self._known(obj, kind)
        return [self._label(obj, kind, known, child) for child in children]

    def _known(self, obj: Any, kind: str) -> dict[int, str]:
        cls = type(obj)
        if dict in mro_of(cls):
            return _dict_labels(obj, id(obj) in self._attribute_dicts)
        if cls in _SEQUENCES:
            return {id(item): f"[{i}]" for i, item in reversed(list(enumerate(obj)))}
        if cls is types.FunctionType:
            return _function_labels(obj)
        if kind == "frame":
            return _frame_labels(obj)
        if kind == "class":
            return {id(value): f".{name}" for name, value in namespace_of(obj).items()}
        if kind in ("graph", "cell", "array") or cls is types.TracebackType:
            return {}
        known = self._slot_labels(obj)
        attributes = attributes_of(obj)
        if attributes is not None:
            known |= _attribute_labels(attributes)
            known[id(attributes)] = ""
            self._attribute_dicts.add(id(attributes))
            self._attribute_dicts.update(id(attributes.get(name)) for name in _TRANSPARENT)
        if kind == "tensor" and self._autograd is not None:
            known |= self._autograd.labels(obj)
        return known

    def _slot_labels(self, obj: Any) -> dict[int, str]:
        cls = type(obj)
        slots = self._slots.get(cls)
        if slots is None:
            spaces = map(namespace_of, mro_of(cls))
            slots = self._slots[cls] = [
                (n, s) for space in spaces for n, s in space.items() if type(s) is types.MemberDescriptorType
            ]
        labels = {}
        for name, slot in slots:
            try:
                labels[id(slot.__get__(obj))] = f".{name}"
            except AttributeError:  # a slot without a value
                continue
        return labels

    def _label(self, obj: Any, kind: str, known: dict[int, str], child: Any) -> str:
        found = known.get(id(child))
        if found is not None:
            return found
        if type(child) is types.CellType and kind == "frame":
            try:
                return known.get(-id(child.cell_contents), " → …")
            except ValueError:  # an empty cell
                return " → …"
        if type(child) is types.FrameType:
            return f" → {child.f_code.co_name}" if kind == "traceback" else ""
        if kind in ("graph", "traceback", "cell", "array", "frame") or type(child) in (
            types.FrameType,
            types.TracebackType,
        ):
            return ""
        if type(obj) is types.MethodType:
            return ".__self__"
        return "" if type(child) in (dict, list, tuple) else f" → {name_of(type(child))}"
