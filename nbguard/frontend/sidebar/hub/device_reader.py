"""Readings for a tick, several times a second from a thread: the allocator's counters, now and then the driver.

Opens no device, waits for none, and asks for no blocks: a tick takes well under a millisecond.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from nbguard.memory.core.facts import AllocatorStats, DeviceFacts, NvmlFacts, ProcessFact, TickReading
from nbguard.memory.scan.devices.counters import Counters, counted_devices
from nbguard.memory.scan.devices.cuda import allocator_settings, device_facts, is_opened, nested_stats, tracked_device
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.devices.processes import identified

_DRIVER_EVERY = 1.0
"""Seconds between two readings of the driver, which may take milliseconds each."""
_HEAP_SHARE = 0.0003
"""Of the processor's time that readings of malloc may take: it goes through all its free pieces, and others wait meanwhile."""
_HOST = (DeviceFacts(device="cpu", name="host memory"),)


class DeviceReader:
    """Reads the counters of this process. Holds a session with the driver from the first reading to `close`."""

    def __init__(self) -> None:
        self._tracked = ""
        self._heap = _Heap()
        self._driver = _Driver()

    def read(self) -> TickReading:
        """Return the counters now; `tracked` is empty before PyTorch is imported."""
        torch: Any = sys.modules.get("torch")
        if torch is None or getattr(torch.__spec__, "_initializing", False):  # not imported, or only just begun to be
            return TickReading()
        if not self._tracked:
            self._tracked = tracked_device()
        if self._tracked == "cpu":
            process, source = self._heap.read()
            return TickReading(tracked="cpu", devices=_HOST, pid=os.getpid(), process=process, source=source)
        if self._tracked != "cuda":
            devices, _ = device_facts(self._tracked, with_segments=False)
            return TickReading(tracked=self._tracked, devices=devices, pid=os.getpid())
        if not torch.cuda.is_initialized():
            return TickReading(tracked="cuda", devices=self._driver.unused(), pid=os.getpid())
        nested = list(nested_stats(torch))
        devices = tuple(self._driver.device(torch, index, _stats(each)) for index, each in enumerate(nested))
        return TickReading(tracked="cuda", devices=devices, pid=os.getpid(), counted=counted_devices(nested))

    def close(self) -> None:
        """End the session with the driver."""
        self._driver.close()


def _stats(stats: Any) -> AllocatorStats:
    """Return the counters of one device's allocator, from those that torch nests."""
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
    allocated, reserved, active, split = (stats[name]["all"] for name in names)
    return AllocatorStats(
        allocated=allocated["current"],
        reserved=reserved["current"],
        peak_allocated=allocated["peak"],
        peak_reserved=reserved["peak"],
        active=active["current"],
        inactive_split=split["current"],
    )


class _Heap:
    """The latest reading of malloc. The longer a reading takes, the more rarely it is made; in between it stays the same."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._said: tuple[int | None, str] = (None, "")
        self._next = 0.0

    def read(self) -> tuple[int | None, str]:
        """Return the bytes that this process has in use, and who says so."""
        if time.monotonic() >= self._next:
            start = time.thread_time()
            counted = self._counters.read()
            self._next = time.monotonic() + (time.thread_time() - start) / _HEAP_SHARE
            self._said = (None, "") if counted is None else (counted.heap, counted.source)
        return self._said


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """One reading of a device, from torch and the driver. Sizes are bytes."""

    at: float  # time.monotonic() of the reading
    name: str  # torch's name of the device
    total: int  # size of the device
    opened: bool  # this process has a context there
    used: int | None  # in use by all processes; None if unknown
    reserved: int  # that torch had of it at that moment
    nvml: NvmlFacts | None  # the driver's figures; None where NVML is missing
    settings: str  # of the allocator, as PYTORCH_ALLOC_CONF writes them


class _Driver:
    """The driver's latest reading of each device, made at most once a second.

    In between this process's own bytes are kept up by its counters: other memory is as it was.
    """

    def __init__(self) -> None:
        self._session: NvmlReader | None = None
        self._said: dict[int, _Reading] = {}
        self._unused: tuple[float, tuple[DeviceFacts, ...]] | None = None

    def device(self, torch: Any, index: int, stats: AllocatorStats) -> DeviceFacts:
        """Return torch's device `index`, whose allocator counts `stats`."""
        driver = self._said.get(index)
        if driver is None or time.monotonic() - driver.at >= _DRIVER_EVERY or (stats.reserved and not driver.opened):
            driver = self._said[index] = self._listen(torch, index, stats.reserved)
        free = None if driver.used is None else max(0, driver.total - driver.used - stats.reserved + driver.reserved)
        nvml = None if driver.nvml is None else _kept_up(driver.nvml, stats.reserved - driver.reserved)
        return DeviceFacts(
            device=f"cuda:{index}",
            name=driver.name,
            total=driver.total,
            free=free,
            allocator=stats,
            segments=None,
            nvml=nvml,
            settings=driver.settings,
            has_context=driver.opened,
        )

    def _listen(self, torch: Any, index: int, reserved: int) -> _Reading:
        properties = torch.cuda.get_device_properties(index)
        total, opened = int(properties.total_memory), is_opened(torch, index, reserved)
        nvml = identified(self._ask().device(properties, index))
        used = None if nvml is None else min(nvml.used, total)
        if opened:  # elsewhere the question itself would open one
            with contextlib.suppress(RuntimeError):  # after an error that lasts: the driver's own reading remains
                used = total - int(torch.cuda.mem_get_info(index)[0])
        return _Reading(
            at=time.monotonic(),
            name=str(properties.name),
            total=total,
            opened=opened,
            used=used,
            reserved=reserved,
            nvml=nvml,
            settings=allocator_settings(),
        )

    def unused(self) -> tuple[DeviceFacts, ...]:
        """Return the driver's figures on the devices before torch has used any."""
        if self._unused is None or time.monotonic() - self._unused[0] >= _DRIVER_EVERY:
            self._ask()  # the session that keeps the driver awake between readings
            self._unused = (time.monotonic(), device_facts("cuda")[0])
        return self._unused[1]

    def close(self) -> None:
        if self._session is not None:
            self._session.__exit__(None, None, None)
            self._session = None

    def _ask(self) -> NvmlReader:
        if self._session is None:
            self._session = NvmlReader().__enter__()
        return self._session


def _kept_up(nvml: NvmlFacts, grown: int) -> NvmlFacts:
    """Return a reading of the driver as it would be now that this process has reserved `grown` bytes more."""
    if not grown:
        return nvml
    known = nvml.processes
    alone = known is not None and len(known) == 1  # in a container it has another pid
    processes = (
        None if known is None else tuple(_grown(each, grown) if alone or each.pid == os.getpid() else each for each in known)
    )
    return replace(nvml, used=nvml.used + grown, processes=processes)


def _grown(process: ProcessFact, nbytes: int) -> ProcessFact:
    return process if process.used is None else replace(process, used=process.used + nbytes)
