"""Recordings of real GPUs: what nbguard says of each is what torch counted there. `make gpu-day` makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import recording, replay

DATA = Path(__file__).parent / "data/gpu"
RECORDINGS = dict(recording.load_all(DATA)) if DATA.is_dir() else {}


@pytest.mark.skipif(not RECORDINGS, reason="no recordings from a real GPU yet")
@pytest.mark.parametrize("check", replay.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", RECORDINGS or ["none"])
def test_recording(name: str, check: Callable[[recording.Json], None]) -> None:
    check(RECORDINGS[name])


@pytest.mark.skipif(not RECORDINGS, reason="no recordings from a real GPU yet")
def test_all_of_them_are_real_and_small() -> None:
    files = list(DATA.glob(f"*{recording.SUFFIX}"))

    assert not any(each["dry"] for each in RECORDINGS.values())
    assert max(file.stat().st_size for file in files) <= recording.LARGEST_FILE
    assert sum(file.stat().st_size for file in files) <= recording.LARGEST_SET
