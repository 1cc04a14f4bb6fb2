"""The marks of real fits: which phases there are, that they add up, and that everything goes back as it was."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from typing import Any

import fastai.data.load
import fastai.learner
import pytest
import torch
from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.schedule import fine_tune  # noqa: F401 - gives Learners their fit_one_cycle and fine_tune
from fastai.torch_core import set_seed
from torch.optim import optimizer
from torch.utils.data import dataloader

from nbguard.errors import NbguardError
from nbguard.frontend.notebook.fit_monitor import FitMonitor
from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.profile import FitProfile
from tests.profiler.loops import BATCH, ITEMS, Fails, items, learner, model, quiet_fit, torch_loader, train

PATCHED = [
    (dataloader._BaseDataLoaderIter, "__next__"),
    (dataloader._MultiProcessingDataLoaderIter, "__init__"),
    (torch.nn.Module, "__call__"),
    (torch.autograd, "backward"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.Tensor, "to"),
    (torch.Tensor, "cuda"),
    (fastai.learner.Learner, "_call_one"),
    (fastai.learner.Learner, "_do_one_batch"),
    (fastai.learner.Learner, "fit"),
    (fastai.learner.Learner, "_do_epoch"),
    (fastai.learner.Learner, "add_cb"),
    (fastai.data.load, "to_device"),
    (fastai.learner, "to_device"),
]
AS_FOUND = [vars(owner).get(name) for owner, name in PATCHED]


@pytest.fixture(autouse=True)
def _everything_goes_back() -> Any:
    yield
    assert [vars(owner).get(name) for owner, name in PATCHED] == AS_FOUND
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks
    assert not FitProfile.is_any_running()


def profiled(act: Any, *args: Any, **kw: Any) -> FitReport:
    with profile_fit(show=False) as profile:
        act(*args, **kw)
    assert sum(row.total for row in profile.report.timing.rows) == profile.report.timing.wall
    return profile.report


def found(report: FitReport, group: str) -> set[str]:
    return {row.phase for row in report.timing.rows if row.group == group}


def test_while_it_runs_something_is_patched() -> None:
    with profile_fit(show=False):
        assert all(vars(owner).get(name) is not was for (owner, name), was in zip(PATCHED, AS_FOUND, strict=True))


def test_a_learner_fit() -> None:
    timing = profiled(quiet_fit, learner()).timing

    assert (timing.batches, timing.fits, timing.warm_up) == (16, 1, 3)
    assert [(epoch.number, epoch.is_training, epoch.batches) for epoch in timing.epochs] == [
        (1, True, 8), (1, False, 4), (2, True, 8), (2, False, 4),
    ]  # fmt: skip
    rows = {(row.group, row.phase) for row in timing.rows}
    assert {("batch", phase) for phase in phase_log.STEP_PHASES} < rows
    assert {("batch", "callback Recorder"), ("validation", phase_log.WAIT), ("validation", phase_log.FORWARD)} < rows
    assert ("validation", phase_log.BACKWARD) not in rows


def test_a_plain_loop() -> None:
    timing = profiled(train).timing

    assert (timing.batches, timing.fits) == (16, 0)
    assert [(epoch.number, epoch.is_training, epoch.batches) for epoch in timing.epochs] == [
        (1, True, 8), (1, False, 8), (2, True, 8), (2, False, 8),
    ]  # fmt: skip
    inside = {row.phase for row in timing.rows if row.group == "batch"}
    assert inside == set(phase_log.STEP_PHASES) - {phase_log.TO_DEVICE, phase_log.TRANSFORMS} | {phase_log.OTHER}


def test_what_takes_long_is_told_where_it_is() -> None:
    import time

    class Slow(Callback):
        def after_step(self) -> None:
            time.sleep(0.02)

    class SlowLoss(torch.nn.CrossEntropyLoss):
        def forward(self, *args: Any) -> Any:
            time.sleep(0.02)
            return super().forward(*args)

    learn = learner(Slow())
    learn.loss_func = SlowLoss()
    learn.dls.train.after_batch = lambda batch: (time.sleep(0.02), batch)[1]
    timing = profiled(quiet_fit, learn, 1).timing

    medians = {row.phase: row.median or 0 for row in timing.rows if row.group == "batch"}
    assert 20e6 < medians.pop("callback Slow") < 40e6
    assert 20e6 < medians.pop(phase_log.LOSS) < 40e6
    assert 20e6 < medians.pop(phase_log.TRANSFORMS) < 40e6
    assert timing.step is not None
    assert timing.step > 60e6


def test_several_learners_and_other_loops_over_them() -> None:
    first, second = learner(), learner()

    def cell() -> None:
        with first.no_logging(), second.no_logging():
            first.fine_tune(1)
            second.fit_one_cycle(1)
            second.get_preds()
            second.validate()

    report = profiled(cell)

    timings = [report.earlier[0].timing, report.timing]
    assert [timing.fits for timing in timings] == [2, 1]
    epochs = [Counter(epoch.is_training for epoch in timing.epochs) for timing in timings]
    assert epochs == [{True: 2, False: 2}, {True: 1, False: 3}]


def test_workers_that_start_are_a_row() -> None:
    report = profiled(quiet_fit, learner(workers=1), 1)

    assert phase_log.WORKERS in found(report, "around")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("event", ["before_fit", "before_batch", "after_pred", "before_step", "after_epoch"])
def test_whatever_ends_a_fit(event: str, error: type[BaseException]) -> None:
    fails = Fails(event, 1 if event in ("before_fit", "after_epoch") else 5, error)

    profile = FitProfile()
    profile.start()
    with pytest.raises(error, match="planted") as raised:
        quiet_fit(learner(fails))
    report = profile.finish(raised.value)

    assert report.ending == ("interrupted" if error is KeyboardInterrupt else "error")
    assert report.error == error.__name__
    assert report.is_partial
    assert sum(row.total for row in report.timing.rows) == report.timing.wall
    assert (
        report.timing.batches
        == {"before_fit": 0, "before_batch": 5, "after_pred": 5, "before_step": 5, "after_epoch": 8}[event]
    )


class Broken(torch.utils.data.Dataset[Any]):
    """Has no item 20."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, at: int) -> Any:
        if at == 20:
            raise ZeroDivisionError("on purpose")
        return items()[at]


