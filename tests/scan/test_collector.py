"""The collector during a look: what is there stays, what other threads leave meanwhile is freed; afterwards it is as before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from nbguard.memory.scan import pause
from nbguard.memory.scan.pause import keep_garbage
from nbguard.memory.scan.scan import Notebook, scan


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def _cycle() -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle())


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.isenabled(), gc.get_threshold()
    gc.collect()
    yield
    assert (gc.isenabled(), gc.get_threshold()) == before


def _allocate(count: int = 200_000) -> None:
    list(map(list, [()] * count))


def test_what_is_there_stays_and_what_comes_meanwhile_is_collected() -> None:
    gc.collect()  # else a collection may be due while the old ones are made
    old = [_cycle() for _ in range(100)]
    gc_old = _cycle()

    with keep_garbage():
        new = [_cycle() for _ in range(100)]
        _allocate()
        assert all(ref() is not None for ref in [*old, gc_old])
        if pause._HAS_YOUNG_ONLY:
            assert not any(ref() is not None for ref in new)


def test_the_collector_is_as_before_after_a_look_an_error_or_an_interrupt() -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), keep_garbage(), keep_garbage():
            raise error
    gc.disable()
    try:
        with keep_garbage():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_no_callback_of_the_users_runs() -> None:
    ran: list[str] = []

    def callback(phase: str, _: object) -> None:
        ran.append(phase)

    gc.callbacks.append(callback)
    try:
        with keep_garbage():
            old = _cycle()
            _allocate()
            during = list(ran)
            assert old() is not None
    finally:
        gc.callbacks.remove(callback)
    assert during == []


def test_a_look_leaves_nothing_to_the_collector() -> None:
    """What it has met of the user's, such as classes and the globals of modules, would live until that runs."""
    cls = type("Users", (torch.nn.Linear,), {})
    names = {"net": cls(4, 4), "rows": [torch.ones(3) for _ in range(100)]}
    scan(Notebook(shell=None, namespace=names), tensors=True)
    gc.collect()
    gc.disable()
    try:
        scan(Notebook(shell=None, namespace=names), tensors=True)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {f"{type(obj).__module__}.{type(obj).__name__}" for obj in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert not {name for name in left if name.startswith("nbguard")}
    assert not left & {"builtins.method", "builtins.module"}
