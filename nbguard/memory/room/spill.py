"""The state of the airbag and the sentence after a cell that spilled, as frozen data and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.memory.core import advice
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.references.holders import holdings
from nbguard.render.html import Block, Line
from nbguard.render.result import Result
from nbguard.texts import joined
from nbguard.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AirbagState(Result):
    """The state of the airbag. All sizes are bytes."""

    kind: ClassVar[str] = "airbag"
    view: ClassVar[str] = "nbguard.memory.room.spill:airbag_blocks"

    device: str  # that it stands in for, `cuda:0`; an empty string while it is off
    size: int = 0  # host memory that is set aside
    spilled: int = 0  # of it in tensors now, as `torch.cuda.memory_snapshot` of its pool tells
    most: int = 0  # that was seen in it at once since it is on, at least
    holders: tuple[str, ...] = ()  # names that hold what is spilled, the largest first
    is_limited: bool = False  # a memory fraction was set since, and PyTorch spills all that it allocates


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """The bytes that one cell, or one script, has spilled. All sizes are bytes."""

    device: str  # `cuda:0`
    most: int  # that lay in host memory at once, at least; 0: nothing new
    moved: int = 0  # of it brought back to the device afterwards
    freed: int = 0  # stale memory that was released for that
    left: int = 0  # still in host memory, as `torch.cuda.memory_snapshot` of the pool tells
    holders: tuple[str, ...] = ()  # names that hold what is left, the largest first
    line: str = ""  # the line of the user's that ran when it was first seen; empty: not known
    reason: str = ""  # why not all was moved that has room; empty: there is none
    batch: tuple[int, int] | None = None  # items of a batch: (as it ran, that would have fitted); None: not known


def names_of_spilled(facts: Facts) -> tuple[str, ...]:
    """Return the names that hold memory in the airbag, the largest first."""
    inside = {
        (device.device, block.address)
        for device in facts.devices
        for segment in (device.airbag.segments if device.airbag else ())
        for block in segment.blocks
    }
    held: dict[str, int] = {}
    for holder, storages in holdings(facts.graph):
        nbytes = sum(facts.graph.storages[n].nbytes for n in storages if facts.graph.storages[n].key in inside)
        if nbytes:
            held[holder.label] = held.get(holder.label, 0) + nbytes
    return tuple(sorted(held, key=lambda label: -held[label]))


def airbag_blocks(state: AirbagState) -> Iterator[Block]:
    """Yield the state of the airbag in one line, and the obstacles to it."""
    if not state.device:
        yield Line("the airbag is off; " + advice.airbag().code + " sets host memory aside for cells that do not fit")
        return
    head = f"airbag of {format_bytes(state.size)} in host memory for {state.device}"
    now = f"{format_bytes(state.spilled)} lies in it{_of(state.holders)}" if state.spilled else "nothing lies in it"
    most = f"; {format_bytes(state.most)} or more at its most" if state.most > state.spilled else ""
    yield Line(f"{head}: {now}{most} (" + advice.AIRBAG_OFF.code + " ends it)")
    if state.is_limited:
        whole = advice.allow_whole_device(state.device)
        yield Line("PyTorch spills everything while a memory fraction is set; " + whole.code + " lifts it")


def spill_sentence(spill: Spill, cell: int | None = None) -> str:
    """Return in one sentence the bytes outside of the device, the line that spilled them, and their place now."""
    who = "" if cell is None else f"In[{cell}]: "
    line = f", from `{spill.line}` on" if spill.line else ""
    if spill.most:
        parts: list[str] = [f"{who}{format_bytes(spill.most)} or more did not fit {spill.device} and lay in host memory{line}"]
    else:
        parts = [f"{who}{format_bytes(spill.moved)} moved from host memory to {spill.device}, which has room again"]
    if spill.freed:
        parts.append(f"{format_bytes(spill.freed)} of stale memory was released")
    if spill.left:
        why = f" ({spill.reason})" if spill.reason else ""
        parts.append(f"{format_bytes(spill.left)} is still there{_of(spill.holders)}{why}")
    elif spill.moved and spill.most:
        parts.append("all of it is on the device again")
    elif spill.most:
        parts.append("nothing is left there")
    if spill.batch is not None:
        parts.append(f"a batch of {spill.batch[1]} instead of {spill.batch[0]} would have fitted")
    return joined("; ", parts)


def _of(holders: tuple[str, ...]) -> str:
    if not holders:
        return ""
    more = f" and {counted(len(holders) - 3, 'more name', 'more names')}" if len(holders) > 3 else ""
    return f", of {', '.join(f'`{name}`' for name in holders[:3])}{more}"
