"""Saving of PyTorch's standard memory snapshot with a sidecar of names and sizes, both files whole, or neither."""

from __future__ import annotations

import json
import pickle
import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nbguard.errors import NbguardError
from nbguard.files import write_files
from nbguard.memory.allocator.snapshot.schema import parse_snapshot
from nbguard.memory.allocator.snapshot.sidecar import sidecar_data, sidecar_path
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, Snapshot
from nbguard.memory.cleanup.apply.allocator_history import recording
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.recording import Recording
from nbguard.memory.scan.devices.cuda import device_facts, tracked_device
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.snapshots.capture import (
    BlockHolder,
    block_holders,
    cell_files,
    sidecar_of,
    sidecar_of_simulation,
    torch_snapshot,
)
from nbguard.render.result import Result

if TYPE_CHECKING:
    from nbguard.memory.simulation.simulation import Simulation

_PROTOCOL = 4
"""Of the pickle, whatever Python's default: the reader of pytorch.org/memory_viz knows none above 4."""

_LARGEST_SIDECAR = 1_000_000
"""Most bytes of the sidecar, as a reader refuses 1 MiB. Beyond, the smallest holders go unnamed."""

_LONGEST_LABEL = 120
"""Characters of a holder's label; the rest is cut off."""

_TRUSTED = 1 << 50
"""Bytes that PyTorch's own dict may come from: no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFiles(Result):
    """The two files of a saved snapshot."""

    kind: ClassVar[str] = "written"
    view: ClassVar[str] = "nbguard.memory.snapshots.saved_view:written_blocks"

    path: str  # of the snapshot, as the user wrote it
    file: str  # name of the snapshot, without its folder
    beside: str  # name of its sidecar, without its folder
    nbytes: int  # size of the snapshot file
    segments: int  # entries of the snapshot's "segments"
    events: int  # entries of the history ("device_traces"), of all devices
    holders: int  # holders that the sidecar names
    unnamed: int  # holders that had no room in the sidecar
    recording: Recording  # state of the history when the files were written


@dataclass(frozen=True, slots=True)
class _Source:
    """The data of both files."""

    raw: dict[str, Any]  # in the form of `torch.cuda.memory._snapshot()`
    facts: Facts  # which gives the blocks their holders
    sidecar: Sidecar
    recording: Recording


def save_snapshot(
    path: str | Path, namespace: dict[str, Any] | None = None, simulation: Simulation | None = None
) -> SnapshotFiles:
    """Write `torch.cuda.memory._dump_snapshot`'s file at `path`, and `PATH.nbguard.json` beside it.

    The first opens in pytorch.org/memory_viz. The second has the version of PyTorch, the settings, each device's name,
    size, free memory and memory fraction, and the names that hold the blocks. Existing files are replaced.

    Args:
        path: of the file to write; `~` is your home.
        namespace: the names to report by; the notebook's, or the script's `__main__`, if not given.
        simulation: whose device is saved, in the same format; None saves this process's GPUs.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: CUDA is not in use yet, or the file cannot be written; then nothing has been.
    """
    target = _target(path)
    source = _of_this_process(namespace) if simulation is None else _of_simulation(simulation, namespace)
    holders = block_holders(source.facts)
    data = pickle.dumps(source.raw, protocol=_PROTOCOL)
    text, unnamed = _sidecar_text(source, holders, zlib.crc32(data))
    traces = source.raw.get("device_traces") or []
    events, segments = sum(map(len, traces)), len(source.raw["segments"])
    kept = source.recording
    del source
    _write(target, data, text)
    return SnapshotFiles(
        path=str(path),
        file=target.name,
        beside=sidecar_path(target).name,
        nbytes=len(data),
        segments=segments,
        events=events,
        holders=len(holders) - unnamed,
        unnamed=unnamed,
        recording=kept,
    )


def _of_this_process(namespace: dict[str, Any] | None) -> _Source:
    raw = torch_snapshot()
    facts = scan(Notebook.current(namespace)).facts
    return _Source(raw, facts, sidecar_of(facts.devices, _settings_of(raw)), recording())


def _of_simulation(simulation: Simulation, namespace: dict[str, Any] | None) -> _Source:
    facts = simulation.look(namespace)  # before the snapshot: blocks that die meanwhile are in the history
    return _Source(simulation.snapshot(), facts, sidecar_of_simulation(simulation), simulation.recording)


def live_snapshot(simulation: Simulation | None = None) -> Snapshot:
    """Return a snapshot of this process (or of a simulation) as `load_snapshot` would from a file: for `replay` and `what_if`.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: CUDA is not in use yet.
    """
    if simulation is not None:
        return parse_snapshot(simulation.snapshot(), _TRUSTED, sidecar_of_simulation(simulation))
    raw = torch_snapshot()
    devices = device_facts(tracked_device())[0]
    return parse_snapshot(raw, _TRUSTED, sidecar_of(devices, _settings_of(raw)))


def _settings_of(raw: dict[str, Any]) -> str | None:
    settings = (raw.get("allocator_settings") or {}).get("PYTORCH_CUDA_ALLOC_CONF")
    return settings if type(settings) is str and settings else None


def _target(path: str | Path) -> Path:
    """Return the path to write to; raise NbguardError if it cannot be a file."""
    try:
        target = Path(path).expanduser()
        kind = target.stat().st_mode if target.exists() else None
        has_home = target.parent.is_dir()
    except (RuntimeError, OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "there is no such home folder"
        raise NbguardError(f"{str(path)[:_LONGEST_LABEL]}: {why}") from None
    if kind is not None and stat.S_ISDIR(kind):
        raise NbguardError(f"{path}: this is a folder; give the name of a file in it, as in  {Path(path) / 'snapshot.pickle'}")
    if kind is not None and not stat.S_ISREG(kind):
        raise NbguardError(f"{path}: this is not a regular file")
    if not has_home:
        raise NbguardError(f"{path}: there is no folder {str(target.parent)!r} to write it in")
    return target


def _sidecar_text(source: _Source, holders: Sequence[BlockHolder], checksum: int) -> tuple[str, int]:
    """Return the text of the sidecar and the number of holders left out; `checksum` is the snapshot's CRC-32."""
    known = {"crc32": checksum, "recorded_since_cell": source.recording.since, "cells": cell_files()}
    base = sidecar_data(source.sidecar) | known
    rows = [{"device": number, "label": label[:_LONGEST_LABEL], "blocks": list(blocks)} for number, label, blocks in holders]
    kept = len(rows)
    while True:
        text = json.dumps(base | {"holders": rows[:kept], "unnamed": len(rows) - kept}, separators=(",", ":")) + "\n"
        if len(text) <= _LARGEST_SIDECAR or not kept:
            return text, len(rows) - kept
        kept = kept * 3 // 4


def _write(target: Path, data: bytes, text: str) -> None:
    """Write both files, the sidecar's name first: a snapshot is never met without it."""
    try:
        write_files({sidecar_path(target): text, target: data})
    except OSError as error:
        raise NbguardError(f"{target.name} cannot be written: {error.strerror}") from None
