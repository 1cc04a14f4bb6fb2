"""Carry out a cleanup plan and measure it.

Only references are removed, never contents. Each step is on its own: a step that fails is reported and the rest goes on; an
interrupt stops after the step it falls into, and the outcome says which steps were done.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.interrupts import Interrupts
from nbguard.memory.cleanup.apply.kept_by_torch import FreedBytes, note_left_pools
from nbguard.memory.cleanup.apply.parking import unpark
from nbguard.memory.cleanup.apply.released_names import tell_released
from nbguard.memory.cleanup.apply.steps import STEPS, StepContext, park_storages
from nbguard.memory.cleanup.figures import holdings_of, way_out
from nbguard.memory.cleanup.plan.parking import Unparked
from nbguard.memory.cleanup.plan.plan import LEFT_SHOWN, Action, LeftHolder, Outcome, Plan, verdict
from nbguard.memory.core import advice
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import NOTICED, Facts, PoolId, Reading
from nbguard.memory.core.references.graph import nbytes_of, reach_of_roots, storages_of, without
from nbguard.memory.core.references.holders import idle_gradients, zero_gradients_of
from nbguard.memory.core.requests import left_pools
from nbguard.memory.scan.devices.counters import Counters
from nbguard.memory.scan.devices.cuda import (
    device_facts,
    lasting_error,
    nested_stats,
)
from nbguard.memory.scan.scan import Notebook, Scan, TimedScan, timed_scan

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Cleaned:
    """A cleanup that has been carried out."""

    outcome: Outcome
    after: TimedScan | None  # scan after the cleanup; None where the one before and the counters have told the outcome


def uncover() -> int:
    """Uncover stale memory that a scan cannot see: frozen objects, and the weights that autocast's cache keeps in C++.

    Return the bytes that this alone gave back, where the device's allocator counts them.
    """
    gc.unfreeze()
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return 0
    before = _counted("allocated_bytes") or 0
    torch.clear_autocast_cache()
    return before - (_counted("allocated_bytes") or 0)


def bring_back(names: Sequence[str]) -> Unparked:
    """Bring the parked memory of `names` back (of all, without names), while no other cleanup runs."""
    with Interrupts() as interrupts, alone():
        return unpark(names, lambda: interrupts.happened)


@contextmanager
def alone(patience: float = 0.0) -> Iterator[None]:
    """Keep others out, after so many seconds at most in which they may end.

    To be entered inside of `Interrupts`: one that came right after the lock was taken would keep it.
    """
    if not (_ONE_AT_A_TIME.acquire(timeout=patience) if patience else _ONE_AT_A_TIME.acquire(blocking=False)):
        raise NbguardError("another cleanup is running: wait for it to end, then try again")
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()


def apply(plan: Plan, notebook: Notebook, scanned: Scan, uncovered: int = 0) -> Cleaned:
    """Carry out `plan`, made from the scan `scanned` of `notebook`, and return the outcome, measured.

    `uncovered` bytes were given back before the scan.
    """
    with Interrupts() as interrupts, alone():
        outcome, after = _apply(plan, notebook, scanned, interrupts)
        return Cleaned(replace(outcome, before=outcome.before + uncovered, extra=outcome.extra + uncovered), after)


def _apply(plan: Plan, notebook: Notebook, scanned: Scan, interrupts: Interrupts) -> tuple[Outcome, TimedScan | None]:
    reserved_before, counters = _counted("reserved_bytes"), Counters()
    reading = counters.read()
    done: list[Action] = []
    undone: list[tuple[str, str]] = []
    freed = FreedBytes()
    for action in plan.actions:
        if interrupts.happened:
            undone.append((action.undone, "interrupted"))
            continue
        reason = _step(
            StepContext(
                action=action,
                notebook=notebook,
                tracker=scanned.tracker,
                promised=plan.storages,
                interrupts=interrupts,
                freed=freed,
            )
        )
        if reason:
            undone.append((action.undone, reason))
        else:
            done.append(action)
    if scanned.facts.tracked == "cuda" and any(action.kind in ("collect", "park") for action in done):  # it emptied the cache
        note_left_pools(_unkept_pools(plan, scanned.facts))
    tell_released(plan, done, scanned)
    expired = scanned.tracker.expired()
    after: TimedScan | None = None
    if not _may_have_changed(plan, done, expired, scanned.facts):
        after = _looked_at_once(scanned, notebook)
        analysis = after.analysis
    elif (
        done == [*plan.actions]
        and not notebook.is_running
        and _is_foreseen(plan, scanned.facts)
        and expired == plan.storages
        and _went_down(reading, counters.read(), nbytes_of(scanned.facts.graph, expired))
    ):
        analysis = foreseen(plan, scanned.facts)
    else:
        after = timed_scan(notebook)
        analysis = after.analysis
    outcome = _measure(plan, scanned.facts, expired, analysis)
    return replace(
        outcome,
        done=tuple(done),
        undone=tuple(undone),
        realised=outcome.realised + freed.device,
        before=outcome.before + freed.device,
        host=freed.host if plan.request.workers else None,
        reserved=_both(reserved_before, _counted("reserved_bytes")),
        interrupted=interrupts.happened,
    ), after


def _may_have_changed(plan: Plan, done: Sequence[Action], expired: set[int], facts: Facts) -> bool:
    """Say whether a cleanup needs a second scan. It does not if nothing was collected and no private pool may be free."""
    has_done = plan.request.hard or plan.request.workers or any(action.kind != "collect" for action in done)
    return bool(has_done or plan.promised or plan.at_least or expired or facts.changed or facts.pools or plan.doubtful)


_FORESEEN = frozenset({"del", "out", "error", "debugger", "leftovers", "cache", "collect"})
"""Kinds of steps after which the holders that are left are known beforehand, with all that is said of them."""


def _is_foreseen(plan: Plan, facts: Facts) -> bool:
    """Say whether the holders after a plan follow from the facts before it, if it frees its promise and no more."""
    names = {root.label for root in facts.graph.roots if root.kind == "name"}
    return not (plan.request.hard or plan.at_least or plan.doubtful or facts.changed or facts.pools or facts.unwalked) and all(
        action.kind in _FORESEEN
        and action.nbytes is not None
        and (action.kind != "del" or names.issuperset(action.names))  # a part of a name is told in its words: `list of 3`
        and (action.kind != "collect" or not action.refs)
        for action in plan.actions
    )


def _went_down(before: Reading | None, after: Reading | None, nbytes: int) -> bool:
    """Say whether the counters fell by at least so many bytes, so that nothing came instead."""
    if before is None or after is None:
        return False
    return after.grown_by(before) <= (0 if after.devices else NOTICED) - nbytes


def foreseen(plan: Plan, facts: Facts) -> Analysis:
    """Return the analysis after a plan that kept its promise to the byte, by the facts before it."""
    devices, unavailable = device_facts(facts.tracked)
    graph = without(facts.graph, plan.gone, plan.cut)
    return Analysis(replace(facts, graph=graph, devices=devices, unavailable=unavailable))


def _looked_at_once(scanned: Scan, notebook: Notebook) -> TimedScan:
    """Return the scan before a cleanup that changed nothing on the heap as the one after it: of the devices as they are now."""
    since, start = time.time(), time.perf_counter()
    devices, unavailable = device_facts(scanned.facts.tracked)
    return TimedScan(
        facts=replace(scanned.facts, devices=devices, unavailable=unavailable),
        tracker=scanned.tracker,
        since=since,
        seconds=time.perf_counter() - start,
        is_beside=notebook.is_running,
    )


def _unkept_pools(plan: Plan, facts: Facts) -> frozenset[PoolId]:
    """Return the private pools that nothing named keeps after a plan."""
    return frozenset(pool.pool for pool in facts.pools) - plan.pools | plan.doubtful | left_pools(facts)


def _step(step: StepContext) -> str:
    """Carry out one action; return why it could not be done, or an empty string."""
    try:
        if step.action.kind == "park":  # whatever half-moved means must not exist: it stops by itself, between storages
            return park_storages(step)
        with step.interrupts.allowed():
            STEPS[step.action.kind](step)
    except KeyboardInterrupt:
        step.interrupts.happened = True
        return "interrupted while it ran"
    except Exception as error:  # noqa: BLE001 - `del` runs the user's own code; whatever it raises is the answer
        text = error.args[0] if error.args and type(error.args[0]) is str else ""
        return f"{type(error).__name__}: {text}"
    return ""


def _measure(plan: Plan, facts: Facts, expired: set[int], after: Analysis) -> Outcome:
    """Return the outcome as far as the facts before and after tell; `expired` are the storages that are gone."""
    graph = facts.graph
    realised = nbytes_of(graph, expired & plan.storages)
    extra = nbytes_of(graph, expired - plan.storages)
    before = sum(storage.nbytes for storage in graph.storages)
    return Outcome(
        plan=plan,
        done=(),
        undone=(),
        realised=realised,
        extra=extra,
        before=before,
        after=before - realised - extra,
        survivors=_survivors(plan, facts, expired, after),
        left=_left(after),
        verdict=verdict(after, lasting_error()) if plan.request.hard else None,
    )


def _both(before: int | None, after: int | None) -> tuple[int, int] | None:
    return None if before is None or after is None else (before, after)


def _survivors(plan: Plan, facts: Facts, expired: set[int], after: Analysis) -> tuple[tuple[str, int], ...]:
    """Return (holder, bytes) of the promised storages that are still there: a plan that was right has none."""
    addresses = {(facts.graph.storages[n].device, facts.graph.storages[n].address) for n in plan.storages - expired}
    if not addresses:
        return ()
    graph = after.facts.graph
    left = {n for n, storage in enumerate(graph.storages) if (storage.device, storage.address) in addresses}
    survivors = []
    for holder, _ in after.once(holdings_of):
        kept = storages_of(graph, reach_of_roots(graph, holder.roots)) & left
        if kept:
            survivors.append((holder.path or holder.label, nbytes_of(graph, kept)))
    return tuple(survivors)


def _left(after: Analysis) -> tuple[LeftHolder, ...]:
    """Return the holders of the rest, the largest with their ways out; gradients, which are a part of one, if there is room."""
    rows = [holder for holder, _ in after.once(holdings_of)]
    ways = {id(row): way_out(after, row) for row in [row for row in rows if row.retained][:LEFT_SHOWN]}
    left = [
        LeftHolder(
            label=row.label,
            nbytes=row.retained,
            what="shared" if row.is_shared else row.what,
            advice=ways.get(id(row), advice.NONE),
        )
        for row in rows
    ]
    gradients = [
        LeftHolder(
            label=f"gradients of {label}, part of it",
            nbytes=nbytes,
            what="",
            advice=zero_gradients_of(after.facts, label, nbytes),
            is_part=True,
        )
        for label, nbytes in idle_gradients(after.facts)
    ]
    return (*left[: len(ways)], *gradients[: LEFT_SHOWN - len(ways)], *left[len(ways) :])


def _counted(counter: str) -> int | None:
    """Return a counter of the allocators (`reserved_bytes`), all devices together; None where CUDA is not in use."""
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return None
    return sum(int(stats[counter]["all"]["current"]) for stats in nested_stats(torch) if stats)
