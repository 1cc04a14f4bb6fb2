"""Notices diagnosed from facts: what is left and by whom held, what is wanted, what only waits for the collector."""

from __future__ import annotations

from dataclasses import replace

from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Graph
from nbguard.memory.reports.notices.causes import diagnose_departure, diagnose_departures, explain_departure, held_storages
from nbguard.memory.reports.notices.notice import Departure, Notice, known_again
from nbguard.memory.reports.notices.rounds import diagnose_growth
from nbguard.memory.reports.notices.view import notice_line, notice_sentence
from nbguard.testing import make_facts, make_graph

MiB = 1024**2


def _gone(graph: Graph, ref: int = 0, *, rebound: bool = False, name: str = "model", **more: object) -> Departure:
    """Return the departure of a name that led to all storages of a graph, and whose object, at `ref`, is alive."""
    gone = Departure(
        name=name,
        ref=ref,
        type_name="Net",
        bound=3,
        cell=7,
        is_rebound=rebound,
        storages=frozenset((fact.device, fact.address) for fact in graph.storages),
        nbytes=sum(fact.nbytes for fact in graph.storages),
    )
    return replace(gone, **more)  # type: ignore[arg-type]


def _ref(graph: Graph, kind: str) -> int:
    return next(node.ref for node in graph.nodes if node.kind == kind)


def _diagnosed(graph: Graph, gone: Departure, views: dict[str, int] | None = None) -> Notice | None:
    return diagnose_departure(Analysis(make_facts(graph)), gone, MiB, views or {})


def test_a_deleted_name_whose_object_another_path_leads_to() -> None:
    edges = {"trainer": {".callback_handler": "handler"}, "handler": {".model": "net"}}
    graph = make_graph({"trainer": ["trainer"]}, edges, {"net": 14 * MiB}, {"trainer": "learner", "net": "model"})
    notice = _diagnosed(graph, _gone(graph, _ref(graph, "model")))

    assert notice is not None
    assert notice_line(notice) == (
        "`model` was deleted, but its 14 MiB is still in memory, held by `trainer.callback_handler.model` "
        "· `%reset_gpu trainer`"
    )


def test_what_waits_for_the_collector_is_no_notice() -> None:
    graph = make_graph({"unreachable cycles": ["net"]}, {}, {"net": 14 * MiB}, {"net": "model"})

    assert _diagnosed(graph, _gone(graph, _ref(graph, "model"))) is None


def test_a_part_that_a_name_uses_is_wanted_once_the_object_is_gone() -> None:
    """Not if only a graph or an optimizer has it for the sake of the object that is gone."""
    kinds = {"dls": "loader", "opt": "optimizer", "t": "tensor"}
    for label, expected in (("dls", None), ("opt", "%reset_gpu opt")):
        graph = make_graph({label: [label]}, {label: {".data": "t"}}, {"t": 4 * MiB}, kinds)
        notice = _diagnosed(graph, _gone(graph))
        assert (notice and notice.command) == expected


def test_an_optimizer_of_which_the_rest_is_in_use_is_in_no_command() -> None:
    """`model = nn.Sequential(*list(model)[:-1], head)`: the optimizer still has the layer that was left out."""
    edges = {"opt": {".params[0]": "kept", ".params[1]": "gone"}, "net": {".a": "kept", ".b": "head"}}
    sizes = {"kept": 4 * MiB, "gone": 4 * MiB, "head": 4 * MiB}
    graph = make_graph({"opt": ["opt"], "model": ["net"]}, edges, sizes, {"opt": "optimizer", "net": "model"})
    led_to = frozenset((fact.device, fact.address) for fact in graph.storages[:2])
    notice = _diagnosed(graph, _gone(graph, rebound=True, storages=led_to, nbytes=8 * MiB))

    assert notice is not None
    assert (notice.nbytes, notice.holders, notice.command) == (4 * MiB, ("opt.params[1]",), "")


def test_nothing_is_left_of_what_only_referred_to_a_living_model() -> None:
    """`opt = Adam(body + head)`, then `opt = Adam(head)`; `parts = list(net.parameters())`, then `parts = parts[:1]`."""
    edges = {"net": {".body": "body", ".head": "head"}, "opt": {".params[0]": "head"}}
    sizes = {"body": 64 * MiB, "head": 4 * MiB}
    graph = make_graph({"net": ["net"], "opt": ["opt"]}, edges, sizes, {"net": "model", "opt": "optimizer"})

    assert _diagnosed(graph, _gone(graph, rebound=True, name="opt")) is None
    earlier = {**edges, "sched": {".optimizer": "old"}, "old": {".params[0]": "body", ".params[1]": "head", ".state": "avg"}}
    roots, kinds = {"net": ["net"], "opt": ["opt"], "sched": ["sched"]}, {"net": "model", "old": "optimizer"}
    graph = make_graph(roots, earlier, {**sizes, "avg": 8 * MiB}, kinds)
    notice = _diagnosed(graph, _gone(graph, _ref(graph, "optimizer"), rebound=True, name="opt"))
    assert notice is not None
    assert (notice.nbytes, notice.frees) == (8 * MiB, 8 * MiB)
    assert notice.command == "%reset_gpu sched.optimizer"


