"""Fits of one cell: two are two reports, what belongs together is one, and loops that take turns are counted whole."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

import pytest
import torch
from fastai.basics import Callback, nn

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.fit_report import build_fit_report
from nbguard.training.profiler.analysis.memory_growth import MemoryObservations
from nbguard.training.profiler.analysis.observations import FitObservations
from nbguard.training.profiler.analysis.report import FitReport
from tests.profiler.loops import drawn, learner, loaders, model, quiet_fit, torch_loader, train


def counts(report: FitReport) -> list[int]:
    return [each.timing.batches for each in (*report.earlier, report)]


def adds_up(report: FitReport) -> bool:
    return all(sum(row.total for row in each.timing.rows) == each.timing.wall for each in (*report.earlier, report))


def test_two_loops_over_two_models_are_two_reports() -> None:
    with profile_fit(show=False) as profile:
        train(2)
        train(1, loader=torch_loader(count=128))

    report = profile.report
    assert counts(report) == [16, 16]
    assert adds_up(report)
    first, second = (*profile.observations.earlier, profile.observations)
    assert all(isinstance(each.memory, MemoryObservations) and each.memory.stock is not None for each in (first, second))
    assert [each.fetch.fetches for each in first.loaders] == [32]
    assert [each.fetch.fetches for each in second.loaders] == [32]
    assert second.log.start == first.log.times[-1]


def test_two_learners_are_two_reports_each_with_its_callbacks() -> None:
    class One(Callback):  # type: ignore[misc]
        def after_batch(self) -> None:
            sum(range(2000))

    class Other(Callback):  # type: ignore[misc]
        def after_batch(self) -> None:
            sum(range(2000))

    with profile_fit(show=False) as profile:
        quiet_fit(learner(One()), 1)
        quiet_fit(learner(Other()), 2)

    first, second = (*profile.report.earlier, profile.report)
    assert counts(profile.report) == [8, 16]
    assert (first.timing.fits, second.timing.fits) == (1, 1)
    named = [{row.callback for row in each.timing.rows if row.callback in ("One", "Other")} for each in (first, second)]
    assert named == [{"One"}, {"Other"}]
    assert adds_up(profile.report)


def test_a_learner_with_other_loaders_is_another_fit_and_with_the_same_it_is_not() -> None:
    learn = learner()
    with profile_fit(show=False) as profile:
        quiet_fit(learn, 1)
        quiet_fit(learn, 1)
        learn.dls = loaders(count=128)
        quiet_fit(learn, 1)

    assert counts(profile.report) == [16, 16]


def test_a_loop_after_a_learner_and_a_learner_after_a_loop() -> None:
    with profile_fit(show=False) as profile:
        quiet_fit(learner(), 1)
        train(2)
        quiet_fit(learner(), 1)

    assert counts(profile.report) == [8, 16, 8]
    assert [each.title for each in (*profile.report.earlier, profile.report)] == [
        "fastai fit · Sequential",
        "PyTorch loop · Sequential",
        "fastai fit · Sequential",
    ]


def adversaries() -> None:
    """Two models that are trained in turns, batch by batch, over several epochs."""
    made, diagnose = model(1), model(2)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-2) for each in (made, diagnose)]
    for _ in range(2):
        for x, _y in torch_loader():
            for optimizer, trained in zip(optimizers, (made, diagnose), strict=True):
                trained(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def with_evaluation_of_another() -> None:
    """A loop whose evaluation calls a copy of the model."""
    net, other = model(), model(3)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    for _ in range(2):
        for x, _y in torch_loader():
            net(x).mean().backward()
            optimizer.step()
        with torch.no_grad():
            for x, _y in torch_loader():
                other(x)


@pytest.mark.parametrize("fit", [adversaries, with_evaluation_of_another])
def test_what_belongs_together_is_one_report(fit: Any) -> None:
    with profile_fit(show=False) as profile:
        fit()

    assert counts(profile.report) == [16]


def test_loops_that_ask_no_loader_and_train_other_models_are_reports_of_their_own() -> None:
    kept = []
    with profile_fit(show=False) as profile:
        kept.append(train(1, loader=drawn(40)))
        kept.append(train(1, loader=drawn(50)))
        kept.append(train(1))
        kept.append(train(1, loader=drawn(60)))

    assert counts(profile.report) == [40, 50, 8, 60]
    assert adds_up(profile.report)


def test_a_fit_is_not_named_by_the_model_of_the_next() -> None:
    class Other(nn.Sequential):
        pass

    with profile_fit(show=False) as profile:
        train(1)
        net = Other(*model())
        for x, y in torch_loader():
            nn.functional.cross_entropy(net(x), y).backward()

    assert [each.title for each in (*profile.report.earlier, profile.report)] == [
        "PyTorch loop · Sequential",
        "PyTorch loop · Other",
    ]


def test_trials_in_one_loop_are_reports_of_their_own() -> None:
    with profile_fit(show=False) as profile:
        for rate in (1e-2, 1e-3):
            net = model()
            optimizer = torch.optim.AdamW(net.parameters(), rate)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            net(torch.zeros(1, 6))
            for x, y in drawn(40):
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

    assert counts(profile.report) == [40, 40]


def tuned_whole_after_its_head() -> None:
    """A loop that trains a part of its model first."""
    net = model()
    for trained in (net[-1], net):
        optimizer = torch.optim.SGD(trained.parameters(), 1e-2)
        for x, y in drawn(40):
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def judged_by_another() -> None:
    """A loop that begins to ask another model after a time, whose optimizer is new, too."""
    net, diagnose = model(1), model(2)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-2)]
    for number, (x, _y) in enumerate(drawn(80)):
        if number == 40:
            optimizers.append(torch.optim.SGD(diagnose.parameters(), 1e-2))
        (diagnose(net(x)[:, :1].repeat(1, 6)) if number >= 40 else net(x)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def learned_to_learn() -> None:
    """Copies of a model that are trained for some steps each, by optimizers of their own (Reptile)."""
    net = model()
    for _ in range(10):
        inner = copy.deepcopy(net)
        optimizer = torch.optim.SGD(inner.parameters(), 1e-2)
        for x, y in drawn(8):
            nn.functional.cross_entropy(inner(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for kept, found in zip(net.parameters(), inner.parameters(), strict=True):
                kept.lerp_(found, 0.1)


@pytest.mark.parametrize("fit", [tuned_whole_after_its_head, judged_by_another, learned_to_learn])
def test_what_belongs_together_is_one_report_without_a_loader(fit: Any) -> None:
    with profile_fit(show=False) as profile:
        fit()

    assert counts(profile.report) == [80]


def test_an_optimizer_that_is_made_inside_a_loop_over_a_loader_ends_no_fit() -> None:
    net, other = model(1), model(2)
    with profile_fit(show=False) as profile:
        for number, (x, _y) in enumerate(torch_loader(count=512)):
            if number == 40:
                optimizer = torch.optim.SGD(other.parameters(), 1e-2)
            (net if number < 40 else other)(x).mean().backward()
            if number >= 40:
                optimizer.step()

    assert counts(profile.report) == [64]


def test_a_loop_that_ends_in_a_break_and_one_after_it() -> None:
    def broken() -> None:
        net = model()
        for number, (x, _y) in enumerate(torch_loader()):
            net(x).mean().backward()
            if number == 4:
                break

    with profile_fit(show=False) as profile:
        broken()
        broken()

    assert [len(each.log.boundaries) > 0 for each in (*profile.observations.earlier, profile.observations)] == [True, True]
    assert counts(profile.report) == [5, 5]
    assert adds_up(profile.report)


def test_a_fit_inside_a_callback_of_another_stays_a_part_of_it() -> None:
    class Inner(Callback):  # type: ignore[misc]
        def after_epoch(self) -> None:
            quiet_fit(learner(), 1)

    with profile_fit(show=False) as profile:
        quiet_fit(learner(Inner()), 2)

    assert counts(profile.report) == [32]
    assert adds_up(profile.report)


def test_two_fits_that_take_turns_are_counted_whole() -> None:
    async def fit(count: int) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for x, _y in torch_loader(count=count):
            net(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(fit(400), fit(200), fit(400))

    with profile_fit(show=False) as profile:
        asyncio.run(both())

    assert counts(profile.report) == [125]
    assert adds_up(profile.report)


def test_a_saved_profile_of_two_fits_gives_the_same_reports() -> None:
    with profile_fit(show=False) as profile:
        train(1)
        train(2)

    again = build_fit_report(FitObservations.from_json(profile.observations.to_json()))

    assert again.to_data() == profile.report.to_data()


def test_many_fits_are_told_apart_up_to_the_eighth() -> None:
    with profile_fit(show=False) as profile:
        for _ in range(10):
            train(1)

    assert counts(profile.report) == [8, 8, 8, 8, 8, 8, 8, 24]
    assert profile.report.notes == ()


def test_the_later_of_two_fits_is_looked_at_by_all_instruments() -> None:
    def slow(loss: Any) -> None:
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            pass

    with profile_fit(show=False) as profile:
        train(1)
        train(10, each=slow)

    assert counts(profile.report) == [8, 80]
    assert profile.observations.stacks.moments
    assert "slow" in profile.report.first[0]
