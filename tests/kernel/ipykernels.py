"""Releases of ipykernel side by side, for tests: each in a folder of its own, installed once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VERSIONS = ("6.31.0", "7.0.1", "7.1.0", "7.2.0", "7.3.0", "7.4.0")
_HOME = Path(__file__).parents[2] / "build" / "ipykernels"


def folder_of(version: str) -> Path | None:
    """Return the folder with a release of ipykernel; None if it is not there and no registry gives it."""
    folder = _HOME / version
    if not (folder / "ipykernel").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "0", "--timeout", "10"]
        run = subprocess.run([*pip, "--target", str(folder), f"ipykernel=={version}"], capture_output=True, check=False)
        if run.returncode:
            return None
    return folder
