"""Carry out a cleanup plan and measure it.

Only references are removed, never contents. Each step is on its own: what cannot be done is reported and the rest goes on;
an interrupt stops after the step it falls into, and the outcome says which steps were done.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nbguard.actions.interrupts import Interrupts
from nbguard.actions.registries import forget
from nbguard.actions.standins import StandIns
from nbguard.actions.tracebacks import release_objects, release_variables
from nbguard.core.facts import Facts
from nbguard.core.gradients import idle_gradients, zero_grad
from nbguard.core.ownership import holders, reach_of_roots, storages_of
from nbguard.core.plan import Action, Outcome, Plan
from nbguard.errors import NbguardError
from nbguard.probes.heap import Witness
from nbguard.probes.learners import LEFTOVERS
from nbguard.probes.look import Look, Notebook, look
from nbguard.probes.namespace import output_places
from nbguard.probes.tracebacks import error_parts, traced_frames

_ONE_AT_A_TIME = threading.Lock()
_PASSES = 5
"""Cycles behind what the collector cannot see through (an object array, a DataFrame) take one more pass for each of them."""


def uncover() -> int:
    """Undo what hides stale memory from a look: frozen objects, and the weights that autocast's cache keeps in C++.

    Return the bytes that this alone gave back, where the device's allocator counts them.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return 0
    before = _counted("memory_allocated") or 0
    torch.clear_autocast_cache()
    return before - (_counted("memory_allocated") or 0)


def apply(plan: Plan, notebook: Notebook, seen: Look, uncovered: int = 0) -> Outcome:
    """Carry out `plan`, made from what `seen` found in `notebook`, and return what it really gave back.

    `uncovered` bytes have been given back before the look.
    """
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise NbguardError("another cleanup is running: wait for it to end, then try again")
    try:
        outcome = _apply(plan, notebook, seen)
        return replace(outcome, before=outcome.before + uncovered, extra=outcome.extra + uncovered)
    finally:
        _ONE_AT_A_TIME.release()


def _apply(plan: Plan, notebook: Notebook, seen: Look) -> Outcome:
    reserved_before = _counted("memory_reserved")
    done: list[Action] = []
    undone: list[tuple[str, str]] = []
    with Interrupts() as interrupts:
        for action in plan.actions:
            if interrupts.happened:
                undone.append((action.label, "interrupted"))
                continue
            reason = _step(_Step(action, notebook, seen.witness, plan.storages), interrupts)
            if reason:
                undone.append((action.label, reason))
            else:
                done.append(action)
        return _measure(plan, notebook, seen, done, undone, reserved_before, interrupts.happened)


def _step(step: _Step, interrupts: Interrupts) -> str:
    """Carry out one action; return why it could not be done, or an empty string."""
    try:
        with interrupts.allowed():
            _STEPS[step.action.kind](step)
    except KeyboardInterrupt:
        interrupts.happened = True
        return "interrupted while it ran"
    except Exception as error:  # noqa: BLE001 - `del` runs the user's own code; whatever it raises is the answer
        text = error.args[0] if error.args and type(error.args[0]) is str else ""
        return f"{type(error).__name__}: {text}"
    return ""


def _measure(
    plan: Plan,
    notebook: Notebook,
    seen: Look,
    done: list[Action],
    undone: list[tuple[str, str]],
    reserved: int | None,
    interrupted: bool,
) -> Outcome:
    storages = seen.facts.graph.storages
    expired = seen.witness.expired()
    realised = sum(storages[n].nbytes for n in expired & plan.storages)
    extra = sum(storages[n].nbytes for n in expired - plan.storages)
    after = look(notebook).facts
    before = sum(storage.nbytes for storage in storages)
    reserved_after = _counted("memory_reserved")
    return Outcome(
        plan,
        tuple(done),
        tuple(undone),
        realised,
        extra,
        before,
        before - realised - extra,
        None if reserved is None or reserved_after is None else (reserved, reserved_after),
        _survivors(plan, seen.facts, expired, after),
        _left(after),
        interrupted,
    )


