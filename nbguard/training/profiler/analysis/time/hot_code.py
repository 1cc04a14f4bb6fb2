"""Functions and lines that much of a fit's time goes to, by the stacks sampled in its phases.

The time of a phase is measured; the stacks only say how it is shared. The model's own work, the loader's and what other
findings name have no part in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Literal

from nbguard.libraries import LibraryWork, hook_files, library_work, loop_packages
from nbguard.training.profiler.analysis.report import Group, TimeRow, Timing
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import Batches, Moment
from nbguard.training.profiler.analysis.time.stacks import IMPORTS, HookFacts, StackLine, StackSamples, short_name

HotKind = Literal["function", "inside", "validation", "line", "hook", "loss", "library", "loop", "import"]
"""Kinds of code that time goes to: `function` of the user's, `inside`: one that a `forward` calls, `validation`: a function of
the user's that calls the model besides training, `line` of a function that runs the loop, `hook` of a module or tensor, `loss`
function, `library`: work of a library besides training, `loop`: the rest of a library's own loop, `import` of modules."""

_MODULE = "torch/nn/modules/module.py"
_ENGINE = "torch/autograd/graph.py"
_FEW_AT_WORK = 3
"""Looks that it takes to name a library's work which is known,"""
_FEW = 5
"""and any function. Code that lets no other thread run is seen only when it ends: there a sample counts for as many as would
have been usual in the time before it, if it is not the only one,
"""
_LONG = 200_000_000
"""or if so many nanoseconds were before it."""
_NOT_THE_LINES = ("IPython/", "torch/amp/grad_scaler", "torch/nn/utils/clip_grad", "torch/distributed/distributed_c10d")
"""Work that a line of the loop only asks for: of the notebook, of a GradScaler, which waits for the GPU by its nature, of
clipping, which many loops need, and of the other ranks, who have a report of their own."""
_OWN = "nbguard/training/profiler/"
_PART_OF_LINE = 0.25
"""Least share of a line's samples in the function it calls, for both to count as the function's."""
_MAIN_PART = 0.8
"""Share of a function's time in one function below it, or in one of its lines, at which that or its call is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotCode:
    """Code, and its time in one phase or several."""

    kind: HotKind
    line: StackLine | None = None  # the function, at the line where most of its time goes; None for a library's work
    work: LibraryWork | None = None  # of a library
    times: Mapping[tuple[Group, str], int]  # nanoseconds by group and phase
    seen: Mapping[int, int]  # nanoseconds before the samples that saw it, by the start of the batch; 0 if around the batches
    setup: int = 0  # of its nanoseconds, those before the first batch and after the last one
    inner: str = ""  # the function of the user's below it where nearly all its time goes
    hook: HookFacts | None = None  # of a hook, where it is registered

    @property
    def total(self) -> int:
        """Return its nanoseconds in all."""
        return sum(self.times.values())

    @property
    def batches(self) -> int:
        """Return in how many batches it was seen."""
        return len(self.seen.keys() - {0})

    def within(self, group: Group) -> int:
        """Return its nanoseconds in a group."""
        return sum(time for (where, _), time in self.times.items() if where == group)

    def within_phase(self, group: Group, phase: str) -> int:
        """Return its nanoseconds in a phase."""
        return self.times.get((group, phase), 0)


@dataclass(slots=True, kw_only=True)
class _Seen:
    looks: int = 0
    weights: Counter[tuple[Group, str]] = field(default_factory=Counter)  # nanoseconds before each sample, by group and phase
    lines: Counter[StackLine] = field(default_factory=Counter)
    inner: Counter[str] = field(default_factory=Counter)
    batches: Counter[int] = field(default_factory=Counter)  # nanoseconds before each sample, by the start of the batch
    setup: int = 0  # of the weights

    def join(self, other: _Seen) -> None:
        """Add the samples of a line that calls this function."""
        self.looks += other.looks
        self.weights += other.weights
        self.batches += other.batches
        self.setup += other.setup
        if self.lines:
            self.lines[max(self.lines, key=self.lines.__getitem__)] += other.looks
        if self.inner:
            self.inner[max(self.inner, key=self.inner.__getitem__)] += other.looks


_Key = tuple[HotKind, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """One look at the stack."""

    moment: Moment
    group: Group
    stack: tuple[StackLine, ...]  # the outermost first
    at: int  # nanoseconds by the clock of the log
    weight: int  # nanoseconds since the sample before


@dataclass(frozen=True, slots=True)
class _Cause:
    """The code that a sample points to."""

    kind: HotKind
    line: StackLine | None = None
    work: LibraryWork | None = None
    inner: str = ""  # the innermost function of the user's below it


def hot_code(samples: StackSamples, batches: Batches, rows: Sequence[TimeRow]) -> tuple[HotCode, ...]:
    """Return the code that time goes to, the most first."""
    trained = {batch.loop for batch in batches.batches if batch.is_training}
    stacks = [tuple(samples.lines[number] for number in stack) for stack in samples.stacks]
    looks = [
        _Look(moment=moment, group=_group(moment, trained), stack=stacks[number], at=at, weight=at - before)
        for moment, number, at, before in zip(
            batches.moments, samples.seen, samples.moments, (batches.start, *samples.moments), strict=False
        )
        if moment.phase != phase_log.OWN
    ]
    first = min((batch.start for batch in batches.batches), default=0)
    last = max((batch.start + batch.step for batch in batches.batches), default=0)
    of_phase: Counter[tuple[Group, str]] = Counter()
    for look in looks:
        of_phase[look.group, look.moment.phase] += look.weight
    calling: dict[Group, set[_Function]] = {"batch": set(), "validation": set(), "around": set()}
    calls: set[StackLine] = set()
    for at, number in samples.callers:
        users = [line for line in stacks[number] if line.is_users]
        calling[_group_at(at, batches, trained)].update(map(_function, users))
        calls.update(users[-1:])
    drivers, validating = calling["batch"], calling["validation"]
    everything: dict[_Key, _Seen] = {}
    called: dict[StackLine, _Key] = {}  # the function that a line calls
    works: dict[_Key, LibraryWork] = {}
    for look in looks:
        cause = _cause(look, drivers, validating)
        if cause is None or (cause.line in calls and _is_glue(cause, look.stack)):
            continue
        key: _Key = (cause.kind, cause.work.what if cause.work else _identity(cause))
        seen = everything.setdefault(key, _Seen())
        seen.looks += 1
        seen.weights[look.group, look.moment.phase] += look.weight
        seen.batches[look.moment.batch] += look.weight
        seen.setup += 0 if first <= look.at <= last else look.weight
        if cause.line is not None:
            seen.lines[cause.line] += 1
            if cause.kind == "function":
                called[look.stack[look.stack.index(cause.line) - 1]] = key
        if cause.inner:
            seen.inner[cause.inner] += 1
        if cause.work is not None:
            works[key] = cause.work
    _join_callers(everything, called)
    totals = {(row.group, row.phase): row.total for row in rows}
    usual = max(1, median_low([look.weight for look in looks])) if looks else 1
    hot = []
    for key, seen in everything.items():
        weight = seen.weights.total()
        count = max(seen.looks, weight // usual) if seen.looks > 1 else seen.looks
        if count < (_FEW_AT_WORK if key[0] == "library" else _FEW) and weight < _LONG:
            continue
        times = {place: totals.get(place, 0) * part // of_phase[place] for place, part in seen.weights.items()}
        hot.append(
            HotCode(
                kind=key[0],
                line=_line(seen),
                work=works.get(key),
                times=times,
                seen=seen.batches,
                setup=sum(times.values()) * seen.setup // max(weight, 1),
                inner=_inner(seen),
                hook=_hook(seen, samples.hooks),
            )
        )
    return tuple(sorted(hot, key=lambda code: -code.total))


def _join_callers(everything: dict[_Key, _Seen], called: Mapping[StackLine, _Key]) -> None:
    """Count looks at a line of the loop for the function that it calls.

    A look waits until other threads may run: after a function that lets none, that is in the line that has called it.
    """
    for line, of in called.items():
        key: _Key = ("line", _identity(_Cause("line", line)))
        if not line.call and key in everything and everything[of].looks >= _PART_OF_LINE * everything[key].looks:
            everything[of].join(everything.pop(key))


def without_models_work(hot: Sequence[HotCode], reads: Collection[tuple[str, str]]) -> tuple[HotCode, ...]:
    """Return the code without functions that a `forward` calls, but for those that read values of tensors one by one.

    `reads`: the files and names of these functions. The work of the others may well be the model itself.
    """
    return tuple(code for code in hot if code.kind != "inside" or _reads(code, reads))


def _reads(code: HotCode, reads: Collection[tuple[str, str]]) -> bool:
    line = code.line
    return line is not None and ((line.file, line.short) in reads or (line.file, short_name(code.inner)) in reads)


def library_share(hot: Sequence[HotCode], timing: Timing) -> float:
    """Return the share of the other code in training batches that is a library's own loop, 0 to 1."""
    total = next((row.total for row in timing.rows if row.group == "batch" and row.phase == phase_log.OTHER), 0)
    return sum(code.within_phase("batch", phase_log.OTHER) for code in hot if code.kind == "loop") / total if total else 0.0


