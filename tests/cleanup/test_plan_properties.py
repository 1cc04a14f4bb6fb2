"""Any graph: what nbguard says of it, against an account written apart, naively, from the definitions.

The account knows only "walk from these roots": a holder's bytes are those lost without it; a plan is carried out on the graph,
reference by reference, as the actions do it on objects, and the graph is walked again after each step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nbguard.memory.cleanup.plan.plan import Action, Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.facts import DEBUGGER, EXPERIMENT_KINDS, Facts, Graph, LearnerFact, Node, Root, StorageFact, Target
from nbguard.memory.core.references.graph import KEY, path_text, shortest_path
from nbguard.memory.core.references.holders import holders, idle_gradients
from nbguard.memory.core.references.owner_sets import bits_of, owners_of_nodes, owners_of_storages
from nbguard.testing import make_facts

_USERS = ("name", "module", "frame", "library")
_OTHER = ("frame", "locals", "traceback", "cell", "code", "data", "object", "object", "object")
_KINDS = (*sorted(EXPERIMENT_KINDS), "tensor", "tensor", "graph", *_OTHER)
_LABELS = ("", ".model", ".xb", ".loss_grad", ".progress", ".pbar", ".grad", "[0]", " → x", f"{KEY}'k'")
_LEFTOVERS = (("xb",), ("loss_grad",), ("loss_grad", "progress.pbar"), ("xb", "progress.pbar"))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph: cycles, sharing, roots of one object, nodes that nothing reaches, labels as a walk writes them."""
    count, storages = draw(st.integers(1, 12)), draw(st.integers(0, 6))
    numbers = st.integers(0, count - 1)
    nodes = []
    for number in range(count):
        below = tuple(draw(st.lists(numbers, max_size=4, unique=True)))
        labels = tuple(draw(st.sampled_from(_LABELS)) for _ in below)
        held = tuple(draw(st.lists(st.integers(0, storages - 1), max_size=2, unique=True))) if storages else ()
        kind = draw(st.sampled_from(_KINDS))
        nodes.append(
            Node(
                kind=kind,
                type_name=draw(st.sampled_from((kind, "tuple", "dict"))),
                ref=1000 + number,
                children=below,
                labels=labels,
                storages=held,
            )
        )
    roots = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from((*_USERS, "name", "out", "out", "error", "cache", "garbage")))
        if kind == "error":
            kind, label = ("cache", f"r{number}") if any(r.kind == "error" for r in roots) else ("error", "last error")
        else:
            label = f"Out[{number}]" if kind == "out" else f"r{number}"
        roots.append(Root(kind=kind, label=label, nodes=tuple(draw(st.lists(numbers, min_size=1, max_size=3, unique=True)))))
    sizes = [1 << (number + draw(st.sampled_from((0, 12)))) for number in range(storages)]  # a sum tells its parts
    return Graph(tuple(roots), tuple(nodes), tuple(StorageFact("cpu", nbytes, 4096) for nbytes in sizes))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Facts, Request]:
    """Facts, and something that a user could ask for."""
    graph = draw(graphs())
    learners = [
        LearnerFact(number, draw(st.booleans()), ("Learner",), draw(st.sampled_from(_LEFTOVERS)))
        for number, node in enumerate(graph.nodes)
        if node.kind == "learner"
    ]
    labels = [root.label for root in graph.roots if root.kind in ("name", "out")]
    edges = [(parent, child) for parent, node in enumerate(graph.nodes) for child in node.children]
    targets = [Target(text=label, root=label, value_kind="object") for label in labels]
    targets += [
        Target(text=f"a.part{parent}_{child}", root="", containers=(1000 + parent,), value=1000 + child, value_kind="object")
        for parent, child in edges
    ]
    keep = tuple(draw(st.lists(st.sampled_from(labels), max_size=2, unique=True))) if labels else ()
    asked = [Request(keep=keep), Request(keep=keep, everything=True)]
    if targets:
        asked.append(
            Request(targets=tuple(draw(st.lists(st.sampled_from(targets), min_size=1, max_size=2, unique=True))), keep=keep)
        )
    return make_facts(graph, learners), draw(st.sampled_from(asked))


