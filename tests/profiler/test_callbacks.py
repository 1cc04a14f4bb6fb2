"""Callbacks are timed by name whenever they come to a Learner, and their classes are as they were afterwards."""

from __future__ import annotations

import time
from typing import Any

import torch
from fastai.basics import Callback

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.profile import FitProfile
from tests.profiler.loops import learner, quiet_fit

TAKES = 0.004


class Base(Callback):
    """Takes a while before each batch."""

    def before_batch(self) -> None:
        time.sleep(TAKES)


class Derived(Base):
    """Takes as long once more, after what it has inherited."""

    def before_batch(self) -> None:
        super().before_batch()
        time.sleep(TAKES)


class Inherits(Base):
    """Takes what it has inherited."""


class Late(Callback):
    """Adds another callback when training begins."""

    def before_train(self) -> None:
        if not hasattr(self.learn, "inherits"):
            self.learn.add_cb(Inherits())


def seconds(act: Any, *args: Any) -> dict[str, float]:
    """Return the seconds of each of the callbacks above in a profile."""
    with profile_fit(show=False) as profile:
        act(*args)
    named: dict[str, float] = {}
    for row in profile.report.timing.rows:
        name = row.callback
        if name in ("Base", "Derived", "Inherits"):
            named[name] = named.get(name, 0) + row.total / 1e9
    return named


def test_each_class_has_what_it_takes_also_what_it_inherits() -> None:
    methods = [Base.before_batch, Derived.before_batch]

    took = seconds(quiet_fit, learner(Base(), Derived(), Inherits()), 1)  # 8 batches, 4 of validation

    assert set(took) == {"Base", "Derived", "Inherits"}
    assert min(took.values()) >= 12 * TAKES
    assert took["Derived"] >= 24 * TAKES
    assert [Base.before_batch, Derived.before_batch] == methods
    assert "before_batch" not in vars(Inherits)


def test_a_callback_that_comes_during_the_fit() -> None:
    assert seconds(quiet_fit, learner(Late()), 1)["Inherits"] >= 12 * TAKES


def test_a_callback_of_a_prediction() -> None:
    learn = learner(Base())

    def predict() -> None:
        with learn.no_logging():
            learn.get_preds()

    assert seconds(predict)["Base"] >= 4 * TAKES


def test_modules_are_left_alone_in_a_learners_fit_and_marked_after_it() -> None:
    seen: list[bool] = []

    class Asks(Callback):
        def after_batch(self) -> None:
            seen.append(torch.nn.Module.__call__ is found)

    found = torch.nn.Module.__call__
    with profile_fit(show=False):
        quiet_fit(learner(Asks()), 1)
        assert torch.nn.Module.__call__ is not found
    assert seen == [True] * 12
    assert torch.nn.Module.__call__ is found
    assert not FitProfile.is_any_running()
