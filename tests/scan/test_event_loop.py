"""What the event loop holds until it turns is asyncio's: nobody can free it before."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

import torch

import nbguard
from nbguard.memory.cleanup.plan.plan import Outcome
from nbguard.memory.cleanup.plan.promises import promised
from nbguard.memory.core.advice import release_stale
from nbguard.memory.core.facts import Graph
from nbguard.memory.core.references.holders import holders
from nbguard.memory.scan.scan import Notebook, scan

_BYTES = 4 * 50_000


class Box:
    """An object of the user's."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


async def _generate(*kept: Any) -> AsyncIterator[int]:
    yield len(kept)


async def _drop(kept: Any) -> None:
    """Drop a suspended generator that keeps an object."""
    generator = _generate(kept)
    await anext(generator)


def _in_a_loop(names: dict[str, Any]) -> tuple[Graph, Outcome, Outcome]:
    """Drop a generator with a box of its own; return what there is then, a cleanup at once, and one after the loop's turn."""

    async def run() -> tuple[Graph, Outcome, Outcome]:
        box = Box(data=torch.ones(50_000))
        box.__dict__["itself"] = box
        await _drop(box)
        del box
        graph = scan(Notebook(shell=None, namespace=names)).facts.graph
        return graph, nbguard.release(namespace=names), await _turned(names)

    return asyncio.run(run())


async def _turned(names: dict[str, Any]) -> Outcome:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return nbguard.release(namespace=names)


def _is_exact(outcome: Outcome) -> bool:
    return (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)


def test_it_is_asyncios_until_the_loop_turns() -> None:
    gc.collect()
    gc.disable()
    try:
        graph, at_once, later = _in_a_loop({})
    finally:
        gc.enable()

    assert {row.label: row.retained for row in holders(graph)}["asyncio"] == _BYTES
    assert [root.label for root in graph.roots if root.is_ending] == ["asyncio"]
    assert _is_exact(at_once)
    assert _is_exact(later)
    assert (at_once.realised, later.realised) == (0, _BYTES)


def test_the_error_of_an_awaited_task_is_asyncios_until_the_cell_ends() -> None:
    gc.collect()

    async def fail() -> None:
        kept = torch.ones(50_000)
        raise ValueError(kept.shape)

    async def run() -> tuple[Graph, Outcome, Outcome]:
        with contextlib.suppress(ValueError):
            await asyncio.ensure_future(fail())
        graph = scan(Notebook(shell=None, namespace={})).facts.graph
        return graph, nbguard.release(namespace={}), await _turned({})

    graph, at_once, later = asyncio.run(run())

    assert {row.label: row.retained for row in holders(graph)}["asyncio"] == _BYTES
    assert _is_exact(at_once)
    assert _is_exact(later)


def test_nobody_knows_then_what_the_next_cleanup_will_free() -> None:
    gc.collect()
    facts = []

    async def run() -> None:
        await _drop(torch.ones(50_000))
        facts.append(scan(Notebook(shell=None, namespace={})).facts)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        facts.append(scan(Notebook(shell=None, namespace={})).facts)

    asyncio.run(run())

    assert [promised(fact, [release_stale()]) for fact in facts] == [None, 0]
