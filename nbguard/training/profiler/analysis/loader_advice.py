"""Advice on the loaders of a fit, each with the figure that speaks for it. A healthy fit gets none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nbguard.render.markup import line_words
from nbguard.training.profiler.analysis.report import FitFinding, Timing
from nbguard.training.profiler.analysis.slowest import LoaderFacts, SlowStep, slowest, storage_wait, training_loader
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.units import MiB, counted, format_bytes, format_time

WAITING = 0.10  # of a step: less waiting is not worth a thought
_SMALL = 0.05  # of a step, or of an epoch: less is left alone
_LARGE = 0.30  # of a fetch: a function that takes less is not named
_WORTH = 1_000_000  # ns per batch: handing a batch from a worker to the fit takes about as long
_PAYS = 3 * _WORTH  # ns per batch that workers may save: handing batches over, and starting again for each epoch, must pay
_PAYS_EPOCH = 250_000_000  # ns, the same for an epoch
_SLOWER, _BESIDE = 1.5, 1.25  # times as long: a batch in a worker beside others, and the rest of a step beside workers
_SURELY = 0.9  # of an epoch's time: workers are advised where it is shorter than that at the most
_START = 100_000_000  # ns until a worker has started, on a busy machine
_NOTICED_START = 200_000_000  # ns in all, of starting workers that are not needed
_NOTICED = 10**9  # ns in all: less is not worth a thought
_COPIED = 32 * MiB  # by all workers: less is not mentioned
_COPIED_BY_ANY = 8 * MiB  # by each: pages that the interpreter writes to, and some more
_GIVING = 300_000  # ns per batch: handing copies to the device takes about as long, however they are made
_IN_BATCHES = ("reading", "transform", "workers", "prefetch", "pin_memory")
"""Kinds of findings on waits of every batch, which cost nothing while the GPU is at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderContext:
    """Everything that advice on the loaders is taken from. Times in nanoseconds."""

    timing: Timing  # of the whole fit
    step: int  # median of a batch in the steady state
    medians: Mapping[str, int]  # of its phases, by name
    loaders: tuple[LoaderFacts, ...]  # of training and validation
    cores: int  # that the process may use
    on_accelerator: bool  # whether the model is on one
    is_waiting: bool  # whether the fit is bound by its data

    @property
    def wait(self) -> int:
        """Return the nanoseconds of a batch spent waiting for data."""
        return self.medians.get(phase_log.WAIT, 0)

    @property
    def do_workers_pay(self) -> bool:
        """Say whether the fit waits so long that workers could make up for their own cost."""
        batches = max((epoch.batches for epoch in self.timing.epochs if epoch.is_training), default=0)
        return self.wait >= _PAYS and self.wait * batches >= _PAYS_EPOCH

    @property
    def loader(self) -> LoaderFacts | None:
        """Return the loader of the training batches."""
        return training_loader(self.loaders)


def advice(context: LoaderContext) -> Iterator[FitFinding]:
    """Yield what to change, the most rewarding first as far as it is measured."""
    needless = [*_needless(context)]
    findings = needless or [*_crowded(context), *_restarted(context)]
    findings += [*_first(context), *_copied(context)]
    if context.loader is not None:
        slow = [*_reading(context, context.loader)] or [*_transform(context, context.loader)]
        workers = [] if needless else [*_more_workers(context, context.loader)]
        if any(2 * (finding.time or 0) >= context.wait for finding in slow):  # the cause; workers only share it
            workers = [replace(finding, severity="note") for finding in workers]
        findings += [*slow, *workers, *_copying(context, context.loader)]
    timing = context.timing
    findings = [
        replace(finding, time=min(finding.time or 0, timing.gainable)) if finding.kind in _IN_BATCHES else finding
        for finding in findings
    ]
    yield from sorted(findings, key=lambda finding: -(finding.total or timing.of_fit(finding.time or 0)))


def _finding(kind: str, what: str, evidence: str, change: str, time: int | None = None) -> FitFinding:
    return FitFinding(kind=kind, severity="advice", what=what, evidence=evidence, change=change, time=time)


