"""States in the middle of a trace: those that the snapshot at its end is followed back to, against those that were there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.replay.moments import TraceMoment, TraceMoments
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, parse_snapshot
from tests.allocator import oracle
from tests.allocator.test_oracle import RUNS
from tests.thorough import examples, spread

MIB = 1024**2


def moments_of(raw: dict[str, Any], run: dict[str, Any]) -> TraceMoments:
    """Return the moments of a golden run that was made into a snapshot."""
    sidecar = Sidecar(torch_version=run["torch"], totals=(run["capacity"],), fractions=(run["fraction"],))
    return TraceMoments(parse_snapshot(raw, 1 << 30, sidecar), 0)


def states_of(run: dict[str, Any], cut: int, count: int) -> dict[int, list[dict[str, Any]]]:
    """Return the segments before some random calls of the program, and at its end, by the number of events so far."""
    states: dict[int, list[dict[str, Any]]] = {}
    chance = random.Random(cut)
    share = count / len(run["ops"])

    def keep(model: CachingAllocator) -> None:
        if len(model.events) >= cut and chance.random() < share:
            states[len(model.events)] = model.segments()

    last = oracle.replay(run, keep)
    states[len(last.events)] = last.segments()
    return states


def rebuilt(moment: TraceMoment) -> list[Any]:
    """Return the segments of a moment, block by block."""
    return [
        (
            *(segment.address, segment.total_size, segment.stream, segment.is_expandable, segment.is_small, segment.pool),
            [(block.address, block.size, block.state, block.requested) for block in segment.blocks],
        )
        for segment in moment.snapshot.segments
    ]


def real(segments: list[dict[str, Any]]) -> list[Any]:
    """Return the segments of PyTorch's own snapshot in the same form; a free block's request has no meaning."""
    return [
        (
            *(segment["address"], segment["total_size"], segment["stream"], segment["is_expandable"]),
            *(segment["segment_type"] == "small", tuple(segment["segment_pool_id"])),
            [
                (
                    block["address"],
                    block["size"],
                    block["state"],
                    block["requested_size"] if block["state"] != "inactive" else 0,
                )
                for block in segment["blocks"]
            ],
        )
        for segment in segments
    ]


@pytest.mark.parametrize("share", [0, 0.3, 0.9], ids=["whole", "most", "last"])
@pytest.mark.parametrize("path", spread(RUNS, 4), ids=lambda path: path.name.removesuffix(".json.gz"))
def test_any_state_is_the_one_that_was_there(path: Path, share: float) -> None:
    run = oracle.read(path)
    cut = int(len(run["events"]) * share)
    moments = moments_of(oracle.as_snapshot(run, cut), run)

    for event, segments in states_of(run, cut, examples(30)).items():
        assert rebuilt(moments.at(event - cut)) == real(segments), event


def test_the_counters_are_those_of_the_states() -> None:
    run = oracle.read(RUNS[1])
    moments = moments_of(oracle.as_snapshot(run), run)

    for event, segments in states_of(run, 0, 30).items():
        live = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert moments.allocated[event] == sum(live)
        assert moments.reserved[event] == sum(segment["total_size"] for segment in segments)
    assert moments.allocated[moments.peak] == moments.replay.peak_allocated
    assert len(moments.allocated) == moments.events + 1


def test_the_end_is_the_file_itself_and_every_block_of_it_is_kept() -> None:
    run = oracle.read(RUNS[0])
    moments = moments_of(oracle.as_snapshot(run, 4000), run)

    end = moments.at(moments.events)

    assert rebuilt(end) == real(oracle.replay(run).segments())
    live = {block.address for segment in end.snapshot.segments for block in segment.blocks if block.state != "inactive"}
    assert end.kept == live
    assert end.forgotten == end.unsure == frozenset()


def test_blocks_that_came_before_and_went_are_forgotten() -> None:
    run = oracle.read(RUNS[0])
    cut = len(run["events"]) // 2
    moments = moments_of(oracle.as_snapshot(run, cut), run)

    start = moments.at(0)

    live = {block.address for segment in start.snapshot.segments for block in segment.blocks if block.state != "inactive"}
    assert len(live) == moments.left_before
    assert start.kept | start.forgotten == live
    assert start.forgotten
    assert start.unsure <= start.forgotten


def test_states_far_apart_are_the_same_whichever_way_they_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbguard.memory.allocator.replay.moments._APART", 50)
    run = oracle.read(RUNS[2])
    moments = moments_of(oracle.as_snapshot(run), run)
    order = random.Random(2).sample(range(moments.events + 1), 30)

    there = {event: rebuilt(moments.at(event)) for event in order}

    assert {event: rebuilt(moments.at(event)) for event in sorted(order)} == there


def test_a_trace_that_contradicts_the_end_is_refused() -> None:
    run = oracle.read(RUNS[0])
    raw = oracle.as_snapshot(run)
    raw["device_traces"][0].append({"action": "alloc", "addr": 512, "size": MIB, "stream": 0})

    with pytest.raises(SnapshotError, match="contradict"):
        moments_of(raw, run)
