"""Figures and verdicts of the card against the model of the allocator, and against what all else shows of the same state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nbguard.frontend.sidebar.protocol.memory_state import build_memory_state
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.state import copy
from nbguard.memory.cleanup.plan.parking import default_plan
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import AllocatorStats, Block, Facts, Graph, Node, PoolFact, Root, StorageFact
from nbguard.memory.core.oom_facts import OomFact
from nbguard.memory.core.requests import segment_size
from nbguard.memory.out_of_memory.card import OomCard, build_card
from nbguard.memory.out_of_memory.failed_request import FailedRequest
from nbguard.memory.out_of_memory.rerun import VERDICT_TEXTS
from nbguard.memory.reports.memory_map import build_map
from nbguard.memory.reports.report import build_report
from nbguard.testing import make_cuda_device, make_facts
from nbguard.units import MiB, format_bytes
from tests.allocator.test_largest import facts_of, others, served, states
from tests.allocator.test_properties import STREAMS
from tests.thorough import examples

SIZES = st.one_of(
    st.integers(1, 600 * MiB), st.sampled_from([512, MiB, MiB + 1, 5 * MiB, 9 * MiB, 10 * MiB, 19 * MiB, 21 * MiB])
)


def blocks_of(model: CachingAllocator) -> list[Block]:
    """Return the allocated blocks of a model."""
    blocks = (block for segment in facts_of(model).segments or () for block in segment.blocks)
    return [block for block in blocks if block.state == "active_allocated"]


def facts_on(model: CachingAllocator, stale: frozenset[int], requested: int) -> Facts:
    """Return facts in which every live block has a holder: those at the addresses `stale` are garbage, others have names."""
    stats = AllocatorStats(allocated=sum(b.size for b in blocks_of(model)), reserved=model.reserved)
    device = replace(facts_of(model), allocator=stats)
    live = blocks_of(model)
    storages = tuple(StorageFact("cuda:0", block.size, block.address) for block in live)
    nodes = tuple(Node(kind="tensor", type_name="Tensor", ref=n, storages=(n,)) for n in range(len(live)))
    garbage = tuple(n for n, block in enumerate(live) if block.address in stale)
    names = tuple(Root(kind="name", label=f"t{n}", nodes=(n,)) for n in range(len(live)) if n not in garbage)
    pools = [pool for pool, owner in model.pools.items() if pool != (0, 0) and owner.is_in_use]
    keeper = Node(kind="pool", type_name="CUDAGraph", ref=1 << 40)
    graph = Graph(
        (*names, Root(kind="name", label="g", nodes=(len(live),)), Root(kind="garbage", label="cycles", nodes=garbage)),
        (*nodes, keeper),
        storages,
    )
    return replace(
        make_facts(graph, device=device),
        pools=tuple(PoolFact(pool=pool, keepers=(len(live),)) for pool in pools),
        oom=OomFact(device="cuda:0", requested=requested),
    )


@st.composite
def failures(
    draw: st.DrawFn, confs: tuple[str, ...] = ("",), streams: tuple[int, ...] = STREAMS
) -> tuple[CachingAllocator, Facts]:
    model = draw(states(confs, streams))
    stale = frozenset(block.address for block in blocks_of(model) if draw(st.booleans()))
    return model, facts_on(model, stale, draw(SIZES))


def card_of(analysis: Analysis) -> OomCard:
    card = analysis.once(build_card)
    assert card is not None
    return card


def is_alone(model: CachingAllocator) -> bool:
    """Say whether all blocks of everybody's pool are of one stream, so that it matters not on which the request is made."""
    return all(not segment.stream or segment.is_private for segment in facts_of(model).segments or ())


@given(failures(("", "max_split_size_mb:24")))
@settings(max_examples=examples(100), deadline=None)
def test_what_the_card_says_can_be_had_now(failure: tuple[CachingAllocator, Facts]) -> None:
    model, facts = failure
    card = card_of(Analysis(facts))
    assert card.had is not None

    if card.had:
        assert served(model, card.had) != "no"
    for size in others(card.had, model.capacity or 0):
        if size > card.had:
            assert served(model, size) == "no", size


@given(failures(("", "max_split_size_mb:24")))
@settings(max_examples=examples(100), deadline=None)
def test_whether_the_request_would_succeed_now(failure: tuple[CachingAllocator, Facts]) -> None:
    model, facts = failure
    analysis = Analysis(facts)
    assert facts.oom is not None
    request = FailedRequest.of(analysis, facts.oom)
    assert request.nbytes is not None

    on_default, somewhere = served(model, request.nbytes) != "no", request.would_succeed()
    assert on_default or not somewhere, "whichever stream asks, the default one is among them"
    if is_alone(model):
        assert on_default == somewhere


