"""The sidecar of a snapshot, `FILE.nbguard.json`: facts that a replay needs and PyTorch's format has no place for."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from nbguard.errors import DamagedDataError, SnapshotError
from nbguard.files import read_file
from nbguard.memory.allocator.model.policy import parse_version
from nbguard.memory.allocator.snapshot.snapshot import Sidecar
from nbguard.plain_data import from_plain, to_plain

_SUFFIX = ".nbguard.json"
LARGEST_SIDECAR = 1 << 20
"""Bytes of a sidecar; a larger one is refused."""
_LONGEST_VERSION = 100
"""Characters of a version of PyTorch."""


def sidecar_path(path: str | Path) -> Path:
    """Return the path of the sidecar of the snapshot at `path`."""
    path = Path(path)
    return path.with_name(path.name + _SUFFIX)


def sidecar_data(sidecar: Sidecar) -> dict[str, Any]:
    """Return the content of a sidecar file as JSON-ready data; a writer may add other keys."""
    data: dict[str, Any] = {"nbguard": 1} | to_plain(sidecar)
    return data


def read_sidecar(path: str | Path) -> Sidecar:
    """Return the sidecar of the snapshot at `path`, empty where there is no such file.

    Raises:
        SnapshotError: the sidecar is damaged.
    """
    place = sidecar_path(path)
    try:
        raw = json.loads(read_file(place, LARGEST_SIDECAR))
        if not isinstance(raw, dict) or raw.get("nbguard") != 1:
            raise ValueError("not ours")
        known = {field.name: raw[field.name] for field in fields(Sidecar) if field.name in raw}
        sidecar: Sidecar = from_plain(Sidecar, known)
        version = sidecar.torch_version
        if version is not None and (len(version) > _LONGEST_VERSION or not parse_version(version)):
            raise ValueError("torch_version")
        return sidecar
    except FileNotFoundError:
        return Sidecar()
    except (OSError, ValueError, RecursionError, DamagedDataError):
        raise SnapshotError(f"{place.name} next to it is damaged; remove it to read the snapshot without it.") from None
