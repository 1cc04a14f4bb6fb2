"""fastai's loop, whose events tell the phases apart, and which callback took how long."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import FunctionType
from typing import Any

from nbguard.memory.scan.heap.kinds import attribute_of, name_of
from nbguard.memory.scan.roots.frames import frame_locals, frame_of
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import STEPPED, Recorder
from nbguard.training.profiler.record.torch_loop import Rehearsal, Rehearsed, TorchLoop

# --- fastai's callbacks, timed by name, with their methods for events marked class by class, once a Learner has them.


Function = Callable[..., Any]

_TRAINING_MODULES = ("core", "fp16", "progress", "schedule", "training", "mixup", "rnn", "channelslast")
"""Modules of fastai's callbacks that are part of the training: to do less in them would change it."""
_OF_FASTAI = ("fastai.learner", *(f"fastai.callback.{name}" for name in _TRAINING_MODULES))

_COUNTING = ("fastai.callback.core", "TrainEvalCallback", "after_batch")
"""Module, class and method of a callback that adds up two numbers: a mark takes as long. It counts as fastai's own loop."""


class CallbackTimes:
    """Marks the methods that callbacks have for events. Events that a callback does nothing at cost nothing.

    Of three calls of callbacks two are such; they are why `Callback.__call__` is left as it is.
    """

    watches = "times of callbacks"

    def __init__(self, recorder: Recorder, patches: Patches, fails: Callable[[BaseException], None]) -> None:
        """`fails` gets the exception of a callback before the fit: a profile that began there sees no more of the fit."""
        self.of_fastai: set[str] = set()  # phases of callbacks without which it does not train
        self._recorder = recorder
        self._patches = patches
        self._fails = fails
        self._seen: weakref.WeakSet[type] = weakref.WeakSet()

    def see(self, learner: Any) -> None:
        """Mark the callbacks that a Learner has now."""
        for callback in attribute_of(learner, "cbs") or ():
            self._mark(type(callback))

    def rehearsal(self, kind: type) -> Function:
        """Return a method of a callback of this class that does nothing, timed as others are."""
        return self._timed(kind, self._recorder.code_of_callback(""))(lambda _: None)

    def _mark(self, kind: type) -> None:
        if kind in self._seen:
            return
        self._seen.add(kind)
        from fastai.callback.core import event

        name = name_of(kind)
        if kind.__module__ in _OF_FASTAI:
            self.of_fastai.add(phase_log.callback(name))
        around = self._timed(kind, self._recorder.code_of_callback(name))
        for method in event._fields:
            if type(getattr(kind, method, None)) is FunctionType and (kind.__module__, name, method) != _COUNTING:
                self._patches.put(kind, method, around)

    def _timed(self, kind: type, code: int) -> Callable[[Function], Function]:
        recorder, add, clock = self._recorder, self._recorder.add, self._recorder.clock

        def around(original: Function) -> Function:
            def timed(callback: Any, *args: Any, **kw: Any) -> Any:
                __tracebackhide__ = True
                if get_ident() != recorder.thread or type(callback) is not kind:  # a subclass has marks of its own
                    return original(callback, *args, **kw)
                before = recorder.current
                add((before, clock()))
                recorder.current = code
                try:
                    return original(callback, *args, **kw)
                except BaseException as error:
                    if original.__name__ == "before_fit":
                        self._fails(error)
                    raise
                finally:
                    recorder.current = before
                    add((code, clock()))

            return timed

        return around


_BEFORE = {
    "before_batch": phase_log.TRANSFORMS,  # the loader's `after_batch`, once the batch is on the device
    "after_pred": phase_log.FORWARD,
    "after_loss": phase_log.LOSS,
    "after_backward": phase_log.BACKWARD,
    "after_cancel_backward": phase_log.BACKWARD,
    "after_step": phase_log.STEP,
    "after_cancel_step": phase_log.STEP,
}
"""The phases that fastai runs just before it announces an event. The rest is its own: between callbacks, and around batches."""

