"""Autograd graphs, walked only so far that they can still be freed safely.

From torch 2.13 on at the latest a node of a graph keeps its Python wrapper once anything has asked for it, and a chain of nodes
with wrappers is freed by recursion: 215 to 340 bytes of stack a node, with or without plain nodes between them, until the
stack overflows and the process dies. So the longest path of nodes that looks gave wrappers stays under a limit, over
all looks of the process. (docs/adr/0012-long-graphs.md)

A look asks for wrappers in walks, each from one tensor downwards. A walk that came to the end of its graph knows its height
exactly. One that was cut may lie above or below any other, so the depths of these add up. Records are numbers only: a
node that died takes its record with it.
"""

from __future__ import annotations

import heapq
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.kinds import Kinds

MOST_NODES = 20_000
"""Most nodes that one scan goes into, at some 40 µs and 1 KiB each."""
_MOST_ALIVE = 60_000
"""Nodes alive that looks may have given wrappers in all."""
_LONGEST = 1_536
"""Nodes with wrappers on a path: half as many as a stack of 1 MiB frees in the worst case, 1/16 of those of 8 MiB."""
_WALKS = 3  # a cut walk, a whole one and the one that is under way may lie one above the other
_STACK_PER_NODE = 340
_MARGIN = 4


_Visited = tuple[int, int, list[tuple[int, int]]]
"""A node that a walk went into: its id, its sequence number, and the same of those before it."""


class _Record:
    """The nodes that scans of this process have gone into and that still live, by id and sequence number.

    `whole` are those below which everything is known, with their height; `cut` the others, walk by walk, with how deep it went;
    `ends` those where a walk was deep enough: no later scan goes on from there, and each finds the same.
    """

    def __init__(self) -> None:
        self.whole: dict[int, tuple[int, int]] = {}
        self.cut: list[tuple[dict[int, int], int]] = []
        self.ends: dict[int, int] = {}
        self.keys: dict[int, int] = {}
        self._highest = 0
        self.longest = 0
        """Nodes with wrappers that can lie on one path at most."""

    def has(self, node: Any, sequence: int) -> bool:
        """Return whether a scan went into this node, and not into one that died and had the same id."""
        return self.keys.get(id(node)) == sequence

    def forget_the_dead(self, alive: dict[int, int]) -> None:
        """Keep the records of the nodes in `alive` (sequence numbers by id)."""
        self.whole = {key: known for key, known in self.whole.items() if alive.get(key) == known[0]}
        self.ends = {key: known for key, known in self.ends.items() if alive.get(key) == known}
        left = (({key: known for key, known in nodes.items() if alive.get(key) == known}, depth) for nodes, depth in self.cut)
        self.cut = [(nodes, depth) for nodes, depth in left if nodes]
        self.keys = {key: sequence for key, (sequence, _) in self.whole.items()}
        for nodes, _ in self.cut:
            self.keys.update(nodes)
        self._highest = max((height for _, height in self.whole.values()), default=0)
        self._sum_up()

    def note(self, new: list[_Visited], depths: dict[int, int]) -> None:
        """Note the nodes of one walk, and how deep each was, by its id."""
        cut: dict[int, int] = {}
        for key, sequence, before in sorted(new, key=lambda node: (bool(node[2]), node[1])):
            heights = [self._height(*earlier) for earlier in before]
            if all(heights):
                height = 1 + max(heights, default=0)
                self.whole[key] = (sequence, height)
                self._highest = max(self._highest, height)
            else:
                self.whole.pop(key, None)  # one that died and had the same id
                cut[key] = sequence
        if cut:
            self.cut.append((cut, 1 + max(depths[key] for key in cut)))
        self.keys.update((key, sequence) for key, sequence, _ in new)
        self._sum_up()

    def _height(self, key: int, sequence: int) -> int:
        """Return the height of a node below which everything is known, 0 of any other."""
        known, height = self.whole.get(key, (None, 0))
        return height if known == sequence else 0

    def _sum_up(self) -> None:
        self.longest = self._highest + sum(depth for _, depth in self.cut)


_record = _Record()


