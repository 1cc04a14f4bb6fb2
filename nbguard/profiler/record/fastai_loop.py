"""fastai's loop: its events tell the phases apart, and which callback took how long."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from nbguard.profiler.analysis.time import phases
from nbguard.profiler.record.callbacks import CallbackTimes
from nbguard.profiler.record.patches import Patches
from nbguard.profiler.record.recorder import STEPPED, Recorder
from nbguard.profiler.record.torch_loop import Rehearsed, TorchLoop
from nbguard.scan.roots.frames import frame_locals, frame_of

Function = Callable[..., Any]

_BEFORE = {
    "before_batch": phases.TRANSFORMS,  # the loader's `after_batch`, once the batch is on the device
    "after_pred": phases.FORWARD,
    "after_loss": phases.LOSS,
    "after_backward": phases.BACKWARD,
    "after_cancel_backward": phases.BACKWARD,
    "after_step": phases.STEP,
    "after_cancel_step": phases.STEP,
}
"""The phases that fastai runs just before it announces an event. The rest is its own: between callbacks, and around batches."""

_CALLBACKS = 3
"""Calls of callbacks in a batch of a fit that has only fastai's own."""
_INNER = frozenset(("batch", "backward", "step"))


class FastaiLoop:
    """Marks the phases of every Learner's loop."""

    watches = "phases of fastai's loop"

    def __init__(self, recorder: Recorder, loop: TorchLoop) -> None:
        self._recorder = recorder
        self._loop = loop
        self._patches = Patches()
        self.callbacks = CallbackTimes(recorder, self._patches, self._fails)
        self._fits = 0
        self._is_fitting = False
        self._is_in = False

    def start(self) -> None:
        """Put the marks in; if fastai is not imported yet, once a loader is asked after it has been."""
        self._put_in()
        if not self._is_in:
            self._recorder.subscribe("loader", self._put_in_late)

    def _put_in_late(self, _: Any) -> None:
        """Put the marks in if fastai has been imported since; the fit that asks its first loader then goes on already."""
        self._put_in()
        if self._is_in:
            self._recorder.unsubscribe("loader", self._put_in_late)
            learner = _fitting()
            if learner is not None:
                self.joins(learner)

    def _put_in(self) -> None:
        learner = sys.modules.get("fastai.learner")
        if self._is_in or learner is None or not hasattr(learner, "Learner"):
            return
        self._is_in = True
        from fastai.data import load

        put = self._patches.put
        put(learner.Learner, "_call_one", self._call_one)
        put(learner.Learner, "_do_one_batch", self._one_batch)
        put(learner.Learner, "_with_events", self._with_events)
        put(learner.Learner, "add_cb", self._add_cb)
        put(load, "to_device", self._loop.timed(phases.TO_DEVICE))
        put(learner, "to_device", self._loop.timed(phases.TO_DEVICE, after=phases.TRANSFORMS))  # the loader's `after_batch`

    def joins(self, learner: Any) -> None:
        """Say that a fit of this Learner goes on already."""
        self.callbacks.see(learner)
        self._begin(learner)

    def stop(self) -> None:
        """Take the marks out."""
        self._patches.restore()

    def observe(self) -> tuple[str, ...]:
        """Return the phases of callbacks without which fastai does not train."""
        return tuple(sorted(self.callbacks.of_fastai))

    def rehearsal(self) -> tuple[Callable[[], Any], ...]:
        """Return the calls of a batch as `TorchLoop.rehearsal` does."""
        import torch

        act, loss, model = Rehearsed.act, torch.zeros((), device="cpu"), torch.nn.Identity()
        learner = Rehearsed(training=True, yb=(loss,), xb=(loss,), loss_grad=loss, model=model, opt=Rehearsed())
        copy = self._loop.timed(phases.TO_DEVICE)
        copies = partial(copy(lambda _: copy(act)(loss)), loss)
        event, inner = self._call_one(act), partial(self._with_events(act), learner, act, "batch", None)
        callback = partial(self.callbacks.rehearsal(Rehearsed), Rehearsed())
        return (
            *self._loop.rehearsal()[:1],
            copies,
            copies,
            inner,
            partial(self._one_batch(act), learner),
            *(partial(event, learner, name) for name in ("before_batch", "after_pred", "after_loss", "before_backward")),
            inner,
            *(partial(event, learner, name) for name in ("after_backward", "before_step")),
            inner,
            *(partial(event, learner, name) for name in ("after_step", "after_batch")),
            *(callback,) * _CALLBACKS,
        )

    def _one_batch(self, original: Function) -> Function:
        recorder, loop = self._recorder, self._loop
        add, clock, zero = recorder.add, recorder.clock, recorder.code(phases.ZERO_GRAD)

        def _do_one_batch(learner: Any) -> Any:
            __tracebackhide__ = True
            if get_ident() != recorder.thread:
                return original(learner)
            if recorder.hears:
                recorder.attempt(self, "a batch", self._calls_model, learner)
            loop.inside += 1
            loop.in_learner += 1
            losses = recorder.losses
            try:
                result = original(learner)
            finally:
                loop.inside -= 1
                loop.in_learner -= 1
            if recorder.losses != losses:  # a batch to train on: its last act is to clear the gradients
                add((zero, clock()))
                if recorder.hears:
                    recorder.emit("phase", zero)
            return result

        return _do_one_batch

    def _call_one(self, original: Function) -> Function:
        recorder, add, clock = self._recorder, self._recorder.add, self._recorder.clock
        other, ends, off = recorder.code(phases.OTHER), self._ends, recorder.off
        acts: dict[str, tuple[Function, bool]] = {  # whether only what is emitted matters
            "after_loss": (self._has_loss, False),
            "after_backward": (self._has_gradients, True),
            "before_step": (self._steps, True),
            "after_step": (self._has_stepped, False),
            "after_cancel_step": (self._has_stepped, False),
            "after_cancel_fit": (ends, False),
            "after_fit": (ends, False),
        }
        nothing: tuple[int, Function | None, bool] = other, None, False
        known = {
            event: (recorder.code(_BEFORE.get(event, phases.OTHER)), *acts.get(event, (None, False)))
            for event in (*_BEFORE, *acts)
        }

        def _call_one(learner: Any, event: Any) -> None:
            __tracebackhide__ = True
            if get_ident() != recorder.thread:
                original(learner, event)
                return
            code, act, is_for_hearers = known.get(event, nothing)
            add((code, clock()))
            if code != other and recorder.hears:
                recorder.emit("phase", code)
            if act is None or (is_for_hearers and not recorder.hears):
                original(learner, event)
            elif act is ends:
                ends(original, learner, event)
            else:
                try:
                    if not off or id(self) not in off:  # as `attempt` does, with a call less
                        act(learner)
                except Exception as error:  # noqa: BLE001 - it must not cost the user's fit
                    recorder.fails(self, event, error)
                finally:  # callbacks finish what they began (MixedPrecision: autocast), also if a part stops the fit here
                    original(learner, event)

        return _call_one

    def _ends(self, original: Function, learner: Any, event: str) -> None:
        """Pass on one of the last two events of a fit."""
        __tracebackhide__ = True
        try:
            original(learner, event)
        except BaseException as error:
            self._recorder.attempt(self, event, self._end, error)
            raise
        if event == "after_fit":
            self._recorder.attempt(self, event, self._end, None)

    def _calls_model(self, learner: Any) -> None:
        self._loop.calls(learner.model, learner.xb)

    def _has_loss(self, learner: Any) -> None:
        """Note the loss of a training batch. fastai announces one for a batch without targets, too, and has none then.

        A call of the model that nobody needed before is noted only now: the Learner still has its arguments.
        """
        if learner.training is not True:
            return
        try:
            targets, loss = learner.yb, learner.loss_grad
        except AttributeError:
            return
        if type(targets) in (tuple, list) and not targets:  # the loss belongs to an earlier batch
            return
        recorder = self._recorder
        if self._loop.fits.is_open:
            self._loop.begins_to_train()
        if recorder.log_loss(loss):
            if not recorder.hears:
                self._calls_model(learner)
            recorder.emit("loss", loss)

    def _has_gradients(self, learner: Any) -> None:
        if learner.training is True:
            self._recorder.emit("backward")

    def _steps(self, learner: Any) -> None:
        if learner.training is True:
            self._recorder.emit("step", learner.opt)

    def _has_stepped(self, learner: Any) -> None:
        if learner.training is not True:
            return
        self._recorder.add(STEPPED)
        if self._recorder.hears:
            self._recorder.emit("zero_grad", learner.opt, None)

    def _add_cb(self, original: Function) -> Function:
        def add_cb(learner: Any, callback: Any) -> Any:
            __tracebackhide__ = True
            result = original(learner, callback)
            if get_ident() == self._recorder.thread:
                self._recorder.attempt(self.callbacks, "add_cb", self.callbacks.see, learner)
            return result

        return add_cb

    def _with_events(self, original: Function) -> Function:
        recorder, fits = self._recorder, self._loop.fits

        def _with_events(learner: Any, act: Any, kind: Any, *args: Any, **kw: Any) -> Any:
            __tracebackhide__ = True
            if kind in _INNER or get_ident() != recorder.thread:
                return original(learner, act, kind, *args, **kw)
            recorder.attempt(self.callbacks, kind, self.callbacks.see, learner)
            if kind == "fit":
                recorder.attempt(self, kind, self._begin, learner)
            fits.depth += kind == "fit"
            try:
                result = original(learner, act, kind, *args, **kw)
            except BaseException as error:
                if (
                    kind in ("fit", "epoch") and type(error).__name__ != "CancelFitException"
                ):  # else `after_fit` is still to come
                    recorder.attempt(self, kind, self._end, error)
                raise
            finally:
                fits.depth -= kind == "fit"
            if kind == "fit":
                recorder.attempt(self, kind, self._end, None)
            return result

        return _with_events

    def _begin(self, learner: Any) -> None:
        self._recorder.aside(self._loop.fits, "fit", self._loop.fits.learner, learner)
        self._fits += 1
        self._is_fitting = True
        self._loop.leave_modules()
        self._recorder.boundary("fit", self._fits)
        self._recorder.emit("learner", learner)

    def _fails(self, error: BaseException) -> None:
        """End the fit with an error that leaves it: after a cancellation `after_fit` is still to come."""
        if type(error).__name__ != "CancelFitException":
            self._recorder.attempt(self, "before_fit", self._end, error)

    def _end(self, error: BaseException | None) -> None:
        """Emit once that a fit has ended; a profile that began inside the fit learns it from the events inside."""
        if self._is_fitting:
            self._is_fitting = False
            self._loop.watch_modules()  # before the event: a subscriber may end the profile
            self._recorder.emit("fit ends", error)


def _fitting() -> Any | None:
    """Return the Learner whose fit has led here."""
    code = sys.modules["fastai.learner"].Learner._do_fit.__code__
    frame = frame_of(code, sys._getframe(1))
    return None if frame is None else frame_locals(frame).get("self")
