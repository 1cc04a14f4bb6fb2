"""Replays and what-ifs of one device as blocks, in a notebook and on the command line."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.allocator.replay.advice import notes, recommendation, requests_name, settings_name
from nbguard.memory.allocator.replay.replay import DeviceReplay, FileReplay
from nbguard.memory.allocator.replay.whatif import WhatIf, WhatIfRow
from nbguard.memory.allocator.snapshot.events import Event
from nbguard.render.blocks import Block, Line, Listing, Section, Table, TableRow, Title
from nbguard.units import counted, format_bytes

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
