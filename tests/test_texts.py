"""The shell of this process, and where its cells are."""

from __future__ import annotations

import linecache
from types import SimpleNamespace

import pytest

from nbguard.texts import numbers_of_cells


def test_cells_are_known_by_the_files_that_ipython_compiled_them_as() -> None:
    assert numbers_of_cells(SimpleNamespace(compile=SimpleNamespace(_filename_map={"/tmp/7.py": 3}))) == {"/tmp/7.py": 3}
    assert numbers_of_cells(None) == {}


def test_in_ipython_7_cells_are_known_by_their_sources_and_the_last_of_the_same_source_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps no numbers; what it keeps has the empty lines at the end of a cell, which its history drops."""
    sources = {"/tmp/1.py": ["x = 1\n", "y = x\n"], "<ipython-input-2-8d>": ["pass\n", "\n"], "/tmp/gone.py": ["z\n"]}
    files = {file: (0, 0.0, lines, file) for file, lines in sources.items()}
    monkeypatch.setattr(linecache, "_ipython_cache", files, raising=False)
    monkeypatch.setattr(linecache, "cache", files)
    history = SimpleNamespace(input_hist_parsed=["", "x = 1\ny = x", "pass", "x = 1\ny = x"])

    assert numbers_of_cells(SimpleNamespace(compile=SimpleNamespace(), history_manager=history)) == {
        "/tmp/1.py": 3,
        "<ipython-input-2-8d>": 2,
    }
