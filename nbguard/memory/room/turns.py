"""Models that take turns on a device, as the facts of a scan show them, and the outcome of turns, as data and in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nbguard.errors import TargetError
from nbguard.memory.cleanup.plan.parking import plan_parking
from nbguard.memory.core import advice
from nbguard.memory.core.facts import Facts, Graph, Target
from nbguard.memory.core.references.graph import BASE, GRADIENT, GRAPH, nbytes_of, path_text, reach, shortest_paths, storages_of
from nbguard.render.html import Block, Line, Table, TableRow
from nbguard.render.result import Result
from nbguard.texts import joined
from nbguard.units import counted, format_bytes

_NO_CODE = frozenset({"OptimizedModule", "RecursiveScriptModule", "ScriptModule", "TopLevelTracedModule", "TracedModule"})
"""Classes of modules whose compiled code stands for the model."""
COMPILED = "its code is compiled"
_IN_A_GRAPH = "an autograd graph of it is alive"
_UNUSED = "its gradients wait for a step of its optimizer"
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Taker:
    """A model on the device, with its gradients and the state of its optimizer, or models that share memory."""

    name: str  # as one writes it: `sdxl`, `learn`, `models['a']`
    cell: int  # number of the cell that bound its name last; 0 where it is not known
    tops: tuple[int, ...]  # ids of its outermost modules
    nodes: frozenset[int]  # its modules, optimizers and Learners in the graph
    learners: frozenset[int]  # those of them that are Learners or Trainers
    storages: frozenset[int]  # on the device, by number
    gradients: frozenset[int]  # those of them that are gradients
    nbytes: int  # of all of them


def takers_of(facts: Facts, device: str) -> tuple[Taker, ...]:
    """Return the models that have memory on a device and that a name leads to; none shares memory with another."""
    graph = facts.graph
    models = {number: _Model.of(graph, number) for number, node in enumerate(graph.nodes) if node.kind == "model"}
    inner = {part for number, model in models.items() for part in model.parts if part != number}
    groups = [_Group(tops={number}, model=model) for number, model in models.items() if number not in inner]
    for number, node in enumerate(graph.nodes):
        if node.kind == "optimizer":
            groups.append(_Group(tops=set(), model=_Model.of_optimizer(graph, number)))
    names = _names(facts, {number for number, node in enumerate(graph.nodes) if node.kind in ("model", "learner")})
    below = {n: reach(graph, (n,)) for n, node in enumerate(graph.nodes) if node.kind == "learner"}
    found = []
    for group in _merged(groups):
        learners = frozenset(n for n, nodes in below.items() if group.tops & nodes)
        named = [names[n] for n in learners & names.keys()] or [names[n] for n in group.tops & names.keys()]
        own = frozenset(n for n in group.model.storages if graph.storages[n].device == device and graph.storages[n].nbytes)
        if not own or not named:
            continue
        _, cell, name = min(named)
        found.append(
            Taker(
                name=name,
                cell=cell,
                tops=tuple(graph.nodes[n].ref for n in sorted(group.tops)),
                nodes=frozenset(group.model.parts) | learners,
                learners=learners,
                storages=own,
                gradients=own & group.model.gradients,
                nbytes=nbytes_of(graph, own),
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Model:
    """The part of the graph that is one model: its modules, the storages of its parameters and buffers, and their gradients."""

    parts: frozenset[int]
    storages: frozenset[int]
    gradients: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, top: int) -> _Model:
        parts, tensors = {top}, set[int]()
        todo = [top]
        while todo:
            number = todo.pop()
            node = graph.nodes[number]
            for child, label in node.references:
                inside = graph.nodes[child]
                if node.module_part == "modules":
                    if child not in parts:
                        parts.add(child)
                        todo.append(child)
                elif node.module_part and not inside.module_part:
                    tensors.add(child)
                elif inside.module_part or (node.kind == "model" and not label and inside.kind == "object"):
                    todo.append(child)  # the dict of its attributes, and in it those of its parts
        gradients = {child for n in tensors for child, label in graph.nodes[n].references if label == GRADIENT}
        storages = storages_of(graph, tensors | _wrapped(graph, tensors) | gradients)
        return cls(frozenset(parts), frozenset(storages), frozenset(storages_of(graph, gradients)))

    @classmethod
    def of_optimizer(cls, graph: Graph, number: int) -> _Model:
        others = {n for n, node in enumerate(graph.nodes) if node.kind in ("model", "learner", "graph", "frame", "traceback")}
        nodes = reach(graph, (number,), blocked=others)
        return cls(frozenset({number}), frozenset(storages_of(graph, nodes)), frozenset())

    def with_(self, other: _Model) -> _Model:
        return _Model(self.parts | other.parts, self.storages | other.storages, self.gradients | other.gradients)


def _wrapped(graph: Graph, tensors: Iterable[int]) -> set[int]:
    """Return the tensors inside of tensors that wrap others."""
    inside = ((child, label) for n in tensors for child, label in graph.nodes[n].references)
    return {n for n, label in inside if label not in (GRAPH, BASE, GRADIENT) and graph.nodes[n].kind == "tensor"}


@dataclass(slots=True)
class _Group:
    tops: set[int]
    model: _Model


def _merged(groups: Iterable[_Group]) -> list[_Group]:
    """Return the groups, those together that share a storage, as a model and its optimizer do."""
    merged: list[_Group] = []
    for group in groups:
        shared = [each for each in merged if each.model.storages & group.model.storages]
        for each in shared:
            merged.remove(each)
            group = _Group(tops=each.tops | group.tops, model=each.model.with_(group.model))
        merged.append(group)
    return [group for group in merged if group.tops]


def _names(facts: Facts, goals: Collection[int]) -> dict[int, tuple[tuple[bool, int], int, str]]:
    """Return the shortest way to write each of these nodes, the user's own names first: (rank, cell, words)."""
    best: dict[int, tuple[tuple[bool, int], int, str]] = {}
    for root in facts.graph.roots:
        if root.kind in ("garbage", "library"):
            continue
        for goal, path in shortest_paths(facts.graph, root, goals).items():
            text = path_text(facts.graph, root, path, shorten=4)
            mine = (root.kind not in ("name", "module"), len(text)), root.cell or 0, text
            best[goal] = min(best.get(goal, mine), mine)
    return best


