"""Growth, holders, categories and recorded batches: pure functions of numbers and graphs."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.memory.core.facts import Graph, Node, Root, StorageFact
from nbguard.memory.core.references.graph import GRAPH
from nbguard.training.profiler.analysis import recorded_batch as memory
from nbguard.training.profiler.analysis.growth_holders import NESTED, Grown, HolderSizes, grown, holder_sizes, keepers
from nbguard.training.profiler.analysis.memory_growth import (
    KeptGraphs,
    Sample,
    graph_findings,
    growth_finding,
    growth_per_batch,
    growth_per_epoch,
    with_growth,
)
from nbguard.training.profiler.analysis.recorded_batch import (
    AllocationEvent,
    PhaseEnd,
    Shape,
    Stock,
    categories,
    read_batch,
    with_batch,
)
from nbguard.training.profiler.analysis.report import FitFinding, Growth, MemoryReport, PhasePeak
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import Slowing
from nbguard.units import KiB, MiB


def _samples(levels: list[int], per_epoch: int = 1000) -> list[Sample]:
    return [Sample(batch, 1 + (batch - 1) // per_epoch, level) for batch, level in enumerate(levels, start=1)]


# --- growth ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [16, 24, 60, 500])
def test_a_steady_leak_is_found_to_the_byte(count: int) -> None:
    assert growth_per_batch(_samples([MiB + 12_345 * n for n in range(count)])) == 12_345


def test_a_leak_is_found_although_the_last_batch_of_each_epoch_is_smaller() -> None:
    levels = [64 * KiB * n - (40 * MiB if n % 10 == 9 else 0) for n in range(60)]

    assert growth_per_batch(_samples(levels)) == pytest.approx(64 * KiB, rel=0.05)


def test_a_leak_among_batches_of_many_sizes_is_found() -> None:
    sizes = random.Random(1)
    levels = [MiB * n + sizes.randrange(0, 4 * MiB) for n in range(60)]

    assert growth_per_batch(_samples(levels)) == pytest.approx(MiB, rel=0.2)


@pytest.mark.parametrize(
    "levels",
    [
        [7 * MiB] * 100,
        [min(n, 3) * 50 * MiB for n in range(100)],  # caches of the allocator in the first batches
        [min(n, 70) * MiB for n in range(100)],  # a cache that is full after the first epoch
        [1000 * n for n in range(100)],  # a list of numbers
        [MiB * (n % 20) for n in range(100)],  # given back after each epoch
        [n * MiB for n in range(14)],  # too few to tell
        [(n % 2) * 130 * KiB + 1400 * n for n in range(100)],
    ],
)
def test_what_does_not_grow_all_the_time_is_no_growth(levels: list[int]) -> None:
    assert growth_per_batch(_samples(levels)) is None


def test_batches_of_random_size_hardly_ever_look_like_a_leak() -> None:
    found = 0
    for seed in range(300):
        sizes = random.Random(seed)
        found += growth_per_batch(_samples([sizes.randrange(0, 100 * MiB) for _ in range(30)])) is not None

    assert found <= 1


def test_growth_from_epoch_to_epoch_is_told_apart() -> None:
    levels = [MiB * (n // 5) for n in range(25)]

    assert growth_per_epoch(_samples(levels, per_epoch=5)) == MiB
    assert growth_per_epoch(_samples([0] * 25, per_epoch=5)) is None
    assert growth_per_epoch(_samples(levels[:10], per_epoch=5)) is None  # one step after the first epoch says nothing


# --- holders --------------------------------------------------------------------------------------------------------------


def _graph(losses: int, *, with_graph: bool) -> Graph:
    """Return a running function whose `losses` holds so many tensors of 1 KiB, each with a graph that saves 1 MiB, or not."""
    nodes = [
        Node(
            kind="data",
            type_name="list",
            ref=1,
            children=tuple(range(1, losses + 1)),
            labels=tuple(f"[{n}]" for n in range(losses)),
        )
    ]
    storages = []
    for number in range(losses):
        children, labels = ((losses + 1 + number,), (" → graph",)) if with_graph else ((), ())
        nodes.append(
            Node(
                kind="tensor", type_name="Tensor", ref=10 + number, children=children, labels=labels, storages=(len(storages),)
            )
        )
        storages.append(StorageFact("cpu", KiB, 4096 * (number + 1)))
    for number in range(losses if with_graph else 0):
        nodes.append(
            Node(kind="graph", type_name="AddBackward0", ref=1000 + number, children=(), labels=(), storages=(len(storages),))
        )
        storages.append(StorageFact("cpu", MiB, 10**9 + 4096 * number))
    return Graph((Root(kind="frame", label="running train()", nodes=(0,)),), tuple(nodes), tuple(storages))


def test_the_holder_is_the_place_below_which_the_growth_divides() -> None:
    looks = [holder_sizes(_graph(count, with_graph=True), {1: "losses"}) for count in (15, 23)]

    found = grown(*looks, expected=8 * MiB)

    assert found == Grown(
        holder="running train() → losses", root="frame", nbytes=8 * (MiB + KiB), held=23 * (MiB + KiB), is_graph=True
    )


def test_tensors_without_a_graph_are_not_said_to_have_one() -> None:
    looks = [holder_sizes(_graph(count, with_graph=False), {1: "kept"}) for count in (15, 23)]

    found = grown(*looks, expected=8 * KiB)

    assert found == Grown(holder="running train() → kept", root="frame", nbytes=8 * KiB, held=23 * KiB)


def test_graphs_that_lost_their_tensors_are_told_by_their_nodes() -> None:
    before = HolderSizes({("total",): 4, ("learn", ".model"): MiB}, {("total", " → graph"): 40})
    after = HolderSizes({("total",): 4, ("learn", ".model"): MiB}, {("total", " → graph"): 90})

    assert grown(before, after, expected=50 * KiB) == Grown(holder="total", is_graph=True, is_sum=True)


def test_what_all_graphs_share_does_not_hide_that_they_are_kept() -> None:
    """The parameters' gradients are met on the way of one graph: of another one at each look."""
    before, after = (
        HolderSizes(
            {("losses", f"[{last}]", " → graph", ".grad"): MiB, **{("losses", f"[{at}]"): 4 for at in range(last + 1)}},
            {("losses", f"[{at}]", " → graph"): 7 for at in range(last + 1)},
        )
        for last in (14, 22)
    )

    assert grown(before, after, expected=50 * KiB) == Grown(holder="losses", is_graph=True)


