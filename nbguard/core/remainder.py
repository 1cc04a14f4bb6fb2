"""Allocated blocks that no Python object holds, by what they are for: so that the holders re-add to what is allocated."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.core.facts import Block, DeviceFacts, Graph, Segment
from nbguard.core.ownership import Holder


def unheld(graph: Graph, device: DeviceFacts) -> Iterator[Holder]:
    """Yield a holder for each kind of allocated block of `device` that `graph` holds no storage in.

    cuBLAS workspaces are known by their size, which torch tells; the rest is C++'s own. Where blocks are not known, what
    the allocator counts and no storage explains is one row.
    """
    if device.segments is None and device.allocator is not None:
        explained = sum(storage.nbytes for storage in graph.storages if storage.device == device.device)
        if device.allocator.allocated > explained:
            yield _row("not held by Python", device.allocator.allocated - explained, "C++: buffers and caches of libraries")
    held = {storage.address for storage in graph.storages if storage.device == device.device}
    found: dict[str, list[Block]] = {}
    for segment in device.segments or ():
        for block in segment.blocks:
            if block.state == "active_allocated" and block.address not in held:
                found.setdefault(_kind(device, segment, block), []).append(block)
    for label, blocks in found.items():
        s = "s" if len(blocks) > 1 else ""
        yield _row(label, sum(block.size for block in blocks), f"{len(blocks)} block{s} {_WHAT[label]}")


def _row(label: str, nbytes: int, what: str) -> Holder:
    return Holder(label, "library", nbytes, nbytes, None, what, stale=False, roots=())


_WHAT = {
    "cuBLAS workspaces": "that PyTorch keeps for matrix products",
    "CUDA graphs": "of graph pools that no Python object holds",
    "not held by Python": "of C++: buffers and caches of libraries",
}


def _kind(device: DeviceFacts, segment: Segment, block: Block) -> str:
    if device.workspace and block.requested == device.workspace:
        return "cuBLAS workspaces"
    return "CUDA graphs" if segment.is_private else "not held by Python"
