"""The state that a kernel sends to its sidebars, as it goes over the wire. Sizes are bytes, times seconds since the epoch.

`Tick` is whole and small: a view that joins late, or misses one, is right at the next. `MemoryState` needs a scan; it is sent
when it has changed, and to every view that says hello without it. docs/protocol.md has the messages around them, and the
other direction. A `NamedTuple` is a list on the wire, in the order of its fields. `labextension/src/view/protocol.ts` is made
from these types by `docs/make_protocol.py`, comments included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from nbguard.memory.core.analysis import DevicePart as DevicePart
from nbguard.memory.core.analysis import Part

PROTOCOL = 5

ActionName = Literal["clean_stale", "empty_cache", "release", "park", "unpark", "stop_workers"]
"""Everything that a sidebar can have done. Each is planned first and applied by the plan's token."""

Ability = Literal["why", "release", "park", "unpark", "clean", "predict"]
"""A request that a view may make about a row. `clean` is the plan of Clean stale, which lets the row go; `predict` asks for the
memory of a Learner's next fit."""

PieceKind = Literal["allocated", "releasable", "stranded", "kept"]
"""The state of a piece of a segment: `kept` is free in a private pool that something still uses."""

Now = Literal["now", "cell_end"]
"""The moment at which a plan is done once it is agreed to."""


class LinePoint(NamedTuple):
    """A stretch of a device's line: one reading, equal readings in a row, or all readings in a bucket of time."""

    since: float  # time of the first reading
    until: float  # time of the last reading
    low: int  # least bytes allocated in it
    high: int  # most bytes allocated in it, between readings too where the allocator's peak counter has risen
    allocated: int  # bytes in use by this kernel at the last reading: in tensors, or by its process where they are not counted
    reserved: int | None  # bytes that PyTorch had of the device at the last reading
    others: int | None  # bytes in use by other processes and the driver at the last reading
    free: int | None  # bytes free on the device at the last reading


class FittingRequest(NamedTuple):
    """The largest request that would succeed, in bytes."""

    now: int
    flushed: int  # after the cache was emptied


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTick:
    """One device by its counters."""

    device: str  # torch's name: `cuda:0`, `cpu`
    name: str  # the model, as the driver calls it
    total: int | None  # memory of the device; None if unknown
    parts: tuple[Part, ...]  # add up to `total`, where that is known
    peak: int | None = None  # the most that was allocated, as torch counts it
    line: LinePoint | None = None  # the newest reading for its line; None if this kernel has not used the device
    fits: FittingRequest | None = None  # by the blocks of the last scan and the memory free now; None if blocks changed since


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTick:
    """The fit that runs now, read from the frames of a Learner's fit; None where it is not known."""

    label: str  # the Learner, as one would write it
    call: str  # the Learner's method that was called: `fit_one_cycle`
    epoch: int | None = None  # from 1 on
    epochs: int | None = None  # in all
    batch: int | None = None  # of this epoch, from 1 on
    batches: int | None = None  # of this epoch in all
    is_training: bool = True  # False: it validates
    loss: float | None = None  # smoothed, of the last batch, from the Learner's Recorder
    peak: int | None = None  # the most that was allocated during this fit
    waiting: float | None = None  # share (0 to 1) of the moments of the fit waiting for data; None while they are few


