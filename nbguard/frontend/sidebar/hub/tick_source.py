"""The source of ticks, from counters, the fit that runs and its progress, the waiting jobs, and the line of memory."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from nbguard.frontend.sidebar.hub.device_reader import DeviceReader
from nbguard.frontend.sidebar.memory_line import AllocatorPeak, MemoryLine
from nbguard.frontend.sidebar.protocol.state import FitTick, JobStatus, LineHistory, Tick
from nbguard.frontend.sidebar.protocol.ticks import LastLook, build_tick, device_readings, line_points, truncate_utf8
from nbguard.memory.core.facts import TickReading
from nbguard.memory.core.oom_facts import OomFact
from nbguard.memory.scan.devices.counters import Counters
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of, plain_attributes
from nbguard.texts import CELL_CODE

# --- The fastai fit that runs now, seen from another thread: its progress, and the share of samples waiting for data.
#
# Looks at frames and plain attributes only. Of frames it reads the variables of `fit` and `_do_epoch_validate` alone: these
# hold the Learner and plain arguments, never a batch that reading them could keep alive.


_FIT, _VALIDATE = "fit", "_do_epoch_validate"
_LOADING = "torch.utils.data.dataloader"
_SEEN = ("fastai.", _LOADING)
_ATTRIBUTES = ("n_epoch", "train_iter", "epoch", "iter", "n_iter", "recorder")
"""The attributes of a Learner that a tick reads."""
_SAMPLES = 20
"""Fewer looks than this say nothing about the share of waiting."""


_Place = tuple[int, int, int]
"""Where a thread is: ids of its innermost frame and of that one's code, and the instruction."""


@dataclass
class _Found:
    """Frames of one thread that runs fastai, by their purpose; `call` is the outermost of fastai's own."""

    fit: types.FrameType | None = None
    validate: types.FrameType | None = None
    call: str = ""
    is_loading: bool = False

    @property
    def is_running(self) -> bool:
        return self.fit is not None or self.validate is not None


@dataclass(kw_only=True)
class _FitState:
    """One fit as it was observed so far."""

    key: tuple[int, ...]  # ids that identify the fit
    batches: int = 0  # it has trained on so far
    peak: int | None = None  # bytes, when the fit was first observed
    looks: int = 0  # number of observations
    waits: int = 0  # number of observations of it waiting for data


@dataclass
class FitProgress:
    """Follows fits of this process. `names` says what Learners are called, by their ids. Keeps none of them alive."""

    names: Mapping[int, str] = field(default_factory=dict)
    _course: _FitState | None = None
    _resting: dict[int, _Place] = field(default_factory=dict)  # threads without a fit, by their ids

    def read(self, peak: int | None = None) -> FitTick | None:
        """Return how far the fit that runs now has come; None without one. Never raises.

        `peak` is the most that has ever been allocated: only if that has risen since, it is the peak of this fit.
        """
        try:
            return self._read(peak)
        except Exception:  # noqa: BLE001 - frames and attributes of other threads change while they are read
            return None

    def _read(self, peak: int | None) -> FitTick | None:
        if "fastai.learner" not in sys.modules:
            return None
        running = _running(self._resting)
        frame = None if running is None else running.fit or running.validate
        if running is None or frame is None:
            self._course = None
            return None
        learner = frame.f_locals.get("self")
        said = plain_attributes(learner, _ATTRIBUTES)
        key = (id(learner), id(frame), _count(said, "n_epoch") or 0)
        course = self._follow(key, _count(said, "train_iter") or 0, peak)
        course.looks += 1
        course.waits += running.is_loading
        label = self.names.get(id(learner), "a Learner")
        return self._tick(label, running, said, course, peak)

    def _follow(self, key: tuple[int, ...], batches: int, peak: int | None) -> _FitState:
        """Return the course of this fit: a new one if it is another fit, perhaps in the same frame as the one before."""
        course = self._course
        if course is None or course.key != key or batches < course.batches:
            course = self._course = _FitState(key=key, peak=peak)
        course.batches = batches
        return course

    def _tick(self, label: str, running: _Found, said: dict[str, Any], course: _FitState, peak: int | None) -> FitTick:
        """Return the tick of a fit whose Learner has the attributes `said`."""
        in_fit = running.fit is not None
        epoch, epochs = (_count(said, "epoch", 1), _count(said, "n_epoch")) if in_fit else (None, None)
        batch, batches = _count(said, "iter", 1), _count(said, "n_iter")
        if batch is not None and batches is not None and batch > batches:  # of the epoch before, as this one begins
            batch = None
        has_risen = peak is not None and course.peak is not None and peak > course.peak
        return FitTick(
            label=truncate_utf8(label),
            call=truncate_utf8(running.call, 60),
            epoch=epoch,
            epochs=epochs,
            batch=batch,
            batches=batches,
            is_training=in_fit and running.validate is None,
            loss=_loss(said.get("recorder")) if in_fit else None,
            peak=peak if has_risen else None,
            waiting=round(course.waits / course.looks, 2) if course.looks >= _SAMPLES else None,
        )


