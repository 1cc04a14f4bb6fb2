"""The card of a process that ends by running out of memory: after its own traceback, whoever shows that, and nowhere else.

PyTorch's error is made up here, as on any machine; `tests/cuda/test_jobs.py` has real ones.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped, unused-ignore]

from tests.jobs.programs import PYTHON, ROOT, ended

_ANSWER = "It asked cuda:0 for about 2 GiB."
_STEP = """
import sys, torch
def step():
    activations = torch.ones(1 << 20)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB")
"""
_RAISES = next(number for number, line in enumerate(_STEP.split("\n"), 1) if "raise" in line)
_HOOK = "def hook(kind, error, trace):\n    print('mine', file=sys.stderr)\nsys.excepthook = hook\n"
_SPAWN = (
    "import torch.multiprocessing as mp\n"
    "def rank(number):\n    if number == 1: step()\n"
    "mp.start_processes(rank, nprocs=2, start_method='fork')"
)
_CARDS = {
    "a script": "kept = torch.ones(1 << 18)\nstep()",
    "a hook of its own": _HOOK + "step()",
    "installed after it": f"import nbguard\n{_HOOK}nbguard.install()\nstep()",
    "installed twice": "import nbguard\nnbguard.install()\nstep()",
    "chained": "try:\n    step()\nexcept Exception as e:\n    raise ValueError('x') from e",
    "thread": "import threading\nt = threading.Thread(target=step); t.start(); t.join()",
    "fork": "import multiprocessing as mp\np = mp.get_context('fork').Process(target=step); p.start(); p.join()",
    "a launcher": _SPAWN,
}
_CAUGHT = "try:\n    step()\nexcept torch.OutOfMemoryError:\n    "
_QUIET = {  # with the exit statuses
    "nothing": ("", 0),
    "another error": ("1 / 0", 1),
    "an end of its own": (_CAUGHT + "sys.exit(4)", 4),
    "an interrupt": (_CAUGHT + "raise KeyboardInterrupt", 1),  # here; `test_run.py` has the interpreter's own
    "caught": (_CAUGHT + "pass", 0),
}
_MISTAKE = "import nbguard.frontend.jobs.ending as ending\nending.scan = None\nstep()"


@dataclass(frozen=True)
class _Run:
    folder: Path
    stdout: str
    stderr: str
    status: int


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, torch_process: None) -> Callable[[str], _Run]:
    """What each of the programs above has said, by its name."""
    root = tmp_path_factory.mktemp("jobs")
    cases = {}
    programs = _CARDS | {name: code for name, (code, _) in _QUIET.items()} | {"mistake": _MISTAKE}
    for number, (name, code) in enumerate(programs.items()):
        folder = root / str(number)
        folder.mkdir()
        (folder / "train.py").write_text(_STEP + code)
        line = ["run", "--report", "reports", "train.py"]
        variables = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(folder)} if name == "a script" else {}
        cases[name] = {"folder": str(folder), "arguments": line, "variables": variables}
    for name, conftest in {"pytest": "", "pytest by its conftest": "import nbguard\nnbguard.install()\n"}.items():
        folder = root / name
        folder.mkdir()
        (folder / "conftest.py").write_text(conftest)
        (folder / "test_it.py").write_text(_STEP + "def test_step():\n    step()\ndef test_other():\n    pass\n")
        line = ["run", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        cases[name] = {"folder": str(folder), "arguments": line, "variables": {}}
    (root / "cases.json").write_text(json.dumps(cases))
    made = ended([*PYTHON, "-m", "tests.jobs.forks", str(root / "cases.json")], root)
    assert made.returncode == 0, made.stderr[-4000:]

    def run(name: str) -> _Run:
        folder = Path(str(cases[name]["folder"]))
        out, errors, status = ((folder / file).read_text() for file in ("stdout", "stderr", "status"))
        return _Run(folder, out, errors, int(status))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", _CARDS)
def test_a_card_comes_once_and_after_the_traceback(name: str, runs: Callable[[str], _Run]) -> None:
    run = runs(name)

    begins = {"thread": "Exception in thread", "fork": "Process ForkProcess-1", "a launcher": _ANSWER}
    begins = begins | dict.fromkeys(["a hook of its own", "installed after it"], "mine\n")
    assert run.stdout == ""
    assert run.stderr.startswith(begins.get(name, "Traceback"))
    before, after = re.split(f"^{re.escape(_ANSWER)}$", run.stderr, flags=re.MULTILINE)
    assert ("Traceback" in after) == (name == "a launcher"), "the launcher shows a rank's traceback, after the rank's end"
    if sys.version_info >= (3, 11):
        assert "nbguard" not in before, "frames of ours"
    assert run.status == (0 if name in ("thread", "fork") else 1)
    assert len(list((run.folder / "reports").iterdir())) == 1


def test_the_report_and_the_mark_tell_the_line(runs: Callable[[str], _Run]) -> None:
    run = runs("a script")

    card, mark = run.stderr.strip().rsplit("\n", 1)
    assert f"in train.py, line {_RAISES}: raise torch" in card
    assert mark == f"::error file=train.py,line={_RAISES},title=nbguard::OutOfMemoryError: {_ANSWER}"
    (file,) = (run.folder / "reports").iterdir()
    report = json.loads(file.read_text())
    for kind, data in (("rank_failure", report), ("oom_card", report["card"])):
        Draft202012Validator(json.loads((ROOT / "nbguard" / "schemas" / f"{kind}.json").read_text())).validate(data)
    assert report["place"] == f"train.py:{_RAISES} in step()"
    assert report["card"]["asked"]["is_final"] is True


@pytest.mark.parametrize("name", _QUIET)
def test_other_ends_say_nothing(name: str, runs: Callable[[str], _Run]) -> None:
    run = runs(name)

    assert run.status == _QUIET[name][1]
    assert run.stdout == ""
    assert "nbguard" not in run.stderr
    assert _ANSWER not in run.stderr
    assert (run.folder / "reports").exists() == (name == "another error"), "with a folder, any error leaves a report"


@pytest.mark.parametrize("name", ["pytest", "pytest by its conftest"])
def test_a_test_has_its_card_in_pytests_report(name: str, runs: Callable[[str], _Run]) -> None:
    run = runs(name)

    assert run.status == 1
    assert run.stdout.count(_ANSWER) == 1
    assert re.search(r"E +torch\.OutOfMemoryError(.|\n)* nbguard (.|\n)*It asked", run.stdout)
    assert "1 failed, 1 passed" in run.stdout


def test_a_mistake_of_ours_costs_a_line(runs: Callable[[str], _Run]) -> None:
    run = runs("mistake")

    assert run.status == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("nbguard: there is no out-of-memory card, by a mistake in nbguard (TypeError")
