"""All instruments that a profile puts around a fit."""

from __future__ import annotations

import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from nbguard.memory.cleanup.apply.interrupts import postponed
from nbguard.memory.core.facts import Unavailable
from nbguard.memory.scan.devices.host import usable_cores
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of
from nbguard.training.profiler import checks as fit_checks
from nbguard.training.profiler.analysis.nonfinite import FiniteFacts
from nbguard.training.profiler.analysis.observations import LEARNERS, FitObservations, OwnTime, SubjectFacts
from nbguard.training.profiler.analysis.report import Ending
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.gpu import GpuMark, GpuObservations
from nbguard.training.profiler.analysis.time.phase_log import LogPosition, PhaseLog
from nbguard.training.profiler.analysis.time.stacks import StackSamples
from nbguard.training.profiler.checks.check import Instrument
from nbguard.training.profiler.instruments.loader_watch import LoaderWatch
from nbguard.training.profiler.instruments.memory_counters import MemoryCounter, device_of
from nbguard.training.profiler.instruments.operators import OperatorWatch
from nbguard.training.profiler.instruments.rank_watch import RankWatch
from nbguard.training.profiler.instruments.stack_sampler import OverheadWatch, StackSampler
from nbguard.training.profiler.instruments.timeline import MemoryWatch
from nbguard.training.profiler.nonfinite.nonfinite import FiniteWatch
from nbguard.training.profiler.options import FitOptions
from nbguard.training.profiler.record.learner_loop import LearnerLoop
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import Event, Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop
from nbguard.training.runs.analysis.record import RunRecord

# --- The record of a run's parts, collected when its fit begins, before anything is drawn or changed by it.


class RunWatch:
    """Collects one record, where it is asked for, at the beginning of a fit.

    Of a loop that is no Learner's when a model is first called; the optimizer's settings follow when that first steps.
    """

    watches = "the record of the run"

    def __init__(self, loader_of: Callable[[Any], Any], *, is_wanted: bool, has_code: bool) -> None:
        """`loader_of`: returns the loader of an iterator, None where it is not known. `has_code`: the record has cells."""
        self._is_wanted = is_wanted
        self._has_code = has_code
        self._loader_of = loader_of
        self._iterator: weakref.ref[Any] | None = None
        self._record: RunRecord | None = None
        self._has_optimizer = False

    def start(self, recorder: Recorder) -> None:
        """Wait for the fit."""
        if self._is_wanted:
            recorder.subscribe("loader", self._loader)
            recorder.subscribe("learner", self._learner)
            recorder.subscribe("model", self._model)
            recorder.subscribe("step", self._step)

    def stop(self) -> None:
        """Leave everything: nothing was patched."""

    def _learner(self, learner: Any) -> None:
        if self._record is None:
            from nbguard.training.runs.run_record import collect
            from nbguard.training.runs.settings import ingredients_of

            self._record, self._has_optimizer = collect(ingredients_of(learner), is_fit=True, has_code=self._has_code), True

    def _loader(self, iterator: Any) -> None:
        if self._iterator is None:
            self._iterator = weakref.ref(iterator)

    def _model(self, module: Any, _: Any) -> None:
        import torch

        if self._record is None and torch.nn.Module in mro_of(type(module)):
            from nbguard.training.runs.run_record import collect
            from nbguard.training.runs.settings import Ingredients

            iterator = None if self._iterator is None else self._iterator()
            loader = None if iterator is None else self._loader_of(iterator)
            loaders = () if loader is None else (loader,)
            self._record = collect(Ingredients(model=module, loaders=loaders), is_fit=True, has_code=self._has_code)

    def _step(self, optimizer: Any) -> None:
        """Add the settings of the optimizer, which nobody knew before its first step."""
        if self._has_optimizer or self._record is None:
            return
        from nbguard.training.runs.collector import FactCollector
        from nbguard.training.runs.settings import collect_optimizer

        self._has_optimizer = True
        more, record = FactCollector(), self._record
        collect_optimizer(more, optimizer)
        left = [each for each in record.missing if (each.topic, each.name) != ("hyper-parameters", "groups")]
        self._record = replace(record, facts=(*record.facts, *more.facts), missing=(*left, *more.missing))

    def observe(self) -> RunRecord | None:
        """Return the record; None where none was asked for, or no fit began."""
        return self._record


