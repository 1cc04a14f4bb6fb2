"""Moves storages out of a device for a moment and back as the same storages, with their views, versions and gradients.

A storage keeps its identity and changes its address alone, so whoever knows the storage notices nothing, and whoever knows
the address must be known not to exist. Between the two moves nothing of the user's runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbguard.errors import in_one_line
from nbguard.memory.cleanup.apply.parking import park_left
from nbguard.memory.cleanup.apply.released_names import Interrupts
from nbguard.memory.core.facts import Segment
from nbguard.memory.room.device import MovingDevice, Traveller
from nbguard.memory.scan.heap.walk import WeakTracker
from nbguard.memory.scan.parked import movable, plain_torch
from nbguard.memory.scan.scan import Scan


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Trip:
    """The outcome of a move out and back."""

    room: Any = None  # what `make` returned while all were away; None: it failed, or was given up for a storage to come back
    error: str = ""  # the reason for that, in a line; empty: none
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
