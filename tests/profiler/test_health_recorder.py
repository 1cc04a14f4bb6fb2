"""What parts may do to the user's fit: end it on purpose, and nothing else."""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.training.profiler.record.learner_loop import LearnerLoop
from nbguard.training.profiler.record.recorder import Recorder, StopFit
from nbguard.training.profiler.record.torch_loop import TorchLoop
from tests.profiler.recording import recording


def test_a_part_ends_the_fit_by_stop_fit_only() -> None:
    def mistake(*_: Any) -> None:
        raise ZeroDivisionError

    def stop(*_: Any) -> None:
        raise StopFit(KeyError("enough"))

    recorder = Recorder()
    recorder.subscribe("loss", mistake)
    recorder.subscribe("backward", stop)
    recorder.emit("loss", None)
    with pytest.raises(KeyError, match="enough"):
        recorder.emit("backward")
    assert len(recorder.failed) == 1
    assert recorder.stop().labels[recorder.stop().codes[-2]] == "nbguard itself"


def test_a_part_that_fails_is_told_of_nothing_more() -> None:
    """Else it would make a finding of half of what happens: an optimizer that never steps."""

    class Part:
        def __init__(self) -> None:
            self.losses = 0

        def step(self, _: Any) -> None:
            raise ZeroDivisionError

        def loss(self, _: Any) -> None:
            self.losses += 1

    part, recorder = Part(), Recorder()
    recorder.subscribe("loss", part.loss, every_batch=True)
    recorder.subscribe("step", part.step)
    for event in ("loss", "step", "loss"):
        recorder.emit(event, None)

    assert part.losses == 1
    assert recorder.failed[0].startswith("Part failed at 'step' and was switched off")


def test_a_part_that_ends_the_recording_ends_it() -> None:
    """As FitMonitor does, with its fit: what is patched passes calls on from there."""
    recorder = Recorder()
    recorder.subscribe("fit ends", lambda _: recorder.stop())
    recorder.subscribe("fit ends", lambda _: pytest.fail("told after the end"))

    recorder.emit("fit ends", None)
    marks = len(recorder)
    recorder.emit("fit ends", None)

    assert recorder.thread != threading.get_ident()
    assert len(recorder) == marks


def test_a_recording_that_ended_keeps_its_log_and_no_room_for_more() -> None:
    recorder = Recorder()
    room = sys.getsizeof(recorder.add.__self__)
    recorder.boundary("batch", 1)
    log = recorder.stop()

    assert recorder.stop() is recorder.hand_over() is log
    assert recorder.stop().codes == ()
    assert len(recorder) == len(log.codes) + len(log.boundaries) == 3
    assert sys.getsizeof(recorder.add.__self__) < room / 1000


def test_what_a_part_does_is_not_taken_for_the_users() -> None:
    model, seen = nn.Linear(2, 1), []
    with recording() as recorder:
        recorder.subscribe("forward", lambda module, _: (seen.append(module), model(torch.ones(2)).sum().backward()))
        recorder.subscribe("loss", lambda _: seen.append("loss"))
        model(torch.ones(2))
    assert seen == [model]


def test_mixed_precision_ends_its_autocast_when_a_part_stops_the_fit() -> None:
    from fastai.vision.all import CancelFitException, DataLoader, DataLoaders, Learner, MixedPrecision

    def stop(_: Any) -> None:
        raise StopFit(CancelFitException())

    class OnHost(MixedPrecision):
        def before_fit(self) -> None:
            super().before_fit()
            self.autocast = torch.autocast("cpu", torch.bfloat16)

    items = DataLoader([(torch.ones(4), torch.ones(1))] * 8, bs=4)
    learner = Learner(DataLoaders(items, items), nn.Linear(4, 1), loss_func=nn.functional.mse_loss, cbs=OnHost("bf16"))
    recorder = Recorder()
    loop = TorchLoop(recorder)
    fronts = [loop, LearnerLoop(recorder, loop)]
    for front in fronts:
        front.start()
    recorder.subscribe("loss", stop)
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)
    for front in fronts:
        front.stop()
    assert not torch.is_autocast_enabled("cpu")


