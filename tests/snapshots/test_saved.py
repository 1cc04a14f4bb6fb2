"""Snapshot files as data: columns that add up, what grew, and files that others wrote."""

from __future__ import annotations

import json
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard import SnapshotError, snapshot_diff, snapshot_map, snapshot_report
from nbguard.memory.core.facts import Block, DeviceFacts, Segment
from nbguard.memory.reports.report import Report
from nbguard.memory.snapshots.load import site_of
from nbguard.memory.snapshots.report import SnapshotReport, difference, saved_device

MIB = 1024**2
CELL = {"filename": "/tmp/ipykernel_7/123.py", "line": 3, "name": "step"}
LIBRARY = {"filename": "/env/lib/python3.12/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"}
SCRIPT = {"filename": "/home/someone/train.py", "line": 41, "name": "<module>"}


def _raw(*sizes: int, frames: list[list[dict[str, Any]]] | None = None) -> dict[str, Any]:
    """Return a snapshot of one segment whose blocks have these sizes, allocated, and a free rest of 1 MiB."""
    blocks, address = [], 1 << 30
    for number, size in enumerate(sizes):
        block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
        blocks.append(block | ({"frames": frames[number]} if frames else {}))
        address += size
    blocks.append({"address": address, "size": MIB, "requested_size": 0, "state": "inactive"})
    segment = {"device": 0, "address": 1 << 30, "total_size": sum(sizes) + MIB, "stream": 0, "segment_type": "large"}
    return {"segments": [segment | {"blocks": blocks}], "device_traces": [[]]}


def _file(place: Path, raw: dict[str, Any], **said: Any) -> Path:
    place.write_bytes(pickle.dumps(raw))
    if said:
        place.with_name(place.name + ".nbguard.json").write_text(json.dumps({"nbguard": 1} | said))
    return place


def _holder(label: str, *addresses: int) -> dict[str, Any]:
    return {"device": 0, "label": label, "blocks": [(1 << 30) + address for address in addresses]}


def test_a_map_is_drawn_from_a_file_with_the_holders_and_pools_of_its_report(tmp_path: Path) -> None:
    raw = _raw(2 * MIB, MIB, MIB, frames=[[], [CELL], []])
    private = json.loads(json.dumps(_raw(MIB)["segments"][0]).replace(str(1 << 30), str(1 << 32)))
    raw["segments"].append(
        private | {"blocks": [each | {"address": each["address"] % 2**30 + 2**32} for each in private["blocks"]]}
    )
    raw["segments"][1]["segment_pool_id"] = (0, 7)
    place = _file(tmp_path / "run.pickle", raw, holders=[_holder("learn", 0)], totals=[16 * MIB], frees=[8 * MIB])

    found = snapshot_map(place)

    (device,), (said,) = found.devices, snapshot_report(place).report.devices
    assert {row.label: row.nbytes for row in device.holders if row.nbytes} == {row.label: row.retained for row in said.holders}
    assert [pool.space for pool in device.pools] == [pool.space for pool in said.pools]
    assert "private pool 0.7" in device.pools[-1].name
    assert (device.space.reserved, device.space.stranded, device.space.kept) == (7 * MIB, MIB, MIB)
    assert "learn" in {row.label for row in device.by_holder}
    text, html = (found.mimebundle()[kind] for kind in ("text/plain", "text/html"))
    assert text.startswith("run.pickle\n")
    assert "del learn" not in text  # what a file names cannot be let go
    assert "run.pickle" in html


def test_a_memory_fraction_from_the_file_beside_limits_the_largest_request(tmp_path: Path) -> None:
    said = {"totals": [512 * MIB], "frees": [400 * MIB]}
    whole = _file(tmp_path / "whole.pickle", _raw(3 * MIB), **said)
    half = _file(tmp_path / "half.pickle", _raw(3 * MIB), **said, fractions=[0.5])

    largest = [snapshot_map(place).devices[0].largest.flushed for place in (whole, half)]

    assert largest == [400 * MIB, 252 * MIB]  # of the half, 4 MiB are reserved


