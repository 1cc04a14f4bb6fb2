"""pytest plugin of `make unit`: the tests that need neither PyTorch nor a kernel, in a process that cannot import PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit_tests import BLOCKED, is_unit, may_be_unit


class Blocker:
    """A finder of modules that refuses the blocked packages, as an environment without them would."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}: `make unit` runs without it", name=name)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if may_be_unit(collection_path) is False else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of other processes and slow ones."""
    config.hook.pytest_deselected(items=[item for item in items if not is_unit(item)])
    items[:] = filter(is_unit, items)


if "torch" in sys.modules:
    raise pytest.UsageError("PyTorch was imported before tests.without_torch could keep it out")
sys.meta_path.insert(0, Blocker())  # type: ignore[arg-type]