def test_what_another_look_names_otherwise_has_not_grown() -> None:
    """Seen where a process had 12 MB that only libraries held: which of these has a name may differ from look to look."""
    before = HolderSizes({("libraries (dict)",): 12 * MiB, ("kept",): MiB}, {}, {"libraries (dict)": "library"})
    sizes = {("libraries (OrderedDict)",): 12 * MiB, ("kept",): 3 * MiB}
    after = HolderSizes(sizes, {}, {"libraries (OrderedDict)": "library"})

    assert grown(before, after, expected=2 * MiB) == Grown(holder="kept", nbytes=2 * MiB, held=3 * MiB)


def test_a_library_that_holds_more_by_the_same_name_has_grown() -> None:
    label = "libraries (dict)"
    before, after = (HolderSizes({(label,): size * MiB}, {}, {label: "library"}) for size in (1, 5))

    assert grown(before, after, expected=4 * MiB) == Grown(holder=label, root="library", nbytes=4 * MiB, held=5 * MiB)


def test_what_is_merely_replaced_has_not_grown() -> None:
    before = HolderSizes({("learn", ".xb", "[0]"): 5 * MiB, ("kept", "[0]"): MiB}, {})
    after = HolderSizes(
        {("learn", ".xb", "[0]"): 5 * MiB, ("kept", "[0]"): MiB, ("kept", "[1]"): MiB, ("kept", "[2]"): MiB}, {}
    )

    assert grown(before, after, expected=2 * MiB) == Grown(holder="kept", nbytes=2 * MiB, held=3 * MiB)
    assert grown(after, after, expected=2 * MiB) is None


