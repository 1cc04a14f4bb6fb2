"""A library is one file: its experiments, their parts, its remedies and its code are known, and nothing else is told of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nbguard
from nbguard import libraries
from nbguard.memory.scan.libraries import library_paths
from nbguard.memory.scan.scan import Notebook, scan

_DESCRIPTION = """
from nbguard.libraries import ExperimentClass, ExperimentPart, Library, LibraryWork

LIBRARY = Library(
    name="toylib",
    packages=("toylib",),
    experiments=(
        ExperimentClass(
            modules=("toylib.runner",),
            name="Runner",
            parts=(ExperimentPart("net", "model"), ExperimentPart("optim", "optimizer")),
            loops=("toylib.runner",),
            leftovers={"batch": ()},
            zero_gradients="forget_gradients()",
        ),
    ),
    work=(LibraryWork(files=("toylib/saving",), functions=("save",), what="saving", change="save less", rank=10),),
    settings={"clip": "`Runner(clip=1)`"},
)
"""

_ENTRY_POINT = "toylib_nbguard:LIBRARY"

_RUNNER = """
import torch

class Runner:
    def __init__(self):
        self.net = torch.nn.Linear(1100, 1100)
        self.optim = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.batch = ()

    def fit(self, while_it_runs=int):
        self.batch = torch.ones(500, 1100)
        self.net(self.batch).sum().backward()
        while_it_runs()
        raise RuntimeError("interrupted")

    def forget_gradients(self):
        self.optim.zero_grad()
"""


def _forget() -> None:
    for value in vars(libraries).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture
def toylib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen_libraries: Callable[[], None]) -> Iterator[Any]:
    """The library, installed and imported, with a description of it beside those of nbguard."""
    (tmp_path / "descriptions").mkdir()
    (tmp_path / "descriptions" / "toy.py").write_text(_DESCRIPTION)
    (tmp_path / "toylib").mkdir()
    (tmp_path / "toylib" / "__init__.py").touch()
    (tmp_path / "toylib" / "runner.py").write_text(_RUNNER)
    monkeypatch.setattr(libraries, "__path__", [*libraries.__path__, str(tmp_path / "descriptions")])
    monkeypatch.syspath_prepend(tmp_path)
    _forget()
    yield importlib.import_module("toylib.runner")
    _forget()
    for name in ("toylib", "toylib.runner", "nbguard.libraries.toy"):
        sys.modules.pop(name, None)


@pytest.fixture
def shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen_libraries: Callable[[], None]
) -> Iterator[Callable[..., None]]:
    """A function that installs the library with a description of its own: the entry point's value, and the module's text."""

    def install(value: str = _ENTRY_POINT, text: str = _DESCRIPTION) -> None:
        about = tmp_path / "toylib-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toylib\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{libraries.ENTRY_POINTS}]\ntoylib = {value}\n")
        (tmp_path / "toylib").mkdir()
        (tmp_path / "toylib" / "__init__.py").write_text("")
        (tmp_path / "toylib" / "runner.py").write_text(_RUNNER)
        (tmp_path / "toylib_nbguard.py").write_text(text)
        importlib.invalidate_caches()
        _forget()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    _forget()
    for name in ("toylib", "toylib.runner", "toylib_nbguard"):
        sys.modules.pop(name, None)


def test_the_page_shows_the_description_that_is_tried_here() -> None:
    page = (Path(__file__).parents[2] / "docs/guide/libraries.md").read_text()

    assert f"```python{_DESCRIPTION}```" in page
    assert f'[project.entry-points."{libraries.ENTRY_POINTS}"]\ntoylib = "{_ENTRY_POINT}"\n' in page


def test_a_library_may_ship_its_description(shipped: Callable[..., None]) -> None:
    shipped()
    assert libraries.libraries()[-1].name == "toylib"
    assert "toylib" not in sys.modules, "the description imports no library"

    test_a_file_is_all_that_a_library_needs(importlib.import_module("toylib.runner"))


def test_a_librarys_own_description_takes_the_place_of_nbguards(shipped: Callable[..., None]) -> None:
    shipped(text="from nbguard.libraries import Library\nLIBRARY = Library(name='peft', packages=('mine',))\n")

    assert [library.packages for library in libraries.libraries() if library.name.lower() == "peft"] == [("mine",)]


@pytest.mark.parametrize(
    ("value", "text", "words"),
    [
        ("toylib.about:LIBRARY", "", "toylib.about is in a package"),
        (_ENTRY_POINT, "", "has no attribute 'LIBRARY'"),
        (_ENTRY_POINT, "1 / 0", "ZeroDivisionError"),
        (_ENTRY_POINT, "LIBRARY = {'name': 'toylib'}", "a dict is no nbguard.libraries.Library"),
        *(
            (_ENTRY_POINT, f"from nbguard.libraries import *\nLIBRARY = Library(name='toylib', {fields})", f"{wrong} is no")
            for fields, wrong in (
                ("packages='toylib'", "packages"),
                ("packages=('toylib', None)", "packages"),
                ("packages=(), kinds=(('toylib', 'Model'),)", "kinds"),
                ("packages=(), experiments=(ExperimentClass(modules=(), name='Run', parts=('model',)),)", "experiments"),
                ("packages=(), details={'toylib': ()}", "details"),
                ("packages=(), pool=DevicePool(release=3)", "pool"),
                ("packages=(), training_functions={'fit'}", "training_functions"),
            )
        ),
    ],
)
def test_a_description_that_is_not_valid_is_left_out(shipped: Callable[..., None], value: str, text: str, words: str) -> None:
    shipped(value, text)
    with pytest.warns(UserWarning, match=words):
        found = libraries.libraries()
    assert all(library.name != "toylib" for library in found)
    assert "toylib" not in sys.modules


def test_a_file_is_all_that_a_library_needs(toylib: Any) -> None:
    runner = toylib.Runner()
    names: dict[str, Any] = {"runner": runner}
    running: list[bool] = []
    with pytest.raises(RuntimeError, match="interrupted"):
        runner.fit(
            lambda: running.extend(learner.is_running for learner in scan(Notebook(shell=None, namespace=names)).facts.learners)
        )
    assert running == [True]

    report = nbguard.report(names)

    (holder,) = (holder for holder in report.devices[0].holders if holder.label == "runner")
    assert holder.what == "Runner · Linear · SGD"
    (gradients,) = (finding for finding in report.findings if finding.kind == "gradients")
    assert gradients.learner == "runner"
    assert gradients.advice.command == "runner.forget_gradients()"

    before = report.devices[0].allocated
    exec(gradients.advice.command, names)
    assert before - nbguard.report(names).devices[0].allocated == gradients.advice.frees == runner.net.weight.nbytes + 4400

    plan = nbguard.plan(namespace=names)
    assert [action.kind for action in plan.actions if action.kind == "leftovers"] == ["leftovers"]
    nbguard.release(namespace=names)
    assert runner.batch == ()
    assert isinstance(runner.net.weight, torch.Tensor)


def test_its_code_is_a_librarys_and_has_its_own_words(toylib: Any) -> None:
    assert toylib.__file__.startswith(library_paths())
    work = libraries.library_work([("toylib/saving.py", "save")])
    assert work is not None
    assert work.change == "save less"
    assert "toylib: `Runner(clip=1)`" in libraries.in_own_words("clip")
