"""Predictions for Learners on cards, for remedies, and for the next fit in the sidebar's list."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.plan.parking import default_plan
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.oom_facts import OomFact
from nbguard.memory.out_of_memory.failed_request import PredictedChange, batch_that_fits, predicted_changes
from nbguard.units import format_bytes, format_column, unit_of

if TYPE_CHECKING:
    from nbguard.training.prediction.prediction import CellPrediction, ChangeKind, GpuComparison, Prediction, Saving
    from nbguard.training.prediction.savings import Change
    from nbguard.training.prediction.speed import MeasuredFit, Precision
    from nbguard.training.profiler.analysis.report import FitReport, Remedy, RemedyKind


# --- Predictions by an object, by the name of a Learner, or by a cell.


def predict(  # noqa: PLR0913 - a public function with keywords
    learn: Any,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    gpu: str | None = None,
    settings: str | None = None,
    precision: str | None = None,
    largest: bool = False,
    savings: bool = False,
    profile: FitReport | None = None,
    price: float | None = None,
) -> Prediction:
    """Return the memory that the next fit will take. Nothing runs on a GPU; nothing of the user's changes.

    A copy of the fit runs on tensors that have shapes and no data: a few training batches, and of a Learner the smaller last
    one and the validation. Their storages, and the buffers of CUDA's kernels, go through a model of PyTorch's allocator.

    Args:
        learn: the object to fit: a fastai Learner, Transformers' Trainer, a Lightning module, or a step of a loop over PyTorch,
            as a function of a batch that runs forward, backward and the optimizer's step.
        batch: a batch to go by, as the training loader yields it. Without, one is made from the first items of a Learner's or
            Trainer's training set; the others need it.
        batch_size: items of a batch; without, the loader's or the given batch's.
        gpu: a name ("T4", "A100", …) or a size ("16GiB"), which is empty before the fit. Without, the device that this process
            uses, with all that is there now, or the one that it would open; where there is none, nothing is said about whether
            it fits.
        settings: of the allocator, as `PYTORCH_ALLOC_CONF` writes them.
        precision: "bf16" or "fp16": mixed precision besides the present settings, for a Learner or a Lightning module.
        largest: whether to search for the largest batch that fits on `gpu`: some ten traces more.
        savings: whether to try changes that would save memory: a trace more for each change, and with `largest` the batch after
            each.
        profile: of this fit on a GPU, such as `nbguard.last_fit()`: also the time of an epoch on `gpu`.
        price: of an hour of that GPU: also the price of an epoch.

    Raises:
        UnpredictableError: the memory cannot be predicted; the message names the operator, module or object that prevents it.
        NbguardError: an argument cannot be used.
    """
    with _needing_torch():
        from nbguard.training.prediction.predict import predict as predict_memory
    prediction = predict_memory(
        learn,
        batch,
        batch_size=batch_size,
        gpu=gpu,
        settings=settings,
        precision=precision,
        largest=largest,
        savings=savings,
    )
    if profile is None and price is None:
        return prediction
    return with_epoch_times(prediction, profile, [] if price is None else [str(price)])


def prediction_of(
    namespace: dict[str, Any],
    name: str,
    size: int | None,
    gpu: str | None,
    settings: str | None,
    *,
    largest: bool = False,
    savings: bool = False,
) -> Prediction:
    """Return the prediction for the Learner of that name.

    Args:
        namespace: the user's names.
        name: of the Learner, or an expression such as `runs[0]`.
        size: items of a batch, instead of the loader's.
        gpu: a GPU's name or size.
        settings: of the allocator.
        largest: also the largest batch that fits.
        savings: also changes that would save memory.

    Raises:
        NbguardError: there is no such Learner, or its memory cannot be predicted; the message says why.
    """
    learn = _named(namespace, name)
    with _needing_torch():
        from nbguard.training.prediction.predict import predict
    return predict(learn, batch_size=size, gpu=gpu, settings=settings or "", largest=largest, savings=savings)


def prediction_on(
    namespace: dict[str, Any],
    name: str,
    size: int | None,
    gpus: Sequence[str],
    settings: str | None,
    *,
    largest: bool = False,
    savings: bool = False,
) -> Prediction | GpuComparison:
    """Return the prediction as `prediction_of` does, on one GPU or none, or a table of several.

    Raises:
        NbguardError: as of `prediction_of`; or savings are asked for of several GPUs.
    """
    named = _each_once(gpus)
    if len(named) < 2:
        gpu = named[0] if named else None
        return prediction_of(namespace, name, size, gpu, settings, largest=largest, savings=savings)
    if savings:
        raise NbguardError("--savings is about one GPU; name only one, as in  --gpu T4 --savings")
    learn = _named(namespace, name)
    with _needing_torch():
        from nbguard.training.prediction.predict import compare_gpus
    return compare_gpus(learn, named, batch_size=size, settings=settings or "", largest=largest)


@contextmanager
def _needing_torch() -> Iterator[None]:
    """Raise NbguardError where an import inside fails because PyTorch is not installed."""
    try:
        yield
    except ImportError:
        raise NbguardError("PyTorch is not installed here, so there is no fit to predict") from None


def _named(namespace: dict[str, Any], name: str) -> Any:
    from nbguard.memory.scan.targets import lookup, parse_target

    return lookup(parse_target(name), namespace)


def _each_once(gpus: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(gpus))


def prediction_of_cell(shell: Any, cell: str, gpus: Sequence[str]) -> CellPrediction | GpuComparison:
    """Return the prediction of the fits that a cell would start.

    Args:
        shell: IPython's, whose names are read.
        cell: the cell's text below the line of the magic.
        gpus: names or sizes; by default this kernel's device; several give a table.

    Raises:
        NbguardError: the cell starts no fit, or one that cannot be predicted; the message says why.
    """
    with _needing_torch():
        from nbguard.training.prediction.predict import predict_cell
    return predict_cell(shell.transform_cell(cell), shell.user_ns, _each_once(gpus) or [None])


# --- The memory of the next fit of a Learner in the sidebar's list, as the sidebar says it.


def prediction_row(namespace: dict[str, Any], name: str) -> str:
    """Return lines on the memory of the next fit of the Learner of a name, on the device that this kernel uses, as it is now.

    Args:
        namespace: the user's names.
        name: of the Learner.

    Raises:
        NbguardError: its memory cannot be predicted; the message says why.
    """
    prediction = prediction_of(namespace, name, None, None, None)
    need = f"the next fit needs {_of_capacity(prediction)}"
    return "\n".join((need, prediction.why, *(f"not counted: {text}" for text in prediction.unknown)))


def _of_capacity(prediction: Prediction) -> str:
    """Return the bytes that a fit is sure to run with, of those of the GPU: `11.2 of 14.6 GiB`."""
    need, capacity = prediction.need, prediction.capacity
    if capacity is None:
        return f"{format_bytes(need)} of a GPU"
    needed, all_of_it = (format_column([nbytes], unit_of(capacity))[0] for nbytes in (need, capacity))
    return f"{needed.split()[0]} of {all_of_it}"


# --- The time and price of an epoch on other GPUs, from the profile of a fit.


def measured_fit(report: FitReport) -> MeasuredFit:
    """Return the times of a fit's batches by its profile, and the GPU that it ran on."""
    from nbguard.training.prediction.speed import MeasuredFit

    timing, loader = report.timing, report.loader
    items, possible = (None, None) if loader is None else (loader.items_per_second, loader.possible_items_per_second)
    validation = sorted(epoch.total for epoch in timing.epochs if not epoch.is_training)
    size = round(items * timing.step / 1e9) if items and timing.step else None
    return MeasuredFit(
        title=report.title,
        gpu=timing.gpu,
        step=timing.step,
        busy=timing.busy,
        items=size,
        validation=validation[len(validation) // 2] if validation else 0,
        loader=round(size / possible * 1e9) if size and possible else 0,
        precision=_precision({setting.name: setting.value for setting in report.settings}),
    )


def _precision(settings: dict[str, str]) -> Precision:
    """Return the numbers that a fit multiplied, by the switches of its first training batch."""
    if settings.get("autocast", "off") != "off":
        return "half precision"
    if settings.get("float32 matmul precision") in ("high", "medium"):
        return "TensorFloat-32"
    return "float32" if settings.get("cudnn.allow_tf32") == "off" else "float32 and TensorFloat-32"


AnyPrediction = TypeVar("AnyPrediction", bound="Prediction | CellPrediction | GpuComparison")


def with_epoch_times(result: AnyPrediction, report: FitReport | None, given: list[str]) -> AnyPrediction:
    """Return a prediction with the time of an epoch on each of its GPUs, or why it is not known.

    Args:
        result: of one fit or several, on one GPU or several.
        report: of the profile of the fit; None without one.
        given: prices of an hour, as `T4=0.35`, or `0.35` for the one GPU.

    Raises:
        NbguardError: a price is not one, or of a GPU that is not named.
    """
    from nbguard.training.prediction.prediction import Prediction
    from nbguard.training.prediction.speed import epoch_time, prices_of

    predictions = [result] if isinstance(result, Prediction) else [fit.prediction for fit in result.fits]
    try:
        prices = prices_of(given, list(dict.fromkeys(each.gpu for each in predictions)))
    except ValueError as error:
        raise NbguardError(str(error)) from None
    fit = None if report is None else measured_fit(report)
    timed = [
        replace(each, epoch=epoch_time(fit, each.gpu, each.batches, next(iter(each.batch_sizes), None), prices.get(each.gpu)))
        for each in predictions
    ]
    if isinstance(result, Prediction):
        return cast("AnyPrediction", timed[0])
    return replace(result, fits=tuple(replace(of, prediction=each) for of, each in zip(result.fits, timed, strict=True)))


# --- Predicted bytes for the remedies of a fit that nearly filled its device, such as a smaller batch, and checkpoints.


_PREDICTED: dict[RemedyKind, ChangeKind] = {"smaller batch": "accumulation", "checkpointing": "checkpoints"}
"""The change that is traced for each remedy."""
_PARTS = 2
"""Batches into which one is cut, as the remedy says."""


def with_predicted_bytes(report: FitReport, source: str, namespace: dict[str, Any], seconds: float) -> FitReport:
    """Return a report whose remedies tell their savings, where these can be predicted in so many seconds; else as it is.

    Args:
        report: of the one fit of a cell.
        source: the cell, as Python.
        namespace: the user's names.
        seconds: until the last begin of a trace.
    """
    if not any(remedy.kind in _PREDICTED for remedy in report.remedies):
        return report
    try:
        before, savings = _savings(source, namespace, seconds)
    except (NbguardError, ImportError):
        return report
    return replace(report, remedies=tuple(_with_bytes(remedy, before, savings) for remedy in report.remedies))


def _savings(source: str, namespace: dict[str, Any], seconds: float) -> tuple[int, tuple[Saving, ...]]:
    """Return the peak of a cell's one fit in bytes, and the changes to it that could be traced."""
    import torch

    from nbguard.memory.allocator.model.settings import parse_version
    from nbguard.training.prediction.cell import fits_of_cell
    from nbguard.training.prediction.predict import tracer_of
    from nbguard.training.prediction.savings import savings

    fits = fits_of_cell(source, namespace)
    if len(fits) != 1:
        raise NbguardError("the cell has several fits")
    tracer = replace(tracer_of(fits[0].source, code=fits[0].code), until=time.monotonic() + seconds)
    endless = tracer.endless(None)
    version = parse_version(str(torch.__version__))
    return endless.peak_allocated, savings(tracer, None, endless, version, is_wanted=_is_asked_for)


def _is_asked_for(change: Change) -> bool:
    return change.kind == "checkpoints" or (change.kind == "accumulation" and change.parts == _PARTS)


def _with_bytes(remedy: Remedy, before: int, savings: Iterable[Saving]) -> Remedy:
    kind = _PREDICTED.get(remedy.kind)
    saving = next((each for each in savings if kind and each.kind == kind), None)
    if saving is None or saving.peak_allocated >= before:
        return remedy
    saved = before - saving.peak_allocated
    peaks = f"a peak of {format_bytes(saving.peak_allocated)} instead of {format_bytes(before)}"
    effect = f"predicted: {format_bytes(saved)} less, {peaks}; {saving.cost}"
    return replace(remedy, effect=effect, nbytes=saved)


@dataclass(frozen=True, kw_only=True)
class _LastPrediction:
    """The result of one search for a batch and changes that fit."""

    failure: tuple[object, ...]  # the failed fit
    items: int | None  # of the batch, or None if none was found
    changes: tuple[PredictedChange, ...]  # to the fit that save memory
    kept: int  # bytes that a cleanup left when it was predicted: with more than that it may not fit


class PredictedBatch:
    """Predicts the batch and changes that fit, and tells the analyses of later scans, for the last error."""

    def __init__(self) -> None:
        self._last: _LastPrediction | None = None

    def predict(self, analysis: Analysis, namespace: dict[str, Any], seconds: float) -> None:
        """Tell the analysis the items of a batch that fits after a cleanup, and other remedies, where they can be predicted.

        It is searched for once for each failure and state of the memory: every card on it says the same.

        Args:
            analysis: of the facts after the failure.
            namespace: the user's names: the Learner must be one of them.
            seconds: that the search may take.
        """
        oom, last = analysis.facts.oom, self._last
        if oom is None:
            return
        failure, kept = _failure(oom), _kept(analysis)
        if last is None or (last.failure, last.kept) != (failure, kept):
            items, changes = _search(analysis, oom, namespace, seconds)
            self._last = _LastPrediction(failure=failure, items=items, changes=changes, kept=kept)
        self.recall(analysis)

    def recall(self, analysis: Analysis) -> None:
        """Tell the analysis the predictions on its failure, unless more is held by now."""
        oom, last = analysis.facts.oom, self._last
        if oom is None or last is None or last.items is None:
            return
        if last.failure == _failure(oom) and _kept(analysis) <= last.kept:
            analysis.know(batch_that_fits, last.items)
            analysis.know(predicted_changes, last.changes)


def batch_of_cell(code: str, namespace: dict[str, Any], seconds: float) -> tuple[int, int] | None:
    """Return the items of a batch of the one fit in a cell's code, and of a batch that fits the device.

    None where the cell has another number of fits, or none could be predicted in `seconds`.
    """
    from nbguard.training.prediction.cell import fits_of_cell
    from nbguard.training.prediction.fitting_batch import largest_in_time
    from nbguard.training.prediction.predict import tracer_of

    try:
        fits = fits_of_cell(code, namespace)
        return largest_in_time(tracer_of(fits[0].source, code=fits[0].code), seconds) if len(fits) == 1 else None
    except Exception:  # noqa: BLE001 - a mistake of ours must not cost the user the line
        return None


_WORTH = 0.01
"""Share of the reserved peak that a change must save to be told of."""
_NOTHING: tuple[int | None, tuple[PredictedChange, ...]] = (None, ())


def _search(
    analysis: Analysis, oom: OomFact, namespace: dict[str, Any], seconds: float
) -> tuple[int | None, tuple[PredictedChange, ...]]:
    if oom.kind != "device" or not oom.learner or not oom.batch_size or analysis.facts.tracked != "cuda":
        return _NOTHING
    name, learn = next((item for item in tuple(namespace.items()) if id(item[1]) == oom.learner), ("", None))
    if learn is None:
        return _NOTHING
    from nbguard.training.prediction.fitting_batch import fitting_changes

    storages = analysis.facts.graph.storages
    freed = frozenset(storages[number].address for number in analysis.once(default_plan).storages)
    try:
        items, savings = fitting_changes(learn, oom.batch_size, freed, seconds)
        return items, tuple(_told(savings, name))
    except Exception:  # noqa: BLE001 - a mistake of ours must not cost the user the card
        return _NOTHING


def _told(savings: Iterable[Saving], name: str) -> Iterator[PredictedChange]:
    """Yield the changes that save enough, the best one of each kind."""
    kinds: set[ChangeKind] = set()
    helping = (each for each in savings if each.saved > _WORTH * (each.peak_reserved + each.saved))
    for saving in sorted(helping, key=_order):
        if saving.kind not in kinds:
            kinds.add(saving.kind)
            code = saving.code if name == "learn" else f"learn = {name}\n{saving.code}"
            code += f"\nlearn.dls.train.bs = {saving.batch_size}" if saving.kind == "accumulation" else ""
            yield PredictedChange(name=saving.name, saved=saving.saved, fits=saving.fits, cost=saving.cost, code=code)


def _order(saving: Saving) -> tuple[int, int]:
    """Return the sort key of a change: those that fit come first, with the larger batch; then those that save most."""
    if saving.fits:
        return 0, -saving.batch_size
    return 1 + (saving.fits is False), -saving.saved


def _failure(oom: OomFact) -> tuple[object, ...]:
    return oom.cell, oom.learner, oom.batch_size, oom.requested, oom.line


def _kept(analysis: Analysis) -> int:
    """Return the bytes that the default cleanup leaves."""
    whole = sum(storage.nbytes for storage in analysis.facts.graph.storages)
    return whole - analysis.once(default_plan).promised
