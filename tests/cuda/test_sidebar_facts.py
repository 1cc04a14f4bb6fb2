"""A tick on the device: by its counters what a look at the blocks says, and nothing opened, waited for or reset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda.conftest import KEPT_WORKSPACES, Notebook, counters, holders, parts, report
from tests.kernels import Kernel

MIB = 1024**2
CONTEXT = 300 * MIB
READER = """
import time
from nbguard.plain_data import to_plain
from nbguard.frontend.sidebar.protocol.ticks import LastLook, build_tick, device_readings, line_points
from nbguard.frontend.sidebar.hub import device_reader as ticking
reader = ticking.DeviceReader()
def tick():
    reading = reader.read()
    devices, t = device_readings(reading), time.time()
    points = line_points(t, reading, devices)
    return to_plain(build_tick("b", 1, t, reading, devices=devices, points=points, look=LastLook(), busy=False))
"""
OPENED = "[len(pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in (0, 1)]"


def _tick(kernel: Kernel) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kernel.value("tick()")["devices"]
    return found


def test_counters_tell_the_same_parts_as_blocks(notebook: Notebook, tmp_path: Path) -> None:
    settings = {"context": CONTEXT, "state": tmp_path / "state"}
    kernel, other = notebook(**settings), notebook(**settings)
    kernel.run("net, opt = train(); a, b, c = mib(30), mib(5), mib(5); del a, b").ok()
    other.run("theirs = mib(700)").ok()
    kernel.run(READER).ok()

    (device,) = _tick(kernel)

    assert parts(device) == parts(report(kernel)["devices"][0])
    assert [part["name"] for part in device["parts"]] == [part["name"] for part in report(kernel)["devices"][0]["parts"]]
    assert sum(parts(device).values()) == device["total"]
    assert parts(device)["stranded"] > 0
    assert parts(device)["others"] == 700 * MIB + CONTEXT
    assert device["peak"] == kernel.value("torch.cuda.max_memory_allocated()")
    assert device["line"][4:] == [
        *kernel.value("(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())"),
        parts(device)["others"],
        parts(device)["free"],
    ]


def test_between_two_readings_of_the_driver_the_parts_re_add(notebook: Notebook) -> None:
    kernel = notebook(context=CONTEXT)
    kernel.run(f"x = mib(30)\n{READER}\nticking._DRIVER_EVERY = 1000").ok()

    (before,) = _tick(kernel)
    kernel.run("y = mib(400)").ok()
    (after,) = _tick(kernel)

    assert {"allocated": 430 * MIB, "context": CONTEXT, "others": 0}.items() <= parts(after).items()
    assert sum(parts(after).values()) == sum(parts(before).values()) == after["total"]
    assert parts(before)["free"] - parts(after)["free"] == 400 * MIB
    assert parts(after) == parts(report(kernel)["devices"][0])


def test_what_waits_for_a_stream_is_pending(notebook: Notebook) -> None:
    kernel = notebook(events="manual")
    kernel.run("""
x = mib(30)
s = torch.cuda.Stream()
x.record_stream(s)
del x
""").ok()
    kernel.run(READER).ok()

    (device,) = _tick(kernel)

    assert parts(device)["pending"] == 30 * MIB
    assert parts(device) == parts(report(kernel)["devices"][0])


def test_expandable_segments_are_told_as_bounds(notebook: Notebook) -> None:
    kernel = notebook(conf="expandable_segments:True")
    kernel.run("a, b, c = mib(30), mib(90), mib(30); del b").ok()
    kernel.run(READER).ok()

    (device,) = _tick(kernel)
    (true,) = report(kernel)["devices"]

    notes = {part["name"]: part["note"] for part in device["parts"]}
    assert notes["releasable"].startswith("at most")
    assert notes["stranded"].startswith("at least")
    assert parts(device)["stranded"] < parts(true)["stranded"]
    assert parts(device)["releasable"] > parts(true)["releasable"]
    assert sum(parts(device).values()) == device["total"]


def test_a_tick_opens_no_device(notebook: Notebook) -> None:
    kernel = notebook(devices=2)
    kernel.run(READER + "import pynvml; pynvml.nvmlInit()").ok()

    unused = _tick(kernel)
    assert not kernel.value("torch.cuda.is_initialized()")
    assert [parts(device)["allocated"] for device in unused] == [0, 0]
    assert kernel.value(OPENED) == [0, 0]

    kernel.run("torch.cuda.init()").ok()
    _tick(kernel)
    before = kernel.value(OPENED)
    kernel.run("x = mib(1, 'cuda:1')").ok()
    first, second = _tick(kernel)

    assert kernel.value(OPENED)[0] == before[0]
    assert "context" not in parts(first)
    assert parts(second)["allocated"] == MIB
    assert [device["line"] is not None for device in (first, second)] == [False, True]


def test_a_tick_neither_waits_nor_resets_nor_empties(notebook: Notebook) -> None:
    kernel = notebook(events="manual")
    kernel.run("x = mib(30); del x; y = mib(10); e = torch.cuda.Event(); e.record()").ok()
    kernel.run(READER).ok()
    counters = "(dict(torch.cuda.memory_stats()), e.query())"
    before = kernel.value(counters)

    for _ in range(3):
        _tick(kernel)

    assert kernel.value(counters) == before
    assert not before[1]


@pytest.mark.parametrize("nvml", ["absent", "no-pids", "host-pids"])
def test_a_driver_that_says_less_is_not_guessed_at(notebook: Notebook, nvml: str) -> None:
    kernel = notebook(nvml=nvml, context=CONTEXT)
    kernel.run(f"x = mib(30)\n{READER}\nticking._DRIVER_EVERY = 1000\ntick()\ny = mib(400)").ok()

    (device,) = _tick(kernel)

    assert parts(device)["allocated"] == 430 * MIB
    assert sum(parts(device).values()) == device["total"]
    assert parts(device)["context" if nvml == "host-pids" else "others and contexts"] == CONTEXT


LOOK = """
import os, time
from dataclasses import asdict
from nbguard.plain_data import to_plain as plain
from nbguard.memory.cleanup.apply.kept_by_torch import empty_cache
from nbguard.memory.cleanup.apply.apply import apply
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.analysis import Analysis
from nbguard.frontend.sidebar.protocol.memory_state import build_memory_state
from nbguard.frontend.sidebar.protocol.plan_views import cache_view, emptied_view, outcome_view, plan_view
from nbguard.frontend.sidebar.protocol.plan_views import request_of
from nbguard.memory.scan.scan import Notebook, scan
def seen(): return scan(Notebook.current(None))
def do(action, **asked):
    found = seen()
    plan = plan_cleanup(found.facts, request_of(action, **asked))
    outcome = apply(plan, Notebook.current(None), found).outcome
    return asdict(plan_view(plan, action, 't')), asdict(outcome_view(outcome, action))