def reason_to_stay(
    facts: Facts, taker: Taker, fixed: Mapping[int, str], busy: Mapping[int, str], settled: Collection[tuple[str, int]]
) -> str:
    """Return why a model may not be parked at this moment; an empty string where it may.

    Args:
        facts: of the scan that it was found in.
        taker: the model.
        fixed: reasons why storages cannot be moved, by number.
        busy: reasons of objects that are at work, by their ids.
        settled: gradients, by `StorageFact.key`, that a step of an optimizer has used.
    """
    graph = facts.graph
    for number in taker.nodes:
        if graph.nodes[number].type_name in _NO_CODE:
            return COMPILED
        if reason := busy.get(graph.nodes[number].ref, ""):
            return reason
    if taker.storages & _in_graphs(facts):
        return _IN_A_GRAPH
    if taker.gradients and not taker.learners and not any(graph.storages[n].key in settled for n in taker.gradients):
        return _UNUSED
    kinds = ("model", "optimizer", "learner")
    inner = {n for n in taker.nodes if graph.nodes[n].kind == "model" and graph.nodes[n].ref not in taker.tops}
    whole = [graph.nodes[n].ref for n in sorted(taker.nodes - inner) if graph.nodes[n].kind in kinds]
    try:  # a plan tells its targets apart by their texts
        plan = plan_parking(facts, [Target(text=taker.name + " " * n, value=ref) for n, ref in enumerate(whole)], fixed)
    except TargetError as error:
        return str(error)
    if taker.storages <= plan.storages:
        return ""
    return plan.skipped[0] if plan.skipped else "a part of it cannot be moved"