def _group(moment: Moment, trained: Collection[int]) -> Group:
    if moment.loop is None:
        return "around"
    return "batch" if moment.loop in trained else "validation"


def _group_at(at: int, batches: Batches, trained: Collection[int]) -> Group:
    """Return the group of the batch that was the last to begin before a time."""
    number = bisect_right(batches.batches, at, key=lambda batch: batch.start) - 1
    if number < 0:
        return "around"
    return "batch" if batches.batches[number].loop in trained else "validation"


def _identity(cause: _Cause) -> object:
    line = cause.line
    return None if line is None else (line.file, line.first, line.name, line.line if cause.kind == "line" else 0)


def _line(seen: _Seen) -> StackLine | None:
    """Return the line where most of the time goes, with its call where that is nearly all."""
    line = max(seen.lines, key=seen.lines.__getitem__, default=None)
    if line is None or seen.lines[line] >= _MAIN_PART * seen.looks:
        return line
    return replace(line, call="")


def _inner(seen: _Seen) -> str:
    name, count = max(seen.inner.items(), key=lambda entry: entry[1], default=("", 0))
    return name if count >= _MAIN_PART * seen.looks else ""


def _hook(seen: _Seen, hooks: Sequence[HookFacts]) -> HookFacts | None:
    functions = {(line.name, line.first) for line in seen.lines}
    return next((hook for hook in hooks if (hook.function, hook.first) in functions), None)


