"""The functions that a fetch of a batch spends its time in, from the call graph of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from nbguard.libraries import loader_files
from nbguard.training.profiler.analysis.function_names import COMPREHENSIONS, GENERAL, called_name, short_name

StepKind = Literal["transform", "collate", "dataset"]
"""`dataset`: the lines of `__getitem__` or `__iter__` themselves, and the C code they call."""

_PASSAGES = (
    "torch/utils/data/",
    "torch/nn/modules/module.py",
    "torch/nn/modules/container.py",
    "torchvision/transforms/v2/_container.py",
    "torchvision/transforms/v2/_transform.py",
)
"""Code of PyTorch's that only leads to transforms, datasets and collate functions."""

_ACCESS = frozenset({"__getitem__", "__getitems__", "__iter__", "__next__"})
_NEARLY_ALL = 0.8
_GENERAL = GENERAL | {"forward"}
"""Methods with a general name: those of transforms, which may be modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFunction:
    """A function in a profile of fetches."""

    name: str  # qualified with its class, from Python 3.11 on
    file: str  # path; in a report as shown: "In[3]", "train.py"; "": written in C
    line: int  # at which its code begins
    is_users: bool  # not of an installed library
    inner: str = field(default="", compare=False)  # the user's, below it, where nearly all its time goes: `a` → `b`
    library: str = field(default="", compare=False)  # a library's, which it calls and where nearly all its time goes: `a`

    @property
    def called(self) -> str:
        """Return its name for the user: a transform goes by its class."""
        return called_name(self.name, _GENERAL)

    @property
    def short(self) -> str:
        """Return the name without classes and functions around it."""
        return short_name(self.name)

    @property
    def is_passage(self) -> bool:
        """Say whether it only leads to the function that does the work."""
        if self.is_users or not self.file:
            return not self.file or self.short in _ACCESS or self.short in COMPREHENSIONS
        if "collate" in self.short:
            return False
        names = self.short in _ACCESS or self.short in COMPREHENSIONS or self.short in ("__call__", "<lambda>")
        return names or any(part in self.file for part in (*_PASSAGES, *loader_files()))


@dataclass(frozen=True, slots=True)
class FetchCall:
    """All calls from one function to another: how many, their nanoseconds, and those spent in the callee itself."""

    callee: int  # number of the function that is called
    count: int  # calls
    time: int  # nanoseconds in it and below it
    own: int  # nanoseconds in the callee itself


@dataclass(frozen=True, slots=True)
class FetchProfile:
    """The call graph of some fetches. By function: its calls, how often it was called, and its own nanoseconds."""

    functions: tuple[FetchFunction, ...]  # by number
    calls: Mapping[int, tuple[FetchCall, ...]]  # from each function, by its number
    counts: tuple[int, ...]  # times that each was called
    own: tuple[int, ...]  # nanoseconds in each itself


@dataclass(frozen=True, slots=True)
class FetchStep:
    """A function that fetching leads to: how often it was called in all, and the nanoseconds in it and below it."""

    function: FetchFunction  # the function
    kind: StepKind  # its part in making a batch
    calls: int  # in all profiled fetches
    time: int  # nanoseconds in it and below it

    @property
    def name(self) -> str:
        """Return its name for the user: a transform goes by its class."""
        return self.function.called


@dataclass(slots=True)
class _Search:
    profile: FetchProfile
    steps: dict[int, tuple[StepKind, int, int]] = field(default_factory=dict)
    accesses: dict[int, int] = field(default_factory=dict)  # item accesses of the user's, by a library's function they call
    visited: set[int] = field(default_factory=set)

    def add(self, number: int, kind: StepKind, count: int, time: int) -> None:
        before = self.steps.get(number, (kind, 0, 0))
        self.steps[number] = (before[0], before[1] + count, before[2] + time)

    def walk(self, number: int, access: int | None = None) -> int:
        """Look for steps below a function that leads to them; return the time of C code below it.

        `access`: the user's item access that leads to it.
        """
        profile, function = self.profile, self.profile.functions[number]
        self.visited.add(number)
        inside = 0
        for call in profile.calls.get(number, ()):
            callee = profile.functions[call.callee]
            if not callee.is_passage:
                self.add(call.callee, _kind(function, callee), call.count, call.time)
                if access is not None and not callee.is_users and callee.short not in _GENERAL:  # no transform of its own
                    self.accesses.setdefault(call.callee, access)
                continue
            inside += call.own if not callee.file else 0
            if call.callee not in self.visited:
                is_users = callee.file and callee.is_users
                inside += self._users(call.callee) if is_users else self.walk(call.callee, access)
        return inside

    def _users(self, number: int) -> int:
        """Look below an item access of the user's, whose own lines are a step, too."""
        inside = self.walk(number, number) + self.profile.own[number]
        self.add(number, "dataset", self.profile.counts[number], inside)
        return 0


