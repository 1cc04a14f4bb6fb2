"""A rehearsal of what `make gpu-day` records: a recording made on the fake device holds what its checks ask of a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["graph", "record-stream", "pools", "pool-left", "oom"])
def test_a_recording_passes_its_checks(fake_cuda_run: Callable[..., str], tmp_path: Path, name: str) -> None:
    printed = fake_cuda_run(
        f"""
from pathlib import Path
from tests.gpu import recording, replay
from tests.gpu.record import record
folder = Path("{tmp_path}")
recording.dump(record("{name}", dry=True), folder / f"{name}{{recording.SUFFIX}}")
((_, found),) = dict(recording.load_all(folder)).items()
replay.check(found)
print("checked", len(replay.CHECKS))
""",
        events="manual",
    )
    assert "checked" in printed
