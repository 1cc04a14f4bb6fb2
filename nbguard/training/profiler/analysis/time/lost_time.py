"""Parts of a fit that take much of its time besides the model's own work, each with its seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from statistics import median

from nbguard.libraries import setting
from nbguard.render.markup import line_words
from nbguard.training.profiler.analysis.report import FitFinding, Group, TimeRow, Timing
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import Batch, Batches, steady_batches
from nbguard.training.profiler.analysis.time.hot_code import HotCode, HotKind
from nbguard.training.profiler.analysis.time.stacks import CELL, KNOWN_CALLS, StackLine, StackSamples
from nbguard.units import counted, format_time

LARGE = 0.10
"""Least share of the fit's wall time of a part that is named."""
_LESS: dict[HotKind, str] = {
    "hook": "take the hook out, or do less in it",
    "loss": "do less in it",
    "inside": "it goes through tensors value by value; compute on whole tensors, or once, before the fit or in the loader",
    "line": "check this line, which runs between the model calls",
}
"""Remedies by the kind of code."""
_ROLES = {phase_log.TRANSFORMS: "the batch transform", phase_log.callback("Recorder"): "the metric"}
"""Parts of the user's code by the phase that it runs in."""
_NAMED: dict[HotKind, float] = {"function": LARGE, "inside": LARGE, "hook": LARGE, "loss": 0.15, "line": 0.20}
"""The same by the kind of code: a loss function, and the lines of the loop, take their time in any fit."""
_IN_BATCHES = 0.20
"""The same of functions that training batches call: a penalty, an augmentation or a sampler takes a part of any."""
_GLUE = 300_000
"""Most nanoseconds per batch of a line of the loop that are Python's own cost for it."""
_ENVIRONMENTS = ("step", "reset")
"""Methods of the environments of reinforcement learning, whose work gives the model its data."""
_NOTICED = 200_000_000
"""Nanoseconds of a fit: less is not mentioned, however short the fit;"""
_NOTICED_PART, _MAIN_PART = 100_000_000, 1 / 3
"""but code that takes this share of the fit's wall time is, from so many on."""
_NOTICED_WORK = 50_000_000
"""Least nanoseconds of a library's work besides training that is mentioned, if it is known by name: a few samples tell it."""
_MUCH_VALIDATION = 0.40
"""Greatest share of the wall time of expected validation: it runs the model as often, or nearly."""
_MUCH_CODE = 0.25
"""Greatest share of the wall time of expected code around the batches: a cell also makes models and reads files."""
_RECORDER = "Recorder"
"""A Learner's callback that computes metrics."""
_OFTEN = 2
"""Least passes over validation data, per pass of training, of frequent validation."""
_STALL = 20
"""Times the median that a batch takes which stalls,"""
_LONG_STALL = 25_000_000
"""and nanoseconds beyond the median."""
_SLOWED = 5
"""Times as long it must be in a batch that nbguard itself has slowed down by looking closer."""
_RARE = {phase_log.WAIT: "items that take long to read", phase_log.OTHER: "lines of the loop that run only now and then"}
_COMPUTING = (phase_log.FORWARD, phase_log.LOSS, phase_log.BACKWARD, phase_log.STEP, phase_log.ZERO_GRAD)
"""Phases that do the same in each batch."""
_BUSY, _IDLE = 0.75, 0.25
"""Shares of a long batch with its thread on a processor: at least the one means it computed, at most the other it waited."""
_NO_STACKS = StackSamples()
_FEW = 0.25
"""Share of batches that may stall: more of them are no exceptions."""


def lost_time(
    timing: Timing,
    batches: Batches,
    of_library: Collection[str] = (),
    hot: Sequence[HotCode] = (),
    stacks: StackSamples = _NO_STACKS,
) -> Iterator[FitFinding]:
    """Yield the parts that take much of the fit's wall time, the model's own work in training batches apart.

    Args:
        timing: where the time went.
        batches: of the same fit.
        of_library: phases of callbacks without which a library does not train.
        hot: code that time goes to, by name.
        stacks: samples of the same fit, which tell how long the machine held it up.
    """
    if not timing.batches:
        return
    stall, code = _stalls(timing, batches, hot, stacks)
    if stall is not None:
        yield stall
    hot = [other for other in hot if other.kind != "validation" or other.within("validation")]  # else: a part of training
    yield from _code(timing, [other for other in hot if other is not code])
    yield from _transforms(timing, hot)
    yield from _validation(
        timing, of_library, hot, is_by_hand=any(batch.is_training and not batch.loop for batch in batches.batches)
    )
    yield from _around(timing, of_library, hot)