def _walk(graph: Graph, starts: list[int]) -> set[int]:
    found: set[int] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += graph.nodes[node].children
    return found


def _alive(graph: Graph, *kinds: str, without: tuple[int, ...] = ()) -> set[int]:
    """Return the storages that the roots of these kinds (all, if none is given) reach."""
    roots = [root for n, root in enumerate(graph.roots) if n not in without and (not kinds or root.kind in kinds)]
    return {storage for n in _walk(graph, [n for root in roots for n in root.nodes]) for storage in graph.nodes[n].storages}


def _sum(graph: Graph, storages: set[int] | frozenset[int]) -> int:
    return sum(graph.storages[storage].nbytes for storage in storages)


def _carry_out(graph: Graph, action: Action, targets: tuple[Target, ...]) -> Graph:
    """Return the graph after an action, done as `cleanup.apply` does it: by the ids and names that it carries."""
    gone_roots: set[int] = set()
    gone: set[tuple[int, int]] = set()
    number = {node.ref: n for n, node in enumerate(graph.nodes)}
    for n, root in enumerate(graph.roots):
        refs = {graph.nodes[node].ref for node in root.nodes}
        match action.kind:
            case "out" if root.kind == "out" and root.label in (*action.names, action.label.removesuffix(" forgotten")):
                assert refs == set(action.refs)
                gone_roots.add(n)
            case "del" if any(target.root == root.label and target.text in action.names for target in targets):
                gone_roots.add(n)
            case "cache" if root.label in action.names:
                gone_roots.add(n)
            case "debugger" if root.label == DEBUGGER:
                gone_roots.add(n)
            case "collect" if root.kind == "garbage":
                gone_roots.add(n)
    for target in targets:
        if action.kind == "del" and target.text in action.names:
            gone |= {(number[container], number[target.value]) for container in target.containers}
    if action.kind == "leftovers":
        for name in action.names:
            gone |= _attribute(graph, number[action.refs[0]], name.split("."))
    if action.kind == "error":
        for owner, value in zip(action.refs[::2], action.refs[1::2], strict=True):
            gone |= _variable(graph, number[owner], number[value])
    nodes = []
    for parent, node in enumerate(graph.nodes):
        left = [(child, label) for child, label in node.references if (parent, child) not in gone]
        nodes.append(replace(node, children=tuple(c for c, _ in left), labels=tuple(label for _, label in left)))
    roots = tuple(root for n, root in enumerate(graph.roots) if n not in gone_roots)
    return Graph((*roots, *_held(action, number)), tuple(nodes), graph.storages)


def _held(action: Action, number: dict[int, int]) -> list[Root]:
    """Return a root of the objects that the step holds until the collector has run."""
    if action.kind != "collect" or not action.refs:
        return []
    return [Root(kind="garbage", label="held", nodes=tuple(number[ref] for ref in action.refs))]


def _attribute(graph: Graph, owner: int, names: list[str]) -> set[tuple[int, int]]:
    """Return the references of an attribute, written on an object or on its attribute dict."""
    places = [owner, *(child for child, label in graph.nodes[owner].references if not label)]
    found = {(p, child) for p in places for child, label in graph.nodes[p].references if label == f".{names[0]}"}
    return found if len(names) == 1 else {e for _, child in found for e in _attribute(graph, child, names[1:])}


def _variable(graph: Graph, owner: int, value: int) -> set[tuple[int, int]]:
    """Return the references that go when a variable of a frame, or an attribute of an exception, gets a stand-in."""
    node = graph.nodes[owner]
    if node.kind != "frame":
        dicts = [child for child, label in node.references if not label and graph.nodes[child].type_name == "dict"]
        return {(place, value) for place in (owner, *dicts) if value in graph.nodes[place].children}
    values = set(graph.nodes[value].children) if graph.nodes[value].kind == "cell" else {value}
    views = [child for child in node.children if graph.nodes[child].kind == "locals"]
    places = [value] if graph.nodes[value].kind == "cell" else [owner]
    return {(place, each) for place in (*places, *views) for each in values if each in graph.nodes[place].children}


def _after(facts: Facts, plan: Plan) -> list[Graph]:
    """Return the graph before the plan and after each of its steps."""
    found = [facts.graph]
    for action in plan.actions:
        found.append(_carry_out(found[-1], action, plan.request.targets))
    return found


