"""The cost of the profile itself, rehearsed in the fit, in caches that are full of the user's code and data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from time import thread_time_ns
from typing import Any

from nbguard.training.profiler.nonfinite.loss_history import DeviceLosses, LossHistory
from nbguard.training.profiler.record.learner_loop import LearnerLoop
from nbguard.training.profiler.record.recorder import Event, Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop

_EVENTS: tuple[Event, ...] = ("waited", "backward", "step", "zero_grad")
"""At each of these one call of ours is rehearsed, in sampled batches. The call that takes a loss has an event of its
own, and gets the loss of the fit."""
_ENOUGH = 9
"""Times that each of them is timed; of a long fit's calls none is any more."""
_COLD = 2
"""Times as much as rehearsed that a call costs in a fit: others of ours have just run before a rehearsal, and none before the
call itself; and the user's code has to read its part of the caches again. Seen by tests/benchmarks/profile_overhead.py."""
_BEFORE = 40
"""Batches that are rehearsed at first: a recorder looks at those closely."""


class OverheadWatch:
    """Calls now and then one of the functions that are ours in every batch, around nothing, and times it.

    They belong to a recorder of their own, which has a history of the losses of its own.
    """

    watches = "the cost of the profile itself"

    def __init__(self) -> None:
        self._is_learners = False
        self._recorder = Recorder()
        self._calls: tuple[Callable[[], Any], ...] = ()
        self._taken: list[list[int]] = []  # nanoseconds of processor time of each call
        self._loss: Callable[[Any], Any] = _nothing
        self._taken_by_loss: list[int] = []
        self._turn = 0
        self._marks = 0.0  # in a batch

    def start(self, recorder: Recorder) -> None:
        """Wait for the first model that is called."""
        import torch

        self._torch: Any = torch
        self._of = recorder
        self._late = DeviceLosses(torch, self._recorder.__len__, _nothing)
        recorder.subscribe("learner", self._learner)
        recorder.subscribe("model", self._model)

    def stop(self) -> None:
        """Rehearse no more. The log of the rehearsal says how many marks are in a batch."""
        batches = [boundary.at for boundary in self._recorder.stop().boundaries if boundary.kind == "batch"]
        self._marks = median([after - before for before, after in pairwise(batches)]) if len(batches) > 1 else 0
        self._calls, self._loss = (), _nothing
        self._late.forget()

    def observe(self) -> int:
        """Return the nanoseconds that one mark costs the fit, with its share of everything else that is done in a batch."""
        if not self._marks or not all(self._taken):
            return 0
        *calls, nothing = (median(taken) for taken in self._taken)
        if self._taken_by_loss:  # there are none where a model is only evaluated
            calls.append(median(self._taken_by_loss))
        return max(0, round(_COLD * sum(taken - nothing for taken in calls) / self._marks))

    def _learner(self, _: Any) -> None:
        self._is_learners = True

    def _model(self, _module: Any, _args: Any) -> None:
        self._of.unsubscribe("model", self._model)
        loop = TorchLoop(self._recorder)
        front = LearnerLoop(self._recorder, loop) if self._is_learners else loop
        with self._torch._C.DisableTorchFunction():
            history = LossHistory(self._torch, self._late.send)
            self._recorder.usual_loss, loss = history.is_usual, self._torch.zeros((), device="cpu")
            history.note(0.0, ())
            batch = front.rehearsal()
            calls: list[Callable[[], Any]] = [*batch.before, partial(batch.loss, loss), *batch.after]
            for call in calls * _BEFORE:
                call()
        self._calls, self._loss = (*batch.before, *batch.after, _nothing), batch.loss
        self._taken = [[] for _ in self._calls]
        for event in _EVENTS:
            self._of.subscribe(event, self._rehearse)
        self._of.subscribe("loss", self._rehearse_loss)

    def _rehearse(self, *_: Any) -> None:
        turn, self._turn = self._turn, (self._turn + 1) % len(self._calls)
        self._time(self._taken[turn], self._calls[turn])
        if len(self._taken[-1]) >= _ENOUGH:  # the last one's turn comes last
            for event in _EVENTS:
                self._of.unsubscribe(event, self._rehearse)

    def _rehearse_loss(self, loss: Any) -> None:
        self._time(self._taken_by_loss, self._loss, loss)
        self._late.forget()  # a sampled batch holds no loss
        if len(self._taken_by_loss) >= _ENOUGH:
            self._of.unsubscribe("loss", self._rehearse_loss)

    def _time(self, taken: list[int], call: Callable[..., Any], *facts: Any) -> None:
        with self._torch._C.DisableTorchFunction():
            start = thread_time_ns()
            call(*facts)
            taken.append(thread_time_ns() - start)


def _nothing(*_: Any) -> None:
    pass
