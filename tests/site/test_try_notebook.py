"""The notebook with which nbguard can be tried runs without PyTorch, and its text says what its cells print.

`tests/ui/test_lite.py` runs it in a browser.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nbguard
from tests.kernels import Kernel
from tests.site.pages import DOCS, ROOT, lines
from tests.site.try_notebook import code_cells, put_files

SHOWN = (
    "256 MiB was asked for; the device had 75.5 GiB left. A limit on this process refused it",
    "Set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128: request 110 of 110 (256 MiB) would find room, as would all others",
    "losses 160 MiB 40 blocks, mostly allocated at train.py:20",
    "allocated 244 MiB",
    "After event 1,299 of 1,306",
    "losses +160 MiB 0 MiB 160 MiB",
    "train.py:20:23: NBG301 model is evaluated with gradients on",
    "No setting here helps: request 470 of 470 (4 MiB) finds no room, nor under any of these settings. 252 MiB of 256 MiB",
    "With 512 MiB instead of 256 MiB the failed request finds room under the recorded settings",
)


def test_its_cells_run_without_pytorch(plain_kernel: Kernel) -> None:
    put_files(plain_kernel.cwd)
    printed = []
    for code in code_cells():
        cell = plain_kernel.run(code)
        assert cell.error is None, f"{code}\n{cell.traceback}"
        printed += lines(f"{cell.stdout}\n{cell.text}")

    text = "\n".join(printed)
    assert [sentence for sentence in SHOWN if sentence not in text] == [], text


@pytest.mark.slow
def test_the_recording_is_of_the_script_beside_it(tmp_path: Path) -> None:
    """Another PyTorch may have other events, but not other losses."""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, DOCS / "make_recording.py", tmp_path], check=True, cwd=ROOT)

    for folder in (DOCS / "lite", tmp_path):
        report = nbguard.snapshot_report(folder / "training.pickle")
        assert any(line.startswith("losses 160 MiB ") for line in lines(str(report))), report
