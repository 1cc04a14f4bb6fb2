"""nbguard from Python, with the same functions as the magics for scripts, notebooks and ranks. Functions return frozen data."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError, TargetError
from nbguard.memory.cleanup.apply.apply import Cleaned, apply, bring_back, uncover
from nbguard.memory.cleanup.apply.steps import end_orphans, find_zombies
from nbguard.memory.cleanup.figures import figure_of
from nbguard.memory.cleanup.plan.parking import Unparked, plan_parking
from nbguard.memory.cleanup.plan.plan import Outcome, Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.cleanup.plan.promises import with_release
from nbguard.memory.core import advice
from nbguard.memory.core.facts import Facts, Graph
from nbguard.memory.core.processes import Zombies
from nbguard.memory.core.references.explain import Why, explain, explain_path, explain_unheld, is_explained
from nbguard.memory.core.references.holders import unheld
from nbguard.memory.out_of_memory.card import OomCard, build_card
from nbguard.memory.reports.memory_map import MemoryMap, build_map
from nbguard.memory.reports.report import Report, build_report
from nbguard.memory.room.make_room import make_room_in
from nbguard.memory.room.plan import MadeRoom
from nbguard.memory.scan.heap.kinds import Kinds
from nbguard.memory.scan.heap.walk import Unread
from nbguard.memory.scan.learners import describe
from nbguard.memory.scan.parked import fixed_storages
from nbguard.memory.scan.pause import keep_garbage
from nbguard.memory.scan.scan import Notebook, Scan, scan
from nbguard.memory.scan.shown_targets import targets_of, with_hooks
from nbguard.memory.scan.targets import (
    is_computed,
    lookup,
    output_label,
    parse_target,
    refuse_unknown_attribute,
    resolve_targets,
)
from nbguard.units import parse_bytes

if TYPE_CHECKING:
    from nbguard.memory.room.spill import AirbagState
    from nbguard.memory.room.turns import BudgetState


def report(namespace: dict[str, Any] | None = None) -> Report:
    """Return the report on the device memory of this process: its parts and holders.

    Args:
        namespace: the names to report by; the notebook's, or the script's `__main__`, if not given.

    Raises:
        NoTorchError: PyTorch is not imported yet.
    """
    with keep_garbage():  # with many holders a collection of all objects takes a fifth of the report's time
        return build_report(scan(Notebook.current(namespace)).analysis)


def oom(namespace: dict[str, Any] | None = None) -> OomCard | None:
    """Return the card on the last error, or on the one being handled; None if it did not run out of memory.

    Raises:
        NoTorchError: PyTorch is not imported yet.
    """
    return build_card(scan(Notebook.current(namespace)).analysis)


def memory_map(request: int | str | None = None, namespace: dict[str, Any] | None = None) -> MemoryMap:
    """Return the map of the device memory of this process: segments and blocks, their holders, and pins of free memory.

    Args:
        request: bytes, or a size such as `2GiB`: also find the cheapest way to a request of so much in one piece.
        namespace: as in `report`.

    Raises:
        NbguardError: `request` is no size.
        NoTorchError: PyTorch is not imported yet.
    """
    nbytes = request_bytes(request)
    return build_map(scan(Notebook.current(namespace)).analysis, nbytes)


def request_bytes(size: int | str | None) -> int | None:
    """Return a size in bytes; raise NbguardError if it is none, or not above 0."""
    try:
        nbytes = parse_bytes(size) if isinstance(size, str) else size
    except ValueError as error:
        raise NbguardError(str(error)) from None
    if nbytes is not None and nbytes <= 0:
        raise NbguardError(f"a request of {nbytes} bytes is not possible; write it as 2GiB or 512MiB")
    return nbytes


def why(name: str, namespace: dict[str, Any] | None = None) -> Why:
    """Return the reference paths that keep `name` (whatever `del` accepts, or `Out[3]`), or the memory behind it, alive.

    Raises:
        TargetError: there is no such thing, or it leads to no device memory.
        NoTorchError: PyTorch is not imported yet.
    """
    return why_in(Notebook.current(namespace), name)


def why_in(notebook: Notebook, name: str) -> Why:
    """Return the same as `why`, for a notebook that is at hand already."""
    try:
        target = parse_target(name)
        label = output_label(target, notebook.out)
        value = notebook.out[int(label[4:-1])] if label else lookup(target, notebook.namespace)
    except TargetError:
        facts = scan(notebook).facts if "torch" in sys.modules else None
        if facts is not None and (why_path := _why_shown(facts, name)) is not None:
            return with_release(facts, why_path)
        raise
    ref, what = id(value), describe(value, Kinds(), Unread())
    is_computed_value = is_computed(value)
    del value
    analysis = scan(notebook).analysis
    facts = analysis.facts
    if is_computed_value or all(node.ref != ref for node in facts.graph.nodes):
        why_path = explain_path(facts, name)
        if why_path is not None:
            return with_release(facts, why_path)
    if is_computed_value and isinstance(target, ast.Attribute):
        refuse_unknown_attribute(target, lookup(target.value, notebook.namespace), name)
    if is_computed_value:
        raise _only_as_a_whole(target, name)
    explained = explain(facts, name, _node_of(facts.graph, ref, name, facts.tracked), what)
    figure = figure_of(analysis, resolve_targets((name,), notebook.namespace, notebook.out, notebook.hidden))
    explained = replace(explained, frees=figure.frees, together=figure.together)
    if figure.together.command:
        return replace(explained, release=(figure.together,), released=figure.together.frees)
    return with_release(facts, explained)


def _only_as_a_whole(target: ast.expr, name: str) -> TargetError:
    """Return the error for a part that an object's own code makes when it is asked for, such as a column of a table."""
    whole = next(each.id for each in ast.walk(target) if isinstance(each, ast.Name))
    made = f"{name} is made when it is asked for, which runs code; "
    return TargetError(made + advice.why(whole).command + " is about the whole")


