"""The half a million objects of libraries, out of sight: looks go over the whole heap, and take a quarter of the time so."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest

from tests.thorough import THOROUGH


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
        patch.setattr(gc, "unfreeze", lambda: None)
        patch.setattr(gc, "get_freeze_count", lambda: 0)
        yield unfreeze
    unfreeze()
