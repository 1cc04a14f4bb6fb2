"""`nbguard.predict`: the memory of a fit before it starts, by a trace on tensors without data, or why it is refused."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from nbguard.errors import NbguardError, UnpredictableError
from nbguard.memory.allocator.model.settings import AllocatorSettings, parse_version
from nbguard.memory.core.advice import PREDICT_CELL
from nbguard.memory.scan.devices.cuda import allocator_settings
from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.memory.scan.learners import is_learner
from nbguard.texts import Text
from nbguard.training.prediction import calibration
from nbguard.training.prediction.cell import fits_of_cell
from nbguard.training.prediction.fits.fit import FitSource
from nbguard.training.prediction.fits.sources import source_of
from nbguard.training.prediction.hardware import Gpu, gpu_of
from nbguard.training.prediction.prediction import CellPrediction, GpuComparison, PredictedFit, Prediction
from nbguard.training.prediction.savings import largest_batch
from nbguard.training.prediction.savings import savings as tried_savings
from nbguard.training.prediction.trace import FitTracer, live_device, unopened_gpu
from nbguard.units import format_bytes

# --- The time that first imports take, as a trace meets parts of PyTorch that this process has not used yet.


@dataclass(slots=True)
class ImportTime:
    """The time that imports took."""

    seconds: float = 0.0


@contextmanager
def import_time() -> Iterator[ImportTime]:
    """Yield the time that the imports of this thread that load a module take in the context.

    The import system's own function for modules that are not loaded yet is replaced. `__import__` would do as well, but PyTorch
    imports loaded modules a hundred thousand times in a trace.
    """
    total, thread, depth = ImportTime(), threading.get_ident(), 0
    system: Any = importlib._bootstrap
    former = system._find_and_load

    def timed(*args: Any) -> Any:
        nonlocal depth
        if depth or threading.get_ident() != thread:
            return former(*args)
        started = time.perf_counter()
        depth += 1
        try:
            return former(*args)
        finally:
            depth -= 1
            total.seconds += time.perf_counter() - started

    system._find_and_load = timed
    try:
        yield total
    finally:
        system._find_and_load = former


# --- Modules whose memory cannot be predicted, refused by their path.


_REFUSED = {
    "OptimizedModule": "torch.compile plans its own buffers",
    "DataParallel": "its replicas live on several devices",
    "DistributedDataParallel": "its buckets depend on the process group",
    "FullyShardedDataParallel": "its shards depend on the process group",
    "FSDPModule": "its shards depend on the process group",
    "ScriptModule": "TorchScript runs its operators without Python",
    "RecursiveScriptModule": "TorchScript runs its operators without Python",
}
"""Modules whose memory cannot be predicted, by the class of torch's that they are, and why."""

_COMPRESSED = ("apex", "bitsandbytes", "torchao")
"""Packages whose optimizers have kernels and states of their own."""


def refuse_optimizers(optimizers: Iterable[tuple[str, Any]]) -> None:
    """Refuse optimizers whose memory cannot be predicted, by name.

    Args:
        optimizers: (name, optimizer) of a fit.

    Raises:
        UnpredictableError: there is one of a package with kernels of its own, such as those that keep 8 bits of their state.
    """
    for name, optimizer in optimizers:
        package = type(optimizer).__module__.partition(".")[0]
        if package in _COMPRESSED:
            raise UnpredictableError(f"{name} is {package}'s {type(optimizer).__name__}, which has its own state and kernels")


def refuse(modules: Iterable[tuple[str, Any]]) -> None:
    """Refuse modules whose memory cannot be predicted, by the path to the first of them.

    Args:
        modules: (name, module) of the models of a fit.

    Raises:
        UnpredictableError: there is such a module.
    """
    for name, model in modules:
        for path, module in model.named_modules():
            for kind in type(module).__mro__:
                reason = _REFUSED.get(kind.__name__)
                if reason and str(kind.__module__).partition(".")[0] == "torch":
                    where = f"{name}.{path}" if path else f"the model {name}" if name != "model" else "the model"
                    raise UnpredictableError(f"{where} is a {kind.__name__}: {reason}")


