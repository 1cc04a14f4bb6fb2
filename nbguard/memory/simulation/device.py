"""The simulated device, which is the allocator's model behind a lock, fed with births and deaths of storages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator, Event
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.core.facts import AllocatorStats
from nbguard.memory.simulation.history import SimulatedHistory

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
        self.history: SimulatedHistory | None = None  # None if it is not recorded
        self._noted = 0  # events that the history has, or that came before it
        self._refuse = refuse
        self._records = records
        self._dead: deque[int] = deque()
        self._lock = threading.Lock()

    def born(self, nbytes: int, op: Any, *, is_older: bool) -> int:  # noqa: ARG002 - the model asks not whence it comes
        """Return the address of a block for a storage; raise the error of `refuse` where there is no room."""
        if self.broken:
            return _HANDED_OUT_NONE
        self.settle()
        try:
            frames = [] if self.history is None else self.history.stack()
            address: int | None = self._locked(lambda: self.model.malloc(nbytes), frames)
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
        """Give the allocator's cached memory back to the device."""
        self.settle()
        self._locked(self.model.empty_cache)

    def settle(self) -> None:
        """Free the dead storages, unless another caller is at it already and will."""
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
        self.settle()  # storages that died meanwhile were left to this thread
        return None if self.broken else (stats, free)

    def snapshot(self) -> dict[str, Any]:
        """Return segments, settings, and the history where it is kept, in the form of `torch.cuda.memory._snapshot()`."""
        with self._lock:
            history, segments = self.history, self.model.segments()
            for segment in segments:
                segment["frames"] = []
                for block in segment["blocks"]:
                    block["frames"] = [] if history is None else history.stack_at(block["address"])
            return {
                "segments": segments,
                "device_traces": [[] if history is None else history.entries()],
                "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.model.settings.conf()},
            }

    def _bury(self) -> None:
        while self._dead:
            self.model.free(self._dead.popleft())

    def keep_history(self, history: SimulatedHistory | None) -> None:
        """Record events from now on; None ends it."""
        self.settle()
        with self._lock:
            self.history, self._noted = history, len(self.model.events)

    def _locked(self, act: Callable[[], Any], frames: Sequence[Any] = ()) -> Any:
        with self._lock:
            return self._guarded(act, frames)

    def _guarded(self, act: Callable[[], Any], frames: Sequence[Any] = ()) -> Any:
        """Call the model. An error half-way leaves it in an unknown state: from then on it is left alone.

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
            events = self.model.events
            if self.history is not None:
                self.history.note(events[self._noted :], [*frames])
            if not self._records:
                events.clear()
            self._noted = len(events)

    @property
    def events(self) -> list[Event]:
        """Return the events, oldest first; empty unless they are recorded."""
        self.settle()
        return self.model.events
