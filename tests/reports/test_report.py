"""Reports: parts that add up to the device, holders that add up to what is allocated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.device_view import holder_rows
from nbguard.memory.core.facts import AllocatorStats, DeviceFacts, Facts, LearnerFact, NvmlFacts, PoolFact, ProcessFact, Target
from nbguard.memory.core.processes import Identity
from nbguard.memory.core.references.explain import explain
from nbguard.memory.reports.report import build_report
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment, segment_of

GiB = 1024**3
MiB = 1024**2


def _cuda(nvml: NvmlFacts | None = None) -> Facts:
    graph = make_graph(
        {"learn": ["l"], "Out[3]": ["o"]}, storages={"l": 4 * GiB, "o": GiB}, kinds={"o": "learner"}, device="cuda:0"
    )
    segments = [
        segment_of(graph, (GiB, "active_allocated"), (2 * GiB, "inactive")),
        make_segment((GiB, "inactive"), address=1 << 50),
    ]
    device = replace(make_cuda_device(segments, total=80 * GiB, free=60 * GiB), nvml=nvml)
    return make_facts(graph, device=device)


def test_parts_re_add_to_the_device() -> None:
    nvml = NvmlFacts(80 * GiB, 20 * GiB, (ProcessFact(1, 12 * GiB), ProcessFact(2, 3 * GiB)))

    (device,) = build_report(Analysis(_cuda(nvml))).devices
    parts = {part.name: part.nbytes for part in device.parts}

    assert sum(parts.values()) == device.total == 80 * GiB
    assert parts == {
        "allocated": 6 * GiB,
        "releasable": GiB,
        "stranded": 2 * GiB,
        "context": 3 * GiB,
        "others": 3 * GiB,
        "driver": 5 * GiB,
        "free": 60 * GiB,
    }
    assert device.kernel == 12 * GiB


def test_commands_of_the_table_of_holders_are_set_as_code() -> None:
    edges = {"p": {"[0]": "x"}, "q": {"[0]": "x"}}
    graph = make_graph({"a": ["p"], "b": ["q"], "c": ["y"], "d": ["z"]}, edges, {"x": GiB, "y": 100, "z": 100})

    bundle = build_report(Analysis(make_facts(graph))).mimebundle()

    assert "shared, together 1 GiB  <code>%reset_gpu a b</code>" in bundle["text/html"]
    assert "<td><code>%gpumem --all</code></td>" in bundle["text/html"]
    assert "`" not in bundle["text/plain"]


def test_others_are_named_once_each_and_their_bytes_add_up() -> None:
    """Processes of one notebook together, the largest first; five more of which nothing is known are not all listed."""
    notebook = Identity(notebook="/a/b.ipynb", kernel="k")
    known = [ProcessFact(2, GiB, notebook), ProcessFact(3, GiB, Identity(program="train.py")), ProcessFact(4, GiB, notebook)]
    listed = (ProcessFact(1, 12 * GiB), *known)
    nvml = NvmlFacts(80 * GiB, 20 * GiB, listed)
    many = replace(nvml, processes=(*listed, *(ProcessFact(pid, MiB) for pid in range(10, 15))))

    for driver, words, note in (
        (nvml, "b.ipynb 2 GiB (pids 2, 4), train.py 1 GiB (pid 3)", "b.ipynb 2 GiB, train.py 1 GiB"),
        (
            many,
            "b.ipynb 2 GiB (pids 2, 4), train.py 1 GiB (pid 3), 1 MiB (pid 10), 1 MiB (pid 11), 3 more 3 MiB (pids 12–14)",
            "b.ipynb 2 GiB, train.py 1 GiB, pid 10 1 MiB, pid 11 1 MiB, 3 more",
        ),
        (
            replace(nvml, processes=(*listed, ProcessFact(5, GiB, Identity(notebook="/home/x/c/b.ipynb")))),
            "a/b.ipynb 2 GiB (pids 2, 4), train.py 1 GiB (pid 3), c/b.ipynb 1 GiB (pid 5)",
            "a/b.ipynb 2 GiB, train.py 1 GiB, c/b.ipynb 1 GiB",
        ),
    ):
        report = build_report(Analysis(_cuda(driver)))
        (device,) = report.devices
        others = next(part for part in device.parts if part.name == "others")
        assert others.nbytes == sum(process.used or 0 for process in device.others)
        assert others.note == note
        assert f"others: {words}" in str(report)


@pytest.mark.parametrize(
    "processes", [None, (), (ProcessFact(1, GiB), ProcessFact(2, None)), (ProcessFact(2, 1), ProcessFact(3, 1))]
)
def test_a_driver_that_does_not_tell_processes_apart_is_not_guessed_at(processes: tuple[ProcessFact, ...] | None) -> None:
    """In containers NVML is blind to pids: what is used outside is one part, and says so."""
    (device,) = build_report(Analysis(_cuda(NvmlFacts(80 * GiB, 20 * GiB, processes)))).devices
    parts = {part.name: part.nbytes for part in device.parts}

    assert parts["others and contexts"] == 11 * GiB
    assert sum(parts.values()) == device.total


def test_the_only_process_on_a_device_is_this_one_whatever_its_pid() -> None:
    """The driver's pids are the host's: in a container they are not ours. Nor need it tell their bytes."""
    (device,) = build_report(Analysis(_cuda(NvmlFacts(80 * GiB, 20 * GiB, (ProcessFact(77, None),))))).devices
    parts = {part.name: part.nbytes for part in device.parts}

    assert (parts["context"], parts["others"]) == (11 * GiB, 0)


def test_a_device_that_is_not_opened_has_others_and_no_context() -> None:
    device = DeviceFacts(
        device="cuda:1",
        name="GPU",
        total=80 * GiB,
        free=70 * GiB,
        allocator=AllocatorStats(allocated=0, reserved=0),
        segments=(),
        nvml=NvmlFacts(0, 0, (ProcessFact(2, GiB),)),
        has_context=False,
    )

    (found,) = build_report(Analysis(make_facts(make_graph({}), device=device))).devices

    assert {part.name: part.nbytes for part in found.parts if part.nbytes} == {
        "others": GiB,
        "driver": 9 * GiB,
        "free": 70 * GiB,
    }
    assert found.kernel == 0


def test_blocks_that_python_does_not_hold_are_told_apart() -> None:
    private = replace(make_segment((MiB, "active_allocated"), address=1 << 50, pool=(1, 0)))
    segment = make_segment((8 * MiB, "active_allocated"), (8 * MiB, "active_allocated"), (2 * MiB, "active_allocated"))
    device = replace(make_cuda_device([segment, private], total=GiB, free=0), workspace=8 * MiB)

    (found,) = build_report(Analysis(make_facts(make_graph({}), device=device))).devices

    assert [(holder.label, holder.retained) for holder in found.holders] == [
        ("cuBLAS workspaces", 16 * MiB),
        ("not held by Python", 2 * MiB),
        ("pool (1, 0) of an object that is not known", MiB),
    ]


def test_a_private_pool_is_called_after_what_keeps_it() -> None:
    graph = make_graph({"r": ["o"], "Out[3]": ["g"]}, {"o": {".graph": "g"}}, kinds={"g": "pool"})
    segment = make_segment((MiB, "inactive"), pool=(1, 0))
    other = make_segment((MiB, "inactive"), address=1 << 50, pool=(2, 0))
    device = make_cuda_device([segment, other], total=GiB, free=0)
    keeper = next(number for number, node in enumerate(graph.nodes) if node.kind == "pool")
    facts = replace(make_facts(graph, device=device), pools=(PoolFact(pool=(1, 0), keepers=(keeper,)),))

    (found,) = build_report(Analysis(facts)).devices

    kind = graph.nodes[keeper].type_name
    assert [(pool.name, pool.space.kept, pool.space.releasable) for pool in found.pools] == [
        (f"{kind} r.graph · large blocks", MiB, 0),
        ("pool (2, 0) of an object that is not known · large blocks", MiB, 0),
    ]
    plan = plan_cleanup(facts, Request())
    assert (plan.reserved, plan.reserved_at_most) == (0, MiB), "nothing tells whether it is in use"
    both = plan_cleanup(facts, Request(targets=(Target(text="r", root="r"), Target(text="Out[3]", root="Out[3]"))))
    assert (both.reserved, both.reserved_at_most) == (MiB, 2 * MiB)


def test_what_python_does_not_hold_is_a_row_so_that_holders_re_add() -> None:
    (device,) = build_report(Analysis(_cuda())).devices

    assert sum(holder.retained for holder in device.holders) == device.allocated == 6 * GiB
    assert ("not held by Python", GiB) in [(holder.label, holder.retained) for holder in device.holders]


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
def test_rows_shown_re_add_to_the_total_shown(limit: int) -> None:
    graph = make_graph({f"v{n}": [f"n{n}"] for n in range(30)}, storages={f"n{n}": 1_000_003 * (n + 1) for n in range(30)})
    (device,) = build_report(Analysis(make_facts(graph))).devices

    *rows, last = holder_rows(device.holders, device.allocated, limit)

    assert last.cells[1] == "443 MiB"
    assert round(sum(float(row.cells[1].split()[0]) for row in rows)) == 443
    large = 26  # the others hold less than a hundredth of all
    assert len(rows) == min(limit, large) + (limit < large) + 1
    assert len(holder_rows(device.holders, device.allocated, None)) == 30 + 1


def test_stale_bytes_come_with_the_command_that_frees_them() -> None:
    report = build_report(Analysis(_cuda()))

    assert report.stale == GiB
    assert report.findings[0].command == "%reset_gpu"
    assert report.findings[0].sentence.startswith("1 GiB is stale")


@pytest.mark.parametrize(
    ("what", "command", "frees"),
    [
        ("list of 2", "losses[:] = [each.detach() for each in losses]", 2 * MiB),
        ("list of 3", "losses[0].detach_(); losses[1].detach_();", 2 * MiB),  # one of them is no tensor
    ],
)
def test_a_list_of_losses_with_graphs_is_a_finding(what: str, command: str, frees: int | None) -> None:
    graph = make_graph(
        {"losses": ["list"]},
        {"list": {"[0]": "a", "[1]": "b"}, "a": {" → graph": "g"}, "b": {" → graph": "h"}, "g": {"": "x"}, "h": {"": "y"}},
        {"a": 4, "b": 4, "x": MiB, "y": MiB},
        {"a": "tensor", "b": "tensor", "g": "graph", "h": "graph", "x": "tensor", "y": "tensor"},
        types={"list": "list"},
        whats={"losses": what},
    )

    (finding,) = build_report(Analysis(make_facts(graph))).findings

    assert (finding.kind, finding.command, finding.advice.frees) == ("graph", command, frees)


def _evaluated(*, is_saved: bool) -> Facts:
    """Return the facts of outputs and their loss that share a graph; `is_saved`: the loss has saved the outputs."""
    graph = make_graph(
        {"out": ["out"], "loss": ["loss"]},
        {
            "out": {" → graph": "g"},
            "loss": {" → graph": "h"},
            "h": {"": "g", **({" saved": "out"} if is_saved else {})},
            "g": {"": "x"},
        },
        {"out": 4, "loss": 4, "x": MiB},
        {"out": "tensor", "loss": "tensor", "g": "graph", "h": "graph", "x": "tensor"},
    )
    return make_facts(graph)


@pytest.mark.parametrize("is_saved", [False, True])
def test_names_that_keep_the_same_graph_are_detached_together(is_saved: bool) -> None:
    """As `outputs` and `loss` of a loop that evaluates with gradients: neither line alone frees anything."""
    (finding,) = build_report(Analysis(_evaluated(is_saved=is_saved))).findings

    assert (finding.kind, finding.advice.frees) == ("graph", MiB)
    assert finding.command == "loss = loss.detach(); out = out.detach()"
    assert finding.sentence.startswith("loss and out keep an autograd graph alive (1 MiB): ")


@pytest.mark.parametrize(("has_model", "told"), [(True, []), (False, ["graph"])])
def test_a_loss_of_a_model_that_a_name_has_keeps_nothing_alive(has_model: bool, told: list[str]) -> None:
    """As `outputs` and `loss` after any training loop: their graph leads to the model's parameters, and to nothing else."""
    graph = make_graph(
        {"outputs": ["out"], "loss": ["loss"], **({"model": ["net"]} if has_model else {})},
        {"out": {" → graph": "g"}, "loss": {" → graph": "h"}, "h": {"": "g"}, "g": {"": "w"}, "net": {".weight": "w"}},
        {"out": 4, "loss": 4, "w": MiB},
        {"out": "tensor", "loss": "tensor", "g": "graph", "h": "graph", "w": "tensor", "net": "model"},
    )

    found = [finding.kind for finding in build_report(Analysis(make_facts(graph))).findings]

    assert [kind for kind in found if kind == "graph"] == told


