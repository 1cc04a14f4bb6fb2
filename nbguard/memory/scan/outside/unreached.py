"""Objects that none of the user's roots leads to, either uncollected garbage, or objects that other code holds.

These are the objects that no root leads to at all, and the objects that only stale roots (the last error, `Out`) lead to: a
cleanup would take the latter for theirs. The collector's own rule decides: an object whose references all come from the set
itself has no holder outside, and whatever no object with such a holder leads to is garbage. A holder outside is followed
upwards, in whole passes over the heap, to a module's global if there is one.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from nbguard.memory.core.references.owner_sets import components
from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.memory.scan.heap.unwalked import fill_rest
from nbguard.memory.scan.heap.walk import MORE_TENSORS, Walk, references_by_asking
from nbguard.memory.scan.outside.referrers import entered_by, name_by_referrers, unnamed_roots
from nbguard.memory.scan.outside.region import Region, below, dicts_of_hooks, lead_to_hooks, references_of_cpp
from nbguard.memory.scan.roots.frames import LiveRoot
from nbguard.units import counted

# --- Copies of results that autograd keeps in C++, where they are objects of Python's as well.
#
# A node that saves its own result (`exp`, `softmax`) keeps a detached copy of the tensor, and unpacks another tensor on the
# same storage whenever it is asked. Usually the copy never was an object. Under a dispatch mode (FLOP counters, `%gpumem
# simulate`) Python makes it: the collector then tracks a tensor that nothing but C++ refers to, as if a library had it.


def held_by_cpp_alone(walk: Walk, objects: list[Any]) -> list[Any]:
    """Return the tensors among `objects` that one holder in C++ has and no object of Python's, besides this list."""
    autograd, ours = walk.referents.autograd, references_by_asking()
    tensors = [n for n in range(len(objects)) if walk.kinds.of(type(objects[n])) == "tensor"]
    if autograd is None or not tensors:
        return []
    by_cpp = references_of_cpp()
    return [
        objects[n]
        for n in tensors
        if sys.getrefcount(objects[n]) == ours + 1  # the reference of C++ that keeps the object
        and autograd.cpp_references(objects[n]) == by_cpp
    ]


def without_saved_copies(walk: Walk, tensors: list[Any]) -> list[Any]:
    """Return those of `tensors`, each held by C++ alone, that are no copy of a result which a graph of the walk has saved."""
    unpacked = Counter(_unpacked(walk))
    left = []
    for tensor in tensors:
        if id(tensor) in walk.number:
            continue
        storage = walk.storage_of(tensor)
        if storage is not None and unpacked[storage]:
            unpacked[storage] -= 1
        else:
            left.append(tensor)
    return left


def _unpacked(walk: Walk) -> Iterator[int]:
    """Yield the storage of each tensor that a node unpacked when the walk asked it: one for each copy that graphs keep."""
    autograd, ours = walk.referents.autograd, references_by_asking()
    for node, kind in enumerate(walk.kind):
        for child in walk.children[node] if kind == "graph" else ():
            if walk.kind[child] == "tensor" and sys.getrefcount(walk.objects[child]) == ours:
                assert autograd is not None
                if not autograd.cpp_references(walk.objects[child]):
                    yield from walk.holds.get(child, ())


# --- Unreachable objects that the collector cannot free, since cycles that pass through C++ stay for ever.
#
# gc sees the references that Python objects show it. References that torch and numpy keep in C++ (a graph, a gradient, the
# base of a view) it takes for a holder outside, and leaves alone everything that holder leads to. If the holder goes with the
# rest, the next pass frees that too. If it is itself part of the cycle, nothing ever will: a hook on a tensor that closes
# over the tensor, `backward(create_graph=True)`, `base.view = base[:2]`.


def stuck_in_cpp(walk: Walk, garbage: Collection[int]) -> set[int]:
    """Return the objects of `garbage`, all unreachable, that no number of collections will free."""
    model = _Collector(walk, garbage)
    return model.run() if model.hidden else set()


