"""`nbguard doctor` in a shell: targets, the exit status by the gravest finding, errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import torch
model = torch.nn.Linear(3, 2)
def make():
    return model, (torch.ones(4, 3), torch.zeros(4, 2))
def broken():
    raise OSError("no data here")
"""


def doctor(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m nbguard doctor` with these arguments in a folder with a script."""
    (folder / "train.py").write_text(_SCRIPT)
    here = {name: value for name, value in os.environ.items() if not name.startswith("KMP_")}  # other tests' libraries set one
    return subprocess.run(
        [sys.executable, "-m", "nbguard", "doctor", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**here, "OMP_NUM_THREADS": "1", **variables},
    )


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
def test_the_exit_status_is_that_of_the_gravest_finding(
    tmp_path: Path, torch_process: None, variables: dict[str, str], status: int
) -> None:
    run = doctor(tmp_path, "--strict", "--json", "--environment", **variables)

    data = json.loads(run.stdout)
    assert run.returncode == status, run.stdout
    assert data["kind"] == "diagnosis"
    assert {check["topic"] for check in data["checks"]} == {"environment"}


def test_without_strict_a_problem_is_no_failure(tmp_path: Path, torch_process: None) -> None:
    run = doctor(tmp_path, "--environment", PYTORCH_ALLOC_CONF="nonsense")

    assert run.returncode == 0
    assert "problem      PYTORCH_ALLOC_CONF cannot be used as it is" in run.stdout


def test_a_script_makes_what_is_tried(tmp_path: Path, torch_process: None) -> None:
    run = doctor(tmp_path, "train:make", "--environment")

    assert run.returncode == 0
    assert run.stdout.startswith("Linear: ")


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("train", "nbguard: train is no target: name a module and what it makes, as in  nbguard doctor train:learn"),
        ("absent:learn", "nbguard: absent:learn cannot be made: ModuleNotFoundError: No module named 'absent'"),
        ("train:absent", "nbguard: train:absent cannot be made: AttributeError: module 'train' has no attribute 'absent'"),
        ("train:broken", "nbguard: train:broken cannot be made: OSError: no data here"),
    ],
)
def test_a_wrong_target_is_one_line(tmp_path: Path, torch_process: None, target: str, line: str) -> None:
    run = doctor(tmp_path, target)

    assert (run.returncode, run.stderr.strip()) == (2, line)
