"""The processes that tests of `make unit` start: they have no PyTorch either, as in an environment without it."""

from __future__ import annotations

import subprocess
import sys


def test_a_process_that_a_test_starts_cannot_import_pytorch() -> None:
    started = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, check=False)

    assert started.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch': `make unit` runs without it"