def _why_shown(facts: Facts, text: str) -> Why | None:
    """Return why something is alive that only a report shows: a path, or the row of memory that no object of Python's holds."""
    rows = (row for device in facts.devices for row in unheld(facts, device))
    row = next((row for row in rows if row.label == text and is_explained(row)), None)
    return explain_path(facts, text) if row is None else explain_unheld(row)


def _node_of(graph: Graph, ref: int, name: str, tracked: str) -> int:
    for number, node in enumerate(graph.nodes):
        if node.ref == ref:
            return number
    if graph.rest is not None:
        raise TargetError(
            f"{name} was not scanned, as part of a long autograd graph, or of very many tensors (see "
            + advice.REPORT.command
            + ")"
        )
    raise TargetError(
        f"{name} leads to no tensor, model or loader on {tracked} (" + advice.REPORT.command + " lists names that do)"
    )


def plan(
    *targets: str,
    keep: Iterable[str] = (),
    everything: bool = False,
    errors: bool = False,
    compiled: bool = False,
    caches: bool = False,
    workers: bool = False,
    hard: bool = False,
    namespace: dict[str, Any] | None = None,
) -> Plan:
    """Return the plan of `release` with the same arguments, with the bytes it promises. Touches nothing."""
    notebook = Notebook.current(namespace)
    consent = {"errors": errors, "compiled": compiled, "caches": caches, "workers": workers, "hard": hard}
    return plan_in(notebook, *targets, keep=keep, everything=everything, **consent)[0]


def plan_in(
    notebook: Notebook, *targets: str, keep: Iterable[str] = (), everything: bool = False, **consent: bool
) -> tuple[Plan, Scan]:
    """Return the same as `plan`, for a notebook that is at hand already, and the scan that it was made by."""
    return _plan(notebook, _request(notebook, targets, keep, everything, **consent))


