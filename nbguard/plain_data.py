"""Frozen dataclasses as plain data for JSON, and back, with values checked by annotations and numbers by bounds."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias, Union

from nbguard.errors import DamagedDataError

COLUMNS, ROWS = "columns", "rows"
"""The keys of a table: a tuple of dataclasses as the names of the fields once, and a row for each."""

DEEPEST = 100
"""Values within one another in a file; a snapshot nests some ten deep. Python in a browser has a stack for a few thousand."""

NESTED = f"it is nested more than {DEEPEST} deep"

_NAME = 60
"""Characters of a field's name in a message."""
_LARGEST = 2**63
"""No number of ours reaches it; times of a clock are nanoseconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Within:
    """The bounds of a number, in its annotation: `Annotated[int, Within(0, 10)]`."""

    least: int
    most: int


_ATOMS = frozenset({str, int, bool, type(None)})


def to_plain(value: Any, *, tables: bool = False) -> Any:
    """Return a value as JSON can hold it: a dataclass as a dict, a tuple or set as a list, NaN and infinity as text.

    The metadata of a field may say `json`, its name in JSON, which readers depend on, or False where it is left out; and
    `plain`, the function that writes its value.

    Args:
        value: a dataclass, or a container of such, or immutable data.
        tables: a tuple of dataclasses becomes a table: its columns once, and a row for each.
    """
    kind: Any = type(value)
    if kind in _ATOMS or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return str(value)
    first: Any = type(value[0]) if tables and kind is tuple and value else None
    if first is not None and (form := _form(first)):
        return {COLUMNS: list(form[0]), ROWS: [_values(item, form, tables) for item in value]}
    # A message goes out four times a second, and most of its values are atoms: no call for these.
    if isinstance(value, (tuple, list)):
        return [item if type(item) in _ATOMS else to_plain(item, tables=tables) for item in value]
    if form := _form(kind):
        return dict(zip(form[0], _values(value, form, tables), strict=True))
    if isinstance(value, Mapping):
        return {name: to_plain(item, tables=tables) for name, item in value.items()}
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are, for `json` where it meets an object that it does not know."""
    kind: Any = type(value)
    form = _form(kind)
    if form is None:
        raise TypeError(f"{kind.__name__} is no part of a message")
    return dict(zip(form[0], form[2](value), strict=True))


def to_json(data: Mapping[str, Any]) -> str:
    """Return plain data as JSON text."""
    return json.dumps(data, indent=1, ensure_ascii=False)


# --- Files of strangers, whose values may be nested so deep that reading, comparing or freeing them would overflow the stack.


_PIECE = 1 << 16
"""Bytes of JSON that are split at once."""
_OPEN = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_LEVELS = 8
"""Levels at which a container of a file stands, on the average of all, if they refer to one another as no file of ours does."""


def read_json(data: bytes | str, **readers: Any) -> Any:
    """Return the value of a JSON text in UTF-8; `readers` are the hooks of `json.loads`.

    Raises:
        ValueError: the text is no JSON, or `DamagedDataError` for one that is nested more than `DEEPEST` deep.
    """
    text = data if isinstance(data, str) else data.decode("utf-8-sig", "surrogatepass")
    if _is_deep(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data):
        raise DamagedDataError(NESTED)
    return json.loads(text, **readers)


def _is_deep(data: bytes) -> bool:
    """Say whether the brackets of a JSON text are nested more than `DEEPEST` deep; each round takes the innermost away."""
    brackets = b"".join(_outside_strings(data)).translate(_OPEN)
    for _ in range(DEEPEST):
        before, brackets = brackets, brackets.replace(b"[]", b"")
        if brackets == before:  # none is left, or one that was opened and never closed
            return brackets.count(b"[") > DEEPEST
    return bool(brackets)


def _outside_strings(data: bytes) -> Iterator[bytes]:
    """Yield the brackets of a JSON text that stand in no string."""
    text, is_inside = data.replace(b"\\\\", b"").replace(b'\\"', b""), False
    for start in range(0, len(text), _PIECE):
        parts = text[start : start + _PIECE].split(b'"')
        yield b"".join(parts[is_inside::2]).translate(None, _NO_BRACKETS)
        is_inside ^= len(parts) % 2 == 0


