"""Fits in this process: one thread, so that a busy machine slows them and does not stall them; nothing stays compiled.

Tests of the pure analysis import no PyTorch (`make unit`): for them there is nothing to set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from nbguard.memory.scan.parked import has_compiled
from tests.frozen import freeze_more, frozen_in_package  # noqa: F401 - each profile goes over the heap when it begins


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _nothing_of_earlier_tests(frozen_in_package: None) -> None:  # noqa: F811
    freeze_more()


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """A recording of allocations steps aside where code is compiled: that is of one test, not of those after it."""
    yield
    if has_compiled():
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True)
def _no_earlier_runs() -> None:
    """What a fit of another test took with other workers speaks of that test's fit."""
    profile = sys.modules.get("nbguard.training.profiler.profile")
    if profile is not None:
        profile.forget()
