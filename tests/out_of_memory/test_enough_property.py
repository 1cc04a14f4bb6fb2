"""Random notebooks over the model of the allocator: after an advice that is called enough, the cell always comes further."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import AllocatorStats, Facts, Graph, Node, Root, StorageFact
from nbguard.memory.core.oom_facts import AllocatorCounts, EarlierFailure, OomFact, OomNote
from nbguard.memory.out_of_memory.card import OomCard, build_card
from nbguard.memory.out_of_memory.rerun import RerunVerdict
from nbguard.memory.scan.oom.failed_runs import hash_of
from nbguard.memory.scan.oom.names import length_of_list, made_by, names_in, reached_by
from nbguard.testing import make_facts
from tests.allocator.test_largest import facts_of
from tests.thorough import examples

MIB = 2**20
SIZES = st.sampled_from([0.5, 1, 3, 9, 12, 30, 60, 100, 150, 250])
NAMES, LISTS = st.sampled_from("abcde"), st.sampled_from("pq")
COUNTS = st.integers(1, 6)
STATEMENTS = st.one_of(
    st.builds("{} = f({})".format, NAMES, SIZES),
    st.builds("{} = f({})".format, NAMES, SIZES),
    st.builds("f({})".format, SIZES),
    st.builds("{} = None".format, NAMES),
    st.builds("{}.append(f({}))".format, LISTS, SIZES),
    st.builds("{} = []".format, LISTS),
    st.builds("{} = [f({}) for _ in range({})]".format, LISTS, SIZES, COUNTS),
    st.builds("del {}[::2]".format, LISTS),
    st.builds("for _ in range({}): {}.append(f({}))".format, COUNTS, LISTS, SIZES),
    st.builds("for _ in range({}): {} = f({})".format, COUNTS, NAMES, SIZES),
    st.builds("{} = [{}, f({})]".format, NAMES, NAMES, SIZES),
)


class Block:
    """A tensor: its block is free as soon as nothing refers to it, or while it is parked."""

    def __init__(self, notebook: Notebook, address: int) -> None:
        self.address: int | None = address
        self._free = weakref.finalize(self, notebook.free, address)

    def park(self) -> None:
        """Give the block back, and stay as an object."""
        self._free()
        self.address = None


@dataclass
class Notebook:
    """A notebook whose `f(n)` takes `n` MiB of a model, as it goes on from cell to cell."""

    model: CachingAllocator
    names: dict[str, Any]
    blocks: weakref.WeakSet[Block]
    made: int = 0
    made_blocks: int = 0
    failed: AllocatorCounts | None = None
    note: OomNote | None = None
    inputs: dict[str, int] | None = None  # hashes of what the cell that failed last had read

    @classmethod
    def of(cls, capacity: int) -> Notebook:
        model = CachingAllocator(AllocatorSettings(), capacity, None, "2.13", SimulatedDriver(capacity))
        notebook = cls(model, {}, weakref.WeakSet())
        notebook.names.update({"p": [], "q": []} | dict.fromkeys("abcde"))
        return notebook

    def free(self, address: int) -> None:
        self.model.free(address)

    def take(self, size: float) -> Block:
        nbytes = int(size * MIB)
        try:
            address = self.model.malloc(nbytes)
        except SimulatedOutOfMemoryError:
            self.failed, model = self.counts(), self.model
            free = model.driver.free()
            segment = 2 * MIB if nbytes <= MIB else 20 * MIB if nbytes < 10 * MIB else nbytes
            self.note = OomNote(
                device="cuda:0",
                requested=segment,
                total=model.capacity,
                free=free or 0,
                limit=None,
                allocated=model.allocated,
                reserved=model.reserved,
                peak_allocated=model.peak_allocated,
                peak_reserved=model.peak_reserved,
                counts=self.failed,
            )
            raise
        self.made += self.model.live[address].size
        self.made_blocks += 1
        block = Block(self, address)
        self.blocks.add(block)
        return block

    def counts(self) -> AllocatorCounts:
        model = self.model
        return AllocatorCounts(
            allocated=model.allocated,
            reserved=model.reserved,
            made=self.made,
            made_blocks=self.made_blocks,
            retries=model.num_alloc_retries,
        )

    def run(self, source: str) -> int | None:
        """Run a cell; return the line in which it ran out of memory, or None. It may end by another error."""
        space: Any = self.names
        try:
            exec(compile(source, "cell", "exec"), {"f": self.take, "range": range, "__builtins__": {}}, space)
        except SimulatedOutOfMemoryError as error:
            trace = error.__traceback__
            assert trace is not None
            assert trace.tb_next is not None
            return trace.tb_next.tb_lineno
        except (TypeError, AttributeError):
            return None
        return None

    def facts(
        self,
        source: str,
        at: int,
        start: AllocatorCounts,
        before: dict[str, int],
        earlier: tuple[EarlierFailure, ...] = (),
    ) -> Facts:
        """Return what a scan would tell after the failure, from the real analysis of the cell's source."""
        live = [block for block in self.blocks if block.address is not None]
        number = {id(block): n for n, block in enumerate(live)}
        storages = tuple(
            StorageFact("cuda:0", self.model.live[block.address].size, block.address) for block in live if block.address
        )
        nodes = [Node(kind="tensor", type_name="Tensor", ref=id(block), storages=(n,)) for n, block in enumerate(live)]
        roots = []
        for name, value in self.names.items():
            below = tuple(sorted(number[id(block)] for block in _blocks_in(value) if id(block) in number))
            if below:
                nodes.append(Node(kind="object", type_name="list", ref=id(value), children=below, labels=("",) * len(below)))
                roots.append(Root(kind="name", label=name, nodes=(len(nodes) - 1,)))
        reads, binds = names_in(source, at)
        reaches = reached_by(source, {}, frozenset())
        changed = {name for name, value in self.names.items() if before.get(name) != id(value)}
        assert self.note is not None
        stats = AllocatorStats(
            allocated=self.model.allocated, reserved=self.model.reserved, peak_allocated=self.model.peak_allocated
        )
        oom = OomFact(
            device="cuda:0",
            requested=self.note.requested,
            uses=tuple(reads),
            bound=tuple(binds | changed),
            makes=tuple(made_by(source, at, frozenset())),
            reaches=None if reaches is None else tuple(reaches),
            start=start,
            has_replaced=any(name in before for name in changed),
            elements=length_of_list(source.splitlines()[at - 1], 1),
            earlier=earlier,
            note=self.note,
        )
        device = replace(facts_of(self.model), allocator=stats)
        return replace(make_facts(Graph(tuple(roots), tuple(nodes), storages), device=device), oom=oom)

    def follow(self, commands: tuple[str, ...]) -> None:
        """Do what an advice says."""
        for command in commands:
            _, *words = command.split()
            parks = words[:1] == ["--park"]
            for name in words[1:] if parks else words:
                if parks:
                    for block in _blocks_in(self.names[name]):
                        block.park()
                else:
                    del self.names[name]
        if commands:
            self.model.empty_cache()