def test_names_come_from_the_file_beside_and_the_rest_is_not_pythons(tmp_path: Path) -> None:
    said = {"holders": [_holder("learn", 0, 2 * MIB)], "totals": [8 * MIB], "names": ["GPU"], "settings": ""}
    place = _file(tmp_path / "run.pickle", _raw(2 * MIB, MIB, MIB), **said)

    found = snapshot_report(place)

    (device,) = found.report.devices
    assert [(row.label, row.retained) for row in device.holders] == [("learn", 3 * MIB), ("not held by Python", MIB)]
    assert (device.name, device.total, found.settings) == ("GPU", 8 * MIB, "")


def test_without_names_the_lines_of_the_users_own_code_are_the_holders(tmp_path: Path) -> None:
    place = _file(tmp_path / "run.pickle", _raw(2 * MIB, MIB, MIB, frames=[[LIBRARY, CELL, SCRIPT], [SCRIPT], []]))
    place.with_name("run.pickle.nbguard.json").write_text(json.dumps({"nbguard": 1, "cells": {"123.py": 7}}))

    found = snapshot_report(place)

    assert {row.label: row.retained for row in found.report.devices[0].holders} == {
        "allocated at In[7], line 3 in step()": 2 * MIB,
        "allocated at train.py:41": MIB,
        "unknown": MIB,
    }
    assert "holders are the lines that allocated" in found.notes[0]


def test_a_diff_of_a_named_and_an_unnamed_file_compares_lines(tmp_path: Path) -> None:
    before = _file(tmp_path / "a.pickle", _raw(MIB, frames=[[SCRIPT]]))
    after = _file(tmp_path / "b.pickle", _raw(MIB, MIB, frames=[[SCRIPT], [SCRIPT]]), holders=[_holder("learn", 0)])

    found = snapshot_diff(before, after)

    assert [(row.label, row.grown) for row in found.devices[0].holders] == [("allocated at train.py:41", MIB)]
    assert found.notes == ("a.pickle has no names file next to it, so both are compared by their allocating lines",)


def test_two_equal_files_differ_in_nothing(tmp_path: Path) -> None:
    place = _file(tmp_path / "a.pickle", _raw(MIB, MIB))

    found = snapshot_diff(place, place)

    assert found.devices[0].holders == found.devices[0].pools == ()
    assert "no holder changed" in found.mimebundle()["text/plain"]


@pytest.mark.parametrize(
    "said",
    [
        {"holders": [{"device": 0, "label": 3, "blocks": []}]},
        {"holders": [{"device": 0, "blocks": []}]},
        {"holders": {"device": 0}},
        {"holders": [_holder("x") | {"blocks": "none"}]},
        {"holders": [_holder("x") | {"blocks": [[1]]}]},
        {"cells": ["a"]},
        {"cells": {"a": "b"}},
        {"unnamed": []},
        {"unnamed": float("inf")},
        {"totals": ["much"]},
    ],
)
def test_a_damaged_file_beside_is_one_error(tmp_path: Path, said: dict[str, Any]) -> None:
    place = _file(tmp_path / "run.pickle", _raw(MIB), **said)

    with pytest.raises(SnapshotError, match=r"run\.pickle\.nbguard\.json next to it is damaged"):
        snapshot_report(place)


def test_names_of_another_snapshot_are_not_believed(tmp_path: Path) -> None:
    raw = _raw(MIB)
    place = _file(tmp_path / "run.pickle", raw, holders=[_holder("learn", 0)], crc32=zlib.crc32(pickle.dumps(raw)))
    before = snapshot_report(place)
    place.write_bytes(pickle.dumps(_raw(2 * MIB)))

    after = snapshot_report(place)

    assert [row.label for row in before.report.devices[0].holders] == ["learn"]
    assert [row.label for row in after.report.devices[0].holders] == ["unknown"]
    assert "the file next to it belongs to another snapshot" in after.notes[0]


def test_foreign_labels_are_shown_as_text(tmp_path: Path) -> None:
    frame = {"filename": "/x/<img src=x>.py", "line": 1, "name": "<b>\x1b[31m"}
    label = "<script>alert(1)</script>\x1b[2J\n"
    place = _file(tmp_path / "run.pickle", _raw(MIB, MIB, frames=[[frame], [frame]]), holders=[_holder(label, 0)])

    bundle = snapshot_report(place).mimebundle()

    assert "<script>" not in bundle["text/html"].partition("</style>")[2]
    assert "<img" not in bundle["text/html"]
    assert "\x1b" not in bundle["text/plain"] + bundle["text/html"]


