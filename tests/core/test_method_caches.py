"""A model whose methods have caches, each of which keeps it: one line lets it go, with all of its bytes."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn

import nbguard

pytestmark = pytest.mark.usefixtures("frozen_libraries")

_BYTES = 4_000_000


def _model_class() -> type:
    """Return a new class whose caches no other test has filled."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(_BYTES // 4))

        @functools.lru_cache(4)  # noqa: B019 - the leak
        def sines(self, n: int) -> torch.Tensor:
            return torch.ones(n)

        @functools.lru_cache(4)  # noqa: B019
        def cosines(self, n: int) -> torch.Tensor:
            return torch.ones(n)

    return Rotary


def _used(model: Any, n: int = 1000) -> None:
    model.sines(n)
    model.cosines(n)


def _allocated(names: dict[str, Any]) -> int:
    gc.collect()
    return nbguard.report(names).devices[0].allocated


def test_one_line_empties_both_caches() -> None:
    names: dict[str, Any] = {"Rotary": _model_class()}
    _used(names["Rotary"]())
    before = _allocated(names)
    (finding,) = (each for each in nbguard.report(names).findings if each.kind == "handle")

    assert set(finding.command.split("; ")) == {"Rotary.sines.cache_clear()", "Rotary.cosines.cache_clear()"}
    assert finding.advice.frees == _BYTES + 2 * 4000
    exec(finding.command, names)

    assert before - _allocated(names) == finding.advice.frees
    assert names["Rotary"]().sines(3).shape == (3,)


def test_a_cache_that_frees_all_by_itself_is_emptied_alone() -> None:
    names: dict[str, Any] = {"Rotary": _model_class(), "kept": torch.ones(1000)}
    names["Rotary"]().sines(1000)
    (finding,) = (each for each in nbguard.report(names).findings if each.kind == "handle")

    assert finding.command == "Rotary.sines.cache_clear()"
    assert finding.advice.frees == _BYTES + 4000


def test_the_promise_for_a_library_s_class_is_of_all_its_caches() -> None:
    """As in Diffusers' `QwenEmbedRope`, whose class no name of the user's has."""
    cls: Any = _model_class()
    cls.__module__ = "diffusers.models.toy"
    _used(cls())
    before = _allocated({})
    (finding,) = (each for each in nbguard.report({}).findings if "Rotary" in each.sentence)

    assert finding.command == "%reset_gpu --caches"
    assert finding.advice.frees == _BYTES + 2 * 4000
    exec(finding.advice.call, {"nbguard": nbguard})

    assert before - _allocated({}) == finding.advice.frees
    assert cls().sines(3).shape == (3,)