def _in_graphs(facts: Facts) -> set[int]:
    """Return the storages of the tensors that a living autograd graph would give gradients."""
    graph = facts.graph
    alive = reach(graph, (n for root in graph.roots if root.kind != "garbage" for n in root.nodes))
    ends = {child for n in alive if graph.nodes[n].kind == "graph" for child in graph.nodes[n].children}
    return storages_of(graph, (n for n in ends if graph.nodes[n].kind == "tensor"))


# --- The state of the budget, and the sentence on the turns of a cell.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """A model that takes turns, or that has to stay."""

    name: str  # as one writes it
    nbytes: int  # with its gradients and the state of its optimizer
    parked: bool  # it waits in host memory
    reason: str = ""  # why it stays on the device; empty: it can be parked, or is
    seconds: float | None = None  # that its return takes, by the returns before; None before the first


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState(Result):
    """The budget of a device and the models that take turns on it. All sizes are bytes."""

    kind: ClassVar[str] = "budget"
    view: ClassVar[str] = "nbguard.memory.room.turns:budget_blocks"

    device: str = ""  # `cuda:0`; an empty string while there is no budget
    budget: int = 0  # that the models on it may take together
    here: int = 0  # that they take now
    models: tuple[ModelTurn, ...] = ()  # the largest first


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenTurn:
    """A model that came back to the device, or models that were parked."""

    name: str = ""  # of the model that came back
    nbytes: int = 0  # of it
    seconds: float | None = None  # that its return took; None on a simulated device, where nothing is copied
    parked: tuple[str, ...] = ()  # names of the others


def budget_blocks(state: BudgetState) -> Iterator[Block]:
    """Yield the budget in one line, and its models."""
    if not state.device:
        yield Line(
            "no budget is set, so models stay where they are; "
            + advice.budget().code
            + " lets those that do not fit together take turns"
        )
        return
    taken = f"{format_bytes(state.here)} of the {format_bytes(state.budget)} of models on {state.device}"
    yield Line(taken + " (" + advice.BUDGET_OFF.code + " ends it)")
    if state.models:
        rows = [TableRow(cells=(model.name, format_bytes(model.nbytes), _place(model))) for model in state.models]
        yield Table(rows=tuple(rows), figures=(1,))


def _place(model: ModelTurn) -> str:
    if model.parked:
        return "parked" if model.seconds is None else f"parked, about {_seconds(model.seconds)} to its return"
    return "stays: " + model.reason if model.reason else ""


def turns_sentence(turns: Sequence[TakenTurn], cell: int | None = None) -> str:
    """Return in one sentence the models that came back in a cell, their seconds, and the parked ones; empty without any."""
    came = list(dict.fromkeys(turn.name for turn in turns if turn.name))
    last: dict[str, bool] = {}
    for turn in turns:
        last |= dict.fromkeys(turn.parked, True) | ({turn.name: False} if turn.name else {})
    parked = [name for name, is_parked in last.items() if is_parked]
    taken, count = [turn.seconds for turn in turns if turn.seconds is not None], sum(bool(turn.name) for turn in turns)
    parts, within = [], f" in {_seconds(sum(taken))}" if taken else ""
    if count > len(came):
        in_all = f",{within} in all" if within else ""
        parts.append(f"{_listed(came)} took turns and came back {counted(count, 'time')}{in_all}")
    elif came:
        parts.append(f"{_listed(came)} {'is' if len(came) == 1 else 'are'} back{within}")
    if parked:
        parts.append(f"{_listed(parked)} parked")
    return joined(", ", [f"In[{cell}]: {parts[0]}" if cell is not None else parts[0], *parts[1:]]) if parts else ""


def _listed(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names[:_NAMED]]
    if len(names) > _NAMED:
        return f"{', '.join(shown)} and {counted(len(names) - _NAMED, 'more')}"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _seconds(seconds: float) -> str:
    return f"{max(seconds, 0.1):.1f} s"
