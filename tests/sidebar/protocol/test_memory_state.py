"""The heap that a sidebar is sent: its figures add up, its rows can be looked up by number, and it is never large."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.frontend.sidebar.protocol.memory_state import build_memory_state, strips
from nbguard.frontend.sidebar.protocol.rows import names_of_learners, rows_of
from nbguard.frontend.sidebar.protocol.state import MemoryState
from nbguard.frontend.sidebar.protocol.ticks import truncate_utf8
from nbguard.memory.cleanup.plan.parking import default_plan
from nbguard.memory.cleanup.plan.plan import Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, LearnerFact, ParkedFact, Target
from nbguard.memory.core.fragmentation import fragmentation
from nbguard.memory.core.references.explain import is_explained
from nbguard.memory.reports.report import build_report
from nbguard.testing import make_facts, make_graph, make_segment
from nbguard.units import MiB
from tests.sidebar.protocol.scenes import SCENES

LARGEST = 64_000


def _heap(facts: Facts) -> MemoryState:
    return build_memory_state(Analysis(facts), "b00t", 3, t=1000.0, seconds=0.01, cell=14)[0]


def _without_plan(facts: Facts) -> Analysis:
    """Return an analysis in which the default cleanup frees nothing."""
    return Analysis(facts, {default_plan: Plan(request=Request())})


def _bytes(heap: MemoryState) -> int:
    return len(json.dumps(asdict(heap), ensure_ascii=False).encode())


@pytest.mark.parametrize("name", SCENES)
def test_holders_re_add_to_what_is_allocated(name: str) -> None:
    facts = SCENES[name]().facts
    heap = _heap(facts)
    allocated = sum(device.allocated for device in build_report(Analysis(facts)).devices)

    assert sum(row.nbytes for row in heap.holders) + heap.more[1] == allocated
    assert len(heap.holders) + heap.more[0] == len(rows_of(Analysis(facts)).holders)
    assert [row.nbytes for row in heap.holders] == sorted((row.nbytes for row in heap.holders), reverse=True)
    assert heap.stale == plan_cleanup(facts, Request()).promised


@pytest.mark.parametrize("name", SCENES)
def test_a_row_is_looked_up_by_its_number(name: str) -> None:
    """The numbers must be those of a table made again, without a plan: that is how a request is answered."""
    facts = SCENES[name]().facts
    rows = rows_of(_without_plan(facts))

    for row in _heap(facts).holders:
        assert truncate_utf8(rows.holders[row.id].label) == row.label
        assert rows.devices[row.id] == row.device
        assert rows.can[row.id] == tuple(ability for ability in row.can if ability != "clean")
        if row.can:
            assert rows.texts("why", [row.id]) == rows.targets[row.id]
            assert rows.roots[row.id] in {root.label for root in facts.graph.roots} or is_explained(rows.holders[row.id])
        if "release" in row.can:
            assert truncate_utf8(rows.targets[row.id][0]) == truncate_utf8(row.label.partition(" = ")[0])


def test_the_numbers_do_not_depend_on_what_a_cleanup_would_free() -> None:
    names = ("Out[1]", "a", "Out[2]", "b", "Out[3]")
    graph = make_graph({n: [n] for n in names}, {}, dict.fromkeys(names, MiB), dict.fromkeys(names, "learner"))
    facts = make_facts(graph)

    assert [row.stale for row in rows_of(_without_plan(facts)).holders] != [row.stale for row in _heap(facts).holders]
    assert [row.label for row in rows_of(_without_plan(facts)).holders] == [row.label for row in _heap(facts).holders]


def test_what_may_be_asked_of_a_row() -> None:
    rows = {row.label: row.can for row in _heap(SCENES["stale"]().facts).holders}

    assert rows == {
        "learn": ("why", "release", "park", "predict"),
        "last error": ("why", "clean"),
        "losses": ("why", "release", "park"),
        "preds": ("why", "release", "park"),
        "Out[9]": ("why", "release"),
        "best": ("why", "release", "park"),
        "cuBLAS workspaces": ("why",),
        "unreachable cycles": ("why", "clean"),
    }


def test_a_request_for_a_row_that_is_not_there_or_not_for_it_is_none() -> None:
    rows = rows_of(Analysis(SCENES["stale"]().facts))
    numbers = {holder.label: number for number, holder in enumerate(rows.holders)}
    tensors = rows_of(
        Analysis(make_facts(make_graph({"a": ["a"], "b": ["b"]}, {}, {"a": MiB, "b": MiB}, {"a": "tensor", "b": "tensor"})))
    )

    assert rows.texts("release", [numbers["learn"], numbers["Out[9]"]]) == ("learn", "Out[9]")
    assert tensors.texts("release", [1]) == ("b",)
    assert tensors.texts("release", [-1]) is None
    assert rows.texts("park", [numbers["learn"], numbers["Out[9]"]]) is None
    assert rows.texts("release", [numbers["last error"]]) is None
    assert rows.texts("release", [len(rows.holders)]) is None
    assert rows.texts("release", []) is None


def test_only_what_can_be_asked_for_by_name_can_be_asked_for() -> None:
    labels = ("_", "class", "not a name", "a.b", "x", "Out[2]", "Out[x]")
    graph = make_graph({n: [n] for n in labels}, {}, dict.fromkeys(labels, MiB), dict.fromkeys(labels, "tensor"))
    roots = tuple(replace(root, kind="out") if root.label == "_" else root for root in graph.roots)
    rows = rows_of(Analysis(make_facts(replace(graph, roots=roots))))

    assert {row.label for row, can in zip(rows.holders, rows.can, strict=True) if "release" in can} == {"x", "Out[2]"}
    assert set(rows.can) == {("why",), ("why", "release"), ("why", "release", "park")}


def test_names_of_one_object_are_released_together_and_so_is_what_only_others_free_with_it() -> None:
    graph = make_graph(
        {"learn": ["l"], "best": ["l"], "a": ["a"], "b": ["b"]},
        {"a": {".x": "both"}, "b": {".x": "both"}},
        {"l": 8 * MiB, "both": 4 * MiB},
        {"l": "model", "both": "tensor"},
    )
    facts = make_facts(graph)
    rows = rows_of(Analysis(facts))
    numbers = {holder.label: number for number, holder in enumerate(rows.holders)}

    assert rows.texts("release", [numbers["learn = best"]]) == ("learn", "best")
    assert (rows.can[numbers["a + b"]], rows.can[numbers["a"]]) == (("why", "release"), ("why", "release"))
    released = {name: rows.texts("release", [numbers[name]]) for name in ("a", "b", "a + b")}
    assert released == {"a": ("a", "b.x"), "b": ("b", "a.x"), "a + b": ("a", "b")}
    targets = tuple(Target(text=text, root=text) for text in rows.texts("release", [numbers["learn = best"]]) or ())
    assert plan_cleanup(facts, Request(targets=targets)).promised == rows.holders[numbers["learn = best"]].retained == 8 * MiB


@pytest.mark.parametrize("name", ["idle", "training", "oom", "many", "stale", "parked", "hostile", "cpu"])
def test_what_clean_stale_gives_back_is_marked_row_by_row(name: str) -> None:
    """The button says N bytes: rows of N bytes are marked, by the plan's own storages."""
    rows, heap = rows_of(Analysis(SCENES[name]().facts)), _heap(SCENES[name]().facts)

    assert sum(row.stale_bytes for row in rows.holders) == sum(row.stale_bytes for row in heap.holders) == heap.stale
    assert all(row.stale_bytes == row.nbytes for row in heap.holders if row.stale)


