"""Holders of bytes: Python's objects by the user's names, and the allocated blocks that no Python object holds.

A storage belongs to the set of roots that reach it. Roots of the user's own (names, globals, running code) come first:
only a storage that none of them reaches belongs to a hidden root (`Out[n]`, the last error, unreachable cycles).
So `learn`, displayed once and still named, is `learn`, while `Out[7]` is a holder only of things that nothing else needs.
Cycles that wait for the collector hold nothing that anything else holds: whatever frees that collects them, too. Allocated
blocks without a holder in Python are rows by their use, so that the holders add up to what is allocated.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from operator import and_
from typing import Any

from nbguard.memory.core.advice import NONE, Advice, zero_gradients
from nbguard.memory.core.facts import EXPERIMENT_KINDS, Block, DeviceFacts, Facts, Graph, HolderSource, Root, Segment
from nbguard.memory.core.references.graph import (
    GRADIENT,
    STALE_KINDS,
    Edge,
    nbytes_of,
    path_text,
    reach_of_roots,
    shortest_path,
)
from nbguard.memory.core.references.owner_sets import bits_of, contents_of, hashed, owners_of_nodes, owners_of_storages
from nbguard.memory.core.requests import PoolOwner, owner_of_pool
from nbguard.units import counted

# --- Gradients that idle Learners keep. A fit leaves them, as large as the model, and the next one makes them again.


def gradient_storages(facts: Facts) -> tuple[tuple[str, int, frozenset[int]], ...]:
    """Return (name, node, storages) for each idle Learner that a name leads to and whose gradients nothing else needs.

    All Learners in one pass: without any of their gradients' references, and with a bit for each set of Learners that have
    such references in common, which sets does each storage still depend on? A Learner that is in all of them frees it.
    """
    graph = facts.graph
    running = {learner.node for learner in facts.learners if learner.is_running}
    named = [root for root in graph.roots if root.kind == "name" and len(root.nodes) == 1]
    learners = {root.nodes[0]: root.label for root in reversed(named) if graph.nodes[root.nodes[0]].kind == "learner"}
    gradients = _gradients_by_learners(facts, list(learners))
    if not gradients:
        return ()
    everything = [node for root in graph.roots for node in root.nodes]
    groups = [everything, *([child for _, child in edges] for edges in gradients.values())]
    whose = [0, *gradients]
    own_storages: list[set[int]] = [set() for _ in learners]
    owners = owners_of_nodes(graph, groups, {edge for edges in gradients.values() for edge in edges})
    for storage, mask in enumerate(owners_of_storages(graph, owners)):
        if mask:
            for learner in bits_of(reduce(and_, (whose[bit] for bit in bits_of(mask)))):
                own_storages[learner].add(storage)
    named_storages = zip(learners.items(), own_storages, strict=True)
    return tuple((label, node, frozenset(own)) for (node, label), own in named_storages if own and node not in running)


def _gradients_by_learners(facts: Facts, learners: list[int]) -> dict[int, list[Edge]]:
    """Return the references to gradients below any of these Learners, by the set of those that they are below."""
    graph = facts.graph
    edges = [(parent, child) for parent, node in enumerate(graph.nodes) for child, text in node.references if text == GRADIENT]
    if not edges or not learners:
        return {}
    reached = reach_of_roots(graph, range(len(graph.roots)))
    below = owners_of_nodes(graph, [[learner] for learner in learners])
    by_learners: dict[int, list[Edge]] = {}
    for parent, child in edges:
        if below[parent] and parent in reached:
            by_learners.setdefault(below[parent], []).append((parent, child))
    return by_learners


def idle_gradients(facts: Facts) -> tuple[tuple[str, int], ...]:
    """Return (name, bytes) for each idle Learner that a name leads to and whose gradients nothing else needs."""
    sized = ((label, nbytes_of(facts.graph, storages)) for label, _, storages in gradient_storages(facts))
    return tuple((label, nbytes) for label, nbytes in sized if nbytes)


def zero_gradients_of(facts: Facts, label: str, frees: int | None = None) -> Advice:
    """Return the advice that frees the gradients of the Learner of a name, by the call that its library has for it."""
    nodes = {node for root in facts.graph.roots if root.label == label for node in root.nodes}
    calls = (call for node, call in facts.gradient_calls if node in nodes)
    return zero_gradients(label, frees, *islice(calls, 1))


_LABELS = 3
"""Holders of shared memory that a row names."""
_ON_THE_WAY = ("traceback", "frame")
"""Kinds of nodes between an error and the variables of its frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One row of the table of holders."""

    label: str  # the user's name for it: all names of one object (`learn = best`), several roots (`a + b`)
    kind: str  # kind of its root (`RootKind`); "shared" for several roots, "pending" for blocks that wait for a stream
    retained: int  # bytes that are its own: all rows add up; of a name, those which its release frees
    frees: int = (
        0  # bytes that its release frees, by its plan; more than its own where several names take the same stale ones along
    )
    reaches: int  # bytes that it leads to, shared ones included
    cell: int | None  # number of the cell that it stems from
    what: str  # the object in a few words, or why the bytes are held
    stale: bool  # nothing of the user's own needs it
    roots: tuple[int, ...]  # numbers of its roots in the graph; none for memory without a holder in Python
    path: str = ""  # the way from the root to its bytes, as one would write it; for errors and libraries
    at_least: bool = False  # it leads to something that the scan left out: both figures are lower bounds
    source: HolderSource = "python"  # who holds the bytes
    names: tuple[str, ...] = ()  # labels of its roots where they are all the same object: `("learn", "best")`
    release: Advice = field(default=NONE, metadata={"json": False})  # of blocks without a holder in Python: lets them go
    together: Advice = NONE  # frees its memory with all else that has to go; of shared memory, and of a name that frees none
    stale_bytes: int = 0  # bytes of `retained` that the default cleanup frees: of a stale holder all, of another perhaps a part

    @property
    def others(self) -> tuple[str, ...]:
        """Return the names that have to go with one that frees next to nothing by itself, as one would write them."""
        return tuple(text for text in self.together.targets if text not in self.names)

    @property
    def shown(self) -> int:
        """Return the bytes that decide whether the row is large: its own, or those that its release frees with others."""
        return max(self.retained, self.frees, self.together.frees or 0)

    @property
    def is_shared(self) -> bool:
        """Return whether this row stands for bytes that several roots hold together."""
        return self.kind == "shared"


def holders(graph: Graph, device: str | None = None) -> tuple[Holder, ...]:
    """Return every holder of bytes on `device` (or on all, if None), largest first; their `retained` bytes add up to the total.

    Names of one and the same object form one holder (`learn = best`). All are found in one pass, see `owners`.
    """
    return tuple(row for row, _ in holdings(graph, device))


Holding = tuple[Holder, frozenset[int]]
"""A holder, and the storages that its `retained` bytes are."""


def holdings(graph: Graph, device: str | None = None) -> tuple[Holding, ...]:
    """Return every holder as `holders` does, each with the storages that its `retained` bytes are."""
    groups = _alias_groups(graph)
    users = (1 << sum(graph.roots[group[0]].kind not in STALE_KINDS for group in groups)) - 1
    garbage = sum(1 << number for number, group in enumerate(groups) if graph.roots[group[0]].kind == "garbage")
    entries = [[node for root in group for node in graph.roots[root].nodes] for group in groups]
    owned: dict[tuple[int, int], set[int]] = {}
    owners = owners_of_nodes(graph, entries)
    to_rest = 0 if graph.rest is None else owners[graph.rest]
    for storage, mask in enumerate(owners_of_storages(graph, owners)):
        if mask and device in (None, graph.storages[storage].device):
            owned.setdefault(hashed(mask), set()).add(storage)
    reaches = dict.fromkeys((number for _, mask in owned for number in bits_of(mask)), 0)
    by_owners: dict[tuple[int, int], set[int]] = {}
    for (_, mask), storages in owned.items():
        nbytes = nbytes_of(graph, storages)
        for number in bits_of(mask):
            reaches[number] += nbytes
        by_owners.setdefault(hashed(mask & users or mask & ~garbage or mask), set()).update(storages)
    by_who = {tuple(bits_of(mask)): storages for (_, mask), storages in by_owners.items()}
    by_who |= {(n,): set() for n in reaches if users >> n & 1 and (n,) not in by_who}
    rows = [
        (_marked(_holder(graph, groups, who, exclusive, reaches[who[0]]), who, to_rest), frozenset(exclusive))
        for who, exclusive in by_who.items()
        if len(who) == 1 or nbytes_of(graph, exclusive)
    ]
    return tuple(sorted(rows, key=lambda row: (-row[0].retained, -row[0].reaches, row[0].label)))


def _marked(holder: Holder, who: tuple[int, ...], to_rest: int) -> Holder:
    return replace(holder, at_least=True) if any(to_rest >> number & 1 for number in who) else holder


def _alias_groups(graph: Graph) -> list[tuple[int, ...]]:
    """Return the roots in groups: names of the same object together, the user's own roots before the stale ones."""
    groups: dict[object, list[int]] = {}
    for number, root in enumerate(graph.roots):
        key: object = (root.kind, root.nodes) if root.kind == "name" and root.nodes else number
        groups.setdefault(key, []).append(number)
    return sorted((tuple(group) for group in groups.values()), key=lambda group: graph.roots[group[0]].kind in STALE_KINDS)


