"""Leaks that libraries are known for, made by the installed version, named with their reports, and freed by the line."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest
from torch import nn

import nbguard
from nbguard.libraries import KnownLeak, known_leaks
from nbguard.memory.core.finding import Finding
from nbguard.memory.scan import libraries

pytestmark = pytest.mark.usefixtures("frozen_libraries")

CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "XcodecPreTrainedModel": ("_get_conv1d_layers", (None,)),
    "OmDetTurboDecoder": ("generate_anchors", (((2, 2),),)),
}
"""The method that leaks, by its class, and arguments for it."""

_LEAKS = [leak for leaks in known_leaks().values() for leak in leaks if libraries._is_installed(leak)]


def _findings(label: str) -> list[Finding]:
    return [each for each in nbguard.report({}).findings if each.sentence.startswith(f"{label} ")]


@pytest.mark.parametrize("leak", _LEAKS, ids=lambda leak: leak.holder.rpartition(".")[2])
def test_an_installed_version_leaks_is_named_and_freed(leak: KnownLeak) -> None:
    module, _, name = leak.holder.rpartition(".")
    cls: Any = getattr(importlib.import_module(module), name)
    method, given = CALLS[name]
    model = cls.__new__(cls)
    nn.Module.__init__(model)
    model.own = nn.Linear(4000, 4000)
    getattr(cls, method)(model, *((model,) if given == (None,) else given))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is not None, "the installed version no longer leaks: give the entry an end"

    (finding,) = _findings(leak.holder)
    assert finding.sentence.endswith(leak.words)
    before = nbguard.report({}).devices[0].allocated
    exec(finding.advice.command, {})
    assert gone() is None
    assert before - nbguard.report({}).devices[0].allocated >= 4000 * 4001 * 4


@pytest.mark.parametrize(("installed", "is_known"), [("1.3.0", True), ("1.4.0", False)])
def test_the_version_decides(installed: str, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "version", lambda _: installed)

    known = libraries.known_leaks_of(["learn", "accelerate.state.GradientState"])

    assert [label for label, _ in known] == ["accelerate.state.GradientState"] * is_known
