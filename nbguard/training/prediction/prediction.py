"""A fit's predicted GPU memory, as frozen plain data, and its view as blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, TypeAlias

from nbguard.memory.core.gpu_models import gpu_model
from nbguard.render.html import Block, Line, Listing, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.texts import Text
from nbguard.training.prediction.speed import EpochTime
from nbguard.units import format_bytes, format_column, unit_of


class FitPhase(str, Enum):
    """A part of the handling of a batch, in JSON; members stand in the order of their run."""

    START = "start"  # the model is moved to the device
    BATCH = "batch"  # the batch comes to the device, and its transforms run there
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    STEP = "step"  # of the optimizer
    VALIDATION = "validation"  # without gradients

    __str__ = str.__str__
    __repr__ = str.__repr__


class MemoryCategory(str, Enum):
    """A kind of memory of a fit, in JSON."""

    PARAMETERS = "parameters"  # and buffers
    GRADIENTS = "gradients"  # memory that the backward pass makes and leaves
    OPTIMIZER_STATE = "optimizer state"  # memory that the optimizer's step makes and leaves
    INPUTS = "inputs"
    ACTIVATIONS = "saved activations"  # memory from the forward pass for the backward pass, with outputs and loss
    TEMPORARIES = "temporaries"  # memory that a phase makes and lets go of, kernels' own buffers among them
    WORKSPACES = "workspaces"  # of cuBLAS
    HELD = "held before"  # on the device when the fit begins, and not the fit's

    __str__ = str.__str__
    __repr__ = str.__repr__


@dataclass(frozen=True, slots=True)
class FitPhasePeak:
    """The memory of one phase."""

    phase: FitPhase
    peak_allocated: int  # most bytes in tensors at once while it runs


@dataclass(frozen=True, slots=True)
class CategoryBytes:
    """The memory of one category."""

    category: MemoryCategory
    nbytes: int  # of blocks, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPlace:
    """The allocation that reaches a fit's peak."""

    phase: FitPhase
    batch: int  # number of the batch, from 1 on
    operator: str  # of PyTorch's, as `aten.mm.default`; empty for a buffer of a kernel's own
    module: str  # path of the module that is called, or whose backward pass runs; empty if none, or the model itself
    module_class: str  # its class; empty for no module
    line: str  # of the user's code, as `forward() in model, line 12`; empty for a library's, as in most backward passes


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest training batches that a fit runs with on a GPU, in items, each traced, as was the next larger one."""

    sure: int | None  # it is sure to run: the band stays free; 0 for not even one item; None if not all could be traced
    limit: int  # it runs in the model of the allocator, where nothing is kept free; 0 for not even one item
    is_whole_set: bool  # the limit is the whole training set
    traces: int  # batch sizes that were tried for the limit


ChangeKind: TypeAlias = Literal["", "precision", "accumulation", "checkpoints", "frozen"]
"""A change that others ask for: half precision, gradients of several batches added up, checkpoints, or a frozen body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A change to a fit, tried in a trace of its own. All sizes are bytes."""

    name: str  # in words
    peak_allocated: int  # of the fit after the change
    peak_reserved: int  # of the fit after the change
    saved: int  # bytes fewer that are reserved at the peak; below 0: the change takes more
    batch_size: int  # items of a batch after the change
    code: str  # lines of Python that change the Learner `learn`, or a step's models by name; empty if a setting does it
    settings: str  # of the allocator, as PYTORCH_ALLOC_CONF writes it; empty if lines of Python do it
    cost: str  # cost of the change, in words
    fits: bool | None = None  # on this GPU, after the change: yes even with the band, no, or not known
    largest: LargestBatch | None = None  # batch that the fit runs with on this GPU after it; None if not asked for
    kind: ChangeKind = field(default="", metadata={"json": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Result):
    """The memory of a fit that has not run. All sizes are bytes."""

    kind: ClassVar[str] = "prediction"
    view: ClassVar[str] = "nbguard.training.prediction.prediction:prediction_blocks"

    gpu: str  # name of the GPU, or its size in words
    capacity: int | None  # of the GPU; None if none was named
    context: int  # of the GPU that is not PyTorch's: CUDA's own, assumed; on a live device measured, with other processes
    is_live: bool  # the fit begins on the device of this process as it is now; else on an empty one
    held: int  # in tensors on the device before the fit, and not the fit's
    settings: str  # of the allocator, as PYTORCH_ALLOC_CONF writes them
    torch_version: str  # of the PyTorch whose operators and allocator are followed
    peak_allocated: int  # most bytes in tensors at once, as torch.cuda.max_memory_allocated() will say
    peak_reserved: int  # most bytes that the allocator has at once, as torch.cuda.max_memory_reserved() will say
    end_allocated: int  # in tensors at the end of the fit
    model: int  # parameters and buffers, before the fit
    workspaces: int  # of cuBLAS, kept to the end
    phases: tuple[FitPhasePeak, ...]  # peak of each phase, in their order in a batch
    categories: tuple[CategoryBytes, ...]  # memory allocated at the peak, the largest first: adds up to `peak_allocated`
    peak: PeakPlace  # where the peak is
    first_batch: int  # most bytes in tensors at once in the first batch, before there is optimizer state
    steady: int  # most bytes in tensors at once in a later full batch
    band: int  # that the fit may take beyond `peak_reserved`: memory of libraries that cannot be computed
    fits: bool | None  # on this GPU: yes even with the band, no, or not known
    why: str  # the reason for `fits`
    batch_sizes: tuple[int, ...]  # items of the training batches that were traced
    batches: int | None  # training batches of an epoch; None if unknown, as of a step function
    convolutions: int  # number of calls of cuDNN's convolutions, whose workspaces are a part of the band
    seconds: float  # that the prediction took, without imports
    import_seconds: float = 0.0  # that it took besides to import parts of PyTorch, as the first one of a process does
    largest: LargestBatch | None = None  # batch that the fit runs with on this GPU; None if not asked for
    savings: tuple[Saving, ...] = ()  # changes that were tried, the one that saves most first; empty if not asked for
    unknown: tuple[str, ...] = ()  # untraced parts that may take memory: with them nothing is said to fit
    assumptions: tuple[str, ...] = ()  # in words
    epoch: EpochTime | None = None  # time of an epoch on this GPU, from a fit that was measured; None if not asked for

    @property
    def need(self) -> int:
        """Bytes of a GPU that the fit is sure to run with: reserved memory, CUDA's context and the band."""
        return self.peak_reserved + self.context + self.band


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFit:
    """A fit that a cell would start."""

    text: str  # its line, in words
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPrediction(Result):
    """The memory of the fits that a cell would start, or of a script's first."""

    kind: ClassVar[str] = "cell_prediction"
    view: ClassVar[str] = "nbguard.training.prediction.prediction:cell_blocks"

    executed: str  # code that has run, in words
    fits: tuple[PredictedFit, ...]  # in their order; each begins on the device as it is before the cell


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuComparison(Result):
    """The memory of the same fits on several GPUs."""

    kind: ClassVar[str] = "gpu_comparison"
    view: ClassVar[str] = "nbguard.training.prediction.prediction:comparison_blocks"

    executed: str  # as of `CellPrediction`; empty if nothing has run
    fits: tuple[PredictedFit, ...]  # all on the first GPU, then all on the next; each GPU is empty before a fit


