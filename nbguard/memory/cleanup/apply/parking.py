"""Moves tensors to host memory in place, and back, while every name stays valid, every view stays a view.

A tensor's data is exchanged, its storage is never resized: whoever uses a parked tensor gets ordinary host values, or an
ordinary error about devices, never memory that is gone. One storage at a time: all tensors on it move, or none.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError, TargetError, in_one_line
from nbguard.memory.cleanup.apply.guards import let_go, stop_calls
from nbguard.memory.cleanup.plan.parking import Unparked
from nbguard.memory.core import advice
from nbguard.memory.scan.devices.host import host_facts
from nbguard.memory.scan.devices.reserve import device_counters
from nbguard.memory.scan.heap.walk import WeakTracker, weak_storage
from nbguard.memory.scan.parked import (
    PARKED,
    Parked,
    SimulatedMemory,
    movable,
    parked_facts,
    parked_storages,
    plain_torch,
    sharing,
    storage_of,
)
from nbguard.spelling import did_you_mean
from nbguard.units import format_bytes

_LEFT_FOR_OTHERS = 0.02
"""Share of the host's memory that a parking leaves free."""
_SHARED = "something outside Python shares it"
_STOPPED = "interrupted: tensors moved by then stay moved"


@plain_torch()
def park(
    label: str,
    numbers: Iterable[int],
    tracker: WeakTracker,
    is_stopped: Callable[[], bool],
    wake: Callable[[str], None] | None = None,
    home: SimulatedMemory | None = None,
) -> str:
    """Move the storages with these numbers to the host; return why some were left, or an empty string.

    `is_stopped` is asked between storages: storages moved by then are parked. `wake(label)` is to bring them back when they are
    used; without it their use is an error. `home` is the simulated memory that they are in; they stay where they are then.
    """
    wait_for_device()
    tensors_of, moved, failure = movable(tracker), dict[str, Parked](), ""
    numbers = list(numbers)
    moving = [tensors_of[number][0] for number in numbers if number in tensors_of]
    refuse_without_host_memory(sum(storage_of(tensor).nbytes() for tensor in moving if tensor.device.type != "cpu"))
    for number in numbers:
        if is_stopped():
            failure = _STOPPED
            break
        tensors = tensors_of.pop(number, None)
        if tensors is None:
            failure = "some of its tensors are gone"
            continue
        device = str(tensors[0].device) if home is None else home.name
        failed = _leave(tensors, device, home)
        failure = failed or failure
        if not failed:
            parked = moved.setdefault(device, Parked(label=label, device=device, wake=wake, home=home))
            parked.tensors += map(weakref.ref, tensors)
            parked.storages.append(weak_storage(storage_of(tensors[0])))
    modules = [module for ref in tracker.objects.values() if (module := ref()) is not None]
    for parked in moved.values():
        stop_calls(parked, modules)
        PARKED.append(parked)
    return failure


@plain_torch()
def unpark(labels: Sequence[str], is_stopped: Callable[[], bool], *, whole: bool = False) -> Unparked:
    """Bring back the tensors parked under `labels`, or all. With `whole`, all of a label or nothing of it.

    Raises:
        TargetError: nothing is parked under one of the labels.
        NbguardError: the device has no room for it; nothing was moved. Or, with `whole`, something of a label cannot be moved.
    """
    chosen = _chosen(labels)
    _refuse_without_room(chosen)
    gc.unfreeze()  # frozen objects would not be found among the tensors that share a storage
    nbytes, left, back = 0, dict[str, tuple[int, str]](), set[int]()
    for parked in chosen:
        here = set[int]()
        storages = parked_storages(parked)
        moved: list[Sequence[Any]] = []
        for address, on_it in (dict.fromkeys(storages, ()) | sharing(storages)).items():
            size = storages[address]
            failure = _STOPPED if is_stopped() else _come_back(on_it, parked) if on_it else _SHARED
            if failure and whole and on_it:
                for tensors in moved:
                    _leave(tensors, parked.device, parked.home)
                    parked.storages.append(weak_storage(storage_of(tensors[0])))
                raise NbguardError(failure)
            if failure:
                left[parked.label] = left.get(parked.label, (0, ""))[0] + size, failure
            else:
                nbytes += size
                moved.append(on_it)
                back.update(map(id, on_it))
                here.add(address)
        parked.tensors = [ref for ref in parked.tensors if id(ref()) not in back]
        if parked.home is not None:  # its storages are the same as before
            parked.storages = [weak for weak in parked.storages if _address(weak) not in here]
        _forget_if_empty(parked)
    names, devices = (tuple(dict.fromkeys(column)) for column in zip(*((p.label, p.device) for p in chosen), strict=True))
    return Unparked(
        names=names,
        nbytes=nbytes,
        tensors=len(back),
        devices=tuple(sorted(devices)),
        left=tuple((name, *why) for name, why in left.items()),
    )


@plain_torch()
def park_left(label: str, device: str, left: Sequence[tuple[Sequence[Any], Any]], home: SimulatedMemory | None = None) -> int:
    """Park tensors whose device has no place for them: let each of `left`, (its tensors, a storage of the host), use that one.

    A tensor of a simulated device uses it already. Return the bytes that are parked under `label`.
    """
    parked = Parked(label=label, device=device, home=home)
    for tensors, storage in left:
        if home is None:
            _point(tensors, storage)
        parked.tensors += map(weakref.ref, tensors)
        parked.storages.append(weak_storage(storage))
    PARKED.append(parked)
    return sum(parked_storages(parked).values())


