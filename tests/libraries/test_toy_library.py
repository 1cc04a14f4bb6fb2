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
from nbguard.libraries import ExperimentClass, Library, LibraryWork, ExperimentPart

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


def test_a_file_is_all_that_a_library_needs(toylib: Any) -> None:
    runner = toylib.Runner()
    names: dict[str, Any] = {"runner": runner}
    running = []
    with pytest.raises(RuntimeError, match="interrupted"):
        runner.fit(lambda: running.extend(learner.is_running for learner in scan(Notebook(None, names)).facts.learners))
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
