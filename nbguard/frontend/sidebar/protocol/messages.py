"""Messages of a view, as they come from a browser: no field is believed before it has been checked.

Every field is checked for its type and size; a foreign message is None, a wrong one of ours is `Bad`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from nbguard.frontend.sidebar.protocol.state import ActionName, KeptPath, MorePaths, WhyView
from nbguard.frontend.sidebar.protocol.ticks import truncate_utf8
from nbguard.memory.core.references.explain import Why
from nbguard.plain_data import to_plain

if TYPE_CHECKING:
    from nbguard.frontend.sidebar.protocol.state import (
        CellFinding,
        LineHistory,
        MemoryState,
        MomentView,
        OutcomeView,
        PlanView,
        Tick,
    )


# --- Messages from the hub to the views, and the paths that keep a holder alive. Each message has its `op` beside its fields.
#
# These are tuples because they are light to import: the hub is there in every kernel, also where no view is open.


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


class Predicted(NamedTuple):
    """The answer to `predict`."""

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


class Linted(NamedTuple):
    """The answer to `lint`."""

    rid: str
    findings: tuple[CellFinding, ...]


class MomentShown(NamedTuple):
    """The answer to `moment`."""

    rid: str
    moment: MomentView


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


Answer = (
    Acknowledged | Queued | HistorySent | Pictured | Linted | Explained | Predicted | MomentShown | Planned | Done | Refused
)
Broadcast = TickSent | StateSent | Closed

ANSWERS: dict[str, type[Answer]] = {
    "ack": Acknowledged,
    "queued": Queued,
    "history": HistorySent,
    "picture": Pictured,
    "lint": Linted,
    "why": Explained,
    "predicted": Predicted,
    "moment": MomentShown,
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


_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ACTIONS = frozenset(get_args(ActionName))
_LONGEST_LIST = 200
_LONGEST_TEXT = 300
_MOST_CELLS = 2000
_LONGEST_CELL = 100_000
_LARGEST = 2**53
"""JavaScript's numbers are exact up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A view is there."""

    client: str  # a random id of the view
    visible: bool  # somebody can see it
    boot: str = ""  # the run of the kernel whose memory state it has; empty without one
    heap: int = 0  # number of that state
    glance: bool = False  # it shows a figure or two: a tick now and then, no scan


@dataclass(frozen=True, slots=True)
class Bye:
    """A view is gone."""

    client: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """Scan again."""

    rid: str


@dataclass(frozen=True, slots=True)
class HistoryRequest:
    """Send the lines over the last seconds."""

    rid: str
    seconds: int  # of the span, from the last tick back; 0 for all that is kept


@dataclass(frozen=True, slots=True)
class PictureRequest:
    """Send the picture that a saved notebook keeps of the sidebar."""

    rid: str


@dataclass(frozen=True, slots=True)
class LintRequest:
    """Find leaks and slow lines in the code of a notebook, as `nbguard lint` does. Nothing of it is executed."""

    rid: str
    cells: tuple[str, ...]  # the notebook's code cells


@dataclass(frozen=True, slots=True)
class Ask:
    """Explain why a row is alive."""

    rid: str
    heap: int  # number of the memory state that has the row
    id: int  # of the row


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """Predict the memory of the next fit of a row's Learner."""

    rid: str
    heap: int  # number of the memory state that has the row
    id: int  # of the row


@dataclass(frozen=True, slots=True)
class MomentRequest:
    """Show a moment of the allocator's recorded history."""

    rid: str
    device: int | None = None  # number of the device; None for the first that has a history
    event: int | None = None  # number of the event; None for the peak


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Plan an action; nothing is touched."""

    rid: str
    action: ActionName
    heap: int | None = None  # number of the memory state that has the rows
    ids: tuple[int, ...] = ()  # rows to release or park
    names: tuple[str, ...] = ()  # of parked objects to bring back; empty for all
    keep: tuple[str, ...] = ()  # keys of steps to leave out


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply a plan."""

    rid: str
    token: str  # of the plan


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request that still waits."""

    rid: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Show a finding, a notice or a card no longer, in any view. The next event of its kind is shown again."""

    key: str  # of the finding, notice or card


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request that cannot be; the view that sent it gets the reason."""

    rid: str
    why: str  # the reason, in words


Request = (
    Hello
    | Bye
    | Refresh
    | HistoryRequest
    | PictureRequest
    | LintRequest
    | Ask
    | PredictRequest
    | MomentRequest
    | PlanRequest
    | Apply
    | Cancel
    | Dismiss
)

Question = Ask | PredictRequest | MomentRequest | PlanRequest | Apply
"""A request whose answer takes a scan, a trace or a cleanup."""

Message = Request | BadRequest


class _WrongError(Exception):
    """A field has another type or size than it must have."""


def parse(message: object) -> Message | None:
    """Return a view's message; None for one that is no request and cannot be answered. Never raises."""
    if type(message) is not dict or type(message.get("op")) is not str:
        return None
    read = _READERS.get(message["op"])
    rid = message.get("rid")
    has_rid = type(rid) is str and _TOKEN.fullmatch(rid) is not None
    try:
        if read is None:
            raise _WrongError("there is no such request")
        return read(message)
    except _WrongError as error:
        return BadRequest(rid, str(error)) if has_rid and type(rid) is str else None


