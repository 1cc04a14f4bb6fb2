"""The compiled part of the heap walk finds what Python finds, on any heap, and keeps nothing."""

from __future__ import annotations

import gc
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nbguard.memory.scan.heap import native
from nbguard.memory.scan.heap.kinds import Kinds
from nbguard.memory.scan.outside.region import _upwards
from tests.scan.heaps import graph_of, hostile_heap, random_heap, uninitialised, walk_of, walked_by
from tests.thorough import examples

pytestmark = [
    pytest.mark.skipif(native.compiled is None, reason=native.why_pure),
    pytest.mark.usefixtures("frozen_libraries"),
]


def _in_both_ways(values: list[Any], most_tensors: int = 25_000) -> Any:
    """Return what both find, after comparing it. At the first look Python makes the dicts of attributes that were inline."""
    graph_of(values, most_tensors)
    with walked_by(None):
        by_python = graph_of(values, most_tensors)
    compiled = graph_of(values, most_tensors)
    assert compiled == by_python
    return compiled


def test_any_heap_is_walked_alike() -> None:
    with_storages = 0
    for seed in range(examples(80)):
        graph, _, _ = _in_both_ways(random_heap(seed))
        with_storages += bool(graph.storages)
    assert with_storages > examples(80) // 2


def test_as_many_tensors_are_left_out() -> None:
    values = [[torch.ones(n + 1) for n in range(30)], {"more": [torch.ones(2) for _ in range(9)]}, [[torch.ones(3)]] * 70]
    for most in (0, 1, 7, 29, 30, 31, 39, 40, 41):
        _, tensors, left_out = _in_both_ways(values, most)
        assert (tensors, left_out > 0) == (min(most, 40), most < 40)


class _Empty:
    """The user's own class of plain data."""

    def __init__(self, n: int) -> None:
        self.n = n


class _Caching(_Empty):
    """One that keeps a tensor of all its instances."""

    kept: Any = None


@pytest.mark.parametrize(
    "hide",
    [
        lambda t: t,
        lambda t: [t],
        lambda t: {"a": (1, [t])},
        lambda t: lambda: t,
        lambda t: torch.nn.ParameterList([t]),
        lambda t: [[n] for n in range(70)] + [[t]],
        lambda t: t.numpy(),
    ],
)
@pytest.mark.parametrize("rows", [lambda n: n, str, lambda n: {str(n): n}, lambda n: [n, (n,)], _Empty])
@pytest.mark.parametrize("way", [True, False])
def test_a_tensor_hidden_in_plain_data_is_found(hide: Callable[[Any], Any], rows: Callable[[int], Any], way: bool) -> None:
    tensor = torch.ones(999)
    data: list[Any] = [rows(n) for n in range(700)]
    data[432] = hide(tensor)
    with walked_by(native.compiled if way else None):
        for value in (data, tuple(data), dict(enumerate(data))):
            graph, _, _ = graph_of([value])
            assert [storage.nbytes for storage in graph.storages] == [3996]


@pytest.mark.parametrize("way", [True, False])
def test_a_tensor_of_the_instances_class_is_found(way: bool) -> None:
    data = [_Caching(n) for n in range(100)]
    with walked_by(native.compiled if way else None):
        assert not graph_of([data])[0].storages
        _Caching.kept = torch.ones(5)
        try:
            assert [storage.nbytes for storage in graph_of([data])[0].storages] == [20]
        finally:
            _Caching.kept = None


@pytest.mark.parametrize("way", [True, False])
@pytest.mark.parametrize(
    "make", [lambda n: list(range(n)), lambda n: [{"id": k} for k in range(n)], lambda n: {str(k): k for k in range(n)}]
)
def test_large_plain_data_is_passed_over(make: Callable[[int], Any], way: bool) -> None:
    data = make(100_000)
    with walked_by(native.compiled if way else None):
        assert len(walk_of([data]).objects) == 1


def test_hostile_heaps_are_survived() -> None:
    blanks = uninitialised()
    assert len(blanks) > 20
    for seed in range(examples(40)):
        _in_both_ways(hostile_heap(seed, blanks))


