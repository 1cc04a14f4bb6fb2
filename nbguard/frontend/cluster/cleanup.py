"""A cleanup of all engines of a cluster, where first each says its plan, then those that have one carry it out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from nbguard.frontend.cluster.analysis.cleanup import EngineCleanup, EnginesCleanup
from nbguard.frontend.cluster.engine import plan_facts, release_facts
from nbguard.frontend.cluster.inquiry import ask, client_of

_TO_ACT = 60.0  # seconds that an engine has to carry out a plan: to end workers takes time


def plan_engines(
    client: Any, targets: Collection[str] = (), choices: Mapping[str, Any] | None = None, timeout: float = 10.0
) -> EnginesCleanup:
    """Return the plan of each engine of a cluster, as `nbguard.plan` makes it there; nothing is touched.

    Args:
        client: an `ipyparallel.Client`, or a view of one.
        targets: names to free in each engine; all stale memory if empty.
        choices: other arguments of `nbguard.plan`.
        timeout: seconds that the engines have to answer.

    Raises:
        NbguardError: `client` is none, or it has no engines.
    """
    client = client_of(client)
    answers = ask(client, client.ids, plan_facts, tuple(targets), dict(choices or {}), timeout=timeout)
    rows = [
        EngineCleanup(engine=engine, answer=answer, promised=facts.get("promised", 0), steps=tuple(facts.get("steps", ())))
        for engine, (answer, facts) in sorted(answers.items())
    ]
    return EnginesCleanup(engines=tuple(rows), is_done=False)


def release_engines(
    client: Any, plans: EnginesCleanup, targets: Collection[str] = (), choices: Mapping[str, Any] | None = None
) -> EnginesCleanup:
    """Have the engines that have said a plan carry it out; the others are left alone, as is one that is busy by then.

    Args:
        client: an `ipyparallel.Client`, or a view of one.
        plans: as returned by `plan_engines`.
        targets: as given to it.
        choices: likewise.

    Raises:
        NbguardError: `client` is none, or it has no engines.
    """
    client = client_of(client)
    ready = [row.engine for row in plans.engines if row.answer.kind == "answered" and row.engine in client.ids]
    answers = ask(client, ready, release_facts, tuple(targets), dict(choices or {}), timeout=_TO_ACT)
    return EnginesCleanup(
        engines=tuple(_done(row, *answers.get(row.engine, (row.answer, {}))) for row in plans.engines), is_done=True
    )


def _done(row: EngineCleanup, answer: Any, facts: Mapping[str, Any]) -> EngineCleanup:
    if answer.kind != "answered":
        return replace(row, answer=answer, promised=0, steps=())
    return replace(row, promised=facts["promised"], freed=facts["freed"], left=facts["left"], steps=tuple(facts["steps"]))