# --- The subject of a fit, with the names of its models, and whether its beginning was missed.


_MOST = 3  # names of models that are shown


class Subject:
    """Notes the names of models; keeps none of them. One that is first called after the last loss has no part in the fit."""

    watches = "names of models"

    def __init__(self, begun: Any = None) -> None:
        """`begun`: the iterator of the first batch, where that has been recorded already."""
        self._begun = None if begun is None else weakref.ref(begun)
        self._names: dict[str, int] = {}  # losses before each was first called
        self._kind = "PyTorch loop"
        self._is_compiled = False  # one of the models at least
        self._began = self._ended = 0  # losses of the recording before the fit, and at its end
        self._missed = 0  # batches that loops had given before the profile began

    def start(self, recorder: Recorder) -> None:
        """Listen for models that are called and Learners that are fitted."""
        self._recorder = recorder
        self._began = self._ended = recorder.losses
        recorder.subscribe("model", self._model)
        recorder.subscribe("learner", self._learner)
        recorder.subscribe("loader", self._loader)

    def stop(self) -> None:
        """Note the losses that there were; nothing was patched."""
        self._ended = self._recorder.losses

    def _learner(self, learner: Any) -> None:
        self._kind = LEARNERS
        arch = attribute_of(learner, "arch")
        if type(arch) is types.FunctionType:
            self._note(arch.__name__)

    def _loader(self, iterator: Any) -> None:
        if self._begun is not None and self._begun() is iterator:
            return
        count = attribute_of(iterator, "_num_yielded")
        self._missed += count if type(count) is int else 0

    def _model(self, module: Any, _: Any) -> None:
        compiled = (attribute_of(module, "_modules") or {}).get("_orig_mod")  # by torch.compile, which puts a module around it
        self._is_compiled |= compiled is not None or attribute_of(module, "_compiled_call_impl") is not None
        self._note(type(module if compiled is None else compiled).__name__)

    def _note(self, name: str) -> None:
        if len(self._names) < _MOST:
            self._names.setdefault(name, self._recorder.losses)

    def observe(self) -> SubjectFacts:
        """Return the names of the models, and how many batches were missed."""
        trains = self._ended > self._began
        names = tuple(name for name, losses in self._names.items() if losses < self._ended or not trains)
        return SubjectFacts(self._kind, names, self._missed, self._is_compiled)


# --- Follows a GPU through a fit by events in its stream, and never waits for it.


_BEGINS: tuple[Event, ...] = ("forward", "loss", "step", "zero_grad")  # of phases: other code ran before
_PENDING = 4096  # events that the GPU has not come to: then it is followed no further
_KEPT = 200_000  # marks
_LAST = 1.0  # seconds to wait at the end for events of the last batches
_LOOKS = 250_000_000  # ns between two questions to the driver


