"""Messages from the hub to the views. Each is an object on the wire, with its `op` beside its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbguard.sidebar.protocol.builtins import to_builtins
from nbguard.sidebar.protocol.state import MemoryState, OutcomeView, PlanView, Tick, WhyView


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The request has arrived."""

    rid: str


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits."""

    rid: str
    why: str  # the reason, in words


@dataclass(frozen=True, slots=True)
class Explained:
    """The answer to `why`."""

    rid: str
    why: WhyView


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to `plan`; to `apply`, if by now it would do anything that was not agreed to."""

    rid: str
    plan: PlanView


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to `apply`."""

    rid: str
    outcome: OutcomeView


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is not done."""

    rid: str
    why: str  # the reason, in words


@dataclass(frozen=True, slots=True)
class TickSent:
    """The counters, to every view."""

    tick: Tick


@dataclass(frozen=True, slots=True)
class StateSent:
    """The result of a scan, to every view or to one that has an older."""

    heap: MemoryState


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing more comes: nbguard was unloaded, or switched off."""


Answer = Acknowledged | Queued | Explained | Planned | Done | Refused
Broadcast = TickSent | StateSent | Closed

ANSWERS: dict[str, type[Answer]] = {
    "ack": Acknowledged,
    "queued": Queued,
    "why": Explained,
    "plan": Planned,
    "done": Done,
    "refused": Refused,
}
BROADCASTS: dict[str, type[Broadcast]] = {"tick": TickSent, "heap": StateSent, "closed": Closed}

_OPS: dict[type, str] = {kind: op for table in (ANSWERS, BROADCASTS) for op, kind in table.items()}


def message_of(answer: Answer | Broadcast) -> dict[str, Any]:
    """Return a message as it goes over the wire."""
    fields = {} if isinstance(answer, Closed) else to_builtins(answer)
    return {"op": _OPS[type(answer)], **fields}
