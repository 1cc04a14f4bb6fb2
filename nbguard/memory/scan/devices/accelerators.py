"""Accelerators other than CUDA's, as Intel's (xpu) and Apple's (mps).

Each reading that this torch does not have for a device is a reason, never 0. None of it has been measured on such a device
yet: the tests give torch stand-in modules with the functions that torch 2.13 documents.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from nbguard.memory.core.facts import AllocatorStats, DeviceFacts, Segment, Unavailable
from nbguard.memory.scan.devices.segments import read_segments

_Facts = tuple[tuple[DeviceFacts, ...], tuple[Unavailable, ...]]


def accelerator_facts(kind: str, *, with_segments: bool = True) -> _Facts:
    """Return facts on each device of a kind, and the readings that could not be made. Opens no device."""
    torch: Any = sys.modules["torch"]
    module: Any = getattr(torch, kind, None)
    if kind == "mps":
        return _apple(module)
    if not getattr(module, "is_initialized", lambda: False)():
        return (), (Unavailable(kind, f"{kind} is not initialised in this kernel yet, so it holds no memory there"),)
    generic = getattr(torch, "accelerator", None)
    segments = _segments(module) if with_segments else None
    devices = tuple(_device(kind, module, generic, index, segments) for index in range(module.device_count()))
    return devices, tuple(_missing(kind, devices))


def _apple(module: Any) -> _Facts:
    """Return the facts on an Apple GPU, whose memory is the machine's; its size is the most that Metal recommends."""
    total = _number(lambda: module.recommended_max_memory())
    reserved = int(module.driver_allocated_memory())
    device = DeviceFacts(
        device="mps:0",
        name="Apple GPU",
        total=total,
        free=None if total is None else max(0, total - reserved),
        allocator=AllocatorStats(allocated=int(module.current_allocated_memory()), reserved=reserved),
    )
    missing = [Unavailable("mps", "PyTorch does not report the blocks of an Apple GPU's memory, so fragmentation is not known")]
    if total is None:
        missing.append(
            Unavailable("mps", "this torch does not report how much memory Metal recommends, so the size is not known")
        )
    return (device,), tuple(missing)


def _device(kind: str, module: Any, generic: Any, index: int, segments: dict[int, tuple[Segment, ...]] | None) -> DeviceFacts:
    free, total = _free_and_total(module, generic, index)
    fraction = _real(lambda: module.get_per_process_memory_fraction(index))
    return DeviceFacts(
        device=f"{kind}:{index}",
        name=_name(kind, module, index),
        total=total,
        free=free,
        allocator=_allocator(module, generic, index),
        segments=None if segments is None else segments.get(index, ()),
        limit=None if total is None or fraction is None else int(fraction * total),
    )


def _allocator(module: Any, generic: Any, index: int) -> AllocatorStats | None:
    """Return the counters of the device's own module, or else those of `torch.accelerator`; None where neither counts."""
    for source in (module, generic):
        ask = getattr(source, "memory_stats", None)
        stats: Any = None
        if ask is not None:
            with contextlib.suppress(RuntimeError, NotImplementedError, AssertionError):
                stats = ask(index)
        if stats and "allocated_bytes.all.current" in stats:
            return AllocatorStats(
                allocated=stats["allocated_bytes.all.current"],
                reserved=stats.get("reserved_bytes.all.current", 0),
                peak_allocated=stats.get("allocated_bytes.all.peak"),
                peak_reserved=stats.get("reserved_bytes.all.peak"),
            )
    return None


def _free_and_total(module: Any, generic: Any, index: int) -> tuple[int | None, int | None]:
    """Return (free, total) bytes of a device that this process has opened; None where torch does not tell."""
    for source, name in ((module, "mem_get_info"), (generic, "get_memory_info")):
        ask = getattr(source, name, None)
        if ask is not None:
            with contextlib.suppress(RuntimeError, NotImplementedError, AssertionError):
                free, total = ask(index)
                return int(free), int(total)
    return None, _number(lambda: module.get_device_properties(index).total_memory)


def _segments(module: Any) -> dict[int, tuple[Segment, ...]] | None:
    """Return the allocator's segments by device; None where torch does not tell them."""
    ask = getattr(module, "memory_snapshot", None)
    if ask is not None:
        with contextlib.suppress(RuntimeError, NotImplementedError, AssertionError, KeyError, TypeError):
            listed = ask()
            return read_segments(listed if type(listed) is list else listed.get("segments", ()))
    return None


def _missing(kind: str, devices: tuple[DeviceFacts, ...]) -> list[Unavailable]:
    """Return the failed readings of some device, in words."""
    reasons = {
        f"this torch has no memory counters for {kind}": any(device.allocator is None for device in devices),
        f"this torch does not report the size of {kind} devices": any(device.total is None for device in devices),
        f"this torch does not report the blocks of {kind}, so fragmentation is not known": any(
            device.segments is None for device in devices
        ),
        f"no driver of {kind} is queried, so other processes' memory is not known": bool(devices),
    }
    return [Unavailable(kind, reason) for reason, is_missing in reasons.items() if is_missing]


def _name(kind: str, module: Any, index: int) -> str:
    with contextlib.suppress(Exception):
        return str(module.get_device_name(index))
    return kind


def _number(read: Callable[[], Any]) -> int | None:
    value = _real(read)
    return None if value is None else int(value)


def _real(read: Callable[[], Any]) -> float | None:
    """Return a reading; None where this torch does not have it, or the device does not answer."""
    try:
        value = read()
    except (AttributeError, RuntimeError, NotImplementedError, AssertionError, TypeError):
        return None
    return value if type(value) in (int, float) else None