def test_what_the_new_object_leads_to_is_wanted() -> None:
    graph = make_graph({"model": ["outer"]}, {"outer": {"[0]": "net"}}, {"net": 4 * MiB}, {"outer": "model", "net": "tensor"})

    assert _diagnosed(graph, _gone(graph, _ref(graph, "tensor"), rebound=True)) is None


def test_an_object_that_has_another_name_is_wanted_unless_its_first_name_is_deleted() -> None:
    graph = make_graph({"best": ["net"]}, {}, {"net": 4 * MiB}, {"net": "model"})
    moved = _root_of(graph, "best", cell=7)

    for held in (graph, moved):
        assert _diagnosed(held, _gone(held, _ref(graph, "model"), rebound=True)) is None
    assert _diagnosed(moved, _gone(moved, _ref(graph, "model"))) is None
    assert _diagnosed(graph, _gone(graph, _ref(graph, "model"))) is not None


def test_several_holders_are_all_in_the_command() -> None:
    edges = {"runs": {"[0]": "net"}, "best": {".net": "net"}}
    roots = {"runs": ["runs"], "Out[4]": ["net"], "best": ["best"], "helpers.kept": ["net"]}
    graph = make_graph(roots, edges, {"net": 4 * MiB}, {"net": "model"}, types={"runs": "list"})
    notice = _diagnosed(graph, _gone(graph, _ref(graph, "model"), rebound=True))

    assert notice is not None
    assert notice.holders == ("runs[0]", "best.net", "helpers.kept", "Out[4]")
    assert notice.command == "%reset_gpu runs[0] best.net helpers.kept"
    assert notice.frees == 4 * MiB
    assert notice_line(notice).startswith("the earlier `model` (In[3]) is still alive (4 MiB), held by `runs[0]` and 3 more ·")


def _root_of(graph: Graph, label: str, **changed: object) -> Graph:
    """Return the graph with another kind of root."""
    roots = (replace(root, **changed) if root.label == label else root for root in graph.roots)  # type: ignore[arg-type]
    return replace(graph, roots=tuple(roots))


def test_a_cleanup_that_frees_as_much_of_something_else_is_no_advice() -> None:
    """The error's other variables are as large, and what has gone is a library's as well."""
    edges = {"err": {" → x": "net", " → y": "other"}}
    sizes = {"net": 4 * MiB, "other": 8 * MiB}
    graph = make_graph({"last error": ["err"], "cache": ["net"]}, edges, sizes, {"net": "model", "err": "frame"})
    graph = _root_of(graph, "cache", kind="library")
    notice = _diagnosed(graph, _gone(graph, _ref(graph, "model")))

    assert notice is not None
    assert notice.holders == ("cache", "last error")
    assert notice.command == ""


def test_memory_that_another_name_has_as_well_has_no_command() -> None:
    """A module that a registry keeps, with its parameters in a list; of a function with the model's memory, nothing is left."""
    edges = {"handler": {" → m": "net"}, "net": {".w": "w"}, "parts": {"[0]": "w"}}
    kinds = {"net": "model", "handler": "code", "w": "tensor"}
    roots = {"registry": ["handler"], "parts": ["parts"]}
    graph = _root_of(make_graph(roots, edges, {"w": 4 * MiB}, kinds), "registry", kind="library", ended_by="end()")

    assert _diagnosed(graph, _gone(graph, _ref(graph, "code"), name="on")) is None
    notice = _diagnosed(graph, _gone(graph, _ref(graph, "model")))
    assert notice is not None
    assert (
        notice_line(notice)
        == "`model` was deleted, but its 4 MiB is still in memory, held by `registry → m` and `parts` · see `%gpumem why model`"
    )
    assert (notice.command, notice.frees) == ("", None)


