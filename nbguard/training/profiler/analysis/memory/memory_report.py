"""The memory of a fit, with the counters and samples that were read in it, and the report that follows from them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbguard.libraries import in_own_words
from nbguard.training.profiler.analysis.memory.growth import Sample, growth_of
from nbguard.training.profiler.analysis.memory.holders import Grown
from nbguard.training.profiler.analysis.memory.recorded_batch import RecordedBatch, Shape, Stock, categories, with_batch
from nbguard.training.profiler.analysis.report import FitFinding, MemoryPoint, MemoryReport, PhasePeak
from nbguard.units import MiB, counted, format_bytes

_NOTICED = MiB
"""Least rise of a peak in bytes that is mentioned."""
_PART = 0.1
"""Share of the rise that gradients and optimizer state take, at least, for them to be its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The batches from one on that trains more parameters than before. Sizes in bytes."""

    begins: int  # number of the training batch, from 1 on
    state: int  # of the optimizer then
    gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfrozen:
    """Parameters that an optimizer trains from some step on, and did not train before. Sizes in bytes."""

    parameters: int  # so many more
    peak: int  # before that step's batch
    kept: int  # by the gradients and the state of the optimizer, more than before
    stages: tuple[Stage, ...] = ()  # the first batches, and each time that more parameters were trained from then on


def unfrozen_finding(unfrozen: Unfrozen | None, peak: int) -> Iterator[FitFinding]:
    """Yield the reason why the peak rose to `peak` bytes, where it is known."""
    if unfrozen is None:
        return
    rise = peak - unfrozen.peak
    if rise < _NOTICED or unfrozen.kept < _PART * rise:
        return
    rest = "" if unfrozen.kept >= rise else "; the rest goes to activations that their backward pass needs, as a rule"
    yield FitFinding(
        kind="unfrozen",
        severity="note",
        what=f"the peak rose from {format_bytes(unfrozen.peak)} to {format_bytes(peak)}, because "
        f"{counted(unfrozen.parameters, 'more parameter is', 'more parameters are')} trained",
        evidence=f"their gradients and optimizer state take {format_bytes(unfrozen.kept)}{_by_stage(unfrozen.stages)}{rest}",
        change=f"`requires_grad_(False)` of layers that need not learn{in_own_words('freeze')}, or a smaller batch",
        nbytes=rise,
    )


def _by_stage(stages: tuple[Stage, ...]) -> str:
    """Return the gradients and the optimizer's state of each stage in words: `: 32 MiB + 64 MiB from batch 6 on`."""
    if not stages:
        return ""
    words = [f"{format_bytes(each.gradients)} + {format_bytes(each.state)} from batch {each.begins} on" for each in stages]
    return f": {', '.join(words)}"


CUDA = "torch.cuda"
"""The source of figures that PyTorch's own allocator counts on a GPU."""
_NEAR = 0.98
"""Share of the peak that must have been seen in a phase to say that the peak fell there."""


@dataclass(frozen=True, slots=True)
class Level:
    """The counters of a device at one moment, in bytes, or None if this device does not count it."""

    allocated: int  # in tensors: `allocated_bytes.all.current` of torch.cuda.memory_stats(); of malloc: in use
    reserved: int | None = None  # by PyTorch's allocator: `reserved_bytes.all.current`
    peak: int | None = None  # `allocated_bytes.all.peak`, since the process began or since the last reset
    peak_reserved: int | None = None  # `reserved_bytes.all.peak`, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryObservations:
    """Everything that was read of one device's memory during a fit. All sizes in bytes."""

    device: str  # as torch writes it: "cuda:0", "cpu", or the simulated device
    source: str  # of the counters: "torch.cuda", "simulated device", "heap of the process"
    capacity: int | None  # of the device, as far as PyTorch may use it; None if not limited, as in host memory
    start: Level  # when the profile began
    end: Level  # when the fit had ended
    highest: int  # level that was read, or that the peak counter showed between two readings
    highest_phase: str  # the phase that had just ended then; "": not known
    phases: tuple[PhasePeak, ...] = ()  # the highest level read in each phase, at its ends
    points: tuple[MemoryPoint, ...] = ()  # readings over time, thinned
    stock: Stock | None = None  # sizes of parameters, gradients, …; None if no optimizer stepped twice
    shape: Shape | None = None  # of the batch with the highest peak among those followed phase by phase
    unfrozen: Unfrozen | None = None  # parameters that are trained from some step on; None for all from the first step on
    samples: tuple[Sample, ...] = ()  # levels at the ends of training batches, to see growth
    living_losses: int = 0  # losses of sampled batches that still lived when the fit had ended
    grown: Grown | None = None  # the holder that grew between two looks at the process; None if no two looks, or none grew
    recorded: RecordedBatch | None = None  # of `--memory`: a batch recorded allocation by allocation
    recording_note: str = ""  # the reason why `--memory` recorded no batch

    @property
    def has_own_peak(self) -> bool:
        """Say whether the device's peak counter rose during the fit, and so is the fit's own."""
        return self.end.peak is not None and self.start.peak is not None and self.end.peak > self.start.peak

    @property
    def peak(self) -> int:
        """Return the most bytes that were allocated at once: counted by the device, or else the highest level read."""
        return self.end.peak if self.has_own_peak and self.end.peak is not None else max(self.highest, self.end.allocated)

    @property
    def peak_reserved(self) -> int | None:
        """Return the most bytes that were reserved at once; None where nothing is reserved."""
        start, end = self.start.peak_reserved, self.end.peak_reserved
        if start is not None and end is not None and end > start:
            return end
        return max((point.reserved for point in self.points if point.reserved is not None), default=None)


def memory_report(observed: MemoryObservations) -> MemoryReport:
    """Return the report on a fit's memory. Its categories add up to its peak."""
    growth = growth_of(observed.samples, observed.grown, is_on_host=observed.device == "cpu")
    peak, start = observed.peak, observed.start.allocated
    report = MemoryReport(
        device=observed.device,
        source=observed.source,
        peak=peak,
        start=start,
        end=observed.end.allocated,
        capacity=observed.capacity,
        peak_reserved=observed.peak_reserved,
        peak_phase=observed.highest_phase if observed.highest >= _NEAR * peak else "",
        phases=tuple(replace(phase, is_exact=observed.has_own_peak and phase.peak == peak) for phase in observed.phases),
        categories=categories(peak, start, observed.stock, observed.shape, grows=growth is not None),
        points=observed.points,
        growth=growth,
        notes=tuple(_notes(observed)),
    )
    return report if observed.recorded is None else with_batch(report, observed.recorded)


def _notes(observed: MemoryObservations) -> list[str]:
    notes = [observed.recording_note] if observed.recording_note else []
    before = observed.start.peak
    if before is None:
        where = "in all batches" if observed.recorded is None else "outside the recorded batch"
        notes.append(f"malloc keeps no peak, so {where} this is the highest level seen at the ends of phases")
    elif not observed.has_own_peak:
        notes.append(
            f"{format_bytes(before)} was allocated at once before the fit, which hides the fit's own peak; "
            "this is the highest level that was seen (torch.cuda.reset_peak_memory_stats() in the previous cell tells more)"
        )
    if observed.stock is None:
        notes.append("the memory was not broken down because no optimizer stepped twice")
    return notes
