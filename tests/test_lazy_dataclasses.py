"""Dataclasses with methods that are made late do what those of the standard library do."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, field
from pathlib import Path
from typing import Any

import pytest

import nbguard
from nbguard.lazy_dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A frozen one with each kind of default."""

    needed: int
    given: str = "x"
    made: list[int] = field(default_factory=list)
    hidden: int = field(default=0, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Sum:
    """One with a field that follows from the others."""

    left: int
    right: int = 2
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.left + self.right)


@dataclass
class Changing:
    """One that changes, and has no hash."""

    value: float


@dataclass(eq=False, repr=False, slots=True)
class Itself:
    """One that equals only itself."""

    value: int


@dataclass(frozen=True)
class More(Sum):
    """One that has a field more than its base."""

    more: str = "m"

    def __repr__(self) -> str:
        return "more"


@dataclasses.dataclass(frozen=True, slots=True)
class MoreByOthers(Sum):
    """One of the standard library's, whose base is one of ours."""

    more: str = "m"


CLASSES: tuple[type[Any], ...] = (Figures, Sum, Changing, Itself, More, MoreByOthers)


def _standard(cls: type[Any]) -> type[Any]:
    """Return the class that the standard decorator makes of the same fields."""
    frozen = "__setattr__" in vars(cls)
    fields = [
        (each.name, each.type, field(default=each.default, default_factory=each.default_factory, init=each.init))
        if each.default_factory is dataclasses.MISSING
        else (each.name, each.type, field(default_factory=each.default_factory))
        for each in dataclasses.fields(cls)
    ]
    named = all(each.kw_only for each in dataclasses.fields(cls))
    return dataclasses.make_dataclass(cls.__name__, fields, frozen=frozen, kw_only=named)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_signature_is_that_of_the_standard_library(cls: type[Any]) -> None:
    expected = inspect.signature(_standard(cls)).parameters
    found = inspect.signature(cls).parameters
    assert [(name, each.kind, repr(each.default)) for name, each in found.items()] == [
        (name, each.kind, repr(each.default)) for name, each in expected.items()
    ]
    assert {name: each.annotation for name, each in found.items()} == {name: each.annotation for name, each in expected.items()}


def test_fields_get_their_values_and_defaults_of_their_own() -> None:
    first, second = Figures(needed=1), Figures(needed=1, hidden=3)
    assert (first.given, first.made, second.hidden) == ("x", [], 3)
    assert first.made is not second.made
    assert first == second != Figures(needed=2)
    assert repr(first) == "Figures(needed=1, given='x', made=[])"
    assert dataclasses.replace(first, needed=5).needed == 5
    assert Sum(1).total == 3
    assert More(1, 1, "n") == More(1, 1, "n")
    assert (More(1, 1, "n").total, repr(More(1))) == (2, "more")
    assert More(1) != Sum(1)


def test_what_is_missing_or_unknown_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="needed"):
        Figures()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="other"):
        Sum(1, other=2)  # type: ignore[call-arg]


def test_a_frozen_one_refuses_and_has_a_hash_and_another_changes_and_has_none() -> None:
    with pytest.raises(FrozenInstanceError):
        Sum(1).left = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        MoreByOthers(1).more = "n"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del Sum(1).left
    assert hash(Sum(1)) == hash(Sum(1))
    changing = Changing(1.0)
    changing.value = 2.0
    assert changing == Changing(2.0)
    with pytest.raises(TypeError):
        hash(changing)
    assert Itself(1) != Itself(1)
    assert len({Itself(1), Itself(1)}) == 2


@pytest.mark.parametrize("value", [Sum(1), Figures(needed=1), Changing(1.0), More(1), MoreByOthers(1)])
def test_a_copy_and_a_pickle_are_equal(value: Any) -> None:
    assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value


def test_nothing_is_compiled_before_the_first_instance() -> None:
    @dataclass(frozen=True, slots=True)
    class New:
        value: int

    assert vars(New)["__init__"].__class__.__name__ == "_Init"
    assert New(1).value == 1
    assert inspect.isfunction(vars(New)["__init__"])


def test_every_dataclass_of_nbguard_is_one_of_these() -> None:
    for path in Path(nbguard.__file__).parent.rglob("*.py"):
        if path.name == "lazy_dataclasses.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "dataclasses":
                assert "dataclass" not in [each.name for each in node.names], f"{path}: take nbguard.lazy_dataclasses"
