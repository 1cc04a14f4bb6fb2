"""Ctrl-C in the midst of a profile's own work: its parts all go, the user's loop ends, and the next profile begins."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import optimizer

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.instruments import stack_sampler
from nbguard.training.profiler.profile import FitProfile
from nbguard.training.profiler.record.torch_loop import Rehearsal, TorchLoop
from tests.profiler.loops import train

CALL = torch.nn.Module.__dict__["__call__"]


@pytest.fixture(autouse=True)
def _everything_goes_back() -> Any:
    """A profile that was interrupted leaves no hook, no thread and no lock behind: one that follows sees its whole fit."""
    yield
    assert torch.nn.Module.__dict__["__call__"] is CALL
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks
    assert "nbguard stacks" not in {thread.name for thread in threading.enumerate()}
    assert not FitProfile.is_any_running()
    with profile_fit(show=False) as profile:
        train()
    assert profile.report.timing.batches == 16
    assert not [note for note in profile.report.notes if "report it" in note]


def interrupts(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int = 1) -> None:
    """Let Ctrl-C come once, at a call of a function."""
    original, calls = getattr(owner, name), 0

    def interrupted(*args: Any, **kw: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kw)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("name", ["start", "stop", "observe"])
def test_whichever_part_is_interrupted_all_are_taken_down(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts(monkeypatch, stack_sampler.StackSampler, name)

    with pytest.raises(KeyboardInterrupt), profile_fit(show=False):
        train()


def test_an_interrupt_where_another_fit_begins_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruments of the fit before it go with the last ones."""
    interrupts(monkeypatch, stack_sampler.StackSampler, "stop")

    def twice() -> None:
        train()
        train()

    with pytest.raises(KeyboardInterrupt), profile_fit(show=False) as profile:
        twice()

    assert not profile.report.notes


def test_an_interrupt_while_the_profiles_cost_is_measured_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = TorchLoop.rehearsal
    left = iter(range(20))

    def cut_off(self: TorchLoop) -> Rehearsal:
        batch = rehearsal(self)

        def loss(value: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return batch.loss(value)

        monkeypatch.setattr(TorchLoop, "rehearsal", rehearsal)
        return replace(batch, loss=loss)

    monkeypatch.setattr(TorchLoop, "rehearsal", cut_off)

    with pytest.raises(KeyboardInterrupt), profile_fit(show=False) as profile:
        train()

    assert not [note for note in profile.report.notes if "report it" in note]