def _noticed(nanoseconds: int, wall: int) -> int:
    """Return how many nanoseconds code that has a name must take, at least, to be mentioned."""
    return _NOTICED if nanoseconds < _MAIN_PART * wall else _NOTICED_PART


def _is_large(timing: Timing, nanoseconds: int, share: float = LARGE, noticed: int = _NOTICED) -> bool:
    return nanoseconds >= max(noticed, share * (timing.wall - timing.own))


def _gainable(timing: Timing, phase: str, in_batches: int) -> int:
    """Return the part of a phase's time for something that a fit can save in training batches.

    While a GPU is at work the program loses nothing. A delay confined to few batches outlasts the GPU's queue.
    """
    rows = {row.phase: row for row in timing.rows if row.group == "batch"}
    row = rows.get(phase)
    if timing.busy is None or row is None or timing.is_in_few(row.total, row.median or 0):
        return in_batches
    return min(in_batches, round((1 - timing.busy) * sum(row.total for row in rows.values())))


def _is_of_validation(code: HotCode) -> bool:
    """Say whether half of a library's work, or more, is in validation."""
    return 2 * code.within("validation") >= code.total


def _rows(timing: Timing, group: Group) -> list[TimeRow]:
    return sorted((row for row in timing.rows if row.group == group), key=lambda row: -row.total)


def _finding(kind: str, timing: Timing, total: int, what: str, change: str, evidence: str = "") -> FitFinding:
    share = f"{total / timing.wall:.0%} of the fit's {format_time(timing.wall)}"
    return FitFinding(
        kind=kind,
        severity="advice",
        what=what,
        evidence=f"{share}{f'; {evidence}' if evidence else ''}",
        change=change,
        total=total,
    )


def _code(timing: Timing, hot: Sequence[HotCode]) -> Iterator[FitFinding]:
    """Yield functions and lines by name."""
    imports = sum(code.total for code in hot if code.kind == "import")  # once in a process: no part of a usual fit
    without_own = timing.wall - timing.own
    usual = max(without_own - imports, 0)
    for code in hot:
        share = _MUCH_CODE if 2 * code.setup > code.total else _NAMED.get(code.kind, 1.0)
        if code.kind == "function" and 2 * code.within("batch") > code.total:
            share = _IN_BATCHES
        share *= usual / max(without_own, 1)
        total = (
            code.total
            - code.within("batch")
            + sum(_gainable(timing, phase, time) for (group, phase), time in code.times.items() if group == "batch")
        )
        if code.kind == "line":
            total = min(total, _line_at_most(timing, code, hot))
        least = _noticed(total, usual)
        if code.line is None or not _is_large(timing, total, share, least) or _is_environment(code):
            continue
        is_loaders = 2 * code.within_phase("batch", phase_log.WAIT) > code.total
        if is_loaders or not _is_large(timing, total - _usual(timing, code), share, least):
            continue  # these have findings of their own
        name = _name(code, code.line)
        inner = f", nearly all of it in `{code.inner}`" if code.inner not in ("", code.line.called) else ""
        what, change = (
            f"{name} takes {format_time(code.total)}{inner}",
            _LESS.get(code.kind, "do less in it, or do it less often"),
        )
        if code.kind in ("line", "function") and code.line.call:
            what, change = (
                f"{name} takes {format_time(code.total)} in `{code.line.call}`",
                KNOWN_CALLS.get(code.line.call, change),
            )
        yield _finding("code", timing, total, what, change, _shares(code))