def _rank(graph: Graph, group: tuple[int, ...]) -> int:
    """Return 0 for a Learner, 1 for another experiment, 2 for the rest: the order of names of shared holders."""
    kinds = {graph.nodes[node].kind for node in graph.roots[group[0]].nodes}
    return 0 if "learner" in kinds else 1 if kinds & EXPERIMENT_KINDS else 2


def _holder(graph: Graph, groups: list[tuple[int, ...]], who: tuple[int, ...], exclusive: set[int], reaches: int) -> Holder:
    roots = tuple(root for number in who for root in groups[number])
    first = graph.roots[roots[0]]
    stale = first.kind in STALE_KINDS
    retained = nbytes_of(graph, exclusive)
    named_first = sorted(who, key=lambda number: _rank(graph, groups[number]))
    labels = [" = ".join(graph.roots[root].label for root in groups[number]) for number in named_first]
    if len(who) > 1:
        return replace(shared_row(labels, retained, roots), stale=stale)
    path = ""
    if exclusive and first.kind in ("error", "library"):
        path = path_text(graph, first, _way_to_most(graph, first, exclusive), shorten=5)
    return Holder(
        label=labels[0],
        kind=first.kind,
        retained=retained,
        frees=retained,
        reaches=reaches,
        cell=first.cell,
        what=_what(graph, first),
        stale=stale,
        roots=roots,
        path=path,
        source=first.source,
        names=tuple(graph.roots[root].label for root in roots),
    )


