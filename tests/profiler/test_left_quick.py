"""While a fit is watched, the objects it goes through keep their attributes beside themselves: reading them stays quick."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
from fastai.basics import Callback

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.instruments import growth_watch as growth
from tests.profiler.loops import learner, quiet_fit, torch_loader, train

pytestmark = pytest.mark.skipif(
    not (3, 11) <= sys.version_info < (3, 13), reason="only these make the dict of attributes when it is asked for"
)


def has_dict(obj: Any, attribute: str) -> bool:
    """Say whether somebody has asked for an object's dict. It is asked for its referents, which makes none."""
    return any(type(each) is dict and attribute in each for each in gc.get_referents(obj))


@pytest.fixture(autouse=True)
def no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's memory may grow by chance; the look for its holder asks for the attributes of all that leads to it."""
    monkeypatch.setattr(growth, "growth_per_batch", lambda _: None)


def test_a_learners_loader_optimizer_and_callbacks() -> None:
    found: list[bool] = []

    class Sees(Callback):
        def after_train(self) -> None:
            learn = self.learn
            found.extend((has_dict(learn.dls.train, "bs"), has_dict(learn.opt, "param_lists"), has_dict(learn.recorder, "lrs")))

    with profile_fit(show=False):
        quiet_fit(learner(Sees()))

    assert found == [False] * 6


def test_the_loader_of_a_plain_loop() -> None:
    found: list[bool] = []
    loader = torch_loader()

    with profile_fit(show=False):
        train(1, loader=loader, each=lambda _: found.append(has_dict(loader, "batch_size")))

    assert found
    assert not any(found)