@given(failures(streams=(0,)))
@settings(max_examples=examples(100), deadline=None)
def test_what_the_card_says_of_the_time_after_a_cleanup(failure: tuple[CachingAllocator, Facts]) -> None:
    model, facts = failure
    assume(is_alone(model))
    analysis = Analysis(facts)
    assert facts.oom is not None
    request, plan = FailedRequest.of(analysis, facts.oom), card_plan(analysis)
    after = copy(model)
    after.events_are_instant = True
    for number in plan:
        after.free(facts.graph.storages[number].address)
    after.complete_events()
    after.empty_cache()
    pools = analysis.pools_in_use

    largest = request.largest(plan, pools, is_emptied=True)

    assert largest is not None
    assert request.nbytes is not None
    if largest:
        assert served(after, largest) != "no"
    for size in others(largest, model.capacity or 0):
        if size > largest:
            assert served(after, size) == "no", size
    assert request.would_succeed(plan, pools, is_emptied=True) == (served(after, request.nbytes) != "no")


def card_plan(analysis: Analysis) -> frozenset[int]:
    """Return the storages that the default cleanup frees, and that the fix of the card speaks of."""
    return analysis.once(default_plan).storages


@given(failures(("", "expandable_segments:True", "max_split_size_mb:24")))
@settings(max_examples=examples(100), deadline=None)
def test_no_two_surfaces_of_one_state_disagree(failure: tuple[CachingAllocator, Facts]) -> None:
    """Report, findings, map, card and sidebar: the largest request, the largest free block, what is stranded and stale."""
    _, facts = failure
    assume(facts.devices[0].segments)
    apart = [Analysis(facts) for _ in range(4)]
    report, card = build_report(apart[0]), card_of(apart[1])
    (mapped,), (heap, _) = build_map(apart[2]).devices, build_memory_state(apart[3], "b", 1, t=0.0, seconds=0.0, cell=None)

    assert card.had == mapped.largest.flushed == heap.devices[0].largest_flushed
    assert mapped.largest.now == heap.devices[0].largest_now
    assert card.largest_free == mapped.largest.cached
    assert heap.oom is not None
    assert heap.oom.sentence.endswith(f"; afterwards, {format_bytes(card.had or 0)} could be allocated.")
    assert [f"{VERDICT_TEXTS[fix.verdict]}: {fix.words}" for fix in card.fixes][: len(heap.oom.fixes)] == [
        fix.words for fix in heap.oom.fixes
    ]
    assert next(f.sentence for f in report.findings if f.kind == "oom").find(card.fixes[0].words) > 0
    assert report.devices[0].parts == card.parts
    assert report.stale == heap.stale
    assert {part.name: part.nbytes for part in card.parts}["stranded"] == mapped.space.stranded
    for finding in report.findings:
        if finding.kind == "fragmentation":
            assert f"(largest free block {format_bytes(mapped.largest.cached)})" in finding.sentence
            assert finding.sentence.startswith(format_bytes(mapped.space.stranded))
    held = {holder.label: holder.retained for holder in report.devices[0].holders}
    assert {row.label: row.nbytes for row in heap.holders}.items() <= held.items()
    assert {holder.label: holder.nbytes for holder in mapped.holders if holder.nbytes and holder.kind != "pending"} == {
        label: nbytes for label, nbytes in held.items() if nbytes
    }


@pytest.mark.parametrize(("free", "had"), [(9, 1), (15, 14), (3, 1), (10, 10), (1, 0), (2, 1)])
def test_nine_mib_free_are_no_nine_mib_to_be_had(free: int, had: int) -> None:
    """A request of 1 to 10 MiB needs a segment of 20; a larger one whole steps of 2 MiB."""
    facts = make_facts(Graph(), device=make_cuda_device([], 100 * MiB, free * MiB))
    card = card_of(Analysis(replace(facts, oom=OomFact(device="cuda:0", requested=64 * MiB))))

    assert card.had == had * MiB


@pytest.mark.parametrize(
    ("requested", "free", "would"),
    [
        (8, 9, False),  # bytes that are no segment's size are the request's own, as a library's are: it needs 20
        (8, 20, True),
        (20, 20, True),  # torch tells the segment: the request is one of 1 to 10 MiB, or of up to 20
        (20, 19, False),
        (2, 2, True),  # the segment of the small pool
        (2, 1, False),
        (12, 12, True),
    ],
)
def test_a_request_and_the_segment_that_torch_tells(requested: int, free: int, would: bool) -> None:
    facts = make_facts(Graph(), device=make_cuda_device([], 100 * MiB, free * MiB))
    oom = OomFact(device="cuda:0", requested=requested * MiB)
    analysis = Analysis(replace(facts, oom=oom))

    assert FailedRequest.of(analysis, oom).would_succeed() is would
    assert any(fix.words.endswith("run it again") for fix in card_of(analysis).fixes) is would


@given(SIZES, st.integers(0, 10 * MiB))
def test_a_rounded_segment_is_taken_at_its_worst(size: int, slack: int) -> None:
    """Of all requests whose segment a text may stand for, none is larger than the one that is reckoned with."""
    segment = segment_size(size)
    shown = max(0, segment - slack)
    analysis = Analysis(make_facts(Graph(), device=make_cuda_device([], 1000 * MiB, 0)))

    exact = FailedRequest.of(analysis, OomFact(device="cpu", requested=segment)).nbytes
    rounded = FailedRequest.of(analysis, OomFact(device="cpu", requested=shown, slack=slack)).nbytes

    assert exact is not None
    assert exact >= size - size % 512
    assert rounded is not None
    assert rounded >= size - size % 512
