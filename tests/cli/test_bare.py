"""The command line where PyTorch, psutil and NVML's binding are not installed: as `pipx run nbguard` finds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_files import snapshot_file

_MISSING = ("torch", "numpy", "fastai", "psutil", "pynvml", "matplotlib")
_RUN = f"""
import sys
sys.modules.update(dict.fromkeys({_MISSING!r}))
from nbguard.frontend.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        (["diagnose", "FILE"], 1, "ran out of memory"),
        (["map", "FILE"], 0, "reserved"),
        (["diff", "FILE", "FILE"], 0, "no holder changed"),
        (["replay", "FILE"], 0, "events reproduced"),
        (["whatif", "FILE", "--set", ""], 0, "defaults"),
        (["gpus"], 1, "nvidia-ml-py is not installed"),
        (["status"], 0, "nbguard is not loaded automatically"),
        (["predict", __file__], 2, "PyTorch is not installed here"),
    ],
)
def test_a_command_needs_none_of_them(arguments: list[str], status: int, shown: str, tmp_path: Path) -> None:
    file = str(snapshot_file(tmp_path, "2.11.0_49"))
    command = [sys.executable, "-c", _RUN, *(file if word == "FILE" else word for word in arguments)]

    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"IPYTHONDIR": str(tmp_path), "PYTHONPATH": "."}
    )

    assert shown in done.stdout + done.stderr, done.stdout + done.stderr
    assert done.returncode == status
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["map", "FILE"], ["diagnose", "FILE", "--json"], ["schema"]])
def test_a_reader_that_goes_early_ends_it_without_a_word(arguments: list[str], tmp_path: Path) -> None:
    file = str(snapshot_file(tmp_path, "2.11.0_49"))
    command = [sys.executable, "-m", "nbguard", *(file if word == "FILE" else word for word in arguments)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (141, "")
