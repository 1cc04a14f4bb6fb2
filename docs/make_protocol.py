"""Generator of `labextension/src/view/protocol.ts`: the messages' types, and a check for each, from the Python classes.

`python docs/make_protocol.py FILE` writes it (`make protocol`), with `--check` it compares (`make lint`).
Comments of classes and fields go along.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from nbguard.frontend.sidebar.protocol import messages, state

_HEAD = """\
/**
 * The messages between a kernel and its sidebars. Sizes are bytes, times seconds since the epoch.
 *
 * Made from nbguard/frontend/sidebar/protocol (state, answers, messages) by `make protocol`: change that. docs/protocol.md says
 * which message is sent when. Beside each type that a kernel sends stands its check: a value that fails it is dropped.
 */

import {{ boolean, list, nullable, number, object, oneOf, text, tuple, variants, type Check }} from './check';

export const PROTOCOL = {version};
"""
_ALIASES = ("ActionName", "Ability", "PieceKind", "Now", "DevicePart")
_SCALARS: dict[Any, tuple[str, str]] = {
    int: ("number", "number"),
    float: ("number", "number"),
    str: ("string", "text"),
    bool: ("boolean", "boolean"),
}
_WIDTH = 120


def protocol_ts() -> str:
    """Return the text of protocol.ts."""
    parts = [_HEAD.format(version=state.PROTOCOL)]
    parts += [_alias(name) for name in _ALIASES]
    parts += [_shape(shape) for shape in _shapes()]
    parts += [
        _union("Answer", "The hub's answer to a request. `rid` is the request's.", messages.ANSWERS, has_check=True),
        _union("Broadcast", "A message of the hub to every view that looks.", messages.BROADCASTS, has_check=False),
        _union("Request", "A view's message. `rid` is chosen by it and comes back in every answer.", messages.REQUESTS),
    ]
    return "\n".join(parts)


def _shapes() -> Iterator[type]:
    """Yield the classes that fields consist of, each after those that its own fields need."""
    yield from dict.fromkeys(
        shape
        for message in (*messages.ANSWERS.values(), *messages.BROADCASTS.values())
        for hint in _hints(message).values()
        for shape in _needed(hint)
    )


def _needed(hint: Any) -> Iterator[type]:
    if _is_shape(hint):
        for inner in _hints(hint).values():
            yield from _needed(inner)
        yield hint
    for part in typing.get_args(hint):
        yield from _needed(part)


def _is_shape(hint: Any) -> bool:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or _is_named_tuple(hint))


def _is_named_tuple(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _hints(shape: type) -> dict[str, Any]:
    return typing.get_type_hints(shape, {**vars(state), **vars(sys.modules[shape.__module__])})


def _alias(name: str) -> str:
    hint = getattr(state, name)
    doc = inspect.getdoc(hint) if isinstance(hint, type) else _docs_of_constants(state)[name]
    values = _values(hint)
    check = f"oneOf({', '.join(map(_quoted, values))})"
    return f"{_doc(doc or '')}export type {name} = {' | '.join(map(_quoted, values))};\n\n{_check(name, check)}"


def _shape(shape: type) -> str:
    hints, notes = _hints(shape), _comments(shape)
    doc = _doc(inspect.getdoc(shape) or "")
    if _is_named_tuple(shape):
        items = ", ".join(f"{name}: {_type(hint)}" for name, hint in hints.items())
        doc = _doc(" ".join([_ended(inspect.getdoc(shape) or ""), *_notes(notes)]))
        return f"{doc}export type {shape.__name__} = [{items}];\n\n" + _check(
            shape.__name__, f"tuple({', '.join(map(_check_of, hints.values()))})"
        )
    fields = "".join(f"{_doc(_sentence(notes.get(name, '')), 2)}  {name}: {_type(hint)};\n" for name, hint in hints.items())
    checks = ",\n".join(f"  {name}: {_check_of(hint)}" for name, hint in hints.items())
    interface = f"{doc}export interface {shape.__name__} {{\n{fields}}}\n"
    return f"{interface}\n" + _check(shape.__name__, f"object({{\n{checks}\n}})")


def _notes(notes: Mapping[str, str]) -> Iterator[str]:
    yield from (f"`{name}`: {_ended(note)}" for name, note in notes.items())


def _sentence(note: str) -> str:
    return _ended(note[0].upper() + note[1:]) if note else ""


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "…")) else f"{sentence}."


def _union(name: str, doc: str, kinds: Mapping[str, type], *, has_check: bool | None = None) -> str:
    """Return messages as a union of objects that their `op` tells apart. `has_check` None: requests, which Python checks."""
    members = []
    for op, kind in kinds.items():
        optional = () if has_check is not None else _optional(kind)
        fields = "".join(
            f"; {field}{'?' if field in optional else ''}: {_type(_without_none(hint) if field in optional else hint)}"
            for field, hint in _hints(kind).items()
        )
        members.append(_doc(" ".join([inspect.getdoc(kind) or "", *_notes(_comments(kind))]), 2))
        members.append(f"  | {{ op: '{op}'{fields} }}\n")
    text = f"{_doc(doc)}export type {name} =\n{''.join(members).rstrip()};\n"
    if not has_check:
        return text
    checks = ",\n".join(
        f"  {op}: object({{ {', '.join(f'{field}: {_check_of(hint)}' for field, hint in _hints(kind).items())} }})"
        for op, kind in kinds.items()
    )
    return f"{text}\n" + _check(name, f"variants({{\n{checks}\n}})")


def _optional(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING)


def _without_none(hint: Any) -> Any:
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    return parts[0] if isinstance(hint, types.UnionType) and len(parts) == 1 else hint


def _type(hint: Any) -> str:
    """Return a Python type as TypeScript writes it."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "null"
    if hint in _SCALARS:
        return _SCALARS[hint][0]
    if _is_shape(hint):
        return str(hint.__name__)
    if alias := _alias_of(hint):
        return alias
    if values := _values(hint):
        return " | ".join(map(_quoted, values))
    if origin is tuple and parts[1:] == (...,):
        item = _type(parts[0])
        return f"({item})[]" if "|" in item else f"{item}[]"
    if origin is tuple:
        return f"[{', '.join(map(_type, parts))}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type, parts))
    raise TypeError(f"{hint} has no form in TypeScript")


