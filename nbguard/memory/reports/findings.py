"""Findings, one sentence on each thing that stands out, with the command that acts on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from nbguard.memory.cleanup.figures import errors_of_names, handles, holdings_of, release_of_root
from nbguard.memory.cleanup.plan.optional_steps import held_by_errors, idle_workers, words_on_kept_error
from nbguard.memory.cleanup.plan.parking import default_plan, parked_findings, pins_of
from nbguard.memory.cleanup.plan.plan import Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.cleanup.plan.promises import promised
from nbguard.memory.core import advice
from nbguard.memory.core.advice import Advice, Finding, least_shown
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import DeviceFacts, Facts, Root
from nbguard.memory.core.pinning import HolderPins
from nbguard.memory.core.references.holders import Holder, idle_gradients, zero_gradients_of
from nbguard.memory.core.references.owner_sets import bits_of, contents_of, owners_of_nodes, owners_of_storages
from nbguard.memory.core.references.releases import detached
from nbguard.memory.core.requests import pool_findings
from nbguard.memory.core.simulated import TRACKED
from nbguard.memory.out_of_memory.card import out_of_memory
from nbguard.units import MiB, counted, format_bytes

_WORTH_SAYING = 0.05
"""Share of the bytes held below which a finding is not worth a line."""

_WORTH_NAMING = 0.3
"""Share of the stranded bytes that one holder must strand by itself to be named."""

_NAMED = 3
"""Holders that a finding on objects left out names."""

_TOGETHER = 5
"""Names at most that one line detaches."""

_COLLECTED = frozenset({"list", "tuple", "set", "dict", "deque", "defaultdict", "OrderedDict"})
"""Containers that code fills bit by bit."""


def _least(facts: Facts) -> int:
    """Return the least bytes of a finding that is worth a line."""
    total = sum(storage.nbytes for storage in facts.graph.storages)
    return max(least_shown(total), int(_WORTH_SAYING * total))


def find(analysis: Analysis) -> tuple[Finding, ...]:
    """Return the findings of a scan."""
    facts, plan = analysis.facts, analysis.once(default_plan)
    rows = tuple(holder for holder, _ in analysis.once(holdings_of))
    kept = tuple(_handles(analysis))
    rules = (
        out_of_memory(analysis),
        _stale(facts, plan),
        parked_findings(facts),
        _graphs(facts, rows),
        _left_out(facts, rows),
        _unread(facts),
        kept,
        _without_a_name(facts, rows, kept),
        _rest_of_models(facts, rows),
        _kept_errors(facts, analysis.once(errors_of_names)),
        _kept_output(facts, rows, plan),
        idle_workers(facts),
        _stranded(analysis),
        (finding for device in analysis.devices for finding in pool_findings(facts, device.facts)),
        (finding for device in facts.devices for finding in _library_pools(device)),
        _gradients(facts),
        _outside(facts),
        _autocast(facts),
        _frozen(facts),
    )
    return tuple(finding for rule in rules for finding in rule)


def _stale(facts: Facts, plan: Plan) -> Iterator[Finding]:
    if plan.promised >= least_shown(sum(storage.nbytes for storage in facts.graph.storages)):
        cleanup = advice.release_stale(plan.promised)
        words = (
            f"{format_bytes(plan.promised)} is stale: " + cleanup.code + " frees it (see it first: " + advice.PLAN.code + ")"
        )
        yield Finding("stale", words, cleanup)


def _graphs(facts: Facts, rows: tuple[Holder, ...]) -> Iterator[Finding]:
    """Name variables that keep autograd graphs: bytes they reach through a graph only, and that nothing else holds."""
    graph = facts.graph
    nodes = {n for n, node in enumerate(graph.nodes) if node.kind == "graph"}
    worth = _least(facts)
    named = [holder for holder in rows if holder.kind == "name"] if nodes else []
    entries = [[node for root in holder.roots for node in graph.roots[root].nodes] for holder in named]
    everything = [node for root in graph.roots for node in root.nodes]
    without = owners_of_nodes(graph, [*entries, everything], blocked=nodes)
    kept = Counter[int]()  # bytes by the set of names that reach them
    whole = owners_of_storages(graph, owners_of_nodes(graph, entries))
    for storage, owners, apart in zip(graph.storages, whole, owners_of_storages(graph, without), strict=True):
        if not apart:
            kept[owners] += storage.nbytes
    keepers: dict[int, _Keeper] = {}
    with_graph = {n for n, node in enumerate(graph.nodes) if node.kind == "tensor" and not nodes.isdisjoint(node.children)}
    for number, holder in enumerate(named):
        nbytes = sum(size for owners, size in kept.items() if owners >> number & 1)
        if nbytes < worth or graph.nodes[min(entries[number])].kind == "learner":
            continue
        heads = {n for n in with_graph if without[n] >> number & 1}
        heads -= {child for head in heads for child in graph.nodes[head].children}  # a view's base is not one more
        if heads:
            many = counted(len(heads), "autograd graph") if len(heads) > 1 else "an autograd graph"
            least = "at least " if holder.at_least else ""
            keeps = f"{holder.label} keeps {many} alive ({least}{format_bytes(nbytes)}): "
            root = graph.roots[holder.roots[0]]
            line = detached(graph, root)
            freed = promised(facts, (line,)) if line.command else None
            keepers[number] = _Keeper(root=root, keeps=keeps, nbytes=nbytes, line=replace(line, frees=freed or None))
    yield from _graphs_of(facts, keepers, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keeper:
    """A name that keeps autograd graphs."""

    root: Root
    keeps: str  # the beginning of the sentence
    nbytes: int  # that nothing but graphs keeps
    line: Advice  # detaches it, and says the bytes that it frees; `NONE` if no line can


def _graphs_of(facts: Facts, keepers: Mapping[int, _Keeper], kept: Mapping[int, int]) -> Iterator[Finding]:
    """Yield a finding for each name, or one for names whose common graph none of them frees alone.

    `kept`: the bytes by the set of names, as of their numbers, that reach them.
    """
    little = sum(1 << number for number, keeper in keepers.items() if 2 * (keeper.line.frees or 0) < keeper.nbytes)
    shared = {owners & little for owners in kept}
    told = 0
    for number in keepers:
        if told >> number & 1:
            continue
        group = _connected(1 << number, shared) if little >> number & 1 else 1 << number
        told |= group
        together = [keepers[each] for each in bits_of(group)]
        nbytes = sum(size for owners, size in kept.items() if owners & group)
        line = _detached_together(facts, together) if 1 < len(together) <= _TOGETHER else advice.NONE
        if not line.frees or 2 * line.frees < nbytes:
            yield from (_graph_finding(facts, keeper) for keeper in together)
            continue
        *names, last = (each.root.label for each in together)
        keep = f"{', '.join(names)} and {last} keep an autograd graph alive ({format_bytes(nbytes)}): "
        yield Finding("graph", keep + line.code + f" frees {format_bytes(line.frees or 0)}", line)


def _connected(group: int, shared: Collection[int]) -> int:
    """Return a group of names, and all names that share bytes with one of them, and so on."""
    before = 0
    while group != before:
        before = group
        for owners in shared:
            group |= owners if owners & group else 0
    return group


def _detached_together(facts: Facts, keepers: Sequence[_Keeper]) -> Advice:
    """Return the line that detaches all of these names, with the bytes that it frees; `NONE` if one cannot be."""
    lines = [detached(facts.graph, each.root, [other.root for other in keepers]) for each in keepers]
    if not all(line.command for line in lines):
        return advice.NONE
    line = advice.detach_together(lines)
    return replace(line, frees=promised(facts, (line,)))


def _graph_finding(facts: Facts, keeper: _Keeper) -> Finding:
    """Return the finding on a name that keeps graphs, with the line that frees them, or the change that makes none."""
    root, keeps, line = keeper.root, keeper.keeps, keeper.line
    collected = facts.graph.nodes[root.nodes[0]].type_name in _COLLECTED
    append = "append `loss.item()` or `t.detach()`"
    if line.frees:
        later = f", and {append} from now on" if collected else ""
        return Finding("graph", keeps + line.code + f" frees {format_bytes(line.frees)}{later}", line)
    why = advice.why(root.label)
    how = append if collected else "compute it under `torch.no_grad()` if no backward pass follows"
    return Finding("graph", f"{keeps}{how}, or see " + why.code, why)


def _left_out(facts: Facts, rows: tuple[Holder, ...]) -> Iterator[Finding]:
    """Yield findings on objects that the scan left out, if any."""
    unwalked = facts.unwalked
    if unwalked is None:
        return
    labels = [row.label for row in rows if row.at_least and not row.is_shared and row.kind != "library"]
    whose = ", ".join(labels[:_NAMED]) + (f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else "")
    of = f" of {whose}" if whose else ""
    if unwalked.graphs_cut:
        most = f" of up to {unwalked.operations_at_most:,}" if unwalked.operations_at_most > unwalked.operations else ""
        yield Finding(
            "left_out",
            f"the autograd graph{of} is too long to be scanned safely; {unwalked.operations:,} "
            f"operations{most} were scanned, so "
            "figures are lower bounds (at least), and whatever the rest may hold counts as held",
        )
    if unwalked.tensors_left:
        yield Finding(
            "left_out",
            f"{unwalked.tensors:,} tensors were scanned, but {unwalked.tensors_left:,} more{of} were not, so figures are lower "
            "bounds (at least), and whatever the rest may hold counts as held",
        )


def _unread(facts: Facts) -> Iterator[Finding]:
    """Yield a finding on objects that could not be looked into."""
    if facts.unread:
        count = sum(unread.count for unread in facts.unread)
        types = ", ".join(unread.type_name for unread in facts.unread[:_NAMED])
        more = f" and {len(facts.unread) - _NAMED} more types" if len(facts.unread) > _NAMED else ""
        were = "was" if count == 1 else "were"
        yield Finding(
            "left_out",
            f"{counted(count, 'object')} {were} not scanned ({types}{more}) because PyTorch or the class does not say what is "
            "inside, so figures are lower bounds",
        )


def _handles(analysis: Analysis) -> Iterator[Finding]:
    """Name variables that are no experiment themselves but keep one alive: a bound method, a partial, an exception."""
    least = _least(analysis.facts)
    for handle in analysis.once(handles):
        of_it = handle.nbytes if handle.advice.frees is None else handle.advice.frees
        if handle.nbytes < least or (handle.advice.command and of_it < least):  # most of it is no experiment
            continue
        root, release = analysis.facts.graph.roots[handle.root], handle.advice
        keeps = f"{root.label} ({root.what}) keeps an experiment of {format_bytes(handle.nbytes)} alive"
        freed = release.frees
        how = "releases it" if freed in (None, handle.nbytes) else f"frees {format_bytes(freed)} of it"
        known = _known(analysis.facts, root.label)
        yield Finding(
            "handle",
            f"{keeps}: " + release.code + f" {how}{known}" if release.command else _without_way_out(keeps, release) + known,
            release,
        )


def _without_way_out(keeps: str, release: Advice) -> str:
    return keeps + ": " + release.effect if release.effect else keeps


def _without_a_name(facts: Facts, rows: tuple[Holder, ...], handles: Collection[Finding]) -> Iterator[Finding]:
    """Name the holders of memory that no name of the notebook leads to: globals of modules, registries, callbacks."""
    graph, told = facts.graph, tuple(finding.sentence for finding in handles)
    least = _least(facts)
    for holder in rows:
        root = graph.roots[holder.roots[0]]
        is_one = len(holder.roots) == 1 and holder.kind in ("module", "library") and not root.is_ending
        is_told = any(sentence.startswith(f"{root.label} (") for sentence in told)
        if not is_one or is_told or holder.retained < least:
            continue
        release = release_of_root(facts, root)
        keeps = f"{root.label} ({root.what}) holds {format_bytes(holder.retained)}"
        known = _known(facts, root.label)
        if release.frees:
            how = "frees it" if release.frees >= holder.retained else f"frees {format_bytes(release.frees)} of it"
            yield Finding("no_name", f"{keeps}: " + release.code + f" {how}{_also(release)}{known}", release)
        else:
            yield Finding("no_name", keeps + ": " + release.effect + known, release)


def _rest_of_models(facts: Facts, rows: tuple[Holder, ...]) -> Iterator[Finding]:
    """Name the tensors on a model that are not the model, such as outputs with their graphs and values of a metric."""
    least = _least(facts)
    for holder in rows:
        contents = (
            None if holder.is_shared or holder.kind != "name" else contents_of(facts.graph, facts.graph.roots[holder.roots[0]])
        )
        if contents is None or contents.rest < least:
            continue
        release = contents.advice
        frees = promised(facts, (release,)) if release.command else 0
        kind = "values that a metric collected in" if contents.is_collected else "not the model, but"
        words = f"{format_bytes(contents.rest)} on {holder.names[0]} are {kind} {contents.whereabouts}"
        if frees:
            how = "frees them" if frees >= contents.rest else f"frees {format_bytes(frees)} of them"
            yield Finding("rest", f"{words}: " + release.code + f" {how}", replace(release, frees=frees))
        elif (largest := contents.places[0]).is_container and advice.is_python(largest.path):
            why = advice.why(largest.path)
            yield Finding("rest", f"{words}; " + why.code + " names the line that empties it", why)
        else:
            yield Finding("rest", words)


def _known(facts: Facts, label: str) -> str:
    """Return the clause on a leak that the library of a root is known for; empty without one."""
    return "".join(f"; {words}" for known, words in facts.known_leaks if known == label)


def _also(line: Advice) -> str:
    return f" ({line.effect})" if "detach" in line.effect else ""


def _kept_errors(facts: Facts, errors: Mapping[str, Set[int]]) -> Iterator[Finding]:
    """Name variables, futures and tasks whose exception holds memory that nothing else needs."""
    least = _least(facts)
    for label, nodes in errors.items():
        nbytes = held_by_errors(facts.graph, nodes)
        if nbytes >= least:
            frees = plan_cleanup(facts, Request(errors=True)).promised
            yield Finding("kept_error", words_on_kept_error(label, nbytes), advice.release_errors(frees))


def _kept_output(facts: Facts, rows: tuple[Holder, ...], plan: Plan) -> Iterator[Finding]:
    """Name displayed results that nothing else holds and that a cleanup will not touch on its own."""
    dropped = {name for action in plan.actions if action.kind == "out" for name in action.names}
    least = _least(facts)
    for holder in rows:
        if holder.kind == "out" and holder.label not in dropped and holder.retained >= least:
            release = advice.release_output(holder.label)
            frees = promised(facts, (release,)) or 0
            words = f"{holder.label} ({holder.what}) is held by the output history only: " + release.code + " frees "
            yield Finding("output", words + format_bytes(frees), replace(release, frees=frees))


def _stranded(analysis: Analysis) -> Iterator[Finding]:
    for device in analysis.devices:
        stranded = device.space.stranded
        if stranded > max(_WORTH_SAYING * device.space.reserved, 20 * MiB):
            how, release = _unpin(device.once(pins_of), stranded, analysis.once(default_plan))
            yield Finding(
                "fragmentation",
                f"{format_bytes(stranded)} of {device.name} is free but stranded between live blocks (largest free block "
                f"{format_bytes(device.largest.cached)})" + how + "; " + advice.MAP.code + " shows where",
                release,
            )


def _unpin(rows: tuple[HolderPins, ...], stranded: int, plan: Plan) -> tuple[str, Advice]:
    """Return in words the holder that strands most of it by itself and the bytes that its release gives back."""
    for row in rows:
        if (row.stale or row.kind == "name") and row.stranded_alone > _WORTH_NAMING * stranded:
            release = advice.release_stale() if row.stale else advice.release_names(row.names)
            share = "all" if row.stranded_alone == stranded else format_bytes(row.stranded_alone)
            tensors, least = counted(row.blocks, "tensor"), "at least " if row.stale else ""
            pinned = f", {share} of it pinned by {row.label} ({tensors}, {format_bytes(row.nbytes)})"
            return f"{pinned}: " + release.code + f" gives {least}{format_bytes(row.gives_back)} back to the device", release
    if any(row.stale_blocks for row in rows):
        cleanup = advice.release_stale(plan.promised)
        return ": " + cleanup.code + " frees the stale ones among them", cleanup
    return ", and none of them is stale", advice.NONE


def _outside(facts: Facts) -> Iterator[Finding]:
    is_simulated = facts.tracked == TRACKED  # its report names this kernel's tensors that are not on the device
    count = 0 if is_simulated else sum(not storage.nbytes for storage in facts.graph.storages)
    if facts.changed:
        yield Finding(
            "changed", "another thread allocated or freed during this report: its rows are of slightly different times"
        )
    elif count:
        yield Finding(
            "outside",
            f"{counted(count, 'tensor lies', 'tensors lie')} outside PyTorch's allocator (another process's or library's): "
            "counted under context or others, freed by their owners",
        )


def _library_pools(device: DeviceFacts) -> Iterator[Finding]:
    """Name other libraries that keep much more of a device than their arrays use, and the line or setting against it."""
    for pool in device.library_pools:
        if pool.unused <= max(_WORTH_SAYING * pool.held, 20 * MiB):
            continue
        words = f"{pool.library} keeps {format_bytes(pool.unused)} of {device.device} for later arrays"
        if pool.release:
            release = advice.release_pool(pool.library, pool.release)
            yield Finding("library", f"{words}: " + release.code + " gives back all blocks without an array", release)
        else:
            setting = f"; with `{pool.setting}` set before it starts, it takes no more than it needs" if pool.setting else ""
            yield Finding("library", f"{words} until the kernel ends{setting}")


def _gradients(facts: Facts) -> Iterator[Finding]:
    least = 4 * _least(facts)
    for label, nbytes in idle_gradients(facts):
        if nbytes >= least:  # every fit leaves some
            zero = zero_gradients_of(facts, label, nbytes)
            yield Finding(
                "gradients",
                f"{label} keeps its gradients between fits ({format_bytes(nbytes)}): "
                + zero.code
                + " frees them, the next fit makes new ones",
                zero,
                learner=label,
            )


def _autocast(facts: Facts) -> Iterator[Finding]:
    if facts.is_autocast_on and not any(learner.is_running for learner in facts.learners):
        off = advice.end_autocast(facts.tracked)
        yield Finding(
            "autocast",
            "autocast is still on, as a mixed precision fit that failed leaves it: later code runs under it. "
            + off.code
            + " ends "
            "it, " + advice.release_stale().code + " empties its cache of weights",
            off,
        )


def _frozen(facts: Facts) -> Iterator[Finding]:
    if facts.frozen_objects > 100_000:
        yield Finding(
            "frozen",
            f"gc.freeze() hides {facts.frozen_objects:,} objects from this report: " + advice.UNFREEZE.code + " shows them",
            advice.UNFREEZE,
        )