@dataclass(frozen=True, slots=True)
class CellFinding:
    """A line of a cell that `nbguard lint` reports."""

    cell: int  # place of the cell among those that were sent, from 0
    line: int  # of the cell, from 1
    code: str  # of the rule: `NBG101`
    message: str


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A request of some view that is not done yet."""

    rid: str  # the request's id, chosen by the view that sent it
    title: str  # in words
    phase: Literal["queued", "running"]
    why: str = ""  # the reason why it waits while it is `queued`


class DevicePeak(NamedTuple):
    """The most that was allocated on one device while a cell ran, in bytes."""

    device: str
    nbytes: int
    is_exact: bool  # the allocator's peak counter rose in the cell; false: the most of the readings, at least that


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeMark:
    """A mark on the time axis: a cell, an epoch of a fit, or a request for memory that failed."""

    kind: Literal["cell", "epoch", "request"]
    label: str  # in words: `In[12]`, `epoch 2`, `6 GiB asked`
    t: float  # it began, or failed
    end: float | None = None  # it ended; None if it goes on
    cell: int | None = None  # number of the cell, or of the one that made the request
    epoch: int | None = None  # number of the epoch, from 1 on
    cell_id: str = ""  # the id of the cell in its notebook, where the frontend tells it
    peaks: tuple[DevicePeak, ...] = ()  # of a cell, by device
    device: str = ""  # of a request; empty if unknown
    nbytes: int = 0  # that the request asked for


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """The line of one device."""

    device: str
    points: tuple[LinePoint, ...]  # oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class LineHistory:
    """The lines of all devices over a span of time up to the last tick, in few points, with the marks of that time."""

    seconds: float  # of the span that was asked for; 0 for all that is kept
    n: int  # number of the last tick in it
    lines: tuple[DeviceLine, ...]
    marks: tuple[TimeMark, ...]  # oldest first


class Neighbour(NamedTuple):
    """Another notebook or program on one of the kernel's devices, with all its processes there, from NVML."""

    device: str
    kernel: str  # id of the kernel that it is; empty if it is none, or nothing tells
    name: str  # file name of its notebook, else its program, else its user; empty if nothing tells
    nbytes: int | None  # it has on the device; None if the driver does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The counters now. Whole and small: a view that joins late is right at the next one."""

    boot: str  # names this run of the kernel
    n: int  # counts its ticks
    t: float
    heap: int  # number of the `MemoryState` that goes with it
    heap_cell: int | None = None  # number of the last cell whose end left memory as in that state
    tracked: str  # `cuda`, `cpu`, `mps`, `simulated`; empty before PyTorch is imported
    busy: bool  # a cell runs
    cell: int | None = None  # number of the cell that runs
    devices: tuple[DeviceTick, ...] = ()
    fit: FitTick | None = None
    survived: tuple[str, ...] = ()  # how a training of this cell, or the last, went on after it ran out of memory, or why not
    jobs: tuple[JobStatus, ...] = ()  # the one that runs first
    marks: tuple[TimeMark, ...] = ()  # the newest, and the last run of the cell that runs; oldest first
    neighbours: tuple[Neighbour, ...] = ()  # the largest first, at most 8
    v: int = PROTOCOL


class RowPart(NamedTuple):
    """A part of a row's bytes."""

    label: str  # in the words of a training loop: `model`, `gradients`
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderRow:
    """A holder of memory: a name, a displayed result, an error."""

    id: int  # names the row in requests, as long as the state's number is the same
    label: str  # as one would write it
    kind: str  # the kind of root that leads to it: `name`, `out`, `error` …
    what: str  # the object in words: `Learner · Net · Adam`
    path: str  # the way from the label to the memory
    short: str = ""  # its name where a path has no room: `error in fit()`; empty if its label does
    device: str
    nbytes: int  # its own: all rows add up; of a name, those which its release frees
    frees: int  # bytes that `release` gives back, by its plan: with the names in `together`, where there are any
    reaches: int  # bytes that it leads to
    together: tuple[str, ...] = ()  # names that `release` takes along, as the row frees next to nothing by itself
    is_small: bool = False  # too small for a row, a badge or a button of its own: one line for all that are
    cell: int | None = None  # number of the cell that bound the name
    stale: bool = False  # Clean stale would let all of it go
    stale_bytes: int = 0  # bytes of the row that Clean stale gives back, by its plan
    at_least: bool = False  # `nbytes` and `reaches` are lower bounds: the row leads to something that the scan left out
    parts: tuple[RowPart, ...] = ()  # add up to `nbytes`; empty if the row is one thing
    is_running: bool = False  # held by nothing but functions that run now
    note: str = ""  # why it cannot be released from here, or what does it, in words
    can: tuple[Ability, ...] = ()  # requests that may be made about it


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A Learner, or something parked."""

    id: int | None  # of its row among the holders; None if parked, or it has no row of its own
    label: str
    summary: str  # model, optimizer, data
    nbytes: int  # it leads to
    state: Literal["training", "live", "stale", "parked"]
    cell: int | None = None  # number of the cell that bound the name
    workers: int = 0  # worker processes of its DataLoaders
    note: str = ""  # the keeper of a stale one, the place of a parked one
    can: tuple[Ability, ...] = ()


class Piece(NamedTuple):
    """A stretch of a segment."""

    kind: PieceKind
    nbytes: int


@dataclass(frozen=True, slots=True)
class Strip:
    """One segment, or some neighbours drawn as one."""

    segments: int  # drawn as this strip
    nbytes: int
    pieces: tuple[Piece, ...]  # by address, or added up by kind


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSegments:
    """The segments of a device, from the allocator's snapshot."""

    device: str
    segments: int  # in all
    strips: tuple[Strip, ...]
    largest_now: int | None = None  # the largest request that would succeed
    largest_flushed: int | None = None  # the same after the cache was emptied
    sentence: str = ""  # the holder that stands in the way of more


