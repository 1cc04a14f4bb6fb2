"""A subject's step, tried: runs from one state, what differs, what cures it, what hidden state there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nbguard.doctor.analysis.determinism import Cure, DeterminismFacts, HiddenState, OperationFact
from nbguard.doctor.analysis.deterministic import StepTimes
from nbguard.doctor.analysis.step_trace import StepDifference, StepEvent, first_difference
from nbguard.doctor.determinism.batch import TrialBatch
from nbguard.doctor.determinism.kept_state import KeptState, Place
from nbguard.doctor.determinism.operations import (
    OperationTrace,
    deterministic_mode,
    first_other,
    traced_operations,
    warned_operations,
)
from nbguard.doctor.determinism.step import StepRunner
from nbguard.doctor.subject import TrialSubject
from nbguard.errors import UndiagnosableError, in_one_line
from nbguard.scan.devices.generators import LibraryGenerators

_RUNS = 3
"""Runs of the step: two that race can agree by chance."""
_ENOUGH = 200_000_000
"""Nanoseconds of steps in which their times are known well enough: a step that takes long is timed once each way."""
_TRACES = 4
"""Traces of operations until two differ."""
_PLACES = 24
"""Places of hidden state that are tried one by one."""


def tried(subject: TrialSubject, batch: TrialBatch) -> DeterminismFacts:
    """Return what came of trying a step. The user's objects and all generators are as before.

    Raises:
        UndiagnosableError: the step cannot be run; the message has the model's own error.
    """
    with _Trial(subject, batch) as trial:
        return trial.facts()


def step_times(subject: TrialSubject, batch: TrialBatch) -> StepTimes:
    """Return how long a step takes as it is and in deterministic mode. The user's objects are as before.

    Raises:
        UndiagnosableError: the step cannot be run; the message has the model's own error.
    """
    with _Trial(subject, batch) as trial:
        return trial.times()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The runs of a step under one condition."""

    traces: tuple[list[StepEvent], ...]

    @property
    def difference(self) -> StepDifference | None:
        """Return the first difference between any of the runs and the first of them."""
        found = (first_difference(self.traces[0], other) for other in self.traces[1:])
        return next((difference for difference in found if difference is not None), None)


