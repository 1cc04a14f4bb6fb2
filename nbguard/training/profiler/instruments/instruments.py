"""All instruments that a profile puts around a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from nbguard.memory.core.facts import Unavailable
from nbguard.memory.scan.devices.host import usable_cores
from nbguard.training.profiler import checks as fit_checks
from nbguard.training.profiler.analysis.nonfinite import FiniteFacts
from nbguard.training.profiler.analysis.observations import FitObservations, OwnTime, SubjectFacts
from nbguard.training.profiler.analysis.report import Ending
from nbguard.training.profiler.analysis.time.gpu import GpuObservations
from nbguard.training.profiler.analysis.time.phase_log import LogPosition, PhaseLog
from nbguard.training.profiler.analysis.time.stacks import StackSamples
from nbguard.training.profiler.checks.check import Instrument
from nbguard.training.profiler.distributed.ranks import RankWatch
from nbguard.training.profiler.instruments.gpu import GpuWatch
from nbguard.training.profiler.instruments.loader.watch import LoaderWatch
from nbguard.training.profiler.instruments.memory.counters import MemoryCounter
from nbguard.training.profiler.instruments.memory.timeline import MemoryWatch
from nbguard.training.profiler.instruments.operators import OperatorWatch
from nbguard.training.profiler.instruments.run_watch import RunWatch
from nbguard.training.profiler.instruments.stack_sampler import OverheadWatch, StackSampler
from nbguard.training.profiler.instruments.subject import Subject
from nbguard.training.profiler.nonfinite.nonfinite import FiniteWatch
from nbguard.training.profiler.options import FitOptions
from nbguard.training.profiler.record.learner_loop import LearnerLoop
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop

_T = TypeVar("_T")
_PER_FIT = ("nbguard.training.profiler.instruments.", "nbguard.training.profiler.checks.")
"""Where the instruments of one fit are."""


class FitInstruments:
    """The instruments that watch one fit, each its own aspect of it."""

    def __init__(self, options: FitOptions, counter: MemoryCounter | None, begun: Any = None) -> None:
        """`begun`: the iterator of the fit's first batch, where that has been recorded already."""
        self.loaders: LoaderWatch = LoaderWatch()
        self._subject = Subject(begun)
        self._gpu = GpuWatch()
        self._memory = MemoryWatch(options.memory, counter)
        self._checks = tuple(check() for check in fit_checks.CHECKS)
        self._stacks = StackSampler()
        self._overhead = OverheadWatch()
        self._finite = FiniteWatch(stop_on_nan=options.stop_on_nan)
        self._operators = OperatorWatch(
            is_wanted=options.ops, has_spans=bool(options.trace or options.save), after_memory=options.memory
        )
        self._run = RunWatch(self.loaders.loader_of, is_wanted=bool(options.logs), has_code=options.code)
        self.mistakes: list[str] = []
        self._parts: tuple[Instrument[Any], ...] = (
            self._run,  # first: before anything else looks at the fit
            self._subject,
            self.loaders,
            self._gpu,
            self._memory,
            *self._checks,
            self._stacks,
            self._overhead,
            self._operators,
            self._finite,  # last: at an event it may end the fit
        )

    def start(self, recorder: Recorder) -> None:
        """Put the instruments around the code that runs from here on."""
        for part in self._parts:
            self.attempt("start", part, recorder)

    def ended(self, error: BaseException | None) -> None:
        """Say that the fit is over, with the exception that ended it or None."""
        self.attempt("ended", self._finite, error)

    def stop(self) -> None:
        """Take them down."""
        for part in reversed(self._parts):
            self.attempt("stop", part)
            self.restore(part)  # also where it could not stop

    def restore(self, part: object) -> None:
        """Take all patches of a part out."""
        for patches in vars(part).values():
            if type(patches) is Patches:
                self.attempt("restore", patches)

    def observe(self) -> FitObservations:
        """Return the observations of the instruments, after `stop`; figures that they do not see are still missing in it."""
        return FitObservations(
            log=_NO_LOG,
            subject=self._ask(self._subject, SubjectFacts()),
            loaders=self._ask(self.loaders, ()),
            gpu=self._ask(self._gpu, GpuObservations()),
            memory=self._ask(self._memory, Unavailable("memory", "it could not be followed")),
            checks={check.name: self._ask(check, check.facts()) for check in self._checks},
            finite=self._ask(self._finite, FiniteFacts()),
            stacks=self._ask(self._stacks, StackSamples()),
            operators=self._ask(self._operators, None),
            mark_cost=self._ask(self._overhead, 0),
            record=self._ask(self._run, None),
        )

    def _ask(self, part: Instrument[_T], otherwise: _T) -> _T:
        """Return the observations of an instrument; `otherwise` if it fails."""
        try:
            return part.observe()
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the rest of the report
            self._note_mistake(part, "observe", error)
            return otherwise

    def attempt(self, action: str, part: object, *arguments: object) -> Any:
        """Start or stop a part, or ask it; one that fails is named in the report and costs the fit nothing: None then."""
        try:
            return getattr(part, action)(*arguments)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the user's fit
            self._note_mistake(part, action, error)
            return None

    def _note_mistake(self, part: object, action: str, error: Exception) -> None:
        name = type(part).__name__
        watches = getattr(type(part), "watches", "")
        unseen = f"{watches} not seen; " if watches else ""
        self.mistakes.append(f"{name} could not {action} ({type(error).__name__}: {error}): {unseen}please report it")