class _Collector:
    """Python's collector and C++'s reference counts, played on the numbers of unreachable objects."""

    def __init__(self, walk: Walk, garbage: Collection[int]) -> None:
        self.left = set(garbage)
        self.cpp = {n for n in garbage if walk.kind[n] == "graph" and not _is_python_function(walk.objects[n])}
        self.children: dict[int, list[int]] = {}
        self.parents: dict[int, set[int]] = {}
        shown: Counter[int] = Counter()
        hidden: dict[int, set[int]] = {}
        for parent in garbage:
            below = [] if _is_ours_alone(walk, parent) else [child for child in walk.children[parent] if child in self.left]
            seen_by_gc = set() if parent in self.cpp else {id(ref) for ref in gc.get_referents(walk.objects[parent])}
            self.children[parent] = below
            for child in below:
                self.parents.setdefault(child, set()).add(parent)
                if id(walk.objects[child]) in seen_by_gc:
                    shown[child] += 1
                elif child in self.cpp or not _is_python_function(walk.objects[child]):
                    hidden.setdefault(child, set()).add(parent)
        more = {n for n in hidden if _has_more(walk, n, shown[n])}
        self.hidden = {n: above for n, above in hidden.items() if n in self.cpp or n in more}

    def run(self, emptied: Iterable[int] = ()) -> set[int]:
        """Collect until nothing more goes, after some objects were emptied; return the objects that are left."""
        self.left -= self._freed_with(set(emptied))
        while freed := self._one_pass():
            self.left -= freed
        return self.left

    def _one_pass(self) -> set[int]:
        """Return the objects that one collection frees: those that no C++ holder leads to, then those that they kept in C++."""
        kept = {n for n, above in self.hidden.items() if n in self.left and above & self.left} | (self.cpp & self.left)
        todo = list(kept)
        while todo:
            for child in self.children[todo.pop()]:
                if child in self.left and child not in kept:
                    kept.add(child)
                    todo.append(child)
        return self._freed_with(self.left - kept)

    def _freed_with(self, freed: set[int]) -> set[int]:
        """Return objects that go, and with them those that nothing else refers to."""
        todo = list(freed)
        while todo:
            for child in self.children[todo.pop()]:
                if child in self.left and child not in freed and not (self.parents[child] & self.left) - freed:
                    freed.add(child)
                    todo.append(child)
        return freed


def _is_python_function(obj: object) -> bool:
    """Say whether an object is the context of a `torch.autograd.Function`, whose and whose tensor's references gc sees."""
    return any(name_of(cls) == "_FunctionBase" for cls in mro_of(type(obj)))


def _has_more(walk: Walk, number: int, shown: int) -> bool:
    """Say whether an object has more references than those that gc sees."""
    return sys.getrefcount(walk.objects[number]) - references_by_asking() > shown or _is_held_by_cpp(walk, number)


def _is_ours_alone(walk: Walk, number: int) -> bool:
    """Say whether an object came into being by our looking: an output that its own graph saved is unpacked again each time."""
    is_ours = walk.kind[number] == "tensor" and sys.getrefcount(walk.objects[number]) == references_by_asking()
    return is_ours and not _is_held_by_cpp(walk, number)


def _is_held_by_cpp(walk: Walk, number: int) -> bool:
    """Say whether C++ refers to a tensor: PyTorch 2.13 counts that as a reference of its Python object, and 2.4 does not."""
    autograd = walk.referents.autograd
    return walk.kind[number] == "tensor" and autograd is not None and autograd.cpp_references(walk.objects[number]) > 0


CPP_CYCLE = "unreachable C++ cycle"
_WHILE_CODE_RUNS = "unreachable cycles, or in use by the code that runs: known when it ends"


def orphan_roots(walk: Walk, name_above: int | None) -> list[tuple[LiveRoot, list[int]]]:
    """Walk the objects that no root leads to and return their roots: garbage, and holders in libraries.

    Holders of less than `name_above` bytes in all, and of no Learner, are not followed upwards (a pass over a large heap
    costs some 0.2 s each): they come out as one root of kind `library`. The result is None if code runs in another thread
    meanwhile, which may have made some of these objects since its own roots were scanned, or hold them in C. They cannot be
    told apart from garbage, so all count as held.
    """
    first, unreached = walk.only_stale.start, walk.only_stale.stop
    walk.most_tensors += MORE_TENSORS
    walk.follows_graphs = walk.rest is None  # a long graph's own tensors, mostly, each a way into it
    candidates, nodes = walk.unreached()
    in_cpp = held_by_cpp_alone(walk, candidates)
    maybe_copies = set(map(id, in_cpp))
    walk.add_as_many_as_may_be([obj for obj in candidates if id(obj) not in maybe_copies])
    del candidates  # references are counted from here on: none may be ours
    walk.run()
    walk.add_as_many_as_may_be(without_saved_copies(walk, in_cpp))
    del in_cpp
    walk.run()
    fill_rest(walk, nodes)
    del nodes
    if len(walk.objects) == first:
        return []
    by_rest = [] if walk.rest is None else [n for n in walk.children[walk.rest] if n >= first]
    region = Region(walk, named=False)
    held = region.held()
    known = below(walk, first, by_rest)
    held = [n for n in held if n not in known]
    if name_above is None:
        meanwhile = [*(n for n in held if n < unreached), *range(unreached, len(walk.objects))]
        return [
            (
                LiveRoot(kind="library", label="memory that no name reaches", objects=(), what=_WHILE_CODE_RUNS),
                meanwhile,
            )
        ]
    named: list[tuple[LiveRoot, list[int]]] = []
    if held and _is_worth_it(region, held, name_above):
        named, held = name_by_referrers(region, held)
    hooks = dicts_of_hooks(walk, held)
    hooks = lead_to_hooks(walk, hooks.difference(_on_cycles(walk, first, hooks)), first)
    held = [n for n in held if n not in hooks]
    if by_rest:
        named.append(
            (
                LiveRoot(kind="library", label="memory not scanned", objects=(), what="a long graph or very many tensors"),
                by_rest,
            )
        )
    alive = below(walk, first, [*held, *entered_by(walk, named)])
    if hooks and any(walk.kind[n] == "graph" for n in range(first)):
        alive |= below(walk, first, hooks)  # a graph in use may have them
    garbage = [n for n in range(unreached, len(walk.objects)) if n not in alive]
    unknown = sorted(region.pointing(held, entered_by(walk, named)))
    tied = _on_cycles(walk, first, unknown)
    stuck = sorted(stuck_in_cpp(walk, garbage))
    whole = below(walk, first, tied + stuck)
    for root, entries in _cycles(walk, first, tied, stuck, whole):
        named.append((root, entries))
    garbage = [n for n in garbage if n not in whole]
    unknown = [n for n in unknown if n not in whole]
    if garbage:
        named.append((LiveRoot(kind="garbage", label="unreachable cycles", objects=(), what=_count(walk, garbage)), garbage))
    return named + unnamed_roots(walk, unknown)


