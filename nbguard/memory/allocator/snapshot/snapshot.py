"""Memory snapshots as frozen plain data, with segments, blocks, and the events and stacks of the trace as columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Annotated, Any, NoReturn, TypeAlias, overload

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.model.settings import DEFAULT_POOL, DIVISION_ENTRIES, PoolId
from nbguard.plain_data import NESTED, Within, is_nested

# --- The different stacks of a snapshot, each frame kept once and each stack as the numbers of its frames.


Frame = tuple[str, int, str]
"""(file, line, function)."""

Stack = tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Stacks(Sequence[Stack]):
    """A sequence of stacks that makes each one when it is asked for: most of a large snapshot's are never shown."""

    frames: tuple[Frame, ...] = ()  # each different frame once
    # Indices in `frames` of the frames of all stacks, innermost first, one stack after another.
    numbers: array[int] = field(default_factory=lambda: array("I"))
    # Of each stack, the end of its part of `numbers`.
    ends: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Stack: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Stack]: ...
    def __getitem__(self, index: int | slice) -> Stack | Sequence[Stack]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        start = self.ends[at - 1] if at else 0
        return tuple([self.frames[number] for number in self.numbers[start : self.ends[at]]])

    def with_frames(self, change: Callable[[Frame], Frame]) -> Stacks:
        """Return the same stacks with each frame replaced by the result of `change`."""
        return Stacks(tuple(map(change, self.frames)), self.numbers, self.ends)


# --- The events of a trace as columns of numbers, since a large trace has millions and most commands read none of them.


Event = tuple[str, int, int, int]
"""(action, address, bytes, stream) of an entry; the second of an `oom` is the device's free bytes, -1 if not recorded."""

ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("oom", "snapshot"),
)
"""Actions of the allocator in a trace (`TraceEntry::Action`). Other entries, such as annotations, are only counted."""

CODES = {action: code for code, action in enumerate(ACTIONS)}


@dataclass(frozen=True, slots=True)
class Events(Sequence[Event]):
    """A sequence of events that makes each tuple when it is asked for."""

    actions: array[int] = field(default_factory=lambda: array("B"))  # index in `ACTIONS`
    addresses: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))  # bytes
    streams: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """The four columns, in the order of an event."""
        return self.actions, self.addresses, self.sizes, self.streams

    def extend(self, *columns: Iterable[int]) -> None:
        """Append events, given as codes of actions, addresses, sizes and streams."""
        for column, more in zip(self.columns, columns, strict=True):
            column.extend(more)

    def __len__(self) -> int:
        return len(self.actions)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        if isinstance(index, slice):
            return Events(*(column[index] for column in self.columns))
        return ACTIONS[self.actions[index]], self.addresses[index], self.sizes[index], self.streams[index]

    def __iter__(self) -> Iterator[Event]:
        return zip(map(ACTIONS.__getitem__, self.actions), self.addresses, self.sizes, self.streams, strict=True)


