"""Traces of a fit on a modelled GPU, with peaks without a limit, and the largest batch that runs within one."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nbguard.errors import UnpredictableError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.core.advice import ON_A_GPU
from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.memory.scan.progress import stage
from nbguard.training.prediction.emulation.emulation import Emulation, PredictedOutOfMemoryError
from nbguard.training.prediction.emulation.recorder import RecordingDevice, line_of, names_of
from nbguard.training.prediction.fits.batches import MOST, made, made_on_host
from nbguard.training.prediction.fits.fit import Fit, FitSource
from nbguard.training.prediction.hardware import Gpu, WorkspaceCounts
from nbguard.training.prediction.live import LiveDevice
from nbguard.training.prediction.prediction import (
    CategoryBytes,
    FitPhase,
    FitPhasePeak,
    LargestBatch,
    MemoryCategory,
    PeakPlace,
)
from nbguard.units import format_bytes

# --- Release of all that a prediction made, though its copies refer to one another.


@contextmanager
def no_leftovers() -> Iterator[None]:
    """Free at the end of the context the unused objects that were made in it. Garbage that was there before stays.

    An error that leaves the context lets go of the copies as well, as a display of it keeps its frames.
    """
    is_own = gc.get_freeze_count() == 0
    if is_own:
        gc.freeze()  # the collector looks at nothing that is there already
    try:
        yield
    except Exception as error:
        _clear(error)
        raise
    finally:
        gc.collect()
        if is_own:
            gc.unfreeze()


def _clear(error: BaseException | None) -> None:
    """Clear the frames that ended in an error and in those before it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


_BAND = 0.05
"""Share of the reserved peak that stays free before a fit is said to fit: other versions of CUDA, kernels without a rule."""
_CONVOLUTIONS = 256 * 2**20
"""Bytes that stay free besides where cuDNN convolves: PyTorch takes a plan with a smaller workspace where one finds no room."""
_BUFFERS = 64
"""Multiple of an operator's tensors below which the buffers of a library are assumed to stay."""
_MOST_WORDS = 160
"""Characters of a message of the user's code."""
_MANY_BATCHES = 1000
"""Batches of an epoch that does not say how many it has."""


class FailedFitError(UnpredictableError):
    """The code of the fit itself raises an error on such batches, without any shortage of memory."""


