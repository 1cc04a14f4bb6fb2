"""The plan of a cleanup, with the references to remove, in order, and the bytes that each step gives back.

Pure: a plan is computed from facts by taking references out of the graph and walking the rest. Nothing is touched. Objects
that a name of the user's leads to are *live*: a plan may remove other references to them, never the objects themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import replace

from nbguard.memory.cleanup.plan.builder import PlanBuilder, clear_leftovers
from nbguard.memory.cleanup.plan.optional_steps import (
    Workspaces,
    clear_workspaces,
    drop_compiled,
    empty_function_caches,
    end_workers,
    give_pinned_memory_back,
    release_kept_errors,
    released_parts,
    shell_of,
    variables_of_error,
)
from nbguard.memory.cleanup.plan.plan import Action, ActionKind, Plan, Request
from nbguard.memory.core import advice
from nbguard.memory.core.facts import DEBUGGER, EXPERIMENT_KINDS, Facts, Graph, Target
from nbguard.memory.core.references.graph import STALE_KINDS, Edge, leading_to, nbytes_of, reach, reach_of_roots, storages_of
from nbguard.memory.core.references.holders import workspace_blocks
from nbguard.memory.core.references.partners import CleanupState, entries_of, kept_targets
from nbguard.memory.core.requests import doubtful_pools, given_back, pools_in_use
from nbguard.texts import DEBUGGERS, joined
from nbguard.units import MiB, counted

_CONTAINERS = frozenset({"dict", "list", "tuple", "set", "frozenset", "OrderedDict", "defaultdict", "deque", "mappingproxy"})
_CLEARED = frozenset({"dict", "list", "set", "OrderedDict", "defaultdict", "deque"})
_HANDLES = frozenset({"method", "partial", "cell", "function"})
"""Kinds of objects that stand for another one, whose own contents are not in a part of it."""
_CELLS = ("", "MainThread")
"""The thread of a function that a cell runs, as its root tells it."""
_PARTS = 100
"""Tensors in parts of an object that has an experiment are few if the experiment has so many times their bytes."""


def plan_cleanup(facts: Facts, request: Request, *, is_for_later: bool = False) -> Plan:
    """Return the plan that meets `request` in the process that `facts` describe, with the bytes it promises.

    A target that frees nothing, since something else keeps its memory, is not deleted: the plan says what keeps it. A plan
    that is for later is carried out once the code that runs has ended, which keeps nothing then.
    """
    if request.only_workers or not (request.everything or request.targets):
        return _plan_and_builder(facts, request)[0]
    if request.everything:
        request = replace(request, targets=_everything(facts.graph, request.keep))
    if is_for_later:
        facts = replace(facts, graph=_without_running(facts.graph))
    left_out = tuple(target for target in request.targets if target.text in request.keep)
    plan, builder, alive = _plan_and_builder(facts, request, left_out)
    idle = _idle(facts.graph, (target for target in request.targets if target not in left_out), request.targets, alive)
    if request.everything:
        targets = tuple(target for target in request.targets if target not in idle)
        return _plan_and_builder(facts, replace(request, targets=targets))[0] if idle else plan
    if idle:
        plan, builder, _ = _plan_and_builder(facts, request, (*left_out, *idle))
    plan = replace(plan, also_stale=_also_stale(builder))
    if not idle:
        return plan
    state = CleanupState(
        graph=facts.graph,
        gone=builder.gone,
        cut=builder.cut,
        freed=plan.storages,
        going=tuple(target for target in request.targets if target not in idle),
        freed_by=lambda targets, has_caches: (
            _plan_and_builder(facts, replace(request, targets=targets, caches=request.caches or has_caches))[0].storages
        ),
    )
    skipped = (*plan.skipped, *_without_memory(facts, idle))
    return replace(plan, kept=tuple(kept_targets(state, idle)), skipped=skipped)


def freed_by_targets(facts: Facts, targets: tuple[Target, ...]) -> frozenset[int]:
    """Return the storages that a plan for these targets frees; none where each of them stays, as it frees nothing."""
    plan, _, alive = _plan_and_builder(facts, Request(targets=targets))
    idle = _idle(facts.graph, targets, targets, alive)
    return _plan_and_builder(facts, Request(targets=targets), idle)[0].storages if idle else plan.storages


def _idle(graph: Graph, targets: Iterable[Target], together: tuple[Target, ...], alive: Set[int]) -> tuple[Target, ...]:
    """Return the targets that free nothing by a plan that leaves the nodes `alive` reached."""
    return tuple(
        target for target in targets if _frees_nothing(graph, target, alive) and not _is_one_of_several(target, together)
    )


def _also_stale(builder: PlanBuilder) -> int:
    """Return the bytes that the default cleanup frees after a plan for targets."""
    facts = builder.left()
    if not any(root.kind in STALE_KINDS for root in facts.graph.roots) and not any(fact.leftovers for fact in facts.learners):
        return 0
    return _plan_and_builder(facts, Request())[0].promised


def _without_running(graph: Graph) -> Graph:
    """Return the graph once the cell has ended: none of its functions runs any more, those of the user's threads still may."""
    return replace(graph, roots=tuple(root for root in graph.roots if root.kind != "frame" or root.thread not in _CELLS))