def _known(ask: Callable[[], int], otherwise: int) -> int:
    """Return a figure of the machine; `otherwise` where it cannot be had."""
    try:
        return ask()
    except Exception:  # noqa: BLE001 - a mistake of ours must not cost the rest of the report
        return otherwise


_NO_LOG = PhaseLog(start=0, codes=(), times=(), labels=())


class Instruments:
    """Everything around the fits of one profile: the patches that write their log, and for each fit its instruments."""

    def __init__(self, options: FitOptions, recorder: Recorder, counter: MemoryCounter | None = None) -> None:
        self.recorder = recorder
        self.loop: TorchLoop = TorchLoop(recorder, self._begin_fit)
        self.learners: LearnerLoop = LearnerLoop(recorder, self.loop)
        self.ranks: RankWatch = RankWatch(check_ranks=options.check_ranks)
        self._options = options
        self._counter = counter
        self._fit = FitInstruments(options, counter)
        self._earlier: list[FitObservations] = []  # of fits that are over, without their logs
        self._places: list[LogPosition] = []  # where the later fits begin in the log

    @property
    def loaders(self) -> LoaderWatch:
        """Return the watch over the loaders of the latest fit."""
        return self._fit.loaders

    def start(self) -> None:
        """Put all instruments around the code that runs from here on."""
        self._fit.attempt("start", self.ranks, self.recorder)
        for front in (self.loop, self.learners):
            self._fit.attempt("start", front)
        self._fit.start(self.recorder)  # last: its patches go before those of the fronts, when another fit begins
        self._fit.attempt("has_begun", self.recorder)

    def ended(self, error: BaseException | None) -> None:
        """Say that the fit is over, with the exception that ended it or None, while everything is still up."""
        self._fit.attempt("ended", self.ranks, error)
        self._fit.ended(error)

    def stop(self) -> PhaseLog:
        """Take everything down and return the log of all fits. Nothing that fails here keeps the rest from being taken down."""
        log = self._fit.attempt("hand_over", self.recorder) or _NO_LOG
        self._fit.stop()
        for part in (self.learners, self.loop, self.ranks):
            self._fit.attempt("stop", part)
            self._fit.restore(part)
        return log

    def _begin_fit(self, at: LogPosition, iterator: Any) -> None:
        """Close the observations of the fit that is over, and watch the one that began `at` a place of the log.

        `iterator`: the one over its loader, if that was asked already.
        """
        before, self._fit = self._fit, FitInstruments(self._options, self._counter, iterator)
        loader = None if iterator is None else before.loaders.hand_over(iterator)
        before.stop()
        self._earlier.append(replace(before.observe(), mistakes=tuple(before.mistakes)))
        self._places.append(at)
        self.recorder.begin_fit(at, self._stays)
        self._fit.start(self.recorder)
        if loader is not None:
            self._fit.loaders.take_over(iterator, loader)
        self.loop.begins_fit()
        if iterator is not None:
            self.recorder.emit("loader", iterator)

    def _stays(self, act: Callable[..., None]) -> bool:
        """Say whether a subscriber is not one of a single fit's instruments."""
        part = getattr(act, "__self__", None)
        return not type(part).__module__.startswith(_PER_FIT)

    def observe(self, log: PhaseLog, *, title: str, ending: Ending, error: str) -> FitObservations:
        """Return the observations of the last fit, with those of earlier ones in it; called after `stop`.

        The messages of other ranks are not in it yet: they are exchanged once this rank's own fit is analysed.
        """
        *logs, last = self._fit.attempt("divided", log, self._places) or [*(_NO_LOG for _ in self._earlier), log]
        cores = _known(usable_cores, 1)
        callbacks = self._fit.attempt("observe", self.learners) or ()
        earlier = tuple(
            replace(observed, title=title, log=part, cores=cores, library_callbacks=callbacks)
            for observed, part in zip(self._earlier, logs, strict=True)
        )
        observed = self._fit.observe()
        return replace(
            observed,
            title=title,
            ending=ending,
            error=error,
            log=last,
            cores=cores,
            library_callbacks=callbacks,
            own=OwnTime(events=self.recorder.own_time),
            has_other_threads=self.recorder.elsewhere,
            mistakes=(*self._fit.mistakes, *self.recorder.failed),  # last: an instrument that fails here is among them
            earlier=earlier,
        )
