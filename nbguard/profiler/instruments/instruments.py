"""All instruments that a profile puts around a fit."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from nbguard.memory.facts import Unavailable
from nbguard.profiler.analysis.health.amp import AmpFacts
from nbguard.profiler.analysis.health.nonfinite import FiniteFacts
from nbguard.profiler.analysis.health.optimizers import OptimizersFacts
from nbguard.profiler.analysis.health.switches import SwitchFacts
from nbguard.profiler.analysis.health.syncs import SyncFacts
from nbguard.profiler.analysis.observations import FitObservations, SubjectFacts
from nbguard.profiler.analysis.report import Ending
from nbguard.profiler.analysis.time.gpu import GpuObservations
from nbguard.profiler.analysis.time.phase_log import PhaseLog
from nbguard.profiler.analysis.time.stacks import StackSamples
from nbguard.profiler.distributed.ranks import RankWatch
from nbguard.profiler.instruments.health.amp import AmpWatch
from nbguard.profiler.instruments.health.gpu import GpuWatch
from nbguard.profiler.instruments.health.optimizers import OptimizerWatch
from nbguard.profiler.instruments.health.switches import SwitchWatch
from nbguard.profiler.instruments.health.syncs import SyncWatch
from nbguard.profiler.instruments.loader.loader_facts import usable_cores
from nbguard.profiler.instruments.loader.loaders import LoaderWatch
from nbguard.profiler.instruments.memory.counters import MemoryCounter
from nbguard.profiler.instruments.memory.memory import MemoryWatch
from nbguard.profiler.instruments.nonfinite.nonfinite import FiniteWatch
from nbguard.profiler.instruments.stack_sampler import StackSampler
from nbguard.profiler.instruments.subject import Subject
from nbguard.profiler.options import FitOptions
from nbguard.profiler.record.fastai_loop import FastaiLoop
from nbguard.profiler.record.overhead import cost_of_a_mark
from nbguard.profiler.record.recorder import Recorder
from nbguard.profiler.record.torch_loop import TorchLoop

_T = TypeVar("_T")
Observed = TypeVar("Observed", covariant=True)


class Instrument(Protocol[Observed]):
    """Watches one thing during a fit. Its observations are a part of `FitObservations`: frozen, without live objects."""

    watches: str
    """The thing in plural, named in the report where the instrument fails; of the class."""

    def start(self, recorder: Recorder) -> None:
        """Subscribe and patch, on the thread of the fit. An exception switches it off, not the fit."""

    def stop(self) -> None:
        """Take everything down again; called once, however the fit has ended, and before anything is shown."""

    def observe(self) -> Observed:
        """Return its observations; called after `stop`."""


class Instruments:
    """The instruments around one fit, and the patches that write its log."""

    def __init__(self, options: FitOptions, recorder: Recorder, counter: MemoryCounter | None = None) -> None:
        self.recorder = recorder
        self.loop = TorchLoop(recorder)
        self.fastai = FastaiLoop(recorder, self.loop)
        self.loaders = LoaderWatch()
        self.ranks = RankWatch()
        self._subject = Subject()
        self._gpu = GpuWatch()
        self._memory = MemoryWatch(options.memory, counter)
        self._amp = AmpWatch()
        self._optimizers = OptimizerWatch()
        self._syncs = SyncWatch()
        self._switches = SwitchWatch()
        self._stacks = StackSampler()
        self._finite = FiniteWatch(stop_on_nan=options.stop_on_nan)
        self._mistakes: list[str] = []
        self._instruments: tuple[Instrument[Any], ...] = (
            self._subject,
            self.loaders,
            self._gpu,
            self._memory,
            self._amp,
            self._optimizers,
            self._syncs,
            self._switches,
            self.ranks,
            self._stacks,
            self._finite,  # last: at an event it may end the fit
        )

    def start(self) -> None:
        """Put all instruments around the code that runs from here on."""
        for instrument in self._instruments:
            self._try("start", instrument, self.recorder)
        for front in (self.loop, self.fastai):
            self._try("start", front)

    def stop(self) -> PhaseLog:
        """Take everything down and return the log."""
        log = self.recorder.stop()
        for part in (self.fastai, self.loop, *reversed(self._instruments)):
            self._try("stop", part)
        return log

    def observe(self, log: PhaseLog, *, title: str, ending: Ending, error: str) -> FitObservations:
        """Return the observations of all instruments, of a fit that ended in this way; called after `stop`.

        The messages of other ranks are not in it yet: they are exchanged once this rank's own fit is analysed.
        """
        return FitObservations(
            title=title,
            ending=ending,
            error=error,
            log=log,
            mark_cost=cost_of_a_mark(),
            cores=usable_cores(),
            subject=self._ask(self._subject, SubjectFacts()),
            loaders=self._ask(self.loaders, ()),
            gpu=self._ask(self._gpu, GpuObservations()),
            memory=self._ask(self._memory, Unavailable("memory", "it could not be followed")),
            amp=self._ask(self._amp, AmpFacts()),
            optimizers=self._ask(self._optimizers, OptimizersFacts()),
            syncs=self._ask(self._syncs, SyncFacts()),
            switches=self._ask(self._switches, SwitchFacts()),
            finite=self._ask(self._finite, FiniteFacts()),
            stacks=self._ask(self._stacks, StackSamples()),
            library_callbacks=self.fastai.observe(),
            has_other_threads=self.recorder.elsewhere,
            mistakes=(*self._mistakes, *self.recorder.failed),  # last: an instrument that fails here is among them
        )

    def _ask(self, instrument: Instrument[_T], otherwise: _T) -> _T:
        """Return the observations of an instrument; `otherwise` if it fails."""
        try:
            return instrument.observe()
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the rest of the report
            self._note_mistake(instrument, "observe", error)
            return otherwise

    def _try(self, action: str, part: object, *arguments: object) -> None:
        """Start or stop a part; one that fails is named in the report and costs the fit nothing."""
        try:
            getattr(part, action)(*arguments)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the user's fit
            self._note_mistake(part, action, error)

    def _note_mistake(self, part: object, action: str, error: Exception) -> None:
        name = type(part).__name__
        watches = getattr(type(part), "watches", "")
        unseen = f"{watches} not seen; " if watches else ""
        self._mistakes.append(f"{name} could not {action} ({type(error).__name__}: {error}): {unseen}please report it")