def test_a_home_that_is_none_is_one_error() -> None:
    with pytest.raises(SnapshotError, match="there is no such home folder"):
        snapshot_report("~nobody-of-this-name/run.pickle")


def test_the_innermost_line_that_is_no_librarys_is_the_site() -> None:
    assert site_of((("/a/site-packages/fastai/learner.py", 205, "fit"), ("/home/x/train.py", 3, "go"))) == "train.py:3 in go()"
    assert site_of((("/a/site-packages/fastai/learner.py", 205, "fit"),)) == "learner.py:205 in fit()"
    assert site_of((("In[4]", 2, "<module>"),)) == "In[4], line 2"
    assert site_of(()) == ""


_BLOCKS = st.lists(
    st.tuples(
        st.integers(1, 50), st.sampled_from(["active_allocated", "active_pending_free", "inactive"]), st.sampled_from("ab ")
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def devices(draw: st.DrawFn) -> DeviceFacts:
    """Return a device whose segments hold any blocks, in any pool, on any stream."""
    segments, address = [], 512
    for blocks in draw(st.lists(_BLOCKS, max_size=6)):
        found, start = [], address
        for size, state, site in blocks:
            found.append(Block(address=address, size=size * 512, state=state, requested=size * 512, site=site.strip()))
            address += size * 512
        kind = draw(st.tuples(st.booleans(), st.booleans(), st.sampled_from([0, 7]), st.sampled_from([(0, 0), (0, 3)])))
        segments.append(
            Segment(
                address=start,
                total_size=address - start,
                is_small=kind[0],
                is_expandable=kind[1],
                blocks=tuple(found),
                stream=kind[2],
                pool=kind[3],
            )
        )
        address += 1 << 21
    return DeviceFacts(device="cuda:0", name="GPU", total=1 << 40, free=1 << 39, allocator=None, segments=tuple(segments))


def _saved(device: DeviceFacts, names: dict[int, str] | None) -> SnapshotReport:
    return SnapshotReport(
        file="f",
        torch_version=None,
        settings=None,
        events=(0,),
        report=Report(tracked="cuda", devices=(saved_device(device, names),), findings=(), unavailable=(), stale=0),
    )


@given(devices(), devices(), st.booleans())
def test_whatever_is_in_the_files_all_columns_re_add(first: DeviceFacts, second: DeviceFacts, named: bool) -> None:
    names = {512: "learn", 1024: "losses"} if named else None
    before, after = _saved(first, names), _saved(second, names)

    (found,) = difference(before, after).devices

    for saved, device in ((before, first), (after, second)):
        blocks = [block for segment in device.segments or () for block in segment.blocks]
        (report,) = saved.report.devices
        assert sum(row.retained for row in report.holders) == sum(b.size for b in blocks if b.state == "active_allocated")
        assert sum(pool.space.reserved for pool in report.pools) == sum(segment.total_size for segment in device.segments or ())
    assert sum(row.grown for row in found.holders) == found.allocated.grown == found.allocated.after - found.allocated.before
    assert sum(row.grown for row in found.pools) == found.reserved.grown == found.reserved.after - found.reserved.before
    assert all(row.grown for row in (*found.holders, *found.pools))


def test_more_rows_than_are_shown_become_one_that_re_adds() -> None:
    blocks = tuple(
        Block(address=512 * n, size=512, state="active_allocated", requested=512, site=f"line{n}") for n in range(1, 21)
    )
    device = DeviceFacts(
        device="cuda:0",
        name="GPU",
        total=None,
        free=None,
        allocator=None,
        segments=(Segment(address=512, total_size=512 * 20, is_small=True, is_expandable=False, blocks=blocks),),
    )
    empty = DeviceFacts(device="cuda:0", name="GPU", total=None, free=None, allocator=None, segments=())
    found = difference(_saved(empty, None), _saved(device, None))

    text = found.mimebundle(limit=3)["text/plain"]

    assert re.search(r"17 more +\+8\.5 KiB +0 KiB +8\.5 KiB\n", text)
    assert "17 more" in found.mimebundle(limit=3)["text/html"]
    assert json.loads(found.json_bundle()["text/plain"])["devices"][0]["allocated"]["grown"] == 20 * 512
