"""A person's consent that assistants may look at a kernel, as a private file next to the kernel's connection file.

The file names the connection file and has a token, which the kernel asks for with each request. It goes when the consent ends
or the kernel does; the file of a kernel that was killed stays, and is known by its process.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbguard.errors import DamagedDataError
from nbguard.files import Folder
from nbguard.plain_data import from_plain, read_json, to_plain

_PREFIX, _SUFFIX = "nbguard-assistants-", ".json"
_LARGEST = 1 << 14
"""Bytes of such a file; it has a few hundred."""

_CLOCKS = 2.0
"""Most seconds between the starts of one process as two others read them. Each adds its own reading of the boot's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """The content of such a file, and where it lies."""

    id: str  # of the kernel, for people and assistants; the name of its file has it
    connection: str  # name of the connection file, in the same folder
    token: str  # is asked for with each request
    pid: int  # of the kernel
    started: float  # when its process was made, in seconds since 1970: another process may get its pid
    notebook: str  # path of the notebook where Jupyter tells it; else empty


def give(connection_file: Path, notebook: str) -> tuple[Consent, Path]:
    """Write the consent of this process's kernel, and return it with its file. Those of killed kernels go.

    Raises:
        OSError: the file cannot be written.
    """
    consent = Consent(
        id=secrets.token_hex(4),
        connection=connection_file.name,
        token=secrets.token_urlsafe(24),
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        notebook=notebook,
    )
    name = f"{_PREFIX}{consent.id}{_SUFFIX}"
    with Folder(connection_file.parent) as folder:
        for old, other in _all_in(folder):
            if not _runs(other):
                folder.remove(old)
        with folder.make(name, 0o600) as file:
            file.write(json.dumps(to_plain(consent)).encode())
    return consent, connection_file.parent / name


def take_back(consent: Consent, file: Path) -> None:
    """Remove the file of a consent, if it is still there and this process wrote it. A fork that ends leaves it."""
    if consent.pid != os.getpid():
        return
    with suppress(OSError), Folder(file.parent) as folder:
        folder.remove(file.name)


def consents(folder: Path) -> list[Consent]:
    """Return the consents of the kernels that run and have their connection files in a folder."""
    with suppress(OSError), Folder(folder) as held:
        return [consent for _, consent in _all_in(held) if _runs(consent)]
    return []


def _all_in(folder: Folder) -> list[tuple[str, Consent]]:
    """Return the consents in a folder with the names of their files, whether their kernels run or not."""
    names = [name for name in sorted(folder.names()) if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]
    return [(name, consent) for name in names if (consent := _read(folder, name)) is not None]


def _read(folder: Folder, name: str) -> Consent | None:
    """Return the consent of a file; None for one that is not this user's alone, or is damaged."""
    try:
        with os.fdopen(folder.open(name), "rb") as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o077):
                return None
            consent: Consent = from_plain(Consent, read_json(file.read(_LARGEST)))
    except (OSError, ValueError, DamagedDataError):
        return None
    is_here = consent.connection == Path(consent.connection).name and name == f"{_PREFIX}{consent.id}{_SUFFIX}"
    return consent if is_here else None


def _runs(consent: Consent) -> bool:
    try:
        return bool(abs(psutil.Process(consent.pid).create_time() - consent.started) < _CLOCKS)
    except psutil.Error:
        return False
