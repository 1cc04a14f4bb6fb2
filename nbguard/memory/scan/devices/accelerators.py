"""Accelerators other than CUDA's, as Intel's (xpu) and Apple's (mps), and the segments of PyTorch's allocators for any.

Each reading that this torch does not have for a device is a reason, never 0. None of it has been measured on such a device
yet: the tests give torch stand-in modules with the functions that torch 2.13 documents.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from nbguard.memory.core.facts import AllocatorStats, Block, DeviceFacts, NvmlFacts, ProcessFact, Segment, Unavailable
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.devices.nvml import place_on_bus
from nbguard.units import MiB

# --- AMD's driver (amdsmi) for torch's ROCm builds, with the same readings as NVML gives. Never run on such a device yet.
#
# amdsmi is imported here and nowhere else; it comes with ROCm, or as a wheel. Its functions have changed names, so each
# that is
# missing is a reason.


_WITHOUT = "other processes' memory is not known"


class AmdReader:
    """One session with the driver. Use as a context manager; `reason` says why there are no readings, if so."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._smi: Any = None

    def __enter__(self) -> AmdReader:
        try:
            import amdsmi

            amdsmi.amdsmi_init()
            self._smi = amdsmi
        except ImportError:
            self.reason = f"amdsmi is not installed: {_WITHOUT} (it comes with ROCm)"
        except Exception as error:  # noqa: BLE001 - whatever the library raises: there are no readings
            self.reason = f"AMD's driver does not answer ({error}): {_WITHOUT}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._smi is not None:
            try:
                self._smi.amdsmi_shut_down()
            except Exception:  # noqa: BLE001 - the session ends with the process at the latest
                return

    def device(self, properties: Any, index: int) -> NvmlFacts | None:  # noqa: ARG002 - its number says nothing here
        """Return the driver's readings for a device whose properties torch gives: it is known by its place on the bus."""
        if self._smi is None:
            return None
        try:
            handle = self._handle(properties)
            if handle is None:
                self.reason = f"AMD's driver knows no device at torch's address: {_WITHOUT}"
                return None
            usage = self._smi.amdsmi_get_gpu_vram_usage(handle)
            total, used = (int(usage[name]) * MiB for name in ("vram_total", "vram_used"))
            return NvmlFacts(total, used, self._processes(handle))
        except Exception as error:  # noqa: BLE001 - the API changes from version to version
            self.reason = f"AMD's driver refused a reading ({type(error).__name__}: {error}): {_WITHOUT}"
            return None

    def at(self, index: int) -> tuple[str, NvmlFacts] | None:  # noqa: ARG002 - nothing is said before torch has opened a device
        """Return None: before torch has opened a device its place on the bus is not known."""
        return None

    def _handle(self, properties: Any) -> Any | None:
        wanted = place_on_bus(properties)
        if wanted is None:
            return None
        handles = self._smi.amdsmi_get_processor_handles()
        return next((each for each in handles if self._smi.amdsmi_get_gpu_device_bdf(each).lower().startswith(wanted)), None)

    def _processes(self, handle: Any) -> tuple[ProcessFact, ...] | None:
        """Return the processes on the device; None where this amdsmi does not list them."""
        ask = getattr(self._smi, "amdsmi_get_gpu_process_list", None)
        if ask is None:
            self.reason = "this amdsmi does not list the processes on a device"
            return None
        facts = []
        for process in ask(handle):
            if type(process) is not dict or "pid" not in process:  # older versions give handles, which lead nowhere any more
                self.reason = "this amdsmi lists processes in a way that nbguard does not know"
                return None
            memory = process.get("memory_usage") or {}
            used = memory.get("vram_mem", process.get("mem"))
            facts.append(ProcessFact(int(process["pid"]), int(used) if type(used) is int else None))
        return tuple(facts)


# --- The segments of PyTorch's allocators, from the snapshots of any version and any accelerator.


def read_segments(listed: Iterable[Mapping[str, Any]]) -> dict[int, tuple[Segment, ...]]:
    """Return the segments of a snapshot by device."""
    by_device: dict[int, list[Segment]] = {}
    sites = Sites()
    for segment in listed:
        address = segment["address"]
        blocks = []
        for block in segment["blocks"]:
            address = block.get("address", address)
            site = sites.of(_stack(block)) if block["state"] == "active_allocated" else ""
            blocks.append(
                Block(
                    address=address,
                    size=block["size"],
                    state=block["state"],
                    requested=block.get("requested_size", 0),
                    site=site,
                )
            )
            address += block["size"]
        by_device.setdefault(segment["device"], []).append(
            Segment(
                address=segment["address"],
                total_size=segment["total_size"],
                is_small=segment["segment_type"] == "small",
                is_expandable=bool(segment.get("is_expandable")),
                blocks=tuple(blocks),
                stream=segment.get("stream", 0),
                pool=tuple(segment.get("segment_pool_id", (0, 0))),
            )
        )
    return {device: tuple(segments) for device, segments in by_device.items()}


def _stack(block: Any) -> Any:
    """Return the Python stack that allocated a block, the innermost frame first: empty unless history is recorded."""
    history = block.get("history") or [{}]  # torch 2.0 keeps it there
    return block.get("frames") or history[0].get("frames") or ()


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