"""


def test_the_heap_of_a_device_re_adds_and_emptying_its_cache_gives_back_what_was_promised(notebook: Notebook) -> None:
    kernel = notebook(**KEPT_WORKSPACES)
    kernel.run("net, opt = train(); a, b, c = mib(30), mib(5), mib(5); del a, b").ok()
    kernel.run(LOOK).ok()

    heap = kernel.value("plain(build_memory_state(Analysis(seen().facts), 'b', 1, t=time.time(), seconds=0.1, cell=3)[0])")

    allocated, reserved = counters(kernel)
    (device,) = heap["devices"]
    assert sum(row["nbytes"] for row in heap["holders"]) == allocated
    assert sum(strip["nbytes"] for strip in device["strips"]) == reserved
    notes = {row["label"]: row["note"] for row in heap["holders"]}
    assert notes["c"] == ""
    assert notes["cuBLAS workspaces"] == "%reset_gpu --hard clears them"
    assert "is free, but live blocks keep it from going back." in device["sentence"]

    plan = kernel.value("asdict(cache_view(seen().facts, 't'))")
    kernel.run("empty_cache()").ok()
    after = counters(kernel)[1]

    assert plan["promised"] == reserved - after >= 30 * MIB
    assert [row["label"] for row in plan["rows"]] == ["cuda:0"]
    assert kernel.value(f"asdict(emptied_view({plan['promised']}, {reserved}, {after}))")["realised"] == reserved - after
    assert "already empty" in kernel.value("cache_view(seen().facts, 't').refused")
    kernel.run(f"big = torch.empty({device['largest_flushed']}, dtype=torch.uint8, device='cuda')").ok()
    kernel.run(notes["cuBLAS workspaces"].removesuffix(" clears them")).ok()
    assert "cuBLAS workspaces" not in holders(report(kernel)["devices"][0])


def test_stopping_workers_touches_nothing_else_that_is_stale(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("from torch.utils.data import DataLoader; data = list(range(64))").ok()
    kernel.run("dl = DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True); n = len(list(dl))").ok()
    kernel.run("net, opt = train(); net").ok()
    kernel.run("del net, opt").ok()
    kernel.run(LOOK).ok()
    pids = kernel.value("[worker.pid for worker in dl._iterator._workers]")
    allocated = counters(kernel)[0]

    plan, done = kernel.value("do('stop_workers')")

    assert (plan["confirm"], plan["promised"]) == ("End 2 workers", 0)
    assert done["sentence"].startswith("Ended 2 workers; ")
    assert not kernel.value(f"[pid for pid in {pids} if os.path.exists(f'/proc/{{pid}}')]")
    assert counters(kernel)[0] == allocated, "the displayed network is stale, and stays"
    assert kernel.value("len(list(dl))") == 8
    stale = kernel.value("do('clean_stale')")[1]
    assert stale["realised"] == stale["promised"] > 0


def test_what_is_cleaned_while_a_cell_runs_comes_back_as_promised(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("net, opt = train()\nnet").ok()
    kernel.run("def f():\n    mine = mib(30)\n    raise ValueError(str(mine.numel()))\nf()")
    kernel.run("del net, opt").ok()
    kernel.run(LOOK).ok()

    plan, done = kernel.value("do('clean_stale', while_busy=True)")

    assert [row["key"] for row in plan["rows"]] == ["Out[3]", "last error"]
    assert done["promised"] == done["realised"] > 30 * MIB
    assert not done["undone"]
