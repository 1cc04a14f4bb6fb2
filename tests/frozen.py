"""The half a million objects of libraries, out of sight: looks go over the whole heap, and take a quarter of the time so."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.thorough import THOROUGH

_freeze = gc.freeze  # where a package's tests hide them it is replaced


def freeze_more() -> None:
    """Hide also what has come since they were hidden: tests import more of them, and leave objects of their own."""
    if gc.freeze is not _freeze:
        gc.collect()
        _freeze()


@contextlib.contextmanager
def frozen_libraries() -> Iterator[Callable[[], None]]:
    """Hide what there is from the collector's list of objects meanwhile; not in a thorough run. Gives what shows it again.

    For tests whose tensors are held by objects of their own. nbguard thaws what is frozen: this it does not find.
    """
    unfreeze = gc.unfreeze
    if THOROUGH:
        yield unfreeze
        return
    with contextlib.suppress(ModuleNotFoundError):  # `make unit` has no PyTorch
        import torch._dynamo  # noqa: F401 - the first optimizer would import it

    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        gc.freeze()
        count = gc.get_freeze_count
        before: list[int] = []  # what was frozen when the test or nbguard froze more, until it thaws

        def freeze() -> None:
            before[:] = before or [count()]
            _freeze()

        patch.setattr(gc, "freeze", freeze)
        patch.setattr(gc, "unfreeze", before.clear)
        patch.setattr(gc, "get_freeze_count", lambda: max(count() - before[0], 0) if before else 0)
        yield unfreeze
    unfreeze()


@pytest.fixture(autouse=True, scope="package")
def frozen_in_package() -> Iterator[None]:
    """Hide them from all tests of the package whose conftest imports this: what was collected with them is in no look then."""
    if "torch" not in sys.modules:
        yield
        return
    with frozen_libraries():
        yield


@pytest.fixture
def frozen_kernels(request: pytest.FixtureRequest) -> bool:
    """Hide them in the kernels and programs of the package whose conftest imports this, but for tests marked `whole_heap`."""
    return not THOROUGH and request.node.get_closest_marker("whole_heap") is None