_Bytes: TypeAlias = Annotated[int, Within(0, 2**60)]
_Share: TypeAlias = Annotated[float, Within(0, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlock:
    """One entry of a segment's "blocks" in a snapshot."""

    address: int  # "address"; in files of torch 2.0 the sum of the sizes before
    size: int  # bytes, "size"
    requested: int  # bytes, "requested_size": of the last request; without meaning in an inactive block
    state: str  # "state": "inactive", "active_allocated" or "active_pending_free"
    stack: int = -1  # index in `Snapshot.stacks` of "frames"; -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSegment:
    """One entry of "segments": a classic segment, or one stretch of an expandable segment that has memory."""

    device: int  # "device"
    address: int  # "address"
    total_size: int  # bytes, "total_size"
    stream: int  # "stream": handle of the stream that the segment belongs to
    is_small: bool  # "segment_type" is "small": of the small half of its pool
    is_expandable: bool  # "is_expandable"
    pool: PoolId  # "segment_pool_id"
    blocks: tuple[SnapshotBlock, ...]  # "blocks", by address


@dataclass(frozen=True, slots=True)
class Trace:
    """The history of one device's allocator: one list of "device_traces"."""

    events: Sequence[Event] = ()  # oldest first
    pools: Sequence[PoolId] | None = None  # "pool_id" of each event; None where this torch does not write it
    stacks: Sequence[int] = ()  # of each event, the index in `Snapshot.stacks` of "frames"; -1: none
    left_out: int = 0  # entries that are no events of the allocator

    def at_hand(self) -> Trace:
        """Return the same trace with its events as tuples: a replay goes to and fro in it."""
        return replace(self, events=tuple(self.events))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Facts that PyTorch's snapshots lack, from the sidecar file that nbguard writes. Lists are by device number."""

    torch_version: str | None = None  # `torch.__version__`; None if unknown
    settings: str | None = None  # of the allocator, as in `PYTORCH_ALLOC_CONF`; None if unknown
    totals: tuple[_Bytes, ...] = ()  # bytes of each device (`mem_get_info()[1]`)
    frees: tuple[_Bytes, ...] = ()  # free bytes of each device when the snapshot was taken (`mem_get_info()[0]`)
    fractions: tuple[_Share, ...] = ()  # share of each device that the process may take (`get_per_process_memory_fraction`)
    names: tuple[str, ...] = ()  # of each device (`get_device_name`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A memory snapshot of every device of a process."""

    segments: tuple[SnapshotSegment, ...]  # "segments", by device and address
    traces: tuple[Trace, ...] = ()  # "device_traces", by device number
    settings: str | None = None  # from "allocator_settings", as in `PYTORCH_ALLOC_CONF`; None if the file has none
    divisions: tuple[int, ...] | None = None  # "allocator_settings" → "roundup_power2_divisions", as a table of 16 entries
    stacks: Stacks = field(default_factory=Stacks)  # "frames" of blocks and events, each different stack once
    hints: frozenset[str] = frozenset()  # names of fields that only some versions of torch write
    sidecar: Sidecar = field(default_factory=Sidecar)  # facts from the sidecar file; empty without one

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices that have a segment or an event."""
        traced = {number for number, trace in enumerate(self.traces) if trace.events}
        return tuple(sorted(traced | {segment.device for segment in self.segments}))

    def trace(self, device: int) -> Trace:
        """Return the trace of a device, empty where none was recorded."""
        return self.traces[device] if device < len(self.traces) else Trace()


# --- Conversion of a snapshot's dicts and lists to a `Snapshot`: every schema since torch 2.0, every value checked.


_STATES = {
    "inactive": "inactive",
    "active_allocated": "active_allocated",
    "active_pending_free": "active_pending_free",
    "active_awaiting_free": "active_pending_free",  # as torch's documentation spells it
}
_LARGEST = 1 << 57
"""Beyond every address and size on a device of today."""

_BYTES_PER_ENTRY = 8
"""Bytes of a file that an entry takes at least."""

_MOST_DEVICES = 4096
_MOST_STREAMS = 1024
"""Streams, and pools, in a trace: a program has some dozens, and the model goes through all of them now and then."""

_AT_ONCE = 1 << 14
"""Entries of a trace whose columns are read and checked together: the lists that this takes stay small."""

_LONG = 256
"""Least number of frames of a stack that is known by its list."""

_ATOMS = {str, int, float, bool, type(None)}
_NONE: tuple[list[object], int] = ([], -1)
"""A stack that no other equals."""

_READ = frozenset({"action", "addr", "size", "stream", "frames", "pool_id"})
"""Fields of an entry whose values are all read, and checked by that."""

_HINTS = ("time_us", "compile_context", "user_metadata", "pool_id", "internal_metadata", "forward_frames")
"""Fields of an entry that tell the version of torch."""


_HOLDER = "held by "
_OURS = "nbguard"


def holder_frame(name: str) -> dict[str, Any]:
    """Return the name of a block's holder as a frame, the outermost of a stack, since every viewer shows frames.

    It stands for a file, as some viewers classify allocations by the names of functions. `parse_snapshot` leaves it out.
    """
    return {"filename": f"{_HOLDER}{name}", "line": 0, "name": _OURS}


def _is_holder(raw: object) -> bool:
    if type(raw) is not dict or raw.get("name") != _OURS or raw.get("line") != 0:
        return False
    file = raw.get("filename")
    return type(file) is str and file.startswith(_HOLDER)


class _StackNumbers:
    """The stacks of a file, by number: equal stacks have one number."""

    def __init__(self, budget: _Budget) -> None:
        self._budget = budget
        self._frames: dict[Frame, int] = {}
        self._by_frames: dict[tuple[int, ...], int] = {}  # number of a stack by the numbers of its frames
        self._by_ids: dict[tuple[int, ...], int] = {}  # number of a stack by the ids of the file's dicts, which it shares
        self._alike: dict[tuple[int, ...], tuple[list[object], int]] = {}  # the last stack, by the ids of a few of its frames
        self._flat: set[int] = set()  # ids of frames that hold no containers: comparing them comes to an end at once
        self._long: dict[int, int] = {}  # number of a long stack by the id of its list: it may stand in a million places

    def of(self, column: Iterable[object]) -> list[int]:
        """Return the numbers of lists of frames; -1 for none."""
        numbers, by_ids, alike, flat = list[int](), self._by_ids, self._alike, self._flat
        for raw in column:
            if type(raw) is not list or not raw:
                _check_nesting((raw,))
                numbers.append(-1)
                continue
            if (length := len(raw)) > _LONG:
                number = self._long.get(id(raw))
                if number is None:
                    number = self._long[id(raw)] = self._number(raw)
            else:  # a comparison takes a fifth of the time of a look-up by all ids
                key = id(raw[0]), id(raw[length // 3]), id(raw[2 * length // 3])  # the outermost is the same in most
                last, number = alike.get(key, _NONE)
                if last != raw:
                    ids = tuple(map(id, raw))
                    number = by_ids.get(ids)
                    if number is None:
                        number = by_ids[ids] = self._number(raw)
                    if flat.issuperset(ids):
                        alike[key] = raw, number
            numbers.append(number)
        return numbers

    def _number(self, raw: list[object]) -> int:
        self._budget.spend(1)
        if raw and _is_holder(raw[-1]):
            raw = raw[:-1]
            if not raw:
                return -1
        return self._by_frames.setdefault(tuple(map(self._frame, raw)), len(self._by_frames))

    def stacks(self) -> Stacks:
        """Return all stacks so far."""
        numbers = array("I", chain.from_iterable(self._by_frames))
        ends = array("Q", accumulate(map(len, self._by_frames)))
        return Stacks(tuple(self._frames), numbers, ends)

    def _frame(self, raw: object) -> int:
        if type(raw) is not dict:
            _reject("a frame is not a dict")
        file, line, name = raw.get("filename", ""), raw.get("line", 0), raw.get("name", "")
        if type(file) is not str or type(name) is not str or type(line) is not int:
            _reject("a frame has no file, line and name")
        if {*map(type, raw.values())} <= _ATOMS:
            self._flat.add(id(raw))
        else:
            _check_nesting(raw.values())
        return self._frames.setdefault((file, line, name), len(self._frames))


class _Budget:
    """The entries that an honest file of some size can have; lists that refer to one entry over and over have more."""

    def __init__(self, size: int) -> None:
        self.left = size // _BYTES_PER_ENTRY + 64

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            _reject("it refers to the same entries over and over")


def parse_snapshot(raw: object, size: int, sidecar: Sidecar | None = None, *, consume: bool = False) -> Snapshot:
    """Return the `Snapshot` of a snapshot's raw data.

    Args:
        raw: the dict of `torch.cuda.memory._snapshot()`, or the list of segments alone.
        size: bytes of the file that it came from: a bound on the number of its entries.
        sidecar: figures that the snapshot itself lacks.
        consume: take the entries of traces out of `raw` once they are read, so that memory never holds both.

    Raises:
        SnapshotError: `raw` is no snapshot, or contradicts itself.
    """
    whole = {"segments": raw} if type(raw) is list else raw
    if type(whole) is not dict or type(whole.get("segments")) is not list:
        _reject("it has no list of segments; torch.cuda.memory._dump_snapshot(FILE) writes one that has")
    _check_nesting(value for key, value in whole.items() if key not in ("segments", "device_traces"))
    budget = _Budget(size)
    stacks = _StackNumbers(budget)
    segments = tuple(sorted((_segment(entry, stacks, budget) for entry in whole["segments"]), key=_place))
    for before, after in pairwise(segments):
        if before.device == after.device and before.address + before.total_size > after.address:
            _reject(f"segments overlap at address {after.address}")
    traces = whole.get("device_traces") or []
    if type(traces) is not list or len(traces) > _MOST_DEVICES:
        _reject("device_traces is not a list of traces")
    hints = {key for key in ("host_segments", "external_annotations") if key in whole}
    parsed = tuple(_trace(entries, stacks, budget, hints, consume=consume) for entries in traces)
    _check_count({segment.stream for segment in segments}, {segment.pool for segment in segments})
    for trace, streams in parsed:
        _check_count(streams, set(trace.pools or ()))
    settings, divisions = _settings(whole.get("allocator_settings"))
    return Snapshot(
        segments=segments,
        traces=tuple(trace for trace, _ in parsed),
        settings=settings,
        divisions=divisions,
        stacks=stacks.stacks(),
        hints=frozenset(hints),
        sidecar=sidecar or Sidecar(),
    )


def _check_count(streams: set[int], pools: set[PoolId]) -> None:
    if max(len(streams), len(pools)) > _MOST_STREAMS:
        _reject(f"it has {len(streams)} streams and {len(pools)} pools")


def _place(segment: SnapshotSegment) -> tuple[int, int]:
    return segment.device, segment.address


def _segment(raw: object, stacks: _StackNumbers, budget: _Budget) -> SnapshotSegment:
    budget.spend(1)
    if type(raw) is not dict or type(raw.get("blocks")) is not list or raw.get("segment_type", "") not in ("small", "large"):
        _reject("a segment is not a dict")
    _check_nesting(value for key, value in raw.items() if key != "blocks")
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


def _blocks(raw: list[object], address: int, stacks: _StackNumbers, budget: _Budget) -> Iterator[SnapshotBlock]:
    """Yield blocks from `address` on. Torch 2.0 has neither their addresses nor frames, but a `history` of requests."""
    budget.spend(len(raw))
    for entry in raw:
        if type(entry) is not dict:
            _reject("a block is not a dict")
        _check_nesting(value for key, value in entry.items() if key != "frames")
        size, state = _number(entry, "size"), entry.get("state")
        if type(state) is not str or state not in _STATES:
            _reject(f"the block at {address} has no state that is known")
        if "address" in entry and entry["address"] != address:
            _reject(f"the block before {address} does not end there")
        history = entry.get("history")
        frames, requested = entry.get("frames"), _number(entry, "requested_size", size)
        if type(history) is list and history and type(history[-1]) is dict:
            frames = history[-1].get("frames")
        yield SnapshotBlock(address=address, size=size, requested=requested, state=_STATES[state], stack=stacks.of([frames])[0])
        address += size


def _trace(raw: object, stacks: _StackNumbers, budget: _Budget, hints: set[str], *, consume: bool) -> tuple[Trace, set[int]]:
    """Return the trace in a list of entries, and its streams. It has millions, so they are read and checked by columns."""
    if type(raw) is not list:
        _reject("a trace is not a list")
    budget.spend(len(raw))
    events, numbers, left_out = Events(), array("i"), 0
    pools: list[PoolId] = []
    same_pool: dict[PoolId, PoolId] = {}
    for start in range(0, len(raw), _AT_ONCE):
        part = raw[start : start + _AT_ONCE]
        if {*map(type, part)} - {dict} or {*map(type, actions := _column(part, "action"))} - {str}:
            _reject("an entry of the trace has no action")
        others = {*actions} - CODES.keys()
        hints |= {f"action {action[:20]}" for action in others}
        entries = [entry for entry in part if entry["action"] not in others] if others else part
        left_out += len(part) - len(entries)
        _check_unread(entries, _READ)
        if others:
            _check_unread([entry for entry in part if entry["action"] in others], frozenset({"action"}))
        named = [_pool(entry["pool_id"]) for entry in entries if "pool_id" in entry]
        pools.extend(map(same_pool.setdefault, named, named))
        hints |= {key for key in _HINTS if key in part[-1]}
        _read_events(entries, events)
        numbers.extend(stacks.of(_column(entries, "frames")))
        if consume:
            raw[start : start + len(part)] = [None] * len(part)
    has_pools = bool(pools) and len(pools) == len(events)
    return Trace(events, tuple(pools) if has_pools else None, numbers, left_out), set(events.streams)


def _check_unread(entries: list[dict[str, Any]], read: frozenset[str]) -> None:
    """Refuse entries whose values are nested too deep in a field that is not `read`."""
    for name in set[str]().union(*entries) - read:
        column = _column(entries, name)
        if not {*map(type, column)} <= _ATOMS:
            _check_nesting(column)


def _check_nesting(values: Iterable[object]) -> None:
    if is_nested(values):
        _reject(NESTED)


def _column(entries: list[dict[str, Any]], key: str, default: Any = None) -> list[Any]:
    """Return the values of a key, which nearly always all entries have."""
    try:
        return list(map(itemgetter(key), entries))
    except KeyError:
        return [entry.get(key, default) for entry in entries]


def _read_events(entries: list[dict[str, Any]], events: Events) -> None:
    """Append the events of entries."""
    actions, addresses = _column(entries, "action"), _column(entries, "addr")
    if "oom" in actions:
        for at, action in enumerate(actions):
            if action == "oom" and "addr" not in entries[at]:
                addresses[at] = entries[at].get("device_free", -1)
    sizes, streams = _column(entries, "size"), _column(entries, "stream", 0)
    _check(actions, addresses, -1, _LARGEST)
    _check(actions, sizes, 0, _LARGEST)
    _check(actions, streams, 0, 1 << 64)
    if 0 in sizes:  # no bytes never reach the allocator
        empty = {action for action, size in zip(actions, sizes, strict=True) if not size} & {"alloc", "oom"}
        if empty:
            _reject(f"an entry {min(empty)} of the trace has a number beyond all measure")
    events.extend(map(CODES.__getitem__, actions), addresses, sizes, streams)


def _check(actions: list[str], column: list[Any], least: int, most: int) -> None:
    """Refuse a column that has anything but whole numbers from `least` up to, but not including, `most`."""
    if {*map(type, column)} - {int}:
        action = next(action for action, value in zip(actions, column, strict=True) if type(value) is not int)
        _reject(f"an entry {action} of the trace has no address, size and stream")
    if column and not least <= min(column) <= max(column) < most:
        action = next(action for action, number in zip(actions, column, strict=True) if not least <= number < most)
        _reject(f"an entry {action} of the trace has a number beyond all measure")


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
    raise SnapshotError("not a readable snapshot: a pool has no id of two numbers.")


def _number(raw: dict[str, Any], key: str, default: int | None = None, most: int = _LARGEST) -> int:
    value = raw.get(key, default)
    if type(value) is not int or not 0 <= value < most:
        _reject(f"{key} of a segment or block is not a number of bytes")
    return value


def _reject(what: str) -> NoReturn:
    raise SnapshotError(f"not a readable snapshot: {what}.")
