"""The sidecar of a snapshot, `FILE.nbguard.json`: facts that a replay needs and PyTorch's format has no place for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbguard.allocator.model.policy import parse_version
from nbguard.allocator.snapshot.snapshot import Sidecar
from nbguard.errors import SnapshotError
from nbguard.files import read_file

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
    return {"nbguard": 1} | asdict(sidecar)


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
        version = _one(raw, "torch_version", str)
        if version is not None and (len(version) > _LONGEST_VERSION or not parse_version(version)):
            raise ValueError("torch_version")
        return Sidecar(
            torch_version=version,
            settings=_one(raw, "settings", str),
            totals=_many(raw, "totals", int),
            frees=_many(raw, "frees", int),
            fractions=_many(raw, "fractions", float),
            names=_many(raw, "names", str),
        )
    except FileNotFoundError:
        return Sidecar()
    except (OSError, ValueError, RecursionError):
        raise SnapshotError(f"{place.name} next to it is damaged; remove it to read the snapshot without it.") from None


def _one(raw: dict[str, Any], key: str, kind: type) -> Any:
    value = raw.get(key)
    if value is not None and type(value) is not kind:
        raise ValueError(key)
    return value


def _many(raw: dict[str, Any], key: str, kind: type) -> Any:
    values = raw.get(key, [])
    if not isinstance(values, list) or any(
        type(value) not in (kind, int) or (kind is str) != (type(value) is str) for value in values
    ):
        raise ValueError(key)
    if any(not 0 <= value < 2**60 for value in values if kind is not str):
        raise ValueError(key)
    return tuple(kind(value) for value in values)
