"""Does a recording add up, and does nbguard say of it what torch counted? `python -m tests.gpu.replay PLACE`.

Everything here is a fact of the recording itself, so the same checks hold for one from a real GPU and from the fake.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

from nbguard.memory.allocator.replay.replay import replay
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, parse_snapshot
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import AllocatorStats, DeviceFacts, Facts, NvmlFacts, ProcessFact, Segment
from nbguard.memory.core.fragmentation import Fragmentation, fragmentation
from nbguard.memory.reports.report import DeviceReport, build_report
from nbguard.memory.scan.devices.segments import read_segments
from tests.gpu.recording import LARGEST_SET, SCHEMA, Json, load_all, unpacked


def segments(recording: Json) -> tuple[Segment, ...]:
    """Return the segments as nbguard reads them from torch."""
    return read_segments(unpacked(recording)["segments"]).get(0, ())


def device_facts(recording: Json) -> DeviceFacts:
    """Return the facts on the device as nbguard's probe would have made them."""
    free, total = recording["mem_get_info"]
    stats = recording["memory_stats"]
    return DeviceFacts(
        device="cuda:0",
        name=recording["device"]["name"],
        total=total,
        free=free,
        allocator=AllocatorStats(allocated=_current(stats, "allocated"), reserved=_current(stats, "reserved")),
        segments=segments(recording),
        nvml=_nvml(recording["nvml"]),
        settings=recording["settings"],
    )


def report(recording: Json) -> DeviceReport:
    """Return what nbguard reports on the recorded device."""
    return build_report(Analysis(Facts(tracked="cuda", devices=(device_facts(recording),), pid=1))).devices[0]


def space(recording: Json, freed: Collection[int] = ()) -> Fragmentation:
    """Return nbguard's sums over the segments, as if the blocks at the addresses `freed` were free."""
    return fragmentation(segments(recording), freed, {(first, second) for first, second in recording["pools_in_use"]})


def _nvml(readings: Json | None) -> NvmlFacts | None:
    if readings is None:
        return None
    known = readings["own"] is not None and readings["others"] == 0
    return NvmlFacts(readings["total"], readings["used"], (ProcessFact(1, readings["own"]),) if known else None)


def _current(stats: Json, kind: str) -> int:
    return int(stats[f"{kind}_bytes.all.current"])


def check_segments(recording: Json) -> None:
    """What lies in the segments is what torch's counters say."""
    found, stats = space(recording), recording["memory_stats"]
    assert found.reserved == _current(stats, "reserved")
    assert found.allocated == _current(stats, "allocated")
    assert found.allocated + found.pending == _current(stats, "active")
    assert found.allocated + found.pending + found.releasable + found.stranded + found.kept == found.reserved
    assert found.stranded >= 0
    for segment in segments(recording):
        assert sum(block.size for block in segment.blocks) == segment.total_size
        ends = [segment.address, *(block.address + block.size for block in segment.blocks)]
        assert [block.address for block in segment.blocks] == ends[:-1]


def check_releasable(recording: Json) -> None:
    """What nbguard calls releasable is what emptying the cache gave back (with what waited, which it waits for)."""
    before, after = recording["afterwards"]["empty_cache"]
    waited = {block.address for segment in segments(recording) for block in segment.blocks if "pending" in block.state}
    assert before == _current(recording["memory_stats"], "reserved")
    assert before - after == space(recording, waited).releasable


def check_report(recording: Json) -> None:
    """The parts add up to the device, the holders to what is allocated, and free is what the driver calls free."""
    seen = report(recording)
    free, total = recording["mem_get_info"]
    parts = {part.name: part.nbytes for part in seen.parts}
    assert sum(parts.values()) == total == seen.total
    assert parts["free"] == free
    assert parts["allocated"] == seen.allocated == _current(recording["memory_stats"], "allocated")
    assert sum(holder.retained for holder in seen.holders) == seen.allocated
    assert min(parts.values()) >= 0


def check_context(recording: Json) -> None:
    """Before the first allocation the device had room, and the context took some of it."""
    free, total = recording["context"]["mem_get_info"]
    assert 0 < free < total == recording["mem_get_info"][1]


def check_trace(recording: Json) -> None:
    """The trace starts with the process: what it allocated and did not free is just what lives at its end."""
    live: dict[int, int] = {}
    reserved = 0
    for event in recording["device_traces"][0]:
        match event["action"]:
            case "alloc":
                assert event["addr"] not in live
                live[event["addr"]] = event["size"]
            case "free_completed":
                assert live.pop(event["addr"]) == event["size"]
            case "segment_alloc" | "segment_map":
                reserved += event["size"]
            case "segment_free" | "segment_unmap":
                reserved -= event["size"]
    blocks = [block for segment in recording["segments"] for block in segment["blocks"] if block["state"] != "inactive"]
    assert live == {block["address"]: block["requested_size"] for block in blocks}
    assert reserved == _current(recording["memory_stats"], "reserved")


def check_model(recording: Json) -> None:
    """The model of the allocator does what was recorded, event by event, and ends with the same blocks."""
    device = recording["device"]
    facts = Sidecar(torch_version=device["versions"]["torch"], settings=recording["settings"], totals=(device["capacity"],))
    settings = {"PYTORCH_CUDA_ALLOC_CONF": recording["settings"]} | recording["allocator_settings"]
    for found in replay(parse_snapshot(unpacked(recording) | {"allocator_settings": settings}, LARGEST_SET * 100, facts)):
        assert found.first_difference is None
        assert found.is_final_equal


def check_facts(recording: Json) -> None:
    """What a model of the allocator must be told is there."""
    assert recording["schema"] == SCHEMA
    device = recording["device"]
    assert device["name"]
    assert device["capacity"] > 0
    assert device["versions"]["torch"]
    assert len(device["capability"]) == 2
    expandable = "expandable_segments:True" in recording["settings"]
    assert recording["allocator_settings"].get("expandable_segments", expandable) == expandable
    assert ("oom" in {event["action"] for event in recording["device_traces"][0]}) == recording["name"].startswith("oom")
    if recording["name"] == "record-stream":
        assert space(recording).pending > 0, "the side stream had ended before the snapshot"


CHECKS: tuple[Callable[[Json], None], ...] = (
    check_facts,
    check_segments,
    check_releasable,
    check_report,
    check_context,
    check_trace,
    check_model,
)


def check(recording: Json) -> None:
    """Run every check on a recording. Raises AssertionError."""
    for each in CHECKS:
        each(recording)


def main(place: Path) -> int:
    """Check all recordings in a folder or bundle; return how many do not add up."""
    wrong = count = 0
    for name, recording in load_all(place):
        count += 1
        for each in CHECKS:
            try:
                each(recording)
            except AssertionError as error:
                wrong += 1
                print(f"{name}: {each.__doc__} Not so: {error.args or traceback.extract_tb(error.__traceback__)[-1].line}")
    if place.is_dir():
        size = sum(path.stat().st_size for path in place.glob("*.json.gz"))
        assert size <= LARGEST_SET, f"{size} bytes of recordings: record less work"
    print(f"{count} recordings, {wrong} contradictions")
    return wrong + (count == 0)


if __name__ == "__main__":
    sys.exit(min(1, main(Path(sys.argv[1]))))
