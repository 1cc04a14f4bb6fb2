"""Make room by moving tensors out and back, after a plan, and report the outcome."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbguard.errors import NbguardError, in_one_line
from nbguard.memory.cleanup.apply.apply import alone
from nbguard.memory.cleanup.apply.interrupts import Interrupts
from nbguard.memory.cleanup.apply.parking import park_left
from nbguard.memory.core import advice
from nbguard.memory.core.analysis import DeviceAnalysis
from nbguard.memory.core.facts import Segment
from nbguard.memory.room.device import CudaDevice, MovingDevice, Traveller, simulated_now
from nbguard.memory.room.plan import PARKED_AS, MadeRoom, plan_room
from nbguard.memory.scan.devices.cuda import tracked_device
from nbguard.memory.scan.heap.walk import WeakTracker
from nbguard.memory.scan.parked import movable, plain_torch
from nbguard.memory.scan.scan import Notebook, Scan, scan

# --- Moves storages out of a device for a moment and back as the same storages, with their views, versions and gradients
#
# A storage keeps its identity and changes its address alone, so whoever knows the storage notices nothing, and whoever knows
# the address must be known not to exist. Between the two moves nothing of the user's runs.


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Trip:
    """The outcome of a move out and back."""

    room: Any = None  # what `make` returned while all were away; None after a failure, or where a storage needed the place
    error: str = ""  # the reason, in a line; empty without one
    left: list[Traveller] = field(default_factory=list)  # those that the device has no place for: `host` has their bytes
    is_interrupted: bool = False  # Ctrl-C came. Before anything had left, nothing was done; later, all was done first


def travellers_in(scanned: Scan, device: MovingDevice, segments: Iterable[Segment]) -> dict[int, tuple[int, Traveller]]:
    """Return (number, traveller) of the storages that are the whole of a live block each and may move, by address."""
    torch: Any = sys.modules["torch"]
    blocks = {
        block.address: (block.requested, segment.stream)
        for segment in segments
        for block in segment.blocks
        if block.state == "active_allocated"
    }
    found = {}
    for number, fact in enumerate(scanned.facts.graph.storages):
        weak = scanned.tracker.storages[number]
        if fact.device != device.name or fact.address not in blocks or weak is None:
            continue
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        requested, stream = blocks[fact.address]
        if storage is not None and (device.place(storage), storage.nbytes()) == (fact.address, requested):
            found[fact.address] = number, Traveller(storage, stream)
    return found


@plain_torch()
def move_out_and_back(device: MovingDevice, travellers: Sequence[Traveller], make: Callable[[], Any]) -> Trip:
    """Copy storages to the host, free their memory, empty the cache, call `make`, and bring them back in the order given.

    The device is waited for first. Each storage comes back on the stream that it had. If `make` fails, or there is no room for
    its result and a storage, the result is given up and all come back without it. A storage without a place even then is
    `left`; it is empty, and its users must get other memory.

    Args:
        device: that they are on.
        travellers: storages with addresses that nothing but PyTorch knows.
        make: takes the memory that all this is for; it is called once.

    Raises:
        NbguardError: the host has no room for the copies; nothing was moved.
    """
    device.prepare(travellers)
    trip = Trip()
    with Interrupts() as interrupts:
        for traveller in travellers:
            if interrupts.happened:
                return Trip(is_interrupted=True)
            device.copy(traveller)
        try:
            _leave(device, travellers)
            trip.room = make()
            _return(device, travellers)
        except BaseException as error:  # noqa: BLE001 - no room, or whatever `make` raises: all must come back first
            trip.room, trip.error = None, in_one_line(error)
        if trip.error:
            trip.left = _return_without(device, travellers)
        for traveller in travellers:
            if traveller.is_back:
                traveller.host = None
        trip.is_interrupted = interrupts.happened
    return trip


def _leave(device: MovingDevice, travellers: Sequence[Traveller]) -> None:
    """Free the memory of storages, and give all that is free then back to the device."""
    for traveller in travellers:
        traveller.is_back = False
        device.leave(traveller)
    device.empty_cache()


def _return(device: MovingDevice, travellers: Sequence[Traveller]) -> None:
    """Give storages memory again, and their bytes."""
    for traveller in travellers:
        if not traveller.is_back:
            device.come_back(traveller)
            traveller.is_back = True


def _return_without(device: MovingDevice, travellers: Sequence[Traveller]) -> list[Traveller]:
    """Bring back the missing storages after the room was given up, at a second try after all left again; return the rest."""
    for leaves_again in (False, True):
        try:
            if leaves_again:
                _leave(device, travellers)
            else:
                device.empty_cache()
            _return(device, travellers)
        except BaseException:  # noqa: BLE001, S112 - the error of the first try is told; those that are missing are returned
            continue
        return []
    for traveller in travellers:  # as many as may be
        try:
            _return(device, [traveller])
        except BaseException:  # noqa: BLE001, S112
            continue
    return [traveller for traveller in travellers if not traveller.is_back]


def park_without_place(trip: Trip, label: str, device: MovingDevice, numbers: Mapping[int, int], tracker: WeakTracker) -> int:
    """Park the storages of a trip that the device has no place for any more, under a label; return their bytes.

    `numbers` has the tracker's number of each, by the id of its traveller.
    """
    if not trip.left:
        return 0
    tensors_of = movable(tracker)
    left = [(tensors_of[numbers[id(each)]], each.host) for each in trip.left]
    return park_left(label, device.name, left, device.home)


# --- make room


_OTHER_SIZE = "its storage is not the whole of its block"


def make_room_in(notebook: Notebook, nbytes: int, device: str | None, *, dry_run: bool) -> MadeRoom:
    """Make room as `nbguard.make_room` does, for a notebook that is at hand.

    Raises:
        NbguardError: there is no such CUDA device in use, another cleanup runs, this is not the main thread, or the host has no
            room for what would move; nothing was touched.
        NoTorchError: PyTorch is not imported yet.
    """
    if not dry_run and threading.current_thread() is not threading.main_thread():
        raise NbguardError("only the main thread makes room, between cells, as another one may use the tensors that move")
    moves, scanned = _device_and_scan(notebook, device)
    here = next(each for each in scanned.analysis.devices if each.name == moves.name)
    travellers = travellers_in(scanned, moves, here.facts.segments or ())
    fixed = dict(scanned.facts.fixed or ())
    fixed |= {n: _OTHER_SIZE for n, address in _storages(scanned, here).items() if n not in fixed and address not in travellers}
    plan = plan_room(here, nbytes, fixed, stream=moves.stream)
    if dry_run or plan.state != "planned":
        return plan
    with Interrupts(), alone():
        return _carried_out(plan, moves, scanned.tracker, travellers)


def _device_and_scan(notebook: Notebook, device: str | None) -> tuple[MovingDevice, Scan]:
    """Return the device that is meant, and a scan of its tensors; NbguardError where there is no such in use."""
    simulated = simulated_now()
    if simulated is not None:
        if device not in (None, "0", simulated.name):
            raise NbguardError(f"no device {device} in use here; there is: {simulated.name}")
        return simulated, simulated.look(notebook)
    tracked = tracked_device() if "torch" in sys.modules else "cuda"
    if tracked != "cuda":
        raise NbguardError(f"room is made on CUDA devices, and here the tensors of {tracked} are tracked")
    scanned = scan(notebook, tensors=True, tracked=tracked)
    return CudaDevice(_index(scanned, device)), scanned


def _index(scanned: Scan, device: str | None) -> int:
    """Return the number of a device as it is written, `1` or `cuda:1`; the current one if none is."""
    torch: Any = sys.modules["torch"]
    used = [each.device for each in scanned.facts.devices if each.has_context and each.segments is not None]
    if not used or not torch.cuda.is_initialized():
        raise NbguardError(
            "no CUDA device is in use here, so all of its memory is free (" + advice.REPORT.command + " shows it)"
        )
    name = f"cuda:{torch.cuda.current_device()}" if device is None else device if ":" in device else f"cuda:{device}"
    if name not in used:
        raise NbguardError(f"no device {name} in use here; there is: {', '.join(used)}")
    return int(name.partition(":")[2])


def _storages(scanned: Scan, here: DeviceAnalysis) -> dict[int, int]:
    """Return the addresses of a device's storages, by number."""
    return {n: storage.address for n, storage in enumerate(scanned.facts.graph.storages) if storage.device == here.name}


def _carried_out(
    plan: MadeRoom, device: MovingDevice, tracker: WeakTracker, known: dict[int, tuple[int, Traveller]]
) -> MadeRoom:
    numbers = {id(known[address][1]): known[address][0] for address in plan.order}
    moving = [known[address][1] for address in plan.order]
    known.clear()
    reserved, start = device.reserved(), time.perf_counter()
    trip = move_out_and_back(device, moving, lambda: device.take(plan.request))
    is_made = trip.room is not None
    trip.room = None  # from now on it is PyTorch's cache that has the room
    parked = park_without_place(trip, PARKED_AS, device, numbers, tracker)
    outcome = replace(
        plan,
        state="made" if is_made else "failed",
        reason=trip.error,
        reserved=(reserved, device.reserved()),
        seconds=None if device.home is not None else time.perf_counter() - start,
        parked=parked,
    )
    return replace(plan, state="interrupted") if trip.is_interrupted and not is_made and not trip.error else outcome
