"""Memory that grows from batch to batch, with its detection, rate, and the finding in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median

from nbguard.libraries import in_own_words
from nbguard.memory.core import advice
from nbguard.training.profiler.analysis.growth_holders import JOINED, Grown
from nbguard.training.profiler.analysis.recorded_batch import RecordedBatch, Shape, Stock, categories, with_batch
from nbguard.training.profiler.analysis.report import FitFinding, Growth, MemoryPoint, MemoryReport, PhasePeak
from nbguard.training.profiler.analysis.time.batches import Slowing
from nbguard.units import KiB, MiB, counted, format_bytes, format_time

ENOUGH = 12
"""Samples of the steady state that it takes to see growth."""
WARM_UP = 3
"""Training batches that are left out: allocators and libraries fill their caches in them."""
NOTICED = 4 * KiB
"""Bytes per batch below which growth is no finding: a list of numbers grows, too (a Learner's Recorder keeps some)."""
KEPT = 2 * KiB
"""Least bytes per batch of kept graphs: a model's takes more, the part that a Learner's Recorder keeps of a batch 1.5 KiB."""
LIVING = 2
"""Losses that may live on after a healthy fit: the last one by its name, and by the name of the epoch before."""
_STATS = ".activation_stats.stats"
"""The attribute where the callback `ActivationStats` keeps its statistics of each batch."""
_MOST = 36
_GROUP = 3
_ENOUGH_FOR_GROUPS = _GROUP * ENOUGH
_FEW = 24
_CLEAR, _LIKELY = 0.9, 0.8
"""Share of all pairs of samples whose later one must be the higher, of few and of many samples."""
_NOTICED_EPOCH = 256 * KiB
_COLLECTIONS = (100, 10)
"""Batches between two collections of cycles. One of a large heap takes as long as many batches."""
_WAITING = 256 * MiB
"""Most bytes of cycles that may wait for a collection, where there is a choice."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The bytes allocated at the boundary after training batch `batch`, in epoch `epoch`."""

    batch: int
    epoch: int
    allocated: int


@dataclass(frozen=True, slots=True)
class KeptGraphs:
    """A name of the notebook that held tensors with autograd graphs of their own after the fit."""

    name: str  # as the user would write it, e.g. "history" or "self → losses"
    count: int  # tensors with a graph
    container: str = "list"  # name of its class, or `NESTED`


def growth_per_batch(samples: Sequence[Sample]) -> int | None:
    """Return the bytes of growth per training batch, or None if memory does not grow, or not all the time.

    The median slope of all pairs (Theil and Sen): single batches of another size do not move it. Growth that ends, as a
    cache that is full, is none: each third of the samples must show half of it.
    """
    kept = _thinned([sample for sample in samples if sample.batch > WARM_UP])
    if len(kept) < ENOUGH:
        return None
    slopes = _slopes(kept)
    per_batch = median(slopes)
    rising = sum(slope > 0 for slope in slopes) / len(slopes)
    if per_batch < NOTICED or rising < (_CLEAR if len(kept) < _FEW else _LIKELY):
        return None
    third = len(kept) // 3
    parts = (kept[:third], kept[third : 2 * third], kept[2 * third :])
    return None if any(median(_slopes(part)) < per_batch / 2 for part in parts) else round(per_batch)


def may_keep_graphs(samples: Sequence[Sample], living: int) -> bool:
    """Say whether names may hold graphs of many batches: losses live on, memory grows, or too little is known of it.

    `living`: losses of sampled batches that were still there after the fit.
    """
    kept = _thinned([sample for sample in samples if sample.batch > WARM_UP])
    return living > LIVING or len(kept) < ENOUGH or median(_slopes(kept)) > KEPT or _rises_between(kept)


def _rises_between(samples: Sequence[Sample]) -> bool:
    """Say whether memory is higher towards the end, though it may be level for many batches, as between two evaluations."""
    third = len(samples) // 3
    first, last = samples[:third], samples[-third:]
    rise = median(sample.allocated for sample in last) - median(sample.allocated for sample in first)
    return rise > KEPT * (last[0].batch - first[0].batch)


def growth_per_epoch(samples: Sequence[Sample]) -> int | None:
    """Return the bytes of growth per epoch, from the second on, or None if there is none or it is unknown."""
    by_epoch: dict[int, list[int]] = {}
    for sample in samples:
        by_epoch.setdefault(sample.epoch, []).append(sample.allocated)
    levels = [median(allocated) for allocated in by_epoch.values()][1:]
    steps = [after - before for before, after in pairwise(levels)]
    if len(steps) < 2:
        return None
    per_epoch = median(steps)
    return round(per_epoch) if per_epoch >= _NOTICED_EPOCH and min(steps) >= per_epoch / 2 else None


def growth_of(samples: Sequence[Sample], grown: Grown | None, *, is_on_host: bool = False) -> Growth | None:
    """Return by how much memory grew, if it did; `grown` is the holder that grew between two looks, None if none is known."""
    per_batch, per_epoch = growth_per_batch(samples), growth_per_epoch(samples)
    if per_batch is None and per_epoch is None:
        if grown is None or not grown.is_graph or not grown.is_retained:
            return None
        per_batch = round(grown.nbytes / max(grown.batches, 1))  # too few batches to go by memory
    holder = grown or Grown(holder="")
    return Growth(
        per_batch=per_batch or 0,
        batches=samples[-1].batch - WARM_UP,
        holder=holder.holder,
        root=holder.root,
        held=holder.held,
        per_epoch=per_epoch,
        epochs=len({sample.epoch for sample in samples}),
        is_graph=holder.is_graph,
        is_sum=holder.is_sum,
        is_state=holder.is_state,
        container=holder.container,
        is_retained=holder.is_retained,
        is_on_host=is_on_host,
    )


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return at most `_MOST` samples. Of many, one of the middle of every few: a last batch that is smaller drops out."""
    if len(samples) < _ENOUGH_FOR_GROUPS:
        return samples
    size = max(_GROUP, -(-len(samples) // _MOST))
    groups = (samples[at : at + size] for at in range(0, len(samples), size))
    return [sorted(group, key=lambda sample: sample.allocated)[len(group) // 2] for group in groups]


def _slopes(samples: Sequence[Sample]) -> list[float]:
    pairs = ((a, b) for a, b in combinations(samples, 2) if b.batch > a.batch)
    return [(b.allocated - a.allocated) / (b.batch - a.batch) for a, b in pairs] or [0.0]


def growth_finding(growth: Growth, slowing: Slowing | None = None) -> FitFinding:
    """Return the finding on memory that grows. `slowing`: of batches, which a graph that grows makes take longer and longer."""
    rate = _rate(growth)
    where, is_graph, is_garbage = growth.holder, growth.is_graph, growth.root == "garbage"
    what = f"memory grows by {rate}: " if rate else ""
    evidence = f"{f'+{rate}, ' if rate else ''}seen over {growth.batches} training batches at the same point of each"
    if growth.held:
        evidence += f"; {'they' if is_garbage else f'`{where}`'} held {format_bytes(growth.held)} at the last check"
    if is_garbage:
        what += "reference cycles keep tensors of every batch until Python's garbage collector finds them"
        change = _collected(growth.per_batch)
    elif is_graph:
        if growth.is_sum and slowing is not None:
            what = f"each batch takes longer than the one before ({format_time(slowing.first)} → {format_time(slowing.last)}): "
        what += f"`{where}` keeps the autograd graph of every batch"
        name = where.rpartition(" → ")[2]
        is_joined = growth.container == JOINED
        kind = "tensor" if growth.is_sum and not is_joined else growth.container
        change = _carried(name) if growth.is_state and not is_joined else _detached(name, kind)
        if growth.is_retained and growth.is_state and not is_joined:
            change += "; the backward pass then needs no `retain_graph=True`"
    elif growth.holder:
        what += f"`{where}` keeps tensors of every batch"
        change = _fewer(growth)
    else:
        what += "its holder is not known"
        change = "look for lists that the loop appends to; " + advice.REPORT.code + " after the cell shows who holds tensors"
    is_sure = is_graph or (growth.holder and growth.epochs > 1)
    if not (is_graph or is_garbage) and growth.epochs < 2:
        evidence += "; only one epoch was seen, so it may be a cache that fills"
    return FitFinding(
        kind="graph" if is_graph else "growth",
        severity="problem" if is_sure else "advice",
        what=what,
        evidence=evidence,
        change=change,
        nbytes=growth.per_batch or None,
        total=slowing.total if slowing is not None and is_graph and growth.is_sum else None,
    )


def _collected(per_batch: int) -> str:
    """Return the call that frees cycles, and how often it is due.

    `per_batch`: bytes of their growth; 0 where only the growth per epoch is known.
    """
    if not per_batch:
        return "call `gc.collect()` after each epoch"
    every = next((number for number in _COLLECTIONS if number * per_batch <= _WAITING), _COLLECTIONS[-1])
    return f"call `gc.collect()` every {every} batches; at most {format_bytes(every * per_batch)} then waits for it"


def _fewer(growth: Growth) -> str:
    """Return how a holder of tensors is made to keep less."""
    if growth.holder.endswith(_STATS):
        return (
            "`ActivationStats(with_hist=True, every=20)` keeps them of each 20th batch; without `with_hist` only numbers stay"
        )
    elsewhere = "tensors of fewer batches" if growth.is_on_host else "copies on the host (`.detach().cpu()`)"
    emptied = f", or empty `{growth.holder}` each epoch" if growth.root in ("name", "module", "frame") else ""
    return f"keep numbers of them (`.item()`), or {elsewhere}{emptied}"


def _rate(growth: Growth) -> str:
    """Return by how much memory grows, in words; "" where only graphs are known to grow."""
    per, nbytes = ("batch", growth.per_batch) if growth.per_batch else ("epoch", growth.per_epoch)
    return f"{format_bytes(nbytes)} per {per}" if nbytes else ""


def graph_findings(kept: Iterable[KeptGraphs], batches: int) -> Iterator[FitFinding]:
    """Yield a finding for each name that keeps the graphs of at least half of so many training batches, however small."""
    yield from (_kept(holder, batches) for holder in kept if holder.count >= least_kept(batches))


def with_growth(graphs: Sequence[FitFinding], growth: Growth | None, slowing: Slowing | None = None) -> Iterator[FitFinding]:
    """Yield findings on graphs that names keep, and the one on memory that grows, if it speaks of something else."""
    if growth is None:
        yield from graphs
        return
    grown, *others = (growth_finding(growth, slowing), *graphs)
    if not growth.holder and others:  # it grows by the graphs
        first, *others = others
        yield replace(first, evidence=first.evidence + f"; memory grows by {_rate(growth)}", nbytes=grown.nbytes)
    elif any(f"`{growth.holder}`" in finding.what for finding in others):
        others = [
            replace(finding, evidence=finding.evidence + "; " + grown.evidence, nbytes=grown.nbytes)
            if f"`{growth.holder}`" in finding.what
            else finding
            for finding in others
        ]
    else:
        yield grown
    yield from others


def least_kept(batches: int) -> int:
    """Return how many graphs of so many training batches are worth a finding, at least."""
    return max(ENOUGH, batches // 2)


def _kept(holder: KeptGraphs, batches: int) -> FitFinding:
    what = f"`{holder.name}` keeps {holder.count} autograd graphs"
    evidence = f"{holder.count} tensors with a graph of their own, {batches} training batches"
    return FitFinding(
        kind="graph",
        severity="problem",
        what=what,
        evidence=evidence,
        change=_detached(holder.name.rpartition(" → ")[2], holder.container),
    )


def _carried(name: str) -> str:
    pair, _, item = name.rpartition("[")
    line = (
        f"{pair} = tuple(state.detach() for state in {pair})" if pair and item[:-1].isdecimal() else f"{name} = {name}.detach()"
    )
    return f"cut the graph where the next batch begins: `{line}`; the same with each further state"


def _detached(name: str, container: str) -> str:
    line = advice.without_graph(name, container)
    if line is advice.NONE:
        return f"store no graphs in `{name}`: of a loss the number, `loss.item()`, and of a tensor `.detach()`"
    if container == JOINED:
        return "join the values without their graphs: " + line.code
    return "keep the number, not its graph: " + line.code + "; of a tensor that is needed, `.detach()`"


# --- The memory of a fit, with the counters and samples that were read in it, and the report that follows from them. Pure.


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
