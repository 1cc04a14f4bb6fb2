"""pytest plugin of CI: all tests but those of `make unit`, which CI runs besides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit_tests import WHOLE, is_unit, may_be_unit


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of `make unit`."""
    of_unit = {item for item in items if _is_unit(item)}
    config.hook.pytest_deselected(items=[*of_unit])
    items[:] = [item for item in items if item not in of_unit]


def _is_unit(item: pytest.Item) -> bool:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return folder not in WHOLE and may_be_unit(item.path) is True and is_unit(item)
