"""Lines that appear under a cell, on the changes of the cell to the memory, and the bytes released after an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nbguard.memory.cleanup.plan.plan import Outcome
from nbguard.memory.core import advice
from nbguard.memory.core.counters import NOTICED
from nbguard.memory.reports.cell_ledger import PROCESS, CellRecord, DeviceChange, Share
from nbguard.texts import joined
from nbguard.units import format_bytes, signed

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