# --- A prediction as blocks.


_SHORT = 0.05
"""Seconds of imports that are not mentioned."""
_WORTH = 0.01
"""Share of the reserved peak that a change must save to be shown with its lines."""
_SPOKEN_WITH_A_VOWEL = "AHLMR"
"""First letters of models that follow "an": an A100, an RTX 3060."""
_ANSWERS = {True: "It fits", False: "It does not fit", None: "It is not known whether it fits"}


def prediction_blocks(prediction: Prediction, *, assumptions: bool = True) -> Iterator[Block]:
    """Yield the answer, the peaks and their parts, the assumptions unless they are shown already."""
    yield Title(_verdict(prediction), "strong")
    yield Line(prediction.why)
    rows = (
        ("peak allocated", prediction.peak_allocated, _place(prediction.peak)),
        ("peak reserved", prediction.peak_reserved, "by PyTorch's allocator"),
        ("CUDA context", prediction.context, "and other processes, measured" if prediction.is_live else "assumed"),
        ("band", prediction.band, "for library memory that cannot be computed"),
    )
    figures = format_column([nbytes for _, nbytes, _ in rows], unit_of(prediction.need))
    shown = tuple(TableRow(cells=(name, figure, note)) for (name, _, note), figure in zip(rows, figures, strict=True))
    yield Table(rows=shown, figures=(1,))
    yield from _made_of(prediction)
    imports = f" after {prediction.import_seconds:.1f} s of imports" if prediction.import_seconds >= _SHORT else ""
    yield Line(
        f"PyTorch {prediction.torch_version} · settings: {prediction.settings or 'defaults'} · "
        f"predicted in {prediction.seconds:.1f} s{imports}"
    )
    yield from _savings(prediction)
    if prediction.largest is not None:
        yield Line(_largest(prediction.largest), "strong")
    if prediction.epoch is not None:
        if prediction.epoch.least is not None:
            yield Line(_epoch(prediction.epoch), "strong")
        yield Listing(sentences=(prediction.epoch.note, *prediction.epoch.limits))
    if prediction.unknown:
        yield Listing(sentences=tuple(f"not counted: {text}" for text in prediction.unknown))
    if prediction.assumptions and assumptions:
        yield Listing(sentences=tuple(Text("assumed: ") + text for text in prediction.assumptions))


