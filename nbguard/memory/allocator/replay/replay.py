"""Replay of recorded traces, with the share of events that the model reproduces, which every what-if relies on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.errors import SettingsError, SnapshotError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.blocks import Addresses, Driver, SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings, TieBreak, parse_version, range_size, tie_break
from nbguard.memory.allocator.replay.player import Player
from nbguard.memory.allocator.replay.rollback import InitialState, roll_back
from nbguard.memory.allocator.replay.start import StartCorrections, settle
from nbguard.memory.allocator.snapshot.snapshot import Event, Snapshot, SnapshotSegment, Trace
from nbguard.render.result import Result

_MOST_PASSES = 40
"""Passes over a trace to learn the state at its start."""

_MOST_EVENTS = 4_000_000
"""Events played over all passes, at least three; a start that is still unknown then stays so."""

_VERSION_OF: dict[TieBreak, str] = {"address": "2.11", "block": "2.12", "segment": "2.15"}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event at which model and recorded allocator part."""

    position: int  # in the trace
    recorded: Event
    modelled: Event | None  # None where the model did nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReplay(Result):
    """The replay of one device under the recorded settings."""

    kind: ClassVar[str] = "device_replay"
    view: ClassVar[str] = "nbguard.memory.allocator.replay.view:device_replay_blocks"
    data: ClassVar[str] = "nbguard.memory.allocator.replay.view:replay_data"
    label: ClassVar[str] = "replay of a recorded trace"

    device: int  # number of the device
    events: int  # of the allocator, in the trace
    reproduced: int  # events that the model reproduces in order, action, address, size and stream
    peak_reserved: int  # bytes, of the model during the trace (`reserved_bytes.all.peak`)
    peak_allocated: int  # bytes, of the model during the trace (`allocated_bytes.all.peak`)
    reserved: int  # bytes, of the model at the end (`reserved_bytes.all.current`)
    is_final_equal: bool  # the model ends with the segments and blocks of the snapshot
    first_difference: Difference | None  # None where every event is reproduced
    repairs: int  # facts on the state before the trace that were inferred from it
    live_at_start: int  # blocks in use when the trace begins
    settings: AllocatorSettings  # recorded, else PyTorch's defaults
    torch_version: str  # whose rules were applied
    is_version_known: bool  # the version is known from the file, its sidecar or the caller

    @property
    def is_exact(self) -> bool:
        """Say whether every event and the final state are as recorded."""
        return self.reproduced == self.events and self.is_final_equal


