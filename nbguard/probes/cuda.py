"""torch's view of the accelerator: counters, segments, free memory, settings. Never initialises a device to look at it.

CUDA (and ROCm, which torch calls cuda) in full; other accelerators (xpu, mps) through `torch.accelerator` as far as they
have counters. Without an accelerator, CPU tensors are tracked.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from nbguard.core.facts import AllocatorStats, Block, DeviceFacts, PinnedFacts, Segment, Unavailable
from nbguard.probes.nvml import NvmlReader

_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def tracked_device() -> str:
    """Return the kind of device whose memory is reported: the accelerator torch would use, else `cpu`.

    Asking whether there is one creates no context: torch counts devices, it does not open them.
    """
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized() or torch.cuda.is_available():
        return "cuda"
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return str(accelerator.current_accelerator().type)
    return "cpu"


def device_facts(tracked: str) -> tuple[tuple[DeviceFacts, ...], tuple[Unavailable, ...]]:
    """Return facts on each device of the kind `tracked`, and what could not be read."""
    if tracked == "cpu":
        return (DeviceFacts("cpu", "host memory"),), ()
    if tracked != "cuda":
        return _other_accelerator(tracked)
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return (), (Unavailable("cuda", "CUDA is not initialised in this kernel yet: it holds no GPU memory"),)
    with NvmlReader() as nvml:
        segments = _segments(torch)
        facts = tuple(_cuda_device(torch, index, nvml, segments) for index in range(torch.cuda.device_count()))
        missing = () if nvml.reason is None else (Unavailable("nvml", nvml.reason),)
    return facts, missing


def is_autocast_on(tracked: str) -> bool:
    """Say whether mixed precision is in force here, outside of any fit: a fit that failed in a batch leaves it on."""
    torch: Any = sys.modules["torch"]
    try:
        return bool(torch.is_autocast_enabled(tracked))
    except RuntimeError:  # this kind of device has none
        return False


def pinned_facts() -> PinnedFacts | None:
    """Return the page-locked host memory of torch's pinned allocator; None if there is none, or torch does not count it."""
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized() or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    stats = torch.cuda.host_memory_stats()
    reserved = int(stats.get("allocated_bytes.current", 0))
    return PinnedFacts(int(stats.get("active_bytes.current", 0)), reserved) if reserved else None


def _cuda_device(torch: Any, index: int, nvml: NvmlReader, segments: dict[int, tuple[Segment, ...]]) -> DeviceFacts:
    stats = torch.cuda.memory_stats(index)
    allocator = AllocatorStats(
        allocated=stats.get("allocated_bytes.all.current", 0),
        reserved=stats.get("reserved_bytes.all.current", 0),
        peak_allocated=stats.get("allocated_bytes.all.peak", 0),
        peak_reserved=stats.get("reserved_bytes.all.peak", 0),
    )
    properties = torch.cuda.get_device_properties(index)
    driver = nvml.device(properties, index)
    has_context = _has_context(torch, index, allocator.reserved)
    total = int(properties.total_memory)
    free = None if driver is None else total - min(driver.used, total)
    if has_context:  # elsewhere the question itself would open one
        free, total = torch.cuda.mem_get_info(index)
    return DeviceFacts(
        f"cuda:{index}",
        str(properties.name),
        total,
        free,
        allocator,
        segments.get(index, ()),
        driver,
        next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), ""),
        _workspace(torch, properties) if has_context else None,
        has_context,
    )


def _has_context(torch: Any, index: int, reserved: int) -> bool:
    """Say whether this process has opened the device: torch can be initialised without having used any."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(ask(index)) if ask is not None else reserved > 0


def _workspace(torch: Any, properties: Any) -> int:
    """Return the bytes of a workspace that torch keeps for cuBLAS: as it says, or by the rule it goes by.

    CUBLAS_WORKSPACE_CONFIG lists `:KiB:count`; without it, 32 MiB on Hopper and 8.125 MiB elsewhere (torch's
    `getChosenWorkspaceSize`).
    """
    ask = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    if ask is not None:
        return int(ask())
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(kib) * int(count) for kib, count in sizes) * 1024
    return 32 * 1024**2 if properties.major == 9 else (2 * 4096 + 8 * 16) * 1024


def _segments(torch: Any) -> dict[int, tuple[Segment, ...]]:
    """Return the allocator's segments by device, without the trace (which can take most of a second to copy)."""
    try:
        found = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # this torch has no such option: its call gives segments only
        found = torch.cuda.memory_snapshot()
    by_device: dict[int, list[Segment]] = {}
    for segment in found if type(found) is list else found.get("segments", ()):
        address = segment["address"]
        blocks = []
        for block in segment["blocks"]:
            address = block.get("address", address)
            blocks.append(Block(address, block["size"], block["state"], block.get("requested_size", 0)))
            address += block["size"]
        by_device.setdefault(segment["device"], []).append(
            Segment(
                segment["address"],
                segment["total_size"],
                segment["segment_type"] == "small",
                bool(segment.get("is_expandable")),
                tuple(blocks),
                segment.get("stream", 0),
                tuple(segment.get("segment_pool_id", (0, 0))),
            )
        )
    return {device: tuple(segments) for device, segments in by_device.items()}


def _other_accelerator(kind: str) -> tuple[tuple[DeviceFacts, ...], tuple[Unavailable, ...]]:
    torch: Any = sys.modules["torch"]
    module: Any = getattr(torch, kind, None)
    if kind == "mps":
        allocated, reserved = int(module.current_allocated_memory()), int(module.driver_allocated_memory())
        return (DeviceFacts("mps:0", "Apple GPU", None, None, AllocatorStats(allocated, reserved)),), ()
    if not getattr(module, "is_initialized", lambda: False)():
        return (), (Unavailable(kind, f"{kind} is not initialised in this kernel yet: it holds no memory there"),)
    facts = []
    for index in range(module.device_count()):
        stats = module.memory_stats(index) if hasattr(module, "memory_stats") else {}
        allocator = AllocatorStats(stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0))
        facts.append(DeviceFacts(f"{kind}:{index}", kind, None, None, allocator if stats else None))
    missing = (
        () if all(fact.allocator for fact in facts) else (Unavailable(kind, f"this torch has no memory counters for {kind}"),)
    )
    return tuple(facts), missing
