"""Writes PyTorch's standard memory snapshot, and beside it what that lacks: both whole, or neither."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbguard.allocator.snapshot.schema import parse_snapshot
from nbguard.allocator.snapshot.sidecar import sidecar_data, sidecar_path
from nbguard.allocator.snapshot.snapshot import Sidecar, Snapshot
from nbguard.cleanup.apply.allocator_history import recording
from nbguard.errors import NbguardError
from nbguard.scan.devices.cuda import device_facts, tracked_device
from nbguard.scan.scan import Notebook, scan
from nbguard.snapshots.capture import Held, cell_files, held_blocks, sidecar_of, torch_snapshot
from nbguard.snapshots.written import SnapshotFiles

_LARGEST_SIDECAR = 1_000_000
"""Bytes that the file beside may take: a reader refuses 1 MiB. Beyond, the smallest holders go unnamed."""

_LONGEST_LABEL = 120


def save_snapshot(path: str | Path, namespace: dict[str, Any] | None = None) -> SnapshotFiles:
    """Write `torch.cuda.memory._dump_snapshot`'s file at `path`, and `PATH.nbguard.json` beside it.

    The first opens in pytorch.org/memory_viz. The second has the version of PyTorch, the settings, each device's name,
    size, free memory and memory fraction, and the names that hold the blocks. A file that is there is replaced.

    Args:
        path: where to; `~` is your home.
        namespace: the names to report by; the notebook's, or the script's `__main__`, if not given.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: CUDA is not in use yet, or the file cannot be written; then nothing has been.
    """
    target = _target(path)
    raw = torch_snapshot()
    seen = scan(Notebook.current(namespace))
    facts = sidecar_of(seen.facts.devices, _settings_of(raw))
    held = held_blocks(seen)
    data = pickle.dumps(raw)
    said, unnamed = _sidecar_text(facts, held, zlib.crc32(data))
    traces = raw.get("device_traces") or []
    events, segments = sum(map(len, traces)), len(raw["segments"])
    del raw
    _write(target, data, said)
    state = recording()
    return SnapshotFiles(
        path=str(path),
        file=target.name,
        beside=sidecar_path(target).name,
        nbytes=len(data),
        segments=segments,
        events=events,
        holders=len(held) - unnamed,
        unnamed=unnamed,
        recording=state,
    )


def live_snapshot() -> Snapshot:
    """Return a snapshot of this process as `load_snapshot` would from a file: for `replay` and `what_if`.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: CUDA is not in use yet.
    """
    raw = torch_snapshot()
    devices = device_facts(tracked_device())[0]
    return parse_snapshot(raw, _TRUSTED, sidecar_of(devices, _settings_of(raw)))


_TRUSTED = 1 << 50
"""A size without bound: torch's own dict holds what it holds."""


def _settings_of(raw: dict[str, Any]) -> str | None:
    found = (raw.get("allocator_settings") or {}).get("PYTORCH_CUDA_ALLOC_CONF")
    return found if type(found) is str and found else None


def _target(path: str | Path) -> Path:
    """Return where to write; NbguardError if that cannot be a file."""
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
        raise NbguardError(f"{path}: this is no ordinary file")
    if not has_home:
        raise NbguardError(f"{path}: there is no folder {str(target.parent)!r} to write it in")
    return target


def _sidecar_text(facts: Sidecar, held: Sequence[Held], checksum: int) -> tuple[str, int]:
    """Return what stands in the file beside, and how many holders had to be left out; `checksum` says of which file it is."""
    known = {"crc32": checksum, "recorded_since_cell": recording().since, "cells": cell_files()}
    base = sidecar_data(facts) | known
    rows = [{"device": number, "label": label[:_LONGEST_LABEL], "blocks": list(blocks)} for number, label, blocks in held]
    kept = len(rows)
    while True:
        text = json.dumps(base | {"holders": rows[:kept], "unnamed": len(rows) - kept}, separators=(",", ":")) + "\n"
        if len(text) <= _LARGEST_SIDECAR or not kept:
            return text, len(rows) - kept
        kept = kept * 3 // 4


def _write(target: Path, data: bytes, said: str) -> None:
    """Write both files under other names and rename them at the end: a reader never meets half of one."""
    places = [target, sidecar_path(target)]
    made = [place.with_name(f".{place.name[-80:]}.{os.getpid()}.part") for place in places]
    try:
        for name, content in zip(made, (data, said.encode()), strict=True):
            name.write_bytes(content)
        for name, place in zip(reversed(made), reversed(places), strict=True):
            name.replace(place)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise NbguardError(f"{target.name} cannot be written: {why}") from None
    finally:
        for name in made:
            with contextlib.suppress(OSError):
                name.unlink()
