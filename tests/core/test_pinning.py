"""Who pins what: for any segments, letting go gives back what was said; for any holders, the cheapest set is the cheapest."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbguard.memory.cleanup.plan.cheapest import cheapest_release
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Block, DeviceFacts, Facts, Graph, Node, PoolId, Root, Segment, StorageFact
from nbguard.memory.core.fragmentation import by_pool, fragmentation, unit_pages
from nbguard.memory.core.pinning import BlockHolders, pinners, pins_of_holders, units
from nbguard.memory.core.references.holders import holdings
from nbguard.memory.core.requests import Room
from nbguard.memory.reports.memory_map import STRANDED, build_map
from nbguard.memory.reports.report import build_report
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment
from tests.core.test_fragmentation import segments
from tests.thorough import examples

KiB, MiB = 1024, 1024**2
POOLS = st.sets(st.sampled_from([(1, 0), (0, 2)]))


@given(segments(), POOLS)
def test_letting_a_units_blocks_go_gives_back_what_it_says(found: list[Segment], in_use: set[PoolId]) -> None:
    before = fragmentation(found, in_use=in_use).releasable

    each = list(units(found, in_use))

    for unit in each:
        freed = {block.address for block in unit.live}
        assert fragmentation(found, freed, in_use).releasable - before == unit.gives_back
    together = {block.address for unit in each for block in unit.live}
    assert fragmentation(found, together, in_use).releasable - before == sum(unit.gives_back for unit in each)


@given(segments(), POOLS)
def test_what_is_stranded_re_adds(found: list[Segment], in_use: set[PoolId]) -> None:
    whole = [segment for segment in found if not segment.total_size % unit_pages(segment)]

    assert sum(unit.stranded for unit in units(whole, in_use)) == fragmentation(whole, in_use=in_use).stranded
    for key, space in by_pool(whole, in_use=in_use).items():
        mine = [unit for unit in units(whole, in_use) if (unit.segment.pool, unit.segment.stream) == (key.pool, key.stream)]
        assert sum(unit.stranded for unit in mine if unit.segment.is_small == key.is_small) == space.stranded


def block_holders(graph: Graph, device: DeviceFacts) -> BlockHolders:
    """Return the holders of the blocks of `device`, nothing of which is stale."""
    return BlockHolders.of(make_facts(graph), device, holdings(graph, device.device), frozenset())


def losses_in_every_segment(count: int = 12) -> Facts:
    """An epoch whose activations are gone and of which each loss, 512 bytes, is left in a segment of 20 MiB."""
    names = [f"loss{n}" for n in range(count)]
    graph = make_graph(
        {"losses": ["list"], "learn": ["model"]},
        {"list": {f"[{n}]": name for n, name in enumerate(names)}},
        {"model": 30 * MiB, **dict.fromkeys(names, 512)},
        dict.fromkeys(names, "tensor") | {"model": "learner"},
        device="cuda:0",
    )
    address = {storage.nbytes: storage.address for storage in graph.storages}
    losses = [storage.address for storage in graph.storages if storage.nbytes == 512]
    assert len(losses) == count
    found = [_pinned(number + 1, at) for number, at in enumerate(losses)]
    model = Segment(
        address=address[30 * MiB],
        total_size=30 * MiB,
        is_small=False,
        is_expandable=False,
        blocks=(Block(address=address[30 * MiB], size=30 * MiB, state="active_allocated", requested=30 * MiB),),
    )
    device = make_cuda_device([model, *found], 400 * MiB, 100 * MiB)
    return make_facts(graph, device=device)


def _pinned(number: int, address: int) -> Segment:
    """Return a segment of 20 MiB with 512 live bytes; addresses of the rest are made up."""
    rest = Block(address=(number + 1) << 40, size=20 * MiB - 512, state="inactive")
    return Segment(
        address=address,
        total_size=20 * MiB,
        is_small=False,
        is_expandable=False,
        blocks=(Block(address=address, size=512, state="active_allocated", requested=4), rest),
    )


def test_each_small_tensor_is_named_with_the_segment_it_pins() -> None:
    (device,) = build_map(Analysis(losses_in_every_segment())).devices

    assert len(device.pinners) == 12
    assert {block.path for pinner in device.pinners for block in pinner.blocks} == {f"losses[{n}]" for n in range(12)}
    assert {(pinner.stranded, pinner.gives_back) for pinner in device.pinners} == {(20 * MiB - 512, 20 * MiB)}
    (losses,) = device.by_holder
    assert (losses.label, losses.blocks, losses.nbytes) == ("losses", 12, 12 * 512)
    assert (losses.segments, losses.gives_back) == (12, 240 * MiB)
    assert losses.stranded_alone == losses.stranded == 240 * MiB - 12 * 512 == device.space.stranded
    assert device.rounding == 12 * 508


def test_the_worst_by_what_each_live_byte_keeps_comes_first() -> None:
    found = [
        make_segment((1 * MiB, "active_allocated"), (19 * MiB, "inactive")),
        make_segment((512, "active_allocated"), (2 * MiB - 512, "inactive"), small=True, address=1 << 40),
        make_segment((15 * MiB, "active_allocated"), (5 * MiB, "inactive"), address=2 << 40),
        make_segment((20 * MiB, "active_allocated"), address=3 << 40),
    ]
    device = make_cuda_device(found, 100 * MiB, 0)
    graph = Graph()

    worst = pinners(graph, list(units(found)), block_holders(graph, device), 10)

    assert [pinner.address for pinner in worst] == [1 << 40, 0, 2 << 40]
    assert worst[0].blocks[0].holder == "not held by Python"


def test_of_many_pinned_segments_those_with_most_free_bytes_are_among_the_explained() -> None:
    small = [make_segment((512, "active_allocated"), (2 * MiB - 512, "inactive"), address=n << 40) for n in range(1, 20)]
    large = make_segment((600 * MiB, "active_allocated"), (400 * MiB, "inactive"), address=30 << 40)
    device, graph = make_cuda_device([*small, large], 2000 * MiB, 0), Graph()

    worst = pinners(graph, list(units([*small, large])), block_holders(graph, device), 4)

    assert [pinner.address >> 40 for pinner in worst] == [1, 2, 3, 30]


def test_a_segment_of_two_holders_comes_back_with_neither_alone() -> None:
    graph = make_graph({"a": ["x"], "b": ["y"]}, {}, {"x": 512, "y": 1024}, device="cuda:0")
    segment = Segment(
        address=4096,
        total_size=2 * MiB,
        is_small=True,
        is_expandable=False,
        blocks=(
            Block(address=4096, size=512, state="active_allocated", requested=512),
            Block(address=4097, size=1024, state="active_allocated", requested=1024),
            Block(address=6000, size=2 * MiB - 1536, state="inactive"),
        ),
    )
    device = make_cuda_device([segment], 100 * MiB, 0)

    rows = pins_of_holders(graph, list(units([segment])), block_holders(graph, device))

    assert [(row.label, row.stranded, row.stranded_alone, row.gives_back) for row in rows] == [
        ("a", 2 * MiB - 1536, 0, 0),
        ("b", 2 * MiB - 1536, 0, 0),
    ]


def test_pages_of_an_expandable_segment_are_pinned_one_by_one() -> None:
    blocks = ((20 * MiB, "active_allocated"), (30 * MiB, "inactive"), (20 * MiB, "active_allocated"), (30 * MiB, "inactive"))
    (device,) = build_map(
        Analysis(make_facts(Graph(), device=make_cuda_device([make_segment(*blocks, expandable=True)], 1, 0)))
    ).devices

    (pinner,) = device.pinners
    assert (pinner.address, pinner.size, pinner.stranded, pinner.gives_back) == (40 * MiB, 40 * MiB, 20 * MiB, 40 * MiB)
    assert device.pages is not None
    assert (device.pages.full, device.pages.partly, device.pages.free) == (1, 2, 2)


def test_without_a_gpu_there_is_no_map() -> None:
    found = build_map(Analysis(make_facts(make_graph({"x": ["x"]}, {}, {"x": 5}))))

    assert (found.devices, found.without) == ((), ("cpu",))
    assert "CPU memory has no segments" in found.why_not


# --- the cheapest set -------------------------------------------------------------------------------------------------------


@st.composite
def notebooks(draw: st.DrawFn) -> tuple[Facts, int]:
    """Names that hold tensors, some of two names, some stale, in segments with holes; and a request."""
    names = [f"v{n}" for n in range(draw(st.integers(1, 5)))]
    roots = [Root(kind="name", label=name, nodes=(n,)) for n, name in enumerate(names)] + [
        Root(kind="garbage", label="unreachable cycles", nodes=(len(names),))
    ]
    owned: list[list[int]] = [[] for _ in roots]
    storages: list[StorageFact] = []
    found: list[Segment] = []
    for number in range(draw(st.integers(1, 4))):
        at = (number + 1) << 40
        blocks = []
        for size in draw(st.lists(st.integers(1, 12), min_size=1, max_size=5)):
            who = draw(st.sets(st.integers(-1, len(roots) - 1), min_size=0, max_size=2))
            is_live = bool(who)
            for each in who - {-1}:
                owned[each].append(len(storages))
            if who - {-1}:
                storages.append(StorageFact("cuda:0", size * MiB, at))
            state = "active_allocated" if is_live else "inactive"
            blocks.append(Block(address=at, size=size * MiB, state=state, requested=size * MiB if is_live else 0))
            at += size * MiB
        first = blocks[0].address
        found.append(Segment(address=first, total_size=at - first, is_small=False, is_expandable=False, blocks=tuple(blocks)))
    nodes = tuple(Node(kind="tensor", type_name="Tensor", ref=n, storages=tuple(held)) for n, held in enumerate(owned))
    device = make_cuda_device(found, 300 * MiB, draw(st.integers(0, 24)) * MiB)
    return Facts(tracked="cuda", devices=(device,), graph=Graph(tuple(roots), nodes, tuple(storages))), draw(
        st.integers(2, 60)
    ) * MiB


def _freed(facts: Facts, gone: set[int]) -> set[int]:
    """Return the storages that nothing holds any more once the roots `gone` are; a name wins over what is stale."""
    graph = facts.graph
    kept = {s for n, root in enumerate(graph.roots) if n not in gone and root.kind == "name" for s in graph.nodes[n].storages}
    return {s for n in gone for s in graph.nodes[n].storages} - kept


@given(notebooks())
@settings(max_examples=examples(150))
def test_the_cheapest_set_is_the_cheapest_and_is_enough(drawn: tuple[Facts, int]) -> None:
    facts, nbytes = drawn
    (device,) = facts.devices
    graph = facts.graph
    error = len(graph.roots) - 1
    names = range(error)

    def fits(freed: set[int]) -> bool | None:
        addresses = {graph.storages[number].address for number in freed}
        return Room(device=device, freed=addresses, is_emptied=bool(freed)).fits(nbytes)

    found = cheapest_release(Analysis(facts).devices[0], nbytes)

    stale = _freed(facts, {error})
    ways = [set(some) for count in range(error + 1) for some in combinations(names, count)]
    good = [sum(graph.storages[s].nbytes for s in _freed(facts, way)) for way in ways if fits(_freed(facts, way) | stale)]
    if fits(set()):
        assert (found.names, found.and_stale, found.enough) == ((), False, True)
    elif not good:
        assert found.enough is False
    else:
        assert found.enough
        assert found.is_exact
        chosen = {number for number in names if graph.roots[number].label in found.names}
        freed = _freed(facts, chosen) | stale  # unreachable cycles go with any cleanup
        assert fits(freed)
        assert found.lost == min(good)
        addresses = {graph.storages[number].address for number in freed}
        segments_ = device.segments or ()
        assert found.gives_back == fragmentation(segments_, addresses).releasable - fragmentation(segments_).releasable


def test_what_has_two_names_is_let_go_by_both() -> None:
    facts = losses_in_every_segment()
    (losses,) = (root for root in facts.graph.roots if root.label == "losses")
    graph = replace(facts.graph, roots=(*facts.graph.roots, replace(losses, label="kept")))
    facts = replace(facts, graph=graph)

    release = cheapest_release(Analysis(facts).devices[0], 320 * MiB)

    assert (release.enough, set(release.names)) == (True, {"losses", "kept"})
    assert any(
        "`%reset_gpu losses kept` gives 240 MiB back" in each.sentence for each in build_report(Analysis(facts)).findings
    )


def test_of_many_names_a_good_set_is_found_step_by_step() -> None:
    count = 60
    graph = make_graph(
        {f"v{n}": [f"t{n}"] for n in range(count)}, {}, {f"t{n}": 4 * MiB + n for n in range(count)}, device="cuda:0"
    )
    found = [
        Segment(
            address=s.address,
            total_size=20 * MiB,
            is_small=False,
            is_expandable=False,
            blocks=(Block(address=s.address, size=s.nbytes, state="active_allocated", requested=s.nbytes), _rest(n, s.nbytes)),
        )
        for n, s in enumerate(graph.storages)
    ]
    device = make_cuda_device(found, 2000 * MiB, 0)

    release = cheapest_release(Analysis(make_facts(graph, device=device)).devices[0], 200 * MiB)

    assert release.enough
    assert not release.is_exact
    assert len(release.names) == 10
    assert release.gives_back == 200 * MiB
    assert tuple(line.command for line in release.advice) == (f"%reset_gpu {' '.join(release.names)}",)


def _rest(number: int, nbytes: int) -> Block:
    return Block(address=(number + 1) << 40, size=20 * MiB - nbytes, state="inactive")


# --- recorded snapshots -----------------------------------------------------------------------------------------------------

RECORDED = os.environ.get("NBGUARD_RECORDED_DATA", "")


@pytest.mark.skipif(not RECORDED, reason="NBGUARD_RECORDED_DATA does not name the folder of recorded snapshots")
def test_recorded_snapshots_re_add() -> None:
    from nbguard.memory.allocator.snapshot.read import load_snapshot

    files = sorted(Path(RECORDED).glob("*.json.gz"))
    assert files
    for file in files:
        loaded = load_snapshot(file)
        for number in {segment.device for segment in loaded.segments}:
            found = [
                Segment(
                    address=each.address,
                    total_size=each.total_size,
                    is_small=each.is_small,
                    is_expandable=each.is_expandable,
                    blocks=tuple(
                        Block(address=b.address, size=b.size, state=b.state, requested=b.requested) for b in each.blocks
                    ),
                    stream=each.stream,
                    pool=each.pool,
                )
                for each in loaded.segments
                if each.device == number
            ]
            device = DeviceFacts(device=f"cuda:{number}", name=file.name, segments=tuple(found))
            (drawn,) = build_map(Analysis(Facts(tracked="cuda", devices=(device,)))).devices
            spaces = [drawn.space, *(pool.space for pool in drawn.pools)]
            for space in spaces:
                assert space.allocated + space.pending + space.releasable + space.stranded + space.kept == space.reserved
            assert sum(pool.space.stranded for pool in drawn.pools) == drawn.space.stranded
            assert sum(unit.stranded for unit in units(found)) == drawn.space.stranded
            assert sum(each.part(STRANDED) for pool in drawn.pools for each in pool.segments) == drawn.space.stranded
            assert sum(each.total_size for each in found) == drawn.space.reserved
