"""The airbag's valve, through which spilled memory goes back to the device as soon as it may move and there is room.

PyTorch falls back before it gives its cache back, so spilled memory often has room a moment later. A moved storage is the same
one at another address. It stays where anything but PyTorch may know the address.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Collection
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.apply import apply
from nbguard.memory.cleanup.apply.parking import park_left
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.room.airbag import Airbag
from nbguard.memory.room.moving import Traveller, move_out_and_back
from nbguard.memory.scan.devices.cuda import nested_stats, segments_by_device
from nbguard.memory.scan.parked import movable, storage_of
from nbguard.memory.scan.scan import Notebook, scan

_BY_ADDRESS = frozenset({"cupy", "cupy_backends", "numba", "pycuda", "jax", "jaxlib", "tensorflow"})
"""Libraries whose arrays know a tensor's address, and keep the tensor alive by an ordinary reference."""
_PARKED_AS = "airbag"
"""Name of memory that lost its place and is parked in ordinary host memory: `%reset_gpu --unpark airbag`."""
_GRAPHS = "a CUDA graph may know the addresses"
_OTHERS = "something outside Python shares it"
_BUSY = "another thread computes"
_COMPUTING = ("torch", "fastai", "accelerate", "lightning", "transformers")
_WAITING = ("torch.utils.data", "torch._inductor")
"""Modules of PyTorch whose threads touch no tensor of a device."""


def relieve(on: Airbag, notebook: Notebook, *, with_stale: bool = True) -> tuple[int, int, str]:
    """Make room for spilled memory and move it to the device; garbage goes first, then stale objects, if that is wanted.

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
    return moved, freed, reason


def bring_back(on: Airbag, notebook: Notebook) -> tuple[int, str]:
    """Move the tensors in the airbag to the device, as far as there is room; return the bytes, and why some had to stay.

    Waits for the device first. Tensors that do not fit or cannot be moved stay where they are, with their bytes.
    """
    before, room = on.spilled, room_of(on)
    if not before or on.vain == (before, room) or on.smallest > room:
        return 0, ""
    if any(segment.is_private for segments in segments_by_device().values() for segment in segments):
        return 0, _GRAPHS
    if _computes_elsewhere():
        return 0, _BUSY
    found, has_others = _movable(on, notebook)
    clear = getattr(sys.modules["torch"]._C, "_cuda_clearCublasWorkspaces", None)
    if has_others and clear is not None:
        clear()  # slow where they lie; the next product of matrices makes new ones
    moving = {id(each): (each, tensors) for each, tensors in found if each.storage.nbytes() <= room}
    del found
    error = ""
    if moving:
        try:
            trip = move_out_and_back(
                sorted((each for each, _ in moving.values()), key=lambda each: -each.storage.nbytes()), lambda: True
            )
        except NbguardError as refused:  # the host has no room for the copies
            return before - on.spilled, str(refused)
        error = trip.error
        if trip.left:
            park_left(_PARKED_AS, on.device, [(moving[id(each)][1], each.host) for each in trip.left])
    left = on.spilled
    if left == before and not has_others:
        on.vain = before, room_of(on)
    return before - left, error or (_OTHERS if has_others and left else "")


def room_of(on: Airbag) -> int:
    """Return the bytes that the device has for tensors at most, free or in PyTorch's cache."""
    torch: Any = sys.modules["torch"]
    stats = list(nested_stats(torch))[on.index]
    cached = stats["reserved_bytes"]["all"]["current"] - stats["active_bytes"]["all"]["current"]
    return int(torch.cuda.mem_get_info(on.index)[0]) + int(cached)


def _movable(on: Airbag, notebook: Notebook) -> tuple[list[tuple[Traveller, list[Any]]], bool]:
    """Return the storages in the airbag that only Python's tensors have, with these, and whether anything else lies there."""
    scanned = scan(notebook, tensors=True)
    fact = next((device.airbag for device in scanned.facts.devices if device.device == on.device), None)
    streams = {
        block.address: segment.stream
        for segment in (() if fact is None else fact.segments)
        for block in segment.blocks
        if block.state == "active_allocated"
    }
    storages = scanned.facts.graph.storages
    found = []
    for number, tensors in movable(scanned.tracker).items():
        address = storages[number].address
        if storages[number].device != on.device or address not in streams or number in scanned.tracker.exported:
            continue
        storage = storage_of(tensors[0])
        if storage.resizable() and storage.data_ptr() == address and not _has_foreign_array(tensors):
            found.append((Traveller(storage=storage, stream=streams[address]), tensors))
    return found, len(found) < len(streams)


def _has_foreign_array(tensors: Collection[Any]) -> bool:
    """Say whether an array of another library keeps one of these alive, and so knows the address."""
    if not _BY_ADDRESS & sys.modules.keys():
        return False
    modules = (type(holder).__module__ for tensor in tensors for holder in gc.get_referrers(tensor))
    return any(type(module) is str and module.partition(".")[0] in _BY_ADDRESS for module in modules)


def _computes_elsewhere() -> bool:
    """Say whether another thread is inside of PyTorch or a library that trains, and may use the tensors that would move."""
    tops = sys._current_frames()
    tops.pop(threading.get_ident())  # a frame that knew itself would keep the tensors of its callers
    for top in tops.values():
        frame: types.FrameType | None = top
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if type(module) is str and module.startswith(_COMPUTING) and not module.startswith(_WAITING):
                return True
            frame = frame.f_back
    return False
