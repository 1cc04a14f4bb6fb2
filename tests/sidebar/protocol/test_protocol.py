"""What Python sends and what TypeScript expects have the same fields, of the same kinds."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from nbguard.memory.breakdown import Part
from nbguard.sidebar.protocol import messages, state

PROTOCOL = Path(__file__).parents[3] / "labextension" / "src" / "view" / "protocol.ts"
SHAPES: dict[str, Any] = {
    name: found for name, found in vars(state).items() if dataclasses.is_dataclass(found) and found.__module__ == state.__name__
} | {"Part": Part}
_KINDS = {int: "number", float: "number", str: "string", bool: "boolean", type(None): "null"}
_NAMES = {"Ability": "string", "ActionName": "string", "PieceKind": "string"}


def interfaces() -> dict[str, dict[str, str]]:
    """Return the interfaces of protocol.ts: by name, the type of each field as written."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", PROTOCOL.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"export interface (\w+) \{(.*?)\n\}", text, flags=re.DOTALL)
    return {name: dict(re.findall(r"^\s*(\w+)\??: ([^;]+);", body, flags=re.MULTILINE)) for name, body in found}


def in_typescript(hint: Any) -> str:
    """Return a Python type as TypeScript writes it, literal texts as `string`."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in _KINDS:
        return _KINDS[hint]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint.__name__
    if origin is typing.Literal:
        return "string"
    if origin is tuple:
        if parts[1:] == (...,):
            return f"{in_typescript(parts[0])}[]"
        return f"[{', '.join(map(in_typescript, parts))}]"
    return " | ".join(in_typescript(part) for part in parts)  # a union


def to_builtins(written: str) -> str:
    """Return a type of protocol.ts with names of literals, and literals themselves, as `string`."""
    text = re.sub(r"'\w+'(\s*\|\s*'\w+')*", "string", written)
    return re.sub(r"\w+", lambda word: _NAMES.get(word[0], word[0]), text)


@pytest.mark.parametrize("name", SHAPES)
def test_a_message_has_the_same_fields_on_both_sides(name: str) -> None:
    hints = typing.get_type_hints(SHAPES[name])

    assert {field: to_builtins(written) for field, written in interfaces()[name].items()} == {
        field: in_typescript(hint) for field, hint in hints.items()
    }


def test_every_interface_is_known() -> None:
    """But those of the view's own house: what hosts it, and what it is hosted by."""
    assert set(interfaces()) - {"Model", "Host"} == set(SHAPES)


def test_the_same_version_actions_and_requests() -> None:
    text = PROTOCOL.read_text(encoding="utf-8")
    actions = re.search(r"type ActionName = ([^;]+);", text)
    assert actions is not None
    assert set(re.findall(r"'(\w+)'", actions[1])) == set(typing.get_args(state.ActionName))
    assert f"PROTOCOL = {state.PROTOCOL};" in text
    requests = text.partition("export type Request =")[2].partition(";\n\n")[0]
    fields = {
        op: set(re.findall(r"(\w+)\??:", body)) - {"op"} for op, body in re.findall(r"\{ op: '(\w+)';?([^}]*)\}", requests)
    }
    shapes = {"hello": messages.Hello, "bye": messages.Bye, "refresh": messages.Refresh, "why": messages.Ask}
    shapes |= {"plan": messages.PlanRequest, "apply": messages.Apply, "cancel": messages.Cancel}
    assert fields == {op: {field.name for field in dataclasses.fields(shape)} for op, shape in shapes.items()}