def test_names_come_before_running_functions_and_outer_functions_before_inner() -> None:
    nodes = tuple(Node(kind="tensor", type_name="Tensor", ref=ref, children=(), labels=(), storages=(0,)) for ref in range(3))
    roots = (
        Root(kind="frame", label="running step()", nodes=(0,)),
        Root(kind="frame", label="running train()", nodes=(1,)),
        Root(kind="name", label="x", nodes=(2,)),
    )
    storages = (StorageFact("cpu", 64, 64),)

    assert holder_sizes(Graph(roots, nodes, storages), {}).nbytes == {("x",): 64}
    assert holder_sizes(Graph(roots[:2], nodes, storages), {1: "y"}).nbytes == {("running train()", " → y"): 64}


def test_a_finding_names_the_line_to_change() -> None:
    graph = growth_finding(
        Growth(per_batch=3 * MiB, batches=40, holder="running train() → losses", held=90 * MiB, is_graph=True)
    )
    total = growth_finding(Growth(per_batch=5 * KiB, batches=40, holder="total", is_graph=True, is_sum=True))
    kept = growth_finding(Growth(per_batch=MiB, batches=40, holder="learn.keep.preds", held=40 * MiB, epochs=2))
    cache = growth_finding(Growth(per_batch=MiB, batches=40, holder="ds.cache", held=40 * MiB))
    unknown = growth_finding(Growth(per_batch=0, batches=40, per_epoch=MiB, epochs=4))

    assert (graph.kind, graph.severity, graph.nbytes) == ("graph", "problem", 3 * MiB)
    assert "`losses.append(loss.item())`" in graph.change
    assert "3 MiB per batch" in graph.what
    assert "90 MiB" in graph.evidence
    assert "`total += loss.item()`" in total.change
    assert (kept.kind, kept.severity) == ("growth", "problem")
    assert (cache.severity, "cache that fills" in cache.evidence) == ("advice", True)
    assert "1 MiB per epoch" in unknown.what
    assert unknown.severity == "advice"


def test_a_graph_that_makes_each_batch_slower_is_said_so() -> None:
    carried = Growth(
        per_batch=0, batches=9, holder="running train() → hidden", is_graph=True, is_sum=True, is_state=True, is_retained=True
    )
    listed = Growth(per_batch=MiB, batches=40, holder="losses", is_graph=True)
    slower = Slowing(first=1_300_000_000, last=6_000_000_000, total=40_000_000_000)

    finding = growth_finding(carried, slower)

    assert (finding.kind, finding.severity, finding.total, finding.nbytes) == ("graph", "problem", 40_000_000_000, None)
    assert "1.30 s → 6.00 s" in finding.what
    assert "`hidden = hidden.detach()`" in finding.change
    assert "`retain_graph=True`" in finding.change
    assert growth_finding(carried).what == finding.what.partition(": ")[2]
    assert growth_finding(listed, slower) == growth_finding(listed)  # nothing goes through the losses of a list again


@pytest.mark.parametrize(
    ("container", "line"),
    [
        ("list", "kept.append(loss.item())"),
        ("deque", "kept.append(loss.item())"),
        ("set", "kept.add(loss.item())"),
        ("tuple", "kept += (loss.item(),)"),
        ("dict", "kept[key] = loss.item()"),
        ("defaultdict", "kept[key] = loss.item()"),
        ("joined", "kept = torch.cat((kept, value.detach()))"),
        ("nested", ""),
        ("Agent", ""),
    ],
)
def test_the_advice_on_a_graph_fits_the_container(container: str, line: str) -> None:
    growth = Growth(per_batch=MiB, batches=40, holder="kept", is_graph=True, container=container)
    kept = KeptGraphs("kept", 40, container)

    for change in (
        growth_finding(growth).change,
        *map(_change, graph_findings([kept], 40)),
    ):
        assert (f"`{line}`" in change) if line else (".append" not in change and "`.detach()`" in change)


def _change(finding: FitFinding) -> str:
    return finding.change