@pytest.mark.parametrize(("net", "is_told"), [(16 * 1024, False), (30 * MiB, True)])
def test_an_object_with_a_small_model_beside_much_else_is_no_handle_of_it(net: int, is_told: bool) -> None:
    """`store keeps an experiment of 30 MiB alive`, of which the model was 16 KiB and the rest a list of outputs."""
    graph = make_graph(
        {"store": ["store"]},
        {"store": {".net": "net", ".outs": "list"}, "list": {"[0]": "out"}},
        {"net": net, "out": 30 * MiB},
        {"net": "model", "out": "tensor"},
        types={"list": "list", "store": "Store"},
    )

    found = [finding.command for finding in build_report(Analysis(make_facts(graph))).findings if finding.kind == "handle"]

    assert found == ["%reset_gpu store.net"] * is_told


def test_only_one_device_can_be_asked_for() -> None:
    report = build_report(Analysis(_cuda()))

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
    assert [(path.text, path.advice.command, path.storages_only) for path in why.paths] == [
        ("learn", "%reset_gpu learn", False),
        ("runs['a']", "%reset_gpu runs['a']", False),
        ("zmod.STATE[0]", "%reset_gpu zmod.STATE[0]", False),
        ("Out[3]", "%reset_gpu Out[3]", False),
        ("opt.params", "%reset_gpu opt.params", True),
    ]


