"""Releases the variables of finished frames, one by one, and leaves placeholders. Frames and lines stay."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nbguard.memory.cleanup.apply.kept_by_torch import forget_failed_backward
from nbguard.memory.core.advice import release_stale
from nbguard.memory.scan.heap.kinds import Kinds, attributes_of, module_namespaces, mro_of, namespace_of
from nbguard.memory.scan.heap.walk import Unread
from nbguard.memory.scan.learners import describe
from nbguard.memory.scan.roots.frames import OPTIMIZED, running_frames
from nbguard.texts import form, here

# --- Placeholders for released objects, as a debugger shows them, with a description and the values of a device's tensor.


BUDGET = 256 * 1024**2
"""Bytes of host memory that one cleanup may spend on values."""


class Placeholder:
    """Stands for an object that a cleanup released. `value` is a copy of a tensor on the host, or None."""

    __slots__ = ("value", "what")

    def __init__(self, what: str, value: Any = None) -> None:
        self.what: str = what
        self.value: Any = value

    def __repr__(self) -> str:
        values = "" if self.value is None else "; its values: .value"
        return f"<released by %reset_gpu: {self.what}{values}>"

    def __getattr__(self, name: str) -> Any:
        if name in self.__slots__ or name.startswith("__"):  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        values = "" if self.value is None else "; its values are in .value"
        command = release_stale().command
        raise AttributeError(f"there is no {name} any more: {form(command, here())} released this {self.what}{values}")


class Placeholders:
    """Makes placeholders, within a budget of host memory: a tensor that still fits is copied, once for all frames.

    Keeps the objects it was given until it goes itself, so that no id is met twice.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._left = budget
        self._kinds = Kinds()
        self._made: dict[int, tuple[Any, Placeholder]] = {}

    def of(self, value: Any) -> Placeholder:
        """Return the placeholder of `value`."""
        if id(value) not in self._made:
            self._made[id(value)] = value, Placeholder(describe(value, self._kinds, Unread()), self._copy(value))
        return self._made[id(value)][1]

    def _copy(self, value: Any) -> Any:
        """Return a copy of a device's tensor on the host, if that takes no memory of the device.

        Not of a host tensor: that would give back nothing.
        """
        if self._kinds.of(type(value)) != "tensor":
            return None
        torch: Any = sys.modules["torch"]
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                plain = torch.Tensor.detach(value)
                nbytes = plain.nbytes
                if plain.device.type in ("cpu", "meta") or nbytes > self._left or not plain.is_contiguous():
                    return None
                copy = plain.cpu()
        except Exception:  # noqa: BLE001 - a device that fails every call, a subclass without storage: then there are no values
            return None
        self._left -= nbytes
        return copy


_BACKWARD = "_engine_run_backward"  # PyTorch's function in which a backward pass runs


def release_variables(frames: Mapping[int, types.FrameType], wanted: set[tuple[int, int]], placeholders: Placeholders) -> None:
    """Put a placeholder in place of each variable in `wanted`, pairs of (id of the frame, id of the object or its cell).

    A frame that runs again by now (a generator resumed) is left alone. With the frames of a backward pass goes its graph.
    """
    running = {id(frame) for _, frame in running_frames()}
    modules = {id(namespace) for namespace in module_namespaces().values()}
    by_owner = _by_owner(wanted)
    for key, frame in frames.items():
        ids = by_owner.get(key)
        if ids and key not in running and id(frame.f_locals) not in modules:  # a cell's namespace is the user's own
            _replace(frame, ids, placeholders)
            for function in [ref for ref in gc.get_referents(frame) if type(ref) is types.FunctionType]:
                if function.__code__ is frame.f_code:
                    _empty(function, ids, placeholders)
    if any(frame.f_code.co_name == _BACKWARD for frame in frames.values()):
        forget_failed_backward()


def release_objects(errors: Mapping[int, BaseException], wanted: set[tuple[int, int]], placeholders: Placeholders) -> None:
    """Put a placeholder in place of each attribute of an exception in `wanted`: (id of the exception, id of the object)."""
    by_owner = _by_owner(wanted)
    for key, error in errors.items():
        ids = by_owner.get(key)
        if not ids:
            continue
        if AttributeError in mro_of(type(error)):
            obj = namespace_of(AttributeError)["obj"]
            if id(obj.__get__(error)) in ids:
                obj.__set__(error, placeholders.of(obj.__get__(error)))
        attributes = attributes_of(error) or {}
        for name in [name for name, value in attributes.items() if id(value) in ids]:
            attributes[name] = placeholders.of(attributes[name])


def _by_owner(wanted: set[tuple[int, int]]) -> dict[int, set[int]]:
    """Return the ids of the wanted objects by their owner: a RecursionError has a thousand frames."""
    wanted_of: dict[int, set[int]] = {}
    for owner, obj in wanted:
        wanted_of.setdefault(owner, set()).add(obj)
    return wanted_of


def _replace(frame: types.FrameType, ids: set[int], placeholders: Placeholders) -> None:
    """Replace variables of one finished frame.

    Through `f_locals`, which writes through since Python 3.13; before, the dict is copied back into the frame by the C API
    that debuggers use. The dict is emptied afterwards, as the frame would keep it. Since Python 3.14 a frame keeps values
    overwritten from outside, as its code may have borrowed it.
    """
    mapping: Any = frame.f_locals
    cells = _cells(frame)
    names = [name for name in mapping if id(mapping[name]) in ids or (name in cells and cells[name] in ids)]
    for name in names:
        mapping[name] = placeholders.of(mapping[name])
    if names and type(mapping) is not dict and sys.version_info >= (3, 14):
        _forget_overwritten(frame)
    if type(mapping) is dict and frame.f_code.co_flags & OPTIMIZED:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        if sys.getrefcount(mapping) <= 3:
            mapping.clear()


def _forget_overwritten(frame: types.FrameType) -> None:
    """Have a finished frame let go of its variables' former values, which are in a tuple of its own whose items are replaced.

    Clearing the frame does so, too, but values set in a cleared frame are never let go of.
    """
    if getattr(frame, "f_generator", None) is not None:  # a generator that rests: it may run on, and keeps its variables
        return
    variables = {id(value) for value in frame.f_locals.values()}
    kept = [(id(ref), len(ref)) for ref in gc.get_referents(frame) if type(ref) is tuple and id(ref) not in variables]
    set_item = ctypes.pythonapi.PyTuple_SetItem  # it refuses a tuple that anybody else refers to
    for address, length in kept:
        for index in range(length):
            with suppress(SystemError):
                set_item(ctypes.c_void_p(address), ctypes.c_ssize_t(index), ctypes.py_object(None))


def _empty(function: types.FunctionType, ids: set[int], placeholders: Placeholders) -> None:
    """Release the defaults and attributes of a function that only finished frames keep."""
    if id(function.__defaults__) in ids:
        function.__defaults__ = None
    if id(function.__kwdefaults__) in ids:
        function.__kwdefaults__ = None
    for name in [name for name, value in function.__dict__.items() if id(value) in ids]:
        function.__dict__[name] = placeholders.of(function.__dict__[name])


def _cells(frame: types.FrameType) -> dict[str, int]:
    """Return the ids of a frame's cells by variable name."""
    names = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
    if not names:
        return {}
    values = {name: id(value) for name, value in dict(frame.f_locals).items() if name in names}
    cells = {}
    for cell in gc.get_referents(frame):
        if type(cell) is types.CellType:
            try:
                content = id(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
            cells.update({name: id(cell) for name, value in values.items() if value == content})
    return cells
