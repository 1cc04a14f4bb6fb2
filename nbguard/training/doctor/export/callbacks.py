"""Callbacks of a Learner that change the model's inputs or outputs, read from their code, which is not run."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from nbguard.libraries import learner_packages
from nbguard.memory.scan.heap.attributes import attribute_of
from nbguard.memory.scan.heap.kinds import mro_of, name_of, namespace_of
from nbguard.training.doctor.analysis.export import BatchChange
from nbguard.training.doctor.export.failures import words_of
from nbguard.training.doctor.subject import TrialSubject

_EVENTS = {"before_batch": ("xb", "x"), "after_pred": ("pred",)}
"""Events around the call of the model, and the Learner's attributes that they may change for it."""
_SETTERS = ("setattr", "__setattr__")
_UPDATE, _NAMESPACES = "update", ("__dict__", "vars")
"""Functions that bind an attribute by its name as a text, which no instruction shows."""
_ENDS = ("POP_TOP", "STORE_", "RETURN_", "FOR_ITER", "LIST_APPEND", "POP_JUMP")
"""Beginnings of the instructions at which a statement ended."""


def batch_changes(subject: TrialSubject) -> tuple[BatchChange, ...]:
    """Return the changes to inputs and outputs by callbacks that also run outside of training, without a library's own."""
    callbacks = attribute_of(subject.learn, "cbs") if subject.learn is not None else None
    items = attribute_of(callbacks, "items")
    return tuple(change for callback in (items if type(items) is list else ()) for change in _changes(callback))


def _changes(callback: Any) -> Iterator[BatchChange]:
    if (
        str(type(callback).__module__).partition(".")[0] in (*learner_packages(), "nbguard")
        or _value(callback, "run_valid") is False
    ):
        return
    for event, names in _EVENTS.items():
        function = _value(callback, event, of_class=True)
        code = inspect.unwrap(function).__code__ if isinstance(function, FunctionType) else None
        line = None if code is None else _writes(callback, code, names, set(), frozenset())
        if line is not None:
            yield BatchChange(callback=name_of(type(callback)), event=event, line=words_of(line))


def _value(callback: Any, name: str, *, of_class: bool = False) -> Any:
    own = None if of_class else attribute_of(callback, name)
    if own is not None:
        return own
    return next((namespace_of(cls)[name] for cls in mro_of(type(callback)) if name in namespace_of(cls)), None)


def _writes(
    callback: Any, code: CodeType, names: tuple[str, ...], seen: set[CodeType], texts: frozenset[str]
) -> tuple[str, int, str] | None:
    """Return the line at which code, or a method that it calls, binds one of the names, or writes into its object.

    `texts` are constants of its callers, which may be names that it is given.
    """
    if code in seen:
        return None
    seen.add(code)
    texts = texts.union(text for each in code.co_consts for text in _texts_of(each))
    number, reads, statement = code.co_firstlineno, False, _Statement()
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
        if instruction.opname.startswith(_ENDS):
            if statement.sets_one_of(names, texts):
                return code.co_filename, statement.line, code.co_name
            statement = _Statement()
        else:
            statement.take(instruction, number, code)
    inner = [each for each in code.co_consts if type(each) is CodeType]  # comprehensions and functions inside
    methods = [_value(callback, name, of_class=True) for name in code.co_names]
    called = [inspect.unwrap(method).__code__ for method in methods if isinstance(method, FunctionType)]
    found = (_writes(callback, each, names, seen, texts) for each in (*inner, *called))
    return next((line for line in found if line is not None), None)


class _Statement:
    """The words of one statement so far: the name it sets by a function is a text among them, or is computed."""

    def __init__(self) -> None:
        self.line = 0  # of the function that sets
        self._words: set[str] = set()
        self._texts: list[str] = []  # in order: of `setattr` the first is the name, mostly

    def take(self, instruction: dis.Instruction, number: int, code: CodeType) -> None:
        """Take in the next instruction, which is on line `number`."""
        if instruction.opname == "KW_NAMES" and instruction.arg is not None:  # Python 3.11 and 3.12
            self._texts += _texts_of(code.co_consts[instruction.arg])
        elif instruction.opname == "LOAD_CONST":
            self._texts += _texts_of(instruction.argval)
        elif type(instruction.argval) is str:
            if instruction.argval in (*_SETTERS, _UPDATE):
                self.line = number
            self._words.add(instruction.argval)

    def sets_one_of(self, names: tuple[str, ...], texts: frozenset[str]) -> bool:
        """Say whether it sets an attribute of one of these names, or of a name that is none of its constants but of `texts`."""
        if _UPDATE in self._words and not self._words.isdisjoint(_NAMESPACES):
            return not set(self._texts).isdisjoint(names)
        if self._words.isdisjoint(_SETTERS):
            return False
        own = [text for text in self._texts if text != "learn"][:1]  # getattr(self, "learn") may come first
        return not (set(own) or texts).isdisjoint(names)


def _texts_of(constant: object) -> Iterator[str]:
    """Yield the texts of a constant: itself, or those of a tuple or set of constants."""
    if type(constant) is str:
        yield constant
    elif type(constant) is tuple or type(constant) is frozenset:
        for each in constant:
            yield from _texts_of(each)