_CANCELLED = frozenset(f"Cancel{what}Exception" for what in ("Fit", "Epoch", "Train", "Valid"))
"""Exceptions that fastai catches in a fit, outside of batches."""
_CALLBACKS = 2
"""Calls of callbacks in a batch of a fit that has only fastai's own."""
_OF_A_BATCH = (
    "before_batch",
    "after_pred",
    "after_loss",
    "before_backward",
    "after_backward",
    "before_step",
    "after_step",
    "after_batch",
)
"""Events of a batch to train on, in their order."""
_BEFORE_LOOPS = frozenset(("before_fit", "before_epoch", "before_train", "before_validate"))
"""Events at which callbacks that were added are marked."""
_LAST = frozenset(("after_cancel_fit", "after_fit"))
"""Events at which fastai catches no exception any more."""
_AROUND_LOOPS = (*_BEFORE_LOOPS, "after_cancel_epoch", "after_epoch", *_LAST)
"""Events outside of loops: a callback that fails there ends the fit."""


class LearnerLoop:
    """Marks the phases of every Learner's loop."""

    watches = "phases of fastai's loop"

    def __init__(self, recorder: Recorder, loop: TorchLoop) -> None:
        self._recorder = recorder
        self._loop = loop
        self._patches = Patches()
        self.callbacks: CallbackTimes = CallbackTimes(recorder, self._patches, self._fails)
        self._fits = 0
        self._begins = False  # `fit` was called, and its first event is still to come
        self._is_fitting = False
        self._is_in = False
        self._moving = Patches()
        self._moves = False  # whether batches were copied to the model's device since the stretch began

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
        put(learner.Learner, "fit", self._fit)
        put(learner.Learner, "_do_epoch", self._do_epoch)
        put(learner.Learner, "add_cb", self._add_cb)
        put(load, "to_device", self._loop.timed(phase_log.TO_DEVICE))
        self._turn(begins=True)
        self._recorder.subscribe("stretch", self._turn)

    def _turn(self, begins: bool) -> None:
        """Mark how long a Learner takes to copy batches to its model's device; between stretches only if it had any to copy."""
        from fastai import learner

        if begins:
            self._moves = False
            self._moving.restore()
            timed = self._loop.timed(
                phase_log.TO_DEVICE, after=phase_log.TRANSFORMS
            )  # those of the loader, which are over then
            self._moving.put(learner, "to_device", lambda original: timed(self._copying(original)))
        elif not self._moves:
            self._moving.restore()

    def _copying(self, original: Function) -> Function:
        """Return a patch that notes whether a batch had to be copied: a batch that is there already comes back as it is."""

        def to_device(batch: Any, *args: Any, **kw: Any) -> Any:
            __tracebackhide__ = True
            result = original(batch, *args, **kw)
            if not self._moves:
                self._recorder.attempt(self, "to_device", self._compare, batch, result)
            return result

        return to_device

    def _compare(self, batch: Any, result: Any) -> None:
        rows = [tuple(value) if type(value) in (tuple, list) else (value,) for value in (batch, result)]
        self._moves = [*map(id, rows[0])] != [*map(id, rows[1])]

    def joins(self, learner: Any) -> None:
        """Say that a fit of this Learner goes on already."""
        self.callbacks.see(learner)
        self._begin(learner)

    def stop(self) -> None:
        """Take the marks out."""
        self._moving.restore()
        self._patches.restore()

    def observe(self) -> tuple[str, ...]:
        """Return the phases of callbacks without which fastai does not train."""
        return tuple(sorted(self.callbacks.of_fastai))

    def rehearsal(self) -> Rehearsal:
        """Return the calls of a batch as `TorchLoop.rehearsal` does."""
        import torch

        act, batch, model = Rehearsed.act, torch.zeros((), device="cpu"), torch.nn.Identity()
        learner: Any = Rehearsed(training=True, yb=(batch,), xb=(batch,), loss_grad=None, model=model, opt=Rehearsed())
        copies, event = self._loop.timed(phase_log.TO_DEVICE)(act), self._call_one(act)
        callback = partial(self.callbacks.rehearsal(Rehearsed), Rehearsed())
        events = [partial(event, learner, name) for name in _OF_A_BATCH]
        at = _OF_A_BATCH.index("after_loss")

        def after_loss(loss: Any) -> None:
            learner.loss_grad = loss
            event(learner, "after_loss")
            learner.loss_grad = None

        return Rehearsal(
            before=(
                *self._loop.rehearsal().before[:1],
                partial(copies, batch),
                partial(self._one_batch(act), learner),
                *events[:at],
            ),
            loss=after_loss,
            after=(*events[at + 1 :], *(callback,) * _CALLBACKS),
        )

    def _one_batch(self, original: Function) -> Function:
        recorder = self._recorder
        add, clock, zero = recorder.add, recorder.clock, recorder.code(phase_log.ZERO_GRAD)

        def _do_one_batch(learner: Any) -> Any:
            __tracebackhide__ = True
            if get_ident() != recorder.thread:
                return original(learner)
            if recorder.hears or recorder.losses >= recorder.begins_by_hand:
                recorder.attempt(self, "a batch", self._calls_model, learner)
            recorder.inside += 1
            recorder.in_learner += 1
            losses = recorder.losses
            try:
                result = original(learner)
            finally:
                recorder.inside -= 1
                recorder.in_learner -= 1
            if recorder.losses != losses:  # a batch to train on: its last act is to clear the gradients
                add((zero, clock()))
                if recorder.hears:
                    recorder.emit("phase", zero)
            return result

        return _do_one_batch

    def _call_one(self, original: Function) -> Function:
        recorder, add, clock = self._recorder, self._recorder.add, self._recorder.clock
        other, around, off = recorder.code(phase_log.OTHER), self._around_loops, recorder.off
        acts: dict[str, Function] = {
            **dict.fromkeys(_AROUND_LOOPS, around),
            "after_loss": self._has_loss,
            "before_step": self._steps,
        }
        emitted: dict[str, Function] = {
            "after_backward": self._has_gradients,
            "after_step": self._has_stepped,
            "after_cancel_step": self._has_stepped,
        }
        bounds = dict.fromkeys(("after_step", "after_cancel_step"), STEPPED)  # fastai steps only where it trains
        nothing: tuple[int, tuple[int, ...], Function | None] = other, (), None
        codes = {event: recorder.code(_BEFORE.get(event, phase_log.OTHER)) for event in (*_BEFORE, *acts, *emitted)}
        unheard = {event: (code, bounds.get(event, ()), acts.get(event)) for event, code in codes.items()}
        heard = {event: (*known[:2], emitted.get(event, known[2])) for event, known in unheard.items()}

        def _call_one(learner: Any, event: Any) -> None:
            __tracebackhide__ = True
            if get_ident() != recorder.thread:
                original(learner, event)
                return
            hears = recorder.hears
            code, bound, act = (heard if hears else unheard).get(event, nothing)
            add((code, clock()) + bound)  # noqa: RUF005 - twice as fast as to unpack nothing
            if hears and code != other:
                recorder.emit("phase", code)
            if act is None:
                original(learner, event)
            elif act is around:
                around(original, learner, event)
            else:
                if hears and event in emitted:
                    recorder.attempt(self, event, act, learner)
                    original(learner, event)
                    return
                original(learner, event)  # before: callbacks change the loss and the gradients
                try:
                    if not off or id(self) not in off:  # as `attempt` does, with a call less
                        act(learner)
                except Exception as error:  # noqa: BLE001 - it must not cost the user's fit
                    recorder.fails(self, event, error)

        return _call_one

    def _around_loops(self, original: Function, learner: Any, event: str) -> None:
        """Pass on an event outside of loops."""
        __tracebackhide__ = True
        recorder = self._recorder
        if event in _BEFORE_LOOPS:
            recorder.attempt(self.callbacks, event, self.callbacks.see, learner)
        if event == "before_fit" and self._begins:  # fastai announces one where it only evaluates, too
            self._begins = False
            recorder.attempt(self, event, self._begin, learner)
            self._loop.fits.depth += 1
        try:
            original(learner, event)
        except BaseException as error:
            if event in _LAST:
                recorder.attempt(self, event, self._end, error)
            else:
                self._fails(error)
            raise
        if event == "after_fit":
            recorder.attempt(self, event, self._end, None)

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
        if recorder.has_new_loop:
            self._loop.begins_to_train()
        if recorder.log_loss(loss):
            if not recorder.hears:
                self._calls_model(learner)
            recorder.emit("loss", loss)

    def _has_gradients(self, learner: Any) -> None:
        if learner.training is True:
            self._recorder.emit("backward")
            self._recorder.has_gradients()

    def _steps(self, learner: Any) -> None:
        if learner.training is True:
            self._recorder.steps(learner.opt)

    def _has_stepped(self, learner: Any) -> None:
        if learner.training is True:
            self._recorder.emit("zero_grad", learner.opt, None)

    def _add_cb(self, original: Function) -> Function:
        def add_cb(learner: Any, callback: Any) -> Any:
            __tracebackhide__ = True
            result = original(learner, callback)
            if get_ident() == self._recorder.thread:
                self._recorder.attempt(self.callbacks, "add_cb", self.callbacks.see, learner)
            return result

        return add_cb

    def _fit(self, original: Function) -> Function:
        """Return a patch that knows how deep fits are inside one another, whatever ends them."""
        recorder, fits = self._recorder, self._loop.fits

        def fit(learner: Any, *args: Any, **kw: Any) -> Any:
            __tracebackhide__ = True
            if get_ident() != recorder.thread:
                return original(learner, *args, **kw)
            depth, self._begins = fits.depth, True
            try:
                return original(learner, *args, **kw)
            except BaseException as error:
                recorder.attempt(self, "fit", self._end, error)
                raise
            finally:
                fits.depth, self._begins = depth, False

        return fit

    def _do_epoch(self, original: Function) -> Function:
        """Return a patch that emits the end of a fit that fails, while its callbacks are still those of the fit."""

        def _do_epoch(learner: Any) -> Any:
            __tracebackhide__ = True
            try:
                return original(learner)
            except BaseException as error:
                if get_ident() == self._recorder.thread:
                    self._fails(error)
                raise

        return _do_epoch

    def _begin(self, learner: Any) -> None:
        self._recorder.aside(self._loop.fits, "fit", self._loop.fits.learner, learner)
        self._fits += 1
        self._is_fitting = True
        self._loop.leave_modules()
        self._recorder.boundary("fit", self._fits)
        self._recorder.emit("learner", learner)

    def _fails(self, error: BaseException) -> None:
        """End the fit with an error that leaves it: after a cancellation of the fit `after_fit` is still to come."""
        if type(error).__name__ not in _CANCELLED:
            self._recorder.attempt(self, "fit", self._end, error)

    def _end(self, error: BaseException | None) -> None:
        """Emit once that a fit ended; a profile that began inside the fit learns it from the events inside."""
        if self._is_fitting:
            self._is_fitting = False
            self._loop.watch_modules()  # before the event: a subscriber may end the profile
            self._recorder.emit("fit ends", error)


def _fitting() -> Any | None:
    """Return the Learner whose fit has led here."""
    code = sys.modules["fastai.learner"].Learner._do_fit.__code__
    frame = frame_of(code, sys._getframe(1))
    return None if frame is None else frame_locals(frame).get("self")
