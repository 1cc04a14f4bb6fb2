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
    target = Path(path).expanduser().resolve()
    if not target.parent.is_dir():
        raise NbguardError(f"cannot write {target}: there is no folder {target.parent}; make it, or name another file")
    if target.is_dir():
        raise NbguardError(f"cannot write {target}: it is a folder; name a file")
    if not os.access(target.parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise NbguardError(f"cannot write {target}: no permission; name another file")
    return target


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
    """Write plain data as JSON and return the path; an older file stays until the new one is whole."""
    return write_text(path, json.dumps(data, ensure_ascii=False, allow_nan=False))


def write_text(path: str | Path, text: str) -> Path:
    """Write text as `write_json` does."""
    target = check_path(path)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    except OSError as error:
        raise NbguardError(f"cannot write {target}: {error.strerror}; name another file") from error
    finally:
        beside.unlink(missing_ok=True)
    return target
