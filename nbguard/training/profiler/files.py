"""The files of a profile, written as a whole or not at all, and read with a clear message where that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError, ProfileFileError
from nbguard.files import read_file, unreadable, write_file
from nbguard.training.profiler.analysis.observations import FitObservations

_LARGEST = 256 * 1024**2
"""Bytes of a saved profile; a larger file is refused."""


def read_observations(path: str | Path) -> FitObservations:
    """Return the observations that a profile has saved.

    Raises:
        ProfileFileError: there is no such file, or it is no saved profile of this version.
    """
    try:
        return FitObservations.from_json(read_file(path, _LARGEST))
    except OSError as error:
        raise ProfileFileError(unreadable(path, error)) from None
    except ProfileFileError as error:
        raise ProfileFileError(f"{path} cannot be read: {error}") from None


def write_json(path: str | Path, data: Any) -> Path:
    """Write plain data as JSON and return the path; an older file stays until the new one is whole."""
    return write_text(path, json.dumps(data, ensure_ascii=False, allow_nan=False))


def write_text(path: str | Path, text: str) -> Path:
    """Write text as `write_json` does."""
    try:
        return write_file(path, text)
    except OSError as error:
        raise NbguardError(f"cannot write {path}: {error.strerror}; name another file") from error