def _on_cycles(walk: Walk, first: int, nodes: Iterable[int]) -> list[int]:
    """Return those of the nodes that lead back to themselves by objects from number `first` on."""
    nodes = set(nodes)
    children = {n: [child for child in walk.children[n] if child >= first] for n in below(walk, first, nodes)}
    found = components(children, nodes)
    return sorted(n for each in found for n in nodes.intersection(each) if len(each) > 1 or n in children[n])


def _cycles(walk: Walk, first: int, tied: list[int], stuck: list[int], whole: set[int]) -> Iterator[tuple[LiveRoot, list[int]]]:
    """Yield the roots of cycles through C++, both those that a cleanup can break and those that something else may hold, too.

    A `stuck` object has no holder outside, by its count of references. A dict of hooks among `tied` has one more, its own
    tensor: C++ keeps the dict for that.
    """
    autograd = walk.referents.autograd
    tensors = [n for n in whole if walk.kind[n] == "tensor"]
    hooks = set[int]() if autograd is None else {id(d) for n in tensors for d in autograd.hooks(walk.objects[n])}
    held = below(walk, first, [n for n in tied if id(walk.objects[n]) not in hooks])
    loose = [n for n in {*tied, *stuck} if n not in held]
    if loose:
        inside = below(walk, first, loose) - held
        closing = (
            [] if autograd is None else [n for n in inside if n in tensors and autograd.may_close_a_cycle(walk.objects[n])]
        )
        if closing and (left := _Collector(walk, inside).run(closing)):
            held |= below(walk, first, left)
            inside, closing, loose = inside - held, [n for n in closing if n not in held], [n for n in loose if n not in held]
        if closing:
            what = _tie(walk, inside)
            yield LiveRoot(kind="cache", label=CPP_CYCLE, objects=(), what=what, cache="cycle"), sorted({*closing, *loose})
        else:
            held |= inside
    if held:
        yield LiveRoot(kind="library", label=CPP_CYCLE, objects=(), what=_tie(walk, held)), sorted(held & {*tied, *stuck})


def _tie(walk: Walk, cycle: Iterable[int]) -> str:
    """Return in words the reference that closes a cycle which Python cannot collect, as far as it shows."""
    by_kind: dict[str, list[Any]] = {}
    for n in cycle:
        by_kind.setdefault(walk.kind[n], []).append(walk.objects[n])
    autograd = walk.referents.autograd
    tensors = by_kind.get("tensor", ())
    hooked = autograd is not None and any(autograd.has_hooks(tensor) for tensor in tensors)
    with_graph = 0 if autograd is None else sum(map(autograd.has_gradient_with_graph, tensors))
    what = "a hook refers to its own tensor" if hooked else "a graph, a view or a C library refers back to it"
    if with_graph and not hooked:
        what = f"gradients of {counted(with_graph, 'tensor')} keep their graph, as backward(create_graph=True) leaves them"
    if not hooked and "array" in by_kind:
        what = "an array of objects refers back to itself"
    return f"{what}: Python cannot collect such a cycle"


def _is_worth_it(region: Region, held: list[int], name_above: int) -> bool:
    walk, points = region.walk, region.points(held)
    storages = {storage for n in below(walk, 0, points) for storage in walk.holds.get(n, ())}
    nbytes = sum(walk.storages[storage].nbytes for storage in storages)
    return nbytes > name_above or any(walk.kind[n] == "learner" or n in walk.only_stale for n in points)


def _count(walk: Walk, garbage: list[int]) -> str:
    """Return in words the largest things among garbage, e.g. `2 earlier Learners`; without any, its tensors.

    Objects without memory are not counted: copies without data, made to predict a fit, are no earlier Learners.
    """
    leading = walk.leading_to([n for n in garbage if n in walk.holds], walk.only_stale.stop)
    kinds = Counter(walk.kind[n] for n in garbage if n in leading)
    for kind, name in (("learner", "earlier Learner"), ("model", "module"), ("loader", "DataLoader")):
        if kinds[kind]:
            return counted(kinds[kind], name)
    return counted(kinds["tensor"], "tensor")
