"""Ends DataLoader workers as torch itself does, and gives back memory that torch and its libraries keep."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.plan.plan import Action
from nbguard.memory.core import advice
from nbguard.memory.core.facts import PoolId
from nbguard.memory.core.processes import Process, pids_text
from nbguard.memory.core.segments.requests import with_free_segments
from nbguard.memory.scan.devices.cuda import segments_by_device
from nbguard.memory.scan.devices.kept_memory import pinned_facts
from nbguard.memory.scan.devices.processes import is_alive, is_listed, private_bytes, shared_bytes
from nbguard.memory.scan.heap.kinds import attributes_of
from nbguard.memory.scan.heap.walk import WeakTracker
from nbguard.memory.scan.workers import remember_left_pools, worker_processes
from nbguard.texts import form, here

# --- Gives back memory that torch and its libraries keep: the allocator's cache, workspaces, pinned host memory.


@dataclass
class FreedBytes:
    """Bytes that steps of a cleanup gave back beside the storages that its plan counts, added up step by step."""

    device: int = 0  # workspaces of libraries, by the allocator's counter
    host: int = 0  # memory of ended workers and unused pinned memory


def empty_cache() -> None:
    """Give the allocator's free segments back to the device, on whichever accelerator is in use."""
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif getattr(torch, "accelerator", None) is not None and torch.accelerator.is_available():
        module: Any = getattr(torch, str(torch.accelerator.current_accelerator().type), None)
        if hasattr(module, "empty_cache"):
            module.empty_cache()


def note_left_pools(unkept: Collection[PoolId]) -> None:
    """Remember which of the private pools `unkept` have free segments though the cache has just been emptied.

    Nothing known keeps these pools, and they give nothing back: a capture that failed left them in use for good.
    """
    segments = chain.from_iterable(segments_by_device().values()) if unkept else ()
    remember_left_pools(with_free_segments(segments, unkept))


def clear_workspaces(freed: FreedBytes) -> None:
    """Clear the workspaces that torch keeps for cuBLAS, which makes them again; their bytes are added to `freed`."""
    torch: Any = sys.modules["torch"]
    if not hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        raise NbguardError("this torch has no way to clear them")
    before = _allocated(torch)
    torch._C._cuda_clearCublasWorkspaces()
    freed.device += before - _allocated(torch)


def _allocated(torch: Any) -> int:
    return sum(int(torch.cuda.memory_allocated(index)) for index in range(torch.cuda.device_count()))


def return_pinned_memory(freed: FreedBytes) -> None:
    """Give the pinned host memory that nothing uses back to the system; their bytes are added to `freed`."""
    torch: Any = sys.modules["torch"]
    before = pinned_facts()
    if before is None:
        return
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()
    elif hasattr(torch._C, "_accelerator_emptyHostCache"):
        torch._C._accelerator_emptyHostCache()
    else:
        raise NbguardError("this torch has no way to give it back (torch 2.5 has one)")
    after = pinned_facts()
    freed.host += before.reserved - (0 if after is None else after.reserved)


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
