"""All that a profile puts around a fit, by what it watches."""

from __future__ import annotations

from nbguard.core.fit.marks import Marks
from nbguard.fit.amp import AmpWatch
from nbguard.fit.fastai_loop import FastaiLoop
from nbguard.fit.finite import FiniteWatch
from nbguard.fit.gpu import GpuWatch
from nbguard.fit.loaders import LoaderWatch
from nbguard.fit.memory import MemoryWatch
from nbguard.fit.meters import Meter
from nbguard.fit.optimizers import OptimizerWatch
from nbguard.fit.options import FitOptions
from nbguard.fit.part import Part
from nbguard.fit.ranks import RankWatch
from nbguard.fit.recorder import Recorder
from nbguard.fit.subject import Subject
from nbguard.fit.switches import SwitchWatch
from nbguard.fit.syncs import SyncWatch
from nbguard.fit.torch_loop import TorchLoop


class Watch:
    """The parts around one fit. Those that have seen it are asked by `nbguard.fit.making`."""

    def __init__(self, options: FitOptions, recorder: Recorder, meter: Meter | None = None) -> None:
        self.recorder = recorder
        self.failed: list[str] = []
        self.loop = TorchLoop(recorder)
        self.fastai = FastaiLoop(recorder, self.loop)
        self.subject = Subject()
        self.loaders = LoaderWatch()
        self.gpu = GpuWatch()
        self.memory = MemoryWatch(options.memory, meter)
        self.amp = AmpWatch()
        self.optimizers = OptimizerWatch()
        self.syncs = SyncWatch()
        self.switches = SwitchWatch()
        self.ranks = RankWatch()
        self.finite = FiniteWatch(stop_on_nan=options.stop_on_nan)
        self._parts: tuple[Part, ...] = (
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

    def stop(self) -> Marks:
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