def _blocks_in(value: Any) -> list[Block]:
    if isinstance(value, list):
        return [block for element in value for block in _blocks_in(element)]
    return [value] if isinstance(value, Block) else []


@dataclass
class _Failure:
    """A cell that has just run out of memory."""

    notebook: Notebook
    card: OomCard
    source: str
    made_blocks: int  # by the cell, until it failed
    as_earlier: EarlierFailure  # as a later failure of the same source is told of it


def _failed(notebook: Notebook, cells: list[str], earlier: _Failure | None = None) -> _Failure | None:
    """Return the failure of the last cell; None if it did not run out of memory."""
    for cell in cells[:-1]:
        notebook.run(cell)
    source, start = cells[-1], notebook.counts()
    before = {name: id(value) for name, value in notebook.names.items()}
    inputs = _inputs(notebook, source)
    notebook.failed = None
    at = notebook.run(source)
    if at is None or notebook.failed is None:
        return None
    is_same = earlier is not None and inputs is not None and inputs == notebook.inputs
    told = () if earlier is None else (replace(earlier.as_earlier, is_of_same_inputs=is_same),)
    notebook.inputs = inputs
    card = build_card(Analysis(notebook.facts(source, at, start, before, told)))
    assert card is not None
    assert notebook.note is not None
    counts = notebook.failed
    run = EarlierFailure(
        cell=1,
        requested=notebook.note.requested,
        taken=max(0, counts.allocated - start.allocated),
        made=counts.made - start.made,
        made_blocks=counts.made_blocks - start.made_blocks,
        peak=notebook.model.peak_allocated,
        needed=card.needed,
    )
    most = run.made_blocks if earlier is None else max(run.made_blocks, earlier.made_blocks)
    return _Failure(notebook, card, source, most, run)