@pytest.mark.slow
def test_a_chain_of_a_million_is_walked_without_recursion() -> None:
    """In a process of its own, with a small stack."""
    code = """
import threading, torch
from nbguard.memory.scan.heap import native
from tests.scan.heaps import walk_of
assert native.compiled is not None
def look():
    class Node: pass
    last = Node(); last.tensor = torch.ones(3); nodes = [last]
    chain = [torch.ones(4)]
    for _ in range(1_000_000):
        chain = [chain]
    for _ in range(100_000):
        node = Node(); node.next = nodes[-1]; nodes.append(node)
    walk = walk_of([chain, nodes[-1], [nodes[-1]] * 100])
    assert len(walk.storages) == 2, walk.storages
    assert len(walk.objects) > 1_100_000
    del walk
    while type(chain) is list: chain = chain[0]
    while nodes: nodes.pop().__dict__.clear()
threading.stack_size(1 << 20)
thread = threading.Thread(target=look); thread.start(); thread.join()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_the_tracked_objects_of_a_kind_are_the_same() -> None:
    keep = [torch.ones(3), torch.nn.Linear(2, 2)]
    kinds = Kinds()
    for wanted in ({"tensor"}, {"model"}, {"tensor", "graph"}, {"nothing"}):
        compiled = kinds.tracked(wanted)
        with walked_by(None):
            by_python = kinds.tracked(wanted)
        assert [*map(id, compiled)] == [*map(id, by_python)]
    assert any(each is keep[0] for each in kinds.tracked({"tensor"}))


def test_the_same_objects_refer_to_some_of_any_heap() -> None:
    assert native.compiled is not None
    blanks = uninitialised()
    for seed in range(examples(40)):
        values = [*random_heap(seed), *hostile_heap(seed, blanks)]
        asked = random.Random(seed).sample(walk_of(values).objects, 20)
        objects, ids = gc.get_objects(), {*map(id, asked)}
        expected = [id(obj) for obj in objects if not ids.isdisjoint(map(id, gc.get_referents(obj)))]
        before = sys.getrefcount(asked[0])
        found, followed, left = native.compiled.referrers(objects, asked, set(), 1, 500)
        found = [*map(id, found)]
        after = sys.getrefcount(asked[0])

        assert found == expected
        assert (followed, left) == ([], 0)
        assert after == before


def test_holders_are_followed_upwards_to_the_ends() -> None:
    assert native.compiled is not None
    for seed in range(examples(40)):
        chooser = random.Random(seed)
        values = random_heap(seed)
        above = [values]
        for _ in range(chooser.randrange(1, 30)):  # holders made later and earlier than what they hold
            above.append([chooser.choice(above)] if chooser.random() < 0.5 else {"held": chooser.choice(above)})
        asked = [*walk_of(values).objects[:3], above[0]]
        objects = gc.get_objects()
        ends = {id(obj) for obj in (asked, above, objects, sys._getframe(), globals(), sys.modules)}
        ends |= {id(each) for each in chooser.sample(above, 2)}
        compiled = native.compiled.referrers(objects, asked, ends, 50, 400)
        with walked_by(None):
            by_python = _upwards(objects, asked, ends, 50)
        before = {*map(id, objects)} - {id(asked)}  # `gc.get_referrers` finds later objects, too
        found, expected = ({*map(id, one[0])} & before for one in (compiled, by_python))
        followed = {*map(id, compiled[1])}
        if len(followed) < 400 and len(by_python[1]) < 400:
            assert found == expected
            assert followed == {*map(id, by_python[1])} & before
        whole = {*map(id, asked)} | followed
        met = {*map(id, compiled[0])}
        assert all(id(obj) in met for obj in objects if not whole.isdisjoint(map(id, gc.get_referents(obj))))
        assert followed.isdisjoint(ends)


def test_walks_keep_nothing() -> None:
    from tests.scan.check_references import kept_by_walks

    assert kept_by_walks(examples(150)) == []


def test_the_python_that_runs_counts_the_references() -> None:
    """A release's wheel is compiled by one Python and runs in newer ones, whose immortal objects must not be counted."""
    source = Path(native.__file__).with_name("_heapwalk.c").read_text(encoding="utf-8")
    code = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)

    assert "Py_DecRef(" in code
    assert not re.findall(r"Py_X?(?:INCREF|DECREF|NewRef|SETREF)|Py_CLEAR|Py_RETURN_\w+", code)


def test_a_failing_question_ends_the_walk_and_keeps_nothing() -> None:
    assert native.compiled is not None
    value = [object(), [torch.ones(1)], {}]

    def fails(_: Any) -> Any:
        raise RuntimeError("a question of ours failed")

    gc.collect()
    counts = [sys.getrefcount(each) for each in value]
    for _ in range(50):
        walker = native.compiled.Walker(fails, fails, fails, 64, 200)
        with pytest.raises(RuntimeError):
            walker.follow(([value], ["object"], {id(value): 0}, []), set(), {}, 10, 10)
        walker = native.compiled.Walker(lambda _: "no pair", fails, fails, 64, 200)
        with pytest.raises((TypeError, SystemError)):
            walker.follow(([value], ["object"], {id(value): 0}, []), set(), {}, 10, 10)
        with pytest.raises(RuntimeError):
            native.compiled.take(list(value), fails)
    assert counts == [sys.getrefcount(each) for each in value]


def test_the_reason_for_walking_in_python_is_known() -> None:
    code = "from nbguard.memory.scan.heap import native; print(native.compiled, native.why_pure)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**__import__("os").environ, "NBGUARD_PURE": "1"},
    )
    assert done.stdout.strip() == "None NBGUARD_PURE is set"
