"""The file into which NCCL writes its log of this process, where `NCCL_DEBUG_FILE` names one."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from nbguard.files import open_file
from nbguard.ranks.analysis.nccl_log import nccl_notes

_READ = 1 << 20  # bytes at the end of the file


def notes_of_nccl() -> tuple[str, ...]:
    """Return what matters of NCCL's log of this process; nothing where it writes none to a file."""
    name = os.environ.get("NCCL_DEBUG_FILE", "")
    if not name:
        return ()
    path = Path(name.replace("%h", platform.node()).replace("%p", str(os.getpid())))
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ))
            return nccl_notes(file.read(_READ).decode("utf-8", "replace"))
    except OSError:
        return ()
