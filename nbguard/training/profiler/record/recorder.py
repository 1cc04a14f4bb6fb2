"""The log of a running fit, and its events for instruments.

A mark ends the phase that began at the mark before; so every nanosecond belongs to one phase, however phases are nested.
Time that nbguard itself takes for sampling is marked, too.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeVar, get_args

from nbguard.memory.scan.parked import has_compiled
from nbguard.training.profiler.analysis.time import phase_log as phases
from nbguard.training.profiler.analysis.time.phase_log import Boundary, BoundaryKind, LogPosition, PhaseLog
from nbguard.training.profiler.record.log import BOUNDARY_CODES, Log, SampleSchedule, Turn
from nbguard.training.profiler.record.model_calls import ModelCalls

Event = Literal[
    "batch",
    "stretch",
    "waited",
    "end",
    "phase",
    "model",
    "forward",
    "output",
    "loss",
    "backward",
    "grad",
    "gradients",
    "step",
    "zero_grad",
    "scale",
    "learner",
    "loader",
    "fit ends",
]
"""Events that instruments may subscribe to. They are emitted on the thread of the fit:

- `batch(number)`: batch `number` of the recording, from 1, is about to be asked for (training or validation, of any loader), or
  began in a loop that asks no loader: there one begins with the first call of a model after a step or, where no optimizer
  steps, after a loss; the second of all is the first known one
- `stretch(begins)`: from this batch on all are sampled, or from this one on only some: patches of frequently called functions
can be taken out for that time; its end comes in the reverse order, as the patches of several lie on one another - `waited()`:
it is there, or the loader has none left: then `end()` was emitted before - `phase(code)`: a phase of `phases.STEP_PHASES` has
just ended - `model(module, args)`: an outermost module is about to be called that is not the one called before, or that is the
first
  since an iterator over a loader began; `forward` follows
- `forward(module, args)`: the outermost module is about to be called; `args` are all its arguments, those given by name, too
- `output(result)`: the outermost module has returned, unless it is a loss
- `loss(tensor)`: the loss of a training batch is there, before the backward pass
- `backward()`: the backward pass ended: gradients are there
- `grad()`: `torch.autograd.grad` is about to go through a graph, under whatever name it is called
- `gradients()`: those that `usual_gradients` examined after a backward pass are unusual
- `step(optimizer)`: an optimizer is about to step; fastai's, too
- `zero_grad(optimizer, set_to_none)`: gradients are about to be cleared; None if not given
- `scale(scaler, given, infinite)`: a GradScaler has updated its scale, to a given one if `given`; `infinite` has for each
  optimizer the flag that its gradients were not finite