class OutOfTimeError(UnpredictableError):
    """The traces that an answer takes are not finished in the time that was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTrace:
    """The figures of one trace. All sizes are bytes."""

    sizes: tuple[int, ...]  # items of the training batches that were traced
    items: int  # in the training set
    batches: int | None  # training batches of an epoch; None if unknown
    peak_allocated: int  # most in tensors at once
    peak_reserved: int  # most that the allocator had at once
    end_allocated: int  # in tensors when the fit had ended
    held: int  # on the device before the fit, and not the fit's
    model: int  # parameters and buffers
    workspaces: int  # of cuBLAS
    phases: tuple[FitPhasePeak, ...]
    categories: tuple[CategoryBytes, ...]  # at the peak
    peak: PeakPlace
    batch_peaks: tuple[int, ...]  # most bytes in tensors at once, of each batch in turn
    convolutions: int  # number of calls
    layers: int  # bytes that recurrent layers may take beyond the peak
    unknown: tuple[str, ...]  # untraced parts that may take memory
    on_host: tuple[str, ...]  # lines where a fit without a device makes tensors that a GPU's would meet

    @property
    def band(self) -> int:
        """Return the bytes that the fit may take beyond the reserved peak."""
        return self.band_of(self.peak_reserved)

    def band_of(self, reserved: int) -> int:
        """Return the same where so many bytes are reserved."""
        return int(_BAND * reserved) + (_CONVOLUTIONS if self.convolutions else 0) + self.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTracer:
    """Fits copies of a Learner without data, as often as is asked."""

    source: FitSource  # the user's objects, which stay as they are
    gpu: Gpu  # that is modelled
    settings: AllocatorSettings
    start: LiveDevice | None = None  # state of the device to begin with; None if it is empty
    code: str = ""  # lines that change the copy of the Learner, `learn`, before it is fitted
    until: float | None = None  # reading of `time.monotonic` of the last begin of a trace
    is_last_optional: bool = False  # the smaller last batch is left out where the fit fails on it: BatchNorm refuses one item

    def endless(self, batch_size: int | None) -> FitTrace:
        """Return the figures of the fit on such a GPU without a limit to its memory.

        Raises:
            UnpredictableError: it cannot be traced; the message says why.
        """
        return self._trace(batch_size, replace(self.gpu, capacity=None), 0)

    def runs(self, batch_size: int | None, reserve: int) -> bool:
        """Return whether the fit ends on the GPU while `reserve` bytes stay free; the allocator empties its cache for it."""
        try:
            self._trace(batch_size, self.gpu, reserve)
        except PredictedOutOfMemoryError:
            return False
        return True

    def answer(self, batch_size: int | None, endless: FitTrace) -> tuple[bool | None, str]:
        """Return whether the fit traced as `endless` runs on the GPU, and why; yes only with the band kept free."""
        if self.gpu.capacity is None:
            return None, "no GPU was named: " + ON_A_GPU.code + f" {ON_A_GPU.effect}"
        room = self.gpu.capacity - self.gpu.context
        needed = format_bytes(endless.peak_reserved)
        if endless.peak_reserved + endless.band > room and not self.runs(batch_size, endless.band):
            if endless.peak_reserved > room and not self.runs(batch_size, 0):
                return (
                    False,
                    f"the fit runs out of memory, as {self.gpu.name} has {format_bytes(room)} apart from CUDA's context",
                )
            band = format_bytes(endless.band)
            return (
                None,
                f"{needed} would be reserved, which leaves less than {band} of the device for memory that cannot be computed",
            )
        if endless.unknown:
            return (
                None,
                f"{needed} would be reserved of the {format_bytes(room)} apart from CUDA's context; {endless.unknown[0]}",
            )
        if endless.peak_reserved > room:
            return (
                True,
                f"{format_bytes(room)} apart from CUDA's context is enough if the allocator empties its cache when needed",
            )
        return True, f"at most {needed} is reserved of the {format_bytes(room)} apart from CUDA's context"

    def _trace(self, batch_size: int | None, gpu: Gpu, reserve: int) -> FitTrace:
        """Fit a copy without data on a modelled GPU whose `reserve` bytes stay free.

        Raises:
            PredictedOutOfMemoryError: the GPU has no room.
            FailedFitError: the fit fails for another reason.
        """
        if self.until is not None and time.monotonic() > self.until:
            raise OutOfTimeError("no time was left for another trace")
        try:
            return self._tried(self.source, batch_size, gpu, reserve)
        except FailedFitError as error:
            without = getattr(self.source, "without_tried_callbacks", None)
            plain = without and without(f"with it {error}")
            if plain is None:
                raise
        return self._tried(plain, batch_size, gpu, reserve)

    def _tried(self, source: FitSource, batch_size: int | None, gpu: Gpu, reserve: int) -> FitTrace:
        """Fit a copy, once more without the smaller last batch where that is optional and the fit fails."""
        stage("predicting" if batch_size is None else f"predicting with batches of {batch_size}")
        with no_leftovers():
            try:
                return self._traced(source.fit(batch_size), gpu, reserve)
            except FailedFitError:
                if not self.is_last_optional:
                    raise
            return self._traced(source.fit(batch_size, full_only=True), gpu, reserve)

    def _start(self) -> tuple[Callable[[CachingAllocator], None] | None, WorkspaceCounts]:
        return (None, WorkspaceCounts()) if self.start is None else (self.start.set_up, self.start.workspaces)

    def _traced(self, fit: Fit, gpu: Gpu, reserve: int) -> FitTrace:
        if self.code:
            _change(fit, self.code)
        failure = ""
        emulation = Emulation(gpu, self.settings, reserve, *self._start(), device=fit.device)
        device = emulation.device
        with kept_generators(), emulation:
            emulation.storages.note(fit.resident)
            model = device.model.allocated - device.held
            try:
                fit.run(_BatchMaker(device))
            except (PredictedOutOfMemoryError, UnpredictableError):
                raise
            except Exception as error:  # noqa: BLE001 - whatever the user's code raises is the reason
                failure = _reason(error)
        if failure:
            sizes = ", ".join(map(str, dict.fromkeys(filter(None, fit.sizes))))
            words = f" with batches of {sizes} items" if sizes else ""
            raise FailedFitError(f"the fit itself would fail{words}: {failure}")
        emulation.settle()
        if device.broken:
            raise UnpredictableError(device.broken)
        return FitTrace(
            sizes=fit.sizes,
            items=fit.items,
            batches=fit.batches,
            peak_allocated=device.model.peak_allocated,
            peak_reserved=device.model.peak_reserved,
            end_allocated=device.model.allocated,
            held=device.held,
            model=model,
            workspaces=emulation.operators.workspaces,
            phases=device.phases(),
            categories=device.categories(),
            peak=device.place(names_of(fit.models)),
            batch_peaks=device.peaks_of_batches(),
            convolutions=emulation.operators.convolutions,
            layers=max(emulation.operators.layers.values(), default=0),
            on_host=tuple(emulation.operators.on_host),
            unknown=(*fit.left_out, *_growth(device, fit.batches), *_unknown(emulation, steps=fit.has_optimizer)),
        )


class _BatchMaker:
    """Makes batches on a device, and says how far the fit has come there."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device = device

    @property
    def steps(self) -> int:
        return self._device.steps

    @property
    def passes(self) -> int:
        return self._device.passes

    def __call__(self, shapes: Any, *, on_host: bool = False) -> Any:
        self._device.begin_batch()
        if on_host:
            return made_on_host(shapes)
        with self._device.making(MemoryCategory.INPUTS, FitPhase.BATCH):
            return made(shapes)


