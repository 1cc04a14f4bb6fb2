"""The allocator's history and snapshot files in a notebook: recorded, written, read back, compared, replayed otherwise."""

from __future__ import annotations

import json
import pickle
import pickletools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nbguard import load_snapshot, replay
from tests.cuda.conftest import Notebook, counters
from tests.kernels import Kernel

MIB = 1024**2
STEPS = "%gpumem record on\nnet, opt = train()\nfor _ in range(3): train(net)\nlosses = [mib(20)]"
HOLES = "pool = mib(600); del pool; parts = [mib(60) for _ in range(10)]; del parts[::2]"
"""300 MiB of 600 stay in use, in five pieces; what is free are five holes of 60 MiB."""


@pytest.fixture
def small(notebook: Notebook) -> Kernel:
    """A notebook on a device of 1 GiB, of which 924 MiB can be had."""
    return notebook(bytes=1024 * MIB, context=100 * MIB)


def shown(kernel: Kernel, line: str) -> dict[str, Any]:
    """Return what a magic says, as data."""
    found: dict[str, Any] = json.loads(kernel.run(f"{line} --json").ok().text)
    return found


def _refused(kernel: Kernel, line: str) -> str:
    error = kernel.run(line, stop_on_error=False).error
    assert error is not None
    assert error[0] == "UsageError"
    assert "\n" not in error[1]
    return error[1]


def test_a_snapshot_is_torchs_own_and_replays_to_the_last_event(small: Kernel) -> None:
    small.run(STEPS).ok()
    said = small.run("%gpumem snapshot run.pickle").ok().text
    small.run("its = torch.cuda.memory._snapshot(); torch.cuda.memory._dump_snapshot('theirs.pickle')").ok()
    mine, theirs = (pickle.loads((small.cwd / name).read_bytes()) for name in ("run.pickle", "theirs.pickle"))

    snapshot = load_snapshot(small.cwd / "run.pickle")
    (found,) = replay(snapshot)

    assert next(pickletools.genops((small.cwd / "run.pickle").read_bytes()))[1] == 4  # the viewer knows none above
    assert {*mine} == {*theirs}
    mine, names = _without_names(mine)
    assert mine["segments"] == theirs["segments"]
    traces = [[{**entry, "time_us": 0} for entry in each["device_traces"][0]] for each in (mine, theirs)]
    assert traces[0] == traces[1][: len(traces[0])]  # PyTorch works the times out anew for each snapshot
    assert {"held by losses[0]", "held by net.body.weight"} <= names
    assert found.events > 100
    assert found.is_exact
    assert f"{found.events} entries of history" in said
    assert snapshot.sidecar.torch_version == small.value("str(torch.__version__)")
    assert snapshot.sidecar.totals == (1024 * MIB,)
    assert snapshot.sidecar.frees == (small.value("torch.cuda.mem_get_info()[0]"),)
    assert snapshot.sidecar.names == (small.value("torch.cuda.get_device_name()"),)