def test_a_line_that_frees_more_but_not_this_is_no_advice() -> None:
    """A Trainer has the model and an optimizer; the model's weights are in the graph of an output as well."""
    edges = {
        "trainer": {".model": "net", ".state": "adam"},
        "net": {".w": "w"},
        "outputs": {" → graph": "node"},
        "node": {"": "w"},
    }
    roots = {"trainer": ["trainer"], "outputs": ["outputs"]}
    kinds = {"net": "model", "node": "graph", "w": "tensor", "outputs": "tensor"}
    graph = make_graph(roots, edges, {"w": 4 * MiB, "adam": 8 * MiB}, kinds)
    gone = _gone(graph, _ref(graph, "model"), storages=frozenset([(graph.storages[0].device, graph.storages[0].address)]))
    notice = _diagnosed(graph, replace(gone, nbytes=4 * MiB))

    assert notice is not None
    assert notice_line(notice).endswith("is still in memory, held by `trainer.model` and `outputs` · see `%gpumem why model`")
    line = notice_line(replace(notice, holders=(*notice.holders, "losses")))
    assert line.endswith("`trainer.model` and 2 more · see `%gpumem why model`")
    line = notice_line(replace(notice, kind="rebound"))
    assert line.endswith("`trainer.model` and `outputs` · see `%gpumem why trainer.model`")


def test_what_ends_by_itself_holds_nothing() -> None:
    graph = make_graph({"asyncio": ["net"]}, {}, {"net": 4 * MiB}, {"net": "model"})
    graph = _root_of(graph, "asyncio", kind="library", is_ending=True)

    assert _diagnosed(graph, _gone(graph, _ref(graph, "model"))) is None


def test_the_view_that_keeps_a_storage() -> None:
    graph = make_graph({"row": ["row"]}, {}, {"row": 61 * MiB}, {"row": "tensor"})
    notice = _diagnosed(graph, _gone(graph, name="images"), {"row": 16 * 1024})

    assert notice is not None
    assert notice_line(notice) == "`row` (16 KiB, a view) keeps 61 MiB of `images` alive · `row = row.clone()`"
    assert _diagnosed(graph, _gone(graph, name="images"), {"row": 61 * MiB}) is None  # it shows all of it


def test_a_loss_that_keeps_its_graph_is_no_view() -> None:
    edges = {"loss": {" → graph": "node"}, "node": {"": "activation"}}
    kinds = {"loss": "tensor", "node": "graph", "activation": "tensor"}
    graph = make_graph({"loss": ["loss"]}, edges, {"activation": 61 * MiB}, kinds)
    notice = _diagnosed(graph, _gone(graph, name="h"), {"loss": 4})

    assert notice is not None
    assert notice.kind == "deleted"
    assert notice.holders == ("loss → graph",)


def test_memory_that_no_reference_of_pythons_leads_to_has_no_command() -> None:
    graph = make_graph({"x": ["x"]})
    notice = _diagnosed(graph, _gone(graph, nbytes=4 * MiB))

    assert notice is not None
    assert (notice.command, notice.holders) == ("", ("something that Python does not show",))


def test_memory_behind_what_was_not_looked_into_is_no_notice() -> None:
    graph = replace(make_graph({"x": ["x"]}), rest=0)

    assert _diagnosed(graph, _gone(graph, nbytes=4 * MiB)) is None


def test_a_cell_that_leaves_more_each_time() -> None:
    def after(runs: int) -> Analysis:
        edges = {"hist": {f"[{n}]": f"l{n}" for n in range(runs)}, **{f"l{n}": {" → graph": f"g{n}"} for n in range(runs)}}
        kinds = {f"g{n}": "graph" for n in range(runs)}
        return Analysis(make_facts(make_graph({"hist": ["hist"]}, edges, {f"g{n}": 300 * MiB for n in range(runs)}, kinds)))

    notice = diagnose_growth(after(3), 12, held_storages(after(2)), MiB)

    assert notice is not None
    assert notice_line(notice) == (
        "each run of In[12] leaves 300 MiB more; `hist[2]` keeps its graph · append `loss.item()` or `t.detach()`"
    )
    assert diagnose_growth(after(2), 12, held_storages(after(2)), MiB) is None


def test_a_name_bound_anew_at_each_run_is_no_growth() -> None:
    first = Analysis(make_facts(make_graph({"x": ["x"]}, {}, {"x": 4 * MiB})))
    graph = make_graph({"x": ["y"], "unreachable cycles": ["x"]}, {}, {"x": 4 * MiB, "y": 4 * MiB})

    assert diagnose_growth(Analysis(make_facts(graph)), 12, held_storages(first), MiB) is None


def test_a_name_that_another_cell_has_bound_between_two_runs_is_no_growth_of_theirs() -> None:
    first = Analysis(make_facts(make_graph({"queue": ["a"]}, {}, {"a": 4 * MiB})))
    graph = make_graph({"queue": ["a"], "data": ["b"]}, {}, {"a": 4 * MiB, "b": 4 * MiB})

    def diagnosed(cell: int) -> Notice | None:
        after = Analysis(make_facts(_root_of(graph, "data", cell=cell)))
        return diagnose_growth(after, 12, held_storages(first), MiB, former_cell=9)

    assert diagnosed(11) is None
    assert [notice and notice.name for notice in map(diagnosed, (7, 12))] == ["data", "data"]


