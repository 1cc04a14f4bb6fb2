"""The diagnosis of a snapshot file as blocks, the answer first, then the holders, the settings that were tried, the map."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.allocator.replay.view import note_blocks, trial_blocks
from nbguard.memory.allocator.replay.whatif import recommendation, recorded_requests
from nbguard.memory.reports.map_view import map_blocks
from nbguard.memory.snapshots.diagnosis import RefusedRequest, SnapshotDiagnosis
from nbguard.memory.snapshots.saved_view import saved_blocks
from nbguard.render.blocks import Block, Line, Listing, Section
from nbguard.units import counted, format_bytes

_NO_TRACE = (
    "The file has no history, so the cause is not known. torch.cuda.memory._record_memory_history() before the run records one."
)
_NO_REQUEST = (
    "The recorded history contains no request, so the cause is not known. "
    "torch.cuda.memory._record_memory_history(max_entries=100_000) before the run keeps that many events."
)


def diagnosis_blocks(diagnosis: SnapshotDiagnosis, limit: int = 12) -> Iterator[Block]:
    """Yield the diagnosis; at most `limit` holders per device, and segments per pool."""
    yield Section("Why", diagnosis.report.file)
    for refusal in diagnosis.refusals:
        yield Line(_refused(refusal), "strong")
    if diagnosis.trials and not diagnosis.refusals:
        has_requests = any(recorded_requests(trial) for trial in diagnosis.trials)
        yield Line("No request failed in the recorded history." if has_requests else _NO_REQUEST, "strong")
    if not diagnosis.trials and not diagnosis.untried:
        yield Line(_NO_TRACE)
    for trial in diagnosis.trials:
        device = f"cuda:{trial.replay.device}: " if len(diagnosis.trials) > 1 else ""
        yield Line(device + recommendation(trial))
    if diagnosis.untried:
        yield Listing(sentences=diagnosis.untried)
    yield Section("Who held the memory", "when the file was written")
    yield from saved_blocks(diagnosis.report, limit)
    for trial in diagnosis.trials:
        yield from trial_blocks(trial, "Other settings")
        yield from note_blocks(trial)
    yield from map_blocks(diagnosis.map, limit)


def _limit(refusal: RefusedRequest) -> str:
    """Return a sentence on why a device that had enough left did not give it; empty where it had not enough."""
    if not refusal.is_over_a_limit:
        return ""
    if refusal.fraction is not None and refusal.fraction < 1:
        return f" This process may take only {refusal.fraction:.3g} of the device (torch.cuda.set_per_process_memory_fraction)."
    return " A limit on this process refused it (torch.cuda.set_per_process_memory_fraction), or memory came free just then."


def _refused(refusal: RefusedRequest) -> str:
    """Return the failed request in a sentence."""
    line = f" in {refusal.site}" if refusal.site else ""
    free = "" if refusal.free is None else f"; the device had {format_bytes(refusal.free)} left"
    first = f" ({counted(refusal.refusals, 'request')} failed, this is the first)" if refusal.refusals > 1 else ""
    return (
        f"{refusal.device} ran out of memory: {format_bytes(refusal.size)} was asked for{line}{free}{first}.{_limit(refusal)}"
    )
