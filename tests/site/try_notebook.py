"""The notebook with which nbguard can be tried in a browser (docs/lite): its files and its cells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.site.pages import DOCS, ROOT

_LITE = DOCS / "lite"
_FILES = ("train.py", "training.pickle", "training.pickle.nbguard.json")


def put_files(folder: Path) -> None:
    """Copy the files that its cells read into a folder."""
    for file in (*(_LITE / name for name in _FILES), ROOT / "notebooks" / "out_of_memory.pickle"):
        shutil.copy(file, folder)


def code_cells() -> list[str]:
    """Return the code of its cells, in order."""
    notebook = json.loads((_LITE / "try.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
