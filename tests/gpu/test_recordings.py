"""What was recorded on a real GPU, on every machine: it adds up, and nbguard says of it what torch counted there."""

from __future__ import annotations

import pytest

from tests.gpu import replay
from tests.gpu.child import ROOT
from tests.gpu.recording import load_all

PLACE = ROOT / "tests/data/gpu"


@pytest.mark.slow
def test_what_was_recorded_on_a_gpu_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = dict(load_all(PLACE))

    assert recorded
    assert not any(recording["dry"] for recording in recorded.values())
    assert replay.main(PLACE) == 0, capsys.readouterr().out
