"""Replays and what-ifs as plain data for JSON; bytes as integers."""

from __future__ import annotations

from typing import Any

from nbguard.allocator.replay.advice import notes, recommendation
from nbguard.allocator.replay.replay import DeviceReplay
from nbguard.allocator.replay.whatif import WhatIf, WhatIfOutcome


def file_replay_data(name: str, replays: tuple[DeviceReplay, ...]) -> dict[str, Any]:
    """Return the replays of a file: sums over its devices, the largest peak, and each device."""
    return {
        "file": name,
        "events": sum(replay.events for replay in replays),
        "reproduced": sum(replay.reproduced for replay in replays),
        "peak_reserved": max((replay.peak_reserved for replay in replays), default=0),
        "final_blocks_equal": all(replay.is_final_equal for replay in replays),
        "devices": [replay_data(replay) for replay in replays],
    }


def replay_data(replay: DeviceReplay) -> dict[str, Any]:
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


def whatif_data(whatif: WhatIf) -> dict[str, Any]:
    """Return the what-if of one device."""
    return {
        "device": whatif.replay.device,
        "events": whatif.replay.events,
        "reproduced": whatif.replay.reproduced,
        "recorded_peak_reserved": whatif.replay.peak_reserved,
        "capacity": whatif.capacity,
        "requests": whatif.requests,
        "rows": [
            {"settings": row.settings.conf(), "recorded": row.is_recorded, "peak_reserved_least": row.least_peak}
            | {"peak_reserved": row.peak}
            | _run(row.worst)
            for row in whatif.rows
        ],
        "recommendation": recommendation(whatif),
        "notes": list(notes(whatif)),
    }


def _run(outcome: WhatIfOutcome) -> dict[str, Any]:
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
