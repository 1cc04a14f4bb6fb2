"""torch's view of the accelerator: counters, segments, free memory, settings. Never initialises a device to look at it.

CUDA (and ROCm, which torch calls cuda) in full; other accelerators (xpu, mps) through `torch.accelerator` as far as they
have counters. Without an accelerator, CPU tensors are tracked.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nbguard.memory.facts import AllocatorStats, Block, DeviceFacts, PinnedFacts, Segment, Unavailable
from nbguard.scan.devices.allocation_sites import Sites
from nbguard.scan.devices.nvml import NvmlReader

_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def tracked_device() -> str:
    """Return the kind of device whose memory is reported: the accelerator torch would use, else `cpu`.

    Asking whether there is one creates no context. torch counts the devices by the driver's library where it can: CUDA's own
    count (`is_available`) would make CUDA unusable in every process forked later, such as `notebook_launcher`'s.
    """
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized() or torch.cuda.device_count() > 0:
        return "cuda"
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return str(accelerator.current_accelerator().type)
    return "cpu"


def device_facts(tracked: str) -> tuple[tuple[DeviceFacts, ...], tuple[Unavailable, ...]]:
    """Return facts on each device of the kind `tracked`, and the readings that could not be made."""
    if tracked == "cpu":
        return (DeviceFacts(device="cpu", name="host memory"),), ()
    if tracked != "cuda":
        return _other_accelerator(tracked)
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return _unused(torch), (Unavailable("cuda", "CUDA is not initialised in this kernel yet: it holds no GPU memory"),)
    with NvmlReader() as nvml:
        segments = segments_by_device()
        facts = tuple(_cuda_device(torch, index, nvml, segments) for index in range(torch.cuda.device_count()))
        missing = () if nvml.reason is None else (Unavailable("nvml", nvml.reason),)
    if broken := lasting_error():
        reason = f"CUDA answers every call with an error ({broken}): only a restart of the kernel helps"
        return facts, (*missing, Unavailable("cuda", reason))
    return facts, missing


def allocations(tracked: str) -> int:
    """Return how often the allocator has been called so far: two equal readings mean that nothing has changed between them."""
    torch: Any = sys.modules["torch"]
    if tracked != "cuda" or not torch.cuda.is_initialized():
        return 0
    return sum(stats["allocation"]["all"][way] for stats in nested_stats(torch) for way in ("allocated", "freed"))


def nested_stats(torch: Any) -> Iterator[dict[str, Any]]:
    """Yield the counters of each device's allocator, as torch nests them.

    Flattened by `memory_stats` they cost eight times as much.
    """
    yield from map(torch.cuda.memory_stats_as_nested_dict, range(torch.cuda.device_count()))


def lasting_error() -> str:
    """Return the error that CUDA answers every call with (a device-side assert, say), or an empty string.

    Asks for the free memory of the devices in use: that neither waits nor opens one.
    """
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return ""
    try:
        for index in range(torch.cuda.device_count()):
            if is_opened(torch, index, 0):
                torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


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
    has_context = is_opened(torch, index, allocator.reserved)
    total = int(properties.total_memory)
    free = None if driver is None else total - min(driver.used, total)
    if has_context:  # elsewhere the question itself would open one
        with contextlib.suppress(RuntimeError):  # after an error that lasts: the driver's own reading remains
            free, total = torch.cuda.mem_get_info(index)
    return DeviceFacts(
        device=f"cuda:{index}",
        name=str(properties.name),
        total=total,
        free=free,
        allocator=allocator,
        segments=segments.get(index, ()),
        nvml=driver,
        settings=allocator_settings(),
        workspace=_workspace(torch, properties) if has_context else None,
        has_context=has_context,
        limit=_limit(index, int(properties.total_memory)) if has_context else None,
    )


def _unused(torch: Any) -> tuple[DeviceFacts, ...]:
    """Return the driver's figures of the devices that torch would use, before it has used any; empty where it tells none."""
    facts = []
    with NvmlReader() as nvml:
        for index in range(torch.cuda.device_count()):
            try:
                readings = nvml.at(torch.cuda._get_nvml_device_index(index))
            except Exception:  # noqa: BLE001 - a torch without this, settings that name no device: then there is nothing to tell
                readings = None
            if readings is not None:
                name, driver = readings
                free = driver.total - min(driver.used, driver.total)
                facts.append(
                    DeviceFacts(
                        device=f"cuda:{index}", name=name, total=driver.total, free=free, nvml=driver, has_context=False
                    )
                )
    return tuple(facts)


def allocator_settings() -> str:
    """Return the settings of PyTorch's allocator as the environment gives them; empty without any."""
    return next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")


def memory_fraction(index: int) -> float | None:
    """Return the share of a device that torch may reserve; None where this torch does not tell."""
    ask = getattr(sys.modules["torch"]._C, "_cuda_getMemoryFraction", None)
    return None if ask is None else float(ask(index))


def _limit(index: int, total: int) -> int | None:
    fraction = memory_fraction(index)
    return None if fraction is None else int(fraction * total)


def is_opened(torch: Any, index: int, reserved: int) -> bool:
    """Say whether this process has opened the device: torch can be initialised without having used any."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(ask(index)) if ask is not None else reserved > 0


def _workspace(torch: Any, properties: Any) -> int | None:
    """Return the bytes of a workspace that torch keeps for cuBLAS: as it says, or by the rule it goes by.

    CUBLAS_WORKSPACE_CONFIG lists `:KiB:count`; without it, 32 MiB on Hopper and 8.125 MiB elsewhere (torch's
    `getChosenWorkspaceSize`).
    """
    ask = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    if ask is not None:
        try:
            return int(ask())
        except RuntimeError:  # after an error that lasts
            return None
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(kib) * int(count) for kib, count in sizes) * 1024
    return 32 * 1024**2 if properties.major == 9 else (2 * 4096 + 8 * 16) * 1024


def segments_by_device() -> dict[int, tuple[Segment, ...]]:
    """Return the allocator's segments by device, without the trace (which can take most of a second to copy)."""
    torch: Any = sys.modules["torch"]
    try:
        snapshot = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # this torch has no such option: its call gives segments only
        snapshot = torch.cuda.memory_snapshot()
    return read_segments(snapshot if type(snapshot) is list else snapshot.get("segments", ()))


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


def _other_accelerator(kind: str) -> tuple[tuple[DeviceFacts, ...], tuple[Unavailable, ...]]:
    torch: Any = sys.modules["torch"]
    module: Any = getattr(torch, kind, None)
    if kind == "mps":
        allocated, reserved = int(module.current_allocated_memory()), int(module.driver_allocated_memory())
        return (
            DeviceFacts(
                device="mps:0",
                name="Apple GPU",
                total=None,
                free=None,
                allocator=AllocatorStats(allocated=allocated, reserved=reserved),
            ),
        ), ()
    if not getattr(module, "is_initialized", lambda: False)():
        return (), (Unavailable(kind, f"{kind} is not initialised in this kernel yet: it holds no memory there"),)
    facts = []
    for index in range(module.device_count()):
        stats = module.memory_stats(index) if hasattr(module, "memory_stats") else {}
        allocator = AllocatorStats(
            allocated=stats.get("allocated_bytes.all.current", 0), reserved=stats.get("reserved_bytes.all.current", 0)
        )
        facts.append(
            DeviceFacts(device=f"{kind}:{index}", name=kind, total=None, free=None, allocator=allocator if stats else None)
        )
    missing = (
        () if all(fact.allocator for fact in facts) else (Unavailable(kind, f"this torch has no memory counters for {kind}"),)
    )
    return tuple(facts), missing