def is_nested(values: Iterable[object]) -> bool:
    """Say whether plain values are nested more than `DEEPEST` deep, or refer to one another as in no honest file."""
    parts, seen, met = values, set[int](), 0
    for _ in range(DEEPEST):
        level = {id(part): part for part in parts if type(part) in _CONTAINERS}
        seen.update(level)
        met += len(level)
        if met > _LEVELS * len(seen) + DEEPEST:
            return True
        parts = gc.get_referents(*level.values())
        if not parts:
            return False
    return any(type(part) in _CONTAINERS for part in parts)


def take_apart(*values: object) -> None:
    """Empty the containers in plain values, and free those that cannot be emptied from the outermost to the innermost.

    So no call that frees a container is made within another, as many as they are nested deep.
    """
    held = _inner_first(values, _CONTAINERS)
    for container in held:
        if isinstance(container, (dict, list, set)):
            container.clear()
    fixed = _inner_first(held, frozenset({tuple, frozenset}))
    del held
    while fixed:
        fixed.pop()


def _inner_first(values: Iterable[object], kinds: frozenset[type]) -> list[object]:
    """Return all containers of some types in plain values, each after those in it unless they form a cycle."""
    found: list[object] = []
    seen: set[int] = set()
    left = [(value, False) for value in values]
    while left:
        value, is_done = left.pop()
        if is_done:
            found.append(value)
        elif type(value) in kinds and id(value) not in seen:
            seen.add(id(value))
            left.append((value, True))
            left += [(part, False) for part in gc.get_referents(value)]
    return found


_Writer: TypeAlias = Callable[[Any], Any]
_Form: TypeAlias = tuple[tuple[str, ...], tuple[_Writer | None, ...], _Writer]
"""Of a dataclass: the names of its fields in JSON, the functions that write them, and one that reads all at once."""


@functools.cache
def _form(kind: Any) -> _Form | None:
    """Return the form of a dataclass; None for other types."""
    if not dataclasses.is_dataclass(kind):
        return None
    fields = [field for field in dataclasses.fields(kind) if field.metadata.get("json", True)]
    names = [field.name for field in fields]
    read: Callable[[Any], tuple[Any, ...]] = (
        attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
    )
    return (
        tuple(field.metadata.get("json", field.name) for field in fields),
        tuple(field.metadata.get("plain") for field in fields),
        read,
    )


def _values(value: Any, form: _Form, tables: bool) -> list[Any]:
    _, writers, read = form
    return [
        write(item) if write else item if type(item) in _ATOMS else to_plain(item, tables=tables)
        for write, item in zip(writers, read(value), strict=True)
    ]


def from_plain(annotation: Any, data: Any, where: str = "", text: Callable[[str], str] = str) -> Any:
    """Return the value of a type that plain data describe.

    Args:
        annotation: the type. Of `Annotated[type, read]` the function `read(data, where)` returns the value.
        data: of JSON; strings, numbers, lists and dicts.
        where: names the field in messages.
        text: returns the kept part of a string.

    Raises:
        DamagedDataError: a field is missing, unknown, or holds something else.
    """
    try:
        return _Reader(text).value(annotation, data, where)
    except RecursionError:
        raise DamagedDataError("it is nested too deep") from None


def is_of(annotation: Any, value: object) -> bool:
    """Say whether a value has the type that an annotation names, down to the last field of a dataclass."""
    origin, of = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return type(value) is str and value in of
    if origin is tuple and type(value) is tuple:
        each = of[:1] * len(value) if of[-1] is Ellipsis else of
        return len(each) == len(value) and all(map(is_of, each, value))
    if origin is frozenset and type(value) is frozenset:
        return all(is_of(of[0], item) for item in value)
    if origin is Mapping and type(value) is dict:
        return all(is_of(of[0], key) and is_of(of[1], item) for key, item in value.items())
    if origin in (Union, types.UnionType):
        return any(is_of(kind, value) for kind in of)
    if annotation is object or origin is not None or type(value) is not annotation:
        return annotation is object
    hints = _hints(annotation) if dataclasses.is_dataclass(annotation) else {}
    return all(is_of(hint, getattr(value, name)) for name, hint in hints.items())


def _name_of(field: dataclasses.Field[Any]) -> str:
    """Return the name of a field in plain data."""
    return str(field.metadata.get("json") or field.name)


