"""The plan of a parking, with the storages of an experiment that move to host memory, and the reasons why others stay.

Nothing is freed for good and no name changes: a parked tensor is the same Python object with its data elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from nbguard.errors import TargetError
from nbguard.memory.cleanup.figures import holdings_on
from nbguard.memory.cleanup.plan.plan import Action, Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core import advice
from nbguard.memory.core.advice import Finding, is_python, least_shown
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis, Part, parts_of
from nbguard.memory.core.facts import EXPERIMENT_KINDS, Facts, Graph, Root, Target
from nbguard.memory.core.pinning import BlockHolders, HolderPins, pins_of_holders
from nbguard.memory.core.references.graph import (
    BASE,
    GRADIENT,
    GRAPH,
    STALE_KINDS,
    nbytes_of,
    path_text,
    reach,
    shortest_path,
    storages_of,
)
from nbguard.memory.core.references.holders import Holder, all_holders
from nbguard.memory.core.references.owner_sets import bits_of, owners_of_nodes, owners_of_storages
from nbguard.memory.core.requests import doubtful_pools, given_back, pools_in_use
from nbguard.render.result import Result
from nbguard.texts import joined
from nbguard.units import format_bytes

# --- The default cleanup of an analysis, and the holders of each device, which are stale if it would free them.
#
# Questions for `Analysis.once` and `DeviceAnalysis.once`: `analysis.once(default_plan)`.


def default_plan(analysis: Analysis) -> Plan:
    """Return the plan of `%reset_gpu` without arguments."""
    return plan_cleanup(analysis.facts, Request())


def holders_of(device: DeviceAnalysis) -> tuple[Holder, ...]:
    """Return every holder of bytes on a device, the largest first: they add up to the bytes allocated there."""
    analysis = device.analysis
    return all_holders(analysis.facts, device.facts, device.once(holdings_on), analysis.once(default_plan).storages)


def parts_of_device(device: DeviceAnalysis) -> tuple[Part, ...]:
    """Return the parts of a device's memory: allocated are the bytes of its holders."""
    allocated = sum(holder.retained for holder in device.once(holders_of))
    return parts_of(device.facts, allocated, device.analysis.facts.pid, device.analysis.pools_in_use, device.space)


def block_holders_of(device: DeviceAnalysis) -> BlockHolders:
    """Return the holder of each live block of a device."""
    analysis = device.analysis
    return BlockHolders.of(analysis.facts, device.facts, device.holdings, analysis.once(default_plan).storages)


def pins_of(device: DeviceAnalysis) -> tuple[HolderPins, ...]:
    """Return the bytes of a device's segments that each holder pins, first the holder that alone gives most back."""
    return pins_of_holders(device.analysis.facts.graph, device.units, device.once(block_holders_of))