def _line_at_most(timing: Timing, code: HotCode, hot: Sequence[HotCode]) -> int:
    """Return the nanoseconds that a line of the loop can have taken, which runs in each batch as far as is known.

    Additional time of single batches in lines that do nothing special is the machine's, and in each it is Python itself. After
    code that lets no other thread run for long, a sample falls into a line behind it.
    """
    if code.line is not None and code.line.call:
        return code.total
    row = next((row for row in timing.rows if row.group == "batch" and row.phase == phase_log.OTHER), None)
    in_batches = code.within("batch")
    usual = in_batches if row is None or row.median is None else min(in_batches, row.median * timing.batches)
    is_behind = any(other.within_phase("batch", phase_log.OTHER) > in_batches for other in hot)
    return code.total - in_batches + (usual if usual >= _GLUE * timing.batches and not is_behind else 0)


def _is_environment(code: HotCode) -> bool:
    return code.kind == "function" and code.line is not None and code.line.short in _ENVIRONMENTS and "." in code.line.name


def _name(code: HotCode, line: StackLine) -> str:
    """Return code as the subject of a sentence."""
    where = line_words(line.file, line.line, "")
    name = f"`{line.called}` ({where})"
    role = max(code.times, key=lambda place: code.times[place])[1]
    if code.kind == "line":
        return where if line.name == CELL else f"{where} in `{line.called}`,"
    if code.kind == "hook":
        return f"the hook {name}" + (
            "" if code.hook is None else f" of `{code.hook.module or code.hook.type}` ({code.hook.type})"
        )
    if code.kind == "loss":
        return f"the loss function {name}"
    return f"{_ROLES[role]} {name}" if role in _ROLES else name


def _usual(timing: Timing, code: HotCode) -> int:
    """Return the nanoseconds of code that a callback of a library's takes in each batch, or outside of batches."""
    rows = [row for row in timing.rows if row.callback and row.callback != _RECORDER]
    return sum(
        min(code.within_phase(row.group, row.phase), (row.median or 0) * timing.batches if row.group == "batch" else row.total)
        for row in rows
        if row.group == "batch" or _is_large(timing, row.total)
    )


def _shares(code: HotCode) -> str:
    words = {"batch": "in training batches", "validation": "in validation", "around": "around the batches"}
    groups: tuple[Group, ...] = ("batch", "validation", "around")
    parts = [f"{format_time(code.within(group))} {words[group]}" for group in groups if code.within(group)]
    seen = f"; seen in {counted(code.batches, 'batch', 'batches')}" if code.batches else ""
    return ", ".join(parts) + seen


def _explained(hot: Sequence[HotCode], group: Group, phase: str = "") -> int:
    """Return the nanoseconds of a group, or of a phase in it, that have a name, or are a library's own."""
    return sum(time for code in hot for (where, what), time in code.times.items() if where == group and phase in ("", what))


def _transforms(timing: Timing, hot: Sequence[HotCode]) -> Iterator[FitFinding]:
    rows = [row for row in timing.rows if row.phase == phase_log.TRANSFORMS]
    total = sum(_gainable(timing, row.phase, row.total) if row.group == "batch" else row.total for row in rows)
    named = sum(_explained(hot, row.group, row.phase) for row in timing.rows if row.phase == phase_log.TRANSFORMS)
    if _is_large(timing, total) and 2 * named < total:
        what = f"batch transforms (`after_batch` of the loaders) take {format_time(total)}"
        change = "make them cheaper, or do them per item, where workers share them"
        yield _finding("batch transforms", timing, total, what, change)


def _validation(
    timing: Timing, of_library: Collection[str], hot: Sequence[HotCode], *, is_by_hand: bool
) -> Iterator[FitFinding]:
    """Yield callbacks and metrics in validation, or validation as a whole.

    `is_by_hand`: batches come from no loader, so that passes over the training data cannot be counted.
    """
    rows = _rows(timing, "validation")
    total = sum(row.total for row in rows)
    for row in rows:
        if row.callback and _is_large(timing, row.total):
            if row.phase in of_library and row.callback == _RECORDER:
                named = [code for code in hot if code.line is not None or code.kind == "import"]
                if 2 * _explained(named, "validation", row.phase) >= row.total:
                    continue  # the metric has been named
                what = f"the metrics take {format_time(row.total)} of validation, in {setting('metrics')}"
                change = "compute metrics on less data, or from sums of each batch once an epoch"
            else:
                what = f"the callback `{row.callback}` takes {format_time(row.total)} of validation"
                change = f"do less in `{row.callback}` while `self.training` is False"
            yield _finding("validation", timing, row.total, what, change)
            total -= row.total
            rows.remove(row)
            break
    yield from _validating(timing, rows, total, hot, is_by_hand=is_by_hand)


