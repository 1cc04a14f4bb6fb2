"""A script under `nbguard run` is as it is under `python`: its names, its output, its traceback and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nbguard.frontend.cli import main
from tests.jobs.programs import NBGUARD, PYTHON, ended

_SURROUNDINGS = """
import json, sys
main = sys.modules["__main__"]
print(json.dumps({
    "names": sorted(name for name in globals() if name not in ("json", "sys", "main")),
    "is_main": main.__dict__ is globals(),
    "name": __name__, "file": __file__, "spec": getattr(__spec__, "name", None), "package": __package__,
    "argv": sys.argv, "path": sys.path[0], "doc": __doc__,
    "loader": type(__loader__).__name__,
}))
"""
_ENDS = {
    "nothing": "",
    "output": "import sys; print('out'); print('err', file=sys.stderr)",
    "error": "def f():\n    raise ValueError('a broken image')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "syntax": "x = (",
    "status": "import sys; sys.exit(3)",
    "words": "import sys; sys.exit('no data')",
    "interrupt": "raise KeyboardInterrupt",
    "memory": "raise MemoryError",  # nothing is known of the memory of a process without PyTorch
    "hook": "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', kind.__name__, file=sys.stderr)\n1 / 0",
    "thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join()",
    "last words": "import atexit, sys\natexit.register(lambda: print(sys.modules['__main__'].x))\nx = 'still there'\n1 / 0",
}


@pytest.mark.parametrize("form", ["script", "folder", "module"])
def test_a_program_has_the_surroundings_that_python_gives_it(form: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for file in ("train.py", "package/__main__.py", "package/train.py"):
        (tmp_path / file).write_text(_SURROUNDINGS)
    program = {"script": ["train.py"], "folder": ["package"], "module": ["-m", "package.train"]}[form]

    plain, ours = (ended([*command, *program, "--report", "-h", "x y"], tmp_path) for command in (PYTHON, NBGUARD))

    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("name", _ENDS)
def test_a_program_ends_as_under_python(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_ENDS[name])

    plain, ours = (ended([*command, "train.py"], tmp_path) for command in (PYTHON, NBGUARD))

    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_a_missing_module_is_told_as_python_tells_it(tmp_path: Path) -> None:
    plain, ours = (ended([*command, "-m", "no_such_module"], tmp_path) for command in (PYTHON, NBGUARD))

    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "nbguard run --help"),
        (["run", "no_such_file.py"], "no_such_file.py cannot be read: there is no such file"),
        (["run", "--report", __file__, __file__], "is no folder"),
        (["report", "no_such_folder"], "no_such_folder cannot be read: there is no such file"),
    ],
)
def test_a_line_says_why_nothing_was_run(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.excepthook

    assert main(arguments) == 2

    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert sys.excepthook is before


_INSTALLED = """
import sys, threading, json
def state():
    return {
        "torch": "torch" in sys.modules,
        "ours": sorted(name for name in sys.modules if name.startswith("nbguard.") and ".cli" not in name),
        "trace": [sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()],
        "finders": [type(finder).__name__ for finder in sys.meta_path if type(finder).__module__.startswith("nbguard")],
        "threads": threading.active_count(),
    }
print(json.dumps(state()))
"""


_OF_A_CARD = ("nbguard.memory.scan.scan", "nbguard.memory.scan.devices", "nbguard.memory.out_of_memory", "nbguard.training")


def test_nothing_runs_before_an_error_and_nothing_of_pytorch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_INSTALLED)
    (tmp_path / "later.py").write_text("import nbguard; nbguard.install()\n" + _INSTALLED)

    for command in ([*NBGUARD, "train.py"], [*PYTHON, "later.py"]):
        state = json.loads(ended(command, tmp_path).stdout)
        assert state["torch"] is False
        assert not [name for name in state["ours"] if name.startswith(_OF_A_CARD)]
        assert (state["trace"], state["finders"], state["threads"]) == ([None] * 4, ["_TorchFinder"], 1)


def test_the_finder_goes_with_the_import_that_it_waits_for(tmp_path: Path) -> None:
    """A stand-in for PyTorch tells when the observer of requests is attached: after its import, once."""
    (tmp_path / "torch.py").write_text("calls = []\n")
    (tmp_path / "train.py").write_text(
        "import sys, types\n"
        "observer = types.ModuleType('nbguard.memory.cleanup.apply.oom_observer')\n"
        "observer.attach = lambda: sys.modules['torch'].calls.append(1)\n"
        "sys.modules[observer.__name__] = observer\n"
        "import json, torch\nimport torch\n"
        "left = [f for f in sys.meta_path if type(f).__module__.startswith('nbguard')]\n"
        "print(torch.calls, left, 'exec_module' in vars(torch.__spec__.loader), torch.__file__ == torch.__spec__.origin)\n"
    )

    assert ended([*NBGUARD, "train.py"], tmp_path).stdout == "[1] [] False True\n"
