"""Requests of a cleanup by a sidebar's action, and the part of them that may run beside a cell."""

from __future__ import annotations

from nbguard.frontend.sidebar.protocol.state import ActionName
from nbguard.memory.cleanup.plan.plan import Plan, Request
from nbguard.memory.core.target import Target

_BUSY_SAFE = frozenset({"error", "out", "debugger", "collect"})
"""Steps that let go only of objects that no running code reaches or could meet."""
_ALWAYS_LATER = {
    "release": "the running cell may use it, so it is released when the cell ends",
    "park": "the running cell may use it, so it is parked when the cell ends",
    "unpark": "it is brought back when the cell ends",
    "stop_workers": "the running cell may need them, so they are ended when the cell ends",
}

_REST = "not while the cell runs, as it may use it; Clean stale does it when the cell ends"


def request_of(
    action: ActionName, targets: tuple[Target, ...] = (), keep: tuple[str, ...] = (), *, while_busy: bool = False
) -> Request:
    """Return the request of `action` to `plan_cleanup`; `keep` are the keys of rows to leave out.

    With `while_busy` only steps that may be done while a cell runs.

    Raises:
        ValueError: the action is none that lets references go.
    """
    match action:
        case "clean_stale":
            return Request(keep=keep, while_busy=while_busy)
        case "release":
            return Request(targets=targets, keep=keep)
        case "stop_workers":
            return Request(workers=True, only_workers=True, keep=keep)
    raise ValueError(f"{action} is no cleanup")


def rest_of(whole: Plan) -> tuple[tuple[str, str], ...]:
    """Return (step, why) of the steps of a plan to clean stale memory that are never done while a cell runs."""
    return tuple((action.undone, _REST) for action in whole.actions if action.kind not in _BUSY_SAFE)


def does_something(plan: Plan) -> bool:
    """Say whether a plan has any step but the garbage collection that ends each, or that has something to collect."""
    return any(action.kind != "collect" or action.nbytes for action in plan.actions)


def waits_for_cell(action: ActionName, plan: Plan | None = None) -> str:
    """Return why `action` waits until the cell that runs ends; empty if it can be done now.

    Of a plan to clean stale all waits, but for one that was made for it (`while_busy`): taken alone, its steps give back less.
    """
    if action in _ALWAYS_LATER:
        return _ALWAYS_LATER[action]
    if action == "empty_cache" or plan is None or plan.request.while_busy or not does_something(plan):
        return ""
    return "stale memory may still be used by the running cell, so it is cleaned when the cell ends"
