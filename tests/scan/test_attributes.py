"""Attributes are read without running anybody's code, and leave the object as quick as it was."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from nbguard.memory.scan.heap.kinds import attribute_of, plain_attributes

pytestmark = pytest.mark.usefixtures("frozen_libraries")


class Thing:
    default = "of the class"

    def __init__(self) -> None:
        self.x = 1
        self.__dict__["answered"] = 2

    @property
    def answered(self) -> int:
        raise AssertionError("the user's code ran")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("the user's code ran")


class Slotted:
    __slots__ = ("x",)


def test_an_attribute_is_what_the_instance_itself_has() -> None:
    thing = Thing()
    assert attribute_of(thing, "x") == 1
    assert attribute_of(thing, "answered") == 2  # hidden by the property, and there
    assert attribute_of(thing, "default") is None
    assert attribute_of(thing, "missing") is None
    assert attribute_of(Slotted(), "x") is None
    assert attribute_of(None, "x") is None


def test_several_attributes_are_what_each_of_them_is() -> None:
    names = ("x", "answered", "default", "missing")
    thing = Thing()
    assert {name: found for name, found in plain_attributes(thing, names).items() if found is not None} == {
        "x": 1,
        "answered": 2,
    }
    assert plain_attributes(Slotted(), names) == {"x": None}
    assert plain_attributes(None, names) == {}


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 13), reason="only these keep attributes beside the object")
def test_the_object_gets_no_dict_by_being_read() -> None:
    class Plain:
        def __init__(self) -> None:
            self.x = []

    plain = Plain()
    assert attribute_of(plain, "x") is plain.x
    assert attribute_of(plain, "missing") is None
    assert not any(type(each) is dict for each in gc.get_referents(plain))