def _running(resting: dict[int, _Place]) -> _Found | None:
    """Return the frames of the fit that runs now, of the main thread's if there is one there, else of any thread.

    `resting`: threads without a fit at the last sample, and their places: most have not moved since, and are skipped.
    """
    tops = sys._current_frames()
    del tops[threading.get_ident()]  # this very frame: a cycle, in which every thread's frames would wait for the collector
    for ident in resting.keys() - tops.keys():
        del resting[ident]
    main = threading.main_thread().ident
    for ident in chain((main,) if main in tops else (), sorted(tops)):  # most fits run in the main thread
        top = tops[ident]
        place = (id(top), id(top.f_code), top.f_lasti)
        if resting.get(ident) == place:
            continue
        thread_state = _of_thread(top)
        if thread_state.is_running:
            resting.pop(ident, None)
            return thread_state
        resting[ident] = place
    return None


def _of_thread(top: types.FrameType) -> _Found:
    thread_state = _Found()
    for frame in _outwards(top):
        module = frame.f_globals.get("__name__")
        if type(module) is not str or not module.startswith(_SEEN):
            continue
        name = frame.f_code.co_name
        if module == _LOADING and not thread_state.is_running:
            thread_state.is_loading = True
        elif module == "fastai.learner" and name == _VALIDATE:
            thread_state.validate = thread_state.validate or frame
        elif module == "fastai.learner" and name == _FIT:
            thread_state.fit = frame
        if thread_state.is_running and module.startswith("fastai.") and not name.startswith(("_", "<")):
            thread_state.call = name
    return thread_state


def _outwards(top: types.FrameType) -> list[types.FrameType]:
    """Return the frames from `top` to the cell's own, all at once: the thread goes on, and a resting generator has no way out.

    Beyond the cell are the frames of IPython and the kernel, as many again, and none of fastai's.
    """
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = top
    while frame is not None:
        frames.append(frame)
        if frame.f_code.co_name.startswith(CELL_CODE) and frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back
    return frames


def _count(said: dict[str, Any], name: str, start: int = 0) -> int | None:
    count = said.get(name)
    return count + start if type(count) is int else None


def _loss(recorder: Any) -> float | None:
    """Return the smoothed loss of the last batch, which fastai's Recorder holds on the host already; None if it does not."""
    losses = attribute_of(recorder, "losses")
    if type(losses) is not list or not losses:
        return None
    torch: Any = sys.modules["torch"]
    last, base = losses[-1], torch.Tensor
    if base not in mro_of(type(last)) or type(last).__torch_dispatch__ is not base.__torch_dispatch__:
        return None
    with torch._C.DisableTorchFunctionSubclass():  # a subclass's own code must not run
        if not base.is_cpu.__get__(last) or base.numel(last) != 1:
            return None
        loss = base.tolist(last)  # `item` would let the training have the interpreter, and the tick wait for it
    while type(loss) is list:
        (loss,) = loss
    return float(loss) if math.isfinite(loss) else None


Found = TypeVar("Found")

