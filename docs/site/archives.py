"""Archives of nbguard for a Python in a browser: the same files make the same bytes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_archive(file: Path, entries: Mapping[str, bytes]) -> None:
    """Write a zip archive of texts by their names."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
