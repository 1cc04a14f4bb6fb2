"""Ends DataLoader workers as torch itself does."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.kept_by_torch import FreedBytes
from nbguard.memory.cleanup.plan.plan import Action
from nbguard.memory.core import advice
from nbguard.memory.core.processes import Process, pids_text
from nbguard.memory.scan.devices.processes import is_alive, is_listed, private_bytes, shared_bytes
from nbguard.memory.scan.heap.kinds import attributes_of
from nbguard.memory.scan.heap.walk import WeakTracker
from nbguard.memory.scan.workers import worker_processes
from nbguard.texts import form, here

_PATIENCE = 3.0
"""Seconds that a process gets to end after each stronger word."""


def end_workers(action: Action, tracker: WeakTracker, freed: FreedBytes) -> None:
    """End the workers that a plan found; the bytes of host memory that came back are added to `freed`.

    The loaders that keep the iterator forget it first, so that their next epoch starts new workers whatever happens here.

    Raises:
        NbguardError: the iterator is in use by now, or a process is still there.
    """
    before = {process: (private_bytes(process.pid) or 0) + (shared_bytes(process.pid) or 0) for process in action.processes}
    _shut_down(action, tracker)
    left = [process for process in action.processes if is_listed(process)]
    if left and (left := _insist(left)):
        raise NbguardError(f"{pids_text([process.pid for process in left])} still there after SIGKILL: {_state(left)}")
    freed.host += sum(before.values())


def _shut_down(action: Action, tracker: WeakTracker) -> None:
    """Let torch shut the iterator down; its remaining batches are lost, and a further `next()` says why."""
    iterator = _object(tracker, action.refs[0]) if action.refs else None
    if iterator is None:  # a step before this one has freed it, or it was gone before
        return
    loaders = [loader for ref in action.refs[1:] if (loader := _object(tracker, ref)) is not None]
    former = [_detach(loader, iterator) for loader in loaders]
    progress = (str(iterator._num_yielded),)
    if progress != action.names or not set(worker_processes(iterator)) <= set(action.processes):
        for loader, kept in zip(loaders, former, strict=True):
            _attach(loader, kept)
        raise NbguardError("it went on since the plan was made, so it is in use")
    if iterator._rcvd_idx < iterator._send_idx:
        iterator._next_data = _ended
    iterator._shutdown_workers()


def _object(tracker: WeakTracker, ref: int) -> Any:
    known = tracker.objects.get(ref)
    return None if known is None else known()


def _detach(loader: Any, iterator: Any) -> Any:
    """Make a loader forget the iterator that it keeps for its next epoch; return it, or None if it keeps another by now."""
    attributes = attributes_of(loader)
    if attributes is None or attributes.get("_iterator") is not iterator:
        return None
    attributes["_iterator"] = None
    return iterator


def _attach(loader: Any, iterator: Any) -> None:
    attributes = attributes_of(loader)
    if iterator is not None and attributes is not None and attributes.get("_iterator") is None:
        attributes["_iterator"] = iterator


def _ended() -> NoReturn:
    raise RuntimeError(
        "the workers of this DataLoader iterator were ended by "
        + form(advice.end_workers().command, here())
        + ": start over with iter(loader)"
    )


def _insist(processes: Iterable[Process]) -> list[Process]:
    """End own children by pid and start, with SIGTERM and then SIGKILL; return those that are still there."""
    left = list(processes)
    for word in ("terminate", "kill"):
        for child in multiprocessing.active_children():
            if any(process.pid == child.pid and is_alive(process) for process in left):
                getattr(child, word)()
        until = time.monotonic() + _PATIENCE
        while left and time.monotonic() < until:
            time.sleep(0.02)
            multiprocessing.active_children()  # asks after those that ended, so that their entries go
            left = [process for process in left if is_listed(process)]
    return left


def _state(processes: Iterable[Process]) -> str:
    alive = [process for process in processes if is_alive(process)]
    return "the system does not end them" if alive else "they ended, and only their entries are left"
