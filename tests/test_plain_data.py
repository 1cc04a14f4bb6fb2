"""Dataclasses as plain data: what goes over the wire and into files, and comes back as it was."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from json import JSONDecodeError
from typing import Any, NamedTuple

import pytest

from nbguard.errors import DamagedDataError
from nbguard.plain_data import DEEPEST, fields_of, from_plain, is_nested, read_json, take_apart, to_plain
from tests.sidebar.protocol.scenes import scene


class _Pair(NamedTuple):
    name: str
    bytes: int


@dataclass(frozen=True)
class _Part:
    label: str
    bytes: float = 0.0


@dataclass(frozen=True)
class _Whole:
    parts: tuple[_Part, ...] = ()
    by_name: dict[str, _Part] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    pair: _Pair = field(default_factory=lambda: _Pair("x", 1))
    secret: str = field(default="s", metadata={"json": False})
    own: str = field(default="o", metadata={"json": "renamed"})
    packed: bytes = field(default=b"ab", metadata={"plain": bytes.hex})


@dataclass(frozen=True)
class _Holder:
    wholes: tuple[_Whole, ...]


@dataclass(frozen=True)
class _Nothing:
    pass


@pytest.mark.parametrize("name", ["training", "oom", "parked"])
def test_a_message_of_the_sidebar_is_what_asdict_makes_of_it(name: str) -> None:
    for message in scene(name):
        assert to_plain(message) == json.loads(json.dumps(asdict(message)))


def test_a_dataclass_without_fields_is_an_empty_object() -> None:
    assert to_plain(_Nothing()) == to_plain(_Nothing(), tables=True) == {}


def test_each_container_is_json_and_metadata_decide_on_fields() -> None:
    whole = _Whole((_Part("a", math.nan),), {"b": _Part("b", -math.inf)}, frozenset("yx"))

    plain = to_plain(whole)

    assert plain == {
        "parts": [{"label": "a", "bytes": "nan"}],
        "by_name": {"b": {"label": "b", "bytes": "-inf"}},
        "kinds": ["x", "y"],
        "pair": ["x", 1],
        "renamed": "o",
        "packed": "6162",
    }
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


@pytest.mark.parametrize("tables", [False, True])
def test_what_was_written_is_read(tables: bool) -> None:
    parts = (_Part("a", 1.5), _Part("b", math.inf))

    plain = to_plain(parts, tables=tables)

    assert from_plain(tuple[_Part, ...], json.loads(json.dumps(plain))) == parts
    assert plain == (
        {"columns": ["label", "bytes"], "rows": [["a", 1.5], ["b", "inf"]]}
        if tables
        else [asdict(parts[0]), {"label": "b", "bytes": "inf"}]
    )


@pytest.mark.parametrize("value", [object(), _Part], ids=["object", "class"])
def test_json_gets_no_objects(value: Any) -> None:
    with pytest.raises(TypeError):
        fields_of(value) if not isinstance(value, type) else json.dumps(to_plain(value))


def test_a_table_is_written_by_the_same_rules() -> None:
    table = to_plain(_Holder((_Whole(),)), tables=True)["wholes"]

    assert table["columns"] == ["parts", "by_name", "kinds", "pair", "renamed", "packed"]
    assert table["rows"] == [[[], {}, [], ["x", 1], "o", "6162"]]


def test_json_is_read_as_deep_as_the_bound() -> None:
    """Brackets in strings are none, and those of lists and objects count alike."""
    nests = ("[", "]", 1), ('{"a": [', "]}", 2), ('["]", ', "]", 1), (r'["\"]", ', "]", 1), (r'["\\", ', "]", 1)
    for opened, closed, each in nests:
        text = opened * (DEEPEST // each) + "1" + closed * (DEEPEST // each)
        for data in (text, text.encode(), b"\xef\xbb\xbf" + text.encode()):
            assert read_json(data) == json.loads(text)
        for data in (f"[{text}]", f"[{text}]".encode(), b"[" * (DEEPEST + 1)):
            with pytest.raises(DamagedDataError, match=f"it is nested more than {DEEPEST} deep"):
                read_json(data)
    assert read_json(json.dumps(wide := [[["[" * 999, {}]] * 999])) == wide
    for damaged in ("]" * 999 + "[", "[" * DEEPEST, '"' + '\\"' * 99_999, b"\xff", ""):
        with pytest.raises((JSONDecodeError, UnicodeDecodeError)):
            read_json(damaged)


def test_values_are_taken_apart_whatever_refers_to_what() -> None:
    """Also where the outermost tuples come last, and around cycles."""
    chain: list[Any] = [()]
    for _ in range(20_000):
        chain.append((chain[-1], {"in": [chain[-1]]}))
    assert is_nested(chain)
    assert not is_nested([[1, "a", {"b": (2,)}]])
    inner = chain[-1][1]["in"]
    inner.append(inner)

    take_apart(chain)

    assert (chain, inner) == ([], [])