class _Trial:
    """Runs steps; when it ends all is put back."""

    def __init__(self, subject: TrialSubject, batch: TrialBatch) -> None:
        self._subject = subject
        self._model = subject.model
        fixed = [*self._model.parameters(), *self._model.buffers()]
        self._generators = LibraryGenerators()
        self._outside = KeptState(_roots(subject), fixed)
        self._runner = StepRunner(subject, batch)
        self._state: KeptState | None = None
        self._fixed = fixed

    def __enter__(self) -> _Trial:
        self._model.train()
        self._state = KeptState(_roots(self._subject), self._fixed)
        return self

    def __exit__(self, *_: object) -> None:
        self._outside.restore()
        self._generators.restore()

    @property
    def _kept(self) -> KeptState:
        assert self._state is not None  # noqa: S101 - inside of `with`
        return self._state

    def facts(self) -> DeterminismFacts:
        """Return what came of all runs."""
        known = self._known()  # first: what a first call makes (caches, plans) is not what is asked about
        plain = _Outcome(tuple(self._run_once() for _ in range(_RUNS)))
        difference = plain.difference
        cure, refused = self._cure() if difference is not None else (None, "")
        operation, is_pythons = self._operation() if difference is not None else (None, False)
        hidden = self._hidden(plain.traces[0]) if difference is None else ()
        step, deterministic_step = self._times(is_refused=bool(refused or known))
        suspects = [place.name for place in self._kept.changed()] + self._kept.opaque if is_pythons else []
        return DeterminismFacts(
            runs=_RUNS,
            tensors=len(plain.traces[0]),
            step=step,
            difference=difference,
            cure=cure,
            refused=refused,
            operation=operation,
            is_pythons=is_pythons,
            known=known,
            hidden=hidden,
            suspects=tuple(suspects),
            deterministic_step=deterministic_step,
            threads=torch.get_num_threads(),
            notes=tuple(self._notes()),
        )

    def times(self) -> StepTimes:
        """Return the times of a step."""
        known = self._known()
        plain, deterministic = self._times(is_refused=bool(known))
        return StepTimes(plain=plain, deterministic=deterministic, refused=tuple(sorted({fact.name for fact in known})))

    def _run_once(self, observe: Callable[[], Any] | None = None, *, restores: bool = True) -> list[StepEvent]:
        """Run the step from the state at the beginning; with `restores` False from the state that the last run left."""
        if restores:
            self._kept.restore()
        self._generators.restore()
        with _plain_errors(self._subject.name):
            return self._runner.run() if observe is None else self._runner.run(observe)

    def _cure(self) -> tuple[Cure, str]:
        """Return what makes the runs agree, and the operation that deterministic mode refuses."""
        refused = ""
        try:
            with deterministic_mode(warn_only=False):
                if _Outcome(tuple(self._run_once() for _ in range(_RUNS))).difference is None:
                    return "deterministic mode", ""
        except UndiagnosableError as error:
            name, is_refusal, _ = str(error.__cause__ or error).partition(" does not have a deterministic implementation")
            if not is_refusal:
                raise
            refused = name.split()[-1]
        if torch.get_num_threads() > 1:
            with _threads(1):
                if _Outcome(tuple(self._run_once() for _ in range(_RUNS))).difference is None:
                    return "one thread", refused
        return "none", refused

    def _operation(self) -> tuple[OperationFact | None, bool]:
        """Return the first operation that gave other bits, and whether other numbers of Python's went into it.

        What cannot be traced operation by operation is named by its module alone.
        """
        try:
            return self._traced()
        except UndiagnosableError:
            return None, False

    def _traced(self) -> tuple[OperationFact | None, bool]:
        first: OperationTrace | None = None
        for _ in range(_TRACES):
            trace = OperationTrace(self._runner.paths)
            self._run_once(partial(traced_operations, trace))
            if first is None:
                first = trace
                continue
            other = first_other(first.operations, trace.operations)
            if other is not None:
                return other
        return None, False

    def _known(self) -> tuple[OperationFact, ...]:
        """Return the operations of the step for which PyTorch has no deterministic implementation."""
        seen: list[OperationFact] = []
        self._run_once(lambda: warned_operations(self._runner.paths, seen))
        return tuple(seen)

    def _hidden(self, expected: list[StepEvent]) -> tuple[HiddenState, ...]:
        """Return the state that a step leaves changed and by which the next step differs: the last run has just left it."""
        changed = self._kept.changed()
        if not changed or first_difference(expected, self._run_once(restores=False)) is None:
            return ()
        return tuple(HiddenState(name=place.name, kind=place.kind) for place in self._guilty(changed, expected))

    def _guilty(self, changed: list[Place], expected: list[StepEvent]) -> Iterator[Place]:
        """Yield the places by which alone the next step differs; where it takes several together, yield them all."""
        alone = []
        for place in changed[:_PLACES]:
            self._run_once()
            self._kept.restore(but=place)
            if first_difference(expected, self._run_once(restores=False)) is not None:
                alone.append(place)
        yield from alone or changed[:_PLACES]

    def _times(self, *, is_refused: bool) -> tuple[int, int | None]:
        """Return nanoseconds of both passes, as they are and in deterministic mode: in turn, the least of each."""
        plain: list[int] = []
        deterministic: list[int] = []
        while len(plain) < _RUNS and sum(plain) + sum(deterministic) < _ENOUGH:
            plain.append(self._time())
            if not is_refused:
                with deterministic_mode(warn_only=False):
                    deterministic.append(self._time())
        return min(plain), min(deterministic, default=None)

    def _time(self) -> int:
        self._kept.restore()
        self._generators.restore()
        run = self._runner.timed()
        _wait()
        start = time.perf_counter_ns()
        run()
        _wait()
        return time.perf_counter_ns() - start

    def _notes(self) -> Iterator[str]:
        """Yield what the trial left out or could not look at."""
        if self._runner.optimizer_note:
            yield f"no step of the optimizer was tried: {self._runner.optimizer_note}"
        if self._subject.is_compiled:
            yield "compiled parts ran as they were written, without torch.compile"
        if self._subject.learn is not None:
            yield "callbacks were not run: the model, the loss, both passes and the optimizer were"
        if not self._kept.is_complete:
            yield "so much hangs on the model that not all of its state was looked at"
        if self._kept.opaque:
            names = ", ".join(sorted(set(self._kept.opaque))[:3])
            yield f"iterators cannot be put back: a step that asks {names} has moved it on"


def _roots(subject: TrialSubject) -> Iterable[tuple[str, Any]]:
    """Return what a step can change: the model with its hooks, and the loss."""
    return [("model", subject.model), ("loss_func", subject.loss)]


def _wait() -> None:
    """Wait for the work of a GPU, where one is in use: the trial's own, so that it can be timed."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _plain_errors(name: str) -> Iterator[None]:
    """Turn an error of the user's model into one line that names it."""
    try:
        yield
    except UndiagnosableError:
        raise
    except Exception as error:
        reason = in_one_line(error)
        raise UndiagnosableError(f"one step of {name} cannot be run: {reason}") from error