def _plan_and_builder(
    facts: Facts, request: Request, staying: Collection[Target] = ()
) -> tuple[Plan, PlanBuilder, frozenset[int]]:
    """Return the plan that meets `request`, except for the targets `staying`, its builder, and the nodes that stay."""
    builder = PlanBuilder(facts=facts, keep=request.keep)
    if request.only_workers:
        end_workers(builder, None)
        give_pinned_memory_back(builder)
        return _settled(builder, request)
    given_up: set[int] | None = None
    if request.targets:
        given_up = _give_up(builder, [target for target in request.targets if target not in staying])
    scope = None if request.everything else given_up  # limit of the steps below; None for the default cleanup's
    if scope is None and not request.while_busy:
        clear_leftovers(builder, variables_of_error(facts.graph) if request.only_error else None)
    _note_what_is_hidden(builder)
    if request.caches:
        empty_function_caches(builder, scope)
    if request.workers:
        end_workers(builder, scope)
    if request.only_error:
        _release_error(builder, builder.live() | _reached_by(facts.graph, "out", "cache"), None, request)
    else:
        live = builder.live() | _kept_out(builder, request, scope, given_up)
        _drop_out(builder, live)
        _release_error(builder, live, scope, request)
        if not request.while_busy:
            _drop_caches(builder, live, scope)
    if request.errors:
        release_kept_errors(builder)
    if request.compiled:
        drop_compiled(builder)
    workspaces = clear_workspaces(builder) if request.hard else Workspaces()
    builder.collect(scope)
    if request.workers:
        give_pinned_memory_back(builder)
    return _settled(builder, request, workspaces)


def _settled(
    builder: PlanBuilder, request: Request, workspaces: Workspaces | None = None
) -> tuple[Plan, PlanBuilder, frozenset[int]]:
    """Return the plan that the steps so far make, with its bytes, its builder, and the nodes that stay reached."""
    facts, settled = builder.facts, builder.settle()
    actions = tuple(_with_hook(action, request.targets, facts.graph, settled.alive) for action in settled.actions)
    workspaces = workspaces or Workspaces()
    back = given_back(facts, settled.storages, settled.alive, workspaces.addresses)
    promised = nbytes_of(facts.graph, settled.storages) + workspaces.nbytes
    unseen = _not_looked_into(facts) if settled.at_least else None
    plan = Plan(
        request=request,
        actions=actions,
        storages=settled.storages,
        promised=promised,
        at_least=settled.at_least,
        at_most=None if unseen is None else promised + unseen,
        reserved=None if back is None else back.released,
        reserved_at_most=None if back is None else back.at_most,
        stranded=None if back is None else back.stranded,
        skipped=tuple(builder.skipped),
        pools=pools_in_use(facts, settled.alive),
        doubtful=doubtful_pools(facts, settled.alive),
        gone=frozenset(builder.gone),
        cut=frozenset(builder.cut),
    )
    return plan, builder, settled.alive


def _with_hook(action: Action, targets: Iterable[Target], graph: Graph, alive: Set[int]) -> Action:
    """Return a step that deletes a name with the hook that needs it, if the hook's module stays."""
    target = next((one for one in targets if one.hook and action.kind == "del" and action.names == (one.root,)), None)
    if target is None or any(node.ref == target.hooked and number not in alive for number, node in enumerate(graph.nodes)):
        return action
    detail = f"{target.hook} uses it and raises NameError at the next pass"
    if target.value_kind in _CLEARED:
        detail += "; " + advice.empty_container("", target.text).code + " frees its contents and keeps the name"
    return replace(action, detail=joined("; ", filter(None, (action.detail, detail))))