def _inputs(notebook: Notebook, source: str) -> dict[str, int] | None:
    """Return hashes of what a cell reads; None where it may have changed inside."""
    reached = reached_by(source, {}, frozenset())
    assert reached is not None
    read = (reached - made_by(source, sys.maxsize, frozenset())) & notebook.names.keys()
    hashes = {name: hash_of(notebook.names[name]) for name in read}
    return None if None in hashes.values() else {name: value for name, value in hashes.items() if value is not None}


CELLS = st.lists(st.lists(STATEMENTS, min_size=1, max_size=5).map("\n".join), min_size=1, max_size=4)
CELL = st.lists(STATEMENTS, min_size=1, max_size=8).map("\n".join)
CAPACITIES = st.integers(200, 600).map(lambda mib: mib * MIB)


@given(CAPACITIES, CELLS, CELL)
@example(200 * MIB, ["f(150)\na = f(60)"], "p = [f(30) for _ in range(5)]")  # begins by filling a hole
@example(  # its first block pins a free segment
    206 * MIB, ["a = f(3)\na = f(0.5)\np = [f(60) for _ in range(3)]"], "p = [f(12) for _ in range(2)]"
)
@settings(max_examples=examples(200), deadline=None)
def test_what_is_enough_is(capacity: int, cells: list[str], cell: str) -> None:
    _check(lambda: _failed(Notebook.of(capacity), [*cells, cell]))


@given(CAPACITIES, CELLS, CELL, CELLS)
@example(300 * MIB, ["a = f(60)"], "b = f(100)\nc = f(100)\nd = f(250)", ["e = f(60)"])  # can never fit, as it has shown
@example(500 * MIB, ["a = f(60)"], "b = f(150)\nc = f(150)\nd = f(150)", ["b = c = None", "a = f(250)"])
@settings(max_examples=examples(200), deadline=None)
def test_what_is_enough_is_beyond_an_earlier_failure(capacity: int, cells: list[str], cell: str, between: list[str]) -> None:
    """A cell fails, others run, and it fails again, perhaps earlier."""

    def failed() -> _Failure | None:
        notebook = Notebook.of(capacity)
        first = _failed(notebook, [*cells, cell])
        return None if first is None else _failed(notebook, [*between, cell], first)

    _check(failed)


def _check(failed: Callable[[], _Failure | None]) -> None:
    """Follow each advice that is called enough, or that nothing can be, and run the cell again."""
    first = failed()
    if first is None:
        return
    for fix in first.card.fixes:
        if fix.verdict not in (RerunVerdict.RERUN, RerunVerdict.NEVER):
            continue
        event(str(fix.verdict))
        again = failed()
        assert again is not None
        notebook = again.notebook
        assume(again.card.fixes == first.card.fixes)  # not so where an object came to lie where one of before the cell had lain
        notebook.follow(fix.commands)
        blocks, notebook.failed = notebook.made_blocks, None
        at = notebook.run(again.source)
        if fix.verdict is RerunVerdict.NEVER:
            assert at is not None
        else:
            assert at is None or notebook.made_blocks - blocks > again.made_blocks, (fix, at)
