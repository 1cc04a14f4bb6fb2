"""Counters that cost microseconds to read, for a hook after every cell, without heap scan, no context, no synchronisation.

For devices whose allocator counts, its own figures. Nobody counts CPU tensors: there malloc says how many bytes the whole
process has in use, which tells whether a scan is worth it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from nbguard.memory.core.facts import Counted, Reading
from nbguard.memory.scan.devices.cuda import device_facts, nested_stats, tracked_device

_SLOW = 0.001
_OFTEN = 3
"""malloc goes through all its free pieces to answer. If that takes so many seconds so often in a row, the kernel is asked."""


class Counters:
    """Reads the counters of the tracked devices of this process."""

    def __init__(self) -> None:
        self._tracked = ""
        self._malloc = heap_reader()
        self._slow = 0

    def read(self) -> Reading | None:
        """Return the counters; None before PyTorch is imported, and on an accelerator that this process has not opened."""
        kind = self.kind()
        if not kind:
            return None
        if kind == "cpu":
            return self._read_heap()
        if kind == "cuda":
            torch: Any = sys.modules["torch"]
            return _cuda(torch) if torch.cuda.is_initialized() else None
        facts, _ = device_facts(kind, with_segments=False)
        counted = [(fact.device, fact.allocator) for fact in facts if fact.allocator is not None]
        readings = tuple(
            Counted(device=device, allocated=stats.allocated, reserved=stats.reserved, peak=stats.peak_allocated)
            for device, stats in counted
        )
        return Reading(readings) if readings else None

    def kind(self) -> str:
        """Return the kind of device whose memory is reported; empty before PyTorch is imported."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "cuda"):  # not imported, or only just begun to be
            return ""
        if not self._tracked:
            self._tracked = tracked_device()
        return self._tracked

    def _read_heap(self) -> Reading:
        if self._malloc is None or self._slow >= _OFTEN:
            return Reading((), _resident(), "resident")
        start = time.thread_time()  # not the time of a busy machine for something else
        in_use = self._malloc()
        self._slow = self._slow + 1 if time.thread_time() - start > _SLOW else 0
        return Reading((), in_use, "malloc")


def _cuda(torch: Any) -> Reading:
    """Return the counters of the devices that this process has used."""
    return Reading(counted_devices(nested_stats(torch)))


def counted_devices(nested: Iterable[Any]) -> tuple[Counted, ...]:
    """Return the counters of the devices that this process has used, from those of all devices as torch nests them."""
    devices = []
    for index, stats in enumerate(nested):
        allocated, reserved = (stats[name]["all"] for name in ("allocated_bytes", "reserved_bytes"))
        count = stats["allocation"]["all"]["allocated"]
        if count or reserved["current"]:
            devices.append(
                Counted(
                    device=f"cuda:{index}",
                    allocated=allocated["current"],
                    reserved=reserved["current"],
                    peak=allocated["peak"],
                    allocations=count,
                )
            )
    return tuple(devices)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


@functools.cache
def heap_reader() -> Callable[[], int] | None:
    """Return a function that tells the bytes in use by malloc, mapped ones too; None before glibc 2.33 and elsewhere."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):  # another libc, another system
        return None
    mallinfo.restype = _MallInfo

    def in_use() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return in_use


def _resident() -> int | None:
    """Return the bytes of the process that are in memory (pages never written to are not), or None if unknown."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)  # read in ticks: Python's own files take three times as long
        try:
            return int(os.read(statm, 200).split()[1]) * mmap.PAGESIZE
        finally:
            os.close(statm)
    except OSError:  # not Linux
        psutil: Any = sys.modules.get("psutil")  # ipykernel has imported it
        return None if psutil is None else int(psutil.Process().memory_info().rss)