def _not_looked_into(facts: Facts) -> int | None:
    """Return the bytes that are allocated and that no storage or workspace explains; None where nothing counts them."""
    left = 0
    for device in facts.devices:
        if device.allocator is None:
            return None
        known = sum(storage.nbytes for storage in facts.graph.storages if storage.device == device.device)
        workspaces = sum(block.size for block in workspace_blocks(facts.graph, device))
        left += max(device.allocator.allocated - known - workspaces, 0)
    return left


def _reached_by(graph: Graph, *kinds: str) -> set[int]:
    """Return the nodes that roots of these kinds lead to."""
    return reach_of_roots(graph, (number for number, root in enumerate(graph.roots) if root.kind in kinds))


def _note_what_is_hidden(builder: PlanBuilder) -> None:
    """Note the memory that a plan cannot see; a cleanup uncovers it first."""
    if builder.facts.frozen_objects:
        builder.skipped.append(
            f"gc.freeze() hides {counted(builder.facts.frozen_objects, 'object')}: "
            + advice.release_stale().command
            + " unfreezes them, then looks"
        )
    if builder.facts.is_autocast_on:
        empties = advice.release_stale().command + " empties its cache of weights, then looks"
        builder.skipped.append("autocast is on: " + empties)


def _everything(graph: Graph, keep: Iterable[str]) -> tuple[Target, ...]:
    """Return every name of the namespace in the graph, except code (functions, classes) and the names in `keep`."""
    kept = set(keep)
    return tuple(
        Target(text=root.label, root=root.label)
        for root in graph.roots
        if root.kind == "name" and root.label not in kept and not all(graph.nodes[node].kind == "code" for node in root.nodes)
    )


def _without_memory(facts: Facts, targets: Iterable[Target]) -> Iterator[str]:
    """Yield a sentence on each target that leads to an experiment without memory."""
    for target in targets:
        if not storages_of(facts.graph, reach(facts.graph, entries_of(facts.graph, target))):
            yield f"{target.text} ({target.value_kind}) leads to no memory of {facts.tracked}: left as it is"


def _frees_nothing(graph: Graph, target: Target, alive: Set[int]) -> bool:
    """Say whether a target has no part in the memory freed by a plan that leaves the nodes `alive` reached.

    A name that a library brought has none, as its module keeps the object. Nor has one that leads to an object without memory,
    such as a transform that has a loss function bound by a starred import of a library.
    """
    entries = entries_of(graph, target)
    gone = reach(graph, entries) - alive
    may_free_more = graph.rest is not None and any(n == graph.rest or graph.rest in graph.nodes[n].children for n in gone)
    is_used = any(graph.nodes[node].kind in ("pool", "iterator") for node in gone)
    return bool(entries) and not (may_free_more or is_used or storages_of(graph, gone) - storages_of(graph, alive))


def _is_one_of_several(target: Target, targets: Iterable[Target]) -> bool:
    """Say whether another target is the same object in a place that has it several times, such as two keys of a dict.

    Both may free what neither does alone. The graph has one reference for all of a place's, so the effect is measured.
    """
    is_several_times = bool(target.value) and not target.is_known
    return is_several_times and any(
        other is not target and other.value == target.value and not other.is_known for other in targets
    )


def _give_up(builder: PlanBuilder, targets: Iterable[Target]) -> set[int]:
    """Take the references that the targets name out of the graph; return all nodes that they led to."""
    graph, given_up = builder.graph, set[int]()
    by_ref = {node.ref: number for number, node in enumerate(graph.nodes)}
    by_label: dict[str, set[int]] = {}
    for number, root in enumerate(graph.roots):
        by_label.setdefault(root.label, set()).add(number)
    for target in sorted({target.text: target for target in targets}.values(), key=lambda target: target.turn):
        gone = by_label.get(target.root, set()) if target.root else set()
        value = by_ref.get(target.value)
        cut = set[Edge]()
        if value is not None:
            cut = {_reference(graph, by_ref[c], value) for c in target.containers if c in by_ref}
        entries = {node for root in gone for node in graph.roots[root].nodes} | {child for _, child in cut}
        entries |= {value} if target.lets_go and value is not None else set()
        if target.is_known and not entries:
            builder.skipped.append(
                f"{target.text} ({target.value_kind}) leads to no tensor, model or loader on {builder.facts.tracked}: "
                "left as it is"
            )
            continue
        given_up |= reach(graph, entries, blocked=given_up)
        if not target.lets_go:
            builder.add(_action_on(graph, target, gone), gone, cut)
    return given_up


