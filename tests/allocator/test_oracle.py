"""The model against golden runs of PyTorch's real allocator binaries; `check_oracle.py` does the same for any file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nbguard.memory.allocator.model import settings
from nbguard.memory.allocator.model.allocator import CachingAllocator
from tests.allocator import oracle

RUNS = sorted((Path(__file__).parents[1] / "data/oracle").glob("*.json.gz"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_run_is_exact(path: Path) -> None:
    assert oracle.difference(oracle.read(path)) == ""


def test_every_version_and_setting_is_among_them() -> None:
    runs = [oracle.read(path) for path in RUNS]

    assert {run["tie"] for run in runs} == {"address", "blockctr", "segctr"}
    assert len({run["conf"] for run in runs}) == 10
    assert {event[0] for run in runs for event in run["events"]} == {
        *("alloc", "free_requested", "free_completed", "oom"),
        *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    }


@pytest.mark.parametrize("wrong", ["tie", "rounding", "age"])
def test_a_wrong_rule_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match wrong:
        case "tie":
            monkeypatch.setattr("nbguard.memory.allocator.model.allocator.tie_break", lambda version: "address")
        case "rounding":
            monkeypatch.setattr("nbguard.memory.allocator.model.settings.NEWEST", (2, 9))
            monkeypatch.setattr("tests.allocator.oracle.parse_version", lambda text: (2, 9))
        case "age":
            monkeypatch.setattr(CachingAllocator, "_collect_garbage", lambda allocator: None)

    different = [path.name for path in RUNS if _differs(path)]

    assert different


def _differs(path: Path) -> bool:
    run = oracle.read(path)
    if run["torch"].startswith("2.9") or "large_segment" in run["conf"]:
        return False
    return bool(oracle.difference(run))


def test_the_script_counts_and_fails(tmp_path: Path) -> None:
    import gzip
    import json

    run = oracle.read(RUNS[0])
    run["events"][100][1] += 512
    bad = tmp_path / "bad.json.gz"
    bad.write_bytes(gzip.compress(json.dumps(run).encode()))
    script = Path(oracle.__file__).with_name("check_oracle.py")

    done = subprocess.run([sys.executable, script, RUNS[0], bad], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "event 100" in done.stdout
    assert done.stdout.endswith("1 of 2 runs exact\n")


def test_a_model_starts_empty() -> None:
    model = CachingAllocator(capacity=settings.LARGE_SEGMENT)

    assert (model.events, model.segments(), model.reserved) == ([], [], 0)
