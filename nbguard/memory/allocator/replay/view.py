"""Replays and what-ifs of one device as blocks, in a notebook and on the command line, and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from nbguard.memory.allocator.replay.replay import DeviceReplay, FileReplay
from nbguard.memory.allocator.replay.whatif import WhatIf, WhatIfRow, notes, recommendation, requests_name, settings_name
from nbguard.memory.allocator.snapshot.snapshot import Event
from nbguard.render.html import Block, Line, Listing, Section, Table, TableRow, Title
from nbguard.units import counted, format_bytes

# --- Replays and what-ifs as plain data for JSON; bytes as integers.


class DifferenceData(TypedDict):
    """The first event at which model and recorded allocator part."""

    event: int  # its position in the trace
    recorded: Event
    modelled: Event | None  # null where the model did nothing


class ReplayData(TypedDict):
    """The replay of one device under the recorded settings."""

    device: int  # its number
    events: int  # of the allocator, in the trace
    reproduced: int  # events that the model reproduces in order, action, address, size and stream
    peak_reserved: int  # bytes, of the model during the trace
    peak_allocated: int  # bytes, of the model during the trace
    reserved: int  # bytes, of the model at the end
    final_blocks_equal: bool  # the model ends with the segments and blocks of the snapshot
    repairs: int  # facts on the state before the trace that were inferred from it
    settings: str  # as in PYTORCH_ALLOC_CONF; empty for PyTorch's defaults
    rules_of_torch: str  # the version of PyTorch whose rules were applied
    first_difference: DifferenceData | None  # null where every event is reproduced


class FileReplayData(TypedDict):
    """The replays of a file: sums over its devices, the largest peak, and each device."""

    file: str  # its name
    events: int  # of the allocator, in all traces
    reproduced: int  # events that the model reproduces in order, action, address, size and stream
    peak_reserved: int  # bytes, the largest of the devices
    final_blocks_equal: bool  # of all devices
    devices: list[ReplayData]  # in the order of their numbers


class RefusalData(TypedDict):
    """The first request that is refused under some settings. Sizes are bytes."""

    request: int  # its number among the requests
    event: int  # its position in the trace; -1: it is older
    size: int  # asked for
    allocated: int  # then
    reserved: int  # then


class SettingsData(TypedDict):
    """One row: the recorded run under some settings, and the worst order of addresses of those that were tried."""

    settings: str  # as in PYTORCH_ALLOC_CONF; empty for PyTorch's defaults
    recorded: bool  # these are the settings of the recorded run
    peak_reserved_least: int  # bytes, the lowest over the orders of addresses
    peak_reserved: int  # bytes, the highest
    peak_allocated: int  # bytes
    out_of_memory: RefusalData | None  # null if no request is refused
    passed: int  # requests that were refused when recorded, and served in this run
    retries: int  # requests that had the cache emptied
    driver_calls: int  # to cudaMalloc and cudaFree, or to map and unmap pages


class _OfFile(TypedDict, total=False):
    file: str  # its name; "this kernel" for the history of this process


class WhatIfData(_OfFile):
    """The recorded run of one device under several settings, the recorded ones first."""

    device: int  # its number
    events: int  # of the allocator, in the trace
    reproduced: int  # events that the model reproduces
    recorded_peak_reserved: int  # bytes
    capacity: int | None  # bytes that the allocator can have in all; null if unknown, and no request is refused
    requests: int  # in the trace, and those for blocks from before it
    rows: list[SettingsData]  # a setting each, the recorded ones first
    recommendation: str  # in a sentence
    notes: list[str]  # limits of these figures, in words


def file_replay_data(replay: FileReplay) -> FileReplayData:
    """Return the replays of a file."""
    return {
        "file": replay.file,
        "events": sum(device.events for device in replay.devices),
        "reproduced": sum(device.reproduced for device in replay.devices),
        "peak_reserved": max((device.peak_reserved for device in replay.devices), default=0),
        "final_blocks_equal": all(device.is_final_equal for device in replay.devices),
        "devices": [replay_data(device) for device in replay.devices],
    }


def replay_data(replay: DeviceReplay) -> ReplayData:
    """Return the replay of one device."""
    first = replay.first_difference
    return {
        "device": replay.device,
        "events": replay.events,
        "reproduced": replay.reproduced,
        "peak_reserved": replay.peak_reserved,
        "peak_allocated": replay.peak_allocated,
        "reserved": replay.reserved,
        "final_blocks_equal": replay.is_final_equal,
        "repairs": replay.repairs,
        "settings": replay.settings.conf(),
        "rules_of_torch": replay.torch_version,
        "first_difference": None
        if first is None
        else {"event": first.position, "recorded": first.recorded, "modelled": first.modelled},
    }


def whatif_data(whatif: WhatIf) -> WhatIfData:
    """Return the what-if of one device."""
    return {
        "device": whatif.replay.device,
        "events": whatif.replay.events,
        "reproduced": whatif.replay.reproduced,
        "recorded_peak_reserved": whatif.replay.peak_reserved,
        "capacity": whatif.capacity,
        "requests": whatif.requests,
        "rows": [_row(row) for row in whatif.rows],
        "recommendation": recommendation(whatif),
        "notes": list(notes(whatif)),
    }


def _row(row: WhatIfRow) -> SettingsData:
    outcome = row.worst
    refusal = outcome.refusal
    return {
        "settings": row.settings.conf(),
        "recorded": row.is_recorded,
        "peak_reserved_least": row.least_peak,
        "peak_reserved": row.peak,
        "peak_allocated": outcome.peak_allocated,
        "out_of_memory": None
        if refusal is None
        else {
            "request": refusal.number,
            "event": refusal.position,
            "size": refusal.size,
            "allocated": refusal.allocated,
            "reserved": refusal.reserved,
        },
        "passed": outcome.passed,
        "retries": outcome.retries,
        "driver_calls": outcome.driver_calls,
    }


_NAMES = ("settings", "peak reserved", "out of memory", "retries", "driver calls")


def file_replay_blocks(replay: FileReplay) -> Iterator[Block]:
    """Yield the share of each device's trace that was reproduced."""
    if not replay.devices:
        yield Title(f"{replay.file}: no device is in it")
    for device in replay.devices:
        yield from device_replay_blocks(device, replay.file)