def reads_a_value_that_is_none() -> None:
    train(1, each=lambda _: torch.ones(2).item())


def has_a_broken_item() -> None:
    train(1, loader=torch.utils.data.DataLoader(Broken(), batch_size=BATCH))


def has_a_broken_item_in_fastai() -> None:
    quiet_fit(
        Learner(DataLoaders.from_dsets(Broken(), Broken(), bs=BATCH, num_workers=0), model(), loss_func=CrossEntropyLossFlat())
    )


@pytest.mark.parametrize("act", [reads_a_value_that_is_none, has_a_broken_item, has_a_broken_item_in_fastai])
def test_all_frames_of_ours_are_hidden_where_the_users_code_fails(act: Any) -> None:
    with pytest.raises((RuntimeError, ZeroDivisionError)) as raised, profile_fit(show=False):
        act()

    frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    ours = [frame for frame in frames if "/nbguard/training/profiler/" in frame.f_code.co_filename]
    assert ours
    assert [frame.f_code.co_name for frame in ours if not frame.f_locals.get("__tracebackhide__")] == []


def test_an_optimizer_that_fails_leaves_the_rest_in_order() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("planted")

    net = model()
    odd = Odd(net.parameters(), lr=0.1)

    def cell() -> None:
        for x, _y in torch_loader():
            net(x).sum().backward()
            with pytest.raises(ValueError, match="planted"):
                odd.step()

    timing = profiled(cell).timing

    assert timing.batches == 8
    assert {row.phase: row.total for row in timing.rows if row.group == "batch"}[phase_log.WAIT] > 0


def test_a_closure_is_part_of_the_batch() -> None:
    net = model()
    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def cell() -> None:
        for x, y in torch_loader():

            def closure(x: Any = x, y: Any = y) -> Any:
                lbfgs.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(x), y)
                loss.backward()
                return loss

            lbfgs.step(closure)

    timing = profiled(cell).timing

    assert timing.batches == 8
    assert {phase_log.FORWARD, phase_log.BACKWARD, phase_log.STEP, phase_log.ZERO_GRAD} <= {row.phase for row in timing.rows}


def test_a_fit_without_a_loader() -> None:
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)

    def cell() -> None:
        for _ in range(10):
            sgd.zero_grad()
            net(torch.ones(4, 6)).sum().backward()
            sgd.step()

    timing = profiled(cell).timing

    assert timing.batches == 10
    assert timing.step


def test_a_loop_that_accelerate_prepared() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    net = model()
    net, sgd, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), torch_loader())

    def cell() -> None:
        for x, y in loader:
            accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
            sgd.step()
            sgd.zero_grad()

    timing = profiled(cell).timing

    assert timing.batches == 8
    assert {phase_log.FORWARD, phase_log.BACKWARD, phase_log.STEP, phase_log.ZERO_GRAD} <= {row.phase for row in timing.rows}


def test_a_callback_with_a_loop_of_its_own() -> None:
    class Looks(Callback):
        def after_batch(self) -> None:
            if self.training and self.iter == 3:
                for _ in self.dls.valid:
                    pass

    timing = profiled(quiet_fit, learner(Looks())).timing

    assert timing.batches == 16
    assert [epoch.batches for epoch in timing.epochs if not epoch.is_training] == [4, 4, 4, 4]


