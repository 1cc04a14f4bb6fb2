"""Replays and what-ifs as text for a terminal and as plain data for JSON."""

from __future__ import annotations

from typing import Any

from nbguard.allocator.replay.advice import notes, recommendation, requests_name, settings_name
from nbguard.allocator.replay.replay import DeviceReplay
from nbguard.allocator.replay.whatif import WhatIf, WhatIfOutcome, WhatIfRow
from nbguard.allocator.snapshot.snapshot import Event
from nbguard.units import format_bytes

_HEAD = ("settings", "peak reserved", "out of memory", "retries", "driver calls")


def replay_text(name: str, replays: tuple[DeviceReplay, ...]) -> str:
    """Return how much of each device's trace was reproduced."""
    lines = [] if replays else [f"{name}: no device is in it"]
    for replay in replays:
        lines += [f"{name}  cuda:{replay.device}  {self_check(replay)}", f"  {_state(replay)}"]
        if replay.repairs:
            lines.append(f"  {replay.repairs} facts on the state before the trace were told by the trace itself")
    return "\n".join(lines)


def self_check(replay: DeviceReplay) -> str:
    """Return 'x of y events reproduced', and where the first is not."""
    if not replay.events:
        return "no trace was recorded"
    text = f"{replay.reproduced} of {replay.events} events reproduced"
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


def replay_json(name: str, replays: tuple[DeviceReplay, ...]) -> dict[str, Any]:
    """Return the replays of a file: sums over its devices, the largest peak, and each device."""
    devices = [
        {
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
            if replay.first_difference is None
            else {
                "event": replay.first_difference.position,
                "recorded": replay.first_difference.recorded,
                "modelled": replay.first_difference.modelled,
            },
        }
        for replay in replays
    ]
    return {
        "file": name,
        "events": sum(replay.events for replay in replays),
        "reproduced": sum(replay.reproduced for replay in replays),
        "peak_reserved": max((replay.peak_reserved for replay in replays), default=0),
        "final_blocks_equal": all(replay.is_final_equal for replay in replays),
        "devices": devices,
    }


def whatif_text(name: str, found: WhatIf) -> str:
    """Return the self-check, the table of settings, the recommendation and what to know."""
    if not found.replay.events:
        return (
            f"{name}  cuda:{found.replay.device}  no trace was recorded, so there is nothing to run again; "
            "torch.cuda.memory._record_memory_history() starts one."
        )
    capacity = f" of {format_bytes(found.capacity)}" if found.capacity is not None else ""
    table = [_HEAD, *(_cells(row) for row in found.rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEAD))]
    lines = [f"{name}  cuda:{found.replay.device}  {self_check(found.replay)}", f"  {requests_name(found)}{capacity}", ""]
    for cells in table:
        aligned = [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        lines.append("  " + "   ".join(aligned))
    lines += ["", f"  {recommendation(found)}", *(f"  ○ {note}" for note in notes(found))]
    return "\n".join(lines)


def _cells(row: WhatIfRow) -> tuple[str, ...]:
    worst = row.worst
    peak = format_bytes(row.peak)
    if row.least_peak != row.peak:
        peak = f"{format_bytes(row.least_peak)} – {peak}"
    refusal = "no" if worst.refusal is None else f"request {worst.refusal.number} ({format_bytes(worst.refusal.size)})"
    name = settings_name(row) + (" (as recorded)" if row.is_recorded else "")
    return name, peak, refusal, str(worst.retries), str(worst.driver_calls)


def whatif_json(name: str, found: WhatIf) -> dict[str, Any]:
    """Return a what-if as plain data; bytes as integers."""
    return {
        "file": name,
        "device": found.replay.device,
        "events": found.replay.events,
        "reproduced": found.replay.reproduced,
        "recorded_peak_reserved": found.replay.peak_reserved,
        "capacity": found.capacity,
        "requests": found.requests,
        "rows": [
            {"settings": row.settings.conf(), "recorded": row.is_recorded, "peak_reserved_least": row.least_peak}
            | {"peak_reserved": row.peak}
            | _outcome(row.worst)
            for row in found.rows
        ],
        "recommendation": recommendation(found),
        "notes": list(notes(found)),
    }


def _outcome(outcome: WhatIfOutcome) -> dict[str, Any]:
    refusal = outcome.refusal
    return {
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
