"""A cleanup scans once where weak references and counters agree with its promise, and else once more."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import nbguard
from nbguard.memory.cleanup.apply import apply
from nbguard.memory.scan.devices.counters import heap_reader
from nbguard.memory.scan.scan import Notebook
from nbguard.units import MiB

pytestmark = [
    pytest.mark.usefixtures("frozen_libraries"),
    pytest.mark.skipif(heap_reader() is None, reason="nothing counts the tensors of the CPU here"),
]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """The second scans of cleanups."""
    made: list[None] = []

    def counted(notebook: Notebook) -> Any:
        made.append(None)
        return timed_scan(notebook)

    timed_scan = apply.timed_scan
    monkeypatch.setattr(apply, "timed_scan", counted)
    return made


def _left(outcome: nbguard.Outcome) -> dict[str, int]:
    return {holder.label: holder.nbytes for holder in outcome.left}


class _Cycle:
    """An object that only the collector frees."""

    def __init__(self, nbytes: int) -> None:
        self.me, self.tensor = self, torch.ones(nbytes // 4)


def test_a_name_and_garbage_go_and_the_rest_is_known(scans: list[None]) -> None:
    shared = torch.ones(MiB)
    names: dict[str, Any] = {"x": [torch.ones(2 * MiB), shared], "y": {"shared": shared}, "z": torch.ones(8)}
    del shared
    outcome = nbguard.release("x", namespace=names)
    assert (outcome.realised, outcome.extra, list(names)) == (8 * MiB, 0, ["y", "z"])
    assert not scans
    assert _left(outcome) == {"y": 4 * MiB, "z": 32}
    assert outcome.left[0].advice.command == "%reset_gpu y"
    gc.disable()
    try:
        _Cycle(MiB)
        outcome = nbguard.release(namespace=names)
    finally:
        gc.enable()
    assert outcome.realised == MiB
    assert not scans
    assert _left(outcome) == {"y": 4 * MiB, "z": 32}


class _Leaving:
    """An object that leaves a tensor behind when it goes, where only a scan can find it."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place, self.tensor = place, torch.ones(2 * MiB)

    def __del__(self) -> None:
        self.place["left"] = torch.ones(MiB)


def test_a_tensor_that_comes_meanwhile_is_found(scans: list[None]) -> None:
    names: dict[str, Any] = {"y": torch.ones(8)}
    names["x"] = _Leaving(names)
    outcome = nbguard.release("x", namespace=names)
    assert outcome.realised == 8 * MiB
    assert len(scans) == 1
    assert _left(outcome) == {"left": 4 * MiB, "y": 32}


class _Fails:
    """An object whose attributes cannot be deleted."""

    def __delattr__(self, name: str) -> None:
        raise ValueError("it stays")


def test_a_step_that_fails_is_followed_by_a_scan(scans: list[None]) -> None:
    owner = _Fails()
    owner.part = torch.ones(MiB)  # type: ignore[attr-defined]
    outcome = nbguard.release("owner.part", namespace={"owner": owner})
    assert outcome.undone
    assert len(scans) == 1
    assert "owner" in _left(outcome)


def test_words_that_a_step_may_change_are_read_anew(scans: list[None]) -> None:
    names = {"runs": [torch.ones(MiB), torch.ones(MiB), torch.ones(MiB)]}
    outcome = nbguard.release("runs[0]", namespace=names)
    assert {holder.label: holder.what for holder in outcome.left}["runs"] == "list of 2"
    assert len(scans) == 1
