"""Findings: what stands out, one sentence each, with the command that acts on it."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.core.facts import Facts, Root, Segment
from nbguard.core.finding import Finding
from nbguard.core.fragmentation import by_pool, fragmentation
from nbguard.core.gradients import idle_gradients, zero_grad
from nbguard.core.oom import out_of_memory
from nbguard.core.ownership import Holder, holders, nbytes_of, reach, storages_of
from nbguard.core.plan import Plan
from nbguard.core.pools import pools_in_use
from nbguard.units import format_bytes

_WORTH_SAYING = 0.05
"""Share of the bytes held below which a finding is not worth a line."""


def find(facts: Facts, plan: Plan) -> tuple[Finding, ...]:
    """Return what stands out in `facts`; `plan` is what a default cleanup would do."""
    rows = holders(facts.graph)
    rules = (
        out_of_memory(facts, plan, rows),
        _stale(plan),
        _graphs(facts, rows),
        _handles(facts),
        _kept_output(facts, rows, plan),
        _workers(facts),
        _stranded(facts),
        _gradients(facts),
        _outside(facts),
        _autocast(facts),
        _frozen(facts),
    )
    return tuple(finding for rule in rules for finding in rule)


def _stale(plan: Plan) -> Iterator[Finding]:
    if plan.promised:
        yield Finding(
            "stale",
            f"{format_bytes(plan.promised)} is stale: `%reset_gpu` frees it (see it first: `%reset_gpu --dry-run`)",
            "%reset_gpu",
        )


def _graphs(facts: Facts, rows: tuple[Holder, ...]) -> Iterator[Finding]:
    """Name variables that keep autograd graphs: bytes they reach through a graph only, and that nothing else holds."""
    graph = facts.graph
    nodes = {n for n, node in enumerate(graph.nodes) if node.kind == "graph"}
    total = sum(storage.nbytes for storage in graph.storages)
    for holder in rows:
        if holder.kind != "name" or not nodes:
            continue
        entries = {node for root in holder.roots for node in graph.roots[root].nodes}
        if graph.nodes[min(entries)].kind == "learner":
            continue
        all_of_it = reach(graph, entries)
        without = reach(graph, entries, blocked=nodes)
        kept = nbytes_of(graph, storages_of(graph, all_of_it) - storages_of(graph, without))
        with_graph = {n for n in all_of_it if graph.nodes[n].kind == "tensor" and nodes.intersection(graph.nodes[n].children)}
        heads = with_graph & without
        heads -= {child for head in heads for child in graph.nodes[head].children}  # a view's base is not one more
        if heads and kept > _WORTH_SAYING * total:
            many = f"{len(heads)} autograd graphs" if len(heads) > 1 else "an autograd graph"
            label = holder.label
            yield Finding(
                "graph",
                f"{label} keeps {many} alive ({format_bytes(kept)}): append `loss.item()` or `t.detach()`, "
                f"or see `%gpumem why {_first(label)}`",
                f"%gpumem why {_first(label)}",
            )


def _handles(facts: Facts) -> Iterator[Finding]:
    """Name variables that are no experiment themselves but keep one alive: a bound method, a partial, an exception."""
    graph = facts.graph
    learners_named = {
        node
        for root in graph.roots
        if root.kind in ("name", "module")
        for node in root.nodes
        if graph.nodes[node].kind == "learner"
    }
    named = reach(graph, learners_named)
    for root in graph.roots:
        if root.kind != "name" or not _is_handle(facts, root):
            continue
        reached = reach(graph, root.nodes)
        learners = {n for n in reached if graph.nodes[n].kind in ("learner", "model")}
        held = nbytes_of(graph, storages_of(graph, reached))
        if held and learners and not named >= learners:
            yield Finding(
                "handle",
                f"{root.label} ({root.what}) keeps an experiment of {format_bytes(held)} alive: "
                f"`%reset_gpu {root.label}` lets it go",
                f"%reset_gpu {root.label}",
            )


def _is_handle(facts: Facts, root: Root) -> bool:
    kinds = {facts.graph.nodes[node].kind for node in root.nodes}
    return kinds <= {"object", "traceback", "code", "cell"} and not root.what.startswith(("list", "dict", "tuple", "set"))


def _kept_output(facts: Facts, rows: tuple[Holder, ...], plan: Plan) -> Iterator[Finding]:
    """Name displayed results that nothing else holds and that a cleanup will not touch on its own."""
    dropped = {name for action in plan.actions if action.kind == "out" for name in action.names}
    total = sum(storage.nbytes for storage in facts.graph.storages)
    for holder in rows:
        if holder.kind == "out" and holder.label not in dropped and holder.retained > _WORTH_SAYING * total:
            yield Finding(
                "output",
                f"{holder.label} ({holder.what}) is held by the output history only: "
                f"`%reset_gpu {holder.label}` frees {format_bytes(holder.retained)}",
                f"%reset_gpu {holder.label}",
            )


def _workers(facts: Facts) -> Iterator[Finding]:
    graph = facts.graph
    for root in graph.roots:
        kinds = {graph.nodes[node].kind for node in root.nodes}
        if root.kind == "name" and kinds == {"iterator"} and "worker" in root.what:
            count = root.what.rpartition("· ")[2]
            yield Finding(
                "workers",
                f"{root.label} keeps {count} running: `%reset_gpu {root.label}` ends them",
                f"%reset_gpu {root.label}",
            )


def _stranded(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        if device.segments:
            found = fragmentation(device.segments, in_use=pools_in_use(facts))
            if found.stranded > _WORTH_SAYING * found.reserved and found.stranded > 20 * 1024**2:
                yield Finding(
                    "fragmentation",
                    f"{format_bytes(found.stranded)} of {device.device} is free but stranded between live blocks (largest free "
                    f"piece {format_bytes(_largest_free(device.segments))}): `%reset_gpu` frees what is stale among them",
                    "%reset_gpu",
                )


def _largest_free(segments: tuple[Segment, ...]) -> int:
    """Return the largest free block that an ordinary request could get."""
    return max((space.largest_free for key, space in by_pool(segments).items() if key.pool == (0, 0)), default=0)


def _outside(facts: Facts) -> Iterator[Finding]:
    count = sum(not storage.nbytes for storage in facts.graph.storages)
    if count:
        yield Finding(
            "outside",
            f"{count} tensor{'s lie' if count > 1 else ' lies'} outside PyTorch's allocator (another process's or library's): "
            "counted under context or others, freed by whoever made them",
            "",
        )


def _gradients(facts: Facts) -> Iterator[Finding]:
    total = sum(storage.nbytes for storage in facts.graph.storages)
    for label, nbytes in idle_gradients(facts):
        if nbytes > 4 * _WORTH_SAYING * total:  # every fit leaves some
            yield Finding(
                "gradients",
                f"{label} keeps its gradients between fits ({format_bytes(nbytes)}): `{zero_grad(label)}` frees them, the next "
                "fit makes new ones",
                zero_grad(label),
            )


def _autocast(facts: Facts) -> Iterator[Finding]:
    if facts.is_autocast_on and not any(learner.is_running for learner in facts.learners):
        off = f"torch.set_autocast_enabled('{facts.tracked}', False)"
        yield Finding(
            "autocast",
            f"autocast is still on, as a mixed precision fit that failed leaves it: what runs next would too. `{off}` ends it, "
            "`%reset_gpu` empties its cache of weights",
            off,
        )


def _frozen(facts: Facts) -> Iterator[Finding]:
    if facts.frozen_objects > 100_000:
        yield Finding(
            "frozen",
            f"gc.freeze() hides {facts.frozen_objects:,} objects from this report: `gc.unfreeze()` shows them",
            "gc.unfreeze()",
        )


def _first(label: str) -> str:
    return label.partition(" = ")[0]
