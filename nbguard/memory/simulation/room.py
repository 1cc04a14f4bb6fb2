"""Room on a simulated device: moves, a reserve and a budget act on the allocator's model, and no byte of the host moves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.parking import forget_parked
from nbguard.memory.core.facts import Facts, Segment
from nbguard.memory.core.simulated import DEVICE
from nbguard.memory.room.device import MovingDevice, SetAside, Traveller
from nbguard.memory.scan.parked import SimulatedMemory
from nbguard.memory.scan.scan import Notebook, Scan, scan
from nbguard.memory.scan.storage_events import StorageMode
from nbguard.memory.simulation.device import SimulatedDevice


class SimulatedRoom(MovingDevice):
    """A simulated device as one on which room is made.

    Args:
        device: the simulated device.
        mode: follows the storages on it.
        on_device: turns the facts of a scan of CPU tensors into facts about it.
        segments_of: returns the segments of a pool of the model.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        mode: StorageMode,
        on_device: Callable[[Facts], Facts],
        segments_of: Callable[[], tuple[Segment, ...]],
    ) -> None:
        super().__init__(DEVICE)
        self._device, self._mode, self._on_device, self._segments_of = device, mode, on_device, segments_of
        self.home: SimulatedMemory = _Home(mode)

    def look(self, notebook: Notebook) -> Scan:  # noqa: D102
        return self.seen_in(scan(notebook, tensors=True, tracked="cpu"), notebook)

    def seen_in(self, scanned: Scan, notebook: Notebook) -> Scan:  # noqa: D102
        if scanned.facts.tracked != "cpu":  # where there is a GPU, the others look at that
            return self.look(notebook)
        return Scan(facts=self._on_device(scanned.facts), tracker=scanned.tracker)

    def allocated(self) -> int:  # noqa: D102
        return self._device.stats().allocated

    def reserved(self) -> int:  # noqa: D102
        return self._device.stats().reserved

    def room(self) -> int:  # noqa: D102
        stats = self._device.stats()
        return self._device.free() + stats.reserved - stats.allocated

    def empty_cache(self) -> None:  # noqa: D102
        self._device.empty_cache()

    def key(self, storage: Any) -> tuple[str, int]:  # noqa: D102
        return self.name, self._mode.place(storage) or 0

    def place(self, storage: Any) -> int | None:  # noqa: D102
        return self._mode.place(storage)

    def prepare(self, travellers: Sequence[Traveller]) -> None:
        """Do nothing: the bytes stay where they are."""

    def copy(self, traveller: Traveller) -> None:
        """Do nothing, likewise."""

    def leave(self, traveller: Traveller) -> None:  # noqa: D102
        self.home.leaves(traveller.storage)

    def come_back(self, traveller: Traveller) -> None:  # noqa: D102
        self.home.comes_back(traveller.storage)

    def take(self, nbytes: int) -> Any:  # noqa: D102
        return _Block(self._device, nbytes)

    def refuse_reserve(self, size: int) -> None:  # noqa: D102
        del size
        if reason := self._device.obstacle_to_reserve:
            raise NbguardError(reason)

    def set_aside(self, size: int) -> SetAside:  # noqa: D102
        return _Reserve(self._device, size, self._segments_of)

    def end(self) -> None:
        """End the airbag and the budget of the device, and forget its parked models."""
        for name in ("spill_watch", "garage"):
            loaded = sys.modules.get(f"nbguard.memory.room.{name}")
            if loaded is not None:
                loaded.end_on(self)
        forget_parked(self.home)


class _Home:
    """The memory of a simulated device, for parking."""

    name = DEVICE

    def __init__(self, mode: StorageMode) -> None:
        self._mode = mode

    def leaves(self, storage: Any) -> None:
        """Free its block."""
        self._mode.forget(storage)

    def comes_back(self, storage: Any) -> None:
        """Give it a block again."""
        self._mode.follow(storage)


class _Block:
    """A block of the model that is free with this object."""

    def __init__(self, device: SimulatedDevice, nbytes: int) -> None:
        self._device = device
        self._address = device.born(nbytes, None, is_older=False)

    def __del__(self) -> None:
        self._device.died(self._address)


class _Reserve:
    """A pool of the model that it falls back to, over bytes that are not the device's."""

    def __init__(self, device: SimulatedDevice, size: int, segments_of: Callable[[], tuple[Segment, ...]]) -> None:
        self._device, self._segments_of = device, segments_of
        device.set_aside(size)

    def spilled(self) -> int:
        """Return the bytes that lie in it, from any thread."""
        return self._device.spilled()

    def segments(self) -> tuple[Segment, ...]:
        """Return its segments."""
        return self._segments_of()

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes that the model had in tensors and reserved at once, with those set aside."""
        return self._device.model.peak_allocated, self._device.model.peak_reserved

    def is_limited(self) -> bool:
        """Say that no fraction is set: on a simulated device it cannot be changed."""
        return False

    def end(self) -> None:
        """Give it back."""
        self._device.give_up_reserve()
