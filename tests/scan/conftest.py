"""What several tests of scans have in common."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import pytest


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module that is no file of the user's."""
    gc.collect()
    module = types.ModuleType("library_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    vars(module).clear()
