"""The page that reads snapshots in a browser, with the Python and the nbguard that it runs: snapshot_doctor.py SITE."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from archives import write_archive

from nbguard.frontend.browser import modules

_DOCS = Path(__file__).resolve().parents[1]
_PACKAGE = _DOCS.parent / "nbguard"
_PYTHON = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""Files of npm's package `pyodide` that a browser fetches. None of its own packages is needed."""


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
    modules_of = {file.relative_to(_PACKAGE.parent).as_posix(): file.read_bytes() for file in modules(_PACKAGE)}
    write_archive(folder / "nbguard.zip", modules_of)
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