def _validating(
    timing: Timing, rows: Sequence[TimeRow], total: int, hot: Sequence[HotCode], *, is_by_hand: bool
) -> Iterator[FitFinding]:
    """Yield validation as a whole, less the functions in it that have a name of their own."""
    passes = [epoch for epoch in timing.epochs if not epoch.is_training]
    training = len(timing.epochs) - len(passes)
    is_often = not is_by_hand and 0 < _OFTEN * training < len(passes)
    least = LARGE if is_often else _MUCH_VALIDATION
    named = [code for code in hot if code.kind in ("function", "hook") and _is_large(timing, code.total)]
    rest = total - sum(code.within("validation") for code in named)
    much = [code for code in hot if 10 * code.within("validation") >= total and (code.work is None or _is_of_validation(code))]
    by_kind = {code.kind: code for code in reversed(much)}
    library, users = by_kind.get("library"), by_kind.get("validation")
    if library is not None and library.work is not None:
        rest += library.total - library.within("validation")
        if _is_large(timing, rest, least):
            what = f"{library.work.what} takes {format_time(rest)} in {counted(len(passes), 'pass', 'passes')}"
            yield _finding("validation", timing, rest, what, library.work.change)
    elif rows and _is_large(timing, rest, least):
        whole = format_time(sum(row.total for row in _rows(timing, "validation")))
        subject = "validation" if format_time(rest) == whole else "the rest of validation"  # parts of it have findings, too
        what = f"{subject} takes {format_time(rest)}: {counted(len(passes), 'pass', 'passes')} over its data"
        if users is not None and users.line is not None:
            what += f" in `{users.line.called}` ({line_words(users.line.file, users.line.line, '')})"
        evidence = f"most of it {rows[0].phase} ({format_time(rows[0].total)})"
        yield _finding("validation", timing, rest, what, "validate less often, or on a part of the data", evidence)


def _around(timing: Timing, of_library: Collection[str], hot: Sequence[HotCode]) -> Iterator[FitFinding]:
    """Yield callbacks, a library's work, starts of workers and other code outside of batches."""
    for code in hot:
        if code.kind == "import" and code.total >= _NOTICED:
            what = f"importing modules takes {format_time(code.total)}"
            why = "only the first fit of a process pays for it"
            yield replace(_finding("imports", timing, code.total, what, "", why), severity="note")
        if code.work is not None and not _is_of_validation(code) and _is_large(timing, code.total, noticed=_NOTICED_WORK):
            what = f"{code.work.what} takes {format_time(code.total)}"
            yield _finding("library", timing, code.total, what, code.work.change, _shares(code))
    for row in _rows(timing, "around"):
        if row.callback and row.phase not in of_library and _is_large(timing, row.total):
            what = f"the callback `{row.callback}` takes {format_time(row.total)} outside of batches"
            change = f"do less in `{row.callback}`, or less often: checkpoints and plots need not come each epoch"
            yield _finding("callback", timing, row.total, what, change)
        elif row.phase == phase_log.WORKERS and _is_large(timing, row.total):
            what, change = f"starting workers takes {format_time(row.total)}", "fewer workers"
            yield _finding("workers start", timing, row.total, what, change)
        elif row.phase == phase_log.OTHER and not hot and _is_large(timing, row.total, _MUCH_CODE):
            what = f"code around the batches takes {format_time(row.total)}"
            change = "check the cell's code before, between and after the epochs; `%%prun` names its functions"
            yield _finding("other code", timing, row.total, what, change)