def longest_path() -> int:
    """Return how many nodes with wrappers may lie on one path, by the platform's stacks."""
    stacks = [8 << 20 if sys.platform != "win32" else 1 << 20, threading.stack_size() or 8 << 20]
    resource: Any = sys.modules.get("resource") or _import_resource()
    if resource is not None:
        soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
        stacks.append(soft if soft > 0 else 8 << 20)
    return min(_LONGEST, min(stacks) // (_STACK_PER_NODE * _MARGIN))


def _import_resource() -> Any:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource


class Graphs:
    """The walks of one scan. `nodes` counts the nodes that it went into, `cut` where it ended before the graph did.

    `at_most` bounds the operations of the graphs that it cut, 0 where it did not even ask for their latest.
    """

    def __init__(self, autograd: Autograd, kinds: Kinds, most: int = MOST_NODES) -> None:
        self._most = most  # nodes that it goes into
        self._autograd = autograd
        self._kinds = kinds
        self._limit = 0
        self._is_pruned = False  # the record is of nodes that live: what a pass over the heap tells
        self._stays = True  # a wrapper, once made: not so up to torch 2.8
        self._done: set[int] = set()
        self.nodes: int = 0
        self.cut: int = 0
        self.at_most: int = 0

    def root_of(self, tensor: Any) -> Any:
        """Return the node that computed a tensor; None if torch does not say, or no more wrappers may be made."""
        if self._depth_left() <= 0:
            self.cut += 1
            return None
        try:
            node = self._autograd.grad_fn(tensor)
        except RuntimeError:  # e.g. a view changed in place
            return None
        self._stays = self._stays and sys.getrefcount(node) > _ONE
        return node

    def _depth_left(self) -> int:
        if not self._limit:
            self._limit = longest_path()
        if not self._is_pruned and self._is_scarce():
            self._is_pruned = True
            _record.forget_the_dead({id(node): sequence_of(node) for node in self._kinds.tracked({"graph"})})
        if self.nodes >= self._most or len(_record.keys) >= _MOST_ALIVE:
            return 0
        return min(self._limit // _WALKS, self._limit - _record.longest) if self._stays else self._most

    def _is_scarce(self) -> bool:
        """Return whether the nodes of earlier scans would keep this one from going as far as it may."""
        return self._limit - _record.longest < self._limit // _WALKS or len(_record.keys) > _MOST_ALIVE - MOST_NODES

    def walk(self, top: Any, link: Callable[[Any, Any], None], cut: Callable[[Any], None]) -> None:
        """Go down from the node `top`: `link` each node to those before it, `cut` at those that are not gone into.

        The latest operation comes first: all that refers to a node has been seen before it, so its depth is known.
        """
        deepest = self._depth_left()
        if id(top) in self._done:
            return
        order = count()
        todo = [(-sequence_of(top), next(order), top)]
        depths = {id(top): int(not _record.has(top, sequence_of(top)))}
        new: list[_Visited] = []
        while todo:
            negative, _, node = heapq.heappop(todo)
            key = id(node)
            if key in self._done:
                continue
            known, depth = _record.has(node, -negative), depths[key]
            if _record.ends.get(key) == -negative or (not known and depth > deepest):
                if self._stays:
                    _record.ends[key] = -negative
                self._leave_out(node, cut)
                continue
            is_full = not known and len(_record.keys) + len(new) >= _MOST_ALIVE
            if is_full or self.nodes + _width(node) >= self._most:
                self._leave_out(node, cut)
                continue
            self._done.add(key)
            self.nodes += 1
            before: list[tuple[int, int]] = []
            for earlier, _ in node.next_functions:
                if earlier is None:
                    continue
                link(node, earlier)
                sequence, known_depth = sequence_of(earlier), depths.get(id(earlier))
                depths[id(earlier)] = max(depth + (not _record.has(earlier, sequence)), known_depth or 0)
                before.append((id(earlier), sequence))
                if known_depth is None:
                    heapq.heappush(todo, (-sequence, next(order), earlier))
            if not known:
                new.append((key, -negative, before))
        if self._stays:
            _record.note(new, depths)

    def _leave_out(self, node: Any, cut: Callable[[Any], None]) -> None:
        self.cut += 1
        sequence = sequence_of(node)
        if sequence != _OF_LEAVES:
            self.at_most = max(self.at_most, 1 + sequence)
        cut(node)


_OF_LEAVES = 2**64 - 1


def sequence_of(node: Any) -> int:
    """Return the number of the operation that made a node: it grows with each, and is `_OF_LEAVES` for leaves' gradients."""
    ask = getattr(type(node), "_sequence_nr", None)
    return 0 if ask is None else int(ask(node))


def _width(node: Any) -> int:
    """Return how many nodes come before one, where it can be known without asking for them and may be many; else 0."""
    if type(node).__name__ != "StackBackward0":
        return 0
    try:
        return int(node._input_metadata[0].shape[node._saved_dim])
    except (AttributeError, IndexError, RuntimeError):
        return 0


def _references_in_one_variable() -> int:
    """Return the answer of `sys.getrefcount` on an object that one variable refers to."""
    probe = object()
    return sys.getrefcount(probe)


_ONE = _references_in_one_variable()
