"""The functions that a fetch of a batch spends its time in, from the call graph of a profile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from nbguard.libraries import loader_files
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.stacks import COMPREHENSIONS, GENERAL, called_name, short_name
from nbguard.units import counted, format_time

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


# --- A fit's loaders as they were used, and the time of a batch on its way to the model, in parts from its reading on.


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFacts:
    """The cost of making a batch, in the fit's process or in workers. Times in nanoseconds."""

    fetches: int = 0  # calls of the dataset fetcher: batches made
    items: int = 0  # 0 if unknown
    median: int | None = None  # of fetches that were not profiled, if there were some
    p95: int | None = None  # their 95th percentile
    profiled: int = 0  # fetches
    profiled_time: int = 0  # of these together
    metered: int = 0  # fetches whose reading from files was measured; 0 if the system does not count it
    read: int = 0  # bytes that these got by calls of read(), from the page cache or from storage
    stored: int = 0  # bytes that storage devices were asked for meanwhile
    blocked: int = 0  # nanoseconds that they waited for a device or a lock, not for a processor
    ran: int = 0  # nanoseconds that they ran
    in_files: int = 0  # nanoseconds of the profiled fetches spent reading from files
    decoding: int = 0  # and decoding
    nbytes: int = 0  # of a batch as it is made, on average; 0 if unknown
    steps: tuple[FetchStep, ...] = ()  # functions that profiled fetches spent their time in, the most first
    note: str = ""  # why something is not known


@dataclass(frozen=True, slots=True)
class PythonRows:
    """A container of many Python objects that a data set reads from."""

    path: str  # the attributes that lead to it from the data set, e.g. "dataset.rows"
    container: str  # name of its class
    count: int  # objects in it


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """One loader as it was used. Unknown facts are None."""

    dataset: str  # the name of its type
    is_learners: bool = field(default=False, metadata={"json": "is_fastai"})  # a Learner's, which torch iterates as a stream
    is_iterable: bool = False  # the dataset is a stream (IterableDataset)
    is_training: bool = False  # a backward pass followed its batches
    workers: int = 0  # worker processes
    batch_size: int | None = None  # as the loader was set up
    pin_memory: bool = False  # batches are copied to page-locked memory
    persistent: bool = False  # workers stay from epoch to epoch
    prefetch: int | None = None  # batches that each worker makes ahead
    in_order: bool | None = None  # batches come in the sampler's order
    start_method: str | None = None  # of worker processes
    iterators: int = 1  # over it
    start: int | None = None  # median nanoseconds from the start of an epoch's workers to its first batch
    fetch: FetchFacts = FetchFacts()  # the cost of its batches
    copied: int = 0  # bytes of memory shared with the fit that its workers have copied together, by the end of an epoch
    rows: PythonRows | None = None  # of its data set


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStep:
    """The function that fetching spends most in, in nanoseconds as without the profile."""

    step: FetchStep  # the function
    per_call: int  # one call of it
    calls: float  # per batch
    per_batch: int  # all its calls
    fetch: int  # a whole batch

    def evidence(self) -> str:
        """Return its figures in words."""
        calls = f"{counted(round(self.calls), 'call')} per batch"
        whole = f"{format_time(self.per_batch)} of each batch's {format_time(self.fetch)}"
        most = self.step.function.inner or self.step.function.library
        inner = f", nearly all of it in {most}" if most else ""
        return f"{format_time(self.per_call)} per call, {calls}, {whole}{inner}"


def slowest(fetch: FetchFacts) -> SlowStep | None:
    """Return the function that a fetch spends most in, with its share of profiled fetches, applied to the others' median."""
    if not fetch.steps or not fetch.profiled or not fetch.profiled_time:
        return None
    step = fetch.steps[0]
    profiled = fetch.profiled_time // fetch.profiled
    whole = profiled if fetch.median is None else min(fetch.median, profiled)
    per_batch = min(whole, round(step.time / fetch.profiled_time * whole))
    calls = step.calls / fetch.profiled
    return SlowStep(step=step, per_call=round(per_batch / calls), calls=calls, per_batch=per_batch, fetch=whole)