_GIVEN_UP = 5
"""Failures in a row until a reading is given up."""

_log = logging.getLogger("nbguard")


class TickSource:
    """Makes ticks. Where a reading fails the one before it stands; one that fails again and again is left out. Others go on.

    `simulated` returns the counters of a simulated device, which are told instead of this machine's, or None without one.
    """

    def __init__(self, boot: str, simulated: Callable[[], TickReading | None]) -> None:
        self._boot = boot
        self._simulated = simulated
        self._count = 0
        self._line = MemoryLine()
        self._device = DeviceReader()
        self._counters = Counters()
        self._progress = FitProgress()
        self._last: dict[str, Any] = {}
        self._failures: Counter[str] = Counter()  # in a row

    def begin_cell(self, number: int, cell_id: str) -> None:
        """Note that a cell begins, on the kernel's main thread."""
        self._line.begin_cell(time.time(), number, cell_id, self._peaks())

    def end_cell(self, oom: OomFact | None = None) -> None:
        """Note that it ended, and that it ran out of memory, if it is known to have."""
        self._line.end_cell(time.time(), self._peaks(), oom)

    def call(self, names: dict[int, str]) -> None:
        """Call Learners by these names, by their ids."""
        self._progress.names = names

    def tick(self, look: LastLook | None, cell: int | None, jobs: tuple[JobStatus, ...], survived: Iterable[str] = ()) -> Tick:
        """Return the present counters.

        Args:
            look: the last scan of the heap, if any.
            cell: the number of the cell that runs.
            jobs: requests that wait.
            survived: sentences on a training that ran out of memory.
        """
        self._count += 1
        now = time.time()
        simulated = self._tried("the simulated device", self._simulated)
        reading = simulated or self._tried("the counters", self._device.read) or TickReading()
        devices = device_readings(reading)
        points = self._line.add(now, line_points(now, reading, devices), reading)
        fit = self._tried("the fit", lambda: self._progress.read(reading.peak))
        self._line.follow(now, fit)
        return build_tick(
            self._boot,
            self._count,
            now,
            reading,
            devices=devices,
            points=points,
            look=look or LastLook(),
            busy=cell is not None,
            cell=cell,
            fit=fit,
            survived=survived,
            jobs=jobs,
            marks=self._line.newest_marks(),
        )

    def history(self, seconds: int) -> LineHistory:
        """Return the lines of the last `seconds` up to the last tick, all that is kept if 0. In the thread that ticks."""
        return self._line.history(seconds, self._count)

    def close(self) -> None:
        """Give the driver's session back."""
        self._device.close()

    def _peaks(self) -> dict[str, AllocatorPeak] | None:
        """Return the counters of each device's allocator now, or None if unknown or uncounted."""
        try:
            return self._read_peaks()
        except Exception:  # noqa: BLE001 - a mark without its peak is better than a cell that fails
            _log.debug("the counters at a cell could not be read", exc_info=True)
            return None

    def _read_peaks(self) -> dict[str, AllocatorPeak] | None:
        simulated = self._simulated()
        if simulated is not None:
            known = ((each.device, each.allocator) for each in simulated.devices)
            return {
                device: AllocatorPeak(allocated=stats.allocated, peak=stats.peak_allocated)
                for device, stats in known
                if stats is not None
            }
        if self._counters.kind() == "cpu":  # nobody counts, and malloc would have to be asked
            return None
        reading = self._counters.read()
        counted = () if reading is None else reading.devices
        return {each.device: AllocatorPeak(allocated=each.allocated, peak=each.peak) for each in counted}

    def _tried(self, what: str, read: Callable[[], Found]) -> Found | None:
        if self._failures[what] == _GIVEN_UP:
            return None
        try:
            self._last[what] = read()
            self._failures[what] = 0
        except Exception:  # noqa: BLE001 - a mistake of ours, or another thread's work at the same time, must cost no more
            _log.debug("a sidebar's reading of %s failed", what, exc_info=True)
            self._failures[what] += 1
        return None if self._failures[what] == _GIVEN_UP else self._last.get(what)
