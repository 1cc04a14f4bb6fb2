"""What an out-of-memory error tells: in its text, in its frames, and to an observer at the moment of the failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

OomKind = Literal["device", "library", "host", "worker", "shm"]
"""Who had no memory to give: PyTorch's allocator of a device; the driver, asked by a library of CUDA's; the host; the host,
asked by a DataLoader worker that was killed for it; shared memory, through which such workers hand over batches."""

HOST_KINDS: frozenset[str] = frozenset({"host", "worker", "shm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OomNote:
    """The allocator at the failure, before any frame was unwound: as its observer saw it, or as the error's text has it.

    All sizes are bytes. From a text they are up to `slack` larger, and there are no peaks.

    `requested` is the segment that the allocator wanted: the request, rounded up. `free` and `total` are the device's,
    `limit` what the process may reserve if that is less than the device. `stranded`, `largest_free` and `pages` (whole pages
    in what is stranded) are None, with `unread` saying why, where the allocator's blocks were not read.
    """

    device: str
    requested: int
    total: int | None
    free: int
    limit: int | None
    allocated: int
    reserved: int
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    stranded: int | None = None
    largest_free: int | None = None
    pages: int | None = None
    unread: str = ""
    settings: str = ""
    cell: int | None = None
    time: float | None = None
    slack: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Memory of the host as this process may use it, in bytes; None where it does not apply or cannot be read.

    `available` is what can be had without swapping; `group_limit` and `group_room` those of the container (cgroup) that leaves
    least, `address_limit` and `address_room` of RLIMIT_AS; `shm_total` and `shm_free` of /dev/shm.
    """

    total: int | None = None
    available: int | None = None
    group_limit: int | None = None
    group_room: int | None = None
    address_limit: int | None = None
    address_room: int | None = None
    shm_total: int | None = None
    shm_free: int | None = None

    @property
    def room(self) -> int | None:
        """Return what one allocation can get: the least of what the machine, the container and the limit leave."""
        found = [room for room in (self.available, self.group_room, self.address_room) if room is not None]
        return min(found, default=None)


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of the user's code: the number of its cell (None in a script), of the line in it, and its text."""

    cell: int | None
    number: int
    text: str = ""


def device_that_ran_out(oom: OomFact, devices: Iterable[str]) -> str | None:
    """Return which of `devices` an error ran out of; None for the host, and where the error's text leaves it open."""
    if oom.kind in HOST_KINDS:
        return None
    named = [device for device in devices if oom.device in (device, "", device.partition(":")[0])]
    return named[0] if len(named) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomFact:
    """The last error, where it ran out of memory.

    `requested` is None where the error does not say; `slack` how many bytes more it may be, as texts are rounded to
    hundredths. `limit` is what the text says the process may reserve at most. `error` names the error's type, `shown` that
    of the error raised because of it or after it. `cell` ran it, `line` is the deepest line of the user's own, `uses` the
    names that the run reads, `bound` those it had bound before it failed. `learner` is the ref of the Learner in the
    error's frames, `batch_size` its batch size. `was_released` says that a cleanup has taken the frames' variables since.
    """

    device: str
    requested: int | None
    slack: int = 0
    kind: OomKind = "device"
    limit: int | None = None
    error: str = "OutOfMemoryError"
    shown: str = ""
    cell: int | None = None
    line: CodeLine | None = None
    uses: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()
    learner: int = 0
    batch_size: int | None = None
    was_released: bool = False
    note: OomNote | None = None
    host: HostFacts | None = None