def test_why_cuts_where_least_is_lost() -> None:
    graph = make_graph(
        {
            "f": ["f"],
            "pair": ["t"],
            "losses": ["list"],
            "zmod.score": ["c"],
            "signal handler SIGUSR1": ["h"],
            "running fit()": ["l"],
        },
        {
            "f": {" → closure learn": "cell"},
            "cell": {"": "l"},
            "t": {"[0]": "l"},
            "list": {"[3]": "loss"},
            "loss": {" → graph": "g"},
            "g": {"": "l"},
            "c": {"['learn']": "l"},
            "h": {" → closure learn": "l"},
            "l": {".model": "m"},
        },
        {"m": 10},
        {"l": "learner"},
        types={"t": "tuple", "c": "_lru_cache_wrapper"},
        ended_by={"signal handler SIGUSR1": "signal.signal(signal.SIGUSR1, signal.SIG_DFL)"},
    )
    node = next(number for number, node in enumerate(graph.nodes) if node.kind == "learner")

    releases = {path.steps[0]: path.advice.command for path in explain(make_facts(graph), "learn", node, "Learner").paths}

    assert releases == {
        "f": "%reset_gpu f",
        "pair": "%reset_gpu pair",
        "losses": "%reset_gpu losses[3]",
        "zmod.score": "zmod.score.cache_clear()",
        "signal handler SIGUSR1": "signal.signal(signal.SIGUSR1, signal.SIG_DFL)",
        "running fit()": "wait until it ends",
    }


