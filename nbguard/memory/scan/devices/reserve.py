"""The airbag's reserve as the scan sees it, host memory that PyTorch's allocator counts as the device's own.

Nothing of it is the device's. So figures of a device leave all of it out, and the part that tensors have is a figure by itself.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbguard.memory.core import advice
from nbguard.memory.core.facts import AirbagFact, PoolId, Segment
from nbguard.memory.scan.devices.host import host_facts
from nbguard.memory.scan.devices.segments import listed_segments, read_segments
from nbguard.units import MiB

_MOST_SMALL = 64 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """The reserve that is there."""

    pool: PoolId  # of the MemPool that PyTorch falls back to
    index: int  # of the CUDA device that it stands in for
    size: int  # bytes of host memory


_THERE: list[Reserve] = []
"""The one reserve of this process, if there is one."""


def note_reserve(reserve: Reserve | None) -> None:
    """Leave a reserve out of all figures from now on, or with None no reserve any more."""
    _THERE[:] = [] if reserve is None else [reserve]


def airbag_room(settings: str, fraction: float | None) -> int:
    """Return the bytes of host memory that an airbag for a CUDA device could take; 0 where there is one, or none can be.

    Args:
        settings: of the allocator, as PYTORCH_ALLOC_CONF writes them.
        fraction: of the device that PyTorch may reserve, or None if not known.
    """
    return 0 if _THERE or obstacle(settings, fraction, 0) else host_facts().room or 0


def obstacle(settings: str, fraction: float | None, index: int) -> str:
    """Return why the CUDA device `index` can have no airbag, or could keep no promise with one; empty where it can.

    `settings` and `fraction` as in `airbag_room`.
    """
    torch: Any = sys.modules["torch"]
    if has_own_spill():
        return "on Windows and WSL NVIDIA's driver moves memory to the host by itself, so an airbag adds nothing"
    if getattr(torch.version, "hip", None):
        return "an airbag stands in for a CUDA device of NVIDIA's, and PyTorch has none here"
    if not falls_back():
        return f"PyTorch {torch.__version__} cannot fall back to a pool (MemPool without use_on_oom): update it"
    if torch.cuda.get_allocator_backend() != "native":
        return "cudaMallocAsync has no pools to fall back to: only PyTorch's own allocator (backend:native) has"
    if (fraction or 1.0) < 1:
        whole = advice.allow_whole_device(f"cuda:{index}")
        return "with a memory fraction PyTorch would spill everything; lift it first: " + whole.command
    return obstacle_in(settings)


def obstacle_in(settings: str) -> str:
    """Return the setting of an allocator that keeps it from falling back; empty without one."""
    if "max_split_size_mb" in settings:
        return "max_split_size_mb keeps PyTorch from dividing a reserve: unset it and restart the kernel"
    return ""


def small_part(size: int) -> int:
    """Return the bytes of a reserve for requests of up to 1 MiB, which PyTorch serves from segments of their own.

    A quarter of it, and so much at most: each segment is one more to look at.
    """
    return min(size // 4, _MOST_SMALL) // (2 * MiB) * 2 * MiB


def device_peaks(size: int, reserved: int, peaks: tuple[int, int]) -> tuple[int, int]:
    """Return the most bytes that a device itself had in tensors, at least, and reserved at once.

    Args:
        size: of the reserve.
        reserved: bytes that the device has reserved now.
        peaks: the same figures of the allocator, which counts the reserve as the device's own.
    """
    most_reserved = max(reserved, peaks[1] - size)
    return min(peaks[0], most_reserved), most_reserved


def falls_back() -> bool:
    """Say whether this PyTorch can fall back to a pool."""
    pool = getattr(sys.modules["torch"].cuda, "MemPool", None)
    code = getattr(getattr(pool, "__init__", None), "__code__", None)
    return code is not None and "use_on_oom" in code.co_varnames


def has_own_spill() -> bool:
    """Say whether NVIDIA's driver itself moves memory that does not fit to the host, as on Windows and in its Linux."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def airbag_of(index: int, segments: Iterable[Segment] | None = None) -> AirbagFact | None:
    """Return the contents of the reserve of the CUDA device `index`; None where it has none.

    `segments` of the device are given where they have been read already. Costs 20 µs: neither waits nor opens a context.
    """
    if not _THERE or _THERE[0].index != index:
        return None
    reserve = _THERE[0]
    if segments is None:
        segments = read_segments(listed_segments(reserve.pool)).get(index, ())
    own = tuple(replace(each, pool=(0, 0)) for each in segments if each.pool == reserve.pool)
    live = tuple(block for each in own for block in each.blocks if block.state != "inactive")
    return AirbagFact(size=reserve.size, spilled=sum(block.size for block in live), segments=own)


def spilled_now() -> int:
    """Return the bytes of the reserve that lie in live blocks."""
    return sum(segment["allocated_size"] for segment in listed_segments(_THERE[0].pool)) if _THERE else 0


def without_reserve(segments: Mapping[int, tuple[Segment, ...]]) -> dict[int, tuple[Segment, ...]]:
    """Return the segments by device, without the reserve's."""
    if not _THERE:
        return dict(segments)
    pool = _THERE[0].pool
    return {index: tuple(each for each in own if each.pool != pool) for index, own in segments.items()}


def device_counters(index: int) -> dict[str, Any]:
    """Return the counters of one device's allocator, as torch nests them, without the reserve.

    The part of a peak that lay in the reserve is not counted, so no peak is above the most that the device itself had reserved.
    """
    torch: Any = sys.modules["torch"]
    stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(index)
    if not stats or not _THERE or _THERE[0].index != index:
        return stats
    listed, size = listed_segments(_THERE[0].pool), _THERE[0].size
    spilled = sum(segment["allocated_size"] for segment in listed)
    active = sum(segment["active_size"] for segment in listed)
    split = sum(segment["total_size"] - segment["active_size"] for segment in listed if segment["active_size"])
    taken = {"allocated_bytes": spilled, "active_bytes": active, "reserved_bytes": size, "inactive_split_bytes": split}
    for name, nbytes in taken.items():
        stats[name]["all"]["current"] -= nbytes
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    most, reserved["peak"] = device_peaks(size, reserved["current"], (allocated["peak"], reserved["peak"]))
    allocated["peak"] = max(allocated["current"], most)
    return stats