def release(
    *targets: str,
    keep: Iterable[str] = (),
    everything: bool = False,
    errors: bool = False,
    compiled: bool = False,
    caches: bool = False,
    workers: bool = False,
    hard: bool = False,
    orphans: bool = False,
    namespace: dict[str, Any] | None = None,
) -> Outcome:
    """Free stale memory, or just `targets`, and return the outcome, measured.

    Args:
        targets: names to free, each as one would write it after `del`; they are deleted. All stale memory if None.
        keep: names (with `everything`) or displayed results (`Out[3]`) that must stay.
        everything: also free every name that leads to device memory.
        errors: also variables in the frames of exceptions that a variable, a future or a task of yours keeps; these stay.
        compiled: also code that torch.compile compiled (`torch._dynamo.reset()`): live models compile again at their next call.
        caches: also empty caches of functions (`functools.lru_cache`) that alone keep memory alive; with targets, those that
            lead to these. The functions compute again at their next call; it cannot be undone.
        workers: also end the worker processes of DataLoaders that no running code uses (with targets, those that they lead to),
            and give unused pinned host memory back.
        hard: also clear memory that libraries make again, list the processes on the GPUs, and say whether a restart would help.
            Implies `workers`.
        orphans: with `hard`, end processes that a dead program left on the GPUs, as `end_zombies` does.
        namespace: as in `report`.

    Raises:
        TargetError: a target does not exist; nothing was touched.
        NoTorchError: PyTorch is not imported yet.
    """
    notebook = Notebook.current(namespace)
    consent = {"errors": errors, "compiled": compiled, "caches": caches, "workers": workers, "hard": hard}
    request = _request(notebook, targets, keep, everything, **consent)
    uncovered = uncover()
    planned, scanned = _plan(notebook, request)
    outcome = apply(planned, notebook, scanned, uncovered).outcome
    return replace(outcome, zombies=_zombies_too(orphans)) if hard else outcome


def park(*names: str, dry_run: bool = False, namespace: dict[str, Any] | None = None) -> Outcome | Plan:
    """Move the tensors of `names` out of the device's memory, in place: every name stays valid, `unpark` brings them back.

    They go to host memory; on a machine without an accelerator to a file. Tensors that a Learner needs which is not named stay.
    Calling a parked model raises ParkedError.

    Args:
        names: each as one would write it after `del`: a Learner, a model, a list of batches.
        dry_run: return the plan and touch nothing.
        namespace: as in `report`.

    Raises:
        TargetError: a name does not exist, leads to nothing that could be parked, or is in use by code that runs now.
        NoTorchError: PyTorch is not imported yet.
    """
    notebook = Notebook.current(namespace)
    targets = resolve_targets(names, notebook.namespace, notebook.out, notebook.hidden)
    scanned = scan(notebook, tensors=True)
    planned = plan_parking(scanned.facts, targets, fixed_storages(scanned.tracker))
    return planned if dry_run else apply(planned, notebook, scanned).outcome


def unpark(*names: str) -> Unparked:
    """Bring back the tensors parked under `names`, bit by bit as they were; without names, all that are parked.

    Raises:
        TargetError: nothing is parked under one of the names.
        NbguardError: the device has no room for it; nothing was moved.
    """
    return bring_back(names)


def make_room(
    size: int | str, *, device: str | None = None, dry_run: bool = False, namespace: dict[str, Any] | None = None
) -> MadeRoom:
    """Make room for a request in one piece by moving the cheapest live tensors to host memory and back.

    They are the same tensors afterwards, with their views, versions, gradients and hooks; their addresses are others. A model
    of the allocator proves beforehand that the request and all of them fit. Otherwise nothing moves, and the result says why.
    On a simulated device only its model moves them.
    The device is waited for first. Nothing is moved that a CUDA graph, CuPy, numba or a DLPack export may know by its address.

    Args:
        size: bytes, or a size such as `256MiB`.
        device: `cuda:1`, or `1`; the current device if not given.
        dry_run: return the plan and touch nothing.
        namespace: as in `report`; it serves to name what moves.

    Raises:
        NbguardError: `size` is no size; there is no such CUDA device in use; this is not the main thread; or the host has no
            room for what would move. Nothing was touched.
        NoTorchError: PyTorch is not imported yet.
    """
    nbytes = request_bytes(size)
    if nbytes is None:
        raise NbguardError("give the size of the request, as in nbguard.make_room('256MiB')")
    return make_room_in(Notebook.current(namespace), nbytes, device, dry_run=dry_run)


def release_error(namespace: dict[str, Any] | None = None) -> Outcome | None:
    """Free the memory that only the last error holds, and the leftovers of its fit on its Learner; no other stale memory.

    Return None, with nothing touched, if there is no such memory, or while a fit runs (in another thread).
    """
    notebook = Notebook.current(namespace)
    cleaned = release_error_in(notebook, scan(notebook))
    return None if cleaned is None else cleaned.outcome