def test_what_others_share_with_the_object_is_theirs() -> None:
    """The last error holds the Learner that was deleted; its data has a name, which no line is to delete."""
    edges = {"err": {" → learn": "learn"}, "learn": {".model": "net", ".dls": "dls"}}
    roots = {"last error": ["err"], "dls": ["dls"]}
    kinds = {"learn": "learner", "net": "model", "dls": "loader", "err": "frame"}
    graph = make_graph(roots, edges, {"net": 4 * MiB, "dls": 7 * MiB}, kinds)
    notice = _diagnosed(graph, _gone(graph, _ref(graph, "learner"), name="learn"))

    assert notice is not None
    assert notice_line(notice) == "`learn` was deleted, but its 4 MiB is still in memory, held by the last error · `%reset_gpu`"


def test_a_notice_that_has_told_of_it_counts_the_later_names_and_keeps_its_words() -> None:
    first = _notice_on("a")

    told = known_again(known_again(first, ("b",)), ("a",))

    assert (told.names, told.times) == (("a", "b"), 3)
    assert notice_sentence(told) == notice_sentence(first)


def test_each_event_is_one_of_its_own() -> None:
    """What was deleted, in which cell, by whom it is held: the second accident of a kind is another event."""
    events = [_notice_on("a"), _notice_on("b"), _notice_on("a", cell=5), _notice_on("a", in_cell=8)]

    assert len({notice.fingerprint for notice in events}) == 4
    assert _notice_on("a").fingerprint == _notice_on("a").fingerprint


def test_one_cell_and_one_holder_are_one_notice() -> None:
    edges = {"runs": {"[0]": "a", "[1]": "b"}, "kept": {"[0]": "c"}}
    kinds = dict.fromkeys("abc", "tensor")
    graph = make_graph(
        {"runs": ["runs"], "kept": ["kept"]}, edges, {"a": 4 * MiB, "b": 2 * MiB, "c": MiB}, kinds, types={"runs": "list"}
    )
    gone = [
        _gone(graph, node.ref, name=name, storages=frozenset({graph.storages[n].key}), nbytes=graph.storages[n].nbytes)
        for n, (name, node) in enumerate(zip("abc", (node for node in graph.nodes if node.storages), strict=True))
    ]
    notices = [notice for notice, _ in diagnose_departures(Analysis(make_facts(graph)), gone, MiB, {})]

    assert [(notice.names, notice.nbytes, notice.command) for notice in notices] == [
        (("a", "b"), 6 * MiB, "%reset_gpu runs[0] runs[1]"),
        (("c",), MiB, "%reset_gpu kept[0]"),
    ]
    assert notice_sentence(notices[0]).startswith(
        "`a` and `b` were deleted, but their 6 MiB is still in memory, held by `runs[0]`"
    )


def test_what_is_left_of_a_deleted_name() -> None:
    """What a holder has, what waits for the collector, and nothing: the same memory is a living model's."""
    held = make_graph({"runs": ["runs"]}, {"runs": {"[0]": "net"}}, {"net": 4 * MiB}, {"net": "model"})
    why = explain_departure(Analysis(make_facts(held)), _gone(held, _ref(held, "model")), {})
    assert ([path.text for path in why.paths], why.nbytes, why.deleted) == (["runs[0]"], 4 * MiB, 7)

    garbage = make_graph({"unreachable cycles": ["net"]}, {}, {"net": 4 * MiB}, {"net": "model"})
    why = explain_departure(Analysis(make_facts(garbage)), _gone(garbage), {})
    assert ([path.advice.command for path in why.paths], why.nbytes) == (["%reset_gpu"], 4 * MiB)

    used = make_graph({"net": ["net"]}, {}, {"net": 4 * MiB}, {"net": "model"})
    why = explain_departure(Analysis(make_facts(used)), _gone(used, name="opt"), {})
    assert (why.paths, why.nbytes) == ((), 0)


def _notice_on(name: str, cell: int = 4, in_cell: int = 7) -> Notice:
    graph = make_graph({"last error": ["err"]}, {"err": {" → net": "net"}}, {"net": 4 * MiB}, {"net": "model"})
    graph = replace(graph, roots=(replace(graph.roots[0], cell=cell),))
    notice = _diagnosed(graph, _gone(graph, _ref(graph, "model"), name=name, cell=in_cell))
    assert notice is not None
    return notice