def _reference(graph: Graph, owner: int, value: int) -> Edge:
    """Return the reference from a container to a value; the elements of an array of objects are in a list of their own."""
    lists = (child for child, label in graph.nodes[owner].references if not label and value in graph.nodes[child].children)
    return (owner if value in graph.nodes[owner].children else next(lists, owner), value)


def _action_on(graph: Graph, target: Target, gone: set[int]) -> Action:
    """Return the step that takes a target's reference away, or its roots `gone`."""
    kind: ActionKind = "del"
    refs, participle = tuple[int, ...](), "deleted"
    names: tuple[str, ...] = (target.text,)
    if target.step:
        kind, refs, names, participle = "cut", (*target.containers, target.value), (target.text, target.step), "released"
    elif target.line:
        kind, names, participle = "line", (target.text, target.line), "ended"
    elif any(graph.roots[root].kind == "out" for root in gone):
        kind, participle = "out", "forgotten"
        refs = tuple(graph.nodes[node].ref for root in gone for node in graph.roots[root].nodes)
    elif target.root and target.root != target.text:
        names = (target.root,)
    subject = target.text if not target.root or target.root == target.text else f"{target.root}, for {target.text}"
    nbytes = 0 if target.is_known else None
    return Action(kind=kind, subject=subject, participle=participle, nbytes=nbytes, refs=refs, names=names)


def _kept_out(builder: PlanBuilder, request: Request, scope: set[int] | None, given_up: set[int] | None) -> set[int]:
    """Return the nodes that displayed results reach which stay in `Out`: the user may have no other name for them."""
    live = builder.live()
    asked_for = set() if scope is None else leading_to(builder.graph, scope, builder.cut, live)
    kept: set[int] = set()
    for number, root in enumerate(builder.graph.roots):
        if root.kind == "out" and number not in builder.gone:
            may_go = (scope is None or asked_for & {*root.nodes}) and _may_drop(builder, root.nodes, live, given_up)
            may_go = may_go or (request.everything and _is_made_of(builder, root.nodes, live, given_up or set()))
            if root.label in request.keep or not may_go:
                kept |= builder.below(root.nodes, blocked=kept)
    return kept


def _may_drop(builder: PlanBuilder, entries: tuple[int, ...], live: set[int], given_up: set[int] | None) -> bool:
    """Say whether a displayed result may be forgotten.

    By what it reaches, not by its type: it must lead to an experiment (or to a given-up object) that no name needs, and to
    no loose data (a tensor, an array) besides, which could be the user's only copy. A few tensors of a part of an object that
    has the experiment are part of it: the tables in the scheduler of a pipeline.
    """
    if live.issuperset(entries):
        return False
    if given_up is not None and given_up.issuperset(entries):
        return True
    graph = builder.graph
    on_the_way, experiments = set[int](), set[int]()
    todo = [node for node in entries if node not in live]
    while todo:
        node = todo.pop()
        if graph.nodes[node].kind in EXPERIMENT_KINDS:
            experiments.add(node)
        elif node not in on_the_way:
            on_the_way.add(node)
            todo += [child for child in graph.nodes[node].children if child not in live and (node, child) not in builder.cut]
    loose = {node for node in on_the_way if graph.nodes[node].kind in ("tensor", "data")}
    if not experiments:
        return False
    below = builder.below(experiments, blocked=live)
    return loose <= below or _is_part_of_it(graph, entries, loose - below, below)


