"""Messages from a browser: what is right is read, anything else does nothing and raises nothing."""

from __future__ import annotations

import json
import random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.frontend.sidebar.protocol.messages import (
    Apply,
    Ask,
    BadRequest,
    Bye,
    Cancel,
    Hello,
    LintRequest,
    Message,
    PlanRequest,
    PredictRequest,
    Refresh,
    parse,
)
from nbguard.frontend.sidebar.protocol.state import ActionName

RIGHT: list[tuple[dict[str, Any], Message]] = [
    ({"op": "hello", "client": "a-1", "visible": True}, Hello(client="a-1", visible=True)),
    (
        {"op": "hello", "client": "a-1", "visible": False, "boot": "b1", "heap": 3},
        Hello(client="a-1", visible=False, boot="b1", heap=3),
    ),
    ({"op": "bye", "client": "a_1"}, Bye("a_1")),
    ({"op": "refresh", "rid": "r1"}, Refresh("r1")),
    ({"op": "lint", "rid": "r1", "cells": ["", "x = 1"]}, LintRequest("r1", ("", "x = 1"))),
    ({"op": "why", "rid": "r1", "heap": 7, "id": 0}, Ask("r1", 7, 0)),
    ({"op": "predict", "rid": "r1", "heap": 7, "id": 0}, PredictRequest("r1", 7, 0)),
    ({"op": "plan", "rid": "r1", "action": "clean_stale"}, PlanRequest(rid="r1", action="clean_stale")),
    (
        {"op": "plan", "rid": "r1", "action": "release", "heap": 7, "ids": [1, 2], "names": ["x"], "keep": ["Out[9]"]},
        PlanRequest(rid="r1", action="release", heap=7, ids=(1, 2), names=("x",), keep=("Out[9]",)),
    ),
    ({"op": "apply", "rid": "r1", "token": "t"}, Apply("r1", "t")),
    ({"op": "cancel", "rid": "r1", "unknown": 5}, Cancel("r1")),
]


@pytest.mark.parametrize(("message", "found"), RIGHT, ids=lambda each: each.get("op") if isinstance(each, dict) else "")
def test_what_is_right_is_read(message: dict[str, Any], found: Message) -> None:
    assert parse(message) == found
    assert parse(json.loads(json.dumps(message))) == found


@pytest.mark.parametrize("cells", [None, "x = 1", [1], ["x" * 100_001], ["x"] * 2001])
def test_cells_that_are_none_are_refused(cells: object) -> None:
    assert isinstance(parse({"op": "lint", "rid": "r", "cells": cells}), BadRequest)


@pytest.mark.parametrize("action", get_args(ActionName))
def test_every_action_is_known(action: str) -> None:
    assert parse({"op": "plan", "rid": "r", "action": action}) == PlanRequest(rid="r", action=action)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"action": "eval"}, "no such action"),
        ({"action": ["clean_stale"]}, "no such action"),
        ({"action": None}, "no such action"),
        ({"ids": [True], "heap": 1}, "ids must be a number"),
        ({"ids": [-1], "heap": 1}, "ids must be a number"),
        ({"ids": [1.0], "heap": 1}, "ids must be a number"),
        ({"ids": [2**60], "heap": 1}, "ids must be a number"),
        ({"ids": [1]}, "heap must be a number"),
        ({"ids": [0] * 201, "heap": 1}, "a list of at most 200"),
        ({"ids": "12", "heap": 1}, "a list of at most 200"),
        ({"ids": {"0": 1}, "heap": 1}, "a list of at most 200"),
        ({"heap": "7"}, "heap must be a number"),
        ({"keep": ["x" * 301]}, "at most 300"),
        ({"keep": [""]}, "at most 300"),
        ({"names": [["x"]]}, "at most 300"),
        ({"names": None}, "a list of at most 200"),
    ],
)
def test_what_is_wrong_is_refused_in_words(change: dict[str, Any], why: str) -> None:
    found = parse({"op": "plan", "rid": "r1", "action": "release", **change})

    assert isinstance(found, BadRequest)
    assert found.rid == "r1"
    assert why in found.why


@pytest.mark.parametrize("op", ["exec", "", "ack", "__class__", "done"])
def test_an_unknown_request_is_refused_or_dropped(op: str) -> None:
    assert parse({"op": op, "rid": "r1"}) == BadRequest("r1", "there is no such request")
    assert parse({"op": op}) is None


@pytest.mark.parametrize("rid", ["", "a b", "r" * 65, "ä", "r\n", 5, None, ["r"], {"a": 1}])
def test_who_cannot_be_answered_is_not(rid: object) -> None:
    assert parse({"op": "apply", "rid": rid, "token": "t"}) is None
    assert parse({"op": "apply", "token": "t"}) is None


@pytest.mark.parametrize("message", [None, 5, "hello", [], [{"op": "bye"}], {}, {"op": 5}, {"op": ["hello"]}, {1: 2}, b"{}"])
def test_what_is_no_message_is_dropped(message: object) -> None:
    assert parse(message) is None


ATOMS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70) | st.sampled_from(["r1", "hello", "plan"])
)
VALUES = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)
FIELDS = ["op", "rid", "client", "visible", "heap", "id", "ids", "names", "keep", "action", "token", "__proto__"]
OPS = st.sampled_from([message["op"] for message, _ in RIGHT])


@given(
    VALUES
    | st.dictionaries(st.sampled_from(FIELDS), VALUES)
    | st.fixed_dictionaries({"op": OPS}, optional=dict.fromkeys(FIELDS[1:], VALUES))
)
def test_whatever_comes_nothing_is_raised(message: object) -> None:
    _assert_harmless(parse(message))


def test_a_thousand_garbled_messages() -> None:
    """Right messages with a field dropped, replaced, doubled or cut in the middle of their JSON."""
    dice = random.Random(7)
    junk: list[Any] = [None, True, -1, 1e308, float("nan"), "x" * 1000, "\ud800", [], [[]], {}, {"op": "apply"}, "';--", 2**80]
    kinds = set()
    for _ in range(1000):
        message: Any = json.loads(json.dumps(dice.choice(RIGHT)[0]))
        for _ in range(dice.randrange(1, 4)):
            name = dice.choice([*message, dice.choice(FIELDS)])
            message[name] = dice.choice([*junk, [dice.choice(junk)] * dice.choice([1, 300])])
            if dice.random() < 0.3:
                message.pop(dice.choice(list(message)))
        found = parse(message)
        _assert_harmless(found)
        kinds.add(type(found))
    assert {type(None), BadRequest} < kinds, "some are dropped, some refused, some happen to be right"


def _assert_harmless(found: Message | None) -> None:
    """Whatever has been read holds nothing but short texts and small numbers, of exactly these types."""
    if found is None:
        return
    most, longest = (2000, 100_000) if type(found) is LintRequest else (200, 300)  # a notebook has more cells than a list rows
    for name in found.__dataclass_fields__:
        value = getattr(found, name)
        values = value if type(value) is tuple else (value,)
        assert len(values) <= most
        for each in values:
            assert type(each) in (str, int, bool, type(None))
            assert type(each) is not str or len(each) <= longest
            assert type(each) is not int or 0 <= each <= 2**53