- `learner(learner)`: a fastai fit is about to begin; `fit ends(error)`: it ended, with the exception that ended it or None
- `loader(iterator)`: an iterator over a loader is asked for the first time
"""
_RARE = frozenset(("stretch", "gradients", "end", "model", "scale", "learner", "loader", "fit ends"))
"""Events that all subscribers receive, in every batch."""
_INSIDE = frozenset(get_args(Event)) - _RARE - {"loss", "step"}
"""Events of each batch, apart from the loss and the step, which have a subscriber in every one."""
_STRETCHES = 64
"""Stretches that are told of: the patches that come and go with them make Python forget its caches of a class."""
_ALONE = 32
"""Losses since a loader was asked, until the loop is taken to go on without one."""
_ADDED_UP = 256
"""Losses until no optimizer is waited for, as the loop ceased to use one."""
BY_HAND = 0
"""The loop of batches that no loader gives."""
_BATCH = BOUNDARY_CODES["batch"]
_LOSS = BOUNDARY_CODES["loss"], 0
STEPPED = BOUNDARY_CODES["step"], 0
"""Boundary that an optimizer has stepped, as `add` takes it."""
_OFF = -1
_T = TypeVar("_T")
Subscribers = dict[str, tuple[Callable[..., None], ...]]
_running: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _not_in_the_child() -> None:
    """A worker is forked from the thread of the fit and has its identity: its calls are no part of the log."""
    for recorder in _running:
        recorder.thread = _OFF


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_not_in_the_child)


class StopFit(Exception):  # noqa: N818 - no mistake: it is meant
    """Ends the user's fit on purpose, raised by an instrument at an event: `emit` raises `error` in the user's loop."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Recorder:
    """Keeps the log of the thread that creates it, and calls subscribers at events. Holds no object of the user's.

    `mark(code)` logs the phase that has gone on since the last mark, as does `add((code, clock()))` without a call. Where one
    of `phases.STEP_PHASES` ended, that is emitted, too, if there are subscribers. `current` is the number of the phase that
    goes on now; `subscribers` receive the events of this batch.

    With slots: every batch reads some of them, and its data is never in the processor's caches.
    """

    __slots__ = (
        "__weakref__",
        "_always",
        "_began_by_hand",
        "_callbacks",
        "_first",
        "_has_ended",
        "_is_stretch",
        "_labels",
        "_log",
        "_next_sample",
        "_own",
        "_sampled",
        "_schedule",
        "_start",
        "_steps_by_hand",
        "_stopping",
        "_stretches",
        "_trained_at",
        "_whole",
        "add",
        "ahead",
        "batches",
        "begins_by_hand",
        "calls",
        "clock",
        "current",
        "elsewhere",
        "failed",
        "has_closure",
        "has_new_loop",
        "has_stepped",
        "hears",
        "in_learner",
        "inside",
        "kept",
        "loading",
        "looks",
        "loop",
        "losses",
        "mark",
        "off",
        "own_time",
        "retains",
        "subscribers",
        "thread",
        "thread_of_fit",
        "trained",
        "turn",
        "usual_gradients",
        "usual_loss",
        "usual_step",
    )

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock: Callable[[], int] = clock
        self.thread: int = threading.get_ident()  # the first: none while nbguard itself looks
        self.thread_of_fit: int = self.thread
        self.batches: int = 0
        self.trained: int = 0  # batches with a loss to train on
        self.losses: int = 0  # to train on
        self.retains: bool = False  # the backward pass that runs is to keep its graph, without making one of its own
        self.kept: int = (
            0  # backward passes in a row that left their graph, with `retain_graph=True`; of batches that are heard of
        )
        self.usual_loss: Callable[[Any], bool] | None = None  # notes a loss of which nobody need hear, and says so
        self.usual_step: Callable[[Any], bool] | None = None  # looks at gradients before a step, and says whether all is well
        self.usual_gradients: Callable[[], bool] | None = None  # looks at them after a backward pass, and says the same
        self.calls: ModelCalls = ModelCalls()
        self.turn: Turn = Turn(clock)
        self.inside: int = 0  # a module, a loader or fastai's batch, however deep: calls in there are a part of it
        self.in_learner: int = 0  # a batch of fastai's: its own events tell its phases apart
        self.has_new_loop: bool = True  # there was no loss yet in the loop that began last, or in any
        self.elsewhere: bool = False  # whether another thread asked a loader for a batch
        self.loading: int = 0  # a loader is asked now: calls inside are its way to make a batch
        self.loop: int = BY_HAND  # number of the iterator that was asked for a batch last, as in boundaries
        self.begins_by_hand: int = 1  # number of losses until the next call of a model begins a batch that no loader gives
        self.has_closure: bool = False  # the step that begins calls one: its backward pass comes in the step
        self.has_stepped: bool = False  # an optimizer, since the latest such batch began
        self._steps_by_hand = False  # there was a step in the one before
        self._began_by_hand = 0  # losses before the latest one
        self.ahead: set[int] = set()  # iterators that were asked for a second batch before anything was done with the first
        self.failed: list[str] = []  # instruments that made a mistake and are off, in words
        self._labels: dict[str, int] = {label: code for code, label in enumerate(phases.ALL)}
        self._callbacks: dict[int, str] = {}  # class of the callback, by the number of its phase
        self._log = Log(clock)
        self.mark: Callable[[int], None] = self._log.mark
        self.add: Callable[[Iterable[int]], None] = self._log.add
        self._sampled: Subscribers = dict.fromkeys(get_args(Event), ())
        self._always: Subscribers = dict.fromkeys(get_args(Event), ())  # in any batch
        self.subscribers: Subscribers = self._sampled
        self.looks: bool = True  # whether all subscribers receive the events of this batch
        self.hears: bool = True  # whether anybody does, a loss that `usual_loss` notes and rare events apart
        self._schedule = SampleSchedule()
        self._next_sample = 1  # batch that is sampled, or may be
        self._is_stretch = True
        self._stretches = 0
        self._trained_at = -1
        self._first = 0  # entry of the log that began the current fit
        self._own = self._labels[phases.OWN]
        self._has_ended = False
        self._whole: PhaseLog | None = None  # the log of a recording that ended
        self.off: dict[int, object] = {}  # parts that failed, by their ids
        self.own_time: int = 0  # nanoseconds of processor time of what is marked as nbguard's own
        self._stopping: Exception | None = None  # that ends the fit on purpose
        self.current: int = self._labels[phases.OTHER]
        self._start = clock()
        _running.add(self)

    def code(self, phase: str) -> int:
        """Return the number of a phase in marks."""
        return self._labels.setdefault(phase, len(self._labels))

    def code_of_callback(self, name: str) -> int:
        """Return the number of the phase of a class's callbacks."""
        code = self.code(phases.callback(name))
        self._callbacks[code] = name
        return code

    def callback(self, code: int) -> str:
        """Return the class of the callback whose phase has a number; "" where it is no callback's."""
        return self._callbacks.get(code, "")

    def phase(self, code: int) -> str:
        """Return the phase of a number."""
        return next(islice(self._labels, code, None))

    @property
    def elapsed(self) -> int:
        """Return the nanoseconds since the recording began."""
        return self.clock() - self._start

    def has_begun(self) -> None:
        """Mark that everything is in place, whose time is nbguard's own."""
        self.mark(self._own)

    def boundary(self, kind: BoundaryKind, loop: int = 0) -> None:
        """Log that a loop or a fit begins or ends here, or that this batch is disturbed."""
        if kind in ("batch", "end"):
            self.mark(self.current)
        self._log.boundary(kind, loop)

    def log_loss(self, loss: Any) -> bool:
        """Log that there is a loss to train on. Return whether a subscriber has to hear of it: then it is to be emitted."""
        if self.losses >= self.begins_by_hand:  # no model was called for it
            self.begin_batch_by_hand()
        if self._trained_at != self.batches:
            self._trained_at = self.batches
            self.trained += 1
        add, is_usual = self.add, self.usual_loss
        add(_LOSS)
        self.losses += 1
        if self.hears or is_usual is None:
            return bool(self.subscribers["loss"])
        try:
            return not is_usual(loss)
        except Exception:  # noqa: BLE001 - whoever hears of it looks at it otherwise
            self.usual_loss = None
            return True

    def steps(self, optimizer: Any) -> None:
        """Emit that an optimizer is about to step, in an unobserved batch only if its gradients are unusual."""
        is_usual = self.usual_step
        if not self.hears:
            try:
                if is_usual is None or is_usual(optimizer):
                    return
            except Exception:  # noqa: BLE001 - then nobody looks
                self.usual_step = None
                return
        self.emit("step", optimizer)

    def has_gradients(self) -> None:
        """Emit that a backward pass left unusual gradients, if it did."""
        is_usual = self.usual_gradients
        try:
            if is_usual is None or is_usual():
                return
        except Exception:  # noqa: BLE001 - then nobody looks
            self.usual_gradients = None
            return
        self.emit("gradients")

    def begin_batch(self, loop: int) -> None:
        """Note that an iterator is about to be asked for a batch."""
        add, clock = self.add, self.clock
        number = self.batches = self.batches + 1
        self.loop = loop
        self.begins_by_hand = self.losses + _ALONE
        add((self.current, clock(), _BATCH, loop))
        if number >= self._next_sample:
            self._choose(number)
        elif self.hears:
            self.emit("batch", number)

    def begin_batch_by_hand(self) -> None:
        """Note that a batch begins that no loader gives, unless the one before goes on: there are steps, and it had none yet.

        The log needs no boundary: there losses and steps divide batches.
        """
        self.begins_by_hand = self.losses + 1
        if self._steps_by_hand and not self.has_stepped and self.losses < self._began_by_hand + _ADDED_UP:
            return
        self._steps_by_hand, self.has_stepped, self._began_by_hand = self.has_stepped, False, self.losses
        self.loop = BY_HAND
        number = self.batches = max(self.batches, 1) + 1  # the first of them was not known to be one
        if number >= self._next_sample:
            self._choose(number)
        elif self.hears:
            self.emit("batch", number)

    def _choose(self, number: int) -> None:
        """Choose who receives the events of a batch that begins. Subscribers of the one before hear of it: theirs ends."""
        self._log.pack()
        choice = self._schedule.choose(number)
        self._tell_stretch(begins=choice.is_in_stretch)
        if choice.is_looked_at:
            self._listen(looks=True)
        self.emit("batch", number)
        if not choice.is_looked_at:
            self._listen(looks=False)
        self._next_sample = choice.next

    def _listen(self, *, looks: bool) -> None:
        """Have all subscribers receive the next events, or those that receive the events of every batch; then choose again."""
        self.looks = looks
        self._next_sample = 0
        self.subscribers = self._sampled if looks else self._always
        self._note_hearers()

    def _note_hearers(self) -> None:
        always = self._always
        has_more = len(always["loss"]) > 1 or len(always["step"]) > (self.usual_step is not None)
        self.hears = self.looks or has_more or any(always[event] for event in _INSIDE)

    def _tell_stretch(self, *, begins: bool) -> None:
        """Emit that a stretch begins or ended; never once something is compiled, which patches that change undo."""
        if begins != self._is_stretch and (self._stretches < _STRETCHES or not begins) and not has_compiled():
            self._is_stretch = begins
            self._stretches += begins
            self.emit("stretch", begins)

    def end_of(self, loop: int) -> None:
        """Note that the iterator had no such batch left."""
        self.batches -= 1
        self.boundary("end", loop)
        self._listen(looks=True)  # a loop without a loader may follow
        self._tell_stretch(begins=True)
        self.emit("end")

    def look_at(self, batches: int) -> None:
        """Have the next batches looked at, all of them."""
        self._schedule.look_up_to(self.batches + batches)
        self._next_sample = self.batches + 1

    def position(self, entries: int) -> LogPosition:
        """Return the place in the log after so many of its first entries."""
        return self._log.position(entries)

    def begin_fit(self, at: LogPosition, keeps: Callable[[Callable[..., None]], bool]) -> None:
        """Note that another fit began, at a place of the log: its batches are counted and looked at from the first one on.

        Of the subscribers only those stay that `keeps` says.
        """
        self._first = at.marks + at.boundaries
        kinds = [boundary.kind for boundary in self._log.boundaries(first=self._first)]
        self.batches = kinds.count("batch") - kinds.count("end")
        self.trained, self._trained_at, self._stretches = 0, -1, 0
        self._schedule.begin(self.batches)
        for subscribers in (self._sampled, self._always):
            for event, acts in subscribers.items():
                subscribers[event] = tuple(filter(keeps, acts))
        self._listen(looks=True)
        self._tell_stretch(begins=True)

    def subscribe(self, event: Event, act: Callable[..., None], *, every_batch: bool = False) -> None:
        """Have `act` called at an event, once even if asked for twice; its time is nbguard's own.

        `every_batch`: also in batches that are not sampled otherwise. One that raises is called no more, and the fit goes on.
        Only `StopFit` ends the fit. Patched functions log nothing of the calls that `act` makes.
        """
        for subscribers in (self._sampled, self._always)[: 1 + (every_batch or event in _RARE)]:
            if act not in subscribers[event]:
                subscribers[event] = (*subscribers[event], act)
        self._note_hearers()

    def unsubscribe(self, event: Event, act: Callable[..., None]) -> None:
        """Have `act` called no more: an event without subscribers costs next to nothing."""
        for subscribers in (self._sampled, self._always):
            subscribers[event] = tuple(subscriber for subscriber in subscribers[event] if subscriber != act)
        self._note_hearers()

    def emit(self, event: Event, *facts: Any) -> None:
        """Call the subscribers to an event. Their time is marked as nbguard's own.

        A single one in an unsampled batch is not, as it takes less time than the marks would.
        """
        subscribers = self.subscribers[event]
        if not subscribers:
            return
        if event == "stretch" and not facts[0]:
            subscribers = subscribers[::-1]
        is_marked = self.looks or len(subscribers) > 1
        begun = 0
        if is_marked:
            self.mark(self.current)
            begun = time.thread_time_ns()
        thread, self.thread = self.thread, _OFF
        try:
            for act in subscribers:
                if self._has_ended:  # a subscriber may end the recording: a monitor, with its fit
                    break
                try:
                    act(*facts)
                except StopFit as stop:
                    self._stopping = stop.error
                    raise stop.error from None
                except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the user's fit
                    self._switch_off(getattr(act, "__self__", act), event, error)
        finally:
            if not self._has_ended:
                self.thread = thread
                if is_marked:
                    self.own_time += time.thread_time_ns() - begun
                    self.mark(self._own)

    def attempt(self, part: object, action: str, act: Callable[..., _T], *facts: Any) -> _T | None:
        """Return `act(*facts)`: the one way for patched functions to read objects of the user's or a library's.

        Where that fails `part` is switched off, with all its subscriptions, and the fit goes on. None then, and from then on.
        """
        if id(part) in self.off:
            return None
        try:
            return act(*facts)
        except Exception as error:  # noqa: BLE001 - it must not cost the user's fit
            self.fails(part, action, error)
            return None

    def fails(self, part: object, action: str, error: Exception) -> None:
        """Switch a part off that failed, unless its error ends the fit on purpose: that is raised again."""
        if error is self._stopping:
            raise error
        self._switch_off(part, action, error)

    def aside(self, part: object, action: str, act: Callable[..., object], *facts: Any) -> None:
        """Call `act` as `attempt` does, its time being nbguard's own: patched functions log nothing of its work."""
        self.mark(self.current)
        begun, thread, self.thread = time.thread_time_ns(), self.thread, _OFF
        try:
            self.attempt(part, action, act, *facts)
        finally:
            self.thread = thread
            self.own_time += time.thread_time_ns() - begun
            self.mark(self._own)

    def _switch_off(self, part: object, action: str, error: Exception) -> None:
        """Call no method of a part that failed any more: half of the events would make a wrong finding."""
        self.off[id(part)] = part
        self.usual_loss = self.usual_step = self.usual_gradients = None
        for subscribers in (self._sampled, self._always):
            for name, acts in subscribers.items():
                subscribers[name] = tuple(
                    subscriber for subscriber in acts if getattr(subscriber, "__self__", subscriber) is not part
                )
        watches = getattr(type(part), "watches", "")
        unseen = f": {watches} not seen from batch {self.batches} on" if watches else ""
        name, why = type(part).__name__, f"{type(error).__name__}: {error}"
        self.failed.append(f"{name} failed at {action!r} and was switched off ({why}){unseen}; please report it")

    def stop(self) -> PhaseLog:
        """End the recording and return the log. Patched functions that are still called pass the call on from here."""
        if self._whole is None:
            self.mark(self._own if self.thread == _OFF else self.current)
            self._has_ended, self.thread = True, _OFF
            self._sampled = self._always = dict.fromkeys(self._sampled, ())
            self._listen(looks=False)
            callbacks = {self.phase(code): name for code, name in self._callbacks.items()}
            self._whole = self._log.end(self._start, tuple(self._labels), callbacks)
        return self._whole

    def hand_over(self) -> PhaseLog:
        """End the recording and return the log, which this keeps no longer. Cycles hold it until the next collection."""
        log = self.stop()
        self._whole = replace(log, codes=(), times=(), boundaries=())
        return log

    def boundaries(self, most: int) -> Iterator[Boundary]:
        """Yield the boundaries of the fit that goes on among so many of the log's first entries."""
        return self._log.boundaries(most, self._first)

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the log has taken so far: it grows while the fit runs."""
        return self._log.nbytes

    def __len__(self) -> int:
        """Return the number of entries of the log: marks and boundaries."""
        return len(self._log)
