"""What-ifs of this process's own history, or of a file's, with the names to free where no setting helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nbguard.allocator.replay.whatif import WhatIf, what_if
from nbguard.allocator.snapshot.snapshot import Snapshot
from nbguard.cleanup.apply.allocator_history import recording
from nbguard.errors import NbguardError
from nbguard.memory.analysis import Analysis
from nbguard.reports.report import Report, build_report
from nbguard.scan.scan import Notebook, scan
from nbguard.snapshots.capture import cell_files
from nbguard.snapshots.render_whatif import WhatIfs
from nbguard.snapshots.report import Progress, named_cells, read_named
from nbguard.snapshots.save import live_snapshot
from nbguard.units import format_bytes

_NAMED = 3


def whatif_report(
    path: str | Path | None = None,
    confs: Iterable[str] = (),
    device: int | None = None,
    torch_version: str | None = None,
    capacity: int | None = None,
    fraction: float | None = None,
    progress: Progress | None = None,
    namespace: dict[str, Any] | None = None,
) -> WhatIfs:
    """Return how a recorded run would fare under other settings of the allocator.

    Args:
        path: a snapshot file; None takes the history that is being recorded in this process.
        confs: settings to try, as in `PYTORCH_ALLOC_CONF`; a choice where there are none.
        device: only this one.
        torch_version: that recorded it, where the file and the one beside it do not say so.
        capacity: bytes that the allocator can have in all; by default what it could have had.
        fraction: of it that the process may take, where nobody says so.
        progress: called while a file is read.
        namespace: the names to say what to free by; the notebook's, or the script's, if not given.

    Raises:
        NbguardError: nothing is recorded; or the file, a setting or the device cannot be used.
    """
    if path is None:
        name, snapshot = "this kernel", _live()
    else:
        name, snapshot = Path(path).name, read_named(path, progress)[0]
    numbers = [number for number in snapshot.devices if device in (None, number)]
    if not numbers:
        have = ", ".join(f"cuda:{number}" for number in snapshot.devices) or "none"
        raise NbguardError(f"{name}: nothing of cuda:{device} is in it; there is: {have}" if device is not None else _EMPTY)
    asked = tuple(confs)
    given = (torch_version, capacity, fraction)
    found = tuple(what_if(snapshot, number, asked, *given) for number in numbers)
    helpless = path is None and any(_is_helpless(each) for each in found)
    return WhatIfs(name, found, tuple(_to_free(namespace)) if helpless else ())


_EMPTY = "nothing has been allocated on a device yet"


def _live() -> Snapshot:
    state = recording()
    if state.state == "off":
        raise NbguardError(
            "no history is recorded: run  %gpumem record on , then the cells in question, then this again"
            " (--file FILE takes a snapshot that has one)"
        )
    if state.state == "waiting":
        raise NbguardError("recording begins with the first use of CUDA, and there was none yet: run your cells first")
    return named_cells(live_snapshot(), cell_files())


def _is_helpless(found: WhatIf) -> bool:
    """Say whether the run was refused memory as it was, and is so under all settings that were tried."""
    return bool(found.rows) and all(row.worst.refusal is not None for row in found.rows)


def _to_free(namespace: dict[str, Any] | None) -> Iterator[str]:
    """Yield what can be let go now: what is stale, then the names that hold most, each with its bytes."""
    report: Report = build_report(Analysis(scan(Notebook.current(namespace)).facts))
    if report.stale:
        yield f"`%reset_gpu` frees {format_bytes(report.stale)} that nothing needs any more"
    rows = [row for device in report.devices for row in device.holders if row.kind == "name" and row.retained and not row.stale]
    for row in sorted(rows, key=lambda row: -row.retained)[:_NAMED]:
        yield f"`%reset_gpu {row.names[0]}` frees the {format_bytes(row.retained)} that {row.label} holds"
