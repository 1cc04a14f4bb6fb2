"""Blocks that are workspaces of cuBLAS and cuBLASLt, and blocks of the same size that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import DeviceFacts, Segment
from nbguard.memory.reports.report import build_report
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment

MIB = 2**20
WORKSPACE, LT = 32 * MIB, MIB
LIVE = "active_allocated"


def _stream(number: int, *sizes: int) -> Segment:
    return make_segment(*((size, LIVE) for size in sizes), address=(number + 1) << 45, stream=number)


def _device(*segments: Segment, lt: int | None = LT) -> DeviceFacts:
    device = make_cuda_device(list(segments), total=2**36, free=2**35)
    return replace(device, workspace=WORKSPACE, lt_workspace=lt)


def _rows(device: DeviceFacts) -> dict[str, int]:
    (found,) = build_report(Analysis(make_facts(make_graph({}), device=device))).devices
    return {holder.label: holder.retained for holder in found.holders}


def _promised(device: DeviceFacts) -> int:
    return plan_cleanup(make_facts(make_graph({}), device=device), Request(hard=True)).promised


def test_what_an_h100_had_is_one_row_and_is_promised() -> None:
    """Two workspaces of cuBLAS, for the forward and the backward pass, and one of cuBLASLt, for the forward pass alone."""
    device = _device(_stream(0, WORKSPACE, WORKSPACE, LT))

    assert _rows(device) == {"cuBLAS workspaces": 68_157_440}
    assert _promised(device) == 68_157_440


@pytest.mark.parametrize(
    ("segments", "workspaces", "rest"),
    [
        ([_stream(0, LT, LT)], 0, 2 * LT),  # no matrix product has been made here
        ([_stream(0, WORKSPACE, LT, LT, LT)], WORKSPACE + LT, 2 * LT),  # at most one for each of cuBLAS's
        ([_stream(0, WORKSPACE), _stream(7, LT)], WORKSPACE, LT),  # not on the stream of the workspace
        ([_stream(0, WORKSPACE, LT), _stream(7, WORKSPACE, LT)], 2 * (WORKSPACE + LT), 0),
        ([_stream(0, WORKSPACE, LT + 512)], WORKSPACE, LT + 512),  # not the size
    ],
)
def test_no_more_blocks_are_workspaces_than_there_can_be(segments: list[Segment], workspaces: int, rest: int) -> None:
    device = _device(*segments)

    assert _rows(device) == {name: n for name, n in (("cuBLAS workspaces", workspaces), ("not held by Python", rest)) if n}
    assert _promised(device) == workspaces


def test_a_torch_that_keeps_none_for_cublaslt_has_none() -> None:
    assert _rows(_device(_stream(0, WORKSPACE, LT), lt=None)) == {"cuBLAS workspaces": WORKSPACE, "not held by Python": LT}


def test_a_tensor_of_that_size_is_no_workspace() -> None:
    graph = make_graph({"x": ["x"]}, {}, {"x": LT}, {"x": "tensor"}, device="cuda:0")
    address = graph.storages[0].address
    segments = [_stream(0, WORKSPACE), replace(make_segment((LT, LIVE), address=address), stream=0)]

    (found,) = build_report(Analysis(make_facts(graph, device=_device(*segments)))).devices

    assert {holder.label: holder.retained for holder in found.holders} == {"x": LT, "cuBLAS workspaces": WORKSPACE}
