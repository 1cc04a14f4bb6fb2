"""The card after an out-of-memory error: what the same run would have needed, and what lets it through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import (
    AllocatorStats,
    DeviceFacts,
    Facts,
    Graph,
    LearnerFact,
    NvmlFacts,
    PoolFact,
    ProcessFact,
    Segment,
)
from nbguard.memory.core.oom_facts import AllocatorCounts, EarlierFailure, HostFacts, OomFact, OomNote
from nbguard.memory.out_of_memory.card import OomCard, build_card
from nbguard.memory.out_of_memory.failed_request import batch_that_fits
from nbguard.memory.out_of_memory.fixes import Fix
from nbguard.memory.out_of_memory.rerun import RerunVerdict
from nbguard.memory.reports.report import build_report
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment

MiB = 1024**2
GiB = 1024**3


def _segments(graph: Graph, *, together: bool = False) -> list[Segment]:
    """Return a segment of its own for each storage, or one for all of them."""
    blocks = [(storage.nbytes, "active_allocated", storage.address) for storage in graph.storages]
    if together:
        (first, *_) = blocks
        whole = make_segment(*[(size, state) for size, state, _ in blocks], address=first[2])
        exact = tuple(replace(block, address=at) for block, (_, _, at) in zip(whole.blocks, blocks, strict=True))
        return [replace(whole, blocks=exact)]
    return [make_segment((size, state), address=address) for size, state, address in blocks]


def _case(
    asked: int = 2 * GiB,
    *,
    names: dict[str, int] | None = None,
    error: int = 0,
    out: int = 0,
    free: int = GiB,
    total: int = 40 * GiB,
    fact: OomFact | None = None,
    device: dict[str, object] | None = None,
    segments: tuple[Segment, ...] = (),
) -> Facts:
    """Return facts in which names hold bytes, a displayed Learner `out`, and a frame of the last error `error`."""
    names = names or {}
    roots = {name: [name] for name in names}
    storages = dict(names)
    edges: dict[str, dict[str, str]] = {}
    kinds: dict[str, str] = {}
    if out:
        roots["Out[3]"], storages["o"], kinds["o"] = ["o"], out, "learner"
    if error:
        roots["last error"], edges = ["f"], {"f": {" → xb": "x"}}
        storages["x"] = error
        kinds |= {"f": "frame", "x": "tensor"}
    graph = make_graph(roots, edges, storages, kinds, device="cuda:0")
    found = make_cuda_device([*_segments(graph), *segments], total, free)
    facts = make_facts(graph, device=replace(found, **(device or {})))
    return replace(facts, oom=fact or OomFact(device="cuda:0", requested=asked))


def _recorded(facts: Facts, before: int | None = None, took: int = 0) -> Facts:
    """Return facts with the counters at the cell's beginning and at the failure: `before` bytes were there, `took` came since.

    By default all that there is was there. The cell had one block for what it took.
    """
    assert facts.oom is not None
    (device, *_) = facts.devices
    held = sum(storage.nbytes for storage in facts.graph.storages)
    start = held - took if before is None else before
    counts = AllocatorCounts(allocated=start + took, reserved=start + took, made=start + took, made_blocks=1, retries=1)
    begun = AllocatorCounts(allocated=start, reserved=start, made=start, made_blocks=int(not took))
    note = OomNote(
        device=device.device,
        requested=facts.oom.requested or 0,
        total=device.total,
        free=device.free or 0,
        limit=None,
        allocated=start + took,
        reserved=start + took,
        counts=counts,
    )
    return replace(facts, oom=replace(facts.oom, note=note, start=begun))


def _card(facts: Facts) -> OomCard:
    card = build_card(Analysis(facts))
    assert card is not None
    return card


def _fix(facts: Facts, start: str) -> Fix:
    """Return the fix whose command, or words where it has none, start so."""
    return next(fix for fix in _card(facts).fixes if (fix.commands or (fix.words,))[0].startswith(start))


def _cleanup(facts: Facts) -> Fix:
    """Return what is said of the default cleanup alone."""
    return next(fix for fix in _card(facts).fixes if fix.commands == ("%reset_gpu",) and "batch of" not in fix.words)


def _starts(facts: Facts) -> list[str]:
    return [(fix.commands or (fix.words,))[0] for fix in _card(facts).fixes]


def test_without_such_an_error_there_is_no_card() -> None:
    facts = replace(_case(), oom=None)

    assert build_card(Analysis(facts)) is None
    assert not [finding for finding in build_report(Analysis(facts)).findings if finding.kind == "oom"]


# --- the default cleanup ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "enough"), [(4 * GiB, True), (4 * GiB + 1, False)])
def test_stale_memory_of_others_than_the_run_lets_it_through(asked: int, enough: bool) -> None:
    facts = _case(asked, out=3 * GiB, free=GiB)

    fix = _cleanup(facts)

    assert (fix.nbytes, fix.enough, fix.commands) == (3 * GiB, enough, ("%reset_gpu",))
    assert "4 GiB can be allocated then" in fix.words


def test_what_the_run_itself_had_taken_does_not_let_it_through() -> None:
    """It will take that again: what the last error holds is given back, and is enough for a smaller run only."""
    facts = _case(2 * GiB, error=3 * GiB, free=GiB)

    fix = _cleanup(facts)

    assert (fix.nbytes, fix.enough) == (3 * GiB, False)
    assert "for a smaller run (this one took 3 GiB" in fix.words
    assert _card(facts).taken == 3 * GiB


@pytest.mark.parametrize("total", [4 * GiB, 40 * GiB])
def test_names_that_the_run_left_make_room_for_a_smaller_run(total: int) -> None:
    """So they do where the device is too small for the cell as it is: the cleanup alone leaves them to the smaller run."""
    fact = OomFact(device="cuda:0", requested=2 * GiB, makes=("hidden",), bound=("hidden",))
    facts = _recorded(_case(names={"hidden": 2 * GiB}, error=GiB, free=GiB, total=total, fact=fact), took=3 * GiB)

    (fix,) = [fix for fix in _card(facts).fixes if "hidden" in fix.words]

    assert (fix.nbytes, fix.enough, fix.commands) == (3 * GiB, False, ("%reset_gpu", "%reset_gpu hidden"))
    assert fix.words == "releases hidden, which the same cell makes again; 4 GiB can be allocated then, for a smaller run"


@pytest.mark.parametrize(("asked", "verdict"), [(20 * MiB, RerunVerdict.UNKNOWN), (22 * MiB, RerunVerdict.SHORT)])
def test_requests_of_many_sizes_ask_for_the_same_segment(asked: int, verdict: RerunVerdict) -> None:
    """PyTorch says 20 MiB of each from 1 to 10 MiB: a free block of 14 MiB may serve it, and never one of 20 MiB and more."""
    facts = _case(asked, names={"kept": 6 * MiB}, out=14 * MiB, free=0)
    facts = replace(facts, devices=(replace(facts.devices[0], segments=tuple(_segments(facts.graph, together=True))),))

    assert _cleanup(facts).verdict is verdict


@pytest.mark.parametrize(
    ("largest", "changes", "verdict"),
    [
        (13 * MiB, {}, RerunVerdict.UNKNOWN),
        (14 * MiB, {}, RerunVerdict.SHORT),
        (14 * MiB, {"settings": "max_split_size_mb:10"}, RerunVerdict.UNKNOWN),
    ],
)
def test_a_request_was_larger_than_the_free_block_that_did_not_serve_it(
    largest: int, changes: dict[str, str], verdict: RerunVerdict
) -> None:
    fact = OomFact(device="cuda:0", requested=20 * MiB, note=_note(requested=20 * MiB, largest_free=largest, **changes))
    facts = _case(names={"kept": 6 * MiB}, out=14 * MiB, free=0, fact=fact)
    device = replace(facts.devices[0], segments=tuple(_segments(facts.graph, together=True)))
    other = make_segment((MiB, "active_allocated"), (15 * MiB, "inactive"), address=1 << 44, stream=0x50)

    assert _cleanup(replace(facts, devices=(device,))).verdict is verdict
    streams = replace(device, segments=(*(device.segments or ()), other))
    assert _cleanup(replace(facts, devices=(streams,))).verdict is RerunVerdict.UNKNOWN, "which stream asked is not known"


@pytest.mark.parametrize(("stale", "is_advised"), [(512, False), (MiB, True)])
def test_a_cleanup_of_small_blocks_is_no_advice_for_a_large_request(stale: int, is_advised: bool) -> None:
    facts = _case(20 * MiB, names={"kept": 6 * MiB}, out=stale, free=18 * MiB)
    facts = replace(facts, devices=(replace(facts.devices[0], segments=tuple(_segments(facts.graph, together=True))),))

    assert any(fix.commands == ("%reset_gpu",) for fix in _card(facts).fixes) is is_advised


@pytest.mark.parametrize(("total", "never"), [(30 * MiB, False), (24 * MiB, True), (18 * MiB, True)])
def test_a_cell_whose_request_may_be_small_is_not_said_to_need_a_segment_more(total: int, never: bool) -> None:
    facts = _case(20 * MiB, error=24 * MiB, free=0, total=total, fact=OomFact(device="cuda:0", requested=20 * MiB))

    assert any(fix.verdict is RerunVerdict.NEVER for fix in _card(_recorded(facts, took=24 * MiB)).fixes) is never


def test_of_both_only_the_others_count() -> None:
    exact, more = (_case(asked, error=3 * GiB, out=GiB, free=GiB) for asked in (2 * GiB, 2 * GiB + 1))

    assert _cleanup(_recorded(exact, took=3 * GiB)).verdict is RerunVerdict.RERUN
    assert _cleanup(_recorded(exact, took=3 * GiB)).enough is True
    assert _cleanup(_recorded(more, took=3 * GiB)).enough is False
    assert _cleanup(exact).verdict is RerunVerdict.REQUEST, "what lay where when the cell began is not known"
    assert _cleanup(more).enough is False


def test_leftovers_of_the_failed_fit_are_the_runs_own() -> None:
    graph = make_graph({"learn": ["l"]}, {"l": {".xb": "x"}}, {"x": 3 * GiB}, {"l": "learner", "x": "tensor"}, device="cuda:0")
    device = make_cuda_device(_segments(graph), 40 * GiB, GiB)
    learner = LearnerFact(0, is_running=False, names=("Learner",), leftovers=("xb",))

    card = _card(replace(make_facts(graph, [learner], device), oom=OomFact(device="cuda:0", requested=2 * GiB)))

    assert card.taken == 3 * GiB
    assert card.fixes[0].enough is False


def test_a_graphs_pool_that_the_plan_frees_counts() -> None:
    """Its blocks are free already, but only the graph could have them."""
    graph = make_graph({"Out[3]": ["o"]}, {"o": {".g": "g"}}, {"o": MiB}, {"o": "learner", "g": "pool"}, device="cuda:0")
    segments = [*_segments(graph), make_segment((3 * GiB, "inactive"), address=1 << 44, pool=(0, 7))]
    facts = make_facts(graph, device=make_cuda_device(segments, 40 * GiB, GiB))
    node = next(number for number, node in enumerate(graph.nodes) if node.kind == "pool")
    facts = replace(facts, pools=(PoolFact(pool=(0, 7), keepers=(node,)),), oom=OomFact(device="cuda:0", requested=4 * GiB))

    assert _cleanup(facts).enough is True
    assert _card(facts).had == GiB


def test_a_graphs_pool_that_stays_does_not_count() -> None:
    graph = make_graph({"g": ["g"], "Out[3]": ["o"]}, {}, {"o": MiB}, {"o": "learner", "g": "pool"}, device="cuda:0")
    segments = [*_segments(graph), make_segment((3 * GiB, "inactive"), address=1 << 44, pool=(0, 7))]
    facts = make_facts(graph, device=make_cuda_device(segments, 40 * GiB, GiB))
    node = next(number for number, node in enumerate(graph.nodes) if node.kind == "pool")
    facts = replace(facts, pools=(PoolFact(pool=(0, 7), keepers=(node,)),), oom=OomFact(device="cuda:0", requested=4 * GiB))

    assert _cleanup(facts).enough is False


def test_a_free_block_that_is_large_enough_counts() -> None:
    """The stale block lies between live ones: the driver gets nothing back, and yet the request fits."""
    graph = make_graph({"a": ["a"], "Out[3]": ["o"]}, {}, {"a": GiB, "o": 3 * GiB}, {"o": "learner"}, device="cuda:0")
    device = make_cuda_device(_segments(graph, together=True), 40 * GiB, GiB)
    facts = replace(make_facts(graph, device=device), oom=OomFact(device="cuda:0", requested=3 * GiB))

    assert _cleanup(facts).enough is True
    assert _cleanup(replace(facts, oom=OomFact(device="cuda:0", requested=3 * GiB + 1))).enough is False
    other = make_segment((GiB, "inactive"), (GiB, "active_allocated"), address=1 << 44, stream=0x50)
    streams = replace(device, segments=(*(device.segments or ()), other))
    facts = replace(facts, devices=(streams,))
    assert _cleanup(facts).enough is False, "which stream asked is not known"


# --- run it again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "again"), [(5 * GiB, True), (5 * GiB - 1, False)])
def test_running_it_again_needs_what_it_had_taken_once_more(free: int, again: bool) -> None:
    """The error of the first run still holds its memory then."""
    facts = _case(2 * GiB, error=3 * GiB, free=free)

    assert ("5 GiB can be allocated now: run it again" in _starts(_recorded(facts, took=3 * GiB))) is again
    assert "5 GiB can be allocated now: run it again" not in _starts(facts), "it may have taken more before it failed"
    twice = _case(2 * GiB, error=3 * GiB, free=free + 3 * GiB)
    assert ("8 GiB can be allocated now: run it again" in _starts(twice)) is again


def test_after_a_cleanup_what_can_be_had_is_said_without_a_promise() -> None:
    facts = _case(fact=OomFact(device="cuda:0", requested=2 * GiB, was_released=True), free=4 * GiB)

    fix = _card(facts).fixes[0]

    assert fix.words == "4 GiB can be allocated now, enough for a run that needs no more in total"
    assert fix.enough is None


@pytest.mark.parametrize(("peak", "is_enough"), [(0, True), (GiB, True), (4 * GiB, None)])
def test_without_a_note_the_highest_peak_may_have_been_the_runs_own(peak: int, is_enough: bool | None) -> None:
    """A list that was let go of as it failed holds nothing now, and there is no note of an error before nbguard."""
    facts, stats = _case(free=6 * GiB), AllocatorStats(allocated=0, reserved=0, peak_allocated=peak)
    facts = replace(facts, devices=tuple(replace(device, allocator=stats) for device in facts.devices))

    assert _card(facts).fixes[0].enough is is_enough


def _note(**changes: object) -> OomNote:
    note = OomNote(
        device="cuda:0",
        requested=2 * GiB,
        total=40 * GiB,
        free=GiB,
        limit=None,
        allocated=6 * GiB,
        reserved=6 * GiB,
        peak_allocated=6 * GiB,
        peak_reserved=6 * GiB,
        stranded=0,
        largest_free=0,
    )
    return replace(note, **changes)  # type: ignore[arg-type]


def test_what_went_since_the_failure_counts_as_the_runs_own() -> None:
    """Temporaries went while frames were unwound: the run needs their bytes again."""
    fact = OomFact(device="cuda:0", requested=2 * GiB, note=_note(allocated=5 * GiB))

    case = _case(fact=fact, out=3 * GiB, free=GiB)
    assert _cleanup(_recorded(case, before=3 * GiB, took=2 * GiB)).enough is True  # 2 went, and 4 can be had
    assert _cleanup(_recorded(case, before=3 * GiB, took=2 * GiB + 1)).enough is False
    assert _cleanup(case).verdict is RerunVerdict.REQUEST, "whether it was the run's is not known"
    more = replace(fact, note=_note(allocated=5 * GiB + 1))
    assert _cleanup(_case(fact=more, out=3 * GiB, free=GiB)).enough is None


def test_rounded_figures_are_taken_at_their_worst() -> None:
    note = _note(allocated=3 * GiB, slack=MiB, peak_allocated=None)  # as much is allocated now
    fact = OomFact(device="cuda:0", requested=2 * GiB, note=note)

    assert _cleanup(_case(fact=fact, out=3 * GiB, free=0)).enough is True
    assert _cleanup(_case(3 * GiB, fact=replace(fact, requested=3 * GiB), out=3 * GiB, free=0)).enough is None
    assert _cleanup(_case(fact=replace(fact, requested=3 * GiB), out=3 * GiB, free=2 * MiB)).enough is True


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_smallest_names_that_are_enough() -> None:
    names = {"huge": 9 * GiB, "big": 4 * GiB, "medium": 2 * GiB, "small": GiB - 1}
    facts = _case(2 * GiB, names=names, free=GiB)

    found = [fix for fix in _card(facts).fixes if fix.enough]

    assert [(fix.commands, fix.nbytes) for fix in found] == [
        (("%reset_gpu medium",), 2 * GiB),
        (("%reset_gpu big",), 4 * GiB),
        (("%reset_gpu huge",), 9 * GiB),
    ]


def test_two_names_together_where_one_is_not_enough() -> None:
    names = {"a": 3 * GiB, "b": 2 * GiB, "c": 2 * GiB + 2 * MiB}

    assert _fix(_case(5 * GiB, names=names, free=0), "%reset_gpu a").commands == ("%reset_gpu a b",)
    assert _fix(_case(5 * GiB, names=names, free=0), "%reset_gpu --park").commands == ("%reset_gpu --park a c",)
    assert _fix(_case(5 * GiB + 1, names=names, free=0), "%reset_gpu a").commands == ("%reset_gpu a c",), "in steps of 2 MiB"
    three = _fix(_case(7 * GiB, names=names, free=0), "%reset_gpu a")
    assert (three.commands, three.nbytes) == (("%reset_gpu a c b",), 7 * GiB + 2 * MiB)
    assert not [fix for fix in _card(_case(8 * GiB, names=names, free=0)).fixes if fix.enough]


def test_a_name_with_the_cleanup_where_neither_alone_is_enough() -> None:
    facts = _case(5 * GiB, names={"a": 3 * GiB}, out=2 * GiB, free=0)

    releasing, parking, *_ = _card(facts).fixes

    assert (parking.commands, parking.nbytes) == (("%reset_gpu --park a", "%reset_gpu"), 5 * GiB)
    assert parking.verdict is RerunVerdict.REQUEST, "what something outside Python shares would stay"
    assert (releasing.commands, releasing.nbytes, releasing.enough) == (("%reset_gpu", "%reset_gpu a"), 5 * GiB, True)
    assert _cleanup(_case(5 * GiB + 1, names={"a": 3 * GiB}, out=2 * GiB, free=0)).enough is False


@pytest.mark.parametrize(("small", "is_named"), [(GiB - 512, False), (GiB, True)])
def test_a_name_that_gives_less_than_was_missing_is_not_named(small: int, is_named: bool) -> None:
    """1 GiB was free where 2 were asked for: with less than another one the same run fails at the same place."""
    facts = _recorded(_case(2 * GiB, error=GiB, names={"small": small}, free=7 * GiB), before=small, took=6 * GiB)
    assert facts.oom is not None
    assert facts.oom.note is not None
    assert facts.oom.note.counts is not None
    counts = replace(facts.oom.note.counts, made=9 * GiB, made_blocks=60, collections=1)  # as some went in between
    facts = replace(facts, oom=replace(facts.oom, note=replace(facts.oom.note, free=GiB, counts=counts)))

    assert _cleanup(facts).verdict is RerunVerdict.REQUEST
    named = [start for start in _starts(facts) if start.endswith(" small")]
    assert named == (["%reset_gpu --park small", "%reset_gpu small"] if is_named else [])


def test_a_name_counts_without_the_stale_memory_that_goes_with_it() -> None:
    """An earlier error has `small` in its frame: with the 2 GiB there the name stood below a larger one that loses more."""
    graph = make_graph(
        {"large": ["large"], "small": ["small"], "unreachable cycles": ["earlier"]},
        {"earlier": {" → kept": "kept", " → x": "small"}},
        {"large": 4 * GiB, "small": 3 * GiB, "kept": 2 * GiB},
        device="cuda:0",
    )
    facts = make_facts(graph, device=make_cuda_device(_segments(graph), 40 * GiB, GiB))
    facts = replace(facts, oom=OomFact(device="cuda:0", requested=5 * GiB))

    names = [(fix.commands, fix.nbytes) for fix in _card(facts).fixes if fix.commands and fix.commands[0] != "%reset_gpu"]

    assert [fix for fix in names if "--park" not in fix[0][0]] == [
        (("%reset_gpu small",), 5 * GiB),
        (("%reset_gpu large",), 4 * GiB),
    ]


def test_a_cleanup_is_preferred_to_a_name() -> None:
    assert _starts(_case(2 * GiB, names={"a": 3 * GiB}, out=2 * GiB, free=0))[0] == "%reset_gpu"
    assert not [start for start in _starts(_case(2 * GiB, names={"a": 3 * GiB}, out=2 * GiB, free=0)) if start.endswith(" a")]


@pytest.mark.parametrize("why", ["uses", "bound"])
def test_what_the_failed_run_needs_is_not_offered(why: str) -> None:
    facts = _case(
        names={"learn": 4 * GiB, "old": 2 * GiB},
        free=0,
        fact=replace(OomFact(device="cuda:0", requested=2 * GiB), **{why: ("learn",)}),
    )

    assert not [fix for fix in _card(facts).fixes for command in fix.commands if "learn" in command]
    recorded = [fix.commands for fix in _card(_recorded(facts)).fixes if fix.enough]
    assert recorded == [("%reset_gpu old",)]
    assert [fix.commands for fix in _card(_recorded(facts)).fixes[:2]] == [("%reset_gpu old",), ("%reset_gpu --park old",)]


def test_what_the_failed_run_had_bound_is_its_own() -> None:
    fact = OomFact(device="cuda:0", requested=GiB, bound=("xs",))

    assert _card(_case(fact=fact, names={"xs": 2 * GiB}, free=0)).taken == 2 * GiB
    assert _card(_case(fact=replace(fact, bound=("ys",)), names={"xs": 2 * GiB}, free=0)).taken == 0


def test_all_names_of_one_object_are_named() -> None:
    graph = make_graph({"learn": ["l"], "best": ["l"]}, storages={"l": 4 * GiB}, device="cuda:0")
    device = make_cuda_device(_segments(graph), 40 * GiB, 0)
    facts = replace(make_facts(graph, device=device), oom=OomFact(device="cuda:0", requested=2 * GiB))

    assert _fix(facts, "%reset_gpu learn").commands == ("%reset_gpu learn best",)
    assert _fix(facts, "%reset_gpu --park").commands == ("%reset_gpu --park learn",), "one name of it is enough to park it"


# --- gradients --------------------------------------------------------------------------------------------------------


def _with_gradients(learner: int = 0) -> Facts:
    graph = make_graph(
        {"learn": ["l"]},
        {"l": {".model": "m"}, "m": {".grad": "g"}},
        {"m": GiB, "g": 3 * GiB},
        {"l": "learner", "m": "model", "g": "tensor"},
        device="cuda:0",
    )
    device = make_cuda_device(_segments(graph), 40 * GiB, GiB)
    facts = make_facts(graph, [LearnerFact(0, is_running=False, names=("Learner",))], device)
    return replace(facts, oom=OomFact(device="cuda:0", requested=4 * GiB, uses=("learn",), learner=learner))


def test_gradients_of_an_idle_learner() -> None:
    fix = _fix(_recorded(_with_gradients()), "learn.model")

    assert _fix(_with_gradients(), "learn.model").verdict is RerunVerdict.REQUEST, "the cell itself may have made them"
    assert (fix.commands, fix.nbytes, fix.enough) == (("learn.model.zero_grad()",), 3 * GiB, True)


def test_gradients_of_the_learner_that_failed_come_again() -> None:
    facts = _with_gradients()

    assert not [start for start in _starts(_with_gradients(facts.graph.nodes[0].ref)) if start.startswith("learn.model")]


# --- the limit, others, settings --------------------------------------------------------------------------------------


def test_a_memory_fraction_limits_what_can_be_had() -> None:
    facts = _case(2 * GiB, names={"a": 3 * GiB}, free=30 * GiB, device={"limit": 4 * GiB})

    fix = _fix(facts, "import torch; torch.cuda.set_per")

    assert _card(facts).had == GiB
    assert _card(facts).limit == 4 * GiB
    assert (fix.nbytes, fix.enough) == (29 * GiB, True)
    assert "(1.0, 'cuda:0')" in fix.commands[0]
    assert _fix(_case(31 * GiB, names={"a": 3 * GiB}, free=30 * GiB, device={"limit": 4 * GiB}), "import torch").enough is False


def test_no_limit_no_words_on_it() -> None:
    whole = _case(2 * GiB, names={"a": 3 * GiB}, free=30 * GiB, device={"limit": 40 * GiB})

    assert _card(whole).limit is None
    assert not [start for start in _starts(whole) if start.startswith("torch")]


def test_the_limit_of_the_text_counts_where_torch_does_not_tell() -> None:
    fact = OomFact(device="cuda:0", requested=2 * GiB, limit=4 * GiB)

    assert _card(_case(fact=fact, names={"a": 3 * GiB}, free=30 * GiB)).had == GiB
    assert _card(_case(fact=fact, names={"a": 3 * GiB}, free=30 * GiB, device={"limit": 40 * GiB})).had == 30 * GiB


def _with_others(asked: int) -> Facts:
    nvml = NvmlFacts(40 * GiB, 39 * GiB, (ProcessFact(1, 9 * GiB), ProcessFact(77, 25 * GiB), ProcessFact(78, 5 * GiB)))
    return _case(asked, names={"a": 9 * GiB}, free=GiB, device={"nvml": nvml})


def test_other_processes_where_their_memory_would_be_enough() -> None:
    fix = _fix(_with_others(31 * GiB), "other processes")

    assert (fix.nbytes, fix.enough) == (30 * GiB, True)
    assert "25 GiB (pid 77), 5 GiB (pid 78)" in fix.words
    assert not [start for start in _starts(_with_others(31 * GiB + 1)) if start.startswith("other")]


def test_others_are_not_named_where_a_cleanup_is_enough() -> None:
    assert not [start for start in _starts(_with_others(GiB)) if start.startswith("other")]


PIECES = make_segment(
    *[(size * MiB, state) for _ in range(3) for size, state in ((100, "active_allocated"), (700, "inactive"))],
    (100 * MiB, "active_allocated"),
    address=1 << 44,
)


@pytest.mark.parametrize(("asked", "said"), [(2100 * MiB, True), (2100 * MiB + 1, False), (700 * MiB, False)])
def test_fragmentation_is_said_where_the_pieces_would_have_been_enough(asked: int, said: bool) -> None:
    facts = _case(asked, free=0, segments=(PIECES,))

    found = [fix for fix in _card(facts).fixes if fix.words.startswith("fragmentation")]

    assert bool(found) is said
    if found:
        assert (found[0].nbytes, found[0].enough) == (3 * 680 * MiB, None), "a hole of 700 MiB has 34 whole pages at least"
        assert found[0].commands == ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)


def test_fragmentation_is_diagnosed_by_what_the_observer_saw() -> None:
    def said(**changes: object) -> bool:
        fact = OomFact(device="cuda:0", requested=2 * GiB, note=_note(**({"largest_free": 700 * MiB} | changes)))
        return any(fix.words.startswith("fragmentation") for fix in _card(_case(fact=fact, free=0)).fixes)

    assert said(free=GiB, stranded=GiB)
    assert not said(free=GiB, stranded=GiB - 1)
    assert not said(free=2 * GiB, stranded=GiB)
    assert not said(free=2 * GiB, stranded=GiB - 1, limit=7 * GiB)
    assert said(free=2 * GiB, stranded=GiB, limit=7 * GiB), "within the limit, one GiB was free"
    assert not said(free=GiB, stranded=GiB, largest_free=MiB), "a free block of the large pool is larger than 1 MiB"


def test_a_setting_that_does_not_work_here_is_not_advised() -> None:
    facts = _case(2100 * MiB, free=0, segments=(PIECES,), device={"can_expand": False})

    assert not [fix for fix in _card(facts).fixes if fix.words.startswith("fragmentation")]


def test_a_setting_that_is_on_already_is_not_advised() -> None:
    on = {"settings": "expandable_segments:True"}

    assert not [
        fix for fix in _card(_case(1400 * MiB, free=0, segments=(PIECES,), device=on)).fixes if "fragmentation" in fix.words
    ]


# --- a smaller batch --------------------------------------------------------------------------------------------------


def _fit(asked: int, batch: int | None = 64, **changes: object) -> Facts:
    """A fit of a named Learner that failed in a batch which held 4 GiB; 1 GiB is free."""
    graph = make_graph(
        {"learn": ["l"], "last error": ["f"]},
        {"f": {" → xb": "x", " → self": "l"}},
        {"l": GiB, "x": 4 * GiB},
        {"f": "frame", "x": "tensor", "l": "learner"},
        device="cuda:0",
    )
    ref = next(node.ref for node in graph.nodes if node.kind == "learner")
    facts = make_facts(graph, device=make_cuda_device(_segments(graph), 6 * GiB, GiB))
    fact = OomFact(device="cuda:0", requested=asked, uses=("learn",), learner=ref, batch_size=batch)
    return replace(facts, oom=replace(fact, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "batch"), [(2 * GiB, 32), (6 * GiB, 32), (6 * GiB + 2, 16), (16 * GiB, 16)])
def test_the_batch_that_would_have_got_this_far(asked: int, batch: int) -> None:
    """4 GiB of the batch and the request, together, must fit into the 5 GiB that can be had."""
    (fix,) = [fix for fix in _card(_fit(asked)).fixes if "batch" in fix.words]

    assert _card(_fit(asked)).fixes.index(fix) <= 1, "the cell takes most of the device"
    assert f"a batch of {batch} instead of 64" in fix.words
    whole = 4 * GiB + asked
    assert fix.nbytes == whole - whole // (64 // batch)
    assert fix.enough is None
    assert "may need more" in fix.words


@pytest.mark.parametrize(("taken", "is_first"), [(4 * GiB, True), (3 * GiB, False)])
def test_a_smaller_batch_comes_first_where_the_cell_has_outgrown_the_device(taken: int, is_first: bool) -> None:
    """An earlier run of the same cell came further: it needed more than the 6 GiB there are, or not."""
    asked = 2 * GiB + 512
    earlier = EarlierFailure(cell=3, requested=asked, taken=taken, made=taken, made_blocks=1, peak=taken)
    fact = OomFact(device="cuda:0", requested=2 * GiB, earlier=(earlier,))
    fixes = _card(_case(2 * GiB, out=4 * GiB, total=6 * GiB, fact=fact)).fixes

    assert [fix.is_of_smaller_run for fix in fixes] == [is_first, not is_first]
    assert {fix.verdict for fix in fixes if not fix.is_of_smaller_run} == {RerunVerdict.REQUEST}


@pytest.mark.parametrize(("took", "shown"), [(16 * GiB, ["--park a", "a"]), (2 * GiB, ["--park a", "--park b", "a", "b", "c"])])
def test_one_way_to_make_room_is_shown_where_the_cell_takes_most_of_the_device(took: int, shown: list[str]) -> None:
    """Each makes room for this request alone, and the cell goes on to the next."""
    names = dict.fromkeys("abc", 2 * GiB)
    fixes = _card(_case(2 * GiB, error=took, names=names, free=0, total=took + 7 * GiB)).fixes

    making_room = [fix.commands[-1] for fix in fixes if fix.verdict is RerunVerdict.REQUEST]
    assert making_room == [f"%reset_gpu {words}" for words in shown]


def test_a_smaller_run_never_stands_above_what_is_enough() -> None:
    """Though the cell takes most of the device: it may be enough, the deletion is."""
    facts = _recorded(_case(4 * GiB, names={"old": 4 * GiB}, free=2 * GiB, total=6 * GiB))
    fixes = [fix for fix in _card(facts).fixes if fix.enough or fix.is_of_smaller_run]

    assert [fix.enough for fix in fixes] == [True, None]
    assert fixes[0].commands == ("%reset_gpu old",)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": None},
        {"batch_size": 1},
        {"learner": 0, "runs_model": True},
        {"was_released": True},
        {"bound": ("learn",)},
    ],
)
def test_without_ground_there_is_no_number(changes: dict[str, object]) -> None:
    (fix,) = [fix for fix in _card(_fit(2 * GiB, **changes)).fixes if "batch" in fix.words]

    assert "batch of" not in fix.words
    assert fix.words.startswith("a smaller batch, mixed precision or gradient accumulation asks for less")
    assert fix.nbytes is None


def test_where_no_model_ran_there_is_no_batch() -> None:
    words = [fix.words for fix in _card(_fit(2 * GiB, learner=0, batch_size=None)).fixes]

    assert "a smaller tensor, or a smaller dtype, asks for less" in words
    assert not [each for each in words if "batch" in each]


def test_the_batch_that_was_predicted_is_on_the_card() -> None:
    analysis = Analysis(_fit(2 * GiB))
    analysis.know(batch_that_fits, 24)
    card = build_card(analysis)

    assert card is not None
    assert [fix.words for fix in card.fixes if "batch" in fix.words] == ["a batch of 24 instead of 64 fits (predicted)"]
    text = card.mimebundle()["text/plain"]
    assert "may be enough · after %reset_gpu\n     a batch of 24 instead of 64 fits (predicted)" in text  # not the line alone


# --- what is not known ------------------------------------------------------------------------------------------------


def test_a_rounded_request_must_fit_whatever_it_was() -> None:
    fact = OomFact(device="cuda:0", requested=4 * GiB, slack=5 * MiB)

    assert _cleanup(_case(fact=fact, out=3 * GiB, free=GiB)).enough is False
    assert _cleanup(_case(fact=fact, out=3 * GiB, free=GiB + 5 * MiB)).enough is True
    assert "up to 5 MiB more" in _card(_case(fact=fact)).notes[0]


def test_an_expandable_segment_grows_by_pages() -> None:
    on: dict[str, object] = {"settings": "expandable_segments:True"}

    assert _cleanup(_case(30 * MiB, out=30 * MiB, free=0, device=on)).enough is False
    assert _cleanup(_case(30 * MiB, out=40 * MiB, free=0, device=on)).enough is True


def test_of_several_devices_the_one_that_ran_out() -> None:
    facts = _case(fact=OomFact(device="cuda:1", requested=2 * GiB), names={"a": 3 * GiB})
    second = make_cuda_device([], 8 * GiB, 5 * GiB, name="cuda:1")
    both = replace(facts, devices=(*facts.devices, second))

    assert (_card(both).device, _card(both).had, _card(both).held) == ("cuda:1", 5 * GiB, 0)
    unnamed = replace(both, oom=OomFact(device="", requested=2 * GiB))
    assert (_card(unnamed).had, _card(unnamed).notes[-1]) == (None, "the error does not say which of the devices it was")


def test_a_device_without_segments_gets_no_verdict() -> None:
    graph = make_graph({"Out[3]": ["o"]}, storages={"o": GiB}, kinds={"o": "learner"}, device="mps:0")
    facts = replace(
        make_facts(graph, device=DeviceFacts(device="mps:0", name="Apple GPU")), oom=OomFact(device="mps:0", requested=2 * GiB)
    )

    fix = _cleanup(facts)

    assert (fix.nbytes, fix.enough) == (GiB, None)


def test_a_library_does_not_say_how_much() -> None:
    fact = OomFact(device="cuda", requested=None, kind="library", error="RuntimeError")
    cache = make_segment((3 * GiB, "inactive"), address=1 << 44)
    facts = _case(fact=fact, out=GiB, free=0, segments=(cache,))

    fix = _cleanup(facts)

    assert (fix.nbytes, fix.enough) == (GiB, None)
    assert "4 GiB can be allocated then" in fix.words
    assert "does not say how much" in next(f.sentence for f in build_report(Analysis(facts)).findings if f.kind == "oom")
    empty = _case(fact=fact, free=0, segments=(cache,))
    assert not [start for start in _starts(empty) if "GiB can be allocated now" in start]


# --- the host ---------------------------------------------------------------------------------------------------------


def _host(asked: int | None, host: HostFacts, kind: str = "host", tracked: str = "cpu") -> Facts:
    graph = make_graph({"a": ["a"], "Out[3]": ["o"]}, storages={"a": 3 * GiB, "o": GiB}, kinds={"o": "learner"}, device=tracked)
    fact = OomFact(device="cpu", requested=asked, kind=kind, error="RuntimeError", host=host)  # type: ignore[arg-type]
    return replace(make_facts(graph, device=DeviceFacts(device=tracked, name="x")), oom=fact)


@pytest.mark.parametrize(("asked", "enough"), [(3 * GiB, True), (3 * GiB + 1, False)])
def test_host_memory_within_what_is_available(asked: int, enough: bool) -> None:
    facts = _host(asked, HostFacts(total=8 * GiB, available=2 * GiB))

    assert _cleanup(facts).enough is enough
    assert _card(facts).had == 2 * GiB


def test_the_least_of_all_limits_counts() -> None:
    assert (
        _card(
            _host(
                GiB,
                HostFacts(
                    total=8 * GiB,
                    available=5 * GiB,
                    group_limit=4 * GiB,
                    group_room=3 * GiB,
                    address_limit=9 * GiB,
                    address_room=2 * GiB,
                ),
            )
        ).had
        == 2 * GiB
    )
    assert (
        _card(_host(GiB, HostFacts(total=8 * GiB, available=5 * GiB, group_limit=4 * GiB, group_room=3 * GiB))).had == 3 * GiB
    )
    assert _card(_host(GiB, HostFacts())).had is None
    names = {
        part.name: part.nbytes
        for part in _card(
            _host(GiB, HostFacts(total=8 * GiB, available=5 * GiB, group_limit=4 * GiB, group_room=3 * GiB))
        ).parts
    }
    assert names["left in the container"] == 3 * GiB


def test_more_than_the_machine_has() -> None:
    assert "exceeds the whole machine" in _card(_host(9 * GiB, HostFacts(total=8 * GiB, available=GiB))).notes[0]
    assert not _card(_host(8 * GiB, HostFacts(total=8 * GiB, available=GiB))).notes


def test_holders_of_the_host_are_not_known_where_a_gpu_is_tracked() -> None:
    card = _card(_host(4 * GiB, HostFacts(total=8 * GiB, available=GiB), tracked="cuda:0"))

    assert card.holders == ()
    assert "not listed" in card.notes[0]
    assert not [fix for fix in card.fixes if fix.commands]


@pytest.mark.parametrize("kind", ["worker", "shm"])
def test_workers_are_told_of_shared_memory(kind: str) -> None:
    card = _card(_host(None, HostFacts(total=8 * GiB, available=GiB, shm_total=64 * MiB, shm_free=0), kind))

    assert {"shared memory": 64 * MiB, "free in it": 0}.items() <= {part.name: part.nbytes for part in card.parts}.items()
    assert "num_workers=0" in card.fixes[-1].words


# --- the finding ------------------------------------------------------------------------------------------------------


def test_the_finding_is_the_best_of_the_card() -> None:
    (found,) = [f for f in build_report(Analysis(_case(4 * GiB, out=3 * GiB))).findings if f.kind == "oom"]

    assert found.sentence.startswith("the last error ran out of memory: it asked cuda:0 for 4 GiB; `%reset_gpu` frees stale")
    assert found.sentence.endswith("(`%gpumem oom` says more)")
    assert found.command == "%gpumem oom"


@pytest.mark.parametrize(("asked", "is_first"), [(2 * GiB, True), (16 * GiB, False)])
def test_the_finding_has_the_batch_that_was_predicted(asked: int, is_first: bool) -> None:
    """By itself, or after the sentence that the cell as it is never fits."""
    analysis = Analysis(_fit(asked))
    analysis.know(batch_that_fits, 24)
    (found,) = [finding for finding in build_report(analysis).findings if finding.kind == "oom"]

    assert "; after `%reset_gpu`, a batch of 24 instead of 64 fits (predicted) (`%gpumem oom` says more)" in found.sentence
    assert ("fails again whatever is freed; after" in found.sentence) is not is_first


def test_the_card_lists_the_largest_holders() -> None:
    names = {f"n{number}": (number + 1) * GiB for number in range(7)}
    graph_roots = _case(2 * GiB, names=names, out=9 * GiB)

    card = _card(graph_roots)

    assert [holder.label for holder in card.holders] == ["Out[3]", "n6", "n5", "n4", "n3"]
    assert card.held == 9 * GiB + sum(names.values())


def _enough() -> Facts:
    return _recorded(_case(4 * GiB, names={"old": 4 * GiB}, free=2 * GiB, total=6 * GiB))


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        (_enough(), "`%reset_gpu old` is enough: it frees 4 GiB"),
        (
            _case(5 * GiB, names={"a": 3 * GiB}, out=2 * GiB, free=0),
            "`%reset_gpu`, then `%reset_gpu a` are enough: they free 5 GiB",
        ),
        (_fit(2 * GiB), "Nothing is known to be enough: after `%reset_gpu`, a batch of 32 instead of 64"),
        (_case(out=GiB, free=0), "Nothing is known to be enough: `%reset_gpu` frees 1 GiB."),
        (_case(names={"learn": 4 * GiB}, free=0, total=GiB), "2 GiB is asked for, and PyTorch can have 1 GiB"),
    ],
)
def test_the_card_begins_with_the_best_that_can_be_done(facts: Facts, answer: str) -> None:
    """The same as the first row of what helps, in the cell, in JSON and in the panel, and above all accounting."""
    card = _card(facts)
    blocks = list(card.blocks())
    kinds = [type(block).__name__ for block in blocks]

    assert blocks[0].sentence.startswith(answer)  # type: ignore[union-attr]
    assert kinds.index("Points") < kinds.index("Table")
    assert all(line.code in blocks[0].sentence for line in card.fixes[0].advice)  # type: ignore[union-attr]
    assert [fix["commands"] for fix in card.to_data()["fixes"]] == [[*fix.commands] for fix in card.fixes]
    verdicts = [fix.enough for fix in card.fixes]
    assert True not in verdicts or verdicts.index(True) == 0
