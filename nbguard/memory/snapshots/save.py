"""PyTorch's standard memory snapshot and history, and its saving with a sidecar of names, both files whole, or neither."""

from __future__ import annotations

import json
import pickle
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from nbguard.errors import NbguardError, NoTorchError
from nbguard.files import write_files
from nbguard.memory.allocator.snapshot.read import sidecar_data, sidecar_path
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, Snapshot, holder_frame, parse_snapshot
from nbguard.memory.cleanup.apply.allocator_history import recording, start, stop
from nbguard.memory.core.facts import DeviceFacts, Facts
from nbguard.memory.core.pinning import BlockHolders, paths_to
from nbguard.memory.core.recording import DEFAULT_ENTRIES, Recording
from nbguard.memory.core.references.holders import holdings, workspace_blocks
from nbguard.memory.core.simulated import NAME
from nbguard.memory.scan.devices.cuda import allocator_settings, device_facts, memory_fraction, tracked_device
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.render.result import Result
from nbguard.texts import numbers_of_cells, running_shell

if TYPE_CHECKING:
    from nbguard.memory.simulation.simulation import Simulation
    from nbguard.memory.snapshots.moment import At, RecordedHistory, SnapshotMoment


# --- PyTorch's own snapshot of its allocator, the switch of its history, and the facts a snapshot lacks. None opens a device.


BlockHolder = tuple[int, str, tuple[int, ...]]
"""(number of the device, label of the holder, addresses of its blocks)."""

_OF_BLOCKS = frozenset({"alloc", "free_requested", "free_completed"})
"""Entries of the history that are about blocks."""

_MOST_CELLS = 5000
"""Cells whose file names are kept, the latest."""


def record(on: bool = True, entries: int = DEFAULT_ENTRIES) -> Recording:
    """Keep PyTorch's history of its allocator from now on, bounded, or end it and forget it; return the state afterwards.

    Where CUDA is not in use yet, recording begins when it is: no context is opened for it. A history that somebody else
    records is left alone, by both.

    Args:
        on: keep the history; False ends it.
        entries: how many to keep of each device, the latest.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: this PyTorch has no history that can be bounded.
    """
    return start(entries) if on else stop()


def torch_snapshot() -> dict[str, Any]:
    """Return `torch.cuda.memory._snapshot()`: segments, and the history where one is recorded.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: CUDA is not in use, or this PyTorch has no snapshots.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise NoTorchError
    if not torch.cuda.is_initialized():
        raise NbguardError("CUDA is not in use in this kernel yet, so its allocator has nothing to save")
    try:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    except AttributeError:
        raise NbguardError("this PyTorch has no snapshots of its allocator") from None
    return snapshot


def sidecar_of(devices: Iterable[DeviceFacts], settings: str | None = None) -> Sidecar:
    """Return the facts that PyTorch's format lacks. A list by device ends before the first device whose figure is unknown.

    Args:
        devices: from a scan, in the order of their numbers.
        settings: of the allocator, where the snapshot has them; by default from the environment.
    """
    torch: Any = sys.modules["torch"]
    facts = tuple(devices)
    fractions = tuple(memory_fraction(number) if device.has_context else 1.0 for number, device in enumerate(facts))
    return Sidecar(
        torch_version=str(torch.__version__),
        settings=allocator_settings() if settings is None else settings,
        totals=_known(device.total for device in facts),
        frees=_known(device.free for device in facts),
        fractions=_known(fractions),
        names=tuple(device.name for device in facts),
    )


def sidecar_of_simulation(simulation: Simulation) -> Sidecar:
    """Return the same facts about a simulated device."""
    figures = simulation.figures()
    return Sidecar(
        torch_version=figures.torch_version,
        settings=figures.settings,
        totals=(figures.capacity,),
        frees=(figures.free,),
        fractions=(simulation.fraction,),
        names=(NAME,),
    )


def _known(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values before the first that is None."""
    known = []
    for value in values:
        if value is None:
            break
        known.append(value)
    return tuple(known)


def block_holders(facts: Facts) -> tuple[BlockHolder, ...]:
    """Return the holders of blocks in the words of `%gpumem`, device by device, the largest first."""
    holders: list[BlockHolder] = []
    for number, device in enumerate(facts.devices):
        for row, storages in holdings(facts.graph, device.device):
            addresses = tuple(sorted(facts.graph.storages[storage].address for storage in storages))
            if addresses:
                holders.append((number, row.path if row.stale and row.path else row.label, addresses))
        workspaces = workspace_blocks(facts.graph, device)
        if workspaces:
            holders.append((number, "cuBLAS workspaces", tuple(block.address for block in workspaces)))
    return tuple(holders)