_Function = tuple[str, str, int]  # file, name and first line


def _function(line: StackLine) -> _Function:
    return line.file, line.name, line.first


def _model_at(stack: Sequence[StackLine]) -> int | None:
    """Return the first place in a stack that runs inside a module."""
    return next((at for at, line in enumerate(stack) if line.file.endswith(_MODULE)), None)


def _cause(look: _Look, drivers: Collection[_Function], validating: Collection[_Function]) -> _Cause | None:
    """Return the code that a sample points to, or None for the model's own work, and the loader's.

    `drivers`: functions that run the training loop. `validating`: those that call the model in validation.
    """
    stack, phase = look.stack, look.moment.phase
    if any(line.file.startswith(IMPORTS) for line in stack):
        return _Cause("import")
    model = _model_at(stack)
    if model is not None and phase != phase_log.WAIT:
        hooked = _hooked(stack, model)
        if hooked is not None:
            return _Cause("hook", stack[hooked], None, _below(stack[hooked + 1 :]))
        users = [line for line in stack[model:] if line.is_users and not line.is_inner]
        if phase == phase_log.LOSS and users:
            return _Cause("loss", users[0], None, _below(users[1:]))
        if look.group != "validation":
            inside = next((line for line in users if line.short not in ("forward", "__call__")), None)
            if inside is not None and phase == phase_log.FORWARD:
                return _Cause("inside", inside, None, _below(users[users.index(inside) + 1 :]))
            work = _library([line for line in stack[model:] if line.file.startswith(hook_files())])
            return work or (_validates(stack[:model], drivers) if phase == phase_log.FORWARD else None)
        return _library(stack[:model]) or _validates(stack[:model], drivers)
    if phase == phase_log.BACKWARD:
        engine = next((at for at, line in enumerate(stack) if line.file.endswith(_ENGINE)), len(stack))
        users = [line for line in stack[engine:] if line.is_users]
        return _Cause("hook", users[0], None, _below(users[1:])) if users else None
    return _of_users(look, drivers, validating)


