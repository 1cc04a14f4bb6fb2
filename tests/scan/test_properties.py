"""Any namespace of real objects: who holds what, what a release frees, to the byte, against what was put into it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from nbguard.memory.cleanup.apply.apply import apply
from nbguard.memory.cleanup.plan.plan import Outcome, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.references.holders import holders
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.scan.targets import resolve_targets
from tests.scan.containers import CARRYING, HOLDING, WEAK
from tests.thorough import examples, half_in_ci

pytestmark = pytest.mark.usefixtures("frozen_libraries")


@pytest.fixture(autouse=True, scope="module")
def _only_what_is_made_here() -> Iterator[None]:
    """Hide the objects of other tests and libraries from the collector: a look at this process takes 0.2 s otherwise.

    Those too that the first optimizer imports.
    """
    torch.optim.SGD([torch.ones(1)])
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _release(names: dict[str, Any], *targets: str) -> tuple[dict[frozenset[str], int], Outcome]:
    """Do what `nbguard.release` does, but for what it does first: to look at frozen objects too. Return who held what, too."""
    notebook = Notebook(shell=None, namespace=names)
    seen = scan(notebook)
    request = Request(targets=resolve_targets(targets, names, {}, {}))
    return _held(seen.facts), apply(plan_cleanup(seen.facts, request), notebook, seen).outcome


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _held(facts: Facts) -> dict[frozenset[str], int]:
    """Return the bytes of each set of roots."""
    return {frozenset(facts.graph.roots[n].label for n in row.roots): row.retained for row in holders(facts.graph)}


@pytest.mark.parametrize("kind", half_in_ci(HOLDING))
def test_what_it_holds_is_seen_promised_and_freed(kind: str) -> None:
    tensors = [torch.ones(1000), torch.ones(100)]
    storages = [_storage(tensor) for tensor in tensors]
    names = {"it": HOLDING[kind](tensors[:1]), "other": tensors[1]}
    del tensors

    held, outcome = _release(names, "it")

    assert (held.get(frozenset({"it"})), held.get(frozenset({"other"}))) == (4000, 400)
    assert (outcome.plan.promised, outcome.realised, outcome.extra, outcome.survivors) == (4000, 4000, 0, ())
    assert [storage.expired() for storage in storages] == [True, False]


@pytest.mark.parametrize("kind", CARRYING)
def test_what_keeps_a_tensors_memory_is_its_holder(kind: str) -> None:
    tensor = torch.ones(999)
    storage = _storage(tensor)
    names = {"it": CARRYING[kind](tensor)}
    del tensor

    held, outcome = _release(names, "it")

    assert held.get(frozenset({"it"})) == 3996
    assert (outcome.plan.promised, outcome.realised, outcome.extra, outcome.survivors) == (3996, 3996, 0, ())
    assert storage.expired()


@pytest.mark.parametrize("kind", WEAK)
def test_what_it_only_knows_is_not_held(kind: str) -> None:
    tensor = torch.ones(1000)
    names = {"it": WEAK[kind]([tensor]), "real": tensor}
    del tensor

    held, outcome = _release(names, "it")

    assert held == {frozenset({"real"}): 4000}
    assert (outcome.plan.promised, outcome.realised, outcome.extra) == (0, 0, 0)


def test_memory_that_c_holds_for_somebody_is_shared_with_what_cannot_be_seen() -> None:
    """`from_numpy` keeps the array, and with it the tensor that owns the memory, in C: neither is said to hold it alone."""
    names = {"it": torch.from_numpy(torch.ones(999).numpy())}

    (row,) = [row for row in holders(scan(Notebook(shell=None, namespace=names)).facts.graph) if row.retained]

    assert (row.label, row.kind, row.retained) == ("it + libraries (Tensor)", "shared", 3996)


@dataclass(frozen=True)
class Recipe:
    """Objects to make, each of a kind and of earlier ones, with references back, and names for some of them.

    `parts` are numbers of earlier objects; `back` are (object, object) with the first one of a kind that can be added to.
    """

    kinds: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    back: tuple[tuple[int, int], ...]
    names: tuple[int, ...]

    def nbytes(self, number: int) -> int:
        """Return the size of an object that is a tensor: a sum of sizes tells its parts."""
        return 4 * 1024 << number if self.kinds[number] in CARRYING else 0

    def keeps(self, names: set[int]) -> int:
        """Return the bytes that these names keep, by what was put into what."""
        seen: set[int] = set()
        todo = [self.names[name] for name in names]
        while todo:
            number = todo.pop()
            if number not in seen:
                seen.add(number)
                todo += [] if self.kinds[number] in WEAK else self.parts[number]
                todo += [after for before, after in self.back if before == number]
        return sum(self.nbytes(number) for number in seen)


_CAN_GROW = ("list", "object", "dict subclass", "module", "list subclass")


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    count = draw(st.integers(2, 10))
    kinds, parts = [], []
    for number in range(count):
        kind = draw(st.sampled_from([*CARRYING] if number == 0 else [*CARRYING, *HOLDING, *HOLDING, *WEAK, *_CAN_GROW]))
        some = st.lists(st.integers(0, number - 1), max_size=3, unique=True) if number and kind not in CARRYING else st.just([])
        kinds.append(kind)
        parts.append(tuple(draw(some)))
    grow = [number for number, kind in enumerate(kinds) if kind in _CAN_GROW]
    every = st.integers(0, count - 1)
    back = draw(st.lists(st.tuples(st.sampled_from(grow), every), max_size=3, unique=True)) if grow else []
    return Recipe(tuple(kinds), tuple(parts), tuple(back), tuple(draw(st.lists(every, min_size=1, max_size=4))))


def _cook(recipe: Recipe, storages: dict[int, StorageWeakRef]) -> dict[str, Any]:
    """Return the namespace of a recipe, and weak references to its tensors' storages. Nothing else knows the objects then."""
    made: list[Any] = []
    for number, kind in enumerate(recipe.kinds):
        if kind in CARRYING:
            tensor = torch.ones(recipe.nbytes(number) // 4)
            storages[number] = _storage(tensor)
            made.append(CARRYING[kind](tensor))
        else:
            made.append((HOLDING.get(kind) or WEAK[kind])([made[part] for part in recipe.parts[number]]))
    for before, after in recipe.back:
        owner = made[before]
        if recipe.kinds[before] in ("list", "list subclass"):
            owner.append(made[after])
        else:
            owner.__dict__.setdefault("more", []).append(made[after])
    return {f"n{name}": made[number] for name, number in enumerate(recipe.names)}


@settings(max_examples=examples(12))
@given(recipes())
def test_any_nesting_is_accounted_for_and_freed_to_the_byte(recipe: Recipe) -> None:
    storages: dict[int, StorageWeakRef] = {}
    gc.collect()
    names = _cook(recipe, storages)
    every = set(range(len(recipe.names)))
    same = {n for n in every if recipe.names[n] == recipe.names[0]}

    rows, first = _release(names, *(f"n{name}" for name in sorted(same)))  # one of them alone would free nothing, and stay
    left = every - same
    gone = {number for number, storage in storages.items() if storage.expired()}
    again = _release(names)[1]

    for labels, nbytes in rows.items():
        if "unreachable cycles" not in labels:
            who = {int(label[1:]) for label in labels}
            alone = recipe.keeps(every) - recipe.keeps(every - who)
            assert nbytes & ~alone == 0
    assert sum(nbytes for labels, nbytes in rows.items() if "unreachable cycles" not in labels) == recipe.keeps(every)
    assert rows.get(frozenset(f"n{n}" for n in same), 0) == recipe.keeps(every) - recipe.keeps(left)
    assert (first.plan.promised, first.survivors) == (first.realised, ())
    assert sum(recipe.nbytes(number) for number in storages.keys() - gone) == recipe.keeps(left)
    assert (again.plan.promised, again.realised, again.extra) == (0, 0, 0)