def test_the_leftovers_of_a_failed_fit_are_marked_on_the_learner_that_has_them() -> None:
    """After an error in a fit the plan clears the last batch of a Learner whose name is still there: that row is marked."""
    graph = make_graph(
        {"learn": ["learn"]},
        {"learn": {".model": "model", ".xb": "batch"}},
        {"model": 8 * MiB, "batch": 49 * MiB},
        {"learn": "learner", "model": "model", "batch": "tensor"},
    )
    heap = _heap(make_facts(graph, [LearnerFact(0, False, ("Learner", "Net"), ("xb",))]))
    (row,) = heap.holders

    assert heap.stale == row.stale_bytes == 49 * MiB
    assert not row.stale
    assert [(part.label, part.nbytes) for part in row.parts] == [("the rest", 49 * MiB), ("model", 8 * MiB)]


@pytest.mark.parametrize("name", ["idle", "training", "stale", "parked"])
def test_parts_re_add_to_their_row_and_shared_bytes_have_a_parent(name: str) -> None:
    heap = _heap(SCENES[name]().facts)

    assert all(sum(part.nbytes for part in row.parts) == row.nbytes for row in heap.holders if row.parts)
    assert all(row.parent is not None for row in heap.holders if row.kind == "shared")
    learn = next(row for row in heap.holders if row.label == "learn")
    assert [part.label for part in learn.parts] == ["optimizer", "model"]


def test_a_shared_row_stands_by_itself() -> None:
    graph = make_graph(
        {"losses": ["losses"], "learn": ["learn"]},
        {"learn": {".model": "model"}, "losses": {"[0]": "loss"}, "loss": {" → graph": "model"}},
        {"model": 8 * MiB, "losses": 64 * MiB, "loss": MiB},
        {"learn": "learner", "model": "model", "losses": "object", "loss": "tensor"},
    )
    learners = [LearnerFact(n, False, ("Learner", "Net")) for n, node in enumerate(graph.nodes) if node.kind == "learner"]
    rows = {row.label: row for row in _heap(make_facts(graph, learners)).holders}

    assert (rows["learn + losses"].kind, rows["learn + losses"].nbytes) == ("shared", 8 * MiB)
    assert (rows["learn"].nbytes, rows["losses"].nbytes) == (0, 65 * MiB)


