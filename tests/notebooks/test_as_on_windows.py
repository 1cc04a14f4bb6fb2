"""A session of IPython with a model and a fit, as it goes on Windows: every word of the magics that needs no file of Linux."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SESSION = """
import torch, psutil
from torch import nn
from IPython.core.interactiveshell import InteractiveShell
import tests.as_on_windows

shell = InteractiveShell.instance()
for cell in (
    "%load_ext nbguard",
    "import torch; from torch import nn\\nm = nn.Linear(1000, 1000); losses = [m(torch.rand(100, 1000)).sum()]",
    "m",
    "try: m(torch.rand(3, 3))\\nexcept RuntimeError as error: failed = error",
    "%gpumem",
    "%gpumem why losses",
    "%gpumem leak 3 losses.append(m(torch.rand(9, 1000)).sum())",
    "%%profile_fit\\nopt = torch.optim.SGD(m.parameters(), lr=1e-3)\\nfor i in range(30):\\n"
    "    loss = m(torch.rand(8, 1000)).pow(2).mean(); loss.backward(); opt.step(); opt.zero_grad()",
    "%gpumem simulate 1GiB",
    "kept = torch.empty(1 << 26)",
    "%gpumem simulate off",
    "%nbguard on",
    "kept = None",
    "%gpumem history",
    "%nbguard doctor --environment",
    "%reset_gpu --dry-run",
    "%reset_gpu losses failed loss",
    "%nbguard off",
):
    result = shell.run_cell(cell, store_history=True)
    print("FAILED" if result.error_before_exec or result.error_in_exec else "ran", cell.splitlines()[0])
"""


@pytest.mark.slow
def test_a_session_as_on_windows(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", _SESSION],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "IPYTHONDIR": str(tmp_path), "HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    said = ran.stdout + ran.stderr
    assert "FAILED" not in said, said
    assert "mistake in nbguard" not in said
    assert "please report" not in said
    assert "freed 496 KiB of 496 KiB promised" in said