def device_replay_blocks(replay: DeviceReplay, name: str = "replay") -> Iterator[Block]:
    """Yield the share of one device's trace that was reproduced; `name`: of the file."""
    yield Section(name, f"cuda:{replay.device}", _self_check(replay))
    yield Line(_state(replay))
    if replay.repairs:
        yield Line(f"{replay.repairs} facts on the state before the trace follow from the trace itself")


def _self_check(replay: DeviceReplay) -> str:
    """Return 'x of y events reproduced', and the first difference."""
    if not replay.events:
        return "no trace was recorded"
    text = f"{replay.reproduced:,} of {counted(replay.events, 'event')} reproduced"
    first = replay.first_difference
    if first is None:
        return text
    instead = "nothing" if first.modelled is None else _event(first.modelled)
    return f"{text} (first difference at event {first.position}: recorded {_event(first.recorded)}, modelled {instead})"


def _event(event: Event) -> str:
    action, address, size, stream = event
    return f"{action} {format_bytes(size)} at {address:#x}" + (f" on stream {stream:#x}" if stream else "")


def _state(replay: DeviceReplay) -> str:
    final = "as in the snapshot" if replay.is_final_equal else "NOT as in the snapshot"
    settings = replay.settings.conf() or "default settings"
    return f"peak reserved {format_bytes(replay.peak_reserved)} · segments and blocks at the end {final} · {settings}"


def whatif_blocks(whatif: WhatIf, name: str = "what if") -> Iterator[Block]:
    """Yield the self-check of the replay, the table of settings, the recommendation and notes; `name`: of the file."""
    yield from trial_blocks(whatif, name)
    if whatif.replay.events:
        yield Line(recommendation(whatif), "strong")
        yield from note_blocks(whatif)


def trial_blocks(whatif: WhatIf, name: str) -> Iterator[Block]:
    """Yield the self-check of the replay and the table of the settings that were tried."""
    device = f"cuda:{whatif.replay.device}"
    if not whatif.replay.events:
        start = "torch.cuda.memory._record_memory_history() starts one."
        yield Section(name, device, f"no trace was recorded, so there is nothing to run again; {start}")
        return
    yield Section(name, device, _self_check(whatif.replay))
    capacity = f" of {format_bytes(whatif.capacity)}" if whatif.capacity is not None else ""
    yield Line(f"{requests_name(whatif)}{capacity}", "dim")
    rows = tuple(TableRow(cells=_cells(row)) for row in whatif.rows)
    yield Table(names=_NAMES, rows=rows, figures=(1, 2, 3, 4), widest=100)


def note_blocks(whatif: WhatIf) -> Iterator[Block]:
    """Yield notes that a reader of the figures needs, if any."""
    if sentences := tuple(notes(whatif)):
        yield Listing(sentences=sentences)


def _cells(row: WhatIfRow) -> tuple[str, ...]:
    worst = row.worst
    peak = format_bytes(row.peak)
    if row.least_peak != row.peak:
        peak = f"{format_bytes(row.least_peak)} – {peak}"
    refusal = "no" if worst.refusal is None else f"request {worst.refusal.number} ({format_bytes(worst.refusal.size)})"
    name = f"`{settings_name(row)}`" + (" (as recorded)" if row.is_recorded else "")
    return name, peak, refusal, str(worst.retries), str(worst.driver_calls)