@given(graphs(), st.data())
def test_owners_are_the_groups_whose_walk_gets_there(graph: Graph, data: st.DataObject) -> None:
    every = st.lists(st.integers(0, len(graph.nodes) - 1), max_size=3)
    groups = data.draw(st.lists(every, max_size=5))
    edges = [(parent, child) for parent, node in enumerate(graph.nodes) for child in node.children]
    cut = frozenset(data.draw(st.lists(st.sampled_from(edges), max_size=3))) if edges else frozenset()
    blocked = set(data.draw(every))
    left = [
        replace(node, children=tuple(c for c in node.children if (n, c) not in cut and c not in blocked), labels=())
        for n, node in enumerate(graph.nodes)
    ]
    walks = [_walk(Graph((), tuple(left)), [node for node in group if node not in blocked]) for group in groups]

    owners = owners_of_nodes(graph, groups, cut, blocked)

    assert [set(bits_of(mask)) for mask in owners] == [
        {number for number, walk in enumerate(walks) if node in walk} for node in range(len(graph.nodes))
    ]
    for storage, mask in enumerate(owners_of_storages(graph, owners)):
        holding = [n for n, node in enumerate(graph.nodes) if storage in node.storages]
        assert set(bits_of(mask)) == {number for number, walk in enumerate(walks) if not walk.isdisjoint(holding)}


@given(graphs())
def test_a_holder_retains_what_is_lost_without_it(graph: Graph) -> None:
    """Users' roots hold first: a stale one only what none of them reaches, garbage what nothing else does.

    Shared bytes are lost without all their holders.
    """
    rows = holders(graph)
    assert sum(row.retained for row in rows) == _sum(graph, _alive(graph))
    assert len({row.roots for row in rows}) == len(rows)
    users = {n for n, root in enumerate(graph.roots) if root.kind in _USERS}
    for row in rows:
        alone = _alive(graph, without=tuple(set(range(len(graph.roots))) - set(row.roots)))
        others = () if row.kind == "garbage" else (*_USERS, "out", "error", "cache") if row.stale else _USERS
        lost = _sum(graph, alone - _alive(graph, *others, without=row.roots))
        if row.is_shared:
            together = [_alive(graph, without=tuple(set(range(len(graph.roots))) - {n})) for n in row.roots]
            assert all(not row.retained & ~_sum(graph, reached) for reached in together)
            assert not row.retained & ~lost
            assert row.stale == users.isdisjoint(row.roots)
        else:
            assert (row.retained, row.reaches) == (lost, _sum(graph, alone))


@given(graphs(), st.data())
def test_everything_is_all_that_only_names_hold_and_no_name_goes_in_vain(graph: Graph, data: st.DataObject) -> None:
    labels = sorted({root.label for root in graph.roots if root.kind == "name"})
    keep = tuple(data.draw(st.lists(st.sampled_from(labels), max_size=2, unique=True))) if labels else ()

    plan = plan_cleanup(make_facts(graph), Request(everything=True, keep=keep))

    names = {
        number: root
        for number, root in enumerate(graph.roots)
        if root.kind == "name" and root.label not in keep and any(graph.nodes[node].kind != "code" for node in root.nodes)
    }
    assert _alive(graph) - _alive(graph, without=tuple(names)) <= plan.storages
    gone = [action.subject for action in plan.actions if action.kind == "del"]
    for root in names.values():
        nodes = [graph.nodes[node] for node in _walk(graph, list(root.nodes))]
        frees = any(not plan.storages.isdisjoint(node.storages) or node.kind in ("pool", "iterator") for node in nodes)
        assert frees or root.label not in gone


@given(graphs(), st.data())
def test_the_shortest_path_is_a_way_and_none_has_fewer_steps(graph: Graph, data: st.DataObject) -> None:
    root = data.draw(st.sampled_from(graph.roots))
    goals = set(data.draw(st.lists(st.integers(0, len(graph.nodes) - 1), min_size=1, max_size=2)))

    path = shortest_path(graph, root, goals)

    assert bool(path) == (not goals.isdisjoint(_walk(graph, list(root.nodes))))
    if path:
        labels = [dict(graph.nodes[parent].references)[child] for parent, child in pairwise(path)]
        assert path[0] in root.nodes
        assert path[-1] in goals
        steps = "".join(labels)
        in_words = root.kind == "error" and steps.startswith(".")
        assert path_text(graph, root, path) == root.label + (f" → {steps[1:]}" if in_words else steps)
        assert sum(map(bool, labels)) <= _fewest_steps(graph, root, goals, keys=any(text.startswith(KEY) for text in labels))


