"""How long it takes to say which names hold which bytes of a graph of references, in four ways, in one run.

    python tests/benchmarks/ownership.py [--rounds 5]

  owner sets     nbguard's (nbguard/memory/core/references/owner_sets.py): for each storage the set of names that lead to
                  it, in one pass
  a walk each    one walk per name, and the sets put together from them
  dominators     Cooper, Harvey and Kennedy's algorithm: which one name, if any, every way to a storage goes through
  rustworkx      the same dominators from its compiled immediate_dominators, with the conversion (where it is installed)
Every way must agree: owner sets and walks on all sets, dominators on every storage with a single owner. Of a storage that
several names hold, dominators say only that no single one does: that share of the bytes is printed. Medians of interleaved
rounds; nothing fails by time.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Sequence

from nbguard.memory.core.facts import Graph, Node, Root, StorageFact
from nbguard.memory.core.references.graph import reach, storages_of
from nbguard.memory.core.references.owner_sets import owners_of_nodes, owners_of_storages

Way = Callable[[Graph], list[int | None]]
_MANY_WALKS = 3e7  # names × nodes above which a walk each is not waited for


class Scene:
    """A graph that grows: nodes with children, some of which hold a storage."""

    def __init__(self) -> None:
        self.children: list[list[int]] = []
        self.storages: dict[int, int] = {}

    def node(self, *children: int, holds: bool = False) -> int:
        """Add a node and return its number."""
        self.children.append(list(children))
        number = len(self.children) - 1
        if holds:
            self.storages[number] = len(self.storages)
        return number

    def graph(self, names: Sequence[int]) -> Graph:
        """Return the graph, with a name for each of these nodes."""
        nodes = (
            Node(kind="object", type_name="", ref=n, children=tuple(below), labels=("",) * len(below), storages=self._held(n))
            for n, below in enumerate(self.children)
        )
        facts = (StorageFact("cpu", 1000) for _ in self.storages)
        return Graph(
            tuple(Root(kind="name", label=f"n{i}", nodes=(n,)) for i, n in enumerate(names)), tuple(nodes), tuple(facts)
        )

    def _held(self, node: int) -> tuple[int, ...]:
        return (self.storages[node],) if node in self.storages else ()


def experiments(names: int, handles: float, layers: int = 100) -> Graph:
    """Learners full of cycles (callbacks refer back); this share of the names are handles to one and the same."""
    scene, dice = Scene(), random.Random(0)

    def learner() -> int:
        found = scene.node(*(scene.node(scene.node(scene.node(holds=True), holds=True)) for _ in range(layers)))
        scene.children[found] += [scene.node(scene.node(found)) for _ in range(30)]
        return found

    big = learner()
    return scene.graph([scene.node(big) if dice.random() < handles else learner() for _ in range(names)])


def lists(names: int, tensors: int) -> Graph:
    """Lists of tensors; each tensor is in one of them, or in two or three."""
    scene, dice = Scene(), random.Random(0)
    found = [scene.node() for _ in range(names)]
    for _ in range(tensors):
        tensor = scene.node(holds=True)
        for owner in dice.sample(found, min(names, dice.choice([1, 1, 1, 2, 3]))):
            scene.children[owner].append(tensor)
    return scene.graph(found)


def chain(names: int, length: int) -> Graph:
    """A doubly linked list with names all along it. (The dominators' time grows with the square of its length.)"""
    scene = Scene()
    for number in range(length):
        scene.node(*([number - 1] if number else []), *([number + 1] if number < length - 1 else []), holds=number % 5 == 0)
    return scene.graph([number * length // names for number in range(names)])


def tangle(names: int, nodes: int, references: int) -> Graph:
    """References at random: one large strongly connected component and many small ones."""
    scene, dice = Scene(), random.Random(0)
    for _ in range(nodes):
        scene.node(holds=True)
    for _ in range(references):
        scene.children[dice.randrange(nodes)].append(dice.randrange(nodes))
    return scene.graph([dice.randrange(nodes) for _ in range(names)])


def owner_sets(graph: Graph) -> list[int | None]:
    """Return the owners of each storage, as a bit for each name."""
    return [*owners_of_storages(graph, owners_of_nodes(graph, (root.nodes for root in graph.roots)))]


def a_walk_each(graph: Graph) -> list[int | None]:
    """Return the same by one walk per name."""
    found = [0] * len(graph.storages)
    for number, root in enumerate(graph.roots):
        for storage in storages_of(graph, reach(graph, root.nodes)):
            found[storage] |= 1 << number
    return [*found]


def _with_one_root(graph: Graph) -> tuple[list[list[int]], int, int]:
    """Return (children, first name, root): nodes, storages, names and one root above them, numbered in this order."""
    storages = len(graph.nodes)
    names = storages + len(graph.storages)
    children = [[*node.children, *(storages + held for held in node.storages)] for node in graph.nodes]
    children += [[] for _ in graph.storages]
    children += [[*root.nodes] for root in graph.roots]
    return [*children, [*range(names, names + len(graph.roots))]], names, names + len(graph.roots)


def dominators(graph: Graph) -> list[int | None]:
    """Return the name that alone holds each storage, as its bit; None where there is no such name."""
    children, names, root = _with_one_root(graph)
    order: list[int] = []
    seen, path = {root}, [(root, iter(children[root]))]
    while path:
        node, below = path[-1]
        child = next((child for child in below if child not in seen), None)
        if child is None:
            order.append(path.pop()[0])
        else:
            seen.add(child)
            path.append((child, iter(children[child])))
    rank = {node: at for at, node in enumerate(order)}
    parents: dict[int, list[int]] = {}
    for node in order:
        for child in children[node]:
            parents.setdefault(child, []).append(node)
    above, changed = {root: root}, True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            new = -1
            for parent in parents[node]:
                if parent in above:
                    new = parent if new < 0 else _meet(above, rank, parent, new)
            if above.get(node) != new:
                above[node], changed = new, True
    return _names_above(graph, above, names, root)


def _meet(above: dict[int, int], rank: dict[int, int], one: int, other: int) -> int:
    while one != other:
        while rank[one] < rank[other]:
            one = above[one]
        while rank[other] < rank[one]:
            other = above[other]
    return one


def _names_above(graph: Graph, above: dict[int, int], names: int, root: int) -> list[int | None]:
    known: dict[int, int | None] = {node: 1 << (node - names) for node in range(names, root)} | {root: None}
    found: list[int | None] = []
    for storage in range(len(graph.nodes), names):
        path = []
        node = storage if storage in above else root
        while node not in known:
            path.append(node)
            node = above[node]
        known.update(dict.fromkeys(path, known[node]))
        found.append(known[storage] if storage in above else None)
    return found


def rustworkx_dominators(graph: Graph) -> list[int | None]:
    """Return the same by rustworkx."""
    import rustworkx

    children, names, root = _with_one_root(graph)
    made = rustworkx.PyDiGraph()
    made.add_nodes_from(range(root + 1))
    made.add_edges_from_no_data([(node, child) for node, below in enumerate(children) for child in below])
    return _names_above(graph, dict(rustworkx.immediate_dominators(made, root)), names, root)


def compare(title: str, graph: Graph, ways: dict[str, Way], rounds: int) -> None:
    """Time the ways on one graph, check them against each other, and print a line."""
    if len(graph.roots) * len(graph.nodes) > _MANY_WALKS:
        ways = {name: way for name, way in ways.items() if way is not a_walk_each}
    times: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, list[int | None]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            answers[name] = way(graph)
            times[name].append(time.perf_counter() - started)
    truth = [mask or 0 for mask in answers["owner sets"]]
    for name, answer in answers.items():
        for mask, found in zip(truth, answer, strict=True):
            single = mask if mask and not mask & (mask - 1) else None
            assert found == (mask if name in ("owner sets", "a walk each") else single), (title, name)
    ours = statistics.median(times["owner sets"])
    shared = sum(fact.nbytes for fact, mask in zip(graph.storages, truth, strict=True) if mask & (mask - 1))
    share = shared / sum(fact.nbytes for fact, mask in zip(graph.storages, truth, strict=True) if mask)
    line = "  ".join(
        f"{name} {statistics.median(found) / ours:6.1f} ×" for name, found in times.items() if name != "owner sets"
    )
    print(f"  {title:<34} {len(graph.nodes):>7,} {ours * 1000:>8.1f} ms   {line}   shared {share:4.0%}", flush=True)


def main() -> None:
    """Compare on graphs of several shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    ways: dict[str, Way] = {"owner sets": owner_sets, "a walk each": a_walk_each, "dominators": dominators}
    if importlib.util.find_spec("rustworkx"):
        ways["rustworkx"] = rustworkx_dominators
    print("nodes, time of owner sets, and how many times that the others take; bytes that several names share")
    for title, graph in {
        "10 names, a third one Learner's": experiments(10, 0.3),
        "100 names, a third one Learner's": experiments(100, 0.3),
        "1,000 names, 90 % one Learner's": experiments(1000, 0.9),
        "1,000 names of one large Learner": experiments(1000, 1.0, layers=1000),
        "10 lists of 10,000 tensors": lists(10, 10_000),
        "1,000 lists of 10,000 tensors": lists(1000, 10_000),
        "10 names on a chain of 3,000": chain(10, 3_000),
        "100 names on a chain of 3,000": chain(100, 3_000),
        "10 names in a tangle": tangle(10, 20_000, 40_000),
        "1,000 names in a tangle": tangle(1000, 20_000, 24_000),
    }.items():
        compare(title, graph, ways, rounds)


if __name__ == "__main__":
    main()
