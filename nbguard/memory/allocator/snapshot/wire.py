"""A snapshot as bytes (a line of JSON, then arrays), which the process that reads a large file sends."""

from __future__ import annotations

import json
from array import array
from operator import attrgetter, itemgetter
from typing import IO, Any, BinaryIO

from nbguard.memory.allocator.snapshot.events import Events
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, Snapshot, SnapshotBlock, SnapshotSegment, Trace
from nbguard.memory.allocator.snapshot.stacks import Stacks

_BLOCK = ("address", "size", "requested", "state", "stack")
_SEGMENT = ("device", "address", "total_size", "stream", "is_small", "is_expandable", "pool")


def write_snapshot(snapshot: Snapshot, out: BinaryIO) -> None:
    """Write a snapshot without its sidecar."""
    stacks = snapshot.stacks
    columns = [stacks.numbers, stacks.ends]
    for trace in snapshot.traces:
        columns += _columns(trace)
    segment, block = attrgetter(*_SEGMENT), attrgetter(*_BLOCK)
    head = {
        "segments": [(segment(entry), list(map(block, entry.blocks))) for entry in snapshot.segments],
        "settings": snapshot.settings,
        "divisions": snapshot.divisions,
        "frames": stacks.frames,
        "hints": sorted(snapshot.hints),
        "traces": [(trace.left_out, trace.pools is not None) for trace in snapshot.traces],
        "columns": [(column.typecode, len(column)) for column in columns],
    }
    out.write(json.dumps(head).encode() + b"\n")
    for column in columns:
        column.tofile(out)


def read_snapshot(source: IO[bytes], sidecar: Sidecar) -> Snapshot:
    """Return the snapshot that `write_snapshot` wrote. Raises EOFError if it ends too early."""
    line = source.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    head = json.loads(line)
    columns = iter([_read_column(source, code, count) for code, count in head["columns"]])
    numbers, ends = next(columns), next(columns)
    return Snapshot(
        segments=tuple(_segment(*entry) for entry in head["segments"]),
        traces=tuple(_trace(columns, *entry) for entry in head["traces"]),
        settings=head["settings"],
        divisions=None if head["divisions"] is None else tuple(head["divisions"]),
        stacks=Stacks(tuple(map(tuple, head["frames"])), numbers, ends),
        hints=frozenset(head["hints"]),
        sidecar=sidecar,
    )


def _columns(trace: Trace) -> list[array[int]]:
    """Return a trace as columns: actions, addresses, sizes, streams and stacks of its events, and pools if it has them."""
    assert isinstance(trace.events, Events)
    assert isinstance(trace.stacks, array)
    pools = [] if trace.pools is None else [array("Q", map(itemgetter(at), trace.pools)) for at in range(2)]
    return [*trace.events.columns, trace.stacks, *pools]


def _trace(columns: Any, left_out: int, has_pools: bool) -> Trace:
    events, stacks = Events(*(next(columns) for _ in range(4))), next(columns)
    pools = tuple(zip(next(columns), next(columns), strict=True)) if has_pools else None
    return Trace(events, pools, stacks, left_out)


def _segment(values: list[Any], blocks: list[list[Any]]) -> SnapshotSegment:
    device, address, total_size, stream, is_small, is_expandable, pool = values
    return SnapshotSegment(
        device=device,
        address=address,
        total_size=total_size,
        stream=stream,
        is_small=is_small,
        is_expandable=is_expandable,
        pool=(pool[0], pool[1]),
        blocks=tuple(SnapshotBlock(**dict(zip(_BLOCK, block, strict=True))) for block in blocks),
    )


def _read_column(source: IO[bytes], code: str, count: int) -> array[int]:
    column: array[int] = array(code)
    column.fromfile(source, count)
    return column
