"""Reports: parts that re-add to the device, holders that re-add to what is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.core.facts import Facts, NvmlFacts, ProcessFact
from nbguard.core.report import build_report
from nbguard.core.why import explain
from nbguard.render.rows import holder_rows
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment

GiB = 1024**3
MiB = 1024**2


def _cuda(nvml: NvmlFacts | None = None) -> Facts:
    segments = [
        make_segment((6 * GiB, "active_allocated"), (2 * GiB, "inactive")),
        make_segment((GiB, "inactive"), address=1 << 50),
    ]
    device = replace(make_cuda_device(segments, total=80 * GiB, free=60 * GiB), nvml=nvml)
    graph = make_graph(
        {"learn": ["l"], "Out[3]": ["o"]}, storages={"l": 4 * GiB, "o": GiB}, kinds={"o": "learner"}, device="cuda:0"
    )
    return make_facts(graph, device=device)


def test_parts_re_add_to_the_device() -> None:
    nvml = NvmlFacts(80 * GiB, 20 * GiB, (ProcessFact(1, 12 * GiB), ProcessFact(2, 3 * GiB)))

    (device,) = build_report(_cuda(nvml)).devices
    parts = {part.name: part.nbytes for part in device.parts}

    assert sum(parts.values()) == device.total == 80 * GiB
    assert parts == {
        "allocated": 6 * GiB,
        "releasable": GiB,
        "stranded": 2 * GiB,
        "context": 8 * GiB,
        "others": 3 * GiB,
        "free": 60 * GiB,
    }
    assert device.kernel == 17 * GiB


@pytest.mark.parametrize("processes", [None, (ProcessFact(2, None),)])
def test_a_driver_that_does_not_tell_processes_apart_is_not_guessed_at(processes: tuple[ProcessFact, ...] | None) -> None:
    """In containers NVML is blind to pids: what is used outside is one part, and says so."""
    (device,) = build_report(_cuda(NvmlFacts(80 * GiB, 20 * GiB, processes))).devices
    parts = {part.name: part.nbytes for part in device.parts}

    assert parts["others and contexts"] == 11 * GiB
    assert sum(parts.values()) == device.total


def test_what_python_does_not_hold_is_a_row_so_that_holders_re_add() -> None:
    (device,) = build_report(_cuda()).devices

    assert sum(holder.retained for holder in device.holders) == device.allocated == 6 * GiB
    assert ("not held by Python", GiB) in [(holder.label, holder.retained) for holder in device.holders]


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
def test_rows_shown_re_add_to_the_total_shown(limit: int) -> None:
    graph = make_graph({f"v{n}": [f"n{n}"] for n in range(30)}, storages={f"n{n}": 1_000_003 * (n + 1) for n in range(30)})
    (device,) = build_report(make_facts(graph)).devices

    rows, total = holder_rows(device, limit)

    assert sum(round(float(row.retained.split()[0]) * 100) for row in rows) == round(float(total.split()[0]) * 100)
    assert len(rows) == min(limit + 1, 30)


def test_stale_bytes_come_with_the_command_that_frees_them() -> None:
    report = build_report(_cuda())

    assert report.stale == GiB
    assert report.findings[0].command == "%reset_gpu"
    assert report.findings[0].sentence.startswith("1.00 GiB is stale")


def test_a_list_of_losses_with_graphs_is_a_finding() -> None:
    graph = make_graph(
        {"losses": ["list"]},
        {"list": {"[0]": "a", "[1]": "b"}, "a": {" → graph": "g"}, "b": {" → graph": "h"}, "g": {"": "x"}, "h": {"": "y"}},
        {"a": 4, "b": 4, "x": 100, "y": 100},
        {"a": "tensor", "b": "tensor", "g": "graph", "h": "graph", "x": "tensor", "y": "tensor"},
    )

    sentences = [finding.sentence for finding in build_report(make_facts(graph)).findings]

    assert sentences == [
        "losses keeps 2 autograd graphs alive (200 B): append `loss.item()` or `t.detach()`, or see `%gpumem why losses`"
    ]


def test_only_one_device_can_be_asked_for() -> None:
    report = build_report(_cuda())

    assert [device.device for device in report.only("0").devices] == ["cuda:0"]
    assert report.only("cuda:1").devices == ()


def test_why_lists_each_root_with_its_shortest_path_and_the_line_that_cuts_it() -> None:
    graph = make_graph(
        {"learn": ["l"], "Out[3]": ["l"], "opt": ["o"], "zmod.STATE": ["s"], "runs": ["d"]},
        {"l": {".model": "m"}, "o": {".params": "m"}, "s": {"[0]": "l"}, "d": {"['a']": "l"}},
        {"m": 10},
        {"l": "learner"},
    )

    why = explain(make_facts(graph), "learn", 0, "Learner")

    assert why.nbytes == 10
    assert [(path.text, path.release, path.storages_only) for path in why.paths] == [
        ("learn", "%reset_gpu learn", False),
        ("runs['a']", "%reset_gpu runs['a']", False),
        ("zmod.STATE[0]", "zmod.STATE[0] = None", False),
        ("Out[3]", "%reset_gpu Out[3]", False),
        ("opt.params", "%reset_gpu opt", True),
    ]