def test_why_shows_each_way_of_a_root_and_counts_the_rest() -> None:
    graph = make_graph(
        {"runs": ["d"], "last error": ["e"]},
        {"d": {f"[{n}]": f"x{n}" for n in range(2)}, "e": {f" → f{n}": f"f{n}" for n in range(9)}}
        | {f"x{n}": {".learn": "l"} for n in range(2)}
        | {f"f{n}": {" → self": "l"} for n in range(9)}
        | {"l": {".cb": "cb", ".model": "m"}, "cb": {".learn": "l"}},
        {"m": 10},
        {"l": "learner"},
    )
    node = next(number for number, node in enumerate(graph.nodes) if node.kind == "learner")

    why = explain(make_facts(graph), "learn", node, "Learner")

    assert [path.text for path in why.paths if not path.stale] == ["runs[0].learn", "runs[1].learn"]  # not by its own callback
    assert [path.advice.command for path in why.paths if not path.stale] == [
        "%reset_gpu runs[0].learn",
        "%reset_gpu runs[1].learn",
    ]
    assert sum(path.stale for path in why.paths) == 4
    assert why.more == (("last error", 5),)


def test_a_displayed_tensor_that_a_cleanup_keeps_is_not_called_stale() -> None:
    graph = make_graph(
        {"Out[1]": ["t"], "Out[2]": ["l"]}, {"l": {".model": "m"}}, {"t": MiB, "m": 2 * MiB}, {"t": "tensor", "l": "learner"}
    )

    (device,) = build_report(Analysis(make_facts(graph))).devices
    *rows, _ = holder_rows(device.holders, device.allocated, 12)

    assert [(row.cells[0], row.cells[4] == "stale", row.hint) for row in rows] == [
        ("Out[2]", True, "%reset_gpu"),
        ("Out[1]", False, "%reset_gpu Out[1]"),
    ]