def shared_row(labels: Sequence[str], nbytes: int, roots: tuple[int, ...]) -> Holder:
    """Return the row of bytes that several roots hold together; `labels` are the user's names for them."""
    return Holder(
        label=" + ".join(labels[:_LABELS]) + (f" + {len(labels) - _LABELS} more" if len(labels) > _LABELS else ""),
        kind="shared",
        retained=nbytes,
        frees=0,
        reaches=nbytes,
        cell=None,
        what="shared: freed when all of them are released",
        stale=False,
        roots=roots,
    )


def _way_to_most(graph: Graph, root: Root, exclusive: set[int]) -> tuple[int, ...]:
    """Return the shortest way to the largest part of the bytes: one variable of a frame, or one thing of a library."""
    into: dict[int, int | None] = dict.fromkeys(
        root.nodes
    )  # by node: the variable that it was met through first; None on the way to one
    todo = deque(into)
    left, sizes = set(exclusive), Counter[int]()
    goals: dict[int, set[int]] = {}
    while todo and left:
        node = todo.popleft()
        met = into[node]
        variable = node if met is None else met
        if mine := left.intersection(graph.nodes[node].storages):
            left -= mine
            sizes[variable] += nbytes_of(graph, mine)
            goals.setdefault(variable, set()).add(node)
        for child in graph.nodes[node].children:
            if child not in into:
                into[child] = variable if met is not None else None if graph.nodes[child].kind in _ON_THE_WAY else child
                todo.append(child)
    return shortest_path(graph, root, goals[max(sizes, key=lambda key: sizes[key])])


