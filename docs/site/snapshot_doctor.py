"""The page that reads snapshots in a browser, with the Python and the nbguard that it runs: snapshot_doctor.py SITE."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

from nbguard.frontend.browser import modules

_DOCS = Path(__file__).resolve().parents[1]
_PACKAGE = _DOCS.parent / "nbguard"
_PYTHON = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""Files of npm's package `pyodide` that a browser fetches. None of its own packages is needed."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build(site: Path) -> Path:
    """Write the page into a site and return its folder.

    Raises:
        SystemExit: npm's package is not installed.
    """
    folder = site / "snapshot-doctor"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_DOCS / "snapshot-doctor", folder)
    python = _pyodide()
    (folder / "pyodide").mkdir()
    for name in _PYTHON:
        shutil.copyfile(python / name, folder / "pyodide" / name)
    with zipfile.ZipFile(folder / "nbguard.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in modules(_PACKAGE):
            entry = zipfile.ZipInfo(file.relative_to(_PACKAGE.parent).as_posix(), _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, file.read_bytes())
    return folder


def _pyodide() -> Path:
    """Return npm's package, where Node would find it too."""
    places = [_DOCS.parent / "node_modules", *map(Path, filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)))]
    found = next((place / "pyodide" for place in places if (place / "pyodide" / _PYTHON[0]).exists()), None)
    if found is None:
        raise SystemExit("nbguard: npm's package pyodide is missing. Run: npm ci")
    return found


if __name__ == "__main__":
    build(Path(sys.argv[1]))
