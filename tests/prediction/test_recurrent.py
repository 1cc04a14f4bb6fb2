"""The sizes of recurrent layers beside those that cuDNN took on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nbguard.training.prediction.rules.recurrent import sizes_of

_DATA: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/recurrent/h200.json").read_text())
_ROWS = [dict(zip(_DATA["columns"], row, strict=True)) for row in _DATA["rows"]]
_KINDS = {"lstm": "lstm", "gru": "gru", "rnn": "rnn_tanh"}


def _sizes(row: dict[str, Any]) -> Any:
    return sizes_of(
        _KINDS[row["kind"]],
        layers=row["layers"],
        directions=1 + row["both"],
        cells=row["units"] * row["hidden"],
        weights=row["weights"],
        item=row["item"],
        has_dropout=bool(row["dropout"]),
    )


@pytest.mark.parametrize("kind", _KINDS)
def test_the_reserve_is_what_cudnn_took(kind: str) -> None:
    rows = [row for row in _ROWS if row["kind"] == kind and row["train"]]
    off = [_sizes(row).reserve - row["reserve"] for row in rows]

    assert len(rows) > 80
    assert (min(off) >= 0, max(off) <= 256) == (True, True)


@pytest.mark.parametrize("kind", _KINDS)
def test_the_workspaces_stay_within_the_band(kind: str) -> None:
    """The forward pass makes its outputs besides, the backward pass the weights' gradients."""
    rows = [row for row in _ROWS if row["kind"] == kind]
    forward = [row["forward_peak"] - row["outputs"] - _sizes(row).workspace for row in rows]
    backward = [row["backward_peak"] - row["weights"] * row["item"] - _sizes(row).workspace for row in rows]

    assert (max(forward) <= 0, max(backward) <= 0) == (True, True)