class _Reader:
    def __init__(self, text: Callable[[str], str]) -> None:
        self._text = text

    def value(self, annotation: Any, data: Any, where: str) -> Any:
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is Annotated:
            return self._annotated(arguments[0], arguments[1], data, where)
        if dataclasses.is_dataclass(annotation):
            return self._record(annotation, data, where)
        if origin is tuple:
            return self._row(arguments, data, where)
        if origin in (Union, types.UnionType):
            return self._one_of(arguments, data, where)
        if origin is Mapping or origin is typing.get_origin(Mapping[str, int]):
            check(type(data) is dict, where, "an object", data)
            return {self._text(name): self.value(arguments[1], item, _path(where, name)) for name, item in data.items()}
        if origin is Literal:
            check(type(data) is str and data in arguments, where, f"one of {', '.join(arguments)}", data)
            return data
        if annotation is float:
            return _number(data, where)
        if isinstance(annotation, type) and issubclass(annotation, Enum):
            values = [member.value for member in annotation]
            check(type(data) is str and data in values, where, f"one of {', '.join(values)}", data)
            return annotation(data)
        check(type(data) is annotation, where, annotation.__name__, data)
        if annotation is int:
            check(-_LARGEST <= data < _LARGEST, where, "a number of at most 63 bits", data)
        return self._text(data) if annotation is str else data

    def _annotated(self, kind: Any, more: Any, data: Any, where: str) -> Any:
        if not isinstance(more, Within):
            return more(data, where)
        number = self.value(kind, data, where)
        check(more.least <= number <= more.most, where, f"from {more.least} to {more.most}", data)
        return number

    def _record(self, cls: Any, data: Any, where: str) -> Any:
        check(type(data) is dict, where, "an object", data)
        fields = {_name_of(field): field for field in dataclasses.fields(cls)}
        unknown = [name for name in data if name not in fields]
        if unknown:
            path = _path(where, str(unknown[0]))
            raise DamagedDataError(f"it has a field {path!r} that this version of nbguard does not know")
        missing = [name for name, field in fields.items() if name not in data and _is_required(field)]
        if missing:
            raise DamagedDataError(f"its field {_path(where, missing[0])!r} is missing")
        hints = _hints(cls)
        named = [(fields[name].name, item, _path(where, name)) for name, item in data.items() if fields[name].init]
        return cls(**{name: self.value(hints[name], item, path) for name, item, path in named})

    def _row(self, arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
        """Return a tuple: of dataclasses from a table, of other values from a list."""
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            cls = arguments[0]
            if dataclasses.is_dataclass(cls) and type(data) is dict:
                return self._table(cls, data, where)
            check(type(data) is list, where, "a list", data)
            return tuple(self.value(cls, item, f"{where}[{place}]") for place, item in enumerate(data))
        check(type(data) is list and len(data) == len(arguments), where, f"a list of {len(arguments)}", data)
        return tuple(self.value(kind, data[place], f"{where}[{place}]") for place, kind in enumerate(arguments))

    def _table(self, cls: Any, data: dict[str, Any], where: str) -> tuple[Any, ...]:
        check(data.keys() == {COLUMNS, ROWS}, where, "a table", data)
        columns, rows = data[COLUMNS], data[ROWS]
        check(type(columns) is list and all(type(name) is str for name in columns), where, "a table", columns)
        check(type(rows) is list, where, "a table", rows)
        records = []
        for place, row in enumerate(rows):
            check(type(row) is list and len(row) == len(columns), f"{where}[{place}]", f"a row of {len(columns)}", row)
            records.append(self._record(cls, dict(zip(columns, row, strict=True)), f"{where}[{place}]"))
        return tuple(records)

    def _one_of(self, kinds: tuple[Any, ...], data: Any, where: str) -> Any:
        """Return a value of one of several types: None, or a dataclass that has just these fields, or the only other type."""
        if data is None and type(None) in kinds:
            return None
        others = [kind for kind in kinds if kind is not type(None)]
        if len(others) > 1 and type(data) is dict:
            others = [kind for kind in others if set(map(_name_of, dataclasses.fields(kind))) == data.keys()] or others
        return self.value(others[0], data, where)


def check(is_right: bool, where: str, expected: str, data: Any) -> None:
    """Raise DamagedDataError unless a field is right; the message says what it should be."""
    if not is_right:
        shown = "nothing" if data is None else f"a value of type {type(data).__name__}"
        shown = shown if type(data) is not int else "another number"
        raise DamagedDataError(f"its field {where or 'at the top'!r} should be {expected}, and is {shown}")


def _number(data: Any, where: str) -> float:
    if data in ("nan", "inf", "-inf"):
        return float(data)
    check(type(data) in (int, float), where, "a number", data)
    check(type(data) is float or -_LARGEST <= data < _LARGEST, where, "a number of at most 63 bits", data)
    return float(data)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _path(where: str, name: str) -> str:
    return f"{where}.{name[:_NAME]}" if where else name[:_NAME]