def steps(profile: FetchProfile) -> tuple[FetchStep, ...]:
    """Return the functions that fetching calls first: transforms, collate functions, item accesses; the most time first."""
    search = _Search(profile)
    callees = {call.callee for calls in profile.calls.values() for call in calls}
    for number, function in enumerate(profile.functions):
        if number not in callees and function.file:
            search.walk(number)
    called: dict[int, list[tuple[int, str]]] = {}  # by the user's item access: nanoseconds and names of a library's functions
    refined_steps = []
    for number, (kind, count, time) in search.steps.items():
        function, refined = profile.functions[number], None
        if not function.is_users:
            below = (call for call in _users_below(profile, number) if call.time <= time)  # more: it has other callers, too
            refined = max(below, key=lambda call: call.time, default=None)
        if refined is not None and 2 * refined.time >= time:
            refined_steps.append(FetchStep(profile.functions[refined.callee], kind, refined.count, refined.time))
        elif number in search.accesses:
            called.setdefault(search.accesses[number], []).append((time, f"`{function.called}`"))
        elif kind != "dataset" or not function.is_users:
            refined_steps.append(FetchStep(replace(function, inner=_inner(profile, number, time)), kind, count, time))
    for number, (kind, count, time) in search.steps.items():
        if kind == "dataset" and profile.functions[number].is_users:
            refined_steps.append(_access(profile.functions[number], count, time, called.get(number, [])))
    return tuple(sorted(refined_steps, key=lambda step: (-step.time, step.function.file, step.function.line)))


def _access(function: FetchFunction, count: int, own: int, called: list[tuple[int, str]]) -> FetchStep:
    """Return an item access of the user's as a step, with the work of libraries' functions for it."""
    time = own + sum(part for part, _ in called)
    most, name = max(called, default=(0, ""))
    return FetchStep(replace(function, library=name if most >= _NEARLY_ALL * time > 0 else ""), "dataset", count, time)


def _inner(profile: FetchProfile, number: int, time: int) -> str:
    """Return the way to where nearly all the time of a function goes, in functions of the user's: `Blur` of a `Compose`."""
    names: list[str] = []
    visited = {number}
    while True:
        below = [call for call in profile.calls.get(number, ()) if profile.functions[call.callee].is_users]
        most = max(below, key=lambda call: call.time, default=None)
        if most is None or most.callee in visited or most.time < _NEARLY_ALL * time:
            return " → ".join(names)
        number, time = most.callee, most.time
        names.append(f"`{profile.functions[number].called}`")
        visited.add(number)


def _kind(caller: FetchFunction, callee: FetchFunction) -> StepKind:
    is_library = not caller.is_users and not callee.is_users
    if is_library and caller.short in _ACCESS and caller.file.rpartition("/")[0] == callee.file.rpartition("/")[0]:
        return "dataset"  # an item access, and the same library's work for it
    is_fetch = caller.file.endswith("torch/utils/data/_utils/fetch.py")
    return "collate" if is_fetch or "collate" in callee.short else "transform"


def _users_below(profile: FetchProfile, number: int) -> Iterator[FetchCall]:
    """Yield the calls from a library's function to functions of the user's."""
    todo, visited = [number], {number}
    while todo:
        for call in profile.calls.get(todo.pop(), ()):
            callee = profile.functions[call.callee]
            if callee.is_users and not callee.is_passage:
                yield call
            elif call.callee not in visited:
                visited.add(call.callee)
                todo.append(call.callee)
