"""Everything that a kernel tells its sidebars, as it goes over the wire. Sizes are bytes, times seconds since the epoch.

`Tick` is whole and small: who joins late, or misses one, is right at the next. `MemoryState` needs a scan; it is
sent when it has changed, and to whoever says hello without it. docs/protocol.md has the messages around them, and the other
direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nbguard.memory.breakdown import Part

PROTOCOL = 1

ActionName = Literal["clean_stale", "empty_cache", "release", "park", "unpark", "stop_workers"]
"""Everything that a sidebar can have done. Each is planned first and applied by the plan's token."""

Now = Literal["now", "cell_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTick:
    """One device by its counters. `parts` re-add to `total`, where that is known.

    `peak` is the most that was allocated, as torch counts it; `spark` are (time, bytes in use by this kernel), oldest first.
    """

    device: str
    name: str
    total: int | None
    parts: tuple[Part, ...]
    peak: int | None = None
    spark: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTick:
    """The fit that runs now. `epoch` and `batch` count from 1; None: not known.

    `waiting` is the share (0 to 1) of the moments looked at in which the fit waited for data; None while they are few.
    """

    label: str
    call: str
    epoch: int | None = None
    epochs: int | None = None
    batch: int | None = None
    batches: int | None = None
    is_training: bool = True
    loss: float | None = None
    peak: int | None = None
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What was asked for and is not done yet. `why` says what it waits for while it is `queued`."""

    rid: str
    title: str
    phase: Literal["queued", "running"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class TimeMark:
    """Something on the time axis: the start of a cell (`In[12]`) or of an epoch (`epoch 2`)."""

    t: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What the counters say now.

    `boot` names this run of the kernel, `n` counts its ticks, `heap` is the number of the `MemoryState` that goes with it.
    `tracked` is `cuda`, `cpu`, `mps`, `simulated`; empty before PyTorch is imported. `cell` is the number of the cell that
    runs, if one does (`busy`).
    """

    boot: str
    n: int
    t: float
    heap: int
    tracked: str
    busy: bool
    cell: int | None = None
    devices: tuple[DeviceTick, ...] = ()
    fit: FitTick | None = None
    jobs: tuple[JobStatus, ...] = ()
    marks: tuple[TimeMark, ...] = ()
    v: int = PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderRow:
    """Who holds memory. `id` names the row in requests, as long as the heap's number is the same.

    `can` lists which of `why`, `release`, `park` a sidebar may ask for it.
    """

    id: int
    label: str
    kind: str
    what: str
    path: str
    device: str
    nbytes: int
    reaches: int
    cell: int | None = None
    stale: bool = False
    can: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A Learner. `id` is that of its row among the holders; None for what is parked. `note` says what keeps a stale one."""

    id: int | None
    label: str
    summary: str
    nbytes: int
    state: Literal["training", "live", "stale", "parked"]
    cell: int | None = None
    workers: int = 0
    note: str = ""
    can: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Strip:
    """One segment, or `segments` neighbours drawn as one. `pieces` are (allocated|releasable|stranded|kept, bytes) in order."""

    segments: int
    nbytes: int
    pieces: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSegments:
    """What a look at the segments adds to a device: the largest request that would succeed, and what stands in its way."""

    device: str
    segments: int
    strips: tuple[Strip, ...]
    largest_now: int | None = None
    largest_flushed: int | None = None
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class FixRow:
    """What would let a failed request through: in words, the bytes it gives, and what to run."""

    words: str
    nbytes: int | None
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OomView:
    """The last error ran out of memory: what was asked for, and what helps, best first."""

    title: str
    sentence: str
    fixes: tuple[FixRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """What a look at the heap found, after `cell`. `more` counts the holders that are not listed: (how many, bytes)."""

    boot: str
    heap: int
    t: float
    seconds: float
    cell: int | None = None
    stale: int = 0
    holders: tuple[HolderRow, ...] = ()
    more: tuple[int, int] = (0, 0)
    experiments: tuple[Experiment, ...] = ()
    devices: tuple[DeviceSegments, ...] = ()
    findings: tuple[tuple[str, str], ...] = ()
    oom: OomView | None = None
    v: int = PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One step. `key` is what a request lists under `keep` to leave it out; empty: the step cannot be left out."""

    label: str
    detail: str
    nbytes: int | None
    key: str = ""
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan to agree to. `token` applies it; empty: there is nothing to apply, and `refused` says why.

    `confirm` is what the button says, `irreversible` what cannot be undone (empty: nothing), `when` and `why` whether it
    runs now or when the cell ends.
    """

    token: str
    action: ActionName
    title: str
    confirm: str
    rows: tuple[PlanRow, ...]
    promised: int
    when: Now = "now"
    why: str = ""
    irreversible: str = ""
    skipped: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeView:
    """What was done, measured. `undo` are the names under which what was parked comes back (`unpark`)."""

    action: ActionName
    title: str
    sentence: str
    promised: int
    realised: int
    extra: int = 0
    undone: tuple[tuple[str, str], ...] = ()
    undo: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyView:
    """The ways in which a holder is kept alive: (path, cell, stale, the line that cuts it)."""

    name: str
    what: str
    nbytes: int
    paths: tuple[tuple[str, int | None, bool, str], ...]
    more: tuple[tuple[str, int], ...] = ()
