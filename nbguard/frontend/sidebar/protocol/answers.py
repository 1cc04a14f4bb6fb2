"""Messages from the hub to the views, and the paths that keep a holder alive. Each message has its `op` beside its fields.

These are tuples because they are light to import: the hub is there in every kernel, also where no view is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nbguard.frontend.sidebar.protocol.state import KeptPath, MorePaths, WhyView
from nbguard.frontend.sidebar.protocol.truncation import truncate_utf8
from nbguard.memory.core.references.explain import Why
from nbguard.plain_data import to_plain

if TYPE_CHECKING:
    from nbguard.frontend.sidebar.protocol.state import LineHistory, MemoryState, OutcomeView, PlanView, Tick


# --- The paths that keep a holder alive, as a sidebar shows them.


_PATHS = 40


def why_view(why: Why) -> WhyView:
    """Return the answer of `%gpumem why` as it goes over the wire."""
    paths = tuple(
        KeptPath(
            truncate_utf8(path.text),
            path.cell,
            path.stale,
            truncate_utf8(path.advice.command),
            truncate_utf8(path.advice.effect),
        )
        for path in why.paths[:_PATHS]
    )
    more = tuple(MorePaths(truncate_utf8(root), count) for root, count in why.more[:_PATHS])
    return WhyView(name=truncate_utf8(why.name), what=truncate_utf8(why.what), nbytes=why.nbytes, paths=paths, more=more)


class Acknowledged(NamedTuple):
    """The request has arrived."""

    rid: str


class Queued(NamedTuple):
    """The request waits."""

    rid: str
    why: str  # the reason, in words


class Explained(NamedTuple):
    """The answer to `why`."""

    rid: str
    why: WhyView


class Foreseen(NamedTuple):
    """The answer to `foresee`."""

    rid: str
    text: str  # lines: the need of the next fit, whether it fits and why, the uncounted parts


class HistorySent(NamedTuple):
    """The answer to `history`."""

    rid: str
    history: LineHistory


class Pictured(NamedTuple):
    """The answer to `picture`."""

    rid: str
    html: str  # the report after the last cell that ended, dated; every name is escaped


class Planned(NamedTuple):
    """The answer to `plan`; to `apply`, if by now it would do anything that was not agreed to."""

    rid: str
    plan: PlanView


class Done(NamedTuple):
    """The answer to `apply`."""

    rid: str
    outcome: OutcomeView


class Refused(NamedTuple):
    """The request is not done."""

    rid: str
    why: str  # the reason, in words


class TickSent(NamedTuple):
    """The counters, to every view."""

    tick: Tick


class StateSent(NamedTuple):
    """The result of a scan, to every view or to one that has an older."""

    heap: MemoryState


class Closed(NamedTuple):
    """Nothing more comes: nbguard was unloaded, or switched off."""


Answer = Acknowledged | Queued | HistorySent | Pictured | Explained | Foreseen | Planned | Done | Refused
Broadcast = TickSent | StateSent | Closed

ANSWERS: dict[str, type[Answer]] = {
    "ack": Acknowledged,
    "queued": Queued,
    "history": HistorySent,
    "picture": Pictured,
    "why": Explained,
    "foreseen": Foreseen,
    "plan": Planned,
    "done": Done,
    "refused": Refused,
}
BROADCASTS: dict[str, type[Broadcast]] = {"tick": TickSent, "heap": StateSent, "closed": Closed}

_OPS: dict[type, str] = {kind: op for table in (ANSWERS, BROADCASTS) for op, kind in table.items()}


def message_of(answer: Answer | Broadcast) -> dict[str, Any]:
    """Return a message as it goes over the wire."""
    return {name: to_plain(field) for name, field in unpacked_message(answer).items()}


def unpacked_message(answer: Answer | Broadcast) -> dict[str, Any]:
    """Return the same with its dataclasses in it, for those who pack them."""
    return {"op": _OPS[type(answer)], **dict(zip(answer._fields, answer, strict=True))}