def _chosen(labels: Sequence[str]) -> list[Parked]:
    for parked in tuple(PARKED):
        _forget_if_empty(parked)  # the user has let go of it
    known = dict.fromkeys(fact.label for fact in parked_facts())
    for label in labels:
        if label not in known:
            there = did_you_mean(label, known) or f"parked now: {', '.join(known)}"
            raise TargetError(f"nothing is parked as {label}" + (f"; {there}" if known else ""))
    if not known:
        raise TargetError("nothing is parked (" + advice.PARK_PLACEHOLDER.command + " parks)")
    return [parked for parked in PARKED if parked.label in (labels or known)]


def _refuse_without_room(chosen: Sequence[Parked]) -> None:
    """Refuse, before anything is moved, an unparking that would run out of memory on the way."""
    torch: Any = sys.modules["torch"]
    wanted: dict[str, int] = {}
    for parked in chosen:
        wanted[parked.device] = wanted.get(parked.device, 0) + sum(parked_storages(parked).values())
    for device, nbytes in wanted.items():
        if not device.startswith("cuda"):
            continue
        stats = device_counters(torch.device(device).index or 0)
        cached = stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]
        room = torch.cuda.mem_get_info(device)[0] + cached
        if nbytes > room:
            raise NbguardError(
                f"{format_bytes(nbytes)} would not fit: {device} has room for {format_bytes(room)} at most. "
                f"Free something first (" + advice.REPORT.command + " shows what holds it); nothing was moved"
            )


def refuse_without_host_memory(nbytes: int) -> None:
    """Refuse a move too large for the host, where Linux would end a process, before anything is moved.

    Raises:
        NbguardError: the host has no room for the bytes.
    """
    host = host_facts()
    room = min((room for room in (host.available, host.group_room, host.address_room) if room is not None), default=None)
    if room is not None and nbytes > room - _LEFT_FOR_OTHERS * (host.total or 0):
        fits = f"host memory has room for {format_bytes(room)}"
        raise NbguardError(f"{fits}, too little for the {format_bytes(nbytes)} that would move")


def wait_for_device() -> None:
    """Wait until the device has no work left: it may use memory that is going to move."""
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):
                torch.cuda.synchronize(index)


def _leave(tensors: Sequence[Any], device: str, home: SimulatedMemory | None) -> str:
    """Move the storage that `tensors` share off their device; return why that failed: then all is as before."""
    if home is None:
        return _exchange(tensors, _in_a_file if device == "cpu" else _on_host)
    home.leaves(storage_of(tensors[0]))
    return ""


def _come_back(tensors: Sequence[Any], parked: Parked) -> str:
    """Move the storage that parked tensors share to their device; return why that failed: then all is as before."""
    if parked.home is None:
        return _exchange(tensors, functools.partial(_on_device, parked.device))
    try:
        parked.home.comes_back(storage_of(tensors[0]))
    except RuntimeError as error:  # its error of memory that ran out
        return in_one_line(error)
    return ""


def _exchange(tensors: Sequence[Any], make: Callable[[int], Any]) -> str:
    """Move the storage that `tensors` share into one that `make` makes; return why that failed: then all is as before."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        old = storage_of(tensors[0])
        weak = weak_storage(old)
        try:
            new = make(old.nbytes())
            _as_bytes(new).copy_(_as_bytes(old))
            _point(tensors, new)
        except Exception as error:  # noqa: BLE001 - no room on the device, on the disk, in host memory: the reason is the answer
            _point(tensors, old)
            return in_one_line(error)
        del old
        if not weak.expired():
            gc.collect()  # garbage may refer to it, as a cycle that torch.save leaves does in PyTorch 2.8
        if weak.expired():
            return ""
        still_there = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        if still_there is None:
            return ""
        _point(tensors, still_there)
        return _SHARED


def _point(tensors: Sequence[Any], storage: Any) -> None:
    """Make each tensor show the same part of `storage` that it showed of its own, in the same shape and order."""
    torch: Any = sys.modules["torch"]
    put = torch._C.TensorBase.__dict__["data"].__set__
    for tensor in tensors:
        empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        put(tensor, empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride()))


def _as_bytes(storage: Any) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_host(nbytes: int) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.UntypedStorage(nbytes, device="cpu")


def _on_device(device: str, nbytes: int) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.UntypedStorage(nbytes, device=device)


def _in_a_file(nbytes: int) -> Any:
    """Return a storage whose bytes lie in a file that has no name any more: it goes with the storage.

    The disk's room is taken at once: a full disk is an error here, not a crash at the first write.
    """
    torch: Any = sys.modules["torch"]
    with tempfile.NamedTemporaryFile(prefix="nbguard-parked-") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            file.truncate(nbytes)
        handle = Path(f"/proc/self/fd/{file.fileno()}")  # another user may have put another file in the place of the name
        return torch.UntypedStorage.from_file(str(handle) if handle.exists() else file.name, shared=True, nbytes=nbytes)


def forget_parked(home: SimulatedMemory) -> None:
    """Forget the parked tensors of simulated memory that is gone; they were never moved."""
    for parked in [each for each in PARKED if each.home is home]:
        PARKED.remove(parked)
        let_go(parked)


def _address(weak: Any) -> int | None:
    storage = sys.modules["torch"].UntypedStorage._new_with_weak_ptr(weak.cdata)
    return None if storage is None else storage.data_ptr()


def _forget_if_empty(parked: Parked) -> None:
    if not parked_storages(parked):
        PARKED.remove(parked)
        let_go(parked)
