"""The diagnosis of a snapshot file, with failed requests, holders, settings that would have helped, and the map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.replay.view import WhatIfData, note_blocks, trial_blocks, whatif_data
from nbguard.memory.allocator.replay.whatif import WhatIf, recommendation, recorded_requests, what_if
from nbguard.memory.allocator.snapshot.snapshot import Snapshot
from nbguard.memory.core import advice
from nbguard.memory.core.device_view import holder_rows, holder_table, parts_bar, pool_table
from nbguard.memory.reports.map_view import map_blocks
from nbguard.memory.reports.memory_map import MemoryMap
from nbguard.memory.reports.report import DeviceReport
from nbguard.memory.snapshots.load import NotebookNames, Progress, load_named, site_of
from nbguard.memory.snapshots.report import DeviceDiff, SizeChange, SnapshotDiff, SnapshotReport, map_of, report_of
from nbguard.plain_data import to_plain
from nbguard.render.html import Block, Line, Listing, Section, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.units import counted, format_bytes, format_column, signed, unit_of

if TYPE_CHECKING:
    from nbguard.memory.snapshots.save import SnapshotFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRequest:
    """The first request of a device that found no memory, as the trace has it. Sizes are bytes."""

    device: str  # "cuda:0"
    size: int  # that was asked for
    free: int | None  # that the driver had left then; None if not recorded
    site: str  # the line that asked: `train.py, line 12 in forward()`; empty where no stack was recorded
    refusals: int  # out-of-memory events in the device's trace, this one among them
    fraction: float | None = None  # share of the device that the process may take; None if unknown

    @property
    def is_over_a_limit(self) -> bool:
        """Whether the device itself had enough left, so that a limit on the process refused the request."""
        return self.free is not None and self.free >= self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDiagnosis(Result):
    """All that one snapshot file tells about why its memory ran out, or how full it was."""

    kind: ClassVar[str] = "snapshot_diagnosis"
    view: ClassVar[str] = "nbguard.memory.snapshots.diagnosis:diagnosis_blocks"
    data: ClassVar[str] = "nbguard.memory.snapshots.diagnosis:diagnosis_data"

    report: SnapshotReport  # the holders and pools at the end
    map: MemoryMap  # the segments and blocks at the end
    refusals: tuple[RefusedRequest, ...]  # of each device that ran out of memory
    trials: tuple[WhatIf, ...]  # of each device with a trace: the same run under other settings
    untried: tuple[str, ...] = ()  # sentences on devices whose trace cannot be run again


class DiagnosisData(TypedDict):
    """All that one snapshot file tells about why its memory ran out, or how full it was."""

    refusals: list[Annotated[dict[str, Any], RefusedRequest]]  # the first refused request of each device that ran out
    trials: list[WhatIfData]  # of each device with a trace: the same run under other settings
    untried: list[str]  # sentences on devices whose trace cannot be run again
    report: Annotated[dict[str, Any], SnapshotReport]  # the holders and pools at the end
    map: Annotated[dict[str, Any], MemoryMap]  # the segments and blocks at the end


def diagnosis_data(diagnosis: SnapshotDiagnosis) -> DiagnosisData:
    """Return the fields of the JSON, which are the parts, each with its kind."""
    return {
        "refusals": [to_plain(refusal) for refusal in diagnosis.refusals],
        "trials": [whatif_data(trial) for trial in diagnosis.trials],
        "untried": list(diagnosis.untried),
        "report": diagnosis.report.to_data(),
        "map": diagnosis.map.to_data(),
    }


def diagnose_snapshot(
    path: str | Path,
    confs: Iterable[str] = (),
    torch_version: str | None = None,
    capacity: int | None = None,
    fraction: float | None = None,
    progress: Progress | None = None,
    trial_progress: Progress | None = None,
) -> SnapshotDiagnosis:
    """Return the diagnosis of a snapshot file. Nothing of the file is run, and PyTorch is not needed.

    Args:
        path: of the file.
        confs: settings to try, as in `PYTORCH_ALLOC_CONF`; by default a choice that suits the version.
        torch_version: that recorded the file, where neither it nor its sidecar has it.
        capacity: bytes that the allocator can have in all, where nothing in the file tells.
        fraction: share of `capacity` that the process may take, where the sidecar has none.
        progress: called while the file is read.
        trial_progress: called after each run of the recorded requests under some settings, for each device again.

    Raises:
        SettingsError: a string in `confs` is no settings of PyTorch.
        SnapshotError: the file, or the one beside it, cannot be read.
    """
    snapshot, names = load_named(path, progress)
    return diagnosis_of(
        path,
        snapshot,
        names,
        confs,
        torch_version=torch_version,
        capacity=capacity,
        fraction=fraction,
        trial_progress=trial_progress,
    )


def diagnosis_of(
    path: str | Path,
    snapshot: Snapshot,
    names: NotebookNames,
    confs: Iterable[str] = (),
    torch_version: str | None = None,
    capacity: int | None = None,
    fraction: float | None = None,
    trial_progress: Progress | None = None,
) -> SnapshotDiagnosis:
    """Return the diagnosis of a snapshot that was loaded from `path`; the rest as in `diagnose_snapshot`."""
    trials, untried = [], []
    for number in snapshot.devices:
        if snapshot.trace(number).events:
            try:
                trial = what_if(snapshot, number, confs, torch_version, capacity, fraction, progress=trial_progress)
                trials.append(trial)
            except SnapshotError as error:
                untried.append(f"cuda:{number} cannot be run again, because {error}")
    return SnapshotDiagnosis(
        report=report_of(path, snapshot, names),
        map=map_of(path, snapshot, names),
        refusals=tuple(refusals_of(snapshot, fraction)),
        trials=tuple(trials),
        untried=tuple(untried),
    )


def refusals_of(snapshot: Snapshot, fraction: float | None = None) -> Iterator[RefusedRequest]:
    """Yield the first refused request of each device that has one; a fraction that is given wins over the sidecar's."""
    fractions = snapshot.sidecar.fractions
    for number in snapshot.devices:
        trace = snapshot.trace(number)
        places = [place for place, event in enumerate(trace.events) if event[0] == "oom"]
        if places:
            _, free, size, _ = trace.events[places[0]]
            stack = trace.stacks[places[0]] if trace.stacks else -1
            yield RefusedRequest(
                device=f"cuda:{number}",
                size=size,
                free=free if free >= 0 else None,
                site=site_of(snapshot.stacks[stack]) if stack >= 0 else "",
                refusals=len(places),
                fraction=fractions[number] if fraction is None and number < len(fractions) else fraction,
            )