def _reading(context: LoaderContext, loader: LoaderFacts) -> Iterator[FitFinding]:
    """Yield that batches come as fast as their files are read, and no faster."""
    waited = storage_wait(loader.fetch)
    if not context.is_waiting or waited is None or waited[0] < _WORTH:
        return
    blocked, stored = waited
    made = (loader.fetch.blocked + loader.fetch.ran) // loader.fetch.metered
    speed = format_bytes(stored * 10**9 // made)
    spread = f", spread over {loader.workers} workers" if loader.workers > 1 else ""
    yield _finding(
        "reading",
        f"each batch waits for {format_bytes(stored)} of files, which come at {speed} a second",
        f"{format_time(blocked)} of the {format_time(made)} that making a batch takes is waiting for storage{spread}; "
        f"the fit waits {format_time(context.wait)} per batch",
        (
            "read less (smaller or compressed files, only the parts you use), or first copy the files to a faster "
            "disk or into memory"
        ),
        min(context.wait, blocked // max(1, loader.workers)),
    )


def _transform(context: LoaderContext, loader: LoaderFacts) -> Iterator[FitFinding]:
    """Yield the function that a fetch spends most in, if the fit waits for it. Its cost is its share of a worker."""
    slow = slowest(loader.fetch)
    if not context.is_waiting or slow is None or slow.per_batch < max(_LARGE * slow.fetch, _WORTH):
        return
    function = slow.step.function
    if (function.library or not function.is_users) and context.wait * context.timing.batches < _NOTICED:
        return  # a library's work is as it is: only a long fit may want it done elsewhere
    where = line_words(function.file.rpartition("/")[2], function.line, "")
    what = {
        "transform": "the slowest transform",
        "collate": "the collate function",
        "dataset": "the slow part of reading the dataset",
    }
    spread = f", spread over {loader.workers} workers" if loader.workers > 1 else ""
    where_else = "for all items at once" if slow.step.kind == "collate" else "once before the fit, or once per batch"
    does, change = f"is {what[slow.step.kind]}", f"do less in `{slow.step.name}`, or do its work {where_else}"
    if function.library:
        does = f"calls {function.library} for each item"
        change = "do that work once, before the fit, or for all items of a batch at once, in the loader's `collate_fn`"
    yield _finding(
        "transform",
        f"`{slow.step.name}` ({where}) {does}",
        f"{slow.evidence()}{spread}",
        change,
        min(context.wait, slow.per_batch // max(1, loader.workers)),
    )
    yield from _kept(context, loader, slow)


_KEEP_ITEMS = "`items = [data[i] for i in range(len(data))]` before the fit, then a loader of `items` instead of `data`"
_KEEP_ITEMS_OF_LEARNER = "`import functools; learn.dls.train.do_item = functools.cache(learn.dls.train.do_item)`"
"""Items as they are after their transforms, each made once, in the first epoch."""


def _kept(context: LoaderContext, loader: LoaderFacts, slow: SlowStep) -> Iterator[FitFinding]:
    """Yield the cost of making all items once and keeping them, and the savings, where both are known."""
    batches = max((epoch.batches for epoch in context.timing.epochs if epoch.is_training), default=0)
    size = loader.fetch.nbytes * batches
    is_lost = loader.is_learners and loader.workers > 0  # fastai's workers end with each epoch
    if not size or loader.is_iterable or is_lost or slow.step.kind == "collate":
        return
    found = _finding(
        "items",
        f"kept in host memory, all items take {format_bytes(size)}",
        f"this saves {format_time(slow.per_batch)} of the {format_time(slow.fetch)} that making a batch takes, "
        "but only makes sense if items are not changed at random",
        _KEEP_ITEMS_OF_LEARNER if loader.is_learners else _KEEP_ITEMS,
    )
    yield replace(found, severity="note", nbytes=size)


def _more_workers(context: LoaderContext, loader: LoaderFacts) -> Iterator[FitFinding]:
    """Yield that workers would help: some, more, or the same ones with more batches ahead."""
    if not context.is_waiting or context.wait < _WORTH or (loader.is_iterable and not loader.is_learners):
        return
    if loader.workers > context.cores:
        return  # fewer of them come first
    evidence = f"the fit waits {format_time(context.wait)} per batch; {context.cores} cores may be used"
    fetch = loader.fetch.median
    is_fast = fetch is not None and fetch < loader.workers * (context.step - context.wait)
    if loader.workers == 0 and context.cores > 1 and context.do_workers_pay:
        making, rest = fetch or context.wait, context.step - context.wait
        workers = min(context.cores, max(2, math.ceil(_SLOWER * making / max(rest, 1))))
        now, low, high = _epochs(context, making, rest, workers)
        if high > _SURELY * now:
            return  # they may make it slower
        evidence += f"; an epoch takes {format_time(now)}, with {workers} workers {format_time(low)} to {format_time(high)}"
        change = f"`num_workers={workers}`; `--tune-workers` measures which number is best"
        left = max(0, context.wait // workers - rest)  # time that so many workers would not hide
        yield _finding(
            "workers", "batches are made in the fit's own process, one after the other", evidence, change, context.wait - left
        )
    elif loader.workers and fetch is not None and 2 * fetch < context.wait:
        what = f"the fit waits longer for its {_workers(loader.workers)} than a batch takes to make"
        why = f"a batch takes a worker {format_time(fetch)}; the rest is handing it over and taking turns"
        change = "`num_workers=0` makes batches in the fit's own process; `--tune-workers` measures whether that is better"
        yield _finding("workers", what, f"{why}; {evidence}", change, context.wait - fetch)
    elif 0 < loader.workers < context.cores and not is_fast:
        change = f"`num_workers={context.cores}`; `--tune-workers` measures which number is best"
        yield _finding("workers", f"{_workers(loader.workers)} cannot keep up with the fit", evidence, change, context.wait)
    elif fetch is not None and is_fast and context.wait > _LARGE * context.step:
        ahead = loader.prefetch or 2
        rate = f"a batch takes a worker {format_time(fetch)}, so {loader.workers} of them could keep up"
        change = f"`prefetch_factor={2 * ahead}` (it is {ahead}) evens out batches that take longer"
        yield _finding(
            "prefetch", "the fit waits though its workers are fast enough", f"{rate}; {evidence}", change, context.wait
        )


def _epochs(context: LoaderContext, making: int, rest: int, workers: int) -> tuple[int, int, int]:
    """Return the nanoseconds of an epoch: without workers, and with so many at the least and at the most.

    At the least nothing is in the way. At the most all take longer beside each other, batches are handed over, and workers
    start slowly. On a CPU all cores share the work of a batch at best.
    """
    batches = max((epoch.batches for epoch in context.timing.epochs if epoch.is_training), default=0)
    shared = 0 if context.on_accelerator else (making + rest) // context.cores
    low = max(rest, making // workers, shared)
    high = max(_BESIDE * rest, _SLOWER * making / workers, shared) + 2 * _WORTH
    return batches * context.step, batches * low, round(batches * high + workers * _START)


def _fetch_at_most(loader: LoaderFacts) -> int | None:
    """Return the most nanoseconds that a batch takes to make, as few batches are all sampled, which takes time."""
    fetch = loader.fetch
    return fetch.median or ((fetch.blocked + fetch.ran) // fetch.metered if fetch.metered else None)


def _needless(context: LoaderContext) -> Iterator[FitFinding]:
    """Yield workers that take longer to start than all batches of an epoch take to make: data in memory need none."""
    loader, fetch = context.loader, None if context.loader is None else _fetch_at_most(context.loader)
    epochs = [epoch for epoch in context.timing.epochs if epoch.is_training and epoch.batches]
    if loader is None or not loader.workers or not fetch or not loader.start or loader.persistent or not epochs:
        return
    made = fetch * max(epoch.batches for epoch in epochs)
    cost = (loader.start - made) * len(epochs)
    if 2 * made < loader.start and cost > max(_NOTICED_START, _SMALL * context.timing.wall):
        evidence = f"an epoch's batches take {format_time(made)} to make, its workers {format_time(loader.start)} to start"
        what = f"{_workers(loader.workers)} {'costs more than it saves' if loader.workers == 1 else 'cost more than they save'}"
        change = "`num_workers=0` makes batches in the fit's own process"
        yield replace(_finding("needless workers", what, evidence, change), total=min(cost, context.timing.wall))


def _crowded(context: LoaderContext) -> Iterator[FitFinding]:
    """Yield workers that are more than the cores they could run on."""
    crowded = max(
        (loader for loader in context.loaders if loader.workers > context.cores),
        key=lambda loader: loader.workers,
        default=None,
    )
    if crowded is not None:
        cores = counted(context.cores, "core")
        evidence = (
            f"{_workers(crowded.workers)} on {cores}: they take turns, with each other and with the fit; each holds batches"
        )
        change = f"`num_workers={context.cores}`; `--tune-workers` measures which number is best"
        waits = sum(row.total for row in context.timing.rows if row.phase in (phase_log.WAIT, phase_log.WORKERS))
        total = round(waits * (1 - context.cores / crowded.workers))  # the share of workers that have no core
        yield replace(_finding("workers", f"{_workers(crowded.workers)} share {cores}", evidence, change), total=total)


def _restarted(context: LoaderContext) -> Iterator[FitFinding]:
    """Yield workers that are started again for each epoch, where that takes a part of it."""
    found: dict[int, list[tuple[str, str, int]]] = {}  # by the number of workers: which epochs, evidence, nanoseconds
    for loader in context.loaders:
        epochs = [epoch for epoch in context.timing.epochs if epoch.is_training == loader.is_training and epoch.batches]
        starts = min(loader.iterators, len(epochs))
        if not loader.workers or loader.persistent or starts < 2 or not loader.start:
            continue
        per_epoch = sum(epoch.total for epoch in epochs) // len(epochs)
        cost = loader.start - (loader.fetch.median or 0)  # the first batch is made in any case
        if cost > _SMALL * per_epoch and cost * starts > _NOTICED:
            which = "training" if loader.is_training else "validation"
            evidence = f"{format_time(cost)} before the first batch of each {which} epoch, whose batches take "
            evidence += format_time(per_epoch)
            found.setdefault(loader.workers, []).append((f"each {which} epoch", evidence, cost * (starts - 1)))
    for workers, parts in found.items():
        which = " and ".join(dict.fromkeys(epochs_of for epochs_of, _, _ in parts))
        evidence = "; ".join(words for _, words, _ in parts)
        total = min(sum(nanoseconds for _, _, nanoseconds in parts), context.timing.wall)
        change = "`persistent_workers=True` starts them once"
        what = f"{_workers(workers)} start again for {which}"
        yield replace(_finding("persistent_workers", what, evidence, change), total=total)


def starting_less(loaders: Sequence[LoaderFacts], *, is_waiting: bool) -> str:
    """Return what to do about workers whose start takes long, by how the loaders were used; "" if there is nothing.

    `is_waiting`: the fit waits for its data. Then it needs the workers that it has.
    """
    started = [loader for loader in loaders if loader.workers]
    if any(loader.iterators > 1 and not loader.persistent for loader in started):
        return f"{'' if is_waiting else 'fewer workers, or '}`persistent_workers=True`, which starts them once"
    if any(sum(loader.is_training == other.is_training for other in started) > 1 for loader in started):
        once = "make the loader once, before the epochs, with `persistent_workers=True`"
        return once if is_waiting else f"{once}; data in memory need no workers"
    return "" if is_waiting else "fewer workers"


def _copying(context: LoaderContext, loader: LoaderFacts) -> Iterator[FitFinding]:
    """Yield that batches are copied to the device in a way that the fit waits for."""
    transfer = context.medians.get(phase_log.TO_DEVICE, 0)
    if not context.on_accelerator or min(transfer, context.timing.gainable) <= max(_SMALL * context.step, _GIVING):
        return
    evidence = f"bringing a batch to the device takes {format_time(transfer)} of {format_time(context.step)}"
    if not loader.pin_memory:
        how = "`pin_memory=True`, and `.to(device, non_blocking=True)`"
        yield _finding("pin_memory", "batches are copied from memory that is not page-locked", evidence, how, transfer)
    elif loader.is_learners:
        what = "page-locked batches gain nothing here: fastai's loader copies them with `non_blocking=False`"
        change = "`to_device(b, device, non_blocking=True)` in a `DataLoader` of your own, or `pin_memory=False`"
        yield _finding("pin_memory", what, evidence, change, transfer)
    else:
        change = "`.to(device, non_blocking=True)`, if it is not said yet"
        yield _finding("pin_memory", "the fit waits for batches to be copied", evidence, change, transfer)


def _first(context: LoaderContext) -> Iterator[FitFinding]:
    """Yield a loader whose first batch is long in coming, where that is a part of the whole."""
    loader, wall = context.loader, context.timing.wall
    if loader is None or not loader.start or loader.start < max(_NOTICED, 10 * context.step, WAITING * wall):
        return
    evidence = f"{format_time(loader.start)} until it was there, {format_time(context.step)} for a later one"
    why = f"start of {_workers(loader.workers)}" if loader.workers else "first access to the dataset"
    change = "do less in the dataset's `__init__` and its first `__getitem__`"
    if loader.workers and not context.is_waiting:
        change += ", or use fewer workers"
    yield _finding("first batch", f"the first batch of an epoch is late: {why}", evidence, change)


def _copied(context: LoaderContext) -> Iterator[FitFinding]:
    """Yield Python objects of a data set that each worker copies as it reads them."""
    for loader in context.loaders:
        if loader.rows is None or loader.copied < max(_COPIED, loader.workers * _COPIED_BY_ANY):
            continue
        rows = loader.rows
        path = f"`{loader.dataset}.{rows.path}`"
        why = (
            f"{path} is a {rows.container} of {rows.count:,} Python objects: to read one is to count a reference to it, which "
            "writes to memory that the worker shared with the fit until then, and copies it"
        )
        what = f"{_workers(loader.workers)} copied {format_bytes(loader.copied)} of the data set"
        change = f"keep {path} as a NumPy array, a tensor or an Arrow table: workers share their memory"
        yield replace(_finding("worker memory", what, why, change), nbytes=loader.copied)


def _workers(count: int) -> str:
    return counted(count, "worker")