class HeldThen(NamedTuple):
    """A holder at a moment of the history."""

    label: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentView:
    """A device after an event of the allocator's recorded history."""

    device: int  # its number
    devices: tuple[int, ...]  # that have a history
    event: int  # 0 is the time before the first
    events: int  # number of the last
    peak: int  # number of the first event after which most was allocated
    refused: int | None  # number of the first request that found no memory
    sentences: tuple[str, ...]  # on the event, and on the peak
    course: tuple[int, ...]  # bytes allocated at most in each stretch of the history, which are equally long
    segments: int  # then
    strips: tuple[Strip, ...]
    holders: tuple[HeldThen, ...]  # the largest, then all others as one


@dataclass(frozen=True, slots=True)
class FixRow:
    """A remedy that would let a failed request through."""

    words: str
    nbytes: int | None  # it gives back
    commands: tuple[str, ...] = ()  # lines of code that do it


@dataclass(frozen=True, slots=True, kw_only=True)
class OomView:
    """The last error, if it ran out of memory."""

    title: str
    sentence: str  # the bytes that were asked for, and those that can be allocated now
    fixes: tuple[FixRow, ...]  # best first
    key: str  # names it in a request to dismiss it
    cell: int | None = None  # number of the cell that failed


class UnlistedHolders(NamedTuple):
    """Holders that are too many to be listed."""

    holders: int
    nbytes: int


_NONE_UNLISTED = UnlistedHolders(0, 0)


class FindingLine(NamedTuple):
    """A finding: code stands between backticks."""

    sentence: str
    command: str  # a line of code that does something about it; empty if none
    learner: str  # the Learner that it is about while no fit runs on it; empty if it always holds
    key: str  # names it in a request to dismiss it
    cell: int | None  # number of the cell that it is about; None for none


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """The result of a scan: holders, experiments, segments, findings."""

    boot: str  # names this run of the kernel
    heap: int  # number of this state: requests about its rows name it
    t: float  # the scan began
    seconds: float  # it took
    cell: int | None = None  # number of the last cell that had ended
    during: int | None = None  # number of the cell that it was made in the middle of; None between cells
    stale: int = 0  # bytes that Clean stale would give back
    least: int = 0  # least bytes of a thing with its own row, badge or primary button
    holders: tuple[HolderRow, ...] = ()  # largest first
    more: UnlistedHolders = _NONE_UNLISTED
    experiments: tuple[Experiment, ...] = ()  # the one that trains first
    devices: tuple[DeviceSegments, ...] = ()
    findings: tuple[FindingLine, ...] = ()
    notices: tuple[FindingLine, ...] = ()  # on objects that cells deleted and that are still there, the latest first
    oom: OomView | None = None
    v: int = PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One step of a plan."""

    label: str
    detail: str
    nbytes: int | None  # it gives back; None if unknown
    key: str = ""  # listed under `keep` by a request that leaves the step out
    kept: bool = False  # it is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan to agree to."""

    token: str  # applies it; empty if there is nothing to apply, and `refused` says why
    action: ActionName
    title: str
    confirm: str  # the button's words
    rows: tuple[PlanRow, ...]
    promised: int  # bytes
    when: Now = "now"
    why: str = ""  # the reason why it waits until the cell ends
    irreversible: str = ""  # the loss that cannot be undone; empty if none
    skipped: tuple[str, ...] = ()  # sentences about what is left alone
    refused: str = ""


class UndoneStep(NamedTuple):
    """A step that was not done."""

    label: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeView:
    """The outcome of a plan, measured."""

    action: ActionName
    title: str
    sentence: str
    promised: int  # bytes
    realised: int  # bytes of these that came back
    extra: int = 0  # bytes that came back beyond the promised ones
    done: tuple[str, ...] = ()  # steps that were taken, in words
    undone: tuple[UndoneStep, ...] = ()
    undo: tuple[str, ...] = ()  # names that bring parked objects back (`unpark`)


class KeptPath(NamedTuple):
    """A way from a root that keeps a holder alive."""

    path: str
    cell: int | None  # number of the cell that bound its name
    stale: bool  # Clean stale would cut it
    release: str  # the line of code that cuts it; empty if none
    effect: str  # effect of that line in a few words; empty if none


class MorePaths(NamedTuple):
    """Paths of one root that are not listed one by one."""

    root: str
    paths: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyView:
    """The ways from roots that keep a holder alive."""

    name: str
    what: str  # the object in words
    nbytes: int  # it leads to
    paths: tuple[KeptPath, ...]
    more: tuple[MorePaths, ...] = ()