@dataclass(frozen=True, slots=True)
class FileReplay(Result):
    """The replays of all devices of a file."""

    kind: ClassVar[str] = "replay"
    view: ClassVar[str] = "nbguard.memory.allocator.replay.view:file_replay_blocks"
    data: ClassVar[str] = "nbguard.memory.allocator.replay.view:file_replay_data"
    label: ClassVar[str] = "replay of a recorded trace"

    file: str  # its name
    devices: tuple[DeviceReplay, ...]  # in the order of their numbers

    @property
    def is_exact(self) -> bool:
        """Say whether every event and the final state of each device are as recorded."""
        return all(device.is_exact for device in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDevice:
    """One device of a snapshot with the state before its trace, ready to be played."""

    device: int  # number of the device
    segments: tuple[SnapshotSegment, ...]  # at the end of the trace
    trace: Trace  # the history of this device
    start: InitialState  # the state before the first event of the trace
    settings: AllocatorSettings  # recorded, else PyTorch's defaults
    torch_version: str  # whose rules apply
    is_version_known: bool  # the version is known from the file, its sidecar or the caller
    capacity: int | None = None  # bytes of the device; None if unknown
    fraction: float | None = None  # share of the device that the process might take; None if unknown


def replay(
    snapshot: Snapshot, torch_version: str | None = None, capacity: int | None = None, fraction: float | None = None
) -> tuple[DeviceReplay, ...]:
    """Replay the trace of every device under the recorded settings.

    Args:
        snapshot: from `load_snapshot`.
        torch_version: that recorded the trace, where neither the file nor its sidecar has it.
        capacity: bytes of each device, where the sidecar has none.
        fraction: share of a device that the process might take, where the sidecar has none.

    Raises:
        SnapshotError: a trace and the segments at its end contradict each other.
        SnapshotError: the recorded settings are none that PyTorch takes.
    """
    return tuple(
        best_play(recorded_device(snapshot, device, torch_version, capacity, fraction))[1] for device in snapshot.devices
    )


def recorded_device(
    snapshot: Snapshot,
    device: int,
    torch_version: str | None = None,
    capacity: int | None = None,
    fraction: float | None = None,
) -> RecordedDevice:
    """Return one device of a snapshot, rolled back to the start of its trace."""
    sidecar = snapshot.sidecar
    version, is_known = _version(snapshot, torch_version or sidecar.torch_version)
    settings = _settings(snapshot, parse_version(version) if is_known else None)
    segments = tuple(segment for segment in snapshot.segments if segment.device == device)
    trace = snapshot.trace(device).at_hand()
    if capacity is None and device < len(sidecar.totals):
        capacity = sidecar.totals[device]
    if fraction is None and device < len(sidecar.fractions):
        fraction = sidecar.fractions[device]
    start = roll_back(segments, trace, settings.large_segment, range_size(capacity, settings.large_segment))
    return RecordedDevice(
        device=device,
        segments=segments,
        trace=trace,
        start=start,
        settings=settings,
        torch_version=version,
        is_version_known=is_known,
        capacity=capacity,
        fraction=fraction,
    )


def final_model(device: RecordedDevice, driver: Driver | None = None) -> CachingAllocator:
    """Return a model in the state at the end of a trace, for questions such as "which request would fit now?".

    Args:
        device: from `recorded`.
        driver: serves later requests; by default one with the bytes that `capacity` leaves.
    """
    model = best_play(device)[0].model
    model.driver = driver or SimulatedDriver(device.capacity, used=model.reserved, addresses=Addresses(edge=1 << 54))
    return model


def best_play(device: RecordedDevice) -> tuple[Player, DeviceReplay]:
    """Play a trace by the rules that reproduce most of it, pass by pass, while it shows more of the state at its start."""
    versions = [device.torch_version]
    if not device.is_version_known and tie_break(parse_version(device.torch_version)) != "address":
        versions.append(_VERSION_OF["block"])
    best: tuple[Player, DeviceReplay] | None = None
    for version in versions:
        corrections = StartCorrections()
        for _ in range(min(_MOST_PASSES, max(3, _MOST_EVENTS // (len(device.trace.events) + 1)))):
            played = _play(replace(device, torch_version=version), corrections)
            if best is None or played[1].reproduced >= best[1].reproduced:
                best = played
            if not played[0].learnt:
                break
            settle(played[0].assumptions, corrections)
        if best is not None and best[1].is_exact:
            break
    assert best is not None
    return best


def _play(device: RecordedDevice, corrections: StartCorrections) -> tuple[Player, DeviceReplay]:
    model = CachingAllocator(device.settings, device.capacity, device.fraction, device.torch_version)
    player = Player(model, device.trace, device.start, corrections)
    player.play()
    first = None
    if player.differences:
        position = player.differences[0]
        first = Difference(position, device.trace.events[position], player.first)
    events = len(device.trace.events)
    return player, DeviceReplay(
        device=device.device,
        events=events,
        reproduced=events - len(player.differences),
        peak_reserved=model.peak_reserved,
        peak_allocated=model.peak_allocated,
        reserved=model.reserved,
        is_final_equal=_is_same(model, device.segments),
        first_difference=first,
        repairs=len(corrections),
        live_at_start=len(device.start.blocks),
        settings=device.settings,
        torch_version=device.torch_version,
        is_version_known=device.is_version_known,
    )


def _is_same(model: CachingAllocator, segments: tuple[SnapshotSegment, ...]) -> bool:
    """Return whether the model has the segments and blocks of the snapshot."""
    mine = [
        (
            segment["address"],
            segment["stream"],
            segment["is_expandable"],
            [(block["address"], block["size"], block["state"], _requested(block)) for block in segment["blocks"]],
        )
        for segment in model.segments()
    ]
    theirs = [
        (
            segment.address,
            segment.stream,
            segment.is_expandable,
            [
                (block.address, block.size, block.state, block.requested if block.state != "inactive" else 0)
                for block in segment.blocks
            ],
        )
        for segment in segments
    ]
    return mine == theirs


def _requested(block: dict[str, object]) -> object:
    return block["requested_size"] if block["state"] != "inactive" else 0


def _settings(snapshot: Snapshot, version: tuple[int, int] | None) -> AllocatorSettings:
    conf = snapshot.settings if snapshot.settings is not None else snapshot.sidecar.settings
    try:
        settings = AllocatorSettings.recorded(conf or "", None if version is None or version >= (2, 10) else (2, 9))
    except SettingsError as error:  # of the file, and no choice of the user's
        raise SnapshotError(f"its recorded settings cannot be used: {error}") from None
    # The table is the value of the string by the rules of the version that wrote it.
    return replace(settings, divisions=snapshot.divisions) if snapshot.divisions and any(snapshot.divisions) else settings


def _version(snapshot: Snapshot, given: str | None) -> tuple[str, bool]:
    """Return the version whose rules apply, and whether it is known; if not, it is the oldest that writes such fields."""
    if given is not None:
        parse_version(given)
        return given, True
    hints = snapshot.hints
    if hints & {"internal_metadata", "host_segments", "action annotate"}:
        return _VERSION_OF["segment"], True
    if "pool_id" in hints:
        return _VERSION_OF["segment"], False
    return _VERSION_OF["address"], False
