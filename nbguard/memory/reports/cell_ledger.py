"""The ledger of cells, with the changes that each made to the memory, and the lines about them under a cell. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from nbguard.memory.cleanup.plan.parking import default_plan
from nbguard.memory.cleanup.plan.plan import Outcome
from nbguard.memory.core import advice
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import NOTICED, Graph, Reading
from nbguard.memory.core.references.graph import STALE_KINDS
from nbguard.memory.core.references.holders import unheld
from nbguard.render.result import Result
from nbguard.texts import joined
from nbguard.units import format_bytes, signed

PROCESS = "process memory"
"""Stands in place of a device where only the memory of the whole process is known, and not its tensors."""


Key = tuple[str, int, int]
"""(device, address, bytes) of a storage."""


@dataclass(frozen=True)
class CellHoldings:
    """The holders at one scan: the holder of each storage, and the bytes that no Python object holds, by device and kind.

    `names`: the user's names that lead to memory, each with the id of the object it was bound to.
    """

    storages: Mapping[Key, tuple[str, bool]]
    rest: Mapping[tuple[str, str], int]
    names: Mapping[str, int]

    @property
    def labels(self) -> frozenset[str]:
        """Return all that held something."""
        return frozenset({label for label, _ in self.storages.values()} | {label for _, label in self.rest})

    @cached_property
    def on_cpu(self) -> int:
        """Bytes of the storages on the CPU, which are asked for after every cell."""
        return sum(nbytes for device, _, nbytes in self.storages if device == "cpu")


NOTHING = CellHoldings({}, {}, {})


def cell_holdings(analysis: Analysis) -> CellHoldings:
    """Return the holders of a scan. Stale are storages that a default cleanup would free: a holder that stays has leftovers."""
    facts, graph = analysis.facts, analysis.facts.graph
    stale = analysis.once(default_plan).storages
    storages: dict[Key, tuple[str, bool]] = {}
    for holder, exclusive in analysis.holdings:
        for number in exclusive:
            fact, is_stale = graph.storages[number], number in stale
            label = f"leftovers of {holder.label}" if is_stale and holder.kind not in STALE_KINDS else holder.label
            storages[fact.device, fact.address, fact.nbytes] = (label, is_stale)
    rest: Counter[tuple[str, str]] = Counter()
    for device in facts.devices:
        for row in unheld(facts, device):
            rest[device.device, row.label] += row.retained
    return CellHoldings(storages, rest, names_of(graph))


def names_of(graph: Graph) -> dict[str, int]:
    """Return the user's names that lead to memory, each with the id of the object it is bound to."""
    return {root.label: graph.nodes[root.nodes[0]].ref for root in graph.roots if root.kind == "name"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChange:
    """The change of one device by a cell, in bytes."""

    device: str  # name in torch, or `PROCESS`
    before: int  # allocated before it
    after: int  # allocated after it
    reserved_before: int | None = None  # by the allocator; None where they are not counted
    reserved: int | None = None  # by the allocator after it
    peak: int | None = None  # most that was allocated while it ran; None unless that is the most ever
    limit: int | None = None  # else the bound of it: the most ever; None where they are not counted
    between: int = 0  # came or went after the cell before, outside any

    @property
    def delta(self) -> int:
        """Return the bytes that the cell added (negative: gave back)."""
        return self.after - self.before

    @property
    def is_changed(self) -> bool:
        """Return whether there is anything to say."""
        return bool(self.delta or self.between or self.peak is not None or self.reserved != self.reserved_before)


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one holder on one device that came, went or became stale. `is_new`: it held nothing before, on any."""

    device: str
    label: str
    nbytes: int
    is_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """One cell."""

    cell: int  # its number
    raised: bool  # it ended with an error
    devices: tuple[DeviceChange, ...] = ()  # that have counters
    came: tuple[Share, ...] = ()  # bytes by holder, if holders were scanned
    went: tuple[Share, ...] = ()  # bytes by holder that had them
    stale: tuple[Share, ...] = ()  # bytes by holder that nothing needs since
    seconds: float = 0.0  # that looking at holders took
    unseen: str = ""  # why holders were not scanned, although memory changed

    def only(self, devices: Collection[str]) -> CellRecord:
        """Return the cell's changes on these devices."""
        changed = tuple(change for change in self.devices if change.device in devices)
        came, went, stale = (
            tuple(share for share in shares if share.device in devices) for shares in (self.came, self.went, self.stale)
        )
        return replace(self, devices=changed, came=came, went=went, stale=stale)

    @property
    def is_changed(self) -> bool:
        """Return whether the cell changed memory."""
        return bool(self.came or self.went or self.stale or any(device.is_changed for device in self.devices))

    @property
    def is_worth_a_line(self) -> bool:
        """Return whether to say so: of CPU tensors, which no counter watches, only noticeable changes."""
        counted = [device for device in self.devices if device.device not in ("cpu", PROCESS)]
        if counted:
            return self.is_changed
        moved = [*(share.nbytes for share in (*self.came, *self.went, *self.stale)), *(abs(d.delta) for d in self.devices)]
        return max(moved, default=0) >= NOTICED


@dataclass(frozen=True, slots=True)
class History(Result):
    """The cells since recording began, oldest first; at most the last thousand."""

    kind: ClassVar[str] = "history"
    view: ClassVar[str] = "nbguard.memory.reports.history_view:history_blocks"

    records: tuple[CellRecord, ...] = ()  # the oldest first

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices that any cell had memory on."""
        return tuple(dict.fromkeys(device.device for record in self.records for device in record.devices))

    def only(self, device: str) -> History:
        """Return the history of one device, `cuda:0` or `0`."""
        wanted = {name for name in self.devices if device in (name, name.rpartition(":")[2])}
        kept = (record.only(wanted) for record in self.records)
        return History(tuple(record for record in kept if record.devices))

    def of(self, device: str) -> tuple[tuple[CellRecord, DeviceChange], ...]:
        """Return the cells with each one's changes on `device`."""
        return tuple(
            (record.only((device,)), change) for record in self.records for change in record.devices if change.device == device
        )


def changes(before: Reading, after: Reading, last: Reading | None = None) -> Iterator[DeviceChange]:
    """Yield the change of each device that has counters between two readings; `last` is the reading after the cell before."""
    for now in after.devices:
        then = before.of(now.device)
        peak = limit = None
        if now.peak is not None and then.peak is not None:
            peak = now.peak if now.peak > then.peak else None
            limit = now.peak if now.peak == then.peak else None
        between = 0 if last is None else then.allocated - last.of(now.device).allocated
        yield DeviceChange(
            device=now.device,
            before=then.allocated,
            after=now.allocated,
            reserved_before=then.reserved,
            reserved=now.reserved,
            peak=peak,
            limit=limit,
            between=between,
        )


def compare(before: CellHoldings, after: CellHoldings) -> tuple[tuple[Share, ...], tuple[Share, ...], tuple[Share, ...]]:
    """Return (came, went, became stale) by holder, each the largest first.

    A storage is the same if its place and size are: one that merely has another holder now neither came nor went.
    """
    came, went, stale = (Counter[tuple[str, str]]() for _ in range(3))
    for (device, address, nbytes), (label, is_stale) in after.storages.items():
        known = before.storages.get((device, address, nbytes))
        if is_stale and (known is None or not known[1]):
            stale[device, label] += nbytes
        elif known is None:
            came[device, label] += nbytes
    for (device, address, nbytes), (label, _) in before.storages.items():
        if (device, address, nbytes) not in after.storages:
            went[device, label] += nbytes
    for place in {*before.rest, *after.rest}:
        delta = after.rest.get(place, 0) - before.rest.get(place, 0)
        if delta:
            (came if delta > 0 else went)[place] = abs(delta)
    return _shares(came, before.labels), _shares(went), _shares(stale)


def _shares(sizes: Mapping[tuple[str, str], int], known: frozenset[str] | None = None) -> tuple[Share, ...]:
    shares = (
        Share(device, label, nbytes, known is not None and label not in known)
        for (device, label), nbytes in sizes.items()
        if nbytes
    )
    return tuple(sorted(shares, key=lambda share: (-share.nbytes, share.label, share.device)))


# --- Lines that appear under a cell, on the changes of the cell to the memory, and the bytes released after an error.


_NAMED = 3
_SLOW = 0.3
"""Seconds that a scan may take without being mentioned."""


def cell_line(record: CellRecord) -> str:
    """Return the changes of a cell to the memory in one line."""
    changed = [device for device in record.devices if device.is_changed] or list(record.devices[:1])
    many = len(record.devices) > 1
    devices = " · ".join(_device(device, named=many) for device in changed)
    return joined(" · ", [f"In[{record.cell}]  {devices}", *_words(record)])


def _device(device: DeviceChange, *, named: bool) -> str:
    name = f"{device.device} " if named or device.device == PROCESS else ""
    text = f"{name}{signed(device.delta)} → {format_bytes(device.after)}"
    if device.peak is not None and device.peak > max(device.before, device.after):
        text += f" · new peak {format_bytes(device.peak)}"
    if device.reserved is not None and device.reserved != device.reserved_before:
        text += f" · reserved {signed(device.reserved - (device.reserved_before or 0))} → {format_bytes(device.reserved)}"
    if device.between:
        text += f" · {signed(device.between)} before it, outside any cell"
    return text


def _words(record: CellRecord) -> Iterator[str]:
    groups = {
        "new": [share for share in record.came if share.is_new],
        "more": [share for share in record.came if not share.is_new],
        "freed": list(record.went),
        "stale": list(record.stale),
    }
    for word, shares in groups.items():
        if text := shares_text(shares):
            yield f"{word}: {text}" + (" (" + advice.release_stale().command + ")" if word == "stale" else "")
    if record.unseen:
        yield "holders: " + advice.REPORT.command + f" ({record.unseen})"
    if record.seconds > _SLOW:
        yield f"scanned in {record.seconds:.1f} s"


def shares_text(shares: Sequence[Share]) -> str:
    """Return holders with their bytes, the largest three by name; crumbs beside a large one are not mentioned."""
    held = Counter[str]()  # on all devices together
    for share in shares:
        held[share.label] += share.nbytes
    largest = max(held.values(), default=0)
    known = [(label, nbytes) for label, nbytes in held.most_common() if nbytes * 100 >= largest or nbytes >= NOTICED]
    words = [f"{label} {format_bytes(nbytes)}" for label, nbytes in known[:_NAMED]]
    if len(known) > _NAMED:
        words.append(f"{len(known) - _NAMED} more {format_bytes(sum(nbytes for _, nbytes in known[_NAMED:]))}")
    return ", ".join(words)


def released_line(outcome: Outcome, cell: int) -> str:
    """Return the bytes released after a failed cell."""
    planned = outcome.plan.actions
    collected = sum(action.nbytes or 0 for action in planned if action.kind == "collect")
    text = f"released {format_bytes(outcome.realised - collected)} that the error in In[{cell}] held (%tb, %debug still work)"
    if outcome.realised < outcome.plan.promised:
        return (
            f"released {format_bytes(outcome.realised)} of {format_bytes(outcome.plan.promised)} promised that the error in "
            f"In[{cell}] held (%tb, %debug still work): " + advice.REPORT.command + " shows who holds the rest"
        )
    return f"{text}, and {format_bytes(collected)} of unreachable cycles" if collected else text
