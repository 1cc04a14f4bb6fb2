"""A trial of a subject's step: runs from one state, their differences, the cure, and hidden state."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from nbguard.errors import UndiagnosableError, in_one_line
from nbguard.memory.scan.devices.generators import LibraryGenerators
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.training.doctor.analysis.step_trace import (
    Cure,
    DeterminismFacts,
    HiddenState,
    Mode,
    OperationFact,
    StepDifference,
    StepEvent,
    StepTimes,
    first_difference,
)
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.determinism.kept_state import KeptState, Place
from nbguard.training.doctor.determinism.operations import (
    OperationTrace,
    algorithms,
    first_other,
    mode_now,
    traced_operations,
    unrefused,
    warned_operations,
)
from nbguard.training.doctor.determinism.seeds import is_seeded
from nbguard.training.doctor.determinism.step import StepRunner
from nbguard.training.doctor.subject import TrialSubject

_RUNS = 3
"""Runs of the step: two that race can agree by chance."""
_PAIRS = 60
"""Pairs of steps that are timed at most."""
_QUICKLY, _WELL = 200_000_000, 3_000_000_000
"""Nanoseconds for timing steps among other checks, and where their times are the question."""
_TRACES = 4
"""Traces of operations until two differ."""
_PLACES = 24
"""Places of hidden state that are tried one by one."""


def tried(subject: TrialSubject, batch: TrialBatch) -> DeterminismFacts:
    """Return the results of trying a step. The user's objects and all generators are as before.

    Raises:
        UndiagnosableError: the step cannot be run; the message has the model's own error.
    """
    with _Trial(subject, batch) as trial:
        return trial.facts()


def step_times(subject: TrialSubject, batch: TrialBatch, mode: Mode = "on") -> StepTimes:
    """Return how long a step takes without and in a deterministic mode. The user's objects are as before.

    Raises:
        UndiagnosableError: the step cannot be run; the message has the model's own error.
    """
    with _Trial(subject, batch) as trial:
        return trial.times(mode)


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
        """Return the results of all runs."""
        mode = mode_now()
        with unrefused():
            return self._facts(mode)

    def _facts(self, mode: Mode) -> DeterminismFacts:
        known = self._known()  # first, as the caches and plans of a first call are not the question
        plain = _Outcome(tuple(self._run_once() for _ in range(_RUNS)))
        difference = plain.difference
        cure, refused = self._cure() if difference is not None else (None, "")
        operation, is_pythons = self._operation() if difference is not None else (None, False)
        hidden = self._hidden(plain.traces[0]) if difference is None else ()
        lacking = {fact.name for fact in known if not fact.is_default} | ({refused} if refused else set())
        times = self._times("on", tuple(sorted(lacking)), _QUICKLY)
        suspects = [place.name for place in self._kept.changed()] + self._kept.opaque if is_pythons else []
        return DeterminismFacts(
            runs=_RUNS,
            tensors=len(plain.traces[0]),
            times=times,
            mode=mode,
            difference=difference,
            cure=cure,
            refused=refused,
            operation=operation,
            is_pythons=is_pythons,
            known=known,
            hidden=hidden,
            suspects=tuple(suspects),
            threads=torch.get_num_threads(),
            notes=tuple(self._notes()),
        )

    def times(self, mode: Mode) -> StepTimes:
        """Return the times of a step, without and in a deterministic mode."""
        with unrefused():
            known = () if mode == "warn only" else self._known()
            return self._times(mode, tuple(sorted({fact.name for fact in known if not fact.is_default})), _WELL)

    def _run_once(self, observe: Callable[[], Any] | None = None, *, restores: bool = True) -> list[StepEvent]:
        """Run the step from the state at the beginning; with `restores` False from the state that the last run left."""
        if restores:
            self._kept.restore()
        self._generators.restore()
        with _plain_errors(self._subject.name):
            return self._runner.run() if observe is None else self._runner.run(observe)

    def _cure(self) -> tuple[Cure, str]:
        """Return the switch that makes the runs agree, and the operation that deterministic mode refuses."""
        refused = ""
        try:
            with algorithms("on"):
                if _Outcome(tuple(self._run_once() for _ in range(_RUNS))).difference is None:
                    return "deterministic mode", ""
        except UndiagnosableError as error:
            refused = _refused_operation(error)
            if not refused:
                raise
        if torch.get_num_threads() > 1:
            with _threads(1):
                if _Outcome(tuple(self._run_once() for _ in range(_RUNS))).difference is None:
                    return "one thread", refused
        return "none", refused

    def _operation(self) -> tuple[OperationFact | None, bool]:
        """Return the first operation that gave other bits, and whether other numbers of Python's went into it.

        A step that cannot be traced operation by operation is named by its module alone.
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
        """Return the operations of the step that have no deterministic implementation in PyTorch."""
        seen: list[OperationFact] = []
        self._run_once(lambda: warned_operations(self._runner.paths, seen))
        return tuple(replace(fact, layers=self._layers(fact)) for fact in seen)

    def _layers(self, fact: OperationFact) -> tuple[str, ...]:
        """Return the paths of the layers that call an operation of the backward pass, where no module is known to run."""
        if fact.module or fact.way is None or not fact.way.layer:
            return ()
        modules = self._model.named_modules()
        return tuple(path for path, module in modules if name_of(type(module)) == fact.way.layer)

    def _hidden(self, expected: list[StepEvent]) -> tuple[HiddenState, ...]:
        """Return the state that a step leaves changed so that the next step differs, as the last run just left it."""
        seeded = {name for name, generator in self._kept.generators if is_seeded(generator)}
        for place in self._kept.places:
            if place.name in seeded:
                place.restore()
        changed = self._kept.changed()
        if not changed or first_difference(expected, self._run_once(restores=False)) is None:
            return ()
        return tuple(HiddenState(name=place.name, kind=place.kind) for place in self._guilty(changed, expected))

    def _guilty(self, changed: list[Place], expected: list[StepEvent]) -> Iterator[Place]:
        """Yield the places that alone make the next step differ, or all of them where it takes several together."""
        alone = []
        for place in changed[:_PLACES]:
            self._run_once()
            self._kept.restore(but=place)
            if first_difference(expected, self._run_once(restores=False)) is not None:
                alone.append(place)
        yield from alone or changed[:_PLACES]

    def _times(self, mode: Mode, refused: tuple[str, ...], budget: int) -> StepTimes:
        """Return the times of both passes in pairs, one step without and one in the mode, for `budget` nanoseconds.

        The mode that is set is left out of it, and so is the order in a pair: each kind goes first in every other one.
        """
        modes: tuple[Mode, ...] = ("off",) if refused else ("off", mode)
        times: dict[Mode, list[int]] = {each: [] for each in modes}
        first = self._time("off")  # results of a first step in a mode, such as cuDNN's plans, are no part of a step
        try:
            if not refused:
                self._time(mode)
        except UndiagnosableError as error:
            operation = _refused_operation(error)
            if not operation:
                raise
            return StepTimes.of([first], (), (operation,))
        ends = time.perf_counter_ns() + budget
        for number in range(_PAIRS):
            for each in modes if number % 2 else reversed(modes):
                times[each].append(self._time(each))
            if time.perf_counter_ns() > ends:
                break
        return StepTimes.of(times["off"], times.get(mode, ()), refused)

    def _time(self, mode: Mode) -> int:
        """Return nanoseconds of both passes in a mode, without the collector's."""
        self._kept.restore()
        self._generators.restore()
        run = self._runner.timed()
        with algorithms(mode), _uncollected(), _plain_errors(self._subject.name):
            _wait()
            start = time.perf_counter_ns()
            run()
            _wait()
            return time.perf_counter_ns() - start

    def _notes(self) -> Iterator[str]:
        """Yield the parts that the trial left out or could not examine."""
        if self._runner.optimizer_note:
            yield f"no step of the optimizer was tried: {self._runner.optimizer_note}"
        if self._subject.is_compiled:
            yield "compiled parts ran without torch.compile"
        if self._subject.learn is not None:
            yield "the model, the loss, both passes and the optimizer were run, but not the callbacks"
        if not self._kept.is_complete:
            yield "the model holds too much state to check all of it"
        if self._kept.opaque:
            names = ", ".join(sorted(set(self._kept.opaque))[:3])
            yield f"iterators cannot be reset, so a step that calls {names} moved it forward"


def _refused_operation(error: UndiagnosableError) -> str:
    """Return the operation that deterministic mode has refused to run; empty if a step failed of something else."""
    name, is_refusal, _ = str(error.__cause__ or error).partition(" does not have a deterministic implementation")
    return name.split()[-1] if is_refusal else ""


def _roots(subject: TrialSubject) -> Iterable[tuple[str, Any]]:
    """Return the objects that a step can change: the model with its hooks, and the loss."""
    return [("model", subject.model), ("loss_func", subject.loss)]


def _wait() -> None:
    """Wait for the work of a GPU, where one is in use: the trial's own, so that it can be timed."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's cyclic collector from running."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
