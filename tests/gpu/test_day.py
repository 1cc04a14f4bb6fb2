"""The parts of a GPU day that need no GPU: what leaves the machine, where it goes, and steps that do not end."""

from __future__ import annotations

import copy
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import child, device, recording, replay, section
from tests.gpu.bundle import adopt, bundle
from tests.gpu.day import Day
from tests.gpu.room import PARTS
from tests.gpu.steps import Step, steps

MIB = 1024**2
_FRAMES = [{"filename": "/home/someone/env/site-packages/torch/nn/linear.py", "line": 7, "name": "forward"}]
_SNAPSHOT: dict[str, Any] = {
    "allocator_settings": {"expandable_segments": False},
    "segments": [
        {
            "device": 0,
            "address": 4096,
            "total_size": 2 * MIB,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "blocks": [
                {"address": 4096, "size": MIB, "requested_size": MIB - 1, "state": "active_allocated", "frames": _FRAMES},
                {"address": 4096 + MIB, "size": MIB, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 4096, "size": 2 * MIB, "time_us": 1_000, "frames": _FRAMES},
            {"action": "alloc", "addr": 4096, "size": MIB - 1, "time_us": 1_001, "frames": _FRAMES},
        ]
    ],
}


@pytest.fixture
def recorded() -> recording.Json:
    """A recording of one live block in one segment."""
    stats = {f"{kind}_bytes.all.current": size * MIB for kind, size in (("allocated", 1), ("active", 1), ("reserved", 2))}
    facts = {"name": "A GPU", "capacity": 100 * MIB, "capability": [9, 0], "versions": {"torch": "2.11.0"}}
    packed: recording.Json = json.loads(json.dumps(recording.packed(_SNAPSHOT)))
    return packed | {
        "schema": recording.SCHEMA,
        "name": "one",
        "dry": False,
        "device": facts,
        "settings": "",
        "pools_in_use": [],
        "memory_stats": stats,
        "mem_get_info": [88 * MIB, 100 * MIB],
        "context": {"mem_get_info": [90 * MIB, 100 * MIB]},
        "nvml": {"total": 101 * MIB, "used": 13 * MIB, "own": 12 * MIB, "others": 0},
        "afterwards": {"empty_cache": [2 * MIB, 2 * MIB]},
    }


def test_a_recording_that_adds_up_passes_every_check(recorded: recording.Json) -> None:
    replay.check(recorded)


def _change(path: str, value: object) -> Callable[[recording.Json], None]:
    def change(recorded: recording.Json) -> None:
        *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
        place: Any = recorded
        for step in way:
            place = place[step]
        place[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 0),
        ("segments/0/total_size", 3 * MIB),
        ("segments/0/blocks/0/state", "active_pending_free"),
        ("segments/0/blocks/1/address", 5 * MIB),
        ("memory_stats/active_bytes.all.current", 2 * MIB),
        ("afterwards/empty_cache", [2 * MIB, 0]),
        ("mem_get_info", [99 * MIB, 100 * MIB]),
        ("context/mem_get_info", [100 * MIB, 100 * MIB]),
        ("device_traces/0/1/size", MIB),
        ("device_traces/0/0/action", "segment_free"),
        ("device_traces/0/1/action", "oom"),
    ],
)
def test_a_recording_that_contradicts_itself_does_not(recorded: recording.Json, path: str, value: object) -> None:
    _change(path, value)(recorded)

    with pytest.raises(AssertionError):
        replay.check(recorded)


def test_a_recording_gives_back_what_torch_gave() -> None:
    found = recording.unpacked(recording.packed(_SNAPSHOT))

    event = found["device_traces"][0][1]
    assert (event["action"], event["addr"], event["time_us"]) == ("alloc", 4096, 1)
    assert event["frames"] == [{"filename": "torch/nn/linear.py", "line": 7, "name": "forward"}]
    assert found["segments"][0]["blocks"][1]["frames"] == []


