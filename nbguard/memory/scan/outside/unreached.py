"""Objects that none of the user's roots leads to, either uncollected garbage, or objects that other code holds.

These are the objects that no root leads to at all, and the objects that only stale roots (the last error, `Out`) lead to: a
cleanup would take the latter for theirs. The collector's own rule decides: an object whose references all come from the set
itself has no holder outside, and whatever no object with such a holder leads to is garbage. A holder outside is followed
upwards, in whole passes over the heap, to a module's global if there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from nbguard.memory.core.references.components import components
from nbguard.memory.scan.heap.unwalked import fill_rest
from nbguard.memory.scan.heap.walk import MORE_TENSORS, Walk
from nbguard.memory.scan.outside.collectable import stuck_in_cpp
from nbguard.memory.scan.outside.outside_references import Region, below
from nbguard.memory.scan.outside.referrers import name_by_referrers, unnamed_roots
from nbguard.memory.scan.outside.saved_copies import held_by_cpp_alone, without_saved_copies
from nbguard.memory.scan.roots.root import LiveRoot
from nbguard.units import counted

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
    if by_rest:
        named.append(
            (
                LiveRoot(kind="library", label="memory not scanned", objects=(), what="a long graph or very many tensors"),
                by_rest,
            )
        )
    alive = below(walk, first, held + [entry for _, entries in named for entry in entries])
    explained = region.points(entry for _, entries in named for entry in entries)
    garbage = [n for n in range(unreached, len(walk.objects)) if n not in alive]
    unknown = sorted(region.pointing(held, explained))
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
    storages = {storage for n in points for storage in walk.holds.get(n, ())}
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
