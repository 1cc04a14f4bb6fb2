"""Traces of a fit on a modelled GPU, with peaks without a limit, and the largest batch that runs within one."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nbguard.errors import UnpredictableError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.allocator.replay.rollback import InitialState
from nbguard.memory.allocator.replay.start import StartCorrections, set_up
from nbguard.memory.core.advice import ON_A_GPU
from nbguard.memory.core.facts import DeviceFacts
from nbguard.memory.room.search import live_state
from nbguard.memory.scan.devices.cuda import device_facts, tracked_device
from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.progress import stage
from nbguard.training.prediction.emulation.emulation import Emulation, PredictedOutOfMemoryError
from nbguard.training.prediction.emulation.recorder import RecordingDevice, line_of, names_of
from nbguard.training.prediction.fits.batches import MOST, made, made_on_host
from nbguard.training.prediction.fits.fit import Fit, FitSource
from nbguard.training.prediction.hardware import Gpu, WorkspaceCounts, gpu_named
from nbguard.training.prediction.prediction import (
    CategoryBytes,
    FitPhase,
    FitPhasePeak,
    MemoryCategory,
    PeakPlace,
)
from nbguard.units import format_bytes

# --- The present state of the device, the start of a prediction. Reading it opens no context and waits for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDevice:
    """A CUDA device that this process uses, at one moment."""

    gpu: Gpu  # its context is all that is not PyTorch's allocator's: CUDA's own, and other processes' memory
    state: InitialState  # segments and blocks
    own: frozenset[int]  # addresses of blocks that the fit uses again, or makes again in their place
    workspaces: WorkspaceCounts  # that are there already

    def set_up(self, model: CachingAllocator) -> None:
        """Put an empty model into the state of the device, without the fit's own memory."""
        set_up(model, self.state, StartCorrections())
        for address in self.own & model.live.keys():
            model.free(address)
        model.peak_allocated, model.peak_reserved = model.allocated, model.reserved
        model.events.clear()


def live_device(tensors: Iterable[Any], freed: frozenset[int] = frozenset()) -> LiveDevice | None:
    """Return the device on which a fit would run now; None where this process uses none.

    Args:
        tensors: the fit's own: parameters, gradients, the optimizer's state.
        freed: addresses of further blocks to take for free.
    """
    torch: Any = sys.modules["torch"]
    if tracked_device() != "cuda" or not torch.cuda.is_initialized():
        return None
    on_device = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    index = on_device[0].device.index if on_device else torch.cuda.current_device()
    facts = next((each for each in device_facts("cuda")[0] if each.device == f"cuda:{index}"), None)
    if facts is None or not facts.has_context or facts.free is None or facts.total is None or facts.allocator is None:
        return None
    own = frozenset(tensor.untyped_storage().data_ptr() for tensor in on_device if tensor.device.index == index)
    return LiveDevice(
        gpu=_gpu(torch, index, facts), state=live_state(facts), own=own | freed, workspaces=_workspaces(facts, own)
    )


def unopened_gpu() -> Gpu | None:
    """Return the GPU that a fit would open, with the bytes that others hold of it, or None if none or open already.

    Asks the driver: to ask CUDA would open it.
    """
    facts = next(iter(device_facts("cuda")[0]), None) if tracked_device() == "cuda" else None
    if facts is None or facts.has_context or facts.total is None or facts.free is None:
        return None
    gpu, others = gpu_named(facts.name), facts.total - facts.free
    with NvmlReader() as driver:
        architectures = dict(told[2] if (told := driver.driver()) else ())
    return replace(
        gpu,
        name=f"{facts.device} ({facts.name})",
        capacity=facts.total,
        context=gpu.context + others,
        others=others,
        architecture=architectures.get(facts.name, gpu.architecture),
    )


def _gpu(torch: Any, index: int, facts: DeviceFacts) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    total, free = facts.total or 0, facts.free or 0
    reserved = 0 if facts.allocator is None else facts.allocator.reserved
    limit = total if facts.limit is None else min(total, facts.limit)
    return Gpu(
        name=f"{facts.device} ({facts.name})",
        capacity=limit,
        context=max(0, limit - free - reserved),
        multiprocessors=int(properties.multi_processor_count),
        threads=int(getattr(properties, "max_threads_per_multi_processor", 2048)),
        architecture=(int(properties.major), int(properties.minor)),
    )


def _workspaces(facts: DeviceFacts, own: frozenset[int]) -> WorkspaceCounts:
    """Return the numbers of blocks that are as large as a workspace of cuBLAS or cuBLASLt and no tensor of the fit's."""
    others = (block for segment in facts.segments or () for block in segment.blocks if block.address not in own)
    sizes = Counter(block.requested for block in others if block.requested)
    cublas, cublaslt = (min(2, sizes[nbytes or 0]) for nbytes in (facts.workspace, facts.lt_workspace))
    return WorkspaceCounts(cublas, min(cublas, cublaslt))


# --- trace


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