def _fewest_steps(graph: Graph, root: Root, goals: set[int], keys: bool) -> int:
    """Return the least number of written steps, by relaxing every reference as often as there are nodes."""
    far = len(graph.nodes) + 1
    steps = [0 if n in root.nodes else far for n in range(len(graph.nodes))]
    for _ in graph.nodes:
        for parent, node in enumerate(graph.nodes):
            for child, label in node.references:
                if keys or not label.startswith(KEY):
                    steps[child] = min(steps[child], steps[parent] + bool(label))
    return min(steps[goal] for goal in goals)


@given(situations())
def test_a_promise_is_what_is_lost_step_by_step(situation: tuple[Facts, Request]) -> None:
    facts, request = situation
    plan = plan_cleanup(facts, request)

    alive = [_alive(graph) for graph in _after(facts, plan)]

    assert set(plan.storages) == alive[0] - alive[-1]
    assert plan.promised == _sum(facts.graph, plan.storages) == sum(action.nbytes or 0 for action in plan.actions)
    for action, before, after in zip(plan.actions, alive, alive[1:], strict=False):
        assert action.nbytes == _sum(facts.graph, before - after)


@given(situations())
def test_nothing_that_is_needed_is_ever_in_a_plan(situation: tuple[Facts, Request]) -> None:
    """Needed: what a user's root reaches once the user's own request and leftovers of fits are done; what is to be kept."""
    facts, request = situation
    plan = plan_cleanup(facts, request)
    own = [
        action for action in plan.actions if action.kind in ("del", "leftovers") or action.names[:1] == (action.label[:-10],)
    ]
    graph = facts.graph
    for action in own:
        graph = _carry_out(graph, action, plan.request.targets)
    kept = [root for root in graph.roots if root.label in request.keep and not _is_asked_for(plan, root)]

    assert plan.storages.isdisjoint(_alive(graph, *_USERS))
    for root in kept:
        assert plan.storages.isdisjoint(_alive(Graph((root,), graph.nodes, graph.storages)))


def _is_asked_for(plan: Plan, root: Root) -> bool:
    return any(target.root == root.label for target in plan.request.targets)


@given(situations())
def test_a_cleanup_leaves_nothing_to_a_second_one(situation: tuple[Facts, Request]) -> None:
    facts, request = situation
    if request.targets:  # they are gone, and a cleanup without a target may do more
        return
    after = _after(facts, plan_cleanup(facts, request))[-1]
    learners = tuple(fact for fact in facts.learners if _attribute_left(after, fact))

    again = plan_cleanup(replace(facts, graph=after, learners=learners), request)

    assert (again.promised, again.storages) == (0, frozenset())


def _attribute_left(graph: Graph, fact: LearnerFact) -> bool:
    return any(_attribute(graph, fact.node, name.split(".")) for name in fact.leftovers)


@given(graphs())
def test_gradients_of_a_learner_are_what_is_lost_without_them(graph: Graph) -> None:
    labels = {root.label for root in graph.roots}
    found = dict(idle_gradients(make_facts(graph)))
    for root in graph.roots:
        if root.kind != "name" or len(root.nodes) != 1 or graph.nodes[root.nodes[0]].kind != "learner":
            continue
        below = _walk(graph, list(root.nodes))
        nodes = tuple(
            replace(node, children=tuple(c for c, text in node.references if text != ".grad"), labels=())
            if n in below
            else node
            for n, node in enumerate(graph.nodes)
        )
        lost = _sum(graph, _alive(graph) - _alive(replace(graph, nodes=nodes)))
        first = next(other.label for other in graph.roots if other.kind == "name" and other.nodes == root.nodes)
        assert found.get(first, 0) == lost
    assert labels >= found.keys()