def block_names(facts: Facts) -> dict[tuple[int, int], str]:
    """Return the way to each live block's holder, such as `losses[3]`, by the number of the device and the block's address."""
    names: dict[tuple[int, int], str] = {}
    for number, device in enumerate(facts.devices):
        live = [block for segment in device.segments or () for block in segment.blocks if block.state == "active_allocated"]
        held = BlockHolders.of(facts, device, holdings(facts.graph, device.device), frozenset())
        known = [block for block in live if block.address in held.by_address]
        paths = paths_to(facts.graph, known, held)
        for block in known:
            name = paths.get(block.address) or held.holders[held.place(block)].label
            names[number, block.address] = name[:_LONGEST_LABEL]
    return names


def with_holders(raw: dict[str, Any], names: Mapping[tuple[int, int], str]) -> dict[str, Any]:
    """Return a snapshot whose live blocks, and the entries of the history that made them, tell their holders.

    The outermost frame has the name, and so has the field for the user's metadata where this PyTorch has one.
    """
    segments = [{**segment, "blocks": list(_named_blocks(segment, names))} for segment in raw["segments"]]
    traces = [_named_trace(trace, number, names) for number, trace in enumerate(raw.get("device_traces") or ())]
    return {**raw, "segments": segments, **({"device_traces": traces} if "device_traces" in raw else {})}


def _named_blocks(segment: dict[str, Any], names: Mapping[tuple[int, int], str]) -> Iterator[dict[str, Any]]:
    address = segment["address"]
    for block in segment["blocks"]:
        name = names.get((segment["device"], address))
        yield block if name is None or block["state"] != "active_allocated" else _named(block, name)
        address += block["size"]


def _named_trace(
    trace: Sequence[dict[str, Any]], device: int, names: Mapping[tuple[int, int], str]
) -> Sequence[dict[str, Any]]:
    """Return a trace with names at the last entry about each live block, which made it."""
    left = {address: name for (number, address), name in names.items() if number == device}
    named = list(trace)
    for place in reversed(range(len(named))):
        if not left:
            break
        entry = named[place]
        if entry["action"] in _OF_BLOCKS and (name := left.pop(entry.get("addr", -1), None)) and entry["action"] == "alloc":
            named[place] = _named(entry, name)
    return named


def _named(entry: dict[str, Any], name: str) -> dict[str, Any]:
    frame = holder_frame(name)
    named = {**entry, "frames": [*entry.get("frames", ()), frame]}
    if "user_metadata" in entry:
        named["user_metadata"] = "; ".join(filter(None, (entry["user_metadata"], frame["filename"])))
    return named


def cell_files() -> dict[str, int]:
    """Return the number of the cell for each file that IPython compiled one as, by the file's name without its folder."""
    latest = list(numbers_of_cells(running_shell()).items())[-_MOST_CELLS:]
    return {PurePath(file).name: int(number) for file, number in latest}


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
    view: ClassVar[str] = "nbguard.memory.snapshots.diagnosis:written_blocks"

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
    """Write `torch.cuda.memory._dump_snapshot`'s file at `path`, and `PATH.nbguard.json` next to it.

    The first opens in pytorch.org/memory_viz, and names the holder of each live block there: in the outermost frame of its
    stack, which all viewers show, and in the user's metadata of its allocation. The second has the version of PyTorch, the
    settings, each device's name, size, free memory and memory fraction, and the names that hold the blocks. Existing files are
    replaced.

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
    data = pickle.dumps(with_holders(source.raw, block_names(source.facts)), protocol=_PROTOCOL)
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


def live_history(namespace: dict[str, Any] | None = None, simulation: Simulation | None = None) -> RecordedHistory:
    """Return the allocator's recorded history of this process (or of a simulation), with today's names of the holders.

    Args:
        namespace: the names to report by; the notebook's, or the script's `__main__`, if not given.
        simulation: whose device's history it is; None stands for this process's GPUs.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: CUDA is not in use yet, or nothing is recorded.
    """
    from nbguard.memory.snapshots.load import NotebookNames, with_cell_names
    from nbguard.memory.snapshots.moment import RecordedHistory

    (recording() if simulation is None else simulation.recording).check_history()
    source = _of_this_process(namespace) if simulation is None else _of_simulation(simulation, namespace)
    holders: dict[int, dict[int, str]] = {}
    for number, label, blocks in block_holders(source.facts):
        holders.setdefault(number, {}).update(dict.fromkeys(blocks, label))
    cells = cell_files()
    snapshot = with_cell_names(parse_snapshot(source.raw, _TRUSTED, source.sidecar), cells)
    return RecordedHistory("this kernel", snapshot, NotebookNames(holders, cells), is_live=True)


def live_moment(at: At = "peak", device: int | None = None, namespace: dict[str, Any] | None = None) -> SnapshotMoment:
    """Return a moment of the history that PyTorch records in this process, with the holders and the map of that time.

    A block that is still there has the name of its holder, and any other the line that allocated it. `record` starts a history.

    Args:
        at: the number of events that had happened, `"peak"`, or `"oom"` for the first request that was refused.
        device: only this one; needed for a number where several devices have a history.
        namespace: the names to report by; the notebook's, or the script's `__main__`, if not given.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: CUDA is not in use yet, nothing is recorded, or the history has no such moment.
    """
    return live_history(namespace).at(at, device)


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