_Reason = TypeVar("_Reason")
_TASKS = ("coroutine", "async_generator")
_PART_OF_IT = ("model", "optimizer")
_PARKED_WHOLE = ("learner", "model", "optimizer")
_USERS = EXPERIMENT_KINDS | {"code"}
_NOT_OF_IT = ("frame", "traceback", "graph")
"""Kinds of objects behind which memory is not needed: half the notebook, or a graph, whose backward pass can wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unparked(Result):
    """Tensors that `--unpark` brought back."""

    kind: ClassVar[str] = "unparked"
    view: ClassVar[str] = "nbguard.memory.cleanup.plan.plan_view:unparked_blocks"

    names: tuple[str, ...]  # that they were parked under
    nbytes: int  # bytes brought back
    tensors: int  # number of tensors brought back
    devices: tuple[str, ...]  # devices that they are on again
    left: tuple[tuple[str, int, str], ...] = ()  # (name, bytes, why) of the rest, which is still parked


def plan_parking(facts: Facts, targets: Iterable[Target], fixed: Mapping[int, str]) -> Plan:
    """Return the plan of parking `targets`. `fixed` says of storages (by number) why they cannot be moved.

    Raises:
        TargetError: a target is in use by code that runs now, or there is nothing to move.
    """
    targets = tuple(targets)
    _refuse_cuda_graphs(facts)
    graph, taken, actions = facts.graph, set[int](), []
    entries = {target.text: _entries(graph, target) for target in targets}
    below = {text: _below(graph, nodes) for text, nodes in entries.items()}
    together = {node for nodes in below.values() for node in nodes}
    needed = _needed_by_others(graph, entries, together)
    stays = dict(fixed) | _in_wrappers(graph) | _in_private_pools(facts)
    stays |= dict(_gradients_of(graph, together, stays))
    skipped: dict[str, set[int]] = {}
    for text, nodes in below.items():
        wanted = storages_of(graph, nodes) - taken
        _refuse_running(facts, text, nodes)
        for storage in wanted:
            reason = stays.get(storage) or needed.get(storage)  # parking its other users as well would not help
            if reason:
                skipped.setdefault(reason, set()).add(storage)
        moved = {n for n in wanted if n not in needed and n not in stays and graph.storages[n].nbytes}
        taken |= moved
        if moved:
            actions.append(_action(facts, text, nodes, moved))
    if not actions:
        raise TargetError(_nothing(facts, [target.text for target in targets], skipped))
    storages = frozenset(taken)
    words = tuple(f"{format_bytes(nbytes_of(graph, numbers))} stays: " + reason for reason, numbers in skipped.items())
    promised = nbytes_of(graph, storages)
    back = given_back(facts, storages)
    return Plan(
        request=Request(targets=targets),
        actions=tuple(actions),
        storages=storages,
        promised=promised,
        reserved=None if back is None else back.released,
        reserved_at_most=None if back is None else back.at_most,
        stranded=None if back is None else back.stranded,
        skipped=words,
        pools=pools_in_use(facts),
        doubtful=doubtful_pools(facts),
    )


def _entries(graph: Graph, target: Target) -> set[int]:
    if target.root:
        return {node for root in graph.roots if root.label == target.root for node in root.nodes}
    return {number for number, node in enumerate(graph.nodes) if node.ref == target.value}


def _below(graph: Graph, entries: Collection[int]) -> set[int]:
    """Return the nodes that belong to the targets: none that only their exceptions lead to, which is half the notebook."""
    return reach(graph, entries, blocked={n for n, node in enumerate(graph.nodes) if node.kind in ("frame", "traceback")})


def _refuse_cuda_graphs(facts: Facts) -> None:
    keepers = {node for pool in facts.pools for node in pool.keepers if facts.graph.nodes[node].type_name == "CUDAGraph"}
    for root in facts.graph.roots if keepers else ():
        way = shortest_path(facts.graph, root, keepers)
        if way:
            text = path_text(facts.graph, root, way, shorten=4)
            raise TargetError(
                f"the CUDA graph {text} replays with the addresses it was captured with: free it first, then park"
            )


def _refuse_running(facts: Facts, text: str, nodes: set[int]) -> None:
    """Refuse targets that a fit, another thread or a waiting task works on: its tensors must not move meanwhile.

    A function of this thread that holds it is waiting for the parking to return, and finds the same names afterwards.
    """
    graph = facts.graph
    if any(learner.is_running and learner.node in nodes for learner in facts.learners):
        raise TargetError(f"a fit is running on {text}; park it when the fit ends")
    wanted = storages_of(graph, nodes)
    for root in graph.roots:
        if root.thread and wanted & storages_of(graph, reach(graph, root.nodes)):
            raise TargetError(f"{text} is in use by {root.label}; park it when that ends")
    for number, node in enumerate(graph.nodes):
        if node.type_name in _TASKS and number not in nodes and wanted & storages_of(graph, reach(graph, (number,))):
            raise TargetError(f"a waiting {node.type_name} uses {text}; park it when that ends")


def _needed_by_others(graph: Graph, entries: Mapping[str, set[int]], together: set[int]) -> dict[int, str]:
    """Return the reason why storages stay that something else needs, which goes on working: a name, a Learner, an optimizer.

    Another name of the thing itself, or of a model or an optimizer in it, needs it no more than the one that is parked: a call
    of a parked model says that it is parked.
    """
    whole = {node for node in together if graph.nodes[node].kind in _PARKED_WHOLE}
    known = whole.union(*entries.values())
    wanted = storages_of(graph, together)
    owners = owners_of_storages(graph, owners_of_nodes(graph, [root.nodes for root in graph.roots]))
    others = {number for storage in wanted for number in bits_of(owners[storage])}
    needing: dict[int, list[str]] = {}
    for root in (graph.roots[number] for number in sorted(others) if graph.roots[number].kind not in STALE_KINDS):
        for node, storages in _needing(graph, root, together, known, whole).items():
            name = _name_of(graph, root, node)
            for storage in storages & wanted:
                if name not in needing.setdefault(storage, []):
                    needing[storage].append(name)
    for gradient, names in [*_gradients_of(graph, together, needing)]:
        needing[gradient] = [*dict.fromkeys((*names, *needing.get(gradient, ())))]
    return {storage: _needed(names, entries) for storage, names in needing.items()}


def _needing(graph: Graph, root: Root, together: set[int], known: set[int], whole: set[int]) -> dict[int, set[int]]:
    """Return the storages that a root needs outside of the parked objects, by the experiment that does, or the root's entry.

    A container may have `known` objects, a function models and the like that are parked as a `whole`, an experiment neither.
    """
    is_own = root.kind in ("name", "module")  # of the other roots, only Learners need to go on working
    needs: dict[int, set[int]] = {}
    todo: list[tuple[int, int | None]] = [(node, None) for node in root.nodes]
    seen = set(todo)
    while todo:
        node, user = todo.pop()
        kind = graph.nodes[node].kind
        is_in_code = user is not None and graph.nodes[user].kind == "code"
        if kind in _NOT_OF_IT or node in (known if user is None else whole if is_in_code else ()):
            continue
        if kind in _USERS and node not in together and (user is None or is_in_code) and (is_own or kind == "learner"):
            user = node
        if is_own or user is not None:
            needs.setdefault(root.nodes[0] if user is None else user, set()).update(graph.nodes[node].storages)
        more = {(child, user) for child in graph.nodes[node].children} - seen
        seen |= more
        todo += more
    return needs


def _gradients_of(graph: Graph, together: Iterable[int], reasons: Mapping[int, _Reason]) -> Iterator[tuple[int, _Reason]]:
    """Yield the gradients that stay, with the reason why their parameter does: one that is used meanwhile adds to its own."""
    for node in (graph.nodes[number] for number in together):
        reason = next((reasons[storage] for storage in node.storages if storage in reasons), None)
        if reason is not None:
            grads = (child for child, label in node.references if label == GRADIENT)
            yield from ((storage, reason) for storage in storages_of(graph, grads) if storage not in node.storages)


def _name_of(graph: Graph, root: Root, node: int) -> str:
    """Return how one writes the thing that needs memory: the root, or an experiment behind it that can be written."""
    text = path_text(graph, root, shortest_path(graph, root, {node}))
    return text if is_python(text) else root.label


def _needed(names: list[str], targets: Iterable[str]) -> str:
    line = advice.park([*targets, *names])
    how = "both" if len(names) == 1 else "all"
    if not all(map(is_python, names)):
        return f"{', '.join(names)} {'needs' if len(names) == 1 else 'need'} it too"
    return f"{' and '.join(names)} {'needs' if len(names) == 1 else 'need'} it too (park {how}, " + line.code + ", or neither)"


def _in_wrappers(graph: Graph) -> dict[int, str]:
    """Return the storages inside tensors that have none of their own: sparse ones, and subclasses that wrap others."""
    inside = {
        child
        for node in graph.nodes
        if node.kind == "tensor" and not node.storages
        for child, label in node.references
        if label not in (GRAPH, BASE, GRADIENT) and graph.nodes[child].kind == "tensor"
    }
    return dict.fromkeys(storages_of(graph, inside), "it is part of a sparse or wrapped tensor")


def _in_private_pools(facts: Facts) -> dict[int, str]:
    places = {
        (device.device, block.address)
        for device in facts.devices
        for segment in device.segments or ()
        if segment.is_private
        for block in segment.blocks
    }
    numbers = (n for n, storage in enumerate(facts.graph.storages) if (storage.device, storage.address) in places)
    return dict.fromkeys(numbers, "it is in a pool of its own (CUDA graph, MemPool)")


def _action(facts: Facts, text: str, nodes: set[int], moved: set[int]) -> Action:
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in _parts(facts.graph, nodes, moved))
    where = "host memory" if facts.tracked != "cpu" else "a file, as there is no GPU here"
    detail = f"{parts} → {where}; " + advice.unpark((text,)).code + " brings it back"
    return Action(
        kind="park",
        subject=text,
        participle="parked",
        nbytes=nbytes_of(facts.graph, moved),
        detail=detail,
        refs=tuple(sorted(moved)),
        names=(text,),
    )


def _parts(graph: Graph, nodes: set[int], moved: set[int]) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of the parked parts in the words of a training loop: gradients, model; the bytes add up."""
    left = set(moved)
    gradients = {child for n in nodes for child, label in graph.nodes[n].references if label == GRADIENT}
    starts = [("gradients", gradients)]
    starts += [(kind, {n for n in nodes if graph.nodes[n].kind == kind}) for kind in _PART_OF_IT]
    for name, start in starts:
        part = left & storages_of(graph, start if name == "gradients" else _below(graph, start))
        left -= part
        if part:
            yield name, nbytes_of(graph, part)
    if left:
        yield ("tensors" if len(left) == len(moved) else "other tensors"), nbytes_of(graph, left)


def _nothing(facts: Facts, texts: list[str], skipped: Mapping[str, set[int]]) -> str:
    names = " ".join(texts)
    amounts = {reason: format_bytes(nbytes_of(facts.graph, numbers)) for reason, numbers in skipped.items()}
    reasons = joined("; ", (f"{nbytes}: " + reason for reason, nbytes in amounts.items()))
    if reasons:
        return f"{names} cannot be parked. " + reasons
    parked = ", ".join(dict.fromkeys(fact.label for fact in facts.parked))
    hint = f"; parked now: {parked}" if parked else ""
    return f"{names} holds no memory of {facts.tracked} that could be parked{hint}"


def parked_findings(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each name with much parked memory, with the command that brings it back."""
    by_label: dict[str, int] = {}
    for fact in facts.parked:
        by_label[fact.label] = by_label.get(fact.label, 0) + fact.nbytes
    where = "host memory" if facts.tracked != "cpu" else "files"
    least = least_shown(sum(storage.nbytes for storage in facts.graph.storages))
    for label, nbytes in by_label.items():
        if nbytes < least:
            continue
        back = advice.unpark((label,))
        yield Finding(
            "parked", f"{label} is parked ({format_bytes(nbytes)} in {where}): " + back.code + " brings it back", back
        )