def _is_made_of(builder: PlanBuilder, entries: tuple[int, ...], live: set[int], given_up: set[int]) -> bool:
    """Say whether a displayed result is a view of a given-up object, or was computed from it and keeps the graph."""
    graph = builder.graph
    storages = storages_of(graph, given_up)
    carriers = (number for number, node in enumerate(graph.nodes) if not storages.isdisjoint(node.storages))
    leading = leading_to(graph, carriers, builder.cut, live)
    graphs = {number for number, node in enumerate(graph.nodes) if node.kind == "graph"}
    own = builder.below(entries, blocked=live | graphs) - given_up
    return not leading.isdisjoint(entries) and leading >= {node for node in own if graph.nodes[node].storages}


def _is_part_of_it(graph: Graph, entries: tuple[int, ...], loose: set[int], below: set[int]) -> bool:
    """Say whether loose tensors are few bytes beside the experiment's, and all in parts of an object that was displayed.

    The own contents of a displayed container or object are the user's, as in `{'model': model, 'preds': preds}`.
    """
    if any(graph.nodes[node].type_name in _CONTAINERS for node in entries):
        return False
    own = set(entries)
    todo = list(entries)
    while todo:
        for child in graph.nodes[todo.pop()].children:
            if child not in own and child not in below and graph.nodes[child].type_name in (*_CONTAINERS, *_HANDLES):
                own.add(child)
                todo.append(child)
    if loose & own.union(*(graph.nodes[node].children for node in own)):
        return False
    of_experiment = storages_of(graph, below)
    nbytes = nbytes_of(graph, storages_of(graph, loose) - of_experiment)
    return nbytes <= min(MiB, nbytes_of(graph, of_experiment) // _PARTS)


def _drop_out(builder: PlanBuilder, live: set[int]) -> None:
    graph = builder.graph
    for number, root in enumerate(graph.roots):
        if root.kind != "out" or number in builder.gone or live.issuperset(root.nodes):
            continue
        refs = tuple(graph.nodes[node].ref for node in root.nodes)
        subject = f"{root.label}: {root.what}"
        action = Action(kind="out", subject=subject, participle="forgotten", nbytes=0, refs=refs, names=(root.label,))
        builder.add(action, {number})


def _drop_caches(builder: PlanBuilder, live: set[int], given_up: set[int] | None) -> None:
    """Forget copies that only their owner's cache still holds: a script's globals, values that `%store` wrote, figures."""
    graph = builder.graph
    leading = _leading_to_memory(builder, live, given_up) if any(root.kind == "cache" for root in graph.roots) else set()
    for number, root in enumerate(graph.roots):
        if root.kind == "cache" and not leading.isdisjoint(root.nodes):
            refs = tuple(graph.nodes[node].ref for node in root.nodes)
            builder.add(
                Action(
                    kind="cache",
                    subject=root.label,
                    participle="broken" if root.cache == "cycle" else "forgotten",
                    nbytes=0,
                    detail=root.what,
                    refs=refs,
                    names=(root.label,),
                    cache=root.cache,
                ),
                {number},
            )


def _release_error(builder: PlanBuilder, live: set[int], given_up: set[int] | None, request: Request) -> None:
    """Release the variables in the frames of the last error; the frames stay, so `%tb` and `%debug` work."""
    graph = builder.graph
    for number, root in enumerate(graph.roots):
        if root.kind != "error" or root.label in request.keep:
            continue
        reached = builder.below(root.nodes) - live
        if root.label == DEBUGGER:
            if not request.only_error and (given_up is None or reached & given_up):
                subject = f"{DEBUGGER}: {root.what}"
                builder.add(Action(kind="debugger", subject=subject, participle="forgotten", nbytes=0), {number})
            continue
        shell = shell_of(graph, root.nodes) & reached
        parts = released_parts(graph, shell, _leading_to_memory(builder, live | shell, given_up))
        if parts.cut:
            what = f"last error: {counted(len(parts.names), 'variable')} of {counted(len(parts.owners), 'frame')}"
            detail = DEBUGGERS + " still work, with stand-ins"
            builder.add(parts.action("error", what, detail), cut=parts.cut)


def _leading_to_memory(builder: PlanBuilder, blocked: Set[int], given_up: set[int] | None) -> set[int]:
    """Return the nodes that lead to memory or an experiment, given up where there are targets, not through `blocked`."""
    nodes = builder.graph.nodes
    goals = (n for n, node in enumerate(nodes) if node.storages or node.kind in EXPERIMENT_KINDS)
    return leading_to(builder.graph, (n for n in goals if given_up is None or n in given_up), builder.cut, blocked)
