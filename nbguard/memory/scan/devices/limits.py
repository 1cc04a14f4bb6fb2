"""Limits of a device's memory that lie below its size, set by CUDA's Multi-Process Service or the control group.

NVIDIA's service reads CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, e.g. `0=1G,1=512M`; Linux from 6.14 on has the controller `dmem`, whose
files have a line for each region of memory, e.g. `drm/0000:03:00.0/vram0 8514437120`. Neither has been seen on a GPU yet.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from nbguard.memory.core.facts import Unavailable
from nbguard.units import format_bytes

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_PINNED = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def service_limit(index: int, uuid: str = "") -> int | None:
    """Return the bytes that CUDA's Multi-Process Service leaves this process on a device; None without such a limit."""
    for entry in os.environ.get(_PINNED, "").split(","):
        device, _, size = entry.strip().partition("=")
        match = re.fullmatch(r"(\d+)([KMGT]?)B?", size.strip().upper())
        if match is not None and device.strip() in (str(index), f"GPU-{uuid}" if uuid else ""):
            return int(match[1]) * _UNITS[match[2]]
    return None


def group_limits(root: Path = Path("/")) -> dict[str, int]:
    """Return the bytes that control groups leave this process of each region of device memory; empty without limits."""
    limits: dict[str, int] = {}
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, path = line.partition("::")
        if number != "0":
            continue
        place = base / path.strip("/")
        while True:
            for region, limit in _regions(place / "dmem.max"):
                limits[region] = min(limit, limits.get(region, limit))
            if place == base or base not in place.parents:
                break
            place = place.parent
    return limits


def group_limit(limits: dict[str, int], properties: Any) -> int | None:
    """Return the limit of the region that lies on a device, known by its place on the bus; None where there is none."""
    wanted = place_on_bus(properties)
    return min((limit for region, limit in limits.items() if wanted and wanted in region.lower()), default=None)


def place_on_bus(properties: Any) -> str | None:
    """Return the place of a device on the bus as drivers write it, `0000:03:00`; None where torch does not tell it."""
    domain, bus, device = (getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
    if domain is None or bus is None or device is None:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def unmatched(limits: dict[str, int], known: set[int]) -> tuple[Unavailable, ...]:
    """Return the limits that were found on no device of torch's, so that they are not passed over in silence."""
    return tuple(
        Unavailable(
            "dmem", f"the control group limits {region} to {format_bytes(limit)}, but which device that is, is not known"
        )
        for region, limit in limits.items()
        if limit not in known
    )


def _regions(path: Path) -> list[tuple[str, int]]:
    pairs = (line.rsplit(maxsplit=1) for line in _read(path).splitlines())
    return [(pair[0], int(pair[1])) for pair in pairs if len(pair) == 2 and pair[1].isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