# --- The diagnosis of a snapshot file as blocks, the answer first, then the holders, the settings that were tried, the map


# --- Snapshot files as blocks, on a written one, a report, the changes between two.


_CHANGE_NAMES = ("change", "before", "after")


def written_blocks(written: SnapshotFiles) -> Iterator[Block]:
    """Yield the file that was written, the one beside it, and the facts that they lack."""
    parts = f"{counted(written.segments, 'segment')}, {_entries(written.events)}"
    yield Title(f"{written.path}  {format_bytes(written.nbytes)}: {parts}")
    left = f"; {counted(written.unnamed, 'small holder')} had no room" if written.unnamed else ""
    names = f"version, settings, sizes, {counted(written.holders, 'holder')}{left}"
    yield Line(f"pytorch.org/memory_viz opens it; next to it {written.beside}: {names}")
    if not written.events:
        yield Line(
            "no history was recorded, so it cannot be replayed: " + advice.RECORD_ON.command + ", before the cells in question"
        )


def _entries(number: int) -> str:
    return f"{counted(number, 'entry', 'entries')} of history"


def saved_blocks(saved: SnapshotReport, limit: int = 12) -> Iterator[Block]:
    """Yield the report on a snapshot file; at most `limit` holders per device."""
    version = "PyTorch's version is not known" if saved.torch_version is None else f"PyTorch {saved.torch_version}"
    settings = "settings are not known" if saved.settings is None else saved.settings or "default settings"
    yield Title(f"{saved.file} · {version} · {settings} · {_entries(sum(saved.events))}", "dim")
    for device in saved.report.devices:
        yield from device_blocks(device, limit)
    if saved.notes:
        yield Listing(sentences=saved.notes)