@pytest.mark.parametrize("value", ["/somewhere/else.py", str(Path.home()), str(Path.cwd())])
def test_a_recording_that_names_a_machine_is_not_written(tmp_path: Path, recorded: recording.Json, value: str) -> None:
    recorded["what"] = value

    with pytest.raises(AssertionError, match="the recording names"):
        recording.dump(recorded, tmp_path / "one.json.gz")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with figures."""
    (tmp_path / "root/docs").mkdir(parents=True)
    (tmp_path / "root/docs/benchmarks.md").write_text("# Figures\n")
    return tmp_path / "root"


def _left(tmp_path: Path, recorded: recording.Json, words: str) -> Path:
    work = tmp_path / "work"
    (work / "recordings").mkdir(parents=True, exist_ok=True)
    recording.dump(recorded, work / "recordings/one.json.gz")
    (work / "section.md").write_text(f"{section.BEGIN}\n{words}\n{section.END}\n")
    bundle(work, tmp_path / "out")
    return tmp_path / "out"


def test_what_a_day_left_is_put_in_its_places_again_and_again(tmp_path: Path, root: Path, recorded: recording.Json) -> None:
    for words in ("first", "second"):
        assert adopt(_left(tmp_path, recorded, words), root) == 0

    figures = (root / "docs/benchmarks.md").read_text()
    assert figures == f"# Figures\n\n{section.BEGIN}\nsecond\n{section.END}\n"
    assert dict(recording.load_all(root / "tests/data/gpu")) == {"one": recorded}


@pytest.mark.parametrize("dry", [True, False])
def test_a_dry_day_is_not_taken_over(tmp_path: Path, root: Path, recorded: recording.Json, dry: bool) -> None:
    out = _left(tmp_path, copy.deepcopy(recorded) | {"dry": dry}, "" if dry else section.NOT_MEASURED)

    assert adopt(out, root) == 2
    assert not (root / "tests").exists()
    assert (root / "docs/benchmarks.md").read_text() == "# Figures\n"


def test_a_bundle_names_no_user(tmp_path: Path, recorded: recording.Json) -> None:
    with tarfile.open(fileobj=io.BytesIO((_left(tmp_path, recorded, "") / "gpu-day.tar.gz").read_bytes())) as found:
        assert {(member.uid, member.uname, member.gname) for member in found} == {(0, "", "")}


def test_a_step_that_does_not_end_is_stopped_and_the_next_one_runs(tmp_path: Path) -> None:
    day = Day(tmp_path, deadline=60)

    day.do(Step("endless", ["-c", "import subprocess as s; print('begun'); s.run(['sleep', '60'])"], limit=0.5))
    day.do(Step("broken", ["-c", "raise SystemExit('reason')"], limit=30))
    day.do(Step("lacking", ["-c", ""], limit=30, needs=("no_such_module",)))
    day.do(Step("good", ["-c", "print('figure')"], limit=30, title="Title"))

    assert day.failed == ["endless", "broken"]
    assert day.outputs == {"Title": "figure\n"}
    assert "reason" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("dry", [True, False])
def test_the_ways_on_where_a_gpu_is_full_are_a_part_of_the_day(tmp_path: Path, dry: bool) -> None:
    (step,) = [step for step in steps(tmp_path, dry=dry) if step.name == "room"]

    assert (step.is_alone, "GPU" in step.title) == (True, True)
    assert set(PARTS) == {"move", "airbag", "survive", "garage"}


def test_past_the_deadline_nothing_is_started(tmp_path: Path) -> None:
    day = Day(tmp_path, deadline=0)

    day.do(Step("late", ["-c", ""], limit=30))

    assert day.failed == ["late"]


@pytest.mark.parametrize(
    ("name", "dry", "words"),
    [("", False, "no GPU"), (device.FAKE, False, "Add --dry"), ("A GPU", True, "fake runtime"), ("A GPU", False, "")],
)
def test_where_the_day_does_not_run_one_line_says_why(name: str, dry: bool, words: str) -> None:
    reason = device.refusal({"name": name, "versions": {"torch": "2.11.0"}}, dry=dry)

    assert words in reason
    assert bool(reason) == bool(words)
    assert "\n" not in reason


def test_settings_of_the_caller_do_not_reach_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    code = "import os; print(*(os.environ[n] for n in ('PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF')), sep='|')"

    assert child.run(["-c", code], 30, child.with_settings("max_split_size_mb:64")).last_line == "max_split_size_mb:64|"