def _reason(error: Exception) -> str:
    """Return why a fit fails, in words, with its line."""
    lines = str(error).splitlines() or [""]
    text = " ".join(map(str.strip, lines[: 2 if lines[0].endswith(":") else 1]))[:_MOST_WORDS]  # fastai's has the cause below
    line = line_of(error)
    at = f", at {line}" if line else ""
    if isinstance(error, RuntimeError) and "device" in text and "meta" in text:
        return f"a tensor is on the host, not on the model's device{at}: make it there, or move it with .to(device)"
    return f"{type(error).__name__}: {text}{at}"


def _change(fit: Fit, code: str) -> None:
    """Run lines that change a copy of a fit: our own, the same that are shown.

    Raises:
        FailedFitError: this fit, or this version of its library, does not take them.
    """
    try:
        fit.change(code)
    except Exception as error:  # noqa: BLE001 - whatever the fit's library raises is the reason
        raise FailedFitError(f"the change cannot be made ({type(error).__name__}: {error})") from None


def _growth(device: RecordingDevice, batches: int | None) -> list[str]:
    """Return in words the memory that a fit keeps of each batch, where an epoch's is more than the band."""
    grown = device.growth() * (batches or _MANY_BATCHES)
    if grown <= _BAND * device.model.peak_reserved:
        return []
    count = "" if batches is None else f", {format_bytes(grown)} in an epoch of {batches} batches"
    return [f"each batch leaves {format_bytes(device.growth())} more on the device than the one before{count}"]