def items_per_second(loader: LoaderFacts) -> float | None:
    """Return the items that a loader makes in a second by itself, with all its workers; None where that is not known."""
    fetch = loader.fetch
    if not fetch.median or not fetch.fetches or not fetch.items:
        return None
    return fetch.items / fetch.fetches / fetch.median * 1e9 * max(1, loader.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReading:
    """The bytes that a loader reads from files while the fit runs."""

    per_batch: int  # bytes of a batch, on average of those that were measured
    per_second: float  # bytes, at the pace of the fit's steady state
    from_storage: float  # share that came from a storage device; the rest was in memory, in the page cache


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePace:
    """The pace at which storage gave a loader's files, read past the page cache."""

    per_second: float  # bytes
    nbytes: int  # that were read
    files: int  # that they came from
    readers: int  # files that were read at the same time


def reading(loader: LoaderFacts, step: int) -> FileReading | None:
    """Return the reads of a loader, with batches taken every `step` nanoseconds, or None if there are none or unknown."""
    fetch = loader.fetch
    per_batch = max(fetch.read, fetch.stored) // fetch.metered if fetch.metered else 0  # mapped files are not read by calls
    if not per_batch:
        return None
    share = min(1.0, fetch.stored / max(fetch.read, fetch.stored))
    return FileReading(per_batch=per_batch, per_second=per_batch / step * 1e9, from_storage=share)


_MOSTLY = 0.5  # share of a fetch's reads that comes from a storage device,
_BLOCKED = 0.4  # and share of its time that it waits for that device: it also copies the data


def storage_wait(fetch: FetchFacts) -> tuple[int, int] | None:
    """Return the nanoseconds that a fetch waits for storage, and the bytes that it reads, or None unless it is much of it."""
    is_from_storage = fetch.stored and fetch.stored >= _MOSTLY * fetch.read
    if not fetch.metered or not is_from_storage or fetch.blocked < _BLOCKED * (fetch.blocked + fetch.ran):
        return None
    return fetch.blocked // fetch.metered, fetch.stored // fetch.metered


def profiling_time(loader: LoaderFacts) -> int:
    """Return the additional nanoseconds of the fetches that were profiled in the fit's own process."""
    fetch = loader.fetch
    if loader.workers or fetch.median is None:
        return 0
    return max(0, fetch.profiled_time - fetch.profiled * fetch.median)


def training_loader(loaders: Sequence[LoaderFacts]) -> LoaderFacts | None:
    """Return the loader of the training batches: of several, the one with the most."""
    return max((loader for loader in loaders if loader.is_training), key=lambda loader: loader.fetch.fetches, default=None)


# --- The time of a batch on its way to the model, in parts from reading to the copy to the device.


READING, DECODING, ITEMS, COLLATION, REST = "reading", "decoding", "item transforms", "collation", "other"

_DECODERS = (
    "/PIL/ImageFile.py", "ImagePlugin.py", "/cv2/", "/h5py/", "/imageio/", "/numpy/lib/_npyio_impl.py", "/numpy/lib/npyio.py",
    "/pandas/io/", "/skimage/io/", "/soundfile.py", "/torch/serialization.py", "/torchaudio/", "/torchcodec/",
    "/torchvision/datasets/folder.py", "/torchvision/io/",
)  # fmt: skip
"""Files of libraries that open files and decode them."""
_ALSO = (("/PIL/Image.py", frozenset({"open"})), ("/fastai/vision/core.py", frozenset({"create", "load_image"})))
"""Files where only these functions do so."""
_IN_C = re.compile(r"\b(imread|imdecode|decompress|_pickle\.loads?)\b")
_READS = re.compile(r"\b_io\.|\bposix\.(open|read|pread)\b|'_io\.")
"""Functions of Python itself, written in C, that read from files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPart:
    """One part of the way of a batch."""

    name: str  # "decoding"
    time: int  # nanoseconds of a batch; for workers' parts, in one of them


def loader_parts(loader: LoaderFacts, medians: Mapping[str, int]) -> tuple[LoaderPart, ...]:
    """Return the parts in their order, those that take no time left out; none where no fetch was profiled.

    Args:
        loader: that of the training batches.
        medians: of a batch's phases in the steady state, by name.
    """
    parts = dict(_made(loader.fetch))
    if not parts:
        return ()
    parts |= {
        phase_log.TRANSFORMS: medians.get(phase_log.TRANSFORMS, 0),
        phase_log.TO_DEVICE: medians.get(phase_log.TO_DEVICE, 0),
    }
    return tuple(LoaderPart(name=name, time=time) for name, time in parts.items() if time > 0)


def _made(fetch: FetchFacts) -> Iterator[tuple[str, int]]:
    """Yield the parts of making a batch: shares of the profiled fetches, applied to the time of the others."""
    if not fetch.steps or not fetch.profiled or not fetch.profiled_time:
        return
    profiled = fetch.profiled_time // fetch.profiled
    whole = profiled if fetch.median is None else min(fetch.median, profiled)
    collation = sum(step.time for step in fetch.steps if step.kind == "collate")
    items = sum(step.time for step in fetch.steps) - collation
    scale = whole / max(fetch.profiled_time, items + collation)
    waited = storage_wait(fetch)
    reading = max(round(fetch.in_files * scale), 0 if waited is None else waited[0])
    reading = min(reading, whole)
    decoding = min(round(fetch.decoding * scale), whole - reading)
    items = max(0, round(items * scale) - reading - decoding)
    collation = min(round(collation * scale), whole - reading - decoding - items)
    yield from ((READING, reading), (DECODING, decoding), (ITEMS, items), (COLLATION, collation))
    yield REST, whole - reading - decoding - items - collation


def file_work(profile: FetchProfile) -> tuple[int, int]:
    """Return the nanoseconds that fetches spent reading from files, and those spent decoding."""
    reads = [not function.file and bool(_READS.search(function.name)) for function in profile.functions]
    decodes = list(map(_decodes, profile.functions))
    callees = {call.callee for calls in profile.calls.values() for call in calls}
    left = [number for number in range(len(profile.functions)) if number not in callees]
    outside = set(left)  # functions that are reached without a decoder
    decoding = 0
    while left:
        for call in profile.calls.get(left.pop(), ()):
            if decodes[call.callee]:
                decoding += call.time
            elif call.callee not in outside:
                outside.add(call.callee)
                left.append(call.callee)
    found = [(caller, call.time) for caller, calls in profile.calls.items() for call in calls if reads[call.callee]]
    within = sum(time for caller, time in found if caller not in outside)
    return sum(time for _, time in found), max(0, decoding - within)


def _decodes(function: FetchFunction) -> bool:
    if not function.file:
        return bool(_IN_C.search(function.name))
    return any(part in function.file for part in _DECODERS) or any(
        part in function.file and function.short in names for part, names in _ALSO
    )
