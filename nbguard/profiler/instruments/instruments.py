"""All that a profile puts around a fit, by what it watches."""

from __future__ import annotations

from nbguard.profiler.analysis.time.phase_log import PhaseLog
from nbguard.profiler.distributed.ranks import RankWatch
from nbguard.profiler.instruments.health.amp import AmpWatch
from nbguard.profiler.instruments.health.gpu import GpuWatch
from nbguard.profiler.instruments.health.optimizers import OptimizerWatch
from nbguard.profiler.instruments.health.switches import SwitchWatch
from nbguard.profiler.instruments.health.syncs import SyncWatch
from nbguard.profiler.instruments.instrument import Instrument
from nbguard.profiler.instruments.loader.loaders import LoaderWatch
from nbguard.profiler.instruments.memory.counters import MemoryCounter
from nbguard.profiler.instruments.memory.memory import MemoryWatch
from nbguard.profiler.instruments.nonfinite.nonfinite import FiniteWatch
from nbguard.profiler.instruments.subject import Subject
from nbguard.profiler.options import FitOptions
from nbguard.profiler.record.fastai_loop import FastaiLoop
from nbguard.profiler.record.recorder import Recorder
from nbguard.profiler.record.torch_loop import TorchLoop


class Instruments:
    """The parts around one fit. Those that have seen it are asked by `nbguard.profiler.report_builder`."""

    def __init__(self, options: FitOptions, recorder: Recorder, counter: MemoryCounter | None = None) -> None:
        self.recorder = recorder
        self.failed: list[str] = []
        self.loop = TorchLoop(recorder)
        self.fastai = FastaiLoop(recorder, self.loop)
        self.subject = Subject()
        self.loaders = LoaderWatch()
        self.gpu = GpuWatch()
        self.memory = MemoryWatch(options.memory, counter)
        self.amp = AmpWatch()
        self.optimizers = OptimizerWatch()
        self.syncs = SyncWatch()
        self.switches = SwitchWatch()
        self.ranks = RankWatch()
        self.finite = FiniteWatch(stop_on_nan=options.stop_on_nan)
        self._parts: tuple[Instrument, ...] = (
            self.subject,
            self.loaders,
            self.gpu,
            self.memory,
            self.amp,
            self.optimizers,
            self.syncs,
            self.switches,
            self.ranks,
            self.finite,  # last: at an event it may end the fit
        )

    def start(self) -> None:
        """Put everything around what runs from here on."""
        for part in self._parts:
            self._try("start", part, self.recorder)
        for front in (self.loop, self.fastai):
            self._try("start", front)

    def stop(self) -> PhaseLog:
        """Take everything down and return the log."""
        marks = self.recorder.stop()
        for each in (self.fastai, self.loop, *reversed(self._parts)):
            self._try("stop", each)
        return marks

    def _try(self, what: str, part: object, *args: object) -> None:
        """Have a part start or stop; one that fails is named in the report and costs the fit nothing."""
        try:
            getattr(part, what)(*args)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the user's fit
            self.failed.append(f"{type(part).__name__} could not {what} ({type(error).__name__}: {error}): please report it")