def release_error_in(notebook: Notebook, scanned: Scan) -> Cleaned | None:
    """Do the same as `release_error`, by a scan that is at hand already, and return the scan after it, too."""
    planned = plan_cleanup(scanned.facts, Request(only_error=True))
    held = any(action.nbytes for action in planned.actions if action.kind != "collect")
    if not held or any(learner.is_running for learner in scanned.facts.learners):
        return None
    return apply(planned, notebook, scanned)


def _zombies_too(orphans: bool) -> Zombies:
    """Return the result of `zombies` or `end_zombies`; an interrupt must not cost the report on the cleanup before."""
    try:
        return end_zombies() if orphans else zombies()
    except KeyboardInterrupt:
        return Zombies(unavailable="interrupted before the processes on the GPUs were listed", interrupted=True)


def airbag(size: int | str | None = None, namespace: dict[str, Any] | None = None) -> AirbagState:
    """Set host memory aside for allocations that the current CUDA device has no room for, where PyTorch would raise an error.

    Kernels are slower on such memory, and give the same bits. After each cell, and after steps of an optimizer, it
    is moved to the device again as far as there is room. The reserve serves the default stream, and no capture of a CUDA graph.
    Making it and giving it back resets the allocator's peaks. On a simulated device its model falls back.

    Args:
        size: bytes, or a size such as `4GiB`; `off` gives the memory back. Without, nothing changes.
        namespace: as in `report`.

    Returns:
        The state of the airbag.

    Raises:
        NbguardError: `size` is no size, it cannot be done here, or `off` while tensors lie in it that have no room elsewhere.
        NoTorchError: PyTorch is not imported yet.
    """
    from nbguard.memory.room.spill_watch import switch

    return switch(size, Notebook.current(namespace))


def budget(size: int | str | None = None, namespace: dict[str, Any] | None = None) -> BudgetState:
    """Let models that do not fit the current device together take turns: their bytes there stay within a budget.

    A model counts with its gradients and the state of its optimizer. A parked one comes back when it is called, moved or
    asked for its parameters, and the models that were used longest ago are parked for it. No model is parked that runs, whose
    autograd graph is alive, whose gradients wait for a step, whose code is compiled, or that `%reset_gpu --park` would refuse.

    Args:
        size: bytes, or a size such as `14GiB`; `off` parks no more, and parked models still come back when they are used.
            Without, nothing changes.
        namespace: as in `report`; its models take turns.

    Returns:
        The budget and its models.

    Raises:
        NbguardError: `size` is no size.
        NoTorchError: PyTorch is not imported yet.
    """
    from nbguard.memory.room.garage import switch

    return switch(size, namespace)


def zombies(*pids: int) -> Zombies:
    """Return every other process on the GPUs (or those with these pids), diagnosed: an orphan that may be ended, or why not."""
    return find_zombies(pids)


def end_zombies(*pids: int) -> Zombies:
    """End the orphans that `zombies` with the same arguments lists, and return the outcome of each.

    Only processes of this user whose parent died and that make no sense without it; each is checked once more, by pid and
    start, before it gets its signal: SIGTERM, and SIGKILL if it does not listen.
    """
    return end_orphans(find_zombies(pids))


def _request(notebook: Notebook, targets: Iterable[str], keep: Iterable[str], everything: bool, **consent: bool) -> Request:
    """Return the request, each name looked up; raise TargetError for one that does not exist."""
    keep = tuple(keep)
    for name in keep:
        if not output_label(parse_target(name), notebook.out):
            lookup(ast.parse(name, mode="eval").body, notebook.namespace)
    resolved = targets_of(targets, notebook)
    if consent.get("hard"):
        consent["workers"] = True
    return Request(targets=resolved, keep=keep, everything=everything, **consent)


def _plan(notebook: Notebook, request: Request) -> tuple[Plan, Scan]:
    scanned = scan(notebook)
    request = replace(request, targets=with_hooks(request.targets, notebook, scanned.tracker))
    return plan_cleanup(scanned.facts, request), scanned
