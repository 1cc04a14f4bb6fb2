"""Make room by moving tensors out and back, after a plan, and report the outcome."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.apply import alone
from nbguard.memory.cleanup.apply.interrupts import Interrupts
from nbguard.memory.core import advice
from nbguard.memory.core.analysis import DeviceAnalysis
from nbguard.memory.room.device import CudaDevice, MovingDevice, Traveller, simulated_now
from nbguard.memory.room.moving import move_out_and_back, park_without_place, travellers_in
from nbguard.memory.room.plan import PARKED_AS, MadeRoom, plan_room
from nbguard.memory.scan.devices.cuda import tracked_device
from nbguard.memory.scan.heap.walk import WeakTracker
from nbguard.memory.scan.scan import Notebook, Scan, scan

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
