"""The code behind a run, in cells of the notebook, and the user's own modules."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbguard.files import read_file
from nbguard.memory.core.processes import session_name
from nbguard.memory.scan.scan import Notebook
from nbguard.training.runs.analysis.cell_slice import cells_behind
from nbguard.training.runs.analysis.record import RunCell
from nbguard.training.runs.analysis.source import clean_source
from nbguard.training.runs.collector import FactCollector
from nbguard.training.runs.fingerprint import bytes_hash

_CELL = 10_000
"""Characters of a cell's source on record."""
_CELLS = 200
_NOTEBOOK = 20 * 1024**2
"""Most bytes of a notebook's file that is read, to say which cells were edited since they ran."""
_SOURCE = 20 * 1024**2
"""Most bytes of a module's file that is read."""
_FILES = 200
_NAMES = 5


def notebook_path(namespace: dict[str, Any]) -> Path | None:
    """Return the notebook that this kernel runs, where its server or VS Code tells; None otherwise."""
    for told in (session_name(os.environ), namespace.get("__vsc_ipynb_file__")):
        if type(told) is str and told.endswith(".ipynb"):
            return Path(told)
    return None


def names_of(notebook: Notebook, *objects: Any) -> list[str]:
    """Return the names of the user's for these very objects."""
    ids = {id(each) for each in objects if each is not None}
    own = list(notebook.namespace.items())
    return [name for name, value in own if type(name) is str and not name.startswith("_") and id(value) in ids][:_NAMES]


def collect_cells(
    facts: FactCollector, notebook: Notebook, names: Sequence[str], path: Path | None, *, is_fit: bool
) -> tuple[RunCell, ...]:
    """Return the cells that the names come from, as they ran; each says whether the saved notebook has it otherwise now."""
    cells = notebook.inputs
    if not cells:
        facts.miss("code", "cells", "without IPython the cells that ran are not known")
        return ()
    roles = cells_behind(cells, names, len(cells) - 1, is_fit=is_fit)
    saved = _saved_sources(facts, path)
    typed = _typed(notebook.shell, cells)
    made = []
    for number, role in list(roles.items())[-_CELLS:]:
        source = typed[number]
        edited = "" if saved is None else "no" if source.strip() in saved else "yes"
        made.append(RunCell(number=number, source=clean_source(source[:_CELL]), role=role, edited=edited))
    return tuple(made)


def _typed(shell: Any, cells: Sequence[str]) -> Sequence[str]:
    """Return the cells as the user typed them; with magics as Python where IPython does not tell."""
    raw = getattr(getattr(shell, "history_manager", None), "input_hist_raw", None)
    return raw if type(raw) is list and len(raw) == len(cells) else cells


def _saved_sources(facts: FactCollector, path: Path | None) -> frozenset[str] | None:
    """Return the sources of the cells in the notebook's file; None, with the reason on record, where they are not known."""
    if path is None:
        facts.miss("code", "edited since", "this notebook's name is not known")
        return None
    try:
        cells = json.loads(read_file(path, _NOTEBOOK))["cells"]
        return frozenset(_joined(cell.get("source", "")).strip() for cell in cells if cell.get("cell_type") == "code")
    except OSError as error:
        facts.miss("code", "edited since", f"the saved notebook cannot be read ({error.strerror})")
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        facts.miss("code", "edited since", f"the saved notebook cannot be read ({type(error).__name__})")
        return None


def _joined(source: Any) -> str:
    return "".join(source) if type(source) is list else str(source)


def collect_modules(facts: FactCollector, folder: Path) -> None:
    """Collect a hash of the source of each imported module that lies below the folder of the run: the user's own."""
    roots = tuple(f"{path}{os.sep}" for path in (folder.absolute(), folder.resolve()))
    own = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__") if type(module) is type(sys) else None
        if type(path) is str and path.endswith(".py") and _is_own(path, roots):
            own.append((name, Path(path)))
    for name, source in sorted(own)[:_FILES]:
        try:
            facts.add("code", f"module {name}", bytes_hash(read_file(source, _SOURCE)))
        except OSError:
            facts.miss("code", f"module {name}", "its file can no longer be read")


def _is_own(path: str, roots: tuple[str, ...]) -> bool:
    return path.startswith(roots) and "site-packages" not in path and f"{os.sep}nbguard{os.sep}" not in path
