"""Allocated blocks that no Python object holds, by what they are for: so that the holders re-add to what is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from nbguard.memory.facts import Block, DeviceFacts, Graph, HolderSource, Segment
from nbguard.memory.graph import Holder, Holding


def all_holders(graph: Graph, device: DeviceFacts, held: Iterable[Holding], freed: Set[int]) -> tuple[Holder, ...]:
    """Return every holder of bytes on `device`, Python's and the rest, largest first: they re-add to what is allocated.

    `held` are the holders among Python's objects. `freed` are the storages that a cleanup would free: a displayed tensor that
    it would keep is not called stale.
    """
    own = (replace(row, stale=row.stale and storages <= freed) for row, storages in held)
    found = [*own, *unheld(graph, device)]
    return tuple(sorted((*found, *unattributed(device, found)), key=lambda row: -row.retained))


def unheld(graph: Graph, device: DeviceFacts) -> Iterator[Holder]:
    """Yield a holder for each kind of allocated block of `device` that `graph` holds no storage in.

    cuBLAS workspaces are known by their size, which torch tells; other blocks by the line that allocated them, where the
    allocator's history is recorded; the rest is C++'s own. Where blocks are not known, what the allocator counts and no
    storage explains is one row.
    """
    if device.segments is None and device.allocator is not None:
        explained = sum(storage.nbytes for storage in graph.storages if storage.device == device.device)
        if device.allocator.allocated > explained:
            yield _row("not held by Python", device.allocator.allocated - explained, f"C++: {_BY_LIBRARIES}", "unknown")
    for row, _ in unheld_blocks(graph, device):
        yield row


def unheld_blocks(graph: Graph, device: DeviceFacts) -> Iterator[tuple[Holder, tuple[Block, ...]]]:
    """Yield a holder for each kind of allocated block that `graph` holds no storage in, with these blocks."""
    by_kind: dict[tuple[str, str, HolderSource], list[Block]] = {}
    for segment, block in _unheld_blocks(graph, device):
        by_kind.setdefault(_kind(device, segment, block), []).append(block)
    for (label, what, source), blocks in by_kind.items():
        s = "s" if len(blocks) > 1 else ""
        yield _row(label, sum(block.size for block in blocks), f"{len(blocks)} block{s} {what}", source), tuple(blocks)


def _unheld_blocks(graph: Graph, device: DeviceFacts) -> Iterator[tuple[Segment, Block]]:
    held = {storage.address for storage in graph.storages if storage.device == device.device}
    for segment in device.segments or ():
        for block in segment.blocks:
            if block.state == "active_allocated" and block.address not in held:
                yield segment, block


def unattributed(device: DeviceFacts, rows: Iterable[Holder]) -> Iterator[Holder]:
    """Yield a holder for the difference between what the allocator counts and what `rows` hold, if there is one.

    Another thread that allocates while the heap is walked makes one: it is shown, so that the column re-adds.
    """
    if device.allocator is not None and (missing := device.allocator.allocated - sum(row.retained for row in rows)):
        yield _row(CHANGED, missing, "allocated or freed by another thread during the report: run it again", "changed")


CHANGED = "changed meanwhile"


def workspace_blocks(graph: Graph, device: DeviceFacts) -> tuple[Block, ...]:
    """Return the blocks that are cuBLAS workspaces by their size, outside the pools of CUDA graphs."""
    return tuple(
        block
        for segment, block in _unheld_blocks(graph, device)
        if not segment.is_private and _kind(device, segment, block)[2] == "workspaces"
    )


def _row(label: str, nbytes: int, what: str, source: HolderSource) -> Holder:
    return Holder(
        label=label,
        kind="library",
        retained=nbytes,
        reaches=nbytes,
        cell=None,
        what=what,
        stale=False,
        roots=(),
        source=source,
    )


_WORKSPACES = "cuBLAS workspaces"
_BY_LIBRARIES = "buffers and caches of libraries"


def _kind(device: DeviceFacts, segment: Segment, block: Block) -> tuple[str, str, HolderSource]:
    """Return the label of a block's holder, the words on such blocks, and their source."""
    if device.workspace and block.requested == device.workspace:
        return _WORKSPACES, "that PyTorch keeps for matrix products", "workspaces"
    if segment.is_private:
        return "CUDA graphs", "of graph pools that no Python object holds", "graphs"
    if block.site:
        return f"allocated at {block.site}", "that no Python object holds", "site"
    return "not held by Python", f"of C++: {_BY_LIBRARIES}", "unknown"
