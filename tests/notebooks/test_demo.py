"""The demo notebook runs from end to end, keeps its promises, and is committed without outputs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import nbformat
import pytest

_FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.mark.slow
def test_the_demo_runs_and_frees_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = runpy.run_path(str(_FOLDER / "run_demo.py"))

    page = demo["run"](output=tmp_path)

    text = capsys.readouterr().out
    assert page.read_text(encoding="utf-8").count('class="nbguard"') >= 8
    freed = re.findall(r"freed (\S+ \S+) of (\S+ \S+) promised", text)
    assert len(freed) == 2
    assert all(one == other for one, other in freed)
    for holder in (
        "1 earlier Learner",
        "Out[7]",
        "last error",
        "losses keeps 12 autograd graphs",
        "it keeps 2 workers running",
    ):
        assert holder in text


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells

    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
