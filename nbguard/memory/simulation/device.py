"""The simulated device: the allocator's model behind a lock, fed with births and deaths of storages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator, Event
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.core.facts import AllocatorStats

_HANDED_OUT_NONE = 0


class SimulatedDevice:
    """One device of `capacity` bytes with PyTorch's allocator on it. `broken` says why it does not count any more.

    A death may be told at any moment, by Python's garbage collector also while the model works on a request: it waits in
    `_dead` then, until that is done.

    Args:
        capacity: bytes of the device.
        context: bytes of it that are not the allocator's.
        settings: of the allocator.
        fraction: of `capacity` that the allocator may take; None is no limit.
        version: of torch, as its rules differ.
        refuse: makes the error for a request that finds no room, from the model's own one.
        records: whether `model.events` keeps everything that happens.
    """

    def __init__(
        self,
        capacity: int,
        context: int,
        settings: AllocatorSettings,
        fraction: float | None,
        version: str,
        refuse: Callable[[SimulatedOutOfMemoryError, int], Exception],
        *,
        records: bool = False,
    ) -> None:
        self.capacity, self.context = capacity, context
        self.model = CachingAllocator(settings, capacity, fraction, version, SimulatedDriver(capacity, used=context))
        self.broken = ""
        self._refuse = refuse
        self._records = records
        self._dead: deque[int] = deque()
        self._lock = threading.Lock()

    def born(self, nbytes: int, op: Any, *, is_older: bool) -> int:  # noqa: ARG002 - the model asks not whence it comes
        """Return the address of a block for a storage; raise what `refuse` makes where there is no room."""
        if self.broken:
            return _HANDED_OUT_NONE
        self.settle()
        try:
            address: int | None = self._locked(lambda: self.model.malloc(nbytes))
            return address or _HANDED_OUT_NONE
        except SimulatedOutOfMemoryError as error:
            failed = error.with_traceback(None)
        finally:
            self.settle()
        raise self._refuse(failed, nbytes)

    def died(self, token: int) -> None:
        """Free the block of a storage."""
        if token:
            self._dead.append(token)
            self.settle()

    def empty_cache(self) -> None:
        """Give back to the device what the allocator has cached."""
        self.settle()
        self._locked(self.model.empty_cache)

    def settle(self) -> None:
        """Free what has died, unless somebody is at it already: then they will."""
        while self._dead and not self.broken and self._lock.acquire(blocking=False):
            try:
                self._guarded(self._bury)
            finally:
                self._lock.release()

    def counted(self) -> tuple[AllocatorStats, int] | None:
        """Return the counters, and the bytes free on the device, from any thread; None if it does not count any more."""
        with self._lock:
            model = self.model
            stats = AllocatorStats(
                allocated=model.allocated,
                reserved=model.reserved,
                peak_allocated=model.peak_allocated,
                peak_reserved=model.peak_reserved,
            )
            free = model.driver.free() or 0
        self.settle()  # what has died meanwhile was left to this thread
        return None if self.broken else (stats, free)

    def _bury(self) -> None:
        while self._dead:
            self.model.free(self._dead.popleft())

    def _locked(self, act: Callable[[], Any]) -> Any:
        with self._lock:
            return self._guarded(act)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        """Call the model. What stops it half-way leaves it in no state to go by: from then on it is left alone.

        A mistake of ours does not reach the user's code; an interrupt does.
        """
        try:
            return act()
        except SimulatedOutOfMemoryError:
            raise
        except BaseException as error:
            self.broken = f"{type(error).__name__} stopped the simulation in the middle of a request; its figures end there"
            if not isinstance(error, Exception):
                raise
            return None
        finally:
            if not self._records:
                self.model.events.clear()

    @property
    def events(self) -> list[Event]:
        """Return what has happened, oldest first; empty unless it is recorded."""
        self.settle()
        return self.model.events