def _token(message: dict[Any, Any], name: str) -> str:
    token = message.get(name)
    if type(token) is not str or _TOKEN.fullmatch(token) is None:
        raise _WrongError(f"{name} must be up to 64 letters and digits")
    return token


def _number(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise _WrongError(f"{name} must be a number from 0 on")
    return value


def _list(message: dict[Any, Any], name: str, most: int = _LONGEST_LIST) -> list[Any]:
    items = message.get(name, [])
    if type(items) is not list or len(items) > most:
        raise _WrongError(f"{name} must be a list of at most {most}")
    return items


def _texts(message: dict[Any, Any], name: str) -> tuple[str, ...]:
    texts = _list(message, name)
    if any(type(text) is not str or not 0 < len(text) <= _LONGEST_TEXT for text in texts):
        raise _WrongError(f"{name} must be texts of at most {_LONGEST_TEXT} characters")
    return tuple(texts)


def _cells(message: dict[Any, Any]) -> tuple[str, ...]:
    cells = _list(message, "cells", _MOST_CELLS)
    if any(type(cell) is not str or len(cell) > _LONGEST_CELL for cell in cells):
        raise _WrongError(f"cells must be texts of at most {_LONGEST_CELL} characters")
    return tuple(cells)


def _hello(message: dict[Any, Any]) -> Hello:
    visible = message.get("visible")
    if type(visible) is not bool:
        raise _WrongError("visible must be true or false")
    glance = message.get("glance", False)
    if type(glance) is not bool:
        raise _WrongError("glance must be true or false")
    client = _token(message, "client")
    if "boot" not in message:
        return Hello(client=client, visible=visible, glance=glance)
    boot, heap = _token(message, "boot"), _number(message.get("heap"), "heap")
    return Hello(client=client, visible=visible, boot=boot, heap=heap, glance=glance)


def _plan(message: dict[Any, Any]) -> PlanRequest:
    action = message.get("action")
    if type(action) is not str or action not in _ACTIONS:
        raise _WrongError("there is no such action")
    ids = tuple(_number(number, "ids") for number in _list(message, "ids"))
    heap = message.get("heap")
    if heap is not None or ids:
        heap = _number(heap, "heap")
    rid = _token(message, "rid")
    return PlanRequest(rid=rid, action=action, heap=heap, ids=ids, names=_texts(message, "names"), keep=_texts(message, "keep"))  # type: ignore[arg-type]


def _moment(message: dict[Any, Any]) -> MomentRequest:
    numbers = (message.get(name) for name in ("device", "event"))
    device, event = (None if number is None else _number(number, "device and event") for number in numbers)
    return MomentRequest(_token(message, "rid"), device, event)


def _row(message: dict[Any, Any]) -> tuple[str, int, int]:
    """Return (request, number of the memory state, row) of a request about one row."""
    return _token(message, "rid"), _number(message.get("heap"), "heap"), _number(message.get("id"), "id")


_READERS: dict[str, Callable[[dict[Any, Any]], Message]] = {
    "hello": _hello,
    "bye": lambda message: Bye(_token(message, "client")),
    "refresh": lambda message: Refresh(_token(message, "rid")),
    "history": lambda message: HistoryRequest(_token(message, "rid"), _number(message.get("seconds"), "seconds")),
    "picture": lambda message: PictureRequest(_token(message, "rid")),
    "lint": lambda message: LintRequest(_token(message, "rid"), _cells(message)),
    "why": lambda message: Ask(*_row(message)),
    "predict": lambda message: PredictRequest(*_row(message)),
    "moment": _moment,
    "plan": _plan,
    "apply": lambda message: Apply(_token(message, "rid"), _token(message, "token")),
    "cancel": lambda message: Cancel(_token(message, "rid")),
    "dismiss": lambda message: Dismiss(_token(message, "key")),
}

REQUESTS: dict[str, type[Request]] = {
    "hello": Hello,
    "bye": Bye,
    "refresh": Refresh,
    "history": HistoryRequest,
    "picture": PictureRequest,
    "lint": LintRequest,
    "why": Ask,
    "predict": PredictRequest,
    "moment": MomentRequest,
    "plan": PlanRequest,
    "apply": Apply,
    "cancel": Cancel,
    "dismiss": Dismiss,
}
"""The types of requests, by their `op`."""
