"""pytest plugin of `make unit`: the tests that need neither PyTorch nor a kernel, in processes that cannot import PyTorch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.blocked import sitecustomize
from tests.unit_tests import BLOCKED, is_unit, may_be_unit


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if may_be_unit(collection_path) is False else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of other processes and slow ones."""
    config.hook.pytest_deselected(items=[item for item in items if not is_unit(item)])
    items[:] = filter(is_unit, items)


if "torch" in sys.modules:
    raise pytest.UsageError("PyTorch was imported before tests.without_torch could keep it out")
sys.meta_path.insert(0, sitecustomize.Blocker([*BLOCKED]))  # type: ignore[arg-type]
_folders = (str(Path(sitecustomize.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")]))
os.environ |= {sitecustomize.BLOCKED: ",".join(sorted(BLOCKED)), "PYTHONPATH": os.pathsep.join(_folders)}
