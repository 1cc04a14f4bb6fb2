"""The segments of PyTorch's allocators, from the snapshots of any version and any accelerator."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nbguard.memory.core.facts import Block, Segment
from nbguard.memory.scan.devices.allocation_sites import Sites


def can_expand() -> bool:
    """Say whether expandable segments work on this system. PyTorch ignores them on Windows, and fails with them on a Jetson.

    Sources: pytorch#122057, unslothai/unsloth-zoo#1235.
    """
    return sys.platform != "win32" and not _TEGRA.exists()


_TEGRA = Path("/etc/nv_tegra_release")
"""A file of NVIDIA's Linux for its Tegra boards."""


def listed_segments(*pool: Any) -> list[dict[str, Any]]:
    """Return the segments that PyTorch lists, of all pools or of one, without the trace, which can take a second to copy."""
    torch: Any = sys.modules["torch"]
    try:
        snapshot = torch.cuda.memory_snapshot(*pool, include_traces=False)
    except TypeError:  # before 2.11: the call lists segments alone
        snapshot = torch.cuda.memory_snapshot(*pool)
    found: list[dict[str, Any]] = snapshot if type(snapshot) is list else snapshot.get("segments", [])
    return found


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
