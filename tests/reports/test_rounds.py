"""Rounds of one action compared, from what was held after each: what piles up, and what each round replaces."""

from __future__ import annotations

from nbguard.memory.core.analysis import Analysis
from nbguard.memory.reports.notices.causes import HeldStorages, held_storages
from nbguard.memory.reports.notices.rounds import RoundsReport, compare_rounds
from nbguard.testing import make_facts, make_graph

MiB = 1024**2
_OTHER = ("cpu", 1 << 20)
"""An address at which nothing is at the end."""


def _compared(states: list[HeldStorages], last: Analysis) -> RoundsReport:
    return compare_rounds("step()", states, (), last)


def test_a_global_that_each_round_binds_anew_is_no_leak() -> None:
    """The new object is made before the old one goes: the addresses take turns."""
    last = Analysis(make_facts(make_graph({"cache": ["c"]}, {}, {"c": 4 * MiB}, {"c": "tensor"})))
    here = held_storages(last)
    there = {_OTHER: (4 * MiB, frozenset({"cache"}))}

    for states in ([{}, here, there, here], [{}, there, here], [there, here, there, here]):
        report = _compared(states, last)
        assert not report.leaks
        assert not any(report.rounds[1:])
    assert _compared([there, here, there, here], last).left == ()


def test_what_piles_up_beside_it_is_told_alone() -> None:
    edges = {"hist": {"[0]": "a", "[1]": "b", "[2]": "c"}}
    sizes = dict.fromkeys("abc", 2 * MiB) | {"cache": 4 * MiB}
    graph = make_graph({"hist": ["hist"], "cache": ["cache"]}, edges, sizes, dict.fromkeys(sizes, "tensor"))
    last = Analysis(make_facts(graph))
    whole = held_storages(last)
    (a, b, _, cache) = (storage.key for storage in graph.storages)
    kept = {_OTHER: whole[cache]}
    states: list[HeldStorages] = [kept, {a: whole[a], cache: whole[cache]}, {a: whole[a], b: whole[b]} | kept, dict(whole)]
    report = _compared(states, last)

    assert report.leaks
    assert report.rounds == (2 * MiB,) * 3
    assert [(one.holder, one.nbytes) for one in report.left] == [("hist[1]", 2 * MiB)]
