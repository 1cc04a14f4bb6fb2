"""The words on the allocator's history, and on what was written and asked of it."""

from __future__ import annotations

import dataclasses

import pytest

from nbguard import what_if
from nbguard.frontend.notebook.magics import snapshots
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, Snapshot, SnapshotBlock, SnapshotSegment, Trace
from nbguard.memory.core.recording import Recording
from nbguard.memory.scan import progress
from nbguard.memory.snapshots.save import SnapshotFiles
from nbguard.memory.snapshots.whatif import WhatIfs

MIB = 1024**2


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Recording("on", 100_000, 4, changed=True), "recording: the allocator's last 100,000 entries by device"),
        (Recording("on", 5_000, 4), "recording since In[4]: the allocator's last 5,000 entries"),
        (Recording("on", 5_000), "recording: the allocator's last 5,000 entries"),
        (Recording("on", 100_000), "up to 25.7 MiB of host memory per device"),
        (Recording("waiting", 100_000, 4), "recording begins with the first use of CUDA"),
        (Recording("theirs"), "nbguard leaves it alone"),
        (Recording("off", changed=True), "recording is off, and its history is deleted"),
        (Recording("off"), "nothing is being recorded"),
    ],
)
def test_what_is_recorded_is_said(found: Recording, said: str) -> None:
    bundle = found.mimebundle()

    assert said in bundle["text/plain"]
    assert said.replace("'", "&#x27;") in bundle["text/html"]


def test_what_was_written_is_said_and_what_it_lacks() -> None:
    found = SnapshotFiles(
        path="~/run.pickle",
        file="run.pickle",
        beside="run.pickle.nbguard.json",
        nbytes=3 * MIB,
        segments=1,
        events=1,
        holders=2,
        unnamed=0,
        recording=Recording("on", 9),
    )

    text = found.mimebundle()["text/plain"]
    without = dataclasses.replace(found, events=0, unnamed=3).mimebundle()["text/plain"]

    assert text.splitlines() == [
        "~/run.pickle  3 MiB: 1 segment, 1 entry of history",
        "  pytorch.org/memory_viz opens it; next to it run.pickle.nbguard.json: version, settings, sizes, 2 holders",
    ]
    assert "0 entries of history" in without
    assert "3 small holders had no room" in without
    assert "no history was recorded, so it cannot be replayed: %gpumem record on" in without


def _snapshot() -> Snapshot:
    """Return a run of one request of 30 MiB on a device that had 10 MiB more."""
    base, size = 1 << 30, 30 * MIB
    block = SnapshotBlock(address=base, size=size, requested=size, state="active_allocated", stack=0)
    segment = SnapshotSegment(
        device=0, address=base, total_size=size, stream=0, is_small=False, is_expandable=False, pool=(0, 0), blocks=(block,)
    )
    trace = Trace((("segment_alloc", base, size, 0), ("alloc", base, size, 0)), None, (-1, 0))
    said = Sidecar(
        torch_version="2.13.0", settings="", totals=(40 * MIB,), frees=(10 * MIB,), fractions=(1.0,), names=("<b>GPU",)
    )
    return Snapshot(
        segments=(segment,),
        traces=(trace,),
        settings="",
        divisions=None,
        stacks=((("In[1]", 2, "<module>"),),),
        hints=frozenset(),
        sidecar=said,
    )


def test_a_whatif_is_told_as_text_html_and_data() -> None:
    found = WhatIfs("<run>", (what_if(_snapshot(), 0, ["expandable_segments:True"]),), ("`%reset_gpu x` frees 1 B",))

    bundle, data = found.mimebundle(), found.json_bundle()["application/json"]

    assert "2 of 2 events reproduced" in bundle["text/plain"]
    assert "  • %reset_gpu x frees 1 B" in bundle["text/plain"]
    assert "2 of 2 events reproduced" in bundle["text/html"]
    assert "<code>expandable_segments:True</code>" in bundle["text/html"]
    assert "<code>%reset_gpu x</code>" in bundle["text/html"]
    assert "<run>" not in bundle["text/html"]
    assert (data["kind"], data["name"], data["to_free"]) == ("whatif", "<run>", ["`%reset_gpu x` frees 1 B"])
    assert [row["settings"] for row in data["devices"][0]["rows"]] == ["", "expandable_segments:True"]


def test_a_whatif_without_a_trace_says_that_there_is_none() -> None:
    snapshot = dataclasses.replace(_snapshot(), traces=())

    bundle = WhatIfs("run", (what_if(snapshot, 0),)).mimebundle()

    assert "no trace was recorded" in bundle["text/plain"]
    assert "no trace was recorded" in bundle["text/html"]


def test_the_reading_of_a_file_is_reported_to_those_who_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    told: list[str] = []

    with progress.reported(told.append):
        snapshots._progress()(50, 100)
    snapshots._progress()(100, 100)

    assert told == ["nbguard is reading: 50 B of 100 B…"]
