"""Steps of a cleanup that the user has to ask for, as they take something away that is still in use."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from nbguard.memory.cleanup.plan.builder import PlanBuilder
from nbguard.memory.cleanup.plan.last_error import released_parts, shell_of
from nbguard.memory.cleanup.plan.plan import Action
from nbguard.memory.cleanup.plan.workers import actions_on_workers, pinned_action, workers_left
from nbguard.memory.core import advice
from nbguard.memory.core.facts import Facts, Graph
from nbguard.memory.core.references.function_caches import caches_worth_emptying
from nbguard.memory.core.references.graph import (
    STALE_KINDS,
    leading_to,
    nbytes_of,
    path_text,
    reach,
    shortest_path,
    storages_of,
)
from nbguard.memory.core.references.holders import workspace_blocks
from nbguard.memory.core.references.owner_sets import owners_of_nodes
from nbguard.units import counted, format_bytes


def kept_errors(graph: Graph) -> dict[str, set[int]]:
    """Return the exceptions that the user's names lead to (a variable, a future, a task, a list of them), by name.

    An exception that a running function leads to as well is in use: it is left out.
    """
    exceptions = {n for n, node in enumerate(graph.nodes) if node.kind == "traceback" and node.type_name != "traceback"}
    exceptions -= reach(graph, (n for root in graph.roots if root.kind == "frame" for n in root.nodes))
    if not exceptions:
        return {}
    named = [root for root in graph.roots if root.kind in ("name", "module")]
    owners = owners_of_nodes(graph, [root.nodes for root in named])
    by_name = {root.label: {n for n in exceptions if owners[n] >> number & 1} for number, root in enumerate(named)}
    return {label: errors for label, errors in by_name.items() if errors}


def held_by_errors(graph: Graph, errors: Set[int]) -> int:
    """Return the bytes that only the frames of these exceptions hold, among the objects that the user's own roots lead to."""
    own = {node for root in graph.roots if root.kind not in STALE_KINDS for node in root.nodes}
    shell = shell_of(graph, errors)
    return nbytes_of(graph, storages_of(graph, reach(graph, own)) - storages_of(graph, reach(graph, own, blocked=shell)))


def release_kept_errors(builder: PlanBuilder) -> None:
    """Release the variables in frames of exceptions that the user keeps. The exceptions stay, with message and lines."""
    graph = builder.graph
    by_name = kept_errors(graph)
    shell = shell_of(graph, {n for errors in by_name.values() for n in errors})
    holding = (number for number, node in enumerate(graph.nodes) if node.storages)
    leading = leading_to(graph, holding, blocked=builder.live(blocked=shell) | shell)
    for name, errors in by_name.items():
        parts = released_parts(graph, shell_of(graph, errors), leading, builder.cut)
        if parts.cut:
            what = f"{name}: {counted(len(parts.names), 'variable')} of its exception's frames"
            detail = "the exception stays, with its message and its lines"
            builder.add(parts.action("kept_error", what, detail), cut=parts.cut)


def drop_compiled(builder: PlanBuilder) -> None:
    """Drop code that torch.compile compiled, for live models too, which compile again at their next call."""
    if any(learner.is_running for learner in builder.facts.learners):
        builder.skipped.append("compiled code stays because a running fit uses it")
    elif not builder.facts.has_compiled:
        builder.skipped.append("nothing has been compiled here (torch.compile): there is nothing to drop")
    else:
        builder.add(
            Action(
                kind="compiled",
                subject="compiled code",
                participle="dropped",
                nbytes=None,
                detail="live models compile again at their next call",
            )
        )


def empty_function_caches(builder: PlanBuilder, given_up: set[int] | None) -> None:
    """Empty the caches of functions that alone keep memory alive, or with targets only those that lead to these."""
    graph = builder.graph
    stale = {number for number, root in enumerate(graph.roots) if root.kind in STALE_KINDS}  # the steps after this one
    caches = caches_worth_emptying(graph, builder.gone | stale, builder.cut, given_up)
    if not caches:
        builder.skipped.append("no cache of a function (lru_cache) keeps memory alive by itself: there is nothing to empty")
    for node, edges in caches.items():
        builder.add(
            Action(
                kind="function_cache",
                subject=_cache_label(graph, node),
                participle="emptied",
                nbytes=0,
                detail="the function computes again at its next call; this cannot be undone",
                refs=(graph.nodes[node].ref,),
            ),
            cut=edges,
        )


def _cache_label(graph: Graph, node: int) -> str:
    """Return how one writes the function, from the root that tells most."""
    ways = ((root, shortest_path(graph, root, {node})) for root in graph.roots if root.kind not in STALE_KINDS)
    texts = [path_text(graph, root, way) for root, way in ways if way]
    return f"cache of {min(texts, key=len)}" if texts else "cache of a function"


def end_workers(builder: PlanBuilder, given_up: set[int] | None) -> None:
    """End the workers of DataLoaders that nothing runs over; with targets, of DataLoaders that the targets lead to."""
    for action, cut in actions_on_workers(builder.facts, given_up):
        builder.add(action, cut=cut)
    builder.skipped += workers_left(builder.facts, given_up)


def give_pinned_memory_back(builder: PlanBuilder) -> None:
    """Give page-locked host memory back that nothing uses."""
    if (pinned := pinned_action(builder.facts)) is not None:
        builder.add(pinned)


@dataclass(frozen=True, slots=True)
class Workspaces:
    """The workspaces that a cleanup may clear: addresses by device, and the step that does it. `why_not` says why none."""

    nbytes: int = 0
    addresses: dict[str, frozenset[int]] = field(default_factory=dict)
    why_not: str = ""

    @property
    def action(self) -> Action:
        """Return the step that clears them."""
        return Action(
            kind="workspaces",
            subject="cuBLAS workspaces",
            participle="cleared",
            nbytes=self.nbytes,
            detail="the next matrix product makes new ones",
        )


def clearable_workspaces(facts: Facts) -> Workspaces:
    """Return the workspaces that may go now.

    None while a function runs, which may be about to use one, nor where a CUDA graph is: it may have one recorded, and a
    replay would write to memory that is no longer its own.
    """
    by_device = {
        device.device: workspace_blocks(facts.graph, device) for device in facts.devices if device.segments and device.workspace
    }
    nbytes = sum(block.size for blocks in by_device.values() for block in blocks)
    if not nbytes:
        return Workspaces()
    if any(root.kind == "frame" for root in facts.graph.roots) or any(learner.is_running for learner in facts.learners):
        return Workspaces(why_not="cuBLAS workspaces stay because a running function may use them")
    if facts.pools or any(segment.is_private for device in facts.devices for segment in device.segments or ()):
        return Workspaces(why_not="cuBLAS workspaces stay because a CUDA graph may have recorded them")
    return Workspaces(nbytes, {device: frozenset(block.address for block in blocks) for device, blocks in by_device.items()})


def clear_workspaces(builder: PlanBuilder) -> Workspaces:
    """Clear the workspaces of cuBLAS, where that is safe, and return them."""
    workspaces = clearable_workspaces(builder.facts)
    if workspaces.nbytes:
        builder.add(workspaces.action)
    elif workspaces.why_not:
        builder.skipped.append(workspaces.why_not)
    return workspaces


def words_on_kept_error(label: str, nbytes: int) -> str:
    """Return the sentence on a name whose exception holds memory."""
    return (
        f"{label} keeps an exception whose frames hold {format_bytes(nbytes)}: "
        + advice.release_errors().code
        + " releases them "
        "and keeps the exception"
    )