def _verdict(prediction: Prediction) -> str:
    """Return the answer in a sentence, with the bytes that the fit takes and those that CUDA takes by itself."""
    context = f"{format_bytes(prediction.context)} {'that is in use already' if prediction.is_live else 'for CUDA itself'}"
    takes = f"{format_bytes(prediction.peak_reserved)} for tensors and cache, plus about {context}"
    if prediction.capacity is None:
        return f"The next fit takes {takes}"
    gpu = prediction.gpu
    if gpu_model(gpu):
        gpu = f"{'an' if gpu[0] in _SPOKEN_WITH_A_VOWEL else 'a'} {gpu}"
    if prediction.fits is None and prediction.unknown and prediction.need <= prediction.capacity:
        return f"As far as it could be traced, it fits on {gpu}: {takes}"
    return f"{_ANSWERS[prediction.fits]} on {gpu}: {takes}"


def _place(peak: PeakPlace) -> str:
    """Return where the peak is, in words."""
    words = "the batch comes" if peak.phase is FitPhase.BATCH else str(peak.phase)
    if peak.module_class:
        words += f" of {peak.module} ({peak.module_class})" if peak.module else f" of {peak.module_class}"
    return f"in tensors: batch {peak.batch}, {words}" + (f", {peak.line}" if peak.line else "")


def _made_of(prediction: Prediction) -> Iterator[Block]:
    """Yield the bytes allocated at the peak by category, and the peak of each phase."""
    unit = unit_of(prediction.peak_allocated)
    figures = format_column([each.nbytes for each in prediction.categories], unit)
    rows = (TableRow(cells=(str(each.category), figure)) for each, figure in zip(prediction.categories, figures, strict=True))
    yield Line("allocated at the peak:", "strong")
    yield Table(rows=tuple(rows), figures=(1,))
    phases = " · ".join(f"{each.phase} {format_bytes(each.peak_allocated)}" for each in prediction.phases)
    yield Line(f"peak of each phase: {phases}")
    first, steady = format_bytes(prediction.first_batch), format_bytes(prediction.steady)
    yield Line(f"first batch {first}, later ones {steady}")


def cell_blocks(cell: CellPrediction) -> Iterator[Block]:
    """Yield the predictions of a cell's fits one after the other."""
    yield Line(f"predicted; {cell.executed}:", "dim")
    for fit in cell.fits:
        yield Line(fit.text, "strong")
        yield from prediction_blocks(fit.prediction, assumptions=fit is cell.fits[-1])


_FITS = {True: "fits", False: "does not fit", None: "may fit"}


