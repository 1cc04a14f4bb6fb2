"""A share of the matrix of trainings that run out of memory; `python -m tests.survive.matrix` runs all of it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.survive.matrix import SETS, on_host
from tests.thorough import THOROUGH


@pytest.mark.slow
def test_losses_and_callbacks_on_the_cpu() -> None:
    rows = list(on_host(1 if THOROUGH else 13))
    assert len(rows) == len(SETS)
    assert sum(row["errors"] for row in rows) > len(SETS)
    for row in rows:
        assert row["largest difference"] <= 1e-6, row
        assert row["refused"] == 0, row
        assert row["same bits"] == row["of the first batch"], row


_CODE = "import json; from tests.survive.matrix import on_device\nfor row in on_device({}): print(json.dumps(row))\n"


@pytest.mark.slow
@pytest.mark.fakecuda
def test_models_and_places_on_the_device(fake_cuda_run: Callable[..., str]) -> None:
    printed = fake_cuda_run(_CODE.format(1 if THOROUGH else 19), bytes=8 * 2**30, TORCH_CPP_LOG_LEVEL="ERROR", timeout=600)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(rows) == (96 if THOROUGH else 6)
    for row in rows:
        assert not row["error"] or row["refused"] or "last" in row["case"], row
    assert sum(not row["error"] and row["of a piece"] < row["items"] for row in rows) > len(rows) // 2