class GpuWatch:
    """Records events where phases begin and end, on the stream that the model's device uses, in sampled batches."""

    watches = "the GPU's own times"

    def __init__(self) -> None:
        self._marks: list[GpuMark] = []
        self._pending: deque[tuple[Any, int, str, int]] = deque()
        self._free: list[Any] = []
        self._last: Any = None  # the latest event that the GPU came to, and when by its clock
        self._now = 0
        self._batch = 0
        self._is_chained = False
        self._device: Any = None
        self._nvml: NvmlReader | None = None
        self._used: list[float] = []
        self._looked = 0
        self._why_not = "the fit did not use a CUDA device"
        self._name = ""

    def start(self, recorder: Recorder) -> None:
        """Watch for the first batch that goes to a CUDA device."""
        self._recorder = recorder
        recorder.subscribe("model", self._on_model)

    def stop(self) -> None:
        """Read the events that the GPU comes to within a second; the rest is left."""
        try:
            end = time.monotonic() + _LAST
            while not self._read() and time.monotonic() < end:
                time.sleep(0.001)
        finally:
            self._pending.clear()
            self._free.clear()
            self._last = self._device = None
            self._close_driver()

    def observe(self) -> GpuObservations:
        """Return the events that the GPU came to, and the driver's readings."""
        return GpuObservations(tuple(self._marks), tuple(self._used), self._why_not, self._name)

    def _on_batch(self, number: int) -> None:
        is_next, before = number == self._batch + 1, self._batch
        self._batch = number
        if is_next:
            self._record(phase_log.OTHER, before)
        else:  # batches between have not been followed
            self._is_chained = False
            self._record("")
        self._read()
        self._ask_driver()

    def _on_phase(self, code: int) -> None:
        self._record(self._recorder.phase(code))

    def _on_begin(self, *_: Any) -> None:
        self._record(phase_log.OTHER)

    def _on_model(self, module: Any, args: Any) -> None:
        self._device = _gpu_of(module, args)
        if self._device is not None:
            self._why_not = ""
            self._name = str(sys.modules["torch"].cuda.get_device_properties(self._device).name)
            self._recorder.unsubscribe("model", self._on_model)
            self._recorder.subscribe("batch", self._on_batch)
            self._recorder.subscribe("phase", self._on_phase)
            for event in _BEGINS:
                self._recorder.subscribe(event, self._on_begin)
            self._nvml = NvmlReader().__enter__()

    def _record(self, phase: str, batch: int | None = None) -> None:
        """Put an event into the stream, with the phase that ended; none while a CUDA graph is recorded."""
        cuda = sys.modules["torch"].cuda
        is_full = len(self._pending) >= _PENDING or len(self._marks) >= _KEPT
        if self._recorder.batches != self._batch or is_full or cuda.is_current_stream_capturing():
            self._is_chained = False
            return
        event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
        stream = cuda.current_stream(self._device)
        now = self._recorder.clock()  # not after: another thread may come between, and the GPU not come before its time
        event.record(stream)
        self._pending.append((event, batch or self._batch, phase if self._is_chained else "", now))
        self._is_chained = True

    def _read(self) -> bool:
        """Read the events that the GPU came to; say whether there are no others.

        None is asked while a CUDA graph is recorded: the question alone would make the recording fail.
        """
        if self._pending and sys.modules["torch"].cuda.is_current_stream_capturing():
            return False
        while self._pending:
            event, batch, phase, host = self._pending[0]
            if not event.query():
                return False
            self._pending.popleft()
            if self._last is not None:
                self._now += round(self._last.elapsed_time(event) * 1e6)
                self._free.append(self._last)
            self._last = event
            self._marks.append(GpuMark(batch, phase, host, self._now))
        return True

    def _ask_driver(self) -> None:
        """Ask the driver how busy it thinks the device is, four times a second at most."""
        now = self._recorder.clock()
        if self._nvml is None or now - self._looked < _LOOKS:
            return
        self._looked = now
        properties = sys.modules["torch"].cuda.get_device_properties(self._device)
        used = self._nvml.utilization(properties, self._device.index)
        if used is None:
            self._close_driver()
        else:
            self._used.append(used)

    def _close_driver(self) -> None:
        if self._nvml is not None:
            self._nvml.__exit__(None, None, None)
            self._nvml = None


def _gpu_of(module: Any, args: Any) -> Any | None:
    """Return the CUDA device that a call of a module uses; None if it uses none."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return None
    name = device_of(module, args)
    return torch.device(name) if name.startswith("cuda") else None


# --- The instruments together.


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
        self._fit.attempt("ended", self.loop, error)
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
        with postponed():
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