def test_who_need_not_see_each_batch_sees_the_first_ones_and_then_fewer_and_fewer() -> None:
    recorder = Recorder()
    some, every = [], []
    recorder.subscribe("step", some.append)
    recorder.subscribe("step", every.append, every_batch=True)
    for number in range(1, 800):
        recorder.begin_batch(1)
        recorder.emit("step", number)

    twice_as_long = {*range(259, 263), *range(518, 522)}
    intervals = {39, 52, 65, 78, 91, 104, 117, 148, 185, 222, 259, 296, 333, 370, 407, 444, 481, 606, 707}
    assert some == sorted({*range(1, 33)} | intervals | twice_as_long)
    assert every == [*range(1, 800)]


def test_a_new_loader_and_what_follows_its_end_are_looked_at() -> None:
    recorder = Recorder()
    told: list[tuple[int, str]] = []
    recorder.subscribe("step", lambda: told.append((recorder.batches, "step")))
    recorder.subscribe("end", lambda: told.append((recorder.batches, "end")))
    for _ in range(40):
        recorder.begin_batch(1)
    recorder.look_at(2)
    for _ in range(3):
        recorder.begin_batch(2)
        recorder.emit("step")
    recorder.begin_batch(2)
    recorder.end_of(2)
    recorder.emit("step")

    assert told == [(41, "step"), (42, "step"), (43, "end"), (43, "step")]


def test_stretches_are_told_of_where_all_batches_are_looked_at() -> None:
    """At the beginning, at each new loader, and where a long fit has become twice as long; not without end."""
    recorder = Recorder()
    told: list[tuple[int, bool]] = []
    recorder.subscribe("stretch", lambda begins: told.append((recorder.batches, begins)))
    for number in range(1, 270):
        if number == 101:
            recorder.look_at(3)
        recorder.begin_batch(1)

    assert told == [(33, False), (101, True), (104, False), (259, True), (263, False)]

    for number in range(1000):
        recorder.look_at(1)
        recorder.begin_batch(number)
        recorder.begin_batch(number)

    assert len(told) < 140
    assert not told[-1][1]


def test_who_listens_no_more_is_not_told() -> None:
    recorder, told = Recorder(), []
    recorder.subscribe("step", told.append)
    recorder.subscribe("step", told.append)
    recorder.emit("step", 1)
    recorder.unsubscribe("step", told.append)
    recorder.emit("step", 2)

    assert told == [1]


def test_an_interrupt_leaves_the_log_whole() -> None:
    """Wherever it falls: there is a mark with its time, or none."""
    times = iter((0, 1, KeyboardInterrupt(), 3))

    def clock() -> int:
        time = next(times)
        if isinstance(time, BaseException):
            raise time
        return time

    recorder = Recorder(clock)
    recorder.mark(recorder.code("forward"))
    with pytest.raises(KeyboardInterrupt):
        recorder.mark(recorder.code("backward"))
    marks = recorder.stop()

    assert [marks.labels[code] for code in marks.codes] == ["forward", "other code"]
    assert list(marks.times) == [1, 3]


def test_a_long_log_is_packed_and_is_the_same() -> None:
    """What comes out is what went in, in order, and turns lie where they fell."""
    ticks = itertools.count()
    recorder = Recorder(lambda: next(ticks) << 33)  # nanoseconds beyond what fits into one digit of an int
    for _ in range(5000):
        recorder.mark(recorder.code("forward"))
        recorder.begin_batch(7)
        recorder.boundary("loss")
    cut = len(recorder)
    recorder.boundary("step")
    boundaries = tuple(recorder.boundaries(cut))
    marks = recorder.stop()

    assert list(marks.times) == [tick << 33 for tick in range(1, 10_002)]
    assert [marks.labels[code] for code in marks.codes[:4]] == ["forward", "other code"] * 2
    assert [(boundary.at, boundary.kind, boundary.loop) for boundary in marks.boundaries[-3:]] == [
        (10_000, "batch", 7),
        (10_000, "loss", 0),
        (10_000, "step", 0),
    ]
    assert boundaries == marks.boundaries[:-1]
