"""Snapshot files: every schema is read; whatever else a file holds, reading it ends in one SnapshotError."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.snapshot import read, reader_process
from nbguard.memory.allocator.snapshot.read import load_snapshot, sidecar_data, sidecar_path
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, Snapshot
from tests.allocator import oracle
from tests.allocator.test_oracle import RUNS

Json = dict[str, Any]
FRAME = {"filename": "/home/ada/train.py", "line": 31, "name": "forward"}


def small() -> Json:
    """A snapshot as torch 2.15 writes it: one segment of three blocks, one request."""
    base = 0x7F0000000000
    block = {"size": 512, "requested_size": 100, "state": "active_allocated", "frames": [FRAME]}
    blocks = [
        block | {"address": base},
        block | {"address": base + 512, "state": "active_pending_free"},
        {"address": base + 1024, "size": 2**21 - 1024, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segment = {"device": 0, "address": base, "total_size": 2**21, "stream": 0, "segment_type": "small", "blocks": blocks}
    segment |= {"segment_pool_id": (0, 0), "is_expandable": False, "frames": []}
    event = {"action": "alloc", "addr": base, "size": 100, "stream": 0, "time_us": 1, "frames": [FRAME], "pool_id": (0, 0)}
    note = {"action": "annotate", "addr": base, "size": 0, "stream": 0}
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "roundup_power2_divisions": {"1": 4}}
    return {"segments": [segment], "device_traces": [[event, note], []], "allocator_settings": settings}


def loads(folder: Path, content: bytes) -> Snapshot:
    file = folder / "file"
    file.write_bytes(content)
    return load_snapshot(file)


@pytest.fixture(params=["here", "in a process of its own"], autouse=True)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both readers of pickles, which read small and large files, are given each file."""
    monkeypatch.setattr(read, "LARGE", 0 if request.param != "here" else read.MAX_BYTES)
    monkeypatch.setattr(reader_process, "LEAST_SECONDS", 2)
    return str(request.param)


# --- what is read -----------------------------------------------------------------------------------------------------------


def test_stacks_that_differ_in_one_frame_are_told_apart(tmp_path: Path) -> None:
    frames = [FRAME | {"line": line} for line in range(9)]
    stacks = [[*frames[:at], frames[(at + 1) % 9], *frames[at + 1 :]] for at in range(9)]
    raw = small()
    (event,) = (entry for entry in raw["device_traces"][0] if entry["action"] == "alloc")
    raw["device_traces"] = [[event | {"frames": [*stacks[n % 9]]} for n in range(90)]]

    found = loads(tmp_path, pickle.dumps(raw))

    lines = [[line for _, line, _ in found.stacks[number]] for number in found.traces[0].stacks]
    assert lines == [[frame["line"] for frame in stacks[n % 9]] for n in range(90)]


def test_frames_that_take_forever_to_compare_are_not_compared(tmp_path: Path) -> None:
    raw = small()
    event = raw["device_traces"][0][0]
    events = []
    for _ in range(2):
        deep: list[object] = []
        for _ in range(60):
            deep = [deep, deep]
        events.append(event | {"frames": [FRAME, FRAME, FRAME, FRAME | {"deep": deep}]})
    raw["device_traces"] = [events]

    assert len(loads(tmp_path, pickle.dumps(raw)).traces[0].events) == 2


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol(protocol: int, tmp_path: Path) -> None:
    found = loads(tmp_path, pickle.dumps(small(), protocol))

    (segment,) = found.segments
    assert [block.state for block in segment.blocks] == ["active_allocated", "active_pending_free", "inactive"]
    assert [*found.stacks] == [(("/home/ada/train.py", 31, "forward"),)]
    assert [block.stack for block in segment.blocks] == [0, 0, -1]
    assert tuple(found.traces[0].events) == (("alloc", segment.address, 100, 0),)
    assert (found.traces[0].pools, found.traces[0].left_out) == (((0, 0),), 1)
    assert found.divisions == (4, *[0] * 15)
    assert "action annotate" in found.hints


def test_json_and_gz(tmp_path: Path) -> None:
    text = json.dumps(small()).encode()

    expected = loads(tmp_path, pickle.dumps(small()))
    assert loads(tmp_path, text) == loads(tmp_path, gzip.compress(text)) == loads(tmp_path, b"\xef\xbb\xbf \n" + text)
    assert loads(tmp_path, text) == expected
    assert loads(tmp_path, gzip.compress(pickle.dumps(small()))) == expected


def test_the_list_of_segments_alone(tmp_path: Path) -> None:
    found = loads(tmp_path, pickle.dumps(small()["segments"]))

    assert (len(found.segments), found.traces, found.settings) == (1, (), None)


def test_torch_2_0(tmp_path: Path) -> None:
    old = small()
    for block in old["segments"][0]["blocks"]:
        del block["address"]
        frames = block.pop("frames")
        block["history"] = [{"addr": 1, "real_size": 100, "frames": frames}] if frames else []
    for key in ("segment_pool_id", "is_expandable", "frames"):
        del old["segments"][0][key]
    del old["allocator_settings"]
    old["device_traces"] = [[{"action": "oom", "device_free": 5, "size": 512, "stream": 0, "frames": []}]]

    found = loads(tmp_path, pickle.dumps(old, 2))

    assert [block.address - found.segments[0].address for block in found.segments[0].blocks] == [0, 512, 1024]
    assert [block.stack for block in found.segments[0].blocks] == [0, 0, -1]
    assert tuple(found.traces[0].events) == (("oom", 5, 512, 0),)
    assert found.settings is None


@pytest.mark.parametrize(
    ("settings", "conf"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, "max_split_size": -1}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:30", "expandable_segments": True, "max_split_size": 2**26}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "expandable_segments": False}, "expandable_segments:False"),
        ({"garbage_collection_threshold": 0.5}, "garbage_collection_threshold:0.5"),
    ],
)
def test_settings_that_an_earlier_call_left_in_force(settings: Json, conf: str | None, tmp_path: Path) -> None:
    found = loads(tmp_path, pickle.dumps(small() | {"allocator_settings": settings})).settings

    assert found == ("large_segment_size_mb:30,expandable_segments:True,max_split_size_mb:64" if conf is None else conf)


def test_what_stands_beside(tmp_path: Path) -> None:
    file = tmp_path / "run.pickle"
    file.write_bytes(pickle.dumps(small()))
    facts = Sidecar(
        torch_version="2.13.0+cu130",
        settings="expandable_segments:True",
        totals=(2**34,),
        frees=(2**30,),
        fractions=(0.5,),
        names=("NVIDIA L4",),
    )
    sidecar_path(file).write_text(json.dumps(sidecar_data(facts)))

    assert load_snapshot(file).sidecar == facts

    sidecar_path(file).write_text('{"nbguard": 1, "totals": ["x"]}')
    with pytest.raises(SnapshotError, match=r"run\.pickle\.nbguard\.json next to it is damaged"):
        load_snapshot(file)


def test_progress_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(pickle.dumps(oracle.as_snapshot(oracle.read(RUNS[0]))))
    told: list[tuple[int, int]] = []

    load_snapshot(file, lambda done, total: told.append((done, total)))

    size = file.stat().st_size
    assert told[0] == (0, size)
    assert told[-1] == (size, size)
    assert told == sorted(told)