def _without_names(snapshot: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return a snapshot without the names of holders, and these."""
    names = set[str]()

    def plain(entry: dict[str, Any]) -> dict[str, Any]:
        *frames, last = entry.get("frames") or [{"name": ""}]
        if last["name"] != "nbguard":
            return entry
        names.add(last["filename"])
        assert entry.get("user_metadata", last["filename"]) == last["filename"]
        return {**entry, "frames": frames, **({"user_metadata": ""} if "user_metadata" in entry else {})}

    segments = [{**segment, "blocks": [*map(plain, segment["blocks"])]} for segment in snapshot["segments"]]
    traces = [[*map(plain, trace)] for trace in snapshot["device_traces"]]
    return {**snapshot, "segments": segments, "device_traces": traces}, names


def test_pytorchs_own_viewer_shows_the_names_and_the_snapshot_reads_as_without(small: Kernel) -> None:
    small.run(STEPS).ok()
    small.run("%gpumem snapshot run.pickle\ntorch.cuda.memory._dump_snapshot('theirs.pickle')").ok()
    viewed = (
        "import pickle; from torch.cuda import _memory_viz as viz; s = pickle.load(open('run.pickle', 'rb'));"
        "found = viz.memory(s, lambda text: text), viz.segsum(s), viz.trace(s), viz.trace_plot(s), viz.segment_plot(s)"
    )

    small.run(viewed).ok()

    assert "held by losses[0]" in small.value("found[0]"), "in the flame graph of blocks"
    mine, theirs = (load_snapshot(small.cwd / name) for name in ("run.pickle", "theirs.pickle"))
    assert mine.segments == theirs.segments
    assert [mine.stacks[n] for n in range(len(mine.stacks))] == [theirs.stacks[n] for n in range(len(theirs.stacks))]
    assert [*mine.traces[0].events] == [*theirs.traces[0].events][: len(mine.traces[0].events)]


def test_the_file_beside_names_holders_and_no_place_of_this_machine(small: Kernel) -> None:
    small.run(STEPS).ok()
    small.run("%gpumem snapshot run.pickle").ok()

    text = (small.cwd / "run.pickle.nbguard.json").read_text()

    labels = {holder["label"] for holder in json.loads(text)["holders"]}
    assert {"losses", "opt"} <= labels
    assert "/" not in text
    assert str(small.pid) not in json.loads(text)["cells"]
    assert sorted(path.name for path in small.cwd.glob("*run.pickle*")) == ["run.pickle", "run.pickle.nbguard.json"]


def test_recording_opens_nothing_and_begins_with_cuda(small: Kernel) -> None:
    before = small.run("%gpumem record on").ok().text
    untouched = small.value("(torch.cuda.is_initialized(), torch._C._cuda_hasPrimaryContext(0))")
    small.run("x = mib(30)").ok()

    assert "begins with the first use of CUDA" in before
    assert untouched == (False, False)
    assert "last 100,000 entries" in small.run("%gpumem record").ok().text
    assert "since In[3]" in small.run("%gpumem record on").ok().text
    assert small.value("[e['action'] for e in torch.cuda.memory._snapshot()['device_traces'][0]][:2]") == [
        "segment_alloc",
        "alloc",
    ]


def test_recording_is_bounded_and_off_forgets_it(small: Kernel) -> None:
    small.run("%gpumem record on --entries 50\nfor _ in range(200): mib(30)").ok()
    kept = small.value("len(torch.cuda.memory._snapshot()['device_traces'][0])")

    off = small.run("%gpumem record off").ok().text

    assert kept == 50
    assert off == "recording is off, and its history is deleted"
    assert small.value("torch._C._cuda_isHistoryEnabled()") is False
    assert small.run("%gpumem record off").ok().text == "nothing is being recorded"
    assert "no history is recorded: run  %gpumem record on" in _refused(small, "%gpumem whatif")


def test_the_live_history_ends_as_the_memory_is(small: Kernel) -> None:
    small.run(STEPS).ok()
    small.run("import nbguard; last = len(torch.cuda.memory._snapshot()['device_traces'][0])").ok()

    small.run("now, then = nbguard.memory_map(), nbguard.live_moment(last)").ok()

    blocks = "[(b.address, b.size, b.holder < 0) for d in {}.devices for p in d.pools for s in p.segments for b in s.blocks]"
    assert small.value(blocks.format("now")) == small.value(blocks.format("then.map"))
    assert small.value("then.devices[0].allocated == torch.cuda.memory_allocated()")
    assert {"losses", "opt"} <= set(small.value("[row.label for row in then.report.report.devices[0].holders]"))
    assert small.value("nbguard.live_moment().devices[0].peak == torch.cuda.max_memory_allocated()")


def test_a_recording_ordered_before_cuda_can_be_taken_back(small: Kernel) -> None:
    small.run("%gpumem record on\n%gpumem record off\nx = mib(30)").ok()

    assert small.value("torch._C._cuda_isHistoryEnabled()") is False


def test_somebody_elses_recording_is_left_alone_and_used(small: Kernel) -> None:
    small.run("x = mib(1); torch.cuda.memory._record_memory_history(max_entries=70)\nfor _ in range(100): mib(30)").ok()

    on, off = (small.run(f"%gpumem record {state}").ok().text for state in ("on", "off"))

    assert on == off
    assert "nbguard leaves it alone" in on
    assert small.value("torch._C._cuda_isHistoryEnabled()") is True
    assert small.value("len(torch.cuda.memory._snapshot()['device_traces'][0])") == 70
    found = shown(small, "%gpumem whatif --set expandable_segments:True")["devices"][0]
    assert found["reproduced"] == found["events"] == 70


def test_unloading_ends_our_recording_and_not_anothers(small: Kernel) -> None:
    small.run("x = mib(1)\n%gpumem record on\n%unload_ext nbguard").ok()
    ours = small.value("torch._C._cuda_isHistoryEnabled()")
    small.run("%load_ext nbguard\ntorch.cuda.memory._record_memory_history()\n%gpumem record on\n%unload_ext nbguard").ok()

    assert ours is False
    assert small.value("torch._C._cuda_isHistoryEnabled()") is True


def test_a_file_is_reported_by_name_and_its_columns_re_add(small: Kernel) -> None:
    small.run(STEPS).ok()
    small.run("%gpumem snapshot run.pickle").ok()
    allocated, reserved = counters(small)
    small.run("del losses, net, opt").ok()

    (device,) = shown(small, "%gpumem load run.pickle")["report"]["devices"]
    text = small.run("%gpumem load run.pickle").ok().text

    held = {holder["label"]: holder["retained"] for holder in device["holders"]}
    assert held["losses"] == 20 * MIB
    assert sum(held.values()) == device["allocated"] == allocated
    assert sum(pool["space"]["reserved"] for pool in device["pools"]) == reserved
    assert "1 block, allocated at In[1], line 8 in mib()" in text
    assert small.value("torch.__version__") in text


def test_the_map_of_a_file_is_that_of_the_kernel_that_wrote_it(small: Kernel) -> None:
    small.run("kept = [mib(1.5) for _ in range(13)]; del kept[::2]; big = mib(30)").ok()
    small.run("%gpumem snapshot run.pickle").ok()
    live = shown(small, "%gpumem map")["devices"][0]
    small.run("del kept, big; torch.cuda.empty_cache()").ok()

    read = shown(small, "%gpumem map --file 'run.pickle'")
    text = small.run("%gpumem map --file run.pickle").ok().text

    (device,) = read["devices"]
    assert read["file"] == "run.pickle"
    assert {name: device[name] for name in ("space", "largest", "rounding")} == {
        name: live[name] for name in ("space", "largest", "rounding")
    }
    assert [(pool["name"], pool["space"]) for pool in device["pools"]] == [(p["name"], p["space"]) for p in live["pools"]]
    assert {row["label"]: row["nbytes"] for row in device["holders"]}["kept"] == 9 * MIB
    assert "pinned by kept" in text


def test_without_names_a_file_is_reported_by_the_lines_that_allocated(small: Kernel) -> None:
    small.run(STEPS).ok()
    small.run("torch.cuda.memory._dump_snapshot('plain.pickle'); losses.append(mib(40))").ok()
    small.run("%gpumem record off\nmore = mib(2)\ntorch.cuda.memory._dump_snapshot('bare.pickle')").ok()

    plain, bare = (small.run(f"%gpumem load {name}.pickle").ok().text for name in ("plain", "bare"))

    assert "in mib()" in plain
    assert "holders are the lines that allocated" in plain
    assert "holders are not known" not in plain
    assert "unknown" in bare


def test_a_diff_names_what_grew_and_re_adds(small: Kernel) -> None:
    small.run(STEPS).ok()
    small.run("%gpumem snapshot a.pickle\nbefore = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()").ok()
    small.run("losses += [mib(20) for _ in range(3)]; batch = mib(5); del net, opt").ok()
    small.run("%gpumem snapshot b.pickle").ok()

    (device,) = shown(small, "%gpumem diff a.pickle b.pickle")["devices"]

    after, before = counters(small), small.value("before")
    grown = {row["label"]: row["grown"] for row in device["holders"]}
    assert grown["losses"] == 60 * MIB
    assert grown["batch"] == 5 * MIB
    assert grown["opt"] < 0
    assert sum(grown.values()) == device["allocated"]["grown"] == after[0] - before[0]
    assert sum(row["grown"] for row in device["pools"]) == device["reserved"]["grown"] == after[1] - before[1]
    assert "losses" in small.run("%gpumem diff a.pickle b.pickle").ok().text
    assert "give two files" in _refused(small, "%gpumem diff a.pickle")


def test_a_diff_of_two_moments_of_one_file(small: Kernel) -> None:
    small.run(STEPS).ok()
    small.run("%gpumem snapshot run.pickle").ok()

    (device,) = shown(small, "%gpumem diff run.pickle --at 0 --and peak")["devices"]

    assert device["allocated"]["grown"] == small.value("torch.cuda.max_memory_allocated()")


def test_whatif_says_which_setting_would_have_avoided_the_failure(small: Kernel) -> None:
    small.run(f"%gpumem record on\n{HOLES}").ok()
    assert small.run("big = mib(400)", stop_on_error=False).error is not None

    cell = small.run("%gpumem whatif").ok()
    (found,) = shown(small, "%gpumem whatif")["devices"]

    said = re.search(r"(\d+) of (\d+) events reproduced", cell.text)
    assert said is not None
    assert said[1] == said[2]
    rows = {row["settings"]: row["out_of_memory"] for row in found["rows"]}
    assert rows["expandable_segments:True"] is None
    assert rows[""]["size"] == 400 * MIB
    assert rows[""]["request"] == 12
    assert found["reproduced"] == found["events"]
    assert found["capacity"] == 924 * MIB
    assert found["recommendation"].startswith("Set PYTORCH_ALLOC_CONF=expandable_segments:True: request 12 of 12 (400 MiB)")
    assert "expandable_segments:True" in cell.bundles[0]["text/html"]
    assert shown(small, "%gpumem whatif")["to_free"] == []


def test_whatif_says_so_where_nothing_helps_and_what_to_free(small: Kernel) -> None:
    small.run("%gpumem record on\nlosses = [mib(100) for _ in range(6)]; model = mib(80)").ok()
    assert small.run("big = mib(400)", stop_on_error=False).error is not None

    found = shown(small, "%gpumem whatif")
    text = small.run("%gpumem whatif").ok().text

    assert found["devices"][0]["recommendation"].startswith("No setting here helps: request 8 of 8 (400 MiB)")
    assert all(row["out_of_memory"] for row in found["devices"][0]["rows"])
    assert found["to_free"][0] == "`%reset_gpu losses` frees the 600 MiB that losses holds"
    assert "%reset_gpu losses frees the 600 MiB" in text


def test_settings_to_try_are_read_as_torch_writes_them(small: Kernel) -> None:
    small.run(f"%gpumem record on\n{HOLES}\n%gpumem snapshot run.pickle").ok()
    conf = "expandable_segments:True,roundup_power2_divisions:[256:1,>:4]"

    quoted = shown(small, f"%gpumem whatif --file run.pickle --set '{conf}' --set max_split_size_mb:64")
    small.run("found = %gpumem whatif --file run.pickle --set max_split_size_mb:64").ok()

    assert [row["settings"] for row in quoted["devices"][0]["rows"]][1].startswith("expandable_segments:True,")
    assert len(quoted["devices"][0]["rows"]) == 3
    assert small.value("[len(each.rows) for each in found.devices]") == [2]
    assert (
        shown(small, f"%gpumem whatif --file run.pickle --set {conf}")["devices"][0]["rows"][1]
        == quoted["devices"][0]["rows"][1]
    )
    assert "nonsense" in _refused(small, "%gpumem whatif --set nonsense:1")


def test_a_fit_on_two_devices_is_saved_and_replayed_whole(notebook: Notebook) -> None:
    kernel = notebook(fastai=True, devices=2, conf="expandable_segments:True")
    kernel.run("from fastai.basics import *\nx = torch.randn(256, 512); ds = list(zip(x, x))").ok()
    kernel.run("dls = DataLoaders(DataLoader(ds, batch_size=32), DataLoader(ds, batch_size=32)).cuda()\n%gpumem record on").ok()
    kernel.run("learn = Learner(dls, Net().cuda(), loss_func=nn.MSELoss()); y = torch.ones(1 << 22, device='cuda:1')").ok()
    kernel.run("with learn.no_bar(), learn.no_logging(): learn.fit(2)\n%gpumem snapshot fit.pickle").ok()

    found = replay(load_snapshot(kernel.cwd / "fit.pickle"))
    report = shown(kernel, "%gpumem load fit.pickle")["report"]

    assert [each.is_exact for each in found] == [True, True]
    assert found[0].events > 300
    assert found[0].settings.expandable
    held = [{holder["label"]: holder["retained"] for holder in device["holders"]} for device in report["devices"]]
    assert held[0]["learn"] > 16 * MIB
    assert held[1] == {"y": 16 * MIB}


_BAD = (
    ("snapshot", "give one file to write"),
    ("snapshot .", "this is a folder"),
    ("snapshot nowhere/run.pickle", "there is no folder 'nowhere'"),
    ("snapshot /dev/null", "this is not a regular file"),
    (f"snapshot {'x' * 300}", "File name too long"),
    ("snapshot ~nobody-of-this-name/x", "there is no such home folder"),
    # Since Python 3.14 `Path.is_file()` is False there, and no error.
    (f"load {'x' * 300}", "there is no such file" if sys.version_info >= (3, 14) else "File name too long"),
    ("load", "give one file"),
    ("load nothing.pickle", "there is no such file"),
    ("load empty.pickle", "the file is empty"),
    ("load hostile.pickle", "not a readable snapshot"),
    ("load beside.pickle", "next to it is damaged"),
    ("load good.pickle --device 3", "no device 3 in good.pickle; there is: cuda:0"),
    ("diff good.pickle", "give two files"),
    ("diff good.pickle nothing.pickle", "there is no such file"),
    ("whatif --file nothing.pickle", "there is no such file"),
    ("whatif --file good.pickle --device 5", "nothing of cuda:5 is in it; there is: cuda:0"),
    ("whatif --file good.pickle --capacity much", "is not a size"),
    ("whatif --file good.pickle --torch new", "new"),
    ("whatif good.pickle", "give a file after --file"),
    ("record maybe", "say on or off"),
    ("record on --entries 0", "0 entries cannot be kept"),
    ("load good.pickle --set a:1", "--set belongs to whatif"),
    ("--file good.pickle", "--file belongs to map and whatif"),
    ("map --file nowhere.pickle", "nowhere.pickle"),
    ("map --file good.pickle --request 1GiB", "without --request"),
    ("map --file good.pickle --device 3", "no device 3 here; there is: cuda:0"),
)


def test_bad_input_is_one_line(small: Kernel) -> None:
    small.run("x = mib(1)\n%gpumem snapshot good.pickle").ok()
    (small.cwd / "empty.pickle").write_bytes(b"")
    (small.cwd / "hostile.pickle").write_bytes(pickle.dumps(Path("x")))
    (small.cwd / "beside.pickle").write_bytes((small.cwd / "good.pickle").read_bytes())
    (small.cwd / "beside.pickle.nbguard.json").write_text('{"nbguard": 1, "holders": [{"label": 3}]}')

    said = {line: _refused(small, f"%gpumem {line}") for line, _ in _BAD}

    assert {line: text for line, text in _BAD if text not in said[line]} == {}


def test_before_cuda_there_is_nothing_to_save_and_it_stays_closed(small: Kernel) -> None:
    assert "CUDA is not in use in this kernel yet" in _refused(small, "%gpumem snapshot run.pickle")
    assert small.value("(torch.cuda.is_initialized(), torch._C._cuda_hasPrimaryContext(0))") == (False, False)


def test_a_snapshot_that_fails_leaves_the_former_file(small: Kernel) -> None:
    small.run("x = mib(1)\n%gpumem snapshot run.pickle").ok()
    former = (small.cwd / "run.pickle").read_bytes()
    (small.cwd / "run.pickle.nbguard.json").unlink()
    (small.cwd / "run.pickle.nbguard.json").mkdir()

    assert "run.pickle cannot be written" in _refused(small, "y = mib(30)\n%gpumem snapshot run.pickle")
    assert (small.cwd / "run.pickle").read_bytes() == former
    assert not list(small.cwd.glob("*.part"))