_EMPTY = "the device is empty before the fit; memory of other notebooks, processes and earlier cells is not counted"
_ASSUMPTIONS = (
    "cuDNN's workspaces are not known but part of the band, as cuDNN takes smaller ones if memory is short",
    "gradients are finite, so mixed precision skips no step",
)
_LAYERS = (
    "the workspaces of cuDNN's recurrent layers take at most {band}, which is part of the band; measured on an H200 "
    "with cuDNN 9.19; other versions may differ"
)

_FROZEN = Text("what is frozen stays so; ") + PREDICT_CELL.code + f" {PREDICT_CELL.effect}"


def predict(
    learn: Any,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    gpu: str | None = None,
    settings: str | None = None,
    precision: str | None = None,
    largest: bool = False,
    savings: bool = False,
) -> Prediction:
    """Return the memory that the next fit will take, as `nbguard.predict` does, which has the time of an epoch besides.

    Raises:
        UnpredictableError: the memory cannot be predicted; the message names the operator, module or object that prevents it.
        NbguardError: an argument cannot be used.
    """
    if batch_size is not None and batch_size < 1:
        raise NbguardError(f"batch_size is a number of items above 0, not {batch_size}")
    source = source_of(learn, batch, precision)
    prediction = predict_source(source, batch_size=batch_size, gpu=gpu, settings=settings, largest=largest, savings=savings)
    calibration.expect(prediction, source)
    frozen = attribute_of(attribute_of(learn, "opt"), "frozen_idx") if is_learner(learn) else 0
    return replace(prediction, assumptions=(*prediction.assumptions, _FROZEN)) if frozen else prediction


def predict_source(
    source: FitSource,
    *,
    batch_size: int | None = None,
    gpu: str | None = None,
    settings: str | None = None,
    largest: bool = False,
    savings: bool = False,
    code: str = "",
) -> Prediction:
    """Return the same as `predict`, of the source of a fit.

    Args:
        source: the user's objects that the fit consists of.
        batch_size: as of `predict`.
        gpu: as of `predict`.
        settings: as of `predict`; without, those of this process where it uses the device.
        largest: as of `predict`.
        savings: as of `predict`.
        code: lines that change the copy of a Learner, `learn`, before it is fitted.

    Raises:
        UnpredictableError: as of `predict`.
        NbguardError: as of `predict`.
    """
    started = time.perf_counter()
    with import_time() as imports:
        tracer = tracer_of(source, gpu, settings, code)
        device = tracer.gpu
        if largest and not source.size:
            raise UnpredictableError("the loop makes its batches itself, so the largest batch was not searched for")
        if largest and device.capacity is None:
            raise NbguardError(
                "the largest batch depends on the GPU; name one, as in nbguard.predict(learn, gpu='16GiB', largest=True)"
            )
        endless = tracer.endless(batch_size)
        fits, why = tracer.answer(batch_size, endless)
        largest_batches = largest_batch(tracer, endless) if largest else None
        tried = tried_savings(tracer, batch_size, endless, _version(), largest=largest) if savings else ()
    return Prediction(
        gpu=device.name,
        capacity=device.capacity,
        context=device.context,
        is_live=tracer.start is not None,
        held=endless.held,
        settings=tracer.settings.conf(),
        torch_version=str(torch.__version__),
        peak_allocated=endless.peak_allocated,
        peak_reserved=endless.peak_reserved,
        end_allocated=endless.end_allocated,
        model=endless.model,
        workspaces=endless.workspaces,
        phases=endless.phases,
        categories=endless.categories,
        peak=endless.peak,
        first_batch=endless.batch_peaks[0],
        steady=max(endless.batch_peaks[1:3], default=endless.batch_peaks[0]),
        band=endless.band,
        fits=fits,
        why=why,
        batch_sizes=endless.sizes,
        batches=endless.batches,
        largest=largest_batches,
        savings=tried,
        convolutions=endless.convolutions,
        seconds=time.perf_counter() - started - imports.seconds,
        import_seconds=imports.seconds,
        unknown=endless.unknown,
        assumptions=(
            *(() if tracer.start else (_before(device),)),
            *_ASSUMPTIONS,
            *(f"{line} has a tensor of the host; on a GPU, move it with .to(device)" for line in endless.on_host),
            *([_LAYERS.format(band=format_bytes(endless.layers))] if endless.layers else ()),
        ),
    )