def _what(graph: Graph, root: Root) -> str:
    """Return the description of a root; for a model that holds much else, with the shares of the model and of the rest."""
    contents = contents_of(graph, root) if root.kind == "name" else None
    return root.what if contents is None else f"{root.what}: {contents.words}"


def all_holders(facts: Facts, device: DeviceFacts, held: Iterable[Holding], freed: Set[int]) -> tuple[Holder, ...]:
    """Return every holder of bytes on `device`, Python's and the rest, largest first: they add up to the bytes allocated.

    `held` are the holders among Python's objects. `freed` are the storages that a cleanup would free: a displayed tensor that
    it would keep is not called stale.
    """
    own = (after_cleanup(facts.graph, holding, freed) for holding in held)
    known_rows = [*own, *unheld(facts, device)]
    return tuple(sorted((*known_rows, *unattributed(device, known_rows)), key=lambda row: -row.retained))


def after_cleanup(graph: Graph, holding: Holding, freed: Set[int]) -> Holder:
    """Return a holder marked by a cleanup that frees the storages `freed`: with its stale bytes, all or a part."""
    row, storages = holding
    return with_values(row, stale=row.stale and storages <= freed, stale_bytes=nbytes_of(graph, storages & freed))


def with_values(row: Holder, **values: Any) -> Holder:
    """Return a holder with these values. Most have them already, and a copy takes longer than the rest of a report."""
    return row if all(getattr(row, name) == value for name, value in values.items()) else replace(row, **values)


def unheld(facts: Facts, device: DeviceFacts) -> Iterator[Holder]:
    """Yield a holder for each kind of allocated block of `device` without a storage of the graph.

    Workspaces of cuBLAS and cuBLASLt are known by their sizes, which torch tells; other blocks by the line that allocated
    them, where the allocator's history is recorded; those of a private pool by its graph or MemPool; the rest is C++'s own.
    Where blocks are not known, the counted bytes that no storage explains are one row.
    """
    if device.segments is None and device.allocator is not None:
        explained = sum(storage.nbytes for storage in facts.graph.storages if storage.device == device.device)
        if device.allocator.allocated > explained:
            yield unheld_row("not held by Python", device.allocator.allocated - explained, f"C++: {_BY_LIBRARIES}", "unknown")
    for row, _ in unheld_blocks(facts, device):
        yield row


def unheld_blocks(facts: Facts, device: DeviceFacts) -> Iterator[tuple[Holder, tuple[Block, ...]]]:
    """Yield a holder for each kind of allocated block that the graph holds no storage in, with these blocks."""
    by_kind: dict[tuple[str, str, HolderSource], list[Block]] = {}
    blocks_of_device = tuple(_unheld_blocks(facts.graph, device))
    workspaces = _workspaces(device, blocks_of_device)
    owners: dict[str, PoolOwner] = {}
    for segment, block in blocks_of_device:
        kind = _WORKSPACES if block.address in workspaces else _kind(segment, block)
        if kind is _POOLS:
            owner = owner_of_pool(facts, segment.pool)
            owners[owner.name] = owner
            kind = (owner.name, *_POOLS[1:])
        by_kind.setdefault(kind, []).append(block)
    for (label, what, source), blocks in by_kind.items():
        nbytes, words = sum(block.size for block in blocks), f"{counted(len(blocks), 'block')} {what}"
        release = owners[label].advice if label in owners else NONE
        yield replace(unheld_row(label, nbytes, words, source), release=release), tuple(blocks)