def test_a_transform_that_is_a_module_is_part_of_the_wait() -> None:
    scale = torch.nn.LayerNorm(6)
    loader = torch_loader(
        collate_fn=lambda items: (scale(torch.stack([x for x, _ in items])), torch.tensor([y for _, y in items]))
    )

    report = profiled(lambda: [None for _ in loader])

    assert phase_log.FORWARD not in {row.phase for row in report.timing.rows}


def test_training_is_the_same_to_the_bit() -> None:
    def run() -> list[Any]:
        set_seed(5)
        learn = quiet_fit(learner())
        return [*learn.model.parameters(), torch.tensor(learn.recorder.losses), torch.get_rng_state()]

    plain = run()
    with profile_fit(show=False):
        watched = run()

    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))


def test_compiled_code_is_not_split() -> None:
    from torch._dynamo.testing import CompileCounter

    def cell(counter: Any) -> None:
        net = torch.compile(model(), backend=counter, fullgraph=True)
        for x, _y in torch_loader():
            net(x).sum().backward()

    plain, watched = CompileCounter(), CompileCounter()
    torch._dynamo.reset()
    cell(plain)
    torch._dynamo.reset()
    timing = profiled(cell, watched).timing
    torch._dynamo.reset()

    assert (watched.frame_count, watched.op_count) == (plain.frame_count, plain.op_count)
    assert timing.batches == 8


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_compiled_model_goes_by_its_own_name(is_compiled: bool) -> None:
    def cell() -> None:
        net = model()
        (torch.compile(net, backend="eager") if is_compiled else net)(torch.ones(2, 6)).sum().backward()

    with profile_fit(show=False) as profile:
        cell()
    torch._dynamo.reset()

    assert profile.observations.subject.title == "PyTorch loop · Sequential"
    assert profile.observations.subject.is_compiled == is_compiled


def test_another_thread_is_left_alone() -> None:
    def cell() -> None:
        other = threading.Thread(target=train)
        other.start()
        other.join()

    report = profiled(cell)

    assert report.timing.batches == 0
    assert [note for note in report.notes if note.startswith("another thread also asked a loader")]


def test_a_profile_that_comes_late_says_so() -> None:
    batches = iter(torch_loader())
    net = model()
    for _ in range(3):
        next(batches)

    def cell() -> None:
        for x, _y in batches:
            net(x).sum().backward()

    report = profiled(cell)

    assert (report.timing.batches, report.missed, report.is_partial) == (5, 3, True)
    assert report.title == "PyTorch loop · Sequential"


