"""The airbag's valve: spilled memory goes back to the device as soon as it may move and there is room.

PyTorch falls back before it gives its cache back, so spilled memory often has room a moment later. A moved storage is the same
one at another address. It stays where anything but PyTorch may know the address.
"""

from __future__ import annotations

import gc
import sys

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.apply import apply
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.room.airbag import Airbag
from nbguard.memory.room.device import Traveller
from nbguard.memory.room.moving import move_out_and_back, park_without_place, travellers_in
from nbguard.memory.room.plan import obstacle, reasons_to_stay
from nbguard.memory.scan.scan import Notebook, Scan, scan

_PARKED_AS = "airbag"
"""Name of memory that lost its place and is parked in ordinary host memory: `%reset_gpu --unpark airbag`."""
_OTHERS = "something outside Python shares it"


def relieve(on: Airbag, notebook: Notebook, *, with_stale: bool = True) -> tuple[int, int, str]:
    """Make room for spilled memory and move it to the device; garbage goes first, then stale objects, if that is wanted.

    Where there is a budget, its idle models are parked last.

    Returns:
        The bytes that have moved, the stale bytes that were released, and why some had to stay, or an empty string.
    """
    gc.collect()
    moved, reason = bring_back(on, notebook)
    freed = 0
    if with_stale and on.spilled:
        scanned = scan(notebook)
        plan = plan_cleanup(scanned.facts, Request())
        if plan.promised:
            freed = apply(plan, notebook, scanned).outcome.realised
            more, reason = bring_back(on, notebook)
            moved += more
    more, why = bring_back_for_idle(on, notebook)
    return moved + more, freed, why or reason


def bring_back_for_idle(on: Airbag, notebook: Notebook) -> tuple[int, str]:
    """Park idle models of a budget that is on, and move the tensors in the airbag to their place, as `bring_back` does."""
    garages = sys.modules.get("nbguard.memory.room.garage")
    garage = None if garages is None else garages.garage_now()
    if garage is None or garage.device != on.device or not on.spilled:
        return 0, ""
    before, reason = on.spilled, ""

    def is_enough() -> bool:
        nonlocal reason
        reason = bring_back(on, notebook)[1]
        return not on.spilled

    if garage.give_way(is_enough):
        is_enough()
    return before - on.spilled, reason


def bring_back(on: Airbag, notebook: Notebook) -> tuple[int, str]:
    """Move the tensors in the airbag to the device, as far as there is room; return the bytes, and why some had to stay.

    Waits for the device first. Tensors that do not fit or cannot be moved stay where they are, with their bytes.
    """
    device = on.stands_for
    before, room = on.spilled, device.room()
    if not before or on.vain == (before, room) or on.smallest > room:
        return 0, ""
    scanned = device.look(notebook)
    if reason := obstacle(scanned.facts):
        return 0, reason
    found, has_others = _movable(on, scanned)
    if has_others:
        device.clear_workspaces()  # slow where they lie; the next product of matrices makes new ones
        room = device.room()
    moving = {id(each): (each, number) for number, each in found.values() if each.storage.nbytes() <= room}
    found.clear()
    error = ""
    if moving:
        try:
            largest_first = sorted((each for each, _ in moving.values()), key=lambda each: -each.storage.nbytes())
            trip = move_out_and_back(device, largest_first, lambda: True)
        except NbguardError as refused:  # the host has no room for the copies
            return before - on.spilled, str(refused)
        error = trip.error
        numbers = {key: number for key, (_, number) in moving.items()}
        park_without_place(trip, _PARKED_AS, device, numbers, scanned.tracker)
    left = on.spilled
    if left == before and not has_others:
        on.vain = before, device.room()
    return before - left, error or (_OTHERS if has_others and left else "")


def _movable(on: Airbag, scanned: Scan) -> tuple[dict[int, tuple[int, Traveller]], bool]:
    """Return the storages in the airbag that may move, as `travellers_in` does, and whether anything else lies there."""
    fact = next((device.airbag for device in scanned.facts.devices if device.device == on.device), None)
    segments = () if fact is None else fact.segments
    stay = reasons_to_stay(scanned.facts, dict(scanned.facts.fixed or ()))
    known = travellers_in(scanned, on.stands_for, segments)
    found = {address: way for address, way in known.items() if way[0] not in stay}
    live = sum(block.state == "active_allocated" for segment in segments for block in segment.blocks)
    return found, len(found) < live
