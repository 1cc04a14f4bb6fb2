"""The survey's own machinery, on quick starts of a package that is made here."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.survey.__main__ import ROOT, run_cell
from tests.survey.cell import CELLS, read_cell
from tests.survey.filing import reproduction, table, text
from tests.survey.outcome import Held, Outcome, WayOut, from_json

_LIBRARY = """import functools

import torch


@functools.lru_cache
def anchors(net, size):
    return torch.zeros(size)
"""
_LEAK = '''"""torch an-address"""

import sys

from torch import nn

sys.path.insert(0, FOLDER)
import leaky

model = nn.Linear(500, 1000)
grid = leaky.anchors(model, 4)
'''
_KEPT = 4 * (500 * 1000 + 1000 + 4)
_CLEAN = '"""torch an-address"""\n\nimport torch\n\nweights = torch.ones(1000, 1000)\nlast = weights[0]\n'


def _write(folder: Path, code: str) -> Path:
    file = folder / "quick.py"
    file.write_text(code)
    return file


@pytest.mark.slow
def test_a_leak_is_measured_named_followed_and_written_up(tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(_LIBRARY)
    file = _write(tmp_path, _LEAK.replace("FOLDER", repr(str(tmp_path))))

    outcome = run_cell(file, 120)

    assert outcome.error == ""
    assert outcome.left == _KEPT
    assert [(each.label, each.nbytes) for each in outcome.held] == [("leaky.anchors", 2 * _KEPT)]
    assert outcome.grows
    assert outcome.alive == (("model", "torch.nn.modules.linear.Linear"), ("grid", "torch.Tensor"))
    assert [each for each in outcome.ways if each.is_kept and each.freed == 2 * _KEPT]
    assert outcome.rest == 0
    assert outcome.trace[-1] == "Parameter"
    assert any("lru_cache" in step for step in outcome.trace)
    assert outcome.release is not None
    assert outcome.release.is_kept
    cell = read_cell(file)
    assert "lru_cache" in text(cell, outcome, "2.13.0")
    script = _write(tmp_path, reproduction(cell, outcome))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{outcome.left} bytes are left\nalive: ['model', 'grid']\n"


@pytest.mark.slow
def test_what_leaves_nothing_is_said_to(tmp_path: Path) -> None:
    outcome = run_cell(_write(tmp_path, _CLEAN), 120)

    assert (outcome.error, outcome.made, outcome.left, outcome.left_twice) == ("", 4_000_000, 0, 0)
    assert (outcome.names, outcome.held, outcome.ways) == (("weights", "last"), (), ())


@pytest.mark.usefixtures("torch_process")
def test_a_quick_start_that_fails_or_hangs_ends_with_its_reason(tmp_path: Path) -> None:
    failing = run_cell(_write(tmp_path, _CLEAN + "raise KeyError('x')\n"), 120)
    hanging = run_cell(_write(tmp_path, _CLEAN + "while True: pass\n"), 1)

    assert failing.error == "KeyError: 'x'"
    assert hanging.error == "it took more than 1 s"


def test_a_package_that_is_missing_is_not_tried(tmp_path: Path) -> None:
    outcome = run_cell(_write(tmp_path, _CLEAN.replace("torch an", "no-such-package an")), 1)

    assert "not tried: it is not installed" in table([outcome])


def test_an_outcome_survives_json_and_the_table_has_the_worst_first() -> None:
    kept = Held(label="a.Cache", kind="library", nbytes=1 << 20, path="a.Cache.kept")
    broken = WayOut(line="a.Cache.clear()", promised=1 << 20, freed=0)
    leaky = Outcome(name="a", package="a", version="1", made=2 << 20, left=1 << 20, held=(kept,), ways=(broken,))
    clean = Outcome(name="b", package="b", version="1", made=2 << 20)

    assert from_json(leaky.to_json()) == leaky
    assert table([clean, leaky]).splitlines()[2:] == [
        "| a | 1 | 2 MiB | 1 MiB | ? | a.Cache 1 MiB |  | `a.Cache.clear()` 0 B (NOT AS PROMISED) |",
        "| b | 1 | 2 MiB | 0 B | ? |  |  |  |",
    ]
    assert "NOTHING IS NAMED" in table([replace(leaky, held=(), ways=())])


def test_every_quick_start_says_what_it_follows_and_begins_with_its_imports() -> None:
    cells = [read_cell(file) for file in CELLS.glob("*.py")]

    assert len({cell.package for cell in cells}) >= 30
    for cell in cells:
        assert cell.address.startswith("https://"), cell.name
        assert cell.imports, cell.name
        assert cell.body, cell.name


def test_the_extra_has_each_package() -> None:
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    named = {name.lower() for name in re.findall(r'"([\w.-]+)', extras)}

    assert {cell.package.lower() for cell in map(read_cell, CELLS.glob("*.py"))} - named == set()