def comparison_blocks(comparison: GpuComparison) -> Iterator[Block]:
    """Yield a table for each fit, with a row for each GPU in the given order."""
    if comparison.executed:
        yield Line(f"predicted; {comparison.executed}:", "dim")
    for text in dict.fromkeys(fit.text for fit in comparison.fits):
        predictions = [fit.prediction for fit in comparison.fits if fit.text == text]
        yield Line(text, "strong")
        yield _of_gpus(predictions)
    found = [fit.prediction for fit in comparison.fits]
    sentences = [text for each in found if each.epoch is not None for text in (each.epoch.note, *each.epoch.limits)]
    sentences += [f"not counted: {text}" for each in found for text in each.unknown]
    sentences += [Text("assumed: ") + text for each in found for text in each.assumptions]
    if sentences:
        yield Listing(sentences=tuple(dict.fromkeys(sentences)))


def _of_gpus(predictions: list[Prediction]) -> Table:
    """Return the GPUs, whether the fit runs on each, the memory it leaves free, and all else that was asked for."""
    unit = unit_of(max(each.need for each in predictions))
    needs = format_column([each.need for each in predictions], unit)
    margins = [(each.capacity or 0) - each.need for each in predictions]
    figures = format_column([abs(margin) for margin in margins], unit)
    rows = []
    for each, need, margin, figure in zip(predictions, needs, margins, figures, strict=True):
        size, largest, epoch = format_bytes(each.capacity or 0), each.largest, each.epoch
        room = f"−{figure}" if margin < 0 else figure
        asked = ("" if largest is None else _items(largest), epoch.words if epoch else "", epoch.cost if epoch else "")
        rows.append(TableRow(cells=(each.gpu, size, _FITS[each.fits], need, room, *asked)))
    names = ("GPU", "memory", "the fit", "it needs", "margin", "largest batch", "an epoch takes", "and costs")
    return Table(rows=tuple(rows), names=names, figures=(1, 3, 4))


def _epoch(epoch: EpochTime) -> str:
    """Return the time of an epoch in a sentence, with its price."""
    return f"an epoch takes {epoch.words}" + (f", and costs {epoch.cost}" if epoch.cost else "")


def _items(largest: LargestBatch) -> str:
    """Return the largest batches in a few words: `31, up to 34 may fit`."""
    if not largest.limit:
        return "none"
    if largest.sure == largest.limit:
        return f"{largest.sure}"
    return f"{largest.sure or 'none'}, up to {largest.limit} may fit"


def _savings(prediction: Prediction) -> Iterator[Block]:
    """Yield the changes that save memory, each with the lines that do it, and the names of those that do not."""
    helping = [saving for saving in prediction.savings if saving.saved > _WORTH * prediction.peak_reserved]
    if helping:
        figures = format_column([saving.saved for saving in helping], unit_of(prediction.peak_reserved))
        rows = (
            TableRow(cells=(each.name, f"−{figure}", _fits_after(prediction, each) + each.cost + _largest_after(each)))
            for each, figure in zip(helping, figures, strict=True)
        )
        yield Line("changes that would save memory (of the reserved peak):", "strong")
        yield Table(rows=tuple(rows), figures=(1,))
        for saving in helping:
            yield Line(f"{saving.name}:", "dim")
            yield from map(Line, saving.code.splitlines() or [f"PYTORCH_ALLOC_CONF={saving.settings}"])
    others = [saving.name for saving in prediction.savings if saving not in helping]
    if others:
        yield Line(f"would save next to nothing here: {', '.join(others)}", "dim")


def _fits_after(prediction: Prediction, saving: Saving) -> str:
    """Return whether the fit runs after a change, where it does not as it is."""
    if prediction.fits or saving.fits is None:
        return ""
    return "then it fits; " if saving.fits else "even then it does not fit; "


def _largest_after(saving: Saving) -> str:
    return "" if saving.largest is None else f"; {_largest(saving.largest)}"


def _largest(largest: LargestBatch) -> str:
    """Return the largest batches in a sentence."""
    if not largest.limit:
        return "largest batch: not even one item fits"
    whole = ", the whole training set" if largest.is_whole_set else ""
    if largest.sure == largest.limit:
        return f"largest batch: {largest.limit} fits{whole}"
    sure = "none is sure to fit" if not largest.sure else f"{largest.sure} is sure to fit"
    return f"largest batch: {sure}; up to {largest.limit}{whole} may fit, with nothing left for memory that cannot be computed"