def test_what_is_stale_of_a_row_is_marked_so_that_the_marks_add_up_to_the_finding() -> None:
    """The last batch of a failed fit is stale, its Learner is not: the row says how much of it, and so does a folded one."""
    graph = make_graph(
        {"learn": ["l"], "x": ["x"], "y": ["m"]},
        {"l": {".model": "lm", ".xb": "batch"}, "m": {".xb": "other"}},
        {"lm": 8 * MiB, "batch": 5 * MiB, "x": 4 * MiB, "other": 3 * MiB},
        {"l": "learner", "lm": "model", "m": "learner"},
    )
    facts = make_facts(
        graph, [LearnerFact(n, False, ("Learner",), ("xb",)) for n, node in enumerate(graph.nodes) if node.kind == "learner"]
    )

    report = build_report(Analysis(facts))
    (device,) = report.devices

    assert report.stale == sum(holder.stale_bytes for holder in device.holders) == 8 * MiB
    assert not any(holder.stale for holder in device.holders)
    marks = {limit: [row.cells[4] for row in holder_rows(device.holders, device.allocated, limit)] for limit in (12, 1)}
    assert marks == {12: ["5 MiB stale", "", "3 MiB stale", ""], 1: ["5 MiB stale", "3 MiB stale", ""]}


def test_leftovers_between_live_blocks_are_no_reason_to_say_that_nothing_there_is_stale() -> None:
    graph = make_graph(
        {"learn": ["l"], "more": ["x"]},
        {"l": {".xb": "batch"}, "x": {}},
        {"l": 8 * MiB, "batch": 5 * MiB, "x": 4 * MiB},
        {"l": "learner"},
        device="cuda:0",
    )
    segment = segment_of(graph, *((storage.nbytes, "active_allocated") for storage in graph.storages), (60 * MiB, "inactive"))
    device = make_cuda_device([segment], total=GiB, free=GiB // 2)
    facts = make_facts(graph, [LearnerFact(0, False, ("Learner",), ("xb",))], device)

    found = {finding.kind: finding for finding in build_report(Analysis(facts)).findings}

    assert found["stale"].sentence.startswith("5 MiB is stale")
    assert "`%reset_gpu` frees the stale ones among them" in found["fragmentation"].sentence
    assert found["fragmentation"].advice.frees == 5 * MiB


def test_what_a_displayed_result_and_waiting_garbage_have_is_promised_by_its_line() -> None:
    """`{'model': learn.model, 'preds': preds}` displayed, then `del learn, preds`: the Learner is a cycle that waits."""
    graph = make_graph(
        {"Out[4]": ["shown"], "unreachable cycles": ["l"]},
        {"shown": {"['model']": "m", "['preds']": "t"}, "l": {".model": "m"}},
        {"m": 7 * MiB, "t": MiB, "l": 2 * MiB},
        kinds={"m": "model", "l": "learner", "t": "tensor"},
        types={"shown": "dict"},
    )
    (finding,) = (finding for finding in build_report(Analysis(make_facts(graph))).findings if finding.kind == "output")

    assert finding.advice.command == "%reset_gpu Out[4]"
    assert finding.advice.frees == 10 * MiB  # with the cycle, which leads to the same model: the plan collects it
    assert "frees 10 MiB" in finding.sentence


def _calls(act: Callable[[], object]) -> int:
    """Return how many functions are called, Python's and C's: what it costs, on a machine of any speed."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("nbytes", "edges"),
    [(1024, {}), (MiB, {}), (MiB, {"a": {".next": "shared"}, "b": {".next": "shared"}})],
)
def test_a_report_costs_the_same_for_each_name_however_many_there_are(nbytes: int, edges: dict[str, dict[str, str]]) -> None:
    def work(names: int) -> Callable[[], object]:
        each = [f"{letter}{number}" for number in range(names // 2) for letter in "ab"]
        of_each = {name: edges[name[0]] for name in each if name[0] in edges}
        storages = {**dict.fromkeys(each, nbytes), "shared": 7}
        facts = make_facts(make_graph({name: [name] for name in each}, of_each, storages))

        def act() -> None:
            analysis = Analysis(facts)
            report = build_report(analysis)
            report.mimebundle(limit=names)
            plan_cleanup(facts, Request())

        return act

    _calls(work(10))  # imports

    assert _calls(work(800)) < 2.3 * _calls(work(400))
