"""Predicted peaks beside those of the same fits on this machine's GPU, each in a process of its own: a table in Markdown.

python -m tests.gpu.predicted [CASE …]               fits of `tests/prediction/fits.py`
python -m tests.gpu.predicted --applications [CASE …] fastai's applications, of `tests/prediction/applications.py`
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

from tests.gpu.child import ROOT

CASES = (
    "mlp",
    "gpt",
    "gpt bf16",
    "gpt checkpoint",
    "vite bf16",
    "tabular",
    "xresnet18",
    "xresnet18 bf16",
    "resnet18 channels_last bf16",
)
SHORT = ("mlp", "gpt bf16")
APPLICATIONS = "--applications"
_MIB = 2**20
_FIT = """
import json, sys, warnings; warnings.filterwarnings("ignore")
import torch
from functools import partial
from pathlib import Path
from nbguard.training.prediction.predict import predict
from tests.prediction import applications, fits
case, folder = sys.argv[1:]
made_by = applications if folder else fits
make = partial(made_by.make, case, Path(folder)) if folder else partial(made_by.make, case)
kept = torch.ones(1, device="cuda")  # the prediction is for the device that is in use
predicted = predict(make("cpu"))
learn = make("cuda")
torch.cuda.reset_peak_memory_stats()
made_by.fit(learn)
real = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
print(json.dumps([predicted.peak_allocated, predicted.peak_reserved, predicted.band, *real]))
"""


def row(case: str, *, is_application: bool = False) -> str:
    """Return the row of a case: MiB predicted and real, and how far off, allocated and reserved; or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _FIT, case, folder if is_application else ""]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    if done.returncode:
        return f"| {case} | {(done.stderr.strip().splitlines() or ['no output'])[-1][:120]} | | |"
    figures: list[Any] = json.loads(done.stdout.splitlines()[-1])
    allocated, reserved, band, was_allocated, was_reserved = figures
    holds = "" if was_reserved <= reserved + band else ": too small"
    cells = [_cell(allocated, was_allocated), _cell(reserved, was_reserved), f"{band / _MIB:,.0f}{holds}"]
    return f"| {case} | " + " | ".join(cells) + " |"


def _cell(predicted: int, real: int) -> str:
    share = "exact" if predicted == real else f"{predicted / real - 1:+.2%}"
    return f"{predicted / _MIB:,.2f} / {real / _MIB:,.2f} ({share})"


def main() -> None:
    """Print the table."""
    is_application = APPLICATIONS in sys.argv
    named = [case for case in sys.argv[1:] if case != APPLICATIONS]
    if is_application and not named:
        from tests.prediction import applications

        named = list(applications.CASES)
    print("MiB, predicted / real:\n")
    print("| fit | allocated | reserved | band |\n|---|---|---|---|")
    beside = max(1, min(3, (os.cpu_count() or 1) // 4))  # each fit has a process and a peak of its own
    with concurrent.futures.ThreadPoolExecutor(beside) as pool:
        for line in pool.map(partial(row, is_application=is_application), named or CASES):
            print(line, flush=True)


if __name__ == "__main__":
    main()
