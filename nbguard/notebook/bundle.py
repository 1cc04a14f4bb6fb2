"""One mimebundle per result: text for a terminal, HTML for a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbguard.cleanup.plan.parking import Unparked
from nbguard.cleanup.plan.plan import Outcome, Plan
from nbguard.memory.explain import Why
from nbguard.memory.processes import Zombies
from nbguard.memory.recording import Recording
from nbguard.memory.simulated import SimulationState
from nbguard.out_of_memory.card import OomCard
from nbguard.profiler.analysis.report import FitReport
from nbguard.profiler.render.fit import fit_html, fit_text
from nbguard.render.history import history_html, history_text
from nbguard.render.html import outcome_html, plan_html, report_html, unparked_html, why_html, zombies_html
from nbguard.render.ledger import switches_html, switches_text
from nbguard.render.map import map_html, map_text
from nbguard.render.oom import oom_html, oom_text
from nbguard.render.payload import SCHEMA, payload, to_json
from nbguard.render.simulate import state_html, state_text
from nbguard.render.text import outcome_text, plan_text, report_text, unparked_text, why_text, zombies_text
from nbguard.reports.cell_ledger import History
from nbguard.reports.memory_map import MemoryMap
from nbguard.reports.report import Report
from nbguard.reports.switches import Switches
from nbguard.snapshots.diff import SnapshotDiff
from nbguard.snapshots.render_saved import (
    diff_html,
    diff_text,
    recording_html,
    recording_text,
    saved_html,
    saved_text,
    written_html,
    written_text,
)
from nbguard.snapshots.render_whatif import whatifs_html, whatifs_json, whatifs_text
from nbguard.snapshots.report import SnapshotReport
from nbguard.snapshots.save import SnapshotFiles
from nbguard.snapshots.whatif import WhatIfs

_Renderer = Callable[..., str]
_RENDERERS: dict[type, tuple[_Renderer, _Renderer]] = {
    Report: (report_text, report_html),
    Plan: (plan_text, plan_html),
    Outcome: (outcome_text, outcome_html),
    Unparked: (unparked_text, unparked_html),
    OomCard: (oom_text, oom_html),
    Zombies: (zombies_text, zombies_html),
    Why: (why_text, why_html),
    History: (history_text, history_html),
    MemoryMap: (map_text, map_html),
    SimulationState: (state_text, state_html),
    Switches: (switches_text, switches_html),
    Recording: (recording_text, recording_html),
    SnapshotFiles: (written_text, written_html),
    SnapshotReport: (saved_text, saved_html),
    SnapshotDiff: (diff_text, diff_html),
    WhatIfs: (whatifs_text, whatifs_html),
    FitReport: (fit_text, fit_html),
}

KINDS: dict[type, str] = {
    Report: "report",
    Plan: "plan",
    Outcome: "outcome",
    Unparked: "unparked",
    OomCard: "oomcard",
    Zombies: "zombies",
    Why: "why",
    History: "history",
    MemoryMap: "memorymap",
    SimulationState: "simulationstate",
    Switches: "switches",
    Recording: "recording",
    SnapshotFiles: "written",
    SnapshotReport: "saved",
    SnapshotDiff: "diff",
    WhatIfs: "whatif",
    FitReport: "fitreport",
}
"""The `kind` of each result in JSON. Readers depend on it: it stays when a class is renamed."""


def mimebundle(result: Any, **details: int) -> dict[str, Any]:
    """Return `result` as {'text/plain': ..., 'text/html': ...}; `limit=12`: rows of a report, a history or a map."""
    text, html = _RENDERERS[type(result)]
    return {"text/plain": text(result, **details), "text/html": html(result, **details)}


def json_bundle(result: Any) -> dict[str, Any]:
    """Return `result` as {'text/plain': JSON text, 'application/json': data}."""
    kind = KINDS[type(result)]
    is_whatif = type(result) is WhatIfs
    data = {"schema": SCHEMA, "kind": kind, **whatifs_json(result)} if is_whatif else payload(result, kind)
    return {"text/plain": to_json(data), "application/json": data}
