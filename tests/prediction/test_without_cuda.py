"""The same numbers by a PyTorch that was built without CUDA, as on a Mac or from the CPU wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.prediction.test_oracle import CLOSE, EXACT
from tests.prediction.without_cuda import peaks
from tests.thorough import THOROUGH

ROOT = Path(__file__).parents[2]


def _cpu_build(folder: Path) -> str | None:
    """Return why PyTorch's build without CUDA could not be put into a folder; None: it is there."""
    version = str(torch.__version__).partition("+")[0]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"torch=={version}+cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return done.stderr[-500:] if done.returncode else None


@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH, reason="it installs PyTorch's CPU build beside: NBGUARD_THOROUGH=1")
def test_a_build_without_cuda_predicts_the_same(tmp_path: Path) -> None:
    if reason := _cpu_build(tmp_path):
        pytest.skip(f"no CPU build of this PyTorch: {reason}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-m", "tests.prediction.without_cuda"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=environment, cwd=ROOT).stdout
    other: dict[str, Any] = json.loads(out.splitlines()[-1])

    assert other["cuda"] is None
    assert {case: tuple(both) for case, both in other["peaks"].items()} == peaks([*EXACT, *CLOSE])


def test_a_prediction_asks_cuda_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a build with CUDA has is gone: the figures stay."""
    cases = ["mlp bf16", "gpt"]
    before = peaks(cases)
    for name in [name for name in dir(torch._C) if name.startswith("_cuda_")]:
        monkeypatch.delattr(torch._C, name)

    assert peaks(cases) == before