def _validates(stack: Sequence[StackLine], drivers: Collection[_Function]) -> _Cause | None:
    """Return the function of the user's that calls the model in validation."""
    own = next((line for line in stack if line.is_users and not line.is_inner and _function(line) not in drivers), None)
    return None if own is None else _Cause("validation", own)


def _of_users(look: _Look, drivers: Collection[_Function], validating: Collection[_Function]) -> _Cause | None:
    """Return the code of the user's that a sample outside of models points to, or the library's that the user called."""
    stack, phase = look.stack, look.moment.phase
    users_at = [at for at, line in enumerate(stack) if line.is_users]
    own = next((at for at in users_at if not stack[at].is_inner and _function(stack[at]) not in drivers), None)
    if own is not None:
        if stack[own].short == "step" and phase == phase_log.STEP:
            return None  # an optimizer of the user's
        if look.group == "validation" and _function(stack[own]) in validating:
            inner = next((line for line in stack[own + 1 :] if line.is_users and not line.is_inner), None)
            return (
                _Cause("validation", stack[own]) if inner is None else _Cause("function", inner, None, _below(stack[own + 1 :]))
            )
        return _Cause("loss" if phase == phase_log.LOSS else "function", stack[own], None, _below(stack[own + 1 :]))
    if not users_at:
        return None
    below = stack[users_at[-1] + 1 :]
    if below and _OWN in below[-1].file:
        return None  # a mark
    work = _library(below)
    if work is not None:
        return work
    if any(line.file.partition("/")[0] in loop_packages() for line in below):
        return _Cause("loop")
    if phase != phase_log.OTHER or any(line.file.startswith(_NOT_THE_LINES) or "/optim/" in line.file for line in below):
        return None
    return _Cause("line", next((stack[at] for at in reversed(users_at) if not stack[at].is_comprehension), stack[users_at[-1]]))


def _is_glue(cause: _Cause, stack: Sequence[StackLine]) -> bool:
    """Say whether a line that calls a model, a loss or an optimizer does nothing else that is known to take long."""
    if cause.kind != "line" or cause.line is None or cause.line.call:
        return False
    below = stack[stack.index(cause.line) + 1 :]
    return all(_OWN in line.file or line.file.startswith("torch/") for line in below)


def _library(stack: Sequence[StackLine]) -> _Cause | None:
    work = library_work([(line.file, line.name) for line in stack if not line.is_users])
    return None if work is None else _Cause("library", None, work)


def _hooked(stack: Sequence[StackLine], model: int) -> int | None:
    """Return the place of the first function of the user's that a module calls beside `forward`, itself or through a hook."""
    for at in range(model + 1, len(stack)):
        if stack[at].is_users and stack[at].short not in ("forward", "__call__"):
            callers = (line for line in reversed(stack[model:at]) if not line.file.startswith(hook_files()))
            if next(callers).file.endswith(_MODULE):
                return at
    return None


def _below(stack: Sequence[StackLine]) -> str:
    """Return the innermost function of the user's in a part of a stack."""
    return next((line.called for line in reversed(stack) if line.is_users and not line.is_inner), "")
