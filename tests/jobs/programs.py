"""Programs in processes of their own, run by `python` and by `nbguard run`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-W", "ignore")
NBGUARD = (*PYTHON, "-m", "nbguard", "run")

Ended = subprocess.CompletedProcess[str]


def ended(command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None, timeout: float = 240) -> Ended:
    """Run a command in a folder to its end, and return its status and its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "SLURM_", "RANK", "MASTER_"))}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **(variables or {})}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=timeout)
