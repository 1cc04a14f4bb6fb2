"""fastai's callbacks, timed by name, with their methods for events marked class by class, once a Learner has them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from types import FunctionType
from typing import Any

from nbguard.memory.scan.heap.attributes import attribute_of
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import Recorder

Function = Callable[..., Any]

_CALLBACKS = ("core", "fp16", "progress", "schedule", "training", "mixup", "rnn", "channelslast")
"""Modules of fastai's callbacks that are part of the training: to do less in them would change it."""
_OF_FASTAI = ("fastai.learner", *(f"fastai.callback.{name}" for name in _CALLBACKS))

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