def _survivors(plan: Plan, facts: Facts, expired: set[int], after: Facts) -> tuple[tuple[str, int], ...]:
    """Return (holder, bytes) of what was promised and is still there: an honest plan has none."""
    addresses = {(facts.graph.storages[n].device, facts.graph.storages[n].address) for n in plan.storages - expired}
    if not addresses:
        return ()
    left = {n for n, storage in enumerate(after.graph.storages) if (storage.device, storage.address) in addresses}
    found = []
    for holder in holders(after.graph):
        kept = storages_of(after.graph, reach_of_roots(after.graph, holder.roots)) & left
        if kept:
            found.append((holder.path or holder.label, sum(after.graph.storages[n].nbytes for n in kept)))
    return tuple(found)


def _left(after: Facts) -> tuple[tuple[str, int, str], ...]:
    rows = [(holder.label, holder.retained, holder.what) for holder in holders(after.graph) if not holder.is_shared]
    gradients = [(f"gradients of {label}, part of it", nbytes, zero_grad(label)) for label, nbytes in idle_gradients(after)]
    return (*rows, *gradients)


def _counted(counter: str) -> int | None:
    """Return a counter of torch.cuda (`memory_reserved`), all devices together; None where CUDA is not in use."""
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return None
    return sum(int(getattr(torch.cuda, counter)(index)) for index in range(torch.cuda.device_count()))


@dataclass(frozen=True)
class _Step:
    """What a step needs: its action, the notebook, weak references to what the plan has seen, and what it promised."""

    action: Action
    notebook: Notebook
    witness: Witness
    promised: frozenset[int]


def _delete(step: _Step) -> None:
    (text,) = step.action.names
    code = compile(f"del {text}", "<%reset_gpu>", "exec")
    exec(code, {}, step.notebook.namespace)  # noqa: S102 - `del` as the user would; not as globals: exec adds to those


def _forget_output(step: _Step) -> None:
    """Take a displayed object out of every place where IPython keeps it; other results stay where they are."""
    refs = set(step.action.refs)
    for number in [number for number, value in step.notebook.out.items() if id(value) in refs]:
        aliases = [
            (space, name)
            for space, name in output_places(step.notebook.shell)
            if name == f"_{number}" and id(space[name]) in refs
        ]
        del step.notebook.out[number]
        for space, name in aliases:
            del space[name]
    empty = {"result": None}
    for space, name in [(space, name) for space, name in output_places(step.notebook.shell) if id(space[name]) in refs]:
        space[name] = empty.get(name, "")


def _release_error(step: _Step) -> None:
    pairs = set(zip(step.action.refs[::2], step.action.refs[1::2], strict=True))
    found = error_parts(step.notebook.shell)
    stand_ins = StandIns()
    release_variables(found.frames, pairs, stand_ins)
    release_objects(found.errors, pairs, stand_ins)


def _forget_copy(step: _Step) -> None:
    forget(step.notebook.shell, step.action.names[0], set(step.action.refs))


def _forget_debugger(_: _Step) -> None:
    for frame in traced_frames():
        frame.f_trace = None


def _clear_leftovers(step: _Step) -> None:
    for ref in step.action.refs:
        known = step.witness.objects.get(ref)
        learner = None if known is None else known()
        if learner is not None:
            for name in step.action.names:
                if name in LEFTOVERS:
                    learner.__dict__[name] = LEFTOVERS[name]
                else:  # an attribute of one of its callbacks
                    callback, _, attribute = name.partition(".")
                    learner.__dict__[callback].__dict__.pop(attribute, None)


def _collect(step: _Step) -> None:
    debug = gc.get_debug()
    gc.set_debug(debug & ~gc.DEBUG_SAVEALL)  # else what is collected would be kept in gc.garbage
    try:
        for _ in range(_PASSES):
            gc.collect()
            if step.promised <= step.witness.expired():
                break
    finally:
        gc.set_debug(debug)
    _empty_cache()


def _empty_cache() -> None:
    """Give the allocator's free segments back to the device, on whichever accelerator is in use."""
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif getattr(torch, "accelerator", None) is not None and torch.accelerator.is_available():
        module: Any = getattr(torch, str(torch.accelerator.current_accelerator().type), None)
        if hasattr(module, "empty_cache"):
            module.empty_cache()


_STEPS: dict[str, Callable[[_Step], None]] = {
    "del": _delete,
    "out": _forget_output,
    "error": _release_error,
    "debugger": _forget_debugger,
    "leftovers": _clear_leftovers,
    "cache": _forget_copy,
    "collect": _collect,
}