def _stalls(
    timing: Timing, batches: Batches, hot: Sequence[HotCode], stacks: StackSamples
) -> tuple[FitFinding | None, HotCode | None]:
    """Return the few batches that take many times as long as the others, and the code that does, where it has a name.

    Time of the machine for something else is none of the batch's.
    """
    steady = steady_batches(batches)
    usual = round(median(batch.step for batch in steady)) if steady else 0
    least = max(_STALL * usual, usual + _LONG_STALL)
    complete = [batch for batch in batches.batches if batch.is_training and batch.is_complete]
    stalled = [
        (number, batch)
        for number, batch in enumerate(complete, 1)
        if number > timing.warm_up
        and batch.step - stacks.held_up(batch.start, batch.start + sum(batch.times.values()))
        >= (_SLOWED * least if batch.is_disturbed else least)
    ]
    total = sum(batch.step - usual for _, batch in stalled)
    if not stalled or len(stalled) > _FEW * len(complete) or not _is_large(timing, total, noticed=_NOTICED_PART):
        return None, None
    sums: dict[str, int] = {}
    for _, batch in stalled:
        for phase, nanoseconds in batch.times.items():
            if phase != phase_log.OWN:
                sums[phase] = sums.get(phase, 0) + nanoseconds
    phase = max(sums, key=lambda name: sums[name])
    code = next((code for code in hot if 2 * code.within_phase("batch", phase) >= total), None)
    if total < (_NOTICED if code is None else _noticed(total, timing.wall)):
        return None, None
    if code is not None and _is_at_work_in(code, complete[timing.warm_up :], stalled):
        if code.kind != "validation":
            return None, None  # it takes long in any batch, and has a finding of its own
        code = None  # it calls the model in any batch: a part of the loop
    if code is not None and code.line is None:
        return None, None  # a library's work, which has a finding of its own
    longest = max(batch.step for _, batch in stalled)
    numbers = ", ".join(f"{number}" for number, _ in stalled[:4]) + (", …" if len(stalled) > 4 else "")
    noun, verb = ("batch", "takes") if len(stalled) == 1 else ("batches", "take")
    evidence = f"the longest takes {format_time(longest)}, a usual one {format_time(usual)}; training {noun} {numbers}"
    if code is None and phase in _COMPUTING:
        what = f"training {noun} {numbers} {verb} {format_time(total)} more than usual, most of it in {phase}"
        return _finding("stall", timing, total, what, _why_long([batch for _, batch in stalled], stacks), evidence), None
    place, where = phase, f"look for {_RARE.get(phase, f'rare work in {phase}')}"
    if code is not None and code.line is not None:
        place, where = _name(code, code.line), "do less in it, or do it outside of the loop"
    what = f"{counted(len(stalled), 'batch stalls', 'batches stall')} in {place}: {format_time(total)} together"
    found = _finding("stall", timing, total, what, where, evidence)
    if code is None and len(stalled) == 1:  # it may be the machine's
        found = replace(found, severity="note")
    return found, code


def _is_at_work_in(code: HotCode, batches: Sequence[Batch], stalled: Sequence[tuple[int, Batch]]) -> bool:
    """Say whether code takes much of the usual batches, too: then those that stall are larger, as an episode that goes on."""
    long = {batch.start for _, batch in stalled}
    usual = {batch.start: batch.step for batch in batches if batch.start not in long}
    return sum(time for start, time in code.seen.items() if start in usual) >= LARGE * sum(usual.values())


def _why_long(stalled: Sequence[Batch], stacks: StackSamples) -> str:
    """Return the remedy for batches whose same computation takes many times as long as usual."""
    ends = [(batch.start, batch.start + sum(batch.times.values())) for batch in stalled]
    computed = [stacks.computed(*times) for times in ends]
    share = sum(time or 0 for time in computed) / max(1, sum(end - start - stacks.held_up(start, end) for start, end in ends))
    if None in computed or _IDLE < share < _BUSY:
        return "run it again; if the same batch is slow again, suspect its data, otherwise the machine"
    if share >= _BUSY:
        return "it computed all that time; look for a larger batch, or for new shapes that trigger compiling or tuning"
    return "it waited and did not compute; check swapped memory, disks, locks and devices"
