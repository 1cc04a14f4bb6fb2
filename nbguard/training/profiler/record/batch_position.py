"""The position in a fit, that is, the batch and its loop, also where an evaluation runs inside of one."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any

from nbguard.training.profiler.analysis.health.nonfinite import BatchPosition
from nbguard.training.profiler.analysis.time.phase_log import Boundary
from nbguard.training.profiler.record.recorder import BY_HAND, Recorder


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
        self.loop = loop
        self.is_trained = False
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