def _before(gpu: Gpu) -> str:
    """Return the assumptions on a GPU that this process does not use."""
    if gpu.others is None:
        return _EMPTY
    context, others = format_bytes(gpu.context - gpu.others), format_bytes(gpu.others)
    here = f"this process has not opened the device; CUDA's context takes {context}"
    return f"{here}, and other processes hold {others}, as they do now"


def predict_cell(
    source: str, namespace: dict[str, Any], gpus: Sequence[str | None] = (None,), settings: str | None = None
) -> CellPrediction | GpuComparison:
    """Return the memory of the fits that a cell with this source would start. Nothing of it runs on the user's objects.

    Args:
        source: Python, as IPython has transformed it.
        namespace: the user's names, which are read; none is bound.
        gpus: one or several, each as of `predict`.
        settings: as of `predict`.

    Raises:
        UnpredictableError: a fit cannot be predicted; the message says why.
        NbguardError: the cell starts no fit, or makes the fitted object itself.
    """
    fits = fits_of_cell(source, namespace)
    predicted = [
        PredictedFit(text=fit.text, prediction=predict_source(fit.source, gpu=gpu, settings=settings, code=fit.code))
        for gpu in gpus
        for fit in fits
    ]
    return of_fits("no line of the cell was run", predicted, gpus)


def of_fits(executed: str, fits: Sequence[PredictedFit], gpus: Sequence[str | None]) -> CellPrediction | GpuComparison:
    """Return fits that were predicted on these GPUs: one after the other, or in a table where there are several."""
    result = CellPrediction if len(gpus) == 1 else GpuComparison
    return result(executed=executed, fits=tuple(fits))


def compare_gpus(
    learn: Any, gpus: Sequence[str], *, batch_size: int | None = None, settings: str | None = None, largest: bool = False
) -> GpuComparison:
    """Return the memory of the next fit of a Learner on each of several GPUs, which are empty before.

    Args:
        learn: as of `predict`.
        gpus: names or sizes, each as of `predict`.
        batch_size: as of `predict`.
        settings: as of `predict`.
        largest: as of `predict`.

    Raises:
        UnpredictableError: as of `predict`.
        NbguardError: as of `predict`.
    """
    source = source_of(learn, None, None)
    fits = (predict_source(source, batch_size=batch_size, gpu=gpu, settings=settings, largest=largest) for gpu in gpus)
    return GpuComparison(executed="", fits=tuple(PredictedFit(text="the next fit", prediction=each) for each in fits))


def tracer_of(
    source: FitSource,
    gpu: str | None = None,
    settings: str | None = None,
    code: str = "",
    freed: frozenset[int] = frozenset(),
) -> FitTracer:
    """Return the tracer of a fit on the GPU of that name, or without one on the device of this process as it is now.

    Args:
        source: the user's objects that the fit consists of.
        gpu: a name or a size; if None, the device that this process uses or would open, and without one a GPU without end.
        settings: of the allocator; if None, of this process, or PyTorch's defaults.
        code: lines that change the copy of a Learner, `learn`, before it is fitted.
        freed: addresses of blocks of the device of this process to take for free.
    """
    refuse(source.modules)
    refuse_optimizers(getattr(source, "optimizers", ()))
    start = live_device(source.tensors, freed) if gpu is None else None
    if settings is None and start is not None:
        settings = allocator_settings()
    parsed = AllocatorSettings.parse(settings or "", _version())
    device = start.gpu if start is not None else (unopened_gpu() if gpu is None else None) or gpu_of(gpu)
    return FitTracer(source=source, gpu=device, settings=parsed, start=start, code=code)


def _version() -> tuple[int, int]:
    return parse_version(str(torch.__version__))
