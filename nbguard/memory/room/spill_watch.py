"""The airbag's switch, and the watch that sees how much lies in it while code runs."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
import time
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.apply import apply
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core import advice
from nbguard.memory.room.airbag import Airbag, airbag_now, deflate, forget, inflate
from nbguard.memory.room.device import RoomDevice, Traveller
from nbguard.memory.room.make_room import move_out_and_back, park_without_place, travellers_in
from nbguard.memory.room.plan import obstacle, reasons_to_stay
from nbguard.memory.room.spill import AirbagState, names_of_spilled
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.scan import Notebook, Scan, scan
from nbguard.units import MiB, parse_bytes

# --- The airbag's valve: spilled memory goes back to the device as soon as it may move and there is room
#
# PyTorch falls back before it gives its cache back, so spilled memory often has room a moment later. A moved storage is the
# same one at another address. It stays where anything but PyTorch may know the address.


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


# --- spill watch


_EVERY = 16
"""Steps of optimizers between two readings of a reserve that was empty."""
_REST = 50
"""After a move inside of a fit, times as long as it took, before the next, unless there is twice the room."""
_LEAST_ROOM = 20 * MiB
_LONGEST = 60
"""Characters of a line of code."""
_SECONDS = 0.1
"""Between two looks of the thread."""


def switch(size: int | str | None, notebook: Notebook) -> AirbagState:
    """Turn the airbag on with `size` bytes, or off; return its state afterwards, or, with None, as it is.

    Raises:
        NbguardError: `size` is no size, or it cannot be done here; nothing was changed.
        NoTorchError: PyTorch is not imported yet.
    """
    if size == "off":
        on = airbag_now()
        if on is not None:
            gc.collect()
            bring_back(on, notebook)
            deflate()
            end_watch()
    elif size is not None:
        try:
            nbytes = parse_bytes(size) if isinstance(size, str) else size
        except ValueError:
            raise NbguardError(f"{size!r} is neither a size nor off: write  " + advice.airbag().command) from None
        end_watch()
        on = inflate(nbytes)
        _WATCH.append(SpillWatch(on))
        _WATCH[0].start()
    return state(notebook)


def state(notebook: Notebook) -> AirbagState:
    """Return the state of the airbag; where something lies in it, by a scan of the notebook's names."""
    on = airbag_now()
    if on is None:
        return AirbagState(device="")
    spilled = on.spilled
    names = names_of_spilled(on.stands_for.look(notebook).facts) if spilled else ()
    return AirbagState(device=on.device, size=on.size, spilled=spilled, most=on.most, holders=names, is_limited=on.is_limited)


def end_on(device: RoomDevice) -> None:
    """End the airbag of a device that is gone."""
    on = airbag_now()
    if on is not None and on.stands_for is device:
        end_watch()
        forget(device)


_WATCH: list[SpillWatch] = []


def watch_now() -> SpillWatch | None:
    """Return the watch of the airbag that is on, if any."""
    return _WATCH[0] if _WATCH else None


def end_watch() -> None:
    """Look no more."""
    while _WATCH:
        _WATCH.pop().end()


class SpillWatch:
    """Sees how much lies in the airbag while cells run, and opens the valve after an optimizer's step.

    Attributes:
        first: bytes that lay in it at `begin`.
        most: bytes that were seen in it at once since `begin`.
        line: the user's line that ran when it was first seen, or an empty string.
        moved: bytes that were brought back since.
        stepped: whether an optimizer has made a step since.
    """

    def __init__(self, on: Airbag) -> None:
        self._on = on
        self._rests_until = 0.0
        self._room = 0  # on the device after the last move
        self._ended = threading.Event()
        self._steps = 0
        self._hook: Any = None
        self._owner = threading.get_ident()
        self._seen = 0
        self.begin()

    def begin(self) -> None:
        """Forget the bytes that were seen, at the start of a cell."""
        self.first = self._seen = self._on.spilled
        self._peak = self._on.peak
        self.most = self.moved = 0
        self.line = ""
        self._has_collected = self.stepped = False

    def start(self) -> None:
        """Look ten times a second, and after every few steps of any optimizer."""
        threading.Thread(target=self._run, name="nbguard-airbag", daemon=True).start()
        self._hook = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(self._after_step)

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._hook is not None:
            self._hook.remove()

    def look(self) -> int:
        """Return the bytes that lie in the airbag now, and note them."""
        self._seen = self._on.spilled
        if self._seen > self.first and not self.line:
            self.line = _line_of(self._owner)
        if self._seen > self.first:
            self.most = max(self.most, self._seen)
        return self._seen

    def total(self) -> int:
        """Return the bytes in it at once since `begin`, at least, as seen or by the allocator's peak; 0 without new ones."""
        self.look()
        peak = self._on.peak
        return max(self.most, self._on.spilled_at_least if peak > self._peak else 0)

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            if airbag_now() is not self._on:
                return
            self.look()

    def _after_step(self, *_: object) -> None:
        self._steps += 1
        self.stepped = True
        if (not self._seen and self._steps % _EVERY != 1) or threading.get_ident() != self._owner:
            return
        try:
            begun = time.monotonic()
            if self.look() and (begun >= self._rests_until or self._on.stands_for.room() > 2 * self._room):
                if not self._has_collected:
                    gc.collect()
                    self._has_collected = True
                notebook = Notebook.current(None)
                self.moved += bring_back(self._on, notebook)[0] + bring_back_for_idle(self._on, notebook)[0]
                self._seen = self._on.spilled
                self._room = max(self._on.stands_for.room(), _LEAST_ROOM)
                self._rests_until = time.monotonic() + _REST * (time.monotonic() - begun)
        except Exception:  # noqa: BLE001 - the user's fit goes on, with what is spilled where it is
            self.end()


def _line_of(thread: int) -> str:
    """Return the innermost line of the notebook's or script's own that a thread runs, or an empty string."""
    frame = Sites().users_frame(sys._current_frames().get(thread))
    line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