def device_blocks(device: DeviceReport, limit: int) -> Iterator[Block]:
    """Yield the parts, holders and pools of one device of a file."""
    size = "" if device.total is None else f"of {format_bytes(device.total)}"
    yield Section(device.device, device.name, size)
    yield parts_bar(device.parts, device.total)
    yield holder_table(holder_rows(device.holders, device.allocated, limit, opens=""))
    if (pools := pool_table(device.pools)) is not None:
        yield pools


def diff_blocks(diff: SnapshotDiff, limit: int = 12) -> Iterator[Block]:
    """Yield the changes between two files; at most `limit` rows of a table."""
    yield Title(f"{diff.before} → {diff.after}", "dim")
    for device in diff.devices:
        yield from _changes(device, limit)
    if diff.notes:
        yield Listing(sentences=diff.notes)


def _changes(device: DeviceDiff, limit: int) -> Iterator[Block]:
    totals = (f"{row.label} {signed(row.grown)} → {format_bytes(row.after)}" for row in (device.allocated, device.reserved))
    yield Section(device.device, figures=" · ".join(totals))
    for what, rows, total in (("holder", device.holders, device.allocated), ("pool", device.pools, device.reserved)):
        yield _change_table(what, rows, total, limit) if rows else Line(f"no {what} changed", "dim")


def _change_table(what: str, rows: Sequence[SizeChange], total: SizeChange, limit: int) -> Table:
    """Return rows and their total in one unit: the figures shown add up down each column."""
    shown = _fewer(rows, limit)
    unit = unit_of(max(max(row.before, row.after) for row in (*shown, total)))
    columns = []
    for name in ("grown", "before", "after"):
        values = [getattr(row, name) for row in shown]
        same = getattr(total, name) - sum(values)  # unchanged rows are in the total, and not shown
        figures = [*format_column([*values, same], unit)[:-1], *format_column([getattr(total, name)], unit)]
        columns.append([_signed(figure) for figure in figures] if name == "grown" else figures)
    *above, last = zip([*(row.label for row in shown), total.label], *columns, strict=True)
    return Table(
        names=(what, *_CHANGE_NAMES),
        rows=(*(TableRow(cells=cells) for cells in above), TableRow(cells=last, kind="sum")),
        figures=(1, 2, 3),
    )


def _fewer(rows: Sequence[SizeChange], limit: int) -> list[SizeChange]:
    """Return at most `limit` rows, and the rest in one: the column adds up."""
    rest = rows[limit:]
    if len(rest) < 2:
        return list(rows)
    before, after = sum(row.before for row in rest), sum(row.after for row in rest)
    return [*rows[:limit], SizeChange(f"{len(rest)} more", before, after, after - before)]


def _signed(figure: str) -> str:
    return figure.replace("-", "−") if figure.startswith("-") else f"+{figure}"


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
        yield Line(refused(refusal), "strong")
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


def refused(refusal: RefusedRequest) -> str:
    """Return the failed request in a sentence."""
    line = f" in {refusal.site}" if refusal.site else ""
    free = "" if refusal.free is None else f"; the device had {format_bytes(refusal.free)} left"
    first = f" ({counted(refusal.refusals, 'request')} failed, this is the first)" if refusal.refusals > 1 else ""
    return (
        f"{refusal.device} ran out of memory: {format_bytes(refusal.size)} was asked for{line}{free}{first}.{_limit(refusal)}"
    )