@pytest.mark.parametrize(
    ("holder", "whats"),
    [
        ("", ["`learn.feat.acts` keeps 40 autograd graphs"]),
        ("learn.feat.acts", ["`learn.feat.acts` keeps 40 autograd graphs"]),
        (
            "cache",
            [
                "memory grows by 193 KiB per batch: `cache` keeps tensors of every batch",
                "`learn.feat.acts` keeps 40 autograd graphs",
            ],
        ),
    ],
)
def test_growth_that_a_name_explains_is_said_once(holder: str, whats: list[str]) -> None:  # seeds3.md W14
    growth = Growth(per_batch=192 * KiB + 512, batches=40, holder=holder)
    graphs = tuple(graph_findings([KeptGraphs("learn.feat.acts", 40)], 40))

    found = tuple(with_growth(graphs, growth))
    assert [finding.what for finding in found] == whats
    assert found[0].nbytes == 192 * KiB + 512
    assert tuple(with_growth(graphs, None)) == graphs
    assert tuple(with_growth((), growth)) == (growth_finding(growth),)


# --- categories -----------------------------------------------------------------------------------------------------------

_SIZE = st.integers(0, 10**12)


def _stocks(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[Stock]:
    return st.builds(Stock, **{each.name: sizes for each in fields(Stock)})


@given(
    _SIZE,
    _SIZE,
    st.none() | _stocks(_SIZE),
    st.none() | st.builds(Shape, _SIZE, st.none() | _SIZE, _SIZE, st.sampled_from(phase_log.ALL)),
    st.booleans(),
)
def test_categories_always_add_up_to_the_peak(
    peak: int, start: int, stock: Stock | None, shape: Shape | None, grows: bool
) -> None:
    found = categories(peak, start, stock, shape, grows=grows)

    assert sum(each.nbytes for each in found) == peak
    assert all(each.nbytes > 0 for each in found)
    assert len({each.name for each in found}) == len(found)


def _named(peak: int, start: int, stock: Stock, shape: Shape, *, grows: bool = False) -> dict[str, int]:
    return {each.name: each.nbytes for each in categories(peak, start, stock, shape, grows=grows)}


@pytest.mark.parametrize("number", range(100))
def test_no_byte_counts_twice_whenever_it_was_allocated(number: int) -> None:
    """Each part of what a fit has may be older than the fit or not, and what is older may go before the batch."""
    rng = random.Random(number)

    def older(nbytes: int) -> int:
        return nbytes if rng.random() < 0.5 else 0

    sizes = {name: rng.randrange(1, 1000) for name in ("parameters", "buffers", "state", "inputs", "kept_gradients")}
    others, freed, temporary, activations = (rng.choice((0, rng.randrange(1, 1000))) for _ in range(4))
    owned = sum(older(nbytes) for nbytes in sizes.values())
    before = sum(sizes.values()) + others + temporary
    stock = Stock(**sizes, gradients=sizes["kept_gradients"], spent=owned + freed)
    shape = Shape(before, before + activations, before + activations, phase_log.LOSS)

    found = _named(shape.peak, others + owned + freed, stock, shape)
    expected = {
        "parameters": sizes["parameters"],
        "buffers": sizes["buffers"],
        "optimizer state": sizes["state"],
        "inputs": sizes["inputs"],
        "gradients": sizes["kept_gradients"],
        "activations": activations,
        "before the fit": others,
        "other": temporary,
    }
    assert found == {name: nbytes for name, nbytes in expected.items() if nbytes}


def test_a_peak_in_the_loss_has_activations_and_no_new_gradients() -> None:
    stock = Stock(parameters=100, gradients=100, state=200, inputs=30)

    assert _named(920, 150, stock, Shape(330 + 50, 880, 920, phase_log.LOSS)) == {
        "parameters": 100, "optimizer state": 200, "inputs": 30, "activations": 500, "temporaries": 40, "before the fit": 50,
    }  # fmt: skip


def test_a_peak_in_the_step_has_gradients_and_no_activations() -> None:
    stock = Stock(parameters=100, gradients=100, state=200, inputs=30)

    found = _named(500, 0, stock, Shape(330, 880, 500, phase_log.STEP))

    assert found == {"parameters": 100, "gradients": 100, "optimizer state": 200, "inputs": 30, "temporaries": 70}


def test_what_has_grown_since_the_batch_that_was_followed_is_other() -> None:
    stock = Stock(parameters=100)
    shape = Shape(100, 150, 160, phase_log.FORWARD)

    assert _named(1160, 0, stock, shape, grows=True)["other"] == 1000
    assert _named(1160, 0, stock, shape)["temporaries"] == 1010


# --- a recorded batch -----------------------------------------------------------------------------------------------------


def test_a_recorded_batch_tells_the_peak_inside_a_phase_and_who_it_was() -> None:
    events = (
        AllocationEvent(1, 10, "a.py:1"),  # the batch before: still there
        AllocationEvent(2, 30, "load"),
        AllocationEvent(3, 500, "net.py:7"),  # within the forward pass: gone before its end
        AllocationEvent(4, 200, "net.py:8"),
        AllocationEvent(3),
        AllocationEvent(4),
        AllocationEvent(5, 100, "backward"),
        AllocationEvent(5),
    )
    marks = (
        PhaseEnd(1, phase_log.OTHER, 1010),
        PhaseEnd(2, phase_log.WAIT, 1040),
        PhaseEnd(5, phase_log.FORWARD, 1240),
        PhaseEnd(8, phase_log.BACKWARD, 1040),
    )

    found = read_batch(events, marks, {}, Stock(parameters=600), 250)

    assert (found.peak, found.phase) == (1740, phase_log.FORWARD)
    assert found.phases == {phase_log.WAIT: 1040, phase_log.FORWARD: 1740, phase_log.BACKWARD: 1240}
    assert {each.name: each.nbytes for each in found.categories} == {
        "parameters": 600, "inputs": 30, "activations": 200, "temporaries": 500, "before the fit": 250, "other": 160,
    }  # fmt: skip
    assert [(each.site, each.nbytes, each.category) for each in found.stacks][:2] == [
        ("net.py:7", 500, memory.TEMPORARIES),
        ("net.py:8", 200, memory.ACTIVATIONS),
    ]


@given(st.data())
def test_a_recorded_batch_re_adds(data: st.DataObject) -> None:
    living: list[int] = []
    events: list[AllocationEvent] = []
    for number in range(1, data.draw(st.integers(1, 40))):
        if living and data.draw(st.booleans()):
            events.append(AllocationEvent(living.pop(data.draw(st.integers(0, len(living) - 1)))))
        events.append(AllocationEvent(number, data.draw(st.integers(1, 1000)), data.draw(st.sampled_from(["", "a", "b"]))))
        living.append(number)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(events)), min_size=2, max_size=8)))
    marks = [PhaseEnd(cut, data.draw(st.sampled_from(phase_log.ALL)), data.draw(st.integers(0, 5000))) for cut in cuts]
    stock = data.draw(_stocks(st.integers(0, 2000)))

    batch = read_batch(events, marks, {1: memory.PARAMETERS}, stock, data.draw(st.integers(0, 2000)))
    report = with_batch(
        MemoryReport(device="cpu", source="heap of the process", peak=3000, start=0, end=0, phases=(PhasePeak("wait", 7),)),
        batch,
    )

    assert sum(each.nbytes for each in batch.categories) == batch.peak
    assert sum(each.nbytes for each in report.categories) == report.peak >= 3000
    assert max(each.peak for each in report.phases) <= report.peak


def test_a_list_is_named_and_not_the_one_of_its_graphs_by_which_what_is_new_was_met() -> None:
    at = ("losses", "[22]", " → graph")
    found = grown(HolderSizes({at: 1000}, {at: 9}), HolderSizes({at: 90_000}, {at: 900}), 80_000)

    assert found is not None
    assert (found.holder, found.is_graph, found.is_sum) == ("losses", True, False)


def test_two_containers_in_one_are_told_apart() -> None:
    def sizes(*counts: tuple[tuple[str, ...], int]) -> HolderSizes:
        places = ((*at, f"[{n}]", GRAPH) for at, count in counts for n in range(count))
        return HolderSizes({}, dict.fromkeys(places, 3))

    both = sizes((("history", "['train']"), 12), (("history", "['valid']"), 9), (("runs", "[0]", ".losses"), 10), (("few",), 3))
    pairs = sizes(*((("pairs", f"[{n}]"), 2) for n in range(10)))

    assert [(path, count) for path, count, _ in keepers(both, 8)] == [
        ("history['train']", 12),
        ("runs[0].losses", 10),
        ("history['valid']", 9),
    ]
    assert keepers(pairs, 8) == [("pairs", 20, NESTED)]
