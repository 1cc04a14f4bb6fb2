"""Predicted peaks beside those that the same fits took on a real GPU."""

from __future__ import annotations

import pytest

from nbguard.training.prediction.emulation import operators
from nbguard.training.prediction.predict import predict
from nbguard.training.prediction.rules import attention
from tests.prediction.fits import make

MIB = 2**20
REAL = {
    "mlp": (98.50, 114),
    "gpt": (451.74, 588),
    "gpt bf16": (400.69, 448),
    "gpt checkpoint": (330.49, 476),
    "tabular": (69.92, 72),
}
"""MiB allocated and reserved at most on an H100, with PyTorch 2.11 (`python -m tests.gpu.predicted`)."""


@pytest.mark.parametrize("case", REAL)
def test_as_on_an_h100(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.9 to 2.11 keep a workspace of cuBLASLt beside cuBLAS's, where a layer adds a bias."""
    monkeypatch.setattr(attention, "_SEED_ON_DEVICE", False)  # as before 2.14
    monkeypatch.setattr(operators, "cublaslt_workspace", lambda torch: MIB)
    monkeypatch.setattr(operators, "keeps_workspaces", lambda torch: True)
    found = predict(make(case, "cpu"), gpu="H100")

    assert (round(found.peak_allocated / MIB, 2), found.peak_reserved / MIB) == REAL[case]


def test_a_single_output_needs_no_workspace_of_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for workspace in (None, MIB):
        monkeypatch.setattr(operators, "cublaslt_workspace", lambda torch, size=workspace: size)
        peaks.append(predict(make("tabular", "cpu"), gpu="H100").peak_allocated)

    assert peaks[0] == peaks[1]
