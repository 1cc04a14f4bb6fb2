"""What a view may send, as it comes from a browser: nothing in it is believed before it has been looked at.

Every field is checked for its type and size; what is no message of ours is None, what is one but wrong is `Bad`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from nbguard.sidebar.protocol.state import ActionName

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ACTIONS = frozenset(get_args(ActionName))
_LONGEST_LIST = 200
_LONGEST_TEXT = 300
_LARGEST = 2**53
"""JavaScript's numbers are exact up to here."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A view is there, and whether somebody can see it. It has the heap number `heap` of the kernel `boot`; empty: none."""

    client: str
    visible: bool
    boot: str = ""
    heap: int = 0


@dataclass(frozen=True, slots=True)
class Bye:
    """A view is gone."""

    client: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """Look at the heap again."""

    rid: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Why is the row `id` of the heap number `heap` alive?"""

    rid: str
    heap: int
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What would `action` do? On the rows `ids` of `heap`, on what is parked under `names`, without the steps `keep`."""

    rid: str
    action: ActionName
    heap: int | None = None
    ids: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """Do what the plan with this token says."""

    rid: str
    token: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop the request `rid`, if it still waits."""

    rid: str


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request that cannot be: `why` says so to the view that sent it."""

    rid: str
    why: str


Message = Hello | Bye | Refresh | Ask | PlanRequest | Apply | Cancel | BadRequest


class _WrongError(Exception):
    """A field is not what it must be."""


def parse(message: object) -> Message | None:
    """Return what a view has sent; None for what is no request and cannot be answered. Never raises."""
    if type(message) is not dict or type(message.get("op")) is not str:
        return None
    read = _OPS.get(message["op"])
    rid = message.get("rid")
    has_rid = type(rid) is str and _TOKEN.fullmatch(rid) is not None
    try:
        if read is None:
            raise _WrongError("there is no such request")
        return read(message)
    except _WrongError as error:
        return BadRequest(rid, str(error)) if has_rid and type(rid) is str else None


def _token(message: dict[Any, Any], name: str) -> str:
    found = message.get(name)
    if type(found) is not str or _TOKEN.fullmatch(found) is None:
        raise _WrongError(f"{name} must be up to 64 letters and digits")
    return found


def _number(found: object, name: str) -> int:
    if type(found) is not int or not 0 <= found <= _LARGEST:
        raise _WrongError(f"{name} must be a number from 0 on")
    return found


def _list(message: dict[Any, Any], name: str) -> list[Any]:
    found = message.get(name, [])
    if type(found) is not list or len(found) > _LONGEST_LIST:
        raise _WrongError(f"{name} must be a list of at most {_LONGEST_LIST}")
    return found


def _texts(message: dict[Any, Any], name: str) -> tuple[str, ...]:
    found = _list(message, name)
    if any(type(text) is not str or not 0 < len(text) <= _LONGEST_TEXT for text in found):
        raise _WrongError(f"{name} must be texts of at most {_LONGEST_TEXT} characters")
    return tuple(found)


def _hello(message: dict[Any, Any]) -> Hello:
    visible = message.get("visible")
    if type(visible) is not bool:
        raise _WrongError("visible must be true or false")
    client = _token(message, "client")
    if "boot" not in message:
        return Hello(client, visible)
    return Hello(client, visible, _token(message, "boot"), _number(message.get("heap"), "heap"))


def _plan(message: dict[Any, Any]) -> PlanRequest:
    action = message.get("action")
    if type(action) is not str or action not in _ACTIONS:
        raise _WrongError("there is no such action")
    ids = tuple(_number(each, "ids") for each in _list(message, "ids"))
    heap = message.get("heap")
    if heap is not None or ids:
        heap = _number(heap, "heap")
    rid = _token(message, "rid")
    return PlanRequest(rid=rid, action=action, heap=heap, ids=ids, names=_texts(message, "names"), keep=_texts(message, "keep"))  # type: ignore[arg-type]


_OPS: dict[str, Callable[[dict[Any, Any]], Message]] = {
    "hello": _hello,
    "bye": lambda message: Bye(_token(message, "client")),
    "refresh": lambda message: Refresh(_token(message, "rid")),
    "why": lambda message: Ask(_token(message, "rid"), _number(message.get("heap"), "heap"), _number(message.get("id"), "id")),
    "plan": _plan,
    "apply": lambda message: Apply(_token(message, "rid"), _token(message, "token")),
    "cancel": lambda message: Cancel(_token(message, "rid")),
}
