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
from nbguard.memory.cleanup.apply.loaders import FreedBytes, note_left_pools
from nbguard.memory.cleanup.apply.parking import unpark
from nbguard.memory.cleanup.apply.released_names import Interrupts, tell_released
from nbguard.memory.cleanup.apply.steps import STEPS, StepContext, park_storages
from nbguard.memory.cleanup.figures import holdings_of, way_out
from nbguard.memory.cleanup.plan.parking import Unparked
from nbguard.memory.cleanup.plan.plan import LEFT_SHOWN, Action, LeftHolder, Outcome, Plan, verdict
from nbguard.memory.core import advice
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, PoolId
from nbguard.memory.core.oom_facts import OomNote
from nbguard.memory.core.references.graph import nbytes_of, reach_of_roots, storages_of
from nbguard.memory.core.references.holders import idle_gradients, zero_gradients_of
from nbguard.memory.core.segments.requests import left_pools
from nbguard.memory.scan.devices.cuda import (
    allocator_settings,
    device_facts,
    lasting_error,
    memory_fraction,
    nested_stats,
    segments_by_device,
)
from nbguard.memory.scan.devices.reserve import device_counters
from nbguard.memory.scan.oom.chain import NOTES, cell_now, with_free_blocks
from nbguard.memory.scan.oom.failed_runs import counts_of
from nbguard.memory.scan.scan import Notebook, Scan, TimedScan, timed_scan

# --- An observer of running out of memory, which notes numbers at the moment of the failure, before any frame is unwound.
#
# torch calls its observers with the allocator's lock released and offers no way to take one off: ours is attached once
# per
# process, when CUDA is first used, and can be switched off. It keeps numbers only.


_ATTACH = "_cuda_attach_out_of_memory_observer"


class _Observer:
    """The state of the observer in this process."""

    def __init__(self) -> None:
        self.is_attached = False  # for good: torch has no way to take an observer off
        self.is_on = False
        self.inside: set[int] = set()  # threads where it notes a failure now


_OBSERVER = _Observer()


def attach() -> bool:
    """Watch for failures from now on, as soon as CUDA is in use; say whether that could be arranged.

    May be called at any time, and often. Opens no context: where CUDA is not initialised yet, torch calls back when it is.
    Without torch, or with one that has no CUDA, nothing is done.
    """
    torch: Any = sys.modules.get("torch")
    try:
        if not hasattr(torch._C, _ATTACH):
            return False
        _OBSERVER.is_on = True
        if not _OBSERVER.is_attached:
            _OBSERVER.is_attached = True
            torch.cuda._lazy_call(_attach_now)
    except Exception:  # noqa: BLE001 - no torch, half an import, another torch: there is no observer then, and a card without
        return False
    return True


def detach() -> None:
    """Note nothing from now on, and forget all notes."""
    _OBSERVER.is_on = False
    NOTES.clear()


def _attach_now() -> None:
    try:
        getattr(sys.modules["torch"]._C, _ATTACH)(_observe)
    except Exception:  # noqa: BLE001 - this runs while torch initialises CUDA, which it must not disturb
        _OBSERVER.is_on = False


def _observe(device: int, requested: int, allowed: int, free: int, *_: int) -> None:
    """Note a failure. Called by torch, in whichever thread asked for memory; an interrupt that falls in here is the user's."""
    thread = threading.get_ident()
    if not _OBSERVER.is_on or thread in _OBSERVER.inside:
        return
    _OBSERVER.inside.add(thread)
    try:
        NOTES.append(_note(device, requested, allowed, free))
    except Exception:  # noqa: BLE001 - what is raised in here would take the place of torch's own error
        return
    finally:
        _OBSERVER.inside.discard(thread)


def _note(device: int, requested: int, allowed: int, free: int) -> OomNote:
    """Return the state of `device`. `allowed` is its size or, with a memory fraction, that part of it."""
    torch: Any = sys.modules["torch"]
    stats = device_counters(device)
    allocated, reserved = (stats.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
    total = int(torch.cuda.get_device_properties(device).total_memory)
    fraction = memory_fraction(device)
    is_limited = allowed < 0.98 * total if fraction is None else fraction < 1
    blocks = sum(stats.get(name, {}).get("all", {}).get("current", 0) for name in ("active", "inactive_split"))
    note = OomNote(
        device=f"cuda:{device}",
        requested=requested,
        total=total,
        free=free,
        limit=allowed if is_limited else None,
        allocated=allocated.get("current", 0),
        reserved=reserved.get("current", 0),
        peak_allocated=allocated.get("peak", 0),
        peak_reserved=reserved.get("peak", 0),
        settings=allocator_settings(),
        cell=cell_now(),
        time=time.time(),
        counts=counts_of(stats),
    )
    return with_free_blocks(note, blocks, lambda: segments_by_device().get(device, ()))


_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Cleaned:
    """A cleanup that has been carried out."""

    outcome: Outcome
    after: TimedScan  # scan after the cleanup, which the outcome is measured by


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


def _apply(plan: Plan, notebook: Notebook, scanned: Scan, interrupts: Interrupts) -> tuple[Outcome, TimedScan]:
    reserved_before = _counted("reserved_bytes")
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
    after = (
        timed_scan(notebook) if _may_have_changed(plan, done, expired, scanned.facts) else _looked_at_once(scanned, notebook)
    )
    outcome = _measure(plan, scanned.facts, expired, after.analysis)
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
