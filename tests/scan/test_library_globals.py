"""Globals of libraries that hold memory: the line that is printed on one runs, and promises no more than it frees."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.memory.scan.outside import referrers

pytestmark = pytest.mark.usefixtures("frozen_libraries")

_BYTES = 4 * 1000 * 1000


def _cache(module: str) -> Any:
    def device_of(model: nn.Module) -> torch.device:
        return next(model.parameters()).device

    device_of.__module__, device_of.__qualname__ = module, "device_of"
    return functools.cache(device_of)


def _used(*caches: Any) -> weakref.ref[nn.Module]:
    """Call functions with a model of which nothing else is left."""
    model = nn.Linear(1000, 1000, bias=False)
    for cache in caches:
        cache(model)
    return weakref.ref(model)


def _rows() -> list[Any]:
    gc.collect()
    return [row for row in nbguard.report({}).devices[0].holders if row.retained >= _BYTES]


def _follow_all() -> None:
    for finding in nbguard.report({}).findings:
        if finding.advice.frees:
            exec(finding.advice.in_python.command, {"nbguard": nbguard})
            gc.collect()


@pytest.fixture
def quant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A function that makes a module of a library."""

    def make(name: str, **attributes: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
        made.append(module)
        return module

    made: list[types.ModuleType] = []
    make("quant")
    yield make
    for each in made:
        vars(each).clear()


def test_a_cache_has_the_name_of_the_module_that_defines_its_function(quant: Callable[..., Any]) -> None:
    """Modules that import it come before it in `sys.modules`, and in the alphabet."""
    quant("quant.utils", device_of=_cache("quant.utils"))
    quant("quant.convert", device_of=sys.modules["quant.utils"].device_of)
    gone = _used(sys.modules["quant.utils"].device_of)

    assert [row.label for row in _rows()] == ["quant.utils.device_of"]
    _follow_all()
    assert gone() is None


def test_the_line_runs_where_a_function_hides_its_module(quant: Callable[..., Any]) -> None:
    """`from .convert import convert` in a package, as `torch.ao.quantization.fx` has it."""
    quant("quant.convert", device_of=_cache("quant.convert"))
    vars(sys.modules["quant"])["convert"] = _cache
    gone = _used(sys.modules["quant.convert"].device_of)

    assert [row.label for row in _rows()] == ["sys.modules['quant.convert'].device_of"]
    _follow_all()
    assert gone() is None


def test_an_object_that_leads_to_a_named_one_is_no_holder_of_its_own(quant: Callable[..., Any]) -> None:
    """A partial of the cache: what the cache lets go of, the partial has no more."""
    quant("quant.utils", device_of=_cache("quant.utils"))
    quant("quant.convert", convert=functools.partial(sys.modules["quant.utils"].device_of))
    gone = _used(sys.modules["quant.utils"].device_of)

    assert [row.label for row in _rows()] == ["quant.utils.device_of"]
    _follow_all()
    assert gone() is None


@pytest.mark.parametrize("known", ["Store", "_STORE"], ids=["by its class", "by its name"])
def test_a_registry_that_its_library_can_empty_is_emptied_by_that(
    known: str, quant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pyro.clear_param_store()`: a line that deletes attributes of the store would break it."""

    class Store:
        def __init__(self) -> None:
            self._params: dict[str, Any] = {}

    Store.__module__, Store.__qualname__ = "quant.store", "Store"
    store, gone = Store(), weakref.ref(model := nn.Linear(1000, 1000, bias=False))
    store._params["net"] = model
    quant("quant.store", _STORE=store, clear=lambda store=store: store._params.clear())
    monkeypatch.setattr(referrers, "emptied_by", lambda: {("quant.store", known): "import quant.store; quant.store.clear()"})
    del model, store

    assert [(row.label, row.retained) for row in _rows()] == [("quant.store._STORE", _BYTES)]
    lines = [(finding.command, finding.advice.frees) for finding in nbguard.report({}).findings if finding.command]
    assert lines == [("import quant.store; quant.store.clear()", _BYTES)]
    _follow_all()
    assert gone() is None


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_two_globals_that_have_the_same_model_are_both_named(quant: Callable[..., Any], depth: int) -> None:
    """Emptying one alone frees nothing, however far from its module the other has it."""
    other = _cache("quant.convert")
    quant("quant.utils", device_of=_cache("quant.utils"))
    gone = _used(sys.modules["quant.utils"].device_of, other)
    for _ in range(depth):
        other = {"by name": other}
    quant("quant.convert", device_of=other)
    del other

    lines = {(finding.command, finding.advice.frees) for finding in nbguard.report({}).findings if finding.command}
    assert [frees for _, frees in lines] == [_BYTES]
    _follow_all()
    assert gone() is None


def test_a_global_has_modules_with_classes_of_their_own(quant: Callable[..., Any]) -> None:
    """As a cache of transformers' has a codec; the class keeps its module by a property."""
    net = nn.utils.parametrizations.weight_norm(nn.Conv1d(100, 1000, 3, bias=False))
    quant("quant.utils", models={"codec": net})
    gone = weakref.ref(net)
    del net

    assert [row.label for row in nbguard.report({}).devices[0].holders] == ["quant.utils.models"]
    _follow_all()
    assert gone() is None
