"""What-ifs of the history that is recorded in this process, or of a file's, with the names to free where no setting helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from nbguard.errors import NbguardError
from nbguard.memory.allocator.replay.view import WhatIfData, whatif_blocks, whatif_data
from nbguard.memory.allocator.replay.whatif import WhatIf, what_if
from nbguard.memory.allocator.snapshot.snapshot import Snapshot
from nbguard.memory.cleanup.apply.allocator_history import recording
from nbguard.memory.core import advice
from nbguard.memory.reports.report import build_report
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.snapshots.load import Progress, load_named, with_cell_names
from nbguard.memory.snapshots.save import cell_files, live_snapshot
from nbguard.render.html import Block, Listing
from nbguard.render.result import Result
from nbguard.units import format_bytes

if TYPE_CHECKING:
    from nbguard.memory.simulation.simulation import Simulation

_NAMED = 3
"""Names of the largest holders that are given where no setting helps."""

_EMPTY = "nothing has been allocated on a device yet"


@dataclass(frozen=True, slots=True)
class WhatIfs(Result):
    """The what-ifs of all devices of one history."""

    kind: ClassVar[str] = "whatif"
    view: ClassVar[str] = "nbguard.memory.snapshots.whatif:whatifs_blocks"
    data: ClassVar[str] = "nbguard.memory.snapshots.whatif:whatifs_data"

    name: str  # of the file; "this kernel" for the history of this process
    devices: tuple[WhatIf, ...]  # in the order of their numbers
    to_free: tuple[str, ...] = ()  # sentences on memory that can be freed now, where no setting helps


class WhatIfsData(TypedDict):
    """The what-ifs of all devices of one history."""

    name: str  # of the file; "this kernel" for the history of this process
    devices: list[WhatIfData]  # in the order of their numbers
    to_free: list[str]  # sentences on memory that can be freed now, where no setting helps


def whatifs_data(whatifs: WhatIfs) -> WhatIfsData:
    """Return for each device the same data as `nbguard whatif --json`; bytes as integers."""
    devices: list[WhatIfData] = [{"file": whatifs.name, **whatif_data(whatif)} for whatif in whatifs.devices]
    return {"name": whatifs.name, "devices": devices, "to_free": list(whatifs.to_free)}


def whatifs_blocks(whatifs: WhatIfs) -> Iterator[Block]:
    """Yield each device's what-if, then the memory that can be freed now."""
    for whatif in whatifs.devices:
        yield from whatif_blocks(whatif, whatifs.name)
    if whatifs.to_free:
        yield Listing(sentences=whatifs.to_free, mark="•")


def whatif_report(
    path: str | Path | None = None,
    confs: Iterable[str] = (),
    device: int | None = None,
    torch_version: str | None = None,
    capacity: int | None = None,
    fraction: float | None = None,
    progress: Progress | None = None,
    namespace: dict[str, Any] | None = None,
    simulation: Simulation | None = None,
) -> WhatIfs:
    """Return the results of a recorded run under other settings of the allocator.

    Args:
        path: a snapshot file; None takes the history that is being recorded in this process.
        confs: settings to try, as in `PYTORCH_ALLOC_CONF`; by default a choice that suits the version.
        device: only this one.
        torch_version: that recorded the history, where neither the file nor its sidecar has it.
        capacity: bytes that the allocator can have in all; by default as many as it could have had.
        fraction: the share of `capacity` that the process may take, where the sidecar has none.
        progress: called while a file is read.
        namespace: the names that the advice on freeing uses; by default the notebook's, or the script's.
        simulation: a device whose history is taken where no path is given; None takes the history of this process's GPUs.

    Raises:
        NbguardError: nothing is recorded; or the file, a setting or the device cannot be used.
    """
    if path is None:
        name, snapshot = "this kernel", _live(simulation)
    else:
        name, snapshot = Path(path).name, load_named(path, progress)[0]
    numbers = [number for number in snapshot.devices if device in (None, number)]
    if not numbers:
        have = ", ".join(f"cuda:{number}" for number in snapshot.devices) or "none"
        raise NbguardError(f"{name}: nothing of cuda:{device} is in it; there is: {have}" if device is not None else _EMPTY)
    tried = tuple(confs)
    devices = tuple(what_if(snapshot, number, tried, torch_version, capacity, fraction) for number in numbers)
    no_setting_helps = path is None and any(_is_refused_by_all(result) for result in devices)
    return WhatIfs(name, devices, tuple(_to_free(namespace, simulation)) if no_setting_helps else ())


def _live(simulation: Simulation | None) -> Snapshot:
    (recording() if simulation is None else simulation.recording).check_history()
    return with_cell_names(live_snapshot(simulation), cell_files())


def _is_refused_by_all(result: WhatIf) -> bool:
    """Return whether the run is refused memory under the recorded settings and under all others that were tried."""
    return bool(result.rows) and all(row.worst.refusal is not None for row in result.rows)


def _to_free(namespace: dict[str, Any] | None, simulation: Simulation | None) -> Iterator[str]:
    """Yield sentences on memory that can be freed now: stale memory, then the names that hold most, each with its bytes."""
    report = build_report(scan(Notebook.current(namespace)).analysis) if simulation is None else simulation.report(namespace)
    if report.stale:
        yield advice.release_stale().code + f" frees {format_bytes(report.stale)} that is no longer needed"
    rows = [row for device in report.devices for row in device.holders if row.kind == "name" and row.retained and not row.stale]
    for row in sorted(rows, key=lambda row: -row.retained)[:_NAMED]:
        yield advice.release_names(row.names[:1]).code + f" frees the {format_bytes(row.retained)} that {row.label} holds"
