"""Frozen dataclasses as plain data for JSON and back. What is read is checked against the annotations of the classes."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from nbguard.errors import ProfileFileError
from nbguard.profiler.analysis.time.packed_log import pack_log, unpack_log
from nbguard.profiler.analysis.time.phase_log import PhaseLog

_COLUMNS, _ROWS = "columns", "rows"


def to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it. A tuple of dataclasses becomes a table: its columns once, a row for each."""
    if type(value) is PhaseLog:
        return pack_log(value)
    if type(value) is float and not math.isfinite(value):
        return str(value)
    if type(value) is tuple:
        if value and dataclasses.is_dataclass(value[0]):
            names = [field.name for field in dataclasses.fields(value[0])]
            return {_COLUMNS: names, _ROWS: [[to_plain(getattr(item, name)) for name in names] for item in value]}
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def from_plain(annotation: Any, data: Any, where: str = "") -> Any:
    """Return the value of a type that plain data describe; `where` names the field in messages.

    Raises:
        ProfileFileError: a field is missing, unknown, or holds something else.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is PhaseLog:
        return unpack_log(data, where)
    if dataclasses.is_dataclass(annotation):
        return _record(annotation, data, where)
    if origin is tuple:
        return _row(arguments, data, where)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, data, where)
    if origin is Mapping or origin is typing.get_origin(Mapping[str, int]):
        _check(type(data) is dict, where, "an object", data)
        return {name: from_plain(arguments[1], item, f"{where}.{name}") for name, item in data.items()}
    if origin is Literal:
        _check(type(data) is str and data in arguments, where, f"one of {', '.join(arguments)}", data)
        return data
    if annotation is float:
        return _number(data, where)
    _check(type(data) is annotation, where, annotation.__name__, data)
    return data


def _record(cls: Any, data: Any, where: str) -> Any:
    _check(type(data) is dict, where, "an object", data)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = [name for name in data if name not in fields]
    if unknown:
        raise ProfileFileError(f"it has a field {_path(where, str(unknown[0]))!r} that this version of nbguard does not know")
    missing = [name for name, field in fields.items() if name not in data and _is_required(field)]
    if missing:
        raise ProfileFileError(f"its field {_path(where, missing[0])!r} is missing")
    hints = _hints(cls)
    return cls(**{name: from_plain(hints[name], item, _path(where, name)) for name, item in data.items()})


def _row(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    """Return a tuple: of dataclasses from a table, of other values from a list."""
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        cls = arguments[0]
        if dataclasses.is_dataclass(cls) and type(data) is dict:
            return _table(cls, data, where)
        _check(type(data) is list, where, "a list", data)
        return tuple(from_plain(cls, item, f"{where}[{place}]") for place, item in enumerate(data))
    _check(type(data) is list and len(data) == len(arguments), where, f"a list of {len(arguments)}", data)
    return tuple(from_plain(kind, data[place], f"{where}[{place}]") for place, kind in enumerate(arguments))


def _table(cls: Any, data: dict[str, Any], where: str) -> tuple[Any, ...]:
    _check(data.keys() == {_COLUMNS, _ROWS}, where, "a table", data)
    columns, rows = data[_COLUMNS], data[_ROWS]
    _check(type(columns) is list and all(type(name) is str for name in columns), where, "a table", columns)
    _check(type(rows) is list, where, "a table", rows)
    records = []
    for place, row in enumerate(rows):
        _check(type(row) is list and len(row) == len(columns), f"{where}[{place}]", f"a row of {len(columns)}", row)
        records.append(_record(cls, dict(zip(columns, row, strict=True)), f"{where}[{place}]"))
    return tuple(records)


def _one_of(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    """Return a value of one of several types: None, or a dataclass that has just these fields, or the only other type."""
    if data is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) > 1 and type(data) is dict:
        others = [kind for kind in others if {field.name for field in dataclasses.fields(kind)} == data.keys()] or others
    return from_plain(others[0], data, where)


def _number(data: Any, where: str) -> float:
    if data in ("nan", "inf", "-inf"):
        return float(data)
    _check(type(data) in (int, float), where, "a number", data)
    return float(data)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _check(is_right: bool, where: str, expected: str, data: Any) -> None:
    if not is_right:
        shown = "nothing" if data is None else f"a value of type {type(data).__name__}"
        raise ProfileFileError(f"its field {where or 'at the top'!r} should be {expected}, and is {shown}")
