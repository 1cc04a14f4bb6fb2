"""The bounds between the fits of one recording, as each is reported by itself."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any

from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.training.profiler.analysis.nonfinite import BatchPosition
from nbguard.training.profiler.analysis.time.phase_log import Boundary, LogPosition
from nbguard.training.profiler.record.recorder import BY_HAND, Recorder

# --- The position in a fit, that is, the batch and its loop, also where an evaluation runs inside of one.


def position_of(boundaries: Iterable[Boundary], ahead: Container[int] = (), *, has_loss: bool = False) -> BatchPosition:
    """Return the position of a fit after these boundaries.

    `ahead`: loops whose batches are asked for before their turn, as some libraries do: there the losses are counted.
    `has_loss`: a loss follows them that is no boundary, as no backward pass was made of it.
    """
    open_: list[int] = []
    losses: Counter[int] = Counter()
    batches: Counter[int] = Counter()
    epochs: dict[int, int] = {}
    last = [Boundary(0, "loss", 0)] if has_loss else []
    for boundary in (*boundaries, *last):
        if boundary.kind == "batch":
            del open_[open_.index(boundary.loop) if boundary.loop in open_ else len(open_) :]  # and loops inside that were left
            open_.append(boundary.loop)
            batches[boundary.loop] += 1
        elif boundary.kind == "end" and open_ and open_[-1] not in ahead:  # else its last batches are still to come
            batches[open_.pop()] -= 1
        elif boundary.kind == "fit":
            epochs.clear()
        elif boundary.kind == "loss":
            loop = open_[-1] if open_ else BY_HAND
            losses[loop] += 1
            epochs.setdefault(loop, len(epochs) + 1)
            batches[BY_HAND] += loop == BY_HAND
    loop = open_[-1] if open_ else BY_HAND
    return BatchPosition(losses[loop] if loop in ahead else batches[loop], epochs.get(loop, 0) if loop != BY_HAND else 0)


class Body:
    """The code that runs on one batch: from when it is asked for until the next one of its loop is."""

    __slots__ = ("calls", "is_trained", "loop")

    def __init__(self, loop: int) -> None:
        self.loop: int = loop
        self.is_trained: bool = False
        self.calls: dict[Any, Any] = {}  # whatever a part counts per batch


class Bodies:
    """Follows the sampled batches. `closed` is called with each one that ended."""

    watches = "hidden synchronisations"

    def __init__(self, recorder: Recorder, closed: Callable[[Body], None]) -> None:
        self.body: Body | None = None  # whose code runs now; None outside of loops
        self._recorder = weakref.proxy(recorder)
        self._closed = closed
        self._open: list[Body] = []
        self.begin()

    def begin(self) -> None:
        """Follow the batches from the next one on."""
        self._recorder.subscribe("batch", self._ask)
        self._recorder.subscribe("end", self._none_left)
        self._recorder.subscribe("loss", self._loss)

    def rest(self) -> None:
        """Close the batches that are open, and follow none until `begin`."""
        self._recorder.unsubscribe("batch", self._ask)
        self._recorder.unsubscribe("end", self._none_left)
        self._recorder.unsubscribe("loss", self._loss)
        self.end()

    def end(self) -> None:
        """Close the batches that are still open: the recording has ended."""
        while self._open:
            self._close()

    def _close(self) -> None:
        self.body = None
        self._closed(self._open.pop())

    def _begin(self, loop: int) -> Body:
        body = self.body = Body(loop)
        self._open.append(body)
        return body

    def _ask(self, _: int) -> None:
        loop = self._recorder.loop
        if any(body.loop == loop for body in self._open):
            while self._open[-1].loop != loop:  # a loop inside that was left before its end
                self._close()
            self._close()
        self._begin(loop)

    def _none_left(self) -> None:
        """There is no such batch as the one that was asked for."""
        if self._open and self._open[-1].loop == self._recorder.loop:
            self._open.pop()
        self.body = self._open[-1] if self._open else None

    def _loss(self, _: Any) -> None:
        body = self.body
        if body is None or (body.loop == BY_HAND and body.is_trained):
            if body is not None:
                self._close()
            body = self._begin(BY_HAND)
        body.is_trained = True


_MOST = 8
"""Fits that are told apart; the later ones are a part of the last."""
_SHORT = 32
"""Losses until a fit without a loader may make another optimizer, unless it makes them as it goes (meta-learning)."""

Begins = Callable[[LogPosition, Any], None]
"""Is called once another fit begins: with the place where, and the iterator over its loader, None if that comes later."""


class FitBounds:
    """Sees where another fit begins: of another Learner or other loaders, or a loop that trains other models.

    A loop shows its kind at its first loss; it began where its iterator was asked first or, if it asks no loader, where
    its optimizer was made. While an earlier loop may go on (two that take turns, one inside the other) there is no bound
    between them. Everything is held weakly.
    """

    watches = "bounds between fits"

    def __init__(self, recorder: Recorder, begins: Begins) -> None:
        self.depth = 0  # Learners' fits that go on, one inside the other
        self._recorder = recorder
        self._begins = begins
        self._fits = 1
        self._has_trained = False
        self._losses = 0  # before this fit
        self._makes_optimizers = False  # as it goes
        self._learner: tuple[weakref.ref[Any], int] | None = None  # of this fit, and the id of its loaders
        self._models: dict[int, weakref.ref[Any]] = {}  # that this fit trains
        self._called: dict[int, weakref.ref[Any]] = {}  # since the latest loop may have begun
        self._iterator: weakref.ref[Any] | None = None  # the one that it asks
        self._began = 0  # entries of the log before that loop
        self._loops: dict[int, weakref.ref[Any]] = {}  # iterators that this fit trains with and that have batches left

    def loader(self, iterator: Any) -> None:
        """Note an iterator that is asked for the first time."""
        self._recorder.has_new_loop = True
        self._iterator, self._began = weakref.ref(iterator), len(self._recorder)
        self._called.clear()

    def optimizer(self) -> None:
        """Note that an optimizer was made: a loop that asks no loader may begin here."""
        recorder = self._recorder
        asks = self._iterator is not None and self._iterator() is not None and recorder.has_new_loop
        if self.depth or asks or self._goes_on():
            return
        if self._has_trained and recorder.loop == BY_HAND and recorder.losses < self._losses + _SHORT:
            self._makes_optimizers = True
        if not self._makes_optimizers:
            recorder.has_new_loop = True
            self._iterator, self._began = None, len(recorder)
            self._called.clear()

    def asked_again(self, number: int) -> None:
        """Note that the latest iterator, of this number, is asked for more: ahead, if nothing was done with the first batch."""
        if not self._called:
            self._recorder.ahead.add(number)

    def model(self, module: Any) -> None:
        """Note a module that is about to be called."""
        self._called[id(module)] = weakref.ref(module)

    def learner(self, learner: Any) -> None:
        """Note a Learner whose fit begins: a fit of its own, unless it goes on in another's."""
        if self.depth:
            return
        loaders = id(attribute_of(learner, "dls"))
        known, self._learner = self._learner, (weakref.ref(learner), loaders)
        if self._has_trained and not self._goes_on() and (known is None or known[0]() is not learner or known[1] != loaders):
            self._begin(len(self._recorder), None)

    def ended(self, number: int) -> None:
        """Note that an iterator had no batch left."""
        self._loops.pop(number, None)

    def trains(self) -> None:
        """Note that there is a loss to train on, the first one since a loop may have begun."""
        self._recorder.has_new_loop = False
        others = all(model() is None or key not in self._called for key, model in self._models.items())
        iterator = None if self._iterator is None else self._iterator()
        if self._has_trained and not self.depth and self._called and others and not self._goes_on():
            self._begin(self._began, iterator)
        self._has_trained = True
        self._models |= self._called
        if iterator is not None:
            self._loops[self._recorder.loop] = weakref.ref(iterator)

    def _goes_on(self) -> bool:
        """Say whether a loop that trained may go on: its iterator is there and had batches left."""
        return any(iterator() is not None for iterator in self._loops.values())

    def _begin(self, entries: int, iterator: Any) -> None:
        if self._fits < _MOST:
            self._fits += 1
            self._models.clear()
            self._has_trained = self._makes_optimizers = False
            self._losses = self._recorder.losses
            self._begins(self._recorder.position(entries), iterator)