def _check_of(hint: Any) -> str:
    """Return the expression that checks a value of a type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint][1]
    if _is_shape(hint):
        return f"is{hint.__name__}"
    if alias := _alias_of(hint):
        return f"is{alias}"
    if values := _values(hint):
        return f"oneOf({', '.join(map(_quoted, values))})"
    if origin is tuple and parts[1:] == (...,):
        return f"list({_check_of(parts[0])})"
    if origin is tuple:
        return f"tuple({', '.join(map(_check_of, parts))})"
    if origin in (typing.Union, types.UnionType) and len(parts) == 2 and type(None) in parts:
        return f"nullable({_check_of(_without_none(hint))})"
    raise TypeError(f"{hint} has no check")


def _alias_of(hint: Any) -> str:
    return next((name for name in _ALIASES if hint == getattr(state, name)), "")


def _values(hint: Any) -> tuple[str, ...]:
    """Return the texts that a type admits: of a `Literal`, or of an enum of texts."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(member.value for member in hint)
    return ()


def _check(name: str, expression: str) -> str:
    return f"export const is{name}: Check<{name}> = {expression};\n"


def _quoted(value: str) -> str:
    return f"'{value}'"


def _doc(text: str, indent: int = 0) -> str:
    """Return a comment of TypeScript, wrapped; empty for no text."""
    if not text:
        return ""
    blank = " " * indent
    words, lines = text.replace("*/", "* /").split(), [""]
    for word in words:
        if lines[-1] and len(blank) + len(lines[-1]) + len(word) > _WIDTH - len("/**  */"):
            lines.append("")
        lines[-1] += f" {word}"
    if len(lines) == 1:
        return f"{blank}/**{lines[0]} */\n"
    return f"{blank}/**\n" + "".join(f"{blank} *{line}\n" for line in lines) + f"{blank} */\n"


def _comments(shape: type) -> dict[str, str]:
    """Return the comment at the end of each field's line."""
    lines = inspect.getsource(shape).splitlines()
    body = ast.parse("\n".join(lines)).body[0]
    fields = (node for node in ast.walk(body) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    ends = {node.target.id: lines[(node.end_lineno or 0) - 1] for node in fields if isinstance(node.target, ast.Name)}
    return {name: line.partition("  # ")[2] for name, line in ends.items() if "  # " in line}


def _docs_of_constants(module: types.ModuleType) -> dict[str, str]:
    """Return the texts that stand below the constants of a module, by the constants' names."""
    body = ast.parse(inspect.getsource(module)).body
    return {
        node.targets[0].id: below.value.value
        for node, below in pairwise(body)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def main(words: list[str]) -> int:
    """Write the file that `words` name; with `--check`, return 1 if it is another than would be written."""
    file = Path(words[-1])
    if words[0] == "--check":
        return int(file.read_text(encoding="utf-8") != protocol_ts())
    file.write_text(protocol_ts(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
