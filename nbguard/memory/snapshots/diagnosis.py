"""The diagnosis of a snapshot file, with failed requests, holders, settings that would have helped, and the map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.replay.view import WhatIfData, whatif_data
from nbguard.memory.allocator.replay.whatif import WhatIf, what_if
from nbguard.memory.allocator.snapshot.snapshot import Snapshot
from nbguard.memory.reports.memory_map import MemoryMap
from nbguard.memory.snapshots.load import NotebookNames, Progress, load_named, site_of
from nbguard.memory.snapshots.report import SnapshotReport, map_of, report_of
from nbguard.plain_data import to_plain
from nbguard.render.result import Result


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
    view: ClassVar[str] = "nbguard.memory.snapshots.diagnosis_view:diagnosis_blocks"
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