def _unheld_blocks(graph: Graph, device: DeviceFacts) -> Iterator[tuple[Segment, Block]]:
    held = {storage.address for storage in graph.storages if storage.device == device.device}
    for segment in (*(device.segments or ()), *(device.airbag.segments if device.airbag else ())):
        for block in segment.blocks:
            if block.state == "active_allocated" and block.address not in held:
                yield segment, block


def unattributed(device: DeviceFacts, rows: Iterable[Holder]) -> Iterator[Holder]:
    """Yield a holder for the difference between the allocator's count and the bytes of `rows`, if there is one.

    Another thread that allocates while the heap is walked makes one: it is shown, so that the column adds up.
    """
    spilled = 0 if device.airbag is None else device.airbag.spilled
    if device.allocator is not None and (missing := device.allocator.allocated + spilled - sum(row.retained for row in rows)):
        yield unheld_row(CHANGED, missing, "allocated or freed by another thread during the report: run it again", "changed")


CHANGED = "changed meanwhile"


def workspace_blocks(graph: Graph, device: DeviceFacts) -> tuple[Block, ...]:
    """Return the blocks that are workspaces of cuBLAS or cuBLASLt by their size, outside the pools of CUDA graphs."""
    blocks = tuple(_unheld_blocks(graph, device))
    workspaces = _workspaces(device, blocks)
    return tuple(block for segment, block in blocks if not segment.is_private and block.address in workspaces)


def _workspaces(device: DeviceFacts, unheld: Sequence[tuple[Segment, Block]]) -> frozenset[int]:
    """Return the addresses of the blocks that are workspaces of cuBLAS or cuBLASLt, of those that nothing of Python's holds.

    cuBLASLt has one at most for each of cuBLAS's, on the same stream: torch takes that one first. So a buffer of another
    library that is as large is not taken for a workspace where there is none, nor more of them than there can be.
    """
    of_cublas = [(segment, block) for segment, block in unheld if device.workspace and block.requested == device.workspace]
    room = Counter(segment.stream for segment, _ in of_cublas)
    found = {block.address for _, block in of_cublas}
    for segment, block in unheld:
        if block.requested == device.lt_workspace and block.address not in found and room[segment.stream]:
            room[segment.stream] -= 1
            found.add(block.address)
    return frozenset(found)


def unheld_row(label: str, nbytes: int, what: str, source: HolderSource) -> Holder:
    """Return the holder of memory that no Python object holds."""
    return Holder(
        label=label,
        kind="library",
        retained=nbytes,
        reaches=nbytes,
        cell=None,
        what=what,
        stale=False,
        roots=(),
        source=source,
    )


_WORKSPACES: tuple[str, str, HolderSource] = ("cuBLAS workspaces", "that PyTorch keeps for matrix products", "workspaces")
_POOLS: tuple[str, str, HolderSource] = ("CUDA graphs", "of its pool that no Python object holds", "graphs")
_BY_LIBRARIES = "buffers and caches of libraries"


def _kind(segment: Segment, block: Block) -> tuple[str, str, HolderSource]:
    """Return the label of the holder of a block that is no workspace, the words on such blocks, and their source."""
    if segment.is_private:
        return _POOLS
    if block.site:
        return f"allocated at {block.site}", "that no Python object holds", "site"
    return "not held by Python", f"of C++: {_BY_LIBRARIES}", "unknown"