def test_rows_say_that_they_are_lower_bounds_and_why_they_cannot_be_released() -> None:
    graph = make_graph(
        {"running fit()": ["frame"], "x": ["x"]}, {}, {"frame": MiB, "x": MiB}, {"frame": "frame", "x": "tensor"}
    )
    roots = tuple(replace(root, kind="frame") if root.label == "running fit()" else root for root in graph.roots)
    rows = {row.label: row for row in _heap(make_facts(replace(graph, roots=roots, rest=1))).holders}

    assert rows["running fit()"].is_running
    assert rows["running fit()"].note == "in use by running code: freed when that ends"
    assert rows["x"].at_least
    assert not rows["x"].is_running


def test_what_a_running_cell_uses_is_still_the_names() -> None:
    facts = SCENES["training"]().facts
    heap = _heap(facts)
    rows = {row.label: row for row in heap.holders}

    assert rows["learn"].nbytes == 4200 * MiB
    assert "learn + running fit()" not in rows
    assert rows["learn"].can == ("why", "release"), "what a fit runs on cannot be parked"
    assert [e.state for e in heap.experiments if e.label == "learn"] == ["training"]


def test_experiments() -> None:
    found = {each.label: each for each in _heap(SCENES["stale"]().facts).experiments}

    assert {label: (e.state, e.nbytes // MiB, e.cell, e.note) for label, e in found.items()} == {
        "learn": ("live", 4200, 14, ""),
        "last error → fit → self": ("stale", 1400, 12, "kept by the last error"),
        "Out[9]": ("stale", 614, 9, "kept by Out[9]"),
        "unreachable cycles": ("stale", 20, None, "kept by a cycle that Python has not collected yet"),
    }
    assert (found["learn"].summary, found["learn"].workers) == ("ResNet · Adam · 8 workers", 8)
    rows = rows_of(Analysis(SCENES["stale"]().facts))
    assert rows.texts("release", [found["learn"].id or 0]) == ("learn",)


def test_a_learner_in_a_dict_has_its_way_as_a_name_and_is_not_released_with_the_dict() -> None:
    graph = make_graph(
        {"runs": ["runs"]},
        {"runs": {"['a']": "one", "['b']": "two"}, "one": {".model": "m"}, "two": {".model": "m2"}},
        {"m": 8 * MiB, "m2": 4 * MiB},
        {"one": "learner", "two": "learner", "m": "model", "m2": "model"},
        types={"runs": "dict"},
    )
    learners = [LearnerFact(n, False, ("Learner", "Net")) for n, node in enumerate(graph.nodes) if node.kind == "learner"]
    facts = make_facts(graph, learners)

    assert [(e.label, e.nbytes // MiB, e.id, e.can) for e in _heap(facts).experiments] == [
        ("runs['a']", 8, 0, ("why",)),
        ("runs['b']", 4, 0, ("why",)),
    ]
    assert names_of_learners(facts) == {
        graph.nodes[learner.node].ref: f"runs['{x}']" for learner, x in zip(learners, "ab", strict=True)
    }


def test_a_parked_learner_is_told_once() -> None:
    facts = SCENES["idle"]().facts
    facts = replace(facts, parked=(ParkedFact("learn", "cuda:0", 5 * MiB, 2), ParkedFact("learn", "cuda:1", 3 * MiB, 2)))

    (learn,) = _heap(facts).experiments
    assert (learn.id, learn.label, learn.state, learn.note) == (None, "learn", "parked", "8 MiB parked in host memory")
    assert learn.can == ("unpark",)
    assert learn.summary == "ResNet · Adam · 8 workers"


def test_a_running_learner_is_never_called_parked() -> None:
    facts = replace(SCENES["training"]().facts, parked=(ParkedFact("learn", "cuda:0", 5 * MiB, 2),))

    assert next(e.state for e in _heap(facts).experiments if e.label == "learn") == "training"


def test_the_card_of_an_out_of_memory_error() -> None:
    oom = _heap(SCENES["oom"]().facts).oom

    assert oom is not None
    assert oom.title == "Out of memory in In[15]"
    assert oom.sentence == (
        "It asked cuda:0 for 6 GiB when 300 MiB were free and 12 GiB were allocated; afterwards, 1.51 GiB could be allocated."
    )
    assert oom.fixes[0].words.startswith("not enough alone: frees stale memory")
    assert oom.fixes[0].commands == ("%reset_gpu",)
    assert _heap(SCENES["stale"]().facts).oom is None


def test_the_sentence_says_who_pins_what() -> None:
    (device,) = _heap(SCENES["stale"]().facts).devices

    assert device.sentence == (
        "1.69 GiB is free, but live blocks keep it from going back. 1 tensor of Out[9] (614 MiB) pins 1.4 GiB: "
        "Clean stale frees it and gives 2 GiB back."
    )
    assert not _heap(SCENES["cpu"]().facts).devices


@pytest.mark.parametrize("name", ["idle", "stale", "many", "hostile"])
def test_strips_re_add_to_what_is_reserved(name: str) -> None:
    facts = SCENES[name]().facts
    (device,) = _heap(facts).devices
    space = fragmentation(facts.devices[0].segments or ())

    assert len(device.strips) <= 40
    assert sum(strip.segments for strip in device.strips) == device.segments == len(facts.devices[0].segments or ())
    assert sum(strip.nbytes for strip in device.strips) == space.reserved
    for kind, nbytes in (("releasable", space.releasable), ("stranded", space.stranded), ("allocated", space.allocated)):
        assert sum(n for strip in device.strips for name, n in strip.pieces if name == kind) == nbytes
    assert all(sum(n for _, n in strip.pieces) == strip.nbytes and len(strip.pieces) <= 8 for strip in device.strips)


def test_a_segment_in_many_pieces_is_drawn_as_its_sums() -> None:
    segment = make_segment(*[(MiB, "active_allocated"), (2 * MiB, "inactive")] * 100)
    (strip,) = strips([segment], (), 5)

    assert strip.pieces == (("allocated", 100 * MiB), ("stranded", 200 * MiB))
    few = make_segment(*[(MiB, "active_allocated"), (2 * MiB, "inactive")] * 2)
    assert [kind for kind, _ in strips([few], (), 5)[0].pieces] == ["allocated", "stranded"] * 2


BLOCKS = st.lists(
    st.tuples(
        st.integers(1, 40).map(lambda n: n * MiB), st.sampled_from(["active_allocated", "active_pending_free", "inactive"])
    ),
    min_size=1,
    max_size=30,
)


@given(st.lists(st.tuples(BLOCKS, st.booleans(), st.sampled_from([(0, 0), (0, 1)])), max_size=50), st.integers(1, 40))
def test_any_segments_make_few_strips_that_re_add(segments: list[Any], singles: int) -> None:
    found = [
        make_segment(*blocks, address=n << 40, expandable=expandable, pool=pool)
        for n, (blocks, expandable, pool) in enumerate(segments)
    ]
    space = fragmentation(found, in_use={(0, 1)})
    sums = dict.fromkeys(("allocated", "releasable", "stranded", "kept"), 0)
    drawn = strips(found, {(0, 1)}, singles)
    for strip in drawn:
        for kind, nbytes in strip.pieces:
            sums[kind] += nbytes

    assert len(drawn) <= singles + 8
    assert sums == {
        "allocated": space.allocated + space.pending,
        "releasable": space.releasable,
        "stranded": space.stranded,
        "kept": space.kept,
    }


def _nasty(text: str) -> Facts:
    """Everything that has a name has this one: 300 names, 60 Learners, all parked too, an error, eight devices."""
    names = [f"{n}{text}" for n in range(300)]
    graph = make_graph(
        {name: [name] for name in names},
        {},
        {name: MiB + n for n, name in enumerate(names)},
        dict.fromkeys(names, "learner"),
        "cuda:0",
    )
    scene = SCENES["oom"]().facts
    roots = tuple(replace(root, what=text) for root in graph.roots)
    learners = tuple(LearnerFact(n, n % 2 == 0, (text,)) for n in range(60))
    devices = tuple(replace(scene.devices[0], device=f"cuda:{n}", name=text) for n in range(8))
    parked = tuple(ParkedFact(name, text, MiB, 1) for name in names[:60])
    return replace(
        scene, graph=replace(graph, roots=roots), learners=learners, devices=devices, parked=parked, is_autocast_on=True
    )


@pytest.mark.parametrize("text", ["x" * 10_000, "👩‍👩‍👧‍👦" * 2_000, '"\\' * 5_000, "\x01\ud800" * 5_000, "ä" * 199, ""])
def test_no_names_make_a_large_message(text: str) -> None:
    heap = _heap(_nasty(text))

    assert _bytes(heap) < LARGEST
    assert len(heap.holders) > 20
    assert heap.more[0] > 0
    assert heap.experiments


@given(st.text(), st.integers(4, 300))
def test_what_is_cut_is_short_and_can_be_sent(text: str, limit: int) -> None:
    found = truncate_utf8(text + "\ud800", limit)

    assert len(found.encode()) <= limit
    if len(text.encode()) > limit:
        assert found.endswith("…")
    assert not any(ord(each) < 32 for each in found)
