"""Conversion of a snapshot's dicts and lists to a `Snapshot`: every schema since torch 2.0, every value checked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NoReturn

from nbguard.allocator.model.policy import DEFAULT_POOL, DIVISION_ENTRIES, PoolId
from nbguard.allocator.snapshot.snapshot import (
    ACTIONS,
    Event,
    Frame,
    Sidecar,
    Snapshot,
    SnapshotBlock,
    SnapshotSegment,
    Trace,
)
from nbguard.errors import SnapshotError

_STATES = {
    "inactive": "inactive",
    "active_allocated": "active_allocated",
    "active_pending_free": "active_pending_free",
    "active_awaiting_free": "active_pending_free",  # as torch's documentation spells it
}
_ACTIONS = {action: action for action in ACTIONS}
_LARGEST = 1 << 57
"""Beyond every address and size on a device of today."""

_BYTES_PER_ENTRY = 8
"""Bytes of a file that an entry takes at least."""

_MOST_DEVICES = 4096
_MOST_STREAMS = 1024
"""Streams, and pools, in a trace: a program has some dozens, and the model goes through all of them now and then."""

_HINTS = ("time_us", "compile_context", "user_metadata", "pool_id", "internal_metadata", "forward_frames")
"""Fields of an entry that tell the version of torch."""


class _Stacks:
    """The stacks of a file, by number. Equal stacks have one number; a list that the file shares is read once."""

    def __init__(self) -> None:
        self.all: list[tuple[Frame, ...]] = []
        self._by_list: dict[int, int] = {}
        self._by_frames: dict[tuple[Frame, ...], int] = {}
        self._frames: dict[int, Frame] = {}

    def number(self, raw: object, budget: _Budget) -> int:
        """Return the number of a list of frames; -1 for none."""
        if type(raw) is not list or not raw:
            return -1
        number = self._by_list.get(id(raw))
        if number is None:
            budget.spend(1)
            stack = tuple([self._frames.get(id(frame)) or self._frame(frame) for frame in raw])
            number = self._by_frames.setdefault(stack, len(self.all))
            if number == len(self.all):
                self.all.append(stack)
            self._by_list[id(raw)] = number
        return number

    def _frame(self, raw: object) -> Frame:
        if type(raw) is not dict:
            _reject("a frame is no dict")
        file, line, name = raw.get("filename", ""), raw.get("line", 0), raw.get("name", "")
        if type(file) is not str or type(name) is not str or type(line) is not int:
            _reject("a frame has no file, line and name")
        frame = self._frames[id(raw)] = (file, line, name)
        return frame


class _Budget:
    """The entries that an honest file of some size can have; lists that refer to one entry over and over have more."""

    def __init__(self, size: int) -> None:
        self.left = size // _BYTES_PER_ENTRY + 64

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            _reject("it refers to the same entries over and over")


def parse_snapshot(raw: object, size: int, sidecar: Sidecar | None = None) -> Snapshot:
    """Return the `Snapshot` of a snapshot's raw data.

    Args:
        raw: the dict of `torch.cuda.memory._snapshot()`, or the list of segments alone.
        size: bytes of the file that it came from: a bound on the number of its entries.
        sidecar: figures that the snapshot itself lacks.

    Raises:
        SnapshotError: `raw` is no snapshot, or contradicts itself.
    """
    whole = {"segments": raw} if type(raw) is list else raw
    if type(whole) is not dict or type(whole.get("segments")) is not list:
        _reject("it has no list of segments; torch.cuda.memory._dump_snapshot(FILE) writes one that has")
    budget, stacks = _Budget(size), _Stacks()
    segments = tuple(sorted((_segment(entry, stacks, budget) for entry in whole["segments"]), key=_place))
    for before, after in pairwise(segments):
        if before.device == after.device and before.address + before.total_size > after.address:
            _reject(f"segments overlap at address {after.address}")
    traces = whole.get("device_traces") or []
    if type(traces) is not list or len(traces) > _MOST_DEVICES:
        _reject("device_traces is no list of traces")
    hints = {key for key in ("host_segments", "external_annotations") if key in whole}
    parsed = tuple(_trace(entries, stacks, budget, hints) for entries in traces)
    _check_count({segment.stream for segment in segments}, {segment.pool for segment in segments})
    for trace in parsed:
        _check_count({event[3] for event in trace.events}, set(trace.pools or ()))
    settings, divisions = _settings(whole.get("allocator_settings"))
    return Snapshot(
        segments=segments,
        traces=parsed,
        settings=settings,
        divisions=divisions,
        stacks=tuple(stacks.all),
        hints=frozenset(hints),
        sidecar=sidecar or Sidecar(),
    )


def _check_count(streams: set[int], pools: set[PoolId]) -> None:
    if max(len(streams), len(pools)) > _MOST_STREAMS:
        _reject(f"it has {len(streams)} streams and {len(pools)} pools")


def _place(segment: SnapshotSegment) -> tuple[int, int]:
    return segment.device, segment.address


def _segment(raw: object, stacks: _Stacks, budget: _Budget) -> SnapshotSegment:
    budget.spend(1)
    if type(raw) is not dict or type(raw.get("blocks")) is not list or raw.get("segment_type", "") not in ("small", "large"):
        _reject("a segment is none")
    address, total = _number(raw, "address"), _number(raw, "total_size")
    blocks = tuple(_blocks(raw["blocks"], address, stacks, budget))
    if sum(block.size for block in blocks) != total:
        _reject(f"the blocks of the segment at {address} do not add up to its {total} bytes")
    return SnapshotSegment(
        device=_number(raw, "device", 0, most=_MOST_DEVICES),
        address=address,
        total_size=total,
        stream=_number(raw, "stream", 0, most=1 << 64),
        is_small=raw["segment_type"] == "small",
        is_expandable=raw.get("is_expandable", False) is True,
        pool=_pool(raw.get("segment_pool_id", DEFAULT_POOL)),
        blocks=blocks,
    )


def _blocks(raw: list[object], address: int, stacks: _Stacks, budget: _Budget) -> Iterator[SnapshotBlock]:
    """Yield blocks from `address` on. Torch 2.0 has neither their addresses nor frames, but a `history` of requests."""
    budget.spend(len(raw))
    for entry in raw:
        if type(entry) is not dict:
            _reject("a block is no dict")
        size, state = _number(entry, "size"), entry.get("state")
        if type(state) is not str or state not in _STATES:
            _reject(f"the block at {address} has no state that is known")
        if "address" in entry and entry["address"] != address:
            _reject(f"the block before {address} does not end there")
        history = entry.get("history")
        frames, requested = entry.get("frames"), _number(entry, "requested_size", size)
        if type(history) is list and history and type(history[-1]) is dict:
            frames = history[-1].get("frames")
        yield SnapshotBlock(
            address=address, size=size, requested=requested, state=_STATES[state], stack=stacks.number(frames, budget)
        )
        address += size


def _trace(raw: object, stacks: _Stacks, budget: _Budget, hints: set[str]) -> Trace:
    if type(raw) is not list:
        _reject("a trace is no list")
    budget.spend(len(raw))
    events: list[Event] = []
    numbers: list[int] = []
    pools: list[PoolId] = []
    left_out = 0
    for entry in raw:
        if type(entry) is not dict or type(entry.get("action")) is not str:
            _reject("an entry of the trace has no action")
        action = _ACTIONS.get(entry["action"])
        if action is None:
            left_out += 1
            hints.add(f"action {entry['action'][:20]}")
            continue
        events.append(_event(action, entry))
        numbers.append(stacks.number(entry.get("frames"), budget))
        if "pool_id" in entry:
            pools.append(_pool(entry["pool_id"]))
    if raw:
        hints |= {key for key in _HINTS if key in raw[-1]}
    return Trace(tuple(events), tuple(pools) if pools and len(pools) == len(events) else None, tuple(numbers), left_out)


def _event(action: str, entry: dict[str, Any]) -> Event:
    address = entry.get("device_free", -1) if action == "oom" and "addr" not in entry else entry.get("addr")
    size, stream = entry.get("size"), entry.get("stream", 0)
    if type(address) is not int or type(size) is not int or type(stream) is not int:
        _reject(f"an entry {action} of the trace has no address, size and stream")
    least = 1 if action in ("alloc", "oom") else 0  # no bytes never reach the allocator
    if not (-1 <= address < _LARGEST and least <= size < _LARGEST and 0 <= stream < 1 << 64):
        _reject(f"an entry {action} of the trace has a number beyond all measure")
    return action, address, size, stream


def _settings(raw: object) -> tuple[str | None, tuple[int, ...] | None]:
    if type(raw) is not dict:
        return None, None
    table, divisions = raw.get("roundup_power2_divisions"), None
    if type(table) is dict and {*map(type, table.values())} <= {int}:
        entries = [table.get(str(1 << index), 0) for index in range(DIVISION_ENTRIES)]
        # A table with other numbers is not one that PyTorch would have taken.
        divisions = tuple(entries) if all(0 <= entry < 1 << 30 and not entry & (entry - 1) for entry in entries) else None
    return _conf(raw), divisions


def _conf(raw: dict[str, Any]) -> str | None:
    """Return the last settings string, with the settings that an earlier one left in force."""
    text = raw.get("PYTORCH_CUDA_ALLOC_CONF")
    parts = [text] if type(text) is str and text.strip() else []
    named = parts[0] if parts else ""
    largest, threshold = raw.get("max_split_size"), raw.get("garbage_collection_threshold")
    if raw.get("expandable_segments") is True and "expandable_segments" not in named:
        parts.append("expandable_segments:True")
    if type(largest) is int and 0 < largest < _LARGEST and "max_split_size_mb" not in named:
        parts.append(f"max_split_size_mb:{largest >> 20}")
    if type(threshold) is float and 0 < threshold < 1 and "garbage_collection_threshold" not in named:
        parts.append(f"garbage_collection_threshold:{threshold}")
    return ",".join(parts) if parts or type(text) is str else None


def _pool(raw: object) -> PoolId:
    match raw:
        case [int(first), int(second)]:
            return first, second
    raise SnapshotError("not a snapshot that can be read: a pool has no id of two numbers.")


def _number(raw: dict[str, Any], key: str, default: int | None = None, most: int = _LARGEST) -> int:
    value = raw.get(key, default)
    if type(value) is not int or not 0 <= value < most:
        _reject(f"{key} of a segment or block is no number of bytes")
    return value


def _reject(what: str) -> NoReturn:
    raise SnapshotError(f"not a snapshot that can be read: {what}.")
