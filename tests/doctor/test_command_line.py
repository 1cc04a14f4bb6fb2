"""`nbguard doctor` in a shell: targets, the exit status by the gravest finding, errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nbguard.frontend.cli import main

_SCRIPT = """
import torch
model = torch.nn.Linear(3, 2)
def make():  # and no dir
    return model, (torch.ones(4, 3), torch.zeros(4, 2))
def broken():
    raise OSError("no data here")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_process: None) -> Path:
    """A folder with a script, in which the command is run: in this process, as PyTorch takes two seconds to import."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, 0),
        ({"PYTORCH_HIP_ALLOC_CONF": "backend:native"}, 0),
        ({"NCCL_BLOCKING_WAIT": "1"}, 1),
        ({"PYTORCH_ALLOC_CONF": "nonsense"}, 3),
    ],
    ids=["nothing", "note", "advice", "problem"],
)
@pytest.mark.usefixtures("folder")
def test_the_exit_status_is_that_of_the_gravest_finding(
    variables: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert main(["doctor", "--strict", "--json", "--environment"]) == status

    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "diagnosis"
    assert {check["topic"] for check in data["checks"]} == {"environment"}


@pytest.mark.usefixtures("folder")
def test_without_a_target_it_says_how_one_is_named_in_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])

    text = capsys.readouterr().out
    assert text.count("was given: name one, as in  nbguard doctor train:learn") == 2
    assert "%nbguard" not in text


@pytest.mark.usefixtures("folder")
def test_what_is_no_model_is_refused_with_the_command_of_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["doctor", "train:torch"], ["doctor", "--golden", "out"]):
        assert main(line) == 2
        assert "name one, as in  nbguard doctor train:learn" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_what_it_advises_is_a_call_for_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    Path("loads.py").write_text(
        "import torch\nfrom fastai.basics import *\n"
        "data = DataLoader([(torch.ones(3), torch.zeros(2))] * 8, bs=4, num_workers=2)\n"
        "learn = Learner(DataLoaders(data, data), nn.Linear(3, 2), loss_func=nn.MSELoss())\n"
    )
    main(["doctor", "loads:learn", "--determinism"])

    text = capsys.readouterr().out
    assert "→ repeat = nbguard.deterministic(learn=learn)" in text
    assert "%nbguard" not in text


def test_without_strict_a_problem_is_no_failure_in_a_shell(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "nbguard", "doctor", "--environment"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTORCH_ALLOC_CONF": "nonsense"},
    )

    assert run.returncode == 0
    assert "problem      PYTORCH_ALLOC_CONF cannot be used as it is" in run.stdout


@pytest.mark.usefixtures("folder")
def test_a_script_makes_what_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "train:make", "--environment"]) == 0
    title = capsys.readouterr().out.splitlines()[0]  # notes on this machine may follow
    assert title.partition(":")[0].endswith("Linear")


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("train", "nbguard: train is not a target; name a module and an object in it, as in  nbguard doctor train:learn"),
        ("absent:learn", "nbguard: there is no module absent, in this folder or installed"),
        ("train:dir", "nbguard: train:dir cannot be made: AttributeError: module 'train' has no attribute 'dir'"),
        ("train:broken", "nbguard: train:broken cannot be made: OSError: no data here"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_wrong_target_is_one_line(target: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", target]) == 2
    assert capsys.readouterr().err.strip() == line


_FITS = {
    "fastai": """
from fastai.basics import *
data = DataLoader([(torch.ones(3), torch.zeros(2))] * 8, bs=4)
learn = Learner(DataLoaders(data, data), nn.Linear(3, 2), loss_func=nn.MSELoss())
learn.fit(1)
open("fitted", "w").close()
after = 1
""",
    "a loop": """
import torch
learn = torch.nn.Linear(3, 2)
for _ in range(3):
    learn(torch.ones(4, 3)).sum().backward()
    open("fitted", "w").close()
after = 1
""",
    "a function": """
import torch
learn = torch.nn.Linear(3, 2)
def train():
    for _ in range(3):
        loss = learn(torch.ones(4, 3)).sum()
        open("fitted", "w").close()
        loss.backward()
train()
after = 1
""",
}


@pytest.mark.parametrize("name", _FITS)
def test_a_script_runs_up_to_its_first_fit(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen: the diagnosis of a script that trains for hours took hours."""
    (folder / "train.py").write_text(_FITS[name])
    backward = torch.Tensor.backward
    assert main(["doctor", "train:learn", "--determinism", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert sum("the fit itself did not run" in note for note in notes) == 1
    assert not (folder / "fitted").exists()
    assert torch.Tensor.backward is backward

    del sys.modules["train"]
    assert main(["doctor", "train:after"]) == 2
    assert "train:after is not made before the script's first fit (line " in capsys.readouterr().err


def test_a_function_that_fits_is_no_target(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(_FITS["fastai"].replace("learn.fit(1)", "def make():\n    learn.fit(1)\n    return learn"))
    assert main(["doctor", "train:make"]) == 2
    assert "train:make fits before it returns (line 6: fit() of Learner)" in capsys.readouterr().err


def test_a_module_that_exits_is_no_finding_of_the_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 3 says that `--strict` has found a problem; a module may exit with any."""
    (tmp_path / "exits_at_once.py").write_text("import sys\nsys.exit(3)\nmodel = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    assert main(["doctor", "exits_at_once:model"]) == 2
    assert capsys.readouterr().err == "nbguard: exits_at_once:model cannot be made: SystemExit: 3\n"


_ENDS = "sys.stderr.write(str('torch.nn' in sys.modules))"


@pytest.mark.usefixtures("folder")
def test_without_a_target_the_compiled_part_of_pytorch_tells_the_same_as_the_whole() -> None:
    lines = [
        f"import sys{also}; from nbguard.frontend.cli import main; main(['doctor', '--json']); {_ENDS}"
        for also in ("", ", torch")
    ]
    part, whole = (subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True) for line in lines)

    assert (part.stderr, whole.stderr) == ("False", "True")
    assert json.loads(part.stdout)["checks"] == json.loads(whole.stdout)["checks"]
