"""The verdict on a restart: its parts add up, and it says no more than they do."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nbguard.memory.cleanup.plan.plan import Verdict, verdict
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import DeviceFacts, Facts, Graph, NvmlFacts, ProcessFact
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment, segment_of

MIB = 1 << 20
GIB = 1 << 30


def _device(graph: Graph, *blocks: tuple[int, str], context: int = 400 * MIB, total: int = 8 * GIB) -> DeviceFacts:
    segments = [segment_of(graph, *blocks), make_segment((4 * MIB, "active_allocated"), address=1 << 50)]
    reserved = sum(segment.total_size for segment in segments)
    device = make_cuda_device(segments, total, total - reserved - context)
    driver = NvmlFacts(total, reserved + context, (ProcessFact(1, reserved + context),))
    return replace(device, nvml=driver, workspace=4 * MIB)


def _verdict(graph: Graph, *blocks: tuple[int, str], broken: str = "", **device: int) -> Verdict:
    return verdict(Analysis(make_facts(graph, device=_device(graph, *blocks, **device))), broken)


def _parts(found: Verdict) -> dict[str, int]:
    return {part.name: part.nbytes for part in found.rest}


def test_who_has_what_and_that_no_restart_is_needed() -> None:
    graph = make_graph(
        {"a": ["x"], "running f() in thread T": ["y"], "Out[3]": ["z"]},
        storages={"x": 10 * MIB, "y": 20 * MIB, "z": 30 * MIB},
        device="cuda:0",
    )

    found = _verdict(graph, (2 * MIB, "inactive"), (MIB, "active_allocated"))

    assert _parts(found) == {
        "your names": 10 * MIB,
        "running code": 20 * MIB,
        "kept results": 30 * MIB,
        "cuBLAS workspaces": 4 * MIB,
        "not held by Python": MIB,
        "free, but not returnable": 2 * MIB,
        "context": 400 * MIB,
    }
    assert found.total == sum(_parts(found).values())
    assert (found.gain, found.is_needed, found.loses) == (401 * MIB, False, 1)
    assert found.reason == (
        "a restart of the kernel is not needed, because it would give back only 401 MiB "
        "(not held by Python 1 MiB, context 400 MiB)"
    )


def test_what_libraries_keep_is_worth_a_restart_from_a_share_of_the_device_on() -> None:
    graph = make_graph({"a": ["x"]}, storages={"x": MIB}, device="cuda:0")

    little = _verdict(graph, (70 * MIB, "active_allocated"))
    much = _verdict(graph, (90 * MIB, "active_allocated"))
    on_a_large_device = _verdict(graph, (90 * MIB, "active_allocated"), total=80 * GIB)

    assert (little.is_needed, much.is_needed, on_a_large_device.is_needed) == (False, True, False)
    assert much.reason.startswith("only a restart of the kernel gives back 490 MiB more (not held by Python 90 MiB,")
    assert "it loses every variable, 1 name that leads to memory among them" in much.reason


def test_what_a_name_shares_with_a_library_is_no_reason_to_restart() -> None:
    graph = make_graph({"a": ["x"], "b": ["x"]}, storages={"x": GIB}, device="cuda:0")
    graph = replace(graph, roots=(graph.roots[0], replace(graph.roots[1], kind="library")))

    assert _parts(_verdict(graph))["your names"] == GIB
    assert not _verdict(graph).is_needed


def test_an_error_that_lasts_is_reason_enough() -> None:
    found = _verdict(make_graph({}), broken="CUDA error: device-side assert triggered")

    assert found.is_needed
    assert "CUDA answers every call with an error (CUDA error: device-side assert triggered)" in found.reason


def test_without_a_device_a_restart_gives_nothing() -> None:
    found = verdict(Analysis(make_facts(make_graph({"a": ["x"]}, storages={"x": 9}))))

    assert (_parts(found), found.gain, found.is_needed) == ({"your names": 9}, 0, False)
    assert verdict(Analysis(Facts(tracked="cuda"))).rest == ()


_KIND = st.sampled_from(["name", "module", "frame", "out", "error", "cache", "garbage", "library"])


@given(
    st.lists(st.tuples(_KIND, st.sets(st.integers(0, 5), max_size=4)), max_size=6),
    st.lists(
        st.tuples(st.integers(1, 200).map(lambda n: n * MIB), st.sampled_from(["inactive", "active_allocated"])), max_size=4
    ),
    st.integers(0, 500),
)
def test_the_parts_re_add(roots: list[tuple[str, set[int]]], blocks: list[tuple[int, str]], context: int) -> None:
    names = {f"r{n}": [f"s{at}" for at in held] for n, (_, held) in enumerate(roots)}
    graph = make_graph(names, storages={f"s{at}": (at + 1) * MIB for _, held in roots for at in held}, device="cuda:0")
    graph = replace(graph, roots=tuple(replace(root, kind=roots[n][0]) for n, root in enumerate(graph.roots)))  # type: ignore[arg-type]
    device = _device(graph, *blocks, context=context * MIB)

    found = verdict(Analysis(make_facts(graph, device=device)))

    assert device.allocator is not None
    assert found.total == sum(_parts(found).values()) == device.allocator.reserved + context * MIB
    assert 0 <= found.gain <= found.total
    assert found.is_needed == ("only a restart" in found.reason)
