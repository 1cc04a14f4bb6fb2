"""A mistake of nbguard's, or an object that cannot be read, at every place on the fit's path: the fit ends as without us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from fastai.basics import Callback, Learner

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.fit_report import FitAnalysis
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.checks import CHECKS
from nbguard.training.profiler.options import FitOptions
from nbguard.training.profiler.profile import FitProfile
from nbguard.training.profiler.record.learner_loop import LearnerLoop
from nbguard.training.profiler.record.recorder import Event, Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop
from tests.profiler.loops import learner, quiet_fit, train
from tests.profiler.recording import seed
from tests.thorough import half_in_ci

FITS: dict[str, Callable[[], Any]] = {
    "fastai": lambda: quiet_fit(learner(), 1).model,
    "loop": lambda: train(1, each=lambda loss: loss.item()),
}
Subscription = tuple[str, str]
"""The class of a part, and the event that it subscribes to."""


def weights(model: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain(fit: str) -> list[Any]:
    seed()
    return weights(FITS[fit]())


def with_profile(fit: str) -> tuple[list[Any], FitReport]:
    seed()
    with profile_fit(show=False) as profile:
        trained = weights(FITS[fit]())
    return trained, profile.report


def assert_same(trained: list[Any], expected: list[Any]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(trained, expected, strict=True))


@pytest.fixture(scope="module")
def subscriptions() -> dict[str, list[Subscription]]:
    """Return who subscribes to which events in each fit."""
    with pytest.MonkeyPatch.context() as patch:
        subscribe = Recorder.subscribe
        seen: dict[Subscription, None] = {}

        def noted(self: Recorder, event: Event, act: Callable[..., None], *, every_batch: bool = False) -> None:
            seen[type(getattr(act, "__self__", act)).__name__, event] = None
            subscribe(self, event, act, every_batch=every_batch)

        patch.setattr(Recorder, "subscribe", noted)
        by_fit = {}
        for fit in FITS:
            seen.clear()
            with_profile(fit)
            by_fit[fit] = list(seen)
    return by_fit


@pytest.mark.slow
@pytest.mark.parametrize("fit", FITS)
def test_an_instrument_that_fails_at_any_event_costs_the_fit_nothing(
    fit: str, subscriptions: dict[str, list[Subscription]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(fit)
    subscribe = Recorder.subscribe
    silent = []
    tried = half_in_ci(subscriptions[fit])
    for name, event in tried:
        failures: list[str] = []
        recorders: list[Recorder] = []  # that of the fit first; another one only rehearses

        def fails(_part: Any, *_: Any, name: str = name, failures: list[str] = failures) -> None:
            failures.append(name)
            raise ZeroDivisionError("planted")

        def planted(
            self: Recorder,
            at: Event,
            act: Callable[..., None],
            *,
            every_batch: bool = False,
            name: str = name,
            event: str = event,
            fails: Callable[..., None] = fails,
            recorders: list[Recorder] = recorders,
        ) -> None:
            part = getattr(act, "__self__", act)
            recorders.append(self)
            if (type(part).__name__, at) == (name, event) and self is recorders[0]:
                act = MethodType(fails, part)
            subscribe(self, at, act, every_batch=every_batch)

        monkeypatch.setattr(Recorder, "subscribe", planted)
        trained, report = with_profile(fit)

        assert_same(trained, expected)
        assert report.ending == "complete"
        assert len(failures) <= 1, (name, event)  # it is called no more
        notes = [note for note in report.notes if "planted" in note]
        assert len(notes) == len(failures), (name, event)
        assert all(f"{name} failed at {event!r}" in note and "not seen from batch" in note for note in notes), notes
        if not failures:
            silent.append((name, event))
    assert len(silent) < len(tried) / 3, silent  # most were really called


@pytest.mark.parametrize("fit", FITS)
def test_all_instruments_together_may_fail(fit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(fit)
    subscribe = Recorder.subscribe

    def planted(self: Recorder, event: Event, act: Callable[..., None], *, every_batch: bool = False) -> None:
        def fails(_part: Any, *_: Any) -> None:
            raise ZeroDivisionError("planted")

        subscribe(self, event, MethodType(fails, getattr(act, "__self__", act)), every_batch=every_batch)

    monkeypatch.setattr(Recorder, "subscribe", planted)
    trained, report = with_profile(fit)

    assert_same(trained, expected)
    assert sum(row.total for row in report.timing.rows) == report.timing.wall
    assert len([note for note in report.notes if "planted" in note]) >= 8


READS = [
    (LearnerLoop, "_calls_model"),
    (LearnerLoop, "_has_loss"),
    (LearnerLoop, "_steps"),
    (LearnerLoop, "_has_stepped"),
    (LearnerLoop, "_has_gradients"),
    (LearnerLoop, "_begin"),
    (LearnerLoop, "_end"),
    (TorchLoop, "_number_of"),
]


@pytest.mark.parametrize(("owner", "read"), READS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("fit", FITS)
def test_a_read_of_a_patched_function_that_fails_costs_the_fit_nothing(
    fit: str, owner: type, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(fit)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(owner, read, fails)
    trained, report = with_profile(fit)

    assert_same(trained, expected)
    assert report.ending == "complete"
    assert len([note for note in report.notes if "planted" in note]) == (fit == "fastai" or owner is TorchLoop)


class Guarded(Learner):  # type: ignore[misc]
    """A Learner whose attribute `hidden` cannot be read by others than fastai."""

    hidden = ""

    def __getattribute__(self, name: str) -> Any:
        if name == type(self).hidden:
            import sys

            if "nbguard" in sys._getframe(1).f_globals.get("__name__", ""):
                raise RuntimeError("planted: it is private")
        return super().__getattribute__(name)


@pytest.mark.parametrize("name", ["model", "xb", "yb", "loss_grad", "opt", "training", "cbs", "arch"])
def test_a_learner_whose_attributes_cannot_be_read_trains_as_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit() -> Any:
        learn = learner()
        learn.__class__ = Guarded
        return quiet_fit(learn, 1).model

    seed()
    expected = weights(fit())
    monkeypatch.setattr(Guarded, "hidden", name)
    seed()
    with profile_fit(show=False) as profile:
        trained = weights(fit())

    assert_same(trained, expected)
    assert profile.report.ending == "complete"


def test_a_callback_whose_class_cannot_be_patched_runs_as_without() -> None:
    class Sealed(type(Callback)):  # type: ignore[misc]
        def __setattr__(cls, name: str, value: Any) -> None:
            raise AttributeError("planted: sealed")

    class Counts(Callback, metaclass=Sealed):  # type: ignore[misc]
        seen = 0

        def after_batch(self) -> None:
            self.__dict__["seen"] += 1

        def __init__(self) -> None:
            self.__dict__["seen"] = 0

    counts = Counts()
    seed()
    with profile_fit(show=False) as profile:
        quiet_fit(learner(counts), 1)

    assert counts.__dict__["seen"] == 12
    assert profile.report.ending == "complete"
    assert [note for note in profile.report.notes if "times of callbacks not seen" in note]


AFTER_THE_FIT = [
    "nbguard.training.profiler.record.recorder.Recorder.stop",
    "nbguard.training.profiler.record.log.Log.end",
    "nbguard.training.profiler.instruments.instruments.usable_cores",
    "nbguard.training.profiler.record.learner_loop.LearnerLoop.observe",
    "nbguard.training.profiler.analysis.time.phase_log.PhaseLog.divided",
    "nbguard.training.profiler.analysis.fit_report.divide",
    "nbguard.training.profiler.analysis.fit_report.timing_of",
    "nbguard.training.profiler.analysis.fit_report.first_steps",
    "nbguard.training.profiler.analysis.fit_report.memory_report",
    "nbguard.training.profiler.profile.ending_of",
    "nbguard.training.profiler.profile.kept_graphs",
    "nbguard.training.profiler.profile.least_kept",
    "nbguard.training.profiler.profile._tune",
    "nbguard.training.profiler.profile.keep",
    "nbguard.training.profiler.instruments.rank_watch.RankWatch.exchange",
    "nbguard.training.profiler.instruments.rank_watch.RankWatch.stop",
    "nbguard.training.profiler.profile.write_json",
    "nbguard.training.profiler.profile.Outputs.write",
    *(
        f"nbguard.training.profiler.{place}.{action}"
        for place in (
            "instruments.instruments.Subject",
            "instruments.loader_watch.LoaderWatch",
            "instruments.instruments.GpuWatch",
            "instruments.timeline.MemoryWatch",
            "instruments.stack_sampler.OverheadWatch",
            "nonfinite.nonfinite.FiniteWatch",
        )
        for action in ("stop", "observe")
    ),
    *(f"{check.__module__}.{check.__name__}.{action}" for check in CHECKS for action in ("stop", "observe")),
    *(f"{check.__module__}.{check.__name__}.diagnose" for check in CHECKS),
]


@pytest.mark.parametrize("place", AFTER_THE_FIT)
def test_a_mistake_after_the_fit_costs_a_part_of_the_report(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = vars(torch.nn.Module)["__call__"], torch.autograd.backward, vars(Learner)["_call_one"]
    failures = []

    def fails(*_: Any, **__: Any) -> Any:
        failures.append(place)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(FitAnalysis, "may_keep_graphs", True)
    profile = FitProfile(FitOptions(json=str(tmp_path / "report.json"), tune_workers=place.endswith("_tune")))
    profile.start()
    quiet_fit(learner(), 1)
    train(1)
    with monkeypatch.context() as patch:
        patch.setattr(place, fails)
        report = profile.finish(KeyError("mine"))

    assert failures
    assert not FitProfile.is_any_running()
    assert report is profile.report
    assert report.error == "KeyError"
    is_silent = place.endswith("usable_cores")
    said = [note for note in report.notes if "planted" in note]
    assert bool(said) is not is_silent, report.notes
    assert (vars(torch.nn.Module)["__call__"], torch.autograd.backward, vars(Learner)["_call_one"]) == before


def test_a_model_may_be_called_with_a_list_that_holds_itself() -> None:
    class Takes(torch.nn.Linear):
        def forward(self, rows: list[Any]) -> Any:
            return super().forward(rows[0])

    def fit() -> Any:
        torch.manual_seed(1)
        model = Takes(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 4)), batch_size=4):
            rows = [x]
            rows.append(rows)
            model(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    expected = weights(fit())
    with profile_fit(show=False) as profile:
        trained = weights(fit())

    assert_same(trained, expected)
    assert profile.report.timing.batches == 4
