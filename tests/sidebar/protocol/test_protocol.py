"""The browser's types are those of Python: protocol.ts is generated, and nothing that a kernel sends is missing from it."""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from nbguard.frontend.sidebar.protocol import messages, state
from nbguard.memory.core.analysis import Part
from nbguard.plain_data import to_plain
from tests.programs import docs_program

maker = docs_program("make_protocol")
PROTOCOL = Path(__file__).parents[3] / "labextension" / "src" / "view" / "protocol.ts"
TEXT = PROTOCOL.read_text(encoding="utf-8")


def test_the_file_in_the_repository_is_what_the_types_say(tmp_path: Path) -> None:
    written = tmp_path / "protocol.ts"

    assert maker.protocol_ts() == TEXT, "make protocol writes it anew"
    assert maker.main([str(written)]) == 0
    assert maker.main(["--check", str(written)]) == 0
    written.write_text(TEXT.replace("boot: string", "boot: number"), encoding="utf-8")
    assert maker.main(["--check", str(written)]) == 1


@pytest.mark.parametrize(
    "shape",
    [
        shape
        for shape in vars(state).values()
        if isinstance(shape, type)
        and shape.__module__ == state.__name__
        and (dataclasses.is_dataclass(shape) or issubclass(shape, tuple))
    ]
    + [Part],
)
def test_every_class_has_a_type_with_its_fields_and_a_check_of_each(shape: type) -> None:
    fields = list(typing.get_type_hints(shape))
    named = re.search(rf"export type {shape.__name__} = \[(.*)\];", TEXT)
    interface = re.search(rf"export interface {shape.__name__} {{\n(.*?)\n}}", TEXT, flags=re.DOTALL)
    written = named[1] if named else re.sub(r"/\*.*?\*/", "", interface[1] if interface else "", flags=re.DOTALL)
    check = re.search(rf"export const is{shape.__name__}: Check<{shape.__name__}> = (.*?);\n", TEXT, flags=re.DOTALL)

    assert re.findall(r"(\w+): ", written) == fields
    assert check is not None
    assert named or re.findall(r"^  (\w+): ", check[1], flags=re.MULTILINE) == fields


def test_the_same_version_and_words() -> None:
    assert f"PROTOCOL = {state.PROTOCOL};" in TEXT
    for name in ("ActionName", "Ability", "PieceKind", "Now"):
        values = typing.get_args(getattr(state, name))
        written = re.search(rf"type {name} = ([^;]+);", TEXT)
        check = re.search(rf"is{name}: Check<{name}> = oneOf\(([^)]+)\);", TEXT)
        assert written is not None
        assert check is not None
        assert tuple(re.findall(r"'(\w+)'", written[1])) == tuple(re.findall(r"'(\w+)'", check[1])) == values


def test_the_parts_of_a_device_are_those_of_python() -> None:
    written = re.search(r"type DevicePart = ([^;]+);", TEXT)

    assert written is not None
    assert tuple(re.findall(r"'([^']+)'", written[1])) == tuple(part.value for part in state.DevicePart)


@pytest.mark.parametrize(
    ("union", "kinds"), [("Request", messages.REQUESTS), ("Answer", messages.ANSWERS), ("Broadcast", messages.BROADCASTS)]
)
def test_every_message_has_its_op_and_fields(union: str, kinds: dict[str, Any]) -> None:
    written = re.sub(r"/\*.*?\*/", "", TEXT.partition(f"export type {union} =")[2].partition(";\n\n")[0], flags=re.DOTALL)
    members = dict(re.findall(r"\{ op: '(\w+)';?([^}]*)\}", written))

    assert {op: re.findall(r"(\w+)\??:", body) for op, body in members.items()} == {
        op: list(typing.get_type_hints(kind, vars(state))) for op, kind in kinds.items()
    }


def test_every_request_is_one_that_is_read_and_every_kind_has_an_op() -> None:
    assert set(messages.REQUESTS) == set(messages._READERS)
    assert set(messages.REQUESTS.values()) == set(typing.get_args(messages.Request))
    assert set(messages.ANSWERS.values()) == set(typing.get_args(messages.Answer))
    assert set(messages.BROADCASTS.values()) == set(typing.get_args(messages.Broadcast))


class _Word(Enum):
    A = "a"
    B = "b"


@pytest.mark.parametrize(
    ("hint", "written", "check"),
    [
        (int, "number", "number"),
        (float | None, "number | null", "nullable(number)"),
        (tuple[str, ...], "string[]", "list(text)"),
        (tuple[int | None, ...], "(number | null)[]", "list(nullable(number))"),
        (tuple[float, int], "[number, number]", "tuple(number, number)"),
        (tuple[tuple[bool, str], ...], "[boolean, string][]", "list(tuple(boolean, text))"),
        (typing.Literal["x", "y"], "'x' | 'y'", "oneOf('x', 'y')"),
        (_Word, "'a' | 'b'", "oneOf('a', 'b')"),
        (state.ActionName, "ActionName", "isActionName"),
        (state.Tick | None, "Tick | null", "nullable(isTick)"),
        (tuple[state.KeptPath, ...], "KeptPath[]", "list(isKeptPath)"),
    ],
)
def test_a_type_in_typescript(hint: Any, written: str, check: str) -> None:
    assert (maker._type(hint), maker._check_of(hint)) == (written, check)


@pytest.mark.parametrize("hint", [dict[str, int], bytes, Any])
def test_a_type_without_a_form_is_refused(hint: Any) -> None:
    with pytest.raises(TypeError, match="has no form in TypeScript"):
        maker._type(hint)


def test_comments_go_along() -> None:
    assert maker._comments(state.Piece) == {}
    assert maker._comments(state.FixRow)["nbytes"] == "it gives back"
    assert "/** It gives back. */\n  nbytes: number | null;" in TEXT
    assert "`stale`: Clean stale\n * would cut it." in TEXT


@dataclass(frozen=True)
class _Holds:
    paths: tuple[state.KeptPath, ...]
    more: state.UnlistedHolders


def test_named_tuples_are_lists_on_the_wire() -> None:
    data = to_plain(_Holds((state.KeptPath("a → b", 3, False, "del a", "frees its memory"),), state.UnlistedHolders(2, 70)))

    assert data == {"paths": [["a → b", 3, False, "del a", "frees its memory"]], "more": [2, 70]}


def test_an_answer_goes_out_with_its_op() -> None:
    assert messages.message_of(messages.Queued("r1", "a cell runs")) == {"op": "queued", "rid": "r1", "why": "a cell runs"}
    assert messages.message_of(messages.Closed()) == {"op": "closed"}
