"""The files of a profile: written as a whole or not at all, and read with a clear message where that fails."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError, ProfileFileError
from nbguard.profiler.analysis.observations import FitObservations


def check_path(path: str | Path) -> Path:
    """Return the path in full; NbguardError unless a file can be written there. Asked before a fit, which may take hours."""
    found = Path(path).expanduser().resolve()
    if not found.parent.is_dir():
        raise NbguardError(f"cannot write {found}: there is no folder {found.parent}; make it, or name another file")
    if found.is_dir():
        raise NbguardError(f"cannot write {found}: it is a folder; name a file")
    if not os.access(found.parent, os.W_OK) or (found.exists() and not os.access(found, os.W_OK)):
        raise NbguardError(f"cannot write {found}: no permission; name another file")
    return found


def read_observations(path: str | Path) -> FitObservations:
    """Return the observations that a profile has saved.

    Raises:
        ProfileFileError: there is no such file, or it is no saved profile of this version.
    """
    try:
        return FitObservations.from_json(Path(path).expanduser().read_bytes())
    except FileNotFoundError:
        raise ProfileFileError(f"cannot read {path}: there is no such file") from None
    except OSError as error:
        raise ProfileFileError(f"cannot read {path}: {error.strerror}") from None
    except ProfileFileError as error:
        raise ProfileFileError(f"cannot read {path}: {error}") from None


def write_json(path: str | Path, data: Any) -> Path:
    """Write plain data as JSON and return the path; what was there stays until the new file is whole."""
    return write_text(path, json.dumps(data, ensure_ascii=False, allow_nan=False))


def write_text(path: str | Path, text: str) -> Path:
    """Write text as `write_json` does."""
    found = check_path(path)
    beside = found.with_name(f"{found.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        if found.exists():
            shutil.copymode(found, beside)
        beside.replace(found)
    except OSError as error:
        raise NbguardError(f"cannot write {found}: {error.strerror}; name another file") from error
    finally:
        beside.unlink(missing_ok=True)
    return found