def _unknown(emulation: Emulation, *, steps: bool) -> list[str]:
    """Return the untraced parts that may take memory, in words; with `steps` the fit has an optimizer, which takes steps."""
    unknown = [f"{line} reads a value, so the code's path is not known" for line in emulation.operators.reads]
    unknown += [
        f"the buffers of {kind} are not known"
        for kind, given in sorted(emulation.operators.unknown.items())
        if _BUFFERS * given > _BAND * emulation.device.model.peak_reserved
    ]
    if emulation.operators.attentions:
        unknown.append("attention in half precision runs in cuDNN on this GPU")
    if emulation.storages.unseen:
        unknown.append("tensors without a storage of their own are used (sparse ones, wrappers)")
    if steps and not emulation.device.steps and emulation.device.passes:
        unknown.append(f"its optimizer takes no step within {min(emulation.device.passes, MOST)} backward passes")
    return unknown


# --- The largest batch that a fit runs with on a GPU, found by traces of it with the GPU's capacity in the model.


_GROWTH = 8
"""Factor of the batch's growth from one trace to the next until a peak exceeds the GPU."""
_FRAGMENTED = 0.97
"""Share of the GPU that tensors can fill; the rest is free between them."""
_STEP = 0.04
"""Share of the estimate that is the search's next step: predicted peaks grow by steps, and nearly in a line."""


def largest_batch(tracer: FitTracer, endless: FitTrace) -> LargestBatch:
    """Return the largest batches that the fit runs with, and is sure to run with, on the tracer's GPU.

    Each answer is verified by a trace of its own, and so is the next larger batch.

    Args:
        tracer: traces the fit; its GPU has a capacity.
        endless: the trace of one batch size without a limit, to begin with.
    """
    tracer = replace(tracer, is_last_optional=True)
    size, most = endless.sizes[0], endless.items
    tried: dict[int, bool] = {}

    def runs(items: int) -> bool:
        try:
            tried[items] = tracer.runs(items, 0)
        except FailedFitError:  # of so few items, as batch norm refuses one
            tried[items] = False
        return tried[items]

    def is_sure(items: int) -> bool:
        try:
            return tracer.answer(items, tracer.endless(items))[0] is True
        except FailedFitError:
            return False

    limit = _search(runs, _estimate(tracer, endless, size, most), most)
    if endless.unknown:
        return LargestBatch(sure=None, limit=limit, is_whole_set=limit == most, traces=len(tried))
    sure = limit if not limit or is_sure(limit) else _search(is_sure, int(limit * 0.94), limit - 1)
    return LargestBatch(sure=sure, limit=limit, is_whole_set=limit == most, traces=len(tried))


def _estimate(tracer: FitTracer, endless: FitTrace, size: int, most: int) -> int:
    """Return the size at which the allocated peak fills the GPU, by a line between two traces without a limit around it.

    Small batches change no peak: the optimizer's step or a workspace makes it. So sizes grow until the room is exceeded.
    """
    room = (tracer.gpu.capacity or 0) - tracer.gpu.context
    low, filled = (1, endless.model) if endless.peak_allocated > room else (size, endless.peak_allocated)
    high = size if low < size else min(size * _GROWTH, most)
    while high > low:
        peak = endless.peak_allocated if high == size else tracer.endless(high).peak_allocated
        per_item = (peak - filled) / (high - low)
        line = int(_FRAGMENTED * (low + (room - filled) / per_item)) if per_item > 0 else most
        if peak > room or high == most:
            return max(1, min(line, high))
        low, filled, high = high, peak, min(most, high * _GROWTH, max(high + 1, 2 * line))
    return low


def _search(holds: Callable[[int], bool], estimate: int, most: int) -> int:
    """Return the largest number up to `most` that holds, 0 if none does: outwards from the estimate, then by halves."""
    low, high, step = 0, most + 1, max(1, int(_STEP * estimate))
    is_low_tried = is_high_tried = False
    while high - low > 1:
        if is_low_tried and is_high_tried:
            at = (low + high) // 2
        elif is_low_tried or is_high_tried:
            at = min(low + step, high - 1) if is_low_tried else max(high - step, low + 1)
            step *= 2
        else:
            at = min(max(estimate, low + 1), high - 1)
        if holds(at):
            low, is_low_tried = at, True
        else:
            high, is_high_tried = at, True
    return low
