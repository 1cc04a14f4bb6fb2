"""Runs of a recorded program under other settings of the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.memory.allocator.model.driver import Addresses
from nbguard.memory.allocator.model.policy import parse_version, tie_break
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.allocator.replay.program.calls import program, usable_bytes
from nbguard.memory.allocator.replay.program.run import Run, WhatIfOutcome
from nbguard.memory.allocator.replay.replay import DeviceReplay, RecordedDevice, best_play, recorded_device
from nbguard.memory.allocator.snapshot.snapshot import Snapshot
from nbguard.render.result import Result

Progress = Callable[[int, int], None]
"""Called after each run with (runs done, runs in all)."""

_ORDERS = (Addresses(), Addresses("descending"), Addresses("scattered", 1), Addresses("scattered", 2))


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

    kind: ClassVar[str] = "device_whatif"
    view: ClassVar[str] = "nbguard.memory.allocator.replay.view:whatif_blocks"
    data: ClassVar[str] = "nbguard.memory.allocator.replay.data:whatif_data"
    label: ClassVar[str] = "what if the allocator had other settings"

    replay: DeviceReplay  # under the recorded settings, with the share of events reproduced
    rows: tuple[WhatIfRow, ...]  # the recorded settings first
    capacity: int | None  # bytes that the allocator can have in all; None if unknown, and no request is refused
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
    settings = [source.settings, *dict.fromkeys(tried or _choice(source, version))]
    settings[1:] = [choice for choice in settings[1:] if choice != source.settings]
    replay = best_play(source)[1]
    space = capacity if capacity is not None else _capacity(source, snapshot)
    orders = _ORDERS if tie_break(parse_version(replay.torch_version)) == "address" else _ORDERS[:1]
    calls = program(source)
    rows = []
    for number, choice in enumerate(settings):
        outcomes = []
        for index, order in enumerate(orders):
            outcomes.append(Run(source, calls, choice, space, replay.torch_version, replace(order)).outcome())
            if progress is not None:
                progress(number * len(orders) + index + 1, len(settings) * len(orders))
        rows.append(WhatIfRow(choice, tuple(outcomes), is_recorded=not number))
    return WhatIf(replay=replay, rows=tuple(rows), capacity=space, requests=calls.requests, snapshot=snapshot)


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
