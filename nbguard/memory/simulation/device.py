"""The simulated device, the allocator's model behind a lock, fed with births and deaths of storages, and its history."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator, Event
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.core.facts import AllocatorStats
from nbguard.memory.scan.devices.reserve import device_peaks, obstacle_in, small_part
from nbguard.units import MiB

# --- The history of a simulated device, bounded, in the entries of a snapshot's `device_traces`.


Json = dict[str, Any]

_DEEPEST = 64
"""Frames of a stack that are kept, the innermost."""


class SimulatedHistory:
    """The last `entries` events of a simulated device's allocator, with the Python lines that allocated."""

    def __init__(self, entries: int) -> None:
        self._entries: deque[Json] = deque(maxlen=entries)
        self._lines: dict[tuple[str, int, str], Json] = {}  # each line is one dict, as in PyTorch's own snapshots
        self._at: dict[int, list[Json]] = {}  # stacks of the live blocks by address

    def note(self, events: Iterable[Event], frames: list[Json]) -> None:
        """Note the effect of a request; `frames` tell its origin."""
        now = time.time_ns() // 1000
        for action, address, nbytes, stream in events:
            entry = {"action": action, "addr": address, "size": nbytes, "stream": stream, "time_us": now}
            if action == "oom":
                entry["device_free"] = entry.pop("addr")
            if action == "alloc":
                self._at[address] = frames
            elif action == "free_completed":
                self._at.pop(address, None)
            self._entries.append(entry | {"frames": [] if action.startswith("free") else frames})

    def stack(self) -> list[Json]:
        """Return the lines that run now, the innermost first, without nbguard's own around the request."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("nbguard."):
            frame = frame.f_back
        frames: list[Json] = []
        while frame is not None and len(frames) < _DEEPEST:
            line = (frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
            named = {"filename": line[0], "line": line[1], "name": line[2]}
            frames.append(self._lines.setdefault(line, named))
            frame = frame.f_back
        return frames

    def stack_at(self, address: int) -> list[Json]:
        """Return the lines that allocated the block at an address; none where it is older than the history."""
        return self._at.get(address, [])

    def entries(self) -> list[Json]:
        """Return the entries, oldest first."""
        return list(self._entries)


_HANDED_OUT_NONE = 0
RESERVE = (0, 1)
"""Number of the pool that the model falls back to, as of a MemPool."""


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
        self.capacity: int = capacity
        self.context: int = context
        self._driver = SimulatedDriver(capacity, used=context)
        self.model: CachingAllocator = CachingAllocator(settings, capacity, fraction, version, self._driver)
        self.reserve: int = 0  # bytes that the model falls back to, which are not the device's
        self.broken: str = ""
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
        stats, free = self.stats(), self.free()
        return None if self.broken else (stats, free)

    def stats(self) -> AllocatorStats:
        """Return the counters without the reserve, from any thread."""
        with self._lock:
            model = self.model
            reserved = model.reserved - self.reserve
            allocated = model.allocated - self._spilled()
            peaks = device_peaks(self.reserve, reserved, (model.peak_allocated, model.peak_reserved))
            stats = AllocatorStats(
                allocated=allocated,
                reserved=reserved,
                peak_allocated=max(allocated, peaks[0]),
                peak_reserved=peaks[1],
            )
        self.settle()  # storages that died meanwhile were left to this thread
        return stats

    def free(self) -> int:
        """Return the bytes free on the device."""
        return self._driver.free() or 0

    # --- the reserve ------------------------------------------------------------------------------------------------------

    @property
    def obstacle_to_reserve(self) -> str:
        """Return why the model could not keep to a reserve; empty where it can."""
        if self.model.cap:
            return "with a memory fraction PyTorch would spill everything; simulate a device without"
        return obstacle_in(self.model.settings.conf())

    def set_aside(self, size: int) -> None:
        """Make a pool in the model that it falls back to, over `size` bytes that are not the device's."""

        def make() -> None:
            model, small = self.model, small_part(size)
            self._driver.capacity = (self._driver.capacity or 0) + size
            self.reserve, settings = size, model.settings
            model.apply(AllocatorSettings())  # a pool with an allocator of its own has segments of the usual kind
            model.create_pool(RESERVE, use_on_oom=True)
            made = [model.malloc(MiB, pool=RESERVE) for _ in range(small // MiB)]
            made.append(model.malloc(size - small, pool=RESERVE))
            for address in made:
                model.free(address)
            model.apply(settings)
            model.peak_allocated, model.peak_reserved = model.allocated, model.reserved

        self.settle()
        self._locked(make)

    def give_up_reserve(self) -> None:
        """Take the pool away again. Nothing may lie in it."""

        def end() -> None:
            model = self.model
            model.release_pool(RESERVE)
            model.empty_cache(RESERVE)
            model.peak_allocated, model.peak_reserved = model.allocated, model.reserved  # as when it was made
            self._driver.capacity = (self._driver.capacity or 0) - self.reserve
            self.reserve = 0

        self.settle()
        self._locked(end)

    def spilled(self) -> int:
        """Return the bytes that lie in the reserve, from any thread."""
        with self._lock:
            spilled = self._spilled()
        self.settle()
        return spilled

    def _spilled(self) -> int:
        owner = self.model.pools.get(RESERVE)
        sets = () if owner is None else (free for half in owner.halves for free in half.by_stream.values())
        return self.reserve - sum(block.size for free in sets for block in free.blocks)

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
