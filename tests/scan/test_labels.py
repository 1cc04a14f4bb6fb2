"""Paths are true: one that is written in Python leads, when Python follows it, to the very object."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest
import torch

import nbguard
from nbguard.memory.scan.heap import compact

pytestmark = pytest.mark.usefixtures("frozen_libraries")


class Thing:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class OwnDict(dict):  # type: ignore[type-arg]
    """A dict that has attributes besides."""


class Hidden:
    """An attribute behind a property of the same name."""

    def __init__(self, t: Any) -> None:
        self.__dict__["t"] = t

    @property
    def t(self) -> None:
        """Return something else."""


class Base:
    """A slot that a subclass hides."""

    __slots__ = ("t",)


class Slots(Base):
    __slots__ = ("t", "u")


def _own_dict(t: torch.Tensor) -> OwnDict:
    found = OwnDict(t="no")
    found.t = t  # type: ignore[attr-defined]
    found.__dict__["more"] = 1
    return found


def _hidden_slot(t: torch.Tensor) -> Slots:
    found = Slots()
    found.t = 1
    Base.t.__set__(found, t)  # type: ignore[attr-defined]
    return found


def _modules(t: torch.Tensor, cls: type, name: str) -> Any:
    module = cls()
    inner = torch.nn.Identity()
    inner.weight = torch.nn.Parameter(t)
    module.add_module(name, inner)
    return module


def _function(t: torch.Tensor | None = None, of_script: torch.Tensor | None = None, **defaults: Any) -> types.FunctionType:
    """Return a function with an attribute, one of a script of its own, or one with a default."""
    space: dict[str, Any] = {} if of_script is None else {"t": of_script}
    code = compile("def f(*, t=None): ...", "script.py", "exec")
    exec(code, space)
    made: types.FunctionType = space["f"]
    if t is not None:
        made.t = t  # type: ignore[attr-defined]
    if defaults:
        made.__kwdefaults__ = defaults
    return made


_MAKE = {
    "attribute": lambda t: Thing(t=t),
    "two attributes": lambda t: Thing(a=t, b=t),
    "attribute and element": lambda t: Thing(a=[0, t], b=t),
    "attribute that is no name": lambda t: Thing(**{"my t": t}),
    "attribute that is a number": lambda t: Thing(**{"0": t}),
    "attribute that is a keyword": lambda t: Thing(**{"class": t}),
    "attribute behind a property": Hidden,
    "attribute of a dict": _own_dict,
    "hidden slot": _hidden_slot,
    "element": lambda t: [0, [t], t],
    "twice": lambda t: (t, t),
    "negative key": lambda t: {-1: t, 1: 0},
    "text that looks like a number": lambda t: {"1": t, 1: 0},
    "bytes": lambda t: {b"a": t},
    "quotes": lambda t: {'it\'s "so"': t},
    "line break": lambda t: {"a\nb": t},
    "tuple key": lambda t: {("a", 1, None): t},
    "one-element tuple key": lambda t: {(1,): t},
    "true": lambda t: {True: t},
    "float key": lambda t: {0.1: t},
    "not a number": lambda t: {float("nan"): t},
    "infinite": lambda t: {float("-inf"): t},
    "long key": lambda t: {"k" * 100: t, "k" * 99: 0},
    "long tuple key": lambda t: {tuple(range(100)): t},
    "namespace": lambda t: types.SimpleNamespace(t=t),
    "OrderedDict": lambda t: collections.OrderedDict(t=t),
    "Sequential": lambda t: _modules(t, torch.nn.Sequential, "0"),
    "named in a Sequential": lambda t: _modules(t, torch.nn.Sequential, "head"),
    "ModuleList": lambda t: torch.nn.ModuleList([_modules(t, torch.nn.Module, "a")]),
    "ModuleDict": lambda t: _modules(t, torch.nn.ModuleDict, "a"),
    "number in a ModuleDict": lambda t: _modules(t, torch.nn.ModuleDict, "0"),
    "number in a module": lambda t: _modules(t, torch.nn.Module, "0"),
    "no name in a ModuleDict": lambda t: _modules(t, torch.nn.ModuleDict, "my layer"),
    "ParameterList": lambda t: torch.nn.ParameterList([torch.nn.Parameter(t)]),
    "ParameterDict": lambda t: torch.nn.ParameterDict({"a": torch.nn.Parameter(t)}),
    "attribute of a function": _function,
    "global of a function's script": lambda t: _function(of_script=t),
    "keyword's default": lambda t: _function(**{"t ": t}),
    "class": lambda t: type("Made", (), {"t": t, "__module__": __name__}),
}


@pytest.mark.parametrize("kind", _MAKE)
def test_a_path_leads_to_the_object(kind: str) -> None:
    """Or it is not written as Python: an arrow, an ellipsis or a type in angle brackets says so."""
    names: dict[str, Any] = {"it": _MAKE[kind](torch.ones(1000)), "nan": None}
    names["mine"] = next(obj for obj in _tensors(names["it"]) if obj.numel() == 1000)

    paths = [path for path in nbguard.why("mine", names).paths if path.text.startswith("it")]

    assert paths
    assert_true(paths, names)


@pytest.mark.parametrize("kind", _MAKE)
def test_a_path_whose_steps_are_not_all_written_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where very many objects lead to memory: only those on a shortest path are asked for their attributes."""
    monkeypatch.setattr(compact, "_LABEL_ALL", 0)
    names: dict[str, Any] = {"it": _MAKE[kind](torch.ones(1000)), "nan": None}
    names["mine"] = next(obj for obj in _tensors(names["it"]) if obj.numel() == 1000)

    assert_true([path for path in nbguard.why("mine", names).paths if path.text.startswith("it")], names)


def assert_true(paths: list[Any], names: dict[str, Any]) -> None:
    for path in paths:
        assert "… → …" not in path.text
        if not any(mark in path.text for mark in (" → ", "…", "<")):
            assert eval(path.text, {}, names) is names["mine"], path.text


def _tensors(obj: Any) -> list[torch.Tensor]:
    import gc

    found: list[torch.Tensor] = []
    seen: set[int] = set()
    todo = [obj]
    while todo:
        each = todo.pop()
        if id(each) not in seen and not isinstance(each, types.ModuleType):
            seen.add(id(each))
            if isinstance(each, torch.Tensor):
                found.append(each)
            if type(each).__module__ in (__name__, "builtins", "types", "collections") or isinstance(each, torch.nn.Module):
                todo += [part for part in gc.get_referents(each) if not isinstance(part, (type, types.FunctionType))]
    return found