def test_a_worker_is_no_part_of_the_fit() -> None:
    """A transform that is a module runs in a fork of the fit's thread."""
    seen = torch.multiprocessing.get_context("fork").Value("i", 0)

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __getitem__(self, at: int) -> Any:
            before = len(recorder)
            result = torch.nn.Identity()(torch.ones(6))
            seen.value += len(recorder) - before + 1
            return result

        def __len__(self) -> int:
            return 4

    with profile_fit(show=False) as profile:
        assert profile._instruments is not None
        recorder = profile._instruments.recorder
        list(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork"))

    assert seen.value == 4


def test_two_profiles_would_measure_each_other() -> None:
    with profile_fit(show=False), pytest.raises(NbguardError, match="a profile runs already"):
        FitProfile().start()


def test_an_interrupt_while_it_starts_leaves_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nbguard.training.profiler.record.learner_loop.LearnerLoop.start", interrupted)

    with pytest.raises(KeyboardInterrupt), profile_fit():
        pass


def test_a_part_that_fails_is_named_and_the_fit_goes_on() -> None:
    with profile_fit(show=False) as profile:
        assert profile._instruments is not None
        profile._instruments.recorder.subscribe("step", lambda _: 1 / 0)
        quiet_fit(learner())

    assert profile.report.timing.batches == 16
    assert [note for note in profile.report.notes if "ZeroDivisionError" in note]


def test_an_evaluation_is_no_fit_though_fastai_announces_one() -> None:
    learn = learner()

    def fits_and_evaluates() -> None:
        quiet_fit(learn, 1)
        with learn.no_logging():
            learn.validate()
            learn.get_preds()

    with profile_fit(show=False) as profile:
        fits_and_evaluates()

    kinds = [boundary.kind for boundary in profile.observations.log.boundaries]
    assert kinds.count("fit") == 1


def test_a_fit_that_fails_leaves_no_depth_behind() -> None:
    with profile_fit(show=False) as profile:
        for event in ("before_fit", "after_pred", "after_epoch", "after_fit"):
            with pytest.raises(ZeroDivisionError):
                quiet_fit(learner(Fails(event, 1)))
            assert profile._instruments is not None
            assert profile._instruments.loop.fits.depth == 0


def test_the_monitor_in_a_script() -> None:
    monitor = FitMonitor(show=False)
    learn = learner()

    quiet_fit(learn, cbs=monitor)
    first = monitor.report
    quiet_fit(learn, 1, cbs=monitor)

    assert first is not None
    assert monitor.report is not None
    assert (first.timing.batches, first.timing.fits, first.ending) == (16, 1, "complete")
    assert monitor.report.timing.batches == 8


@pytest.mark.parametrize("event", ["before_epoch", "after_pred", "after_epoch", "after_fit", "after_cancel_fit"])
def test_the_monitor_ends_with_its_fit(event: str) -> None:
    monitor = FitMonitor(show=False)
    learn = learner(Fails(event, 1))
    if event == "after_cancel_fit":
        learn.add_cb(Fails("after_train", 1, CancelFitException))

    with pytest.raises(ZeroDivisionError):
        quiet_fit(learn, cbs=monitor)

    assert monitor.report is not None


def test_the_monitor_ends_with_a_fit_that_is_cancelled_too_late() -> None:
    monitor = FitMonitor(show=False)

    with pytest.raises(CancelFitException):
        quiet_fit(learner(Fails("after_fit", 1, CancelFitException)), cbs=monitor)

    assert not FitProfile.is_any_running()
    assert monitor.report is not None


def test_the_monitor_ends_where_a_callback_after_it_fails_before_the_fit() -> None:
    class Late(Callback):
        order = FitMonitor.order + 1

        def before_fit(self) -> None:
            raise ZeroDivisionError("on purpose")

    monitor = FitMonitor(show=False)

    with pytest.raises(ZeroDivisionError):
        quiet_fit(learner(Late()), cbs=monitor)

    assert not FitProfile.is_any_running()
    assert monitor.report is not None
    assert monitor.report.is_partial


def test_a_cancelled_fit_is_complete() -> None:
    monitor = FitMonitor(show=False)

    quiet_fit(learner(Fails("after_batch", 9, CancelFitException)), cbs=monitor)

    assert monitor.report is not None
    assert (monitor.report.ending, monitor.report.timing.batches) == ("complete", 8)


def test_the_monitor_leaves_a_fit_to_a_profile_around_it() -> None:
    monitor = FitMonitor(show=False)

    report = profiled(quiet_fit, learner(), cbs=monitor)

    assert monitor.report is None
    assert report.timing.batches == 16


class WithoutTargets(torch.utils.data.Dataset[Any]):
    """Samples of inputs only."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        return (torch.randn(6),)


@pytest.mark.parametrize("around", [True, False])
def test_a_fit_whose_batches_have_no_targets_runs_as_without(around: bool) -> None:
    data = torch.utils.data.DataLoader(WithoutTargets(), batch_size=16)
    learn = Learner(DataLoaders(data, data), model(), loss_func=CrossEntropyLossFlat())
    monitor = FitMonitor(show=False)

    if around:
        report = profiled(quiet_fit, learn, 1)
    else:
        quiet_fit(learn, 1, cbs=monitor)
        assert monitor.report is not None
        report = monitor.report

    assert (report.ending, report.error, report.notes) == ("complete", "", ())
    assert report.timing.batches == 0  # without a loss nothing was trained


def test_a_batch_without_targets_between_others_does_not_count_the_loss_of_the_one_before() -> None:
    class Drops(Callback):
        def before_batch(self) -> None:
            if self.training and self.iter == 3:
                self.learn.yb = ()

    report = profiled(quiet_fit, learner(Drops()), 1)

    assert report.ending == "complete"
    with profile_fit(show=False) as profile:
        quiet_fit(learner(Drops()), 1)
        assert profile._instruments is not None
        boundaries = list(profile._instruments.recorder.boundaries(10**9))
    assert sum(boundary.kind == "loss" for boundary in boundaries) == 7


@pytest.mark.parametrize("by_name", [False, True])
def test_the_code_of_a_closure_is_no_part_of_the_step(by_name: bool) -> None:
    """As Lightning's, in which the user's training step runs."""
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)

    def cell() -> None:
        for x, y in torch_loader():

            def closure(x: Any = x, y: Any = y) -> Any:
                loss = torch.nn.functional.cross_entropy(net(x), y)
                sgd.zero_grad()
                loss.backward()
                time.sleep(0.01)
                return loss

            assert type(sgd.step(closure=closure) if by_name else sgd.step(closure)) is torch.Tensor

    rows = {row.phase: row.total for row in profiled(cell).timing.rows if row.group == "batch"}

    assert rows[phase_log.OTHER] >= 8 * 10_000_000
    assert rows[phase_log.STEP] < rows[phase_log.OTHER]
