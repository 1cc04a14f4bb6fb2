"""Callbacks of a Learner that change what goes into the model or comes out of it: read from their code, which is not run."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from nbguard.doctor.analysis.export import BatchChange
from nbguard.doctor.export.failures import words_of
from nbguard.doctor.subject import TrialSubject
from nbguard.scan.heap.attributes import attribute_of
from nbguard.scan.heap.kinds import mro_of, name_of, namespace_of

_EVENTS = {"before_batch": ("xb", "x"), "after_pred": ("pred",)}
"""Events around the call of the model, and the Learner's attributes that they may change for it."""


def batch_changes(subject: TrialSubject) -> tuple[BatchChange, ...]:
    """Return what callbacks that also run outside of training do to inputs and outputs; fastai's own are left out."""
    callbacks = attribute_of(subject.learn, "cbs") if subject.learn is not None else None
    items = attribute_of(callbacks, "items")
    return tuple(change for callback in (items if type(items) is list else ()) for change in _changes(callback))


def _changes(callback: Any) -> Iterator[BatchChange]:
    if str(type(callback).__module__).partition(".")[0] in ("fastai", "nbguard") or _value(callback, "run_valid") is False:
        return
    for event, names in _EVENTS.items():
        function = _value(callback, event, of_class=True)
        line = _writes(callback, function, names, set()) if isinstance(function, FunctionType) else None
        if line is not None:
            yield BatchChange(callback=name_of(type(callback)), event=event, line=words_of(line))


def _value(callback: Any, name: str, *, of_class: bool = False) -> Any:
    own = None if of_class else attribute_of(callback, name)
    if own is not None:
        return own
    return next((namespace_of(cls)[name] for cls in mro_of(type(callback)) if name in namespace_of(cls)), None)


def _writes(callback: Any, function: FunctionType, names: tuple[str, ...], seen: set[CodeType]) -> tuple[str, int, str] | None:
    """Return the line at which a method, or one that it calls, binds one of the names, or writes into what it stands for."""
    code = inspect.unwrap(function).__code__
    if code in seen:
        return None
    seen.add(code)
    number, reads = code.co_firstlineno, False
    for instruction in dis.get_instructions(code):
        start = getattr(instruction, "line_number", instruction.starts_line)  # from Python 3.13 on by that name
        if type(start) is int and start != number:
            number, reads = start, False
        name = str(instruction.argval) if type(instruction.argval) is str else ""
        reads = reads or name in names
        is_in_place = name.endswith("_") and not name.endswith("__")
        is_binding = instruction.opname == "STORE_ATTR" and name in names
        is_written = reads and (is_in_place or instruction.opname == "STORE_SUBSCR")
        if is_binding or is_written:
            return code.co_filename, number, code.co_name
    for name in code.co_names:
        called = _value(callback, name, of_class=True)
        found = _writes(callback, called, names, seen) if isinstance(called, FunctionType) else None
        if found is not None:
            return found
    return None
