"""A notice, and the departure of a name that may lead to one, as plain frozen data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from nbguard.memory.core.advice import Advice
from nbguard.memory.core.facts import RootKind
from nbguard.render.result import Result
from nbguard.texts import joined

NoticeKind = Literal["deleted", "rebound", "view", "growth", "error", "left"]
"""A name was deleted or bound again, and its memory is alive; a small view keeps a large storage; a cell leaves ever more; an
error, or a cell that ended well, left memory that no name leads to."""

NOT_SHOWN = "something that Python does not show"
"""Stands for a holder among C++ objects, which no reference that Python knows of leads to."""

_NAMES = 20
"""Names that a notice remembers."""
StorageKey = tuple[str, int]
"""(device, address) of a storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A name that a cell has deleted or bound again, and whose memory is alive: its holder is not known yet."""

    name: str
    ref: int  # id of the object that it was bound to; 0 if that object is gone, and parts of it are left
    type_name: str  # class of the object
    bound: int | None  # number of the cell that had bound the name
    cell: int  # number of the cell that deleted it or bound it again, or of the last one before a cleanup between cells
    is_rebound: bool  # the name has another object now
    storages: frozenset[StorageKey]  # that it led to and that are alive
    nbytes: int  # of these storages
    alias_of: str = ""  # name whose part it was bound to, `m = learn.model`; empty if it was bound to something new
    named: frozenset[int] = frozenset()  # ids of the objects behind it that had names of their own
    released_by: str = ""  # command of the cleanup that deleted it; empty if code of the user's did
    is_between_cells: bool = False  # it went after the cell `cell`, by a cleanup


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One thing that is still in memory although nobody seems to want it. Keeping one keeps nothing else alive."""

    kind: NoticeKind
    name: str  # the name that was deleted or bound again; of a growth, where it piles up
    cell: int  # number of the cell that it was noticed after first
    nbytes: int  # bytes that are left; of a growth, by each run of the cell
    holders: tuple[str, ...]  # as one would write them, the most telling first
    advice: tuple[Advice, ...]  # lines that free these bytes, one after the other; none where nothing short does
    shape: str  # the event: the name, the cell, and the holder by its path without keys
    bound: int | None = None  # number of the cell that had bound the name
    holder_cell: int | None = None  # number of the cell that the first holder stems from
    holder_kind: RootKind | None = None  # kind of the root of the first holder, or None where Python does not show it
    beside: tuple[str, ...] = ()  # further names that the same cell has deleted or bound again, and that the same root holds
    is_whole: bool = True  # the object itself is alive; False: parts of it are
    keeps_graph: bool = False  # an autograd graph keeps it
    command: str = field(init=False)  # the lines of the advice; empty where there are none
    registered: int = field(default=1, metadata={"json": False})  # number of registrations of the hook that holds it
    is_for_good: bool = field(default=False, metadata={"json": False})  # no line ends it: it goes only with the kernel
    frees: int | None = None  # bytes of tensors that these lines give back together; None without any, or not known
    view_nbytes: int = 0  # bytes of the view that keeps the storage, of a notice of that kind
    names: tuple[str, ...] = ()  # all names that are gone and left this, those of later cells last
    times: int = 1  # how often it has been noticed: by the names, or by the runs of a growth
    is_left: bool = True  # it is still there; False if its memory is gone since, or has become wanted
    storages: frozenset[StorageKey] = field(default=frozenset(), metadata={"json": False})  # that are left
    roots: frozenset[str] = field(default=frozenset(), metadata={"json": False})  # labels of all roots that lead to them

    def __post_init__(self) -> None:
        """Set `command` by the advice, for those who read only that."""
        object.__setattr__(self, "command", joined("\n", (line.command for line in self.advice)))

    @property
    def fingerprint(self) -> tuple[str, str]:
        """Return the event that it is about: each event is shown once, and the next is as loud."""
        return self.kind, self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices(Result):
    """All notices of a session, the latest last."""

    kind: ClassVar[str] = "notices"
    view: ClassVar[str] = "nbguard.memory.reports.notices.view:notices_blocks"

    notices: tuple[Notice, ...]  # the latest last
    on: bool  # notices are made
    quiet: tuple[str, ...] = ()  # names about which nothing is shown; `*` stands for all


def is_part_of(notice: Notice, other: Notice) -> bool:
    """Say whether a notice tells nothing new, that is, no memory besides another one's, and no other holder.

    A cell's piled-up memory is told by one notice, which is about the names that the cell binds again as well. An object whose
    last name goes is news where the other notice had no line that frees it.
    """
    is_growth = other.kind == "growth" and other.cell == notice.cell
    is_told = notice.storages <= other.storages and bool(other.advice or not notice.is_whole)
    return bool(notice.roots) and notice.roots <= other.roots and (is_growth or is_told)


def known_again(former: Notice, names: Iterable[str]) -> Notice:
    """Return a notice that already told of the memory other names leave now; it keeps its words and gets their names."""
    later = [name for name in names if name not in former.names]
    return replace(former, times=former.times + 1, names=(*former.names, *later)[-_NAMES:])
