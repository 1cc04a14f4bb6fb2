"""Runs of a recorded program under other settings of the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.allocator.model.allocator import CachingAllocator
from nbguard.allocator.model.driver import Addresses, SimulatedDriver
from nbguard.allocator.model.policy import parse_version, tie_break
from nbguard.allocator.model.settings import AllocatorSettings
from nbguard.allocator.replay.program import Op, program, usable_bytes
from nbguard.allocator.replay.replay import DeviceReplay, RecordedDevice, best_play, recorded_device
from nbguard.allocator.snapshot.snapshot import Snapshot
from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.render.result import Result

Progress = Callable[[int, int], None]
"""Called after each run with (runs done, runs in all)."""

_ORDERS = (Addresses(), Addresses("descending"), Addresses("scattered", 1), Addresses("scattered", 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request for which there was no room."""

    position: int  # in the trace; -1 for a block from before the trace
    number: int  # of the request, counted from 1
    size: int  # bytes requested
    allocated: int  # bytes in use at that moment (`allocated_bytes.all.current`)
    reserved: int  # bytes reserved at that moment (`reserved_bytes.all.current`)
    holders: tuple[tuple[int, int, int], ...] = ()  # (index in `Snapshot.stacks` or -1, bytes, blocks), the largest five


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOutcome:
    """The result of one run under some settings."""

    peak_reserved: int  # bytes (`reserved_bytes.all.peak`)
    peak_allocated: int  # bytes (`allocated_bytes.all.peak`)
    refusal: Refusal | None  # the first request without room; None if all were served
    passed: int  # requests that were refused when recorded, and served in this run
    retries: int  # requests for which the cache was emptied (`num_alloc_retries`)
    driver_calls: int  # to cudaMalloc and cudaFree, or to map and unmap pages


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """The results of a run under one choice of settings."""

    settings: AllocatorSettings
    outcomes: tuple[WhatIfOutcome, ...]  # one for each order of addresses that was tried
    is_recorded: bool = False  # these are the recorded settings

    @property
    def worst(self) -> WhatIfOutcome:
        """The outcome to count on: with a refusal if any has one, then the largest peak."""
        return max(self.outcomes, key=lambda outcome: (outcome.refusal is not None, outcome.peak_reserved))

    @property
    def least_peak(self) -> int:
        """The lowest peak of reserved bytes over the orders of addresses."""
        return min(outcome.peak_reserved for outcome in self.outcomes)

    @property
    def peak(self) -> int:
        """The highest peak of reserved bytes over the orders of addresses."""
        return max(outcome.peak_reserved for outcome in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf(Result):
    """The results of one device's recorded program under several settings."""

    kind: ClassVar[str] = "devicewhatif"
    view: ClassVar[str] = "nbguard.allocator.replay.view:whatif_blocks"
    data: ClassVar[str] = "nbguard.allocator.replay.data:whatif_data"
    label: ClassVar[str] = "what if the allocator had other settings"

    replay: DeviceReplay  # under the recorded settings, with the share of events reproduced
    rows: tuple[WhatIfRow, ...]  # the recorded settings first
    capacity: int | None  # bytes that the allocator can have in all; None: not known, and no request is refused
    requests: int  # in the trace, and those for blocks from before it
    snapshot: Snapshot  # the source


def what_if(
    snapshot: Snapshot,
    device: int,
    confs: Iterable[str] = (),
    torch_version: str | None = None,
    capacity: int | None = None,
    fraction: float | None = None,
    progress: Progress | None = None,
) -> WhatIf:
    """Replay a device under its recorded settings, then under others.

    Args:
        snapshot: from `load_snapshot`.
        device: its number.
        confs: settings to try; a choice that suits the version where there are none.
        torch_version: that recorded the trace, where neither the file nor its sidecar has it.
        capacity: bytes that the allocator can have in all, where neither an out-of-memory event nor the sidecar tells.
        fraction: share of `capacity` that the process may take, where the sidecar has none.
        progress: called after each run.

    Raises:
        SettingsError: a string in `confs` is no settings of PyTorch.
        SnapshotError: trace and segments contradict each other.
    """
    source = recorded_device(snapshot, device, torch_version, capacity, fraction)
    version = parse_version(source.torch_version)
    tried = [AllocatorSettings.parse(conf, version if source.is_version_known else None) for conf in confs]
    replay = best_play(source)[1]
    space = capacity if capacity is not None else _capacity(source, snapshot)
    settings = [source.settings, *dict.fromkeys(tried or _choice(source, version))]
    settings[1:] = [choice for choice in settings[1:] if choice != source.settings]
    orders = _ORDERS if tie_break(parse_version(replay.torch_version)) == "address" else _ORDERS[:1]
    rows = []
    for number, choice in enumerate(settings):
        outcomes = []
        for index, order in enumerate(orders):
            outcomes.append(run(source, choice, space, replay.torch_version, replace(order)))
            if progress is not None:
                progress(number * len(orders) + index + 1, len(settings) * len(orders))
        rows.append(WhatIfRow(choice, tuple(outcomes), is_recorded=not number))
    requests = len(source.start.blocks) + sum(event[0] in ("alloc", "oom") for event in source.trace.events)
    return WhatIf(replay=replay, rows=tuple(rows), capacity=space, requests=requests, snapshot=snapshot)


def run(
    source: RecordedDevice,
    settings: AllocatorSettings,
    capacity: int | None,
    torch_version: str,
    addresses: Addresses | None = None,
) -> WhatIfOutcome:
    """Run a recorded program from an empty allocator, up to its end or the first request that is refused in this run only."""
    driver = SimulatedDriver(capacity, addresses=addresses)
    total = source.capacity if source.capacity is not None else capacity
    model = CachingAllocator(settings, total, source.fraction, torch_version, driver)
    live: dict[int, tuple[int, Op]] = {}
    passed = number = 0
    refusal = None
    for op in program(source):
        model.events.clear()
        if op.kind == "free":
            if op.name in live:
                model.free(live.pop(op.name)[0])
        elif op.kind in ("empty_cache", "maybe_retry"):
            if op.kind == "empty_cache" or capacity is None:
                model.empty_cache()
        else:
            number += 1
            try:
                address = model.malloc(op.size, op.stream, op.pool)
            except SimulatedOutOfMemoryError:
                refusal = refusal or _refusal(op, number, model, live)
                if op.kind == "refused":
                    continue
                break  # the recorded program went on from here; the reaction of this one is not known
            if op.kind == "refused":
                passed += 1
                model.free(address)  # its further use is not recorded
            else:
                live[op.name] = (address, op)
    retries = model.num_alloc_retries
    return WhatIfOutcome(
        peak_reserved=model.peak_reserved,
        peak_allocated=model.peak_allocated,
        refusal=refusal,
        passed=passed,
        retries=retries,
        driver_calls=driver.calls,
    )


def _refusal(op: Op, number: int, model: CachingAllocator, live: dict[int, tuple[int, Op]]) -> Refusal:
    """Return a refusal with the memory in use at that moment, by the line that requested it, largest first."""
    by_stack: dict[int, list[int]] = {}
    for address, held in live.values():
        by_stack.setdefault(held.stack, []).append(model.live[address].size)
    holders = sorted(((stack, sum(sizes), len(sizes)) for stack, sizes in by_stack.items()), key=lambda holder: -holder[1])
    return Refusal(
        position=op.position,
        number=number,
        size=op.size,
        allocated=model.allocated,
        reserved=model.reserved,
        holders=tuple(holders[:5]),
    )


def _capacity(source: RecordedDevice, snapshot: Snapshot) -> int | None:
    """Return the bytes that the allocator could have: by an out-of-memory event, else reserved and free bytes at the end."""
    capacity = usable_bytes(source)
    if capacity is None and source.device < len(snapshot.sidecar.frees):
        capacity = snapshot.sidecar.frees[source.device] + sum(segment.total_size for segment in source.segments)
    return capacity


def _choice(source: RecordedDevice, version: tuple[int, int]) -> list[AllocatorSettings]:
    """Return settings that are worth trying."""
    confs = ["", "expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512", "roundup_power2_divisions:8"]
    if source.is_version_known and version >= (2, 11):
        confs.append("large_segment_size_mb:64")
    if source.fraction is not None and source.fraction < 1 and source.capacity is not None:
        confs.append("garbage_collection_threshold:0.8")
    return [AllocatorSettings.parse(conf, None) for conf in confs]
